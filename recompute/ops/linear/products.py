"""Matrix products."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from ...language.factors import SUM, aligned, factor
from ...language.op import Cost, Op, OperatorBuilder
from ...language.types import Array, Operands, TensorType, Value
from .half_products import HalfProduct


def product_shape(op: Op, a: tuple[int, ...], b: tuple[int, ...], types: tuple) -> tuple[int, ...]:
    """The shape of a matrix product with NumPy's rules for vectors and broadcast batches."""
    left, right = (1, *a) if len(a) == 1 else a, (*b, 1) if len(b) == 1 else b
    if len(left) < 2 or len(right) < 2 or left[-1] != right[-2]:
        raise op.fail("inner dimensions differ", *types)
    try:
        batch = np.broadcast_shapes(left[:-2], right[:-2])
    except ValueError:
        raise op.fail("batch dimensions do not broadcast", *types) from None
    return (*batch, *(left[-2:-1] if len(a) > 1 else ()), *(right[-1:] if len(b) > 1 else ()))


class MatMul(Op):
    """a @ b over the last two axes, batches broadcast; `transA`/`transB` swap an operand's last two axes first.

    With both flags 0 it is ONNX's MatMul, else ONNX Transpose and MatMul.
    """

    linear = ((0,), (1,))
    autocast = "low"
    transA: int = 0
    transB: int = 0
    weights = (0, 1)

    def infer(self, a, b):
        if a.dtype != b.dtype:
            raise self.fail("element types differ", a, b)
        left = (*a.shape[:-2], a.shape[-1], a.shape[-2]) if self.transA and a.ndim > 1 else a.shape
        right = (*b.shape[:-2], b.shape[-1], b.shape[-2]) if self.transB and b.ndim > 1 else b.shape
        return (a.with_shape(product_shape(self, left, right, (a, b))),)

    def axis_factors(self, ins, outs):
        """Rows of a, columns of b, batches; the inner dimension is summed over."""
        a, b, y = ins[0], ins[1], outs[0]
        rank = max(a.ndim, b.ndim, 2)
        swap = [(a.ndim - 1, a.ndim - 2) if self.transA else (a.ndim - 2, a.ndim - 1),
                (b.ndim - 1, b.ndim - 2) if self.transB else (b.ndim - 2, b.ndim - 1)]  # fmt: skip
        (row, left), (right, column) = [s if t.ndim > 1 else (None, 0) for s, t in zip(swap, ins, strict=True)]
        if b.ndim == 1:
            right, column = 0, None
        factors = [factor(a.shape[left], [left, right], [SUM])]
        if column is not None:
            factors.append(factor(b.shape[column], [None, column], [y.ndim - 1]))
        if row is not None:
            factors.append(factor(a.shape[row], [row], [y.ndim - 1 - (column is not None)]))
        for i in range(rank - 2):
            at = [k if k >= 0 and t.shape[k] == y.shape[i] else None for t in ins for k in (i - rank + t.ndim,)]
            factors.append(factor(y.shape[i], at, [i]))
        return factors

    def compute(self, ins, outs, scratch):
        a, b = ins
        if scratch:
            left, right = self._half(a.shape, b.shape)
            a, b = a.reshape(left), b.reshape(right)
        a = a.swapaxes(-1, -2) if self.transA and a.ndim > 1 else a
        b = b.swapaxes(-1, -2) if self.transB and b.ndim > 1 else b
        if scratch:
            HalfProduct.of(a.shape, b.shape).run(a, b, outs[0], scratch)
        else:
            np.matmul(a, b, out=outs[0])

    def scratch(self, ins, outs):
        """For 16-bit floats tiles in float32."""
        a, b = ins
        if a.dtype not in ("f16", "bf16"):
            return ()
        left, right = self._half(a.shape, b.shape)
        left = (*left[:-2], left[-1], left[-2]) if self.transA and a.ndim > 1 else left
        right = (*right[:-2], right[-1], right[-2]) if self.transB and b.ndim > 1 else right
        return HalfProduct.of(left, right).scratch()

    def _half(self, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the factors as matrices; one matrix for all batches makes one product of all rows."""
        a = (1, *a) if len(a) == 1 else a
        b = (*b, 1) if len(b) == 1 else b
        return ((math.prod(a[:-1]), a[-1]) if len(b) == 2 and not self.transA else a), b

    def cost(self, ins, outs):
        a = ins[0]
        inner = a.shape[-2] if self.transA and a.ndim > 1 else a.shape[-1]
        return Cost(2 * outs[0].size * inner, super().cost(ins, outs).bytes)

    def gradient(self, b, ins, outs, grads):
        """da = dy bᵀ, db = aᵀ dy, with the flags moved accordingly."""
        x, y = ins
        dy = grads[0]
        if x.ndim == 1 or y.ndim == 1:
            return self._vector_gradient(b, x, y, dy)
        if y.ndim == 2 and x.ndim > 2 and not self.transA:
            # one weight for all batches: fold them into the rows, as one big product
            rows = math.prod(x.shape[:-1])
            x2, dy2 = b.Reshape(x, shape=(rows, x.shape[-1])), b.Reshape(dy, shape=(rows, dy.shape[-1]))
            dx2, dw = MatMul(0, self.transB)._matrix_gradient(b, x2, y, dy2)
            return [b.Reshape(dx2, shape=x.shape), dw]
        dx, dw = self._matrix_gradient(b, x, y, dy)
        return [b.sum_to(dx, x.shape), b.sum_to(dw, y.shape)]

    def _matrix_gradient(self, b: OperatorBuilder, x: Value, y: Value, dy: Value) -> tuple[Value, Value]:
        if self.transA:
            dx = b.MatMul(y, dy, transA=self.transB, transB=1)
        else:
            dx = b.MatMul(dy, y, transB=0 if self.transB else 1)
        if self.transB:
            dw = b.MatMul(dy, x, transA=1, transB=self.transA)
        else:
            dw = b.MatMul(x, dy, transA=0 if self.transA else 1)
        return dx, dw

    def _vector_gradient(self, b: OperatorBuilder, x: Value, y: Value, dy: Value) -> list[Value]:
        left = b.Reshape(x, shape=(1, x.shape[0])) if x.ndim == 1 else x
        right = b.Reshape(y, shape=(y.shape[0], 1)) if y.ndim == 1 else y
        op = MatMul(self.transA if x.ndim > 1 else 0, self.transB if y.ndim > 1 else 0)
        full = op.infer(left.type, right.type)[0]
        dx, dw = op._matrix_gradient(b, left, right, b.Reshape(dy, shape=full.shape))
        return [b.Reshape(b.sum_to(dx, left.shape), shape=x.shape), b.Reshape(b.sum_to(dw, right.shape), shape=y.shape)]

    def export(self, g, ins, outs):
        """Transpose, where a flag asks for it, and MatMul."""
        names = list(ins)
        for i, flag in enumerate((self.transA, self.transB)):
            ndim = len(g.shape(ins[i]))
            if flag and ndim > 1:
                perm = [*range(ndim - 2), ndim - 1, ndim - 2]
                names[i] = g.fresh("transposed")
                g.node("Transpose", [ins[i]], [names[i]], perm=perm)
        g.node("MatMul", names, outs)
        return True

    @classmethod
    def samples(cls, draw):
        for ta, tb in ((0, 0), (1, 0), (0, 1), (1, 1)):
            a, b = ("3,2" if ta else "2,3"), ("4,3" if tb else "3,4")
            yield draw.case(cls(ta, tb), draw(f"f64[{a}]"), draw(f"f64[{b}]"))
            yield draw.case(cls(ta, tb), draw(f"f64[5,{a}]"), draw(f"f64[5,{b}]"))
            yield draw.case(cls(ta, tb), draw(f"f64[2,5,{a}]"), draw(f"f64[1,{b}]"))
            yield draw.case(cls(ta, tb), draw(f"f64[5,{a}]"), draw(f"f64[{b}]"))
        yield draw.case(cls(), draw("f64[3]"), draw("f64[3,4]"))
        yield draw.case(cls(), draw("f64[2,3]"), draw("f64[3]"))
        yield draw.case(cls(), draw("f64[3]"), draw("f64[3]"))
        yield draw.case(cls(), draw("f64[5,2,3]"), draw("f64[3]"))


#: elements of a product that is added to C, at a time
_ADDED = 1 << 18


class Gemm(Op, onnx=True):
    """alpha · A' B' + beta · C, with A' = Aᵀ where transA, B' = Bᵀ where transB; C broadcasts to the result."""

    linear = ((0, 2), (1, 2))
    inplace = (2,)
    autocast = "low"
    alpha: float = 1.0
    beta: float = 1.0
    transA: int = 0
    transB: int = 0
    weights = (1, 2)

    def infer(self, a, b, c=None):
        """[m, n]."""
        if a.ndim != 2 or b.ndim != 2 or a.dtype != b.dtype:
            raise self.fail("needs two matrices of one element type", a, b, c)
        m, k = a.shape[::-1] if self.transA else a.shape
        k2, n = b.shape[::-1] if self.transB else b.shape
        if k != k2:
            raise self.fail("inner dimensions differ", a, b, c)
        if c is not None and _broadcast_or_none(c.shape, (m, n)) != (m, n):
            raise self.fail("C does not broadcast to the result", a, b, c)
        if not a.is_float and not (_has(a, self.alpha) and _has(a, self.beta)):
            raise self.fail("integers need an alpha and a beta that are whole numbers of their type", a, b, c)
        return (a.with_shape((m, n)),)

    def axis_factors(self, ins, outs):
        """Rows, columns, and without C the inner dimension."""
        a, _, c = (*ins, None)[:3]
        m, n = outs[0].shape
        row, left = (1, 0) if self.transA else (0, 1)
        right, column = (1, 0) if self.transB else (0, 1)
        of_c = [f.inputs[0] for f in aligned([c], outs)]
        factors = [factor(m, [row, None, of_c[0]], [0]), factor(n, [None, column, of_c[1]], [1])]
        return factors if c is not None else [*factors, factor(a.shape[left], [left, right], [SUM])]

    def compute(self, ins, outs, scratch):
        """BLAS, then bias and factors in place (beta ≠ 0, 1: C scaled in a small scratch)."""
        a, b = ins[:2]
        a, b = a.T if self.transA else a, b.T if self.transB else b
        if outs[0].dtype.itemsize == 2:
            self._half(a, b, ins[2] if len(ins) > 2 else None, outs[0], scratch)
            return
        if self._adds(TensorType.of(outs[0]), *map(TensorType.of, ins[2:3])):
            c, y, room = ins[2], outs[0], scratch[0]
            for i in range(0, len(y), len(room)):  # a few rows of the product at a time, added to those of C
                rows = slice(i, min(i + len(room), len(y)))
                product = room[: rows.stop - i]
                np.matmul(a[rows], b, out=product)
                if self.alpha != 1.0:
                    np.multiply(product, product.dtype.type(self.alpha), out=product)
                if self.beta == 1.0:
                    np.add(c[rows], product, out=y[rows])
                else:
                    np.multiply(c[rows], y.dtype.type(self.beta), out=y[rows])
                    np.add(y[rows], product, out=y[rows])
            return
        np.matmul(a, b, out=outs[0])
        if self.alpha != 1.0:
            np.multiply(outs[0], outs[0].dtype.type(self.alpha), out=outs[0])
        if len(ins) > 2 and ins[2] is not None and self.beta != 0.0:
            bias = ins[2]
            if self.beta != 1.0:
                bias = np.multiply(bias, bias.dtype.type(self.beta), out=scratch[0])
            np.add(outs[0], bias, out=outs[0])

    def _adds(self, out: TensorType, c: TensorType | None = None) -> bool:
        """Whether C has the result's type, and may be the same memory."""
        return c == out and self.beta != 0.0

    def _half(self, a: Array, b: Array, c: Array | None, out: Array, scratch: Operands) -> None:
        """In float32, bias and factors too, rounded once."""
        bias = None if c is None or self.beta == 0.0 else np.broadcast_to(c, out.shape)

        def finish(tile: Array, rows: slice, columns: slice) -> None:
            if self.alpha != 1.0:
                np.multiply(tile, np.float32(self.alpha), out=tile)
            if bias is None:
                return
            part = bias[rows, columns]
            if self.beta != 1.0:
                scaled = scratch[3][: part.size].reshape(part.shape)
                scaled[...] = part
                part = np.multiply(scaled, np.float32(self.beta), out=scaled)
            np.add(tile, part, out=tile)

        HalfProduct.of(a.shape, b.shape).run(a, b, out, scratch, finish)

    def scratch(self, ins, outs):
        """C scaled, where beta asks for it; for 16-bit floats tiles in float32, that of C too."""
        if ins[0].dtype in ("f16", "bf16"):
            (a, b), (ta, tb) = ins[:2], (self.transA, self.transB)
            types = HalfProduct.of(a.shape[::-1] if ta else a.shape, b.shape[::-1] if tb else b.shape).scratch()
            return (*types, types[2]) if self.beta not in (0.0, 1.0) else types
        if self._adds(outs[0], (*ins, None)[2]):
            m, n = outs[0].shape
            return (outs[0].with_shape((min(m, max(1, _ADDED // max(n, 1))), n)),)
        if len(ins) > 2 and ins[2] is not None and self.beta not in (0.0, 1.0):
            return (ins[2],)
        return ()

    def cost(self, ins, outs):
        k = ins[0].shape[0 if self.transA else 1]
        return Cost(2 * outs[0].size * k, super().cost(ins, outs).bytes)

    def gradient(self, b, ins, outs, grads):
        """dA = alpha · dy B'ᵀ, dB = alpha · A'ᵀ dy, dC = beta · Σ dy."""
        x, y = ins[:2]
        dy = grads[0]
        scaled = dy if self.alpha == 1.0 else b.Mul(dy, b.constant(self.alpha, dy))
        dx, dw = MatMul(self.transA, self.transB)._matrix_gradient(b, x, y, scaled)
        if len(ins) < 3 or ins[2] is None:
            return [dx, dw]
        dc = b.sum_to(dy, ins[2].shape)
        return [dx, dw, dc if self.beta == 1.0 else b.Mul(dc, b.constant(self.beta, dc))]

    @classmethod
    def samples(cls, draw):
        """All flags; bias as row, column, matrix, scalar, absent; factors."""
        for ta, tb, c in ((0, 0, "4"), (1, 0, "2,4"), (0, 1, "2,1"), (1, 1, "")):
            a, b = ("3,2" if ta else "2,3"), ("4,3" if tb else "3,4")
            op = cls(alpha=1.5, beta=0.5, transA=ta, transB=tb)
            yield draw.case(op, draw(f"f64[{a}]"), draw(f"f64[{b}]"), draw(f"f64[{c}]"))
            yield draw.case(cls(transA=ta, transB=tb), draw(f"f64[{a}]"), draw(f"f64[{b}]"))
        yield draw.case(cls(transA=1), draw("f32[5,3]"), draw("f32[5,4]"), draw("f32[3,4]"))
        yield draw.case(cls(), draw("f16[3,5]"), draw("f16[5,4]"), draw("f16[3,4]"))


def _broadcast_or_none(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        return None


def _has(t: TensorType, number: float) -> bool:
    limits = ml_dtypes.iinfo(t.numpy) if t.dtype != "bool" else None
    return float(number).is_integer() and (number in (0, 1) if limits is None else limits.min <= number <= limits.max)
