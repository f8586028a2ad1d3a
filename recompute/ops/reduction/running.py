"""Running products, linear recurrences, and determinants."""

from __future__ import annotations

import numpy as np

from ...language.factors import all_but, in_step
from ...language.op import Cost, Imported, ImportedNode, Op, OperatorBuilder, imports
from ...language.types import Value
from ..common import normal_axis
from ..elementwise.elementary import Running


def shift(b: OperatorBuilder, v: Value, axis: int, *, forward: bool, fill: float) -> Value:
    """v moved by one along `axis`, `fill` in the place that becomes free."""
    n = v.shape[axis]
    thin = b.fill(fill, v.type.with_shape((*v.shape[:axis], 1, *v.shape[axis + 1 :])))
    if n == 1:
        return thin
    rest = b.Slice(v, starts=(0 if forward else 1,), ends=(n - 1 if forward else n,), axes=(axis,))
    return b.Concat(*((thin, rest) if forward else (rest, thin)), axis=axis)


class LinearScan(Op):
    """(a, d) → s, s_k = a_k · s_(k-1) + d_k along `axis` (s_(-1) = 0); `reverse`: from the end."""

    axis: int
    reverse: int = 0

    def infer(self, a, d):
        normal_axis(self.axis, a.ndim, self)
        if a != d or not a.is_float or not a.ndim:
            raise self.fail("needs two floats of one type", a, d)
        return (a,)

    def axis_factors(self, ins, outs):
        """All; that along which it runs is needed whole."""
        return all_but(ins, outs, normal_axis(self.axis, ins[0].ndim, self))

    def compute(self, ins, outs, scratch):
        a, d, s = (np.moveaxis(v, self.axis, 0) for v in (*ins, outs[0]))
        steps = range(len(s))[:: -1 if self.reverse else 1]
        before = None
        for k in steps:
            if before is None:
                s[k] = d[k]
            else:
                np.multiply(a[k], s[before], out=s[k, ...])
                s[k] += d[k]
            before = k

    def gradient(self, b, ins, outs, grads):
        """The recurrence the other way, and its product with the s before."""
        axis = normal_axis(self.axis, ins[0].ndim, self)
        if not ins[0].type.size:
            return [None, grads[0]]
        turned = bool(self.reverse)
        r = b.LinearScan(
            shift(b, ins[0], axis, forward=turned, fill=0.0), grads[0], axis=axis, reverse=1 - self.reverse
        )
        return [b.Mul(r, shift(b, outs[0], axis, forward=not turned, fill=0.0)), r]

    @classmethod
    def samples(cls, draw):
        for reverse in (0, 1):
            yield draw.case(cls(1, reverse), draw("f64[2,4]"), draw("f64[2,4]"), export=False)
        yield draw.case(cls(0), draw("f64[1,2]"), draw("f64[1,2]"), export=False)
        yield draw.case(cls(0), draw("f32[0,2]"), draw("f32[0,2]"), export=False)


class CumProd(Running):
    """Products of the elements up to each one along `axis`; `exclusive`: without it; `reverse`: from the end.

    ONNX CumProd-26.  The gradient is exact where elements are 0, too.
    """

    def compute(self, ins, outs, scratch):
        x, y = self.turned(ins[0], outs[0], 1)
        if y.size:
            np.cumprod(x, axis=0, dtype=y.dtype, out=y)

    def gradient(self, b, ins, outs, grads):
        """The product before each element, times what follows: a linear recurrence from the other end."""
        x, dy = ins[0], grads[0]
        axis, turned = normal_axis(self.axis, x.ndim, self), bool(self.reverse)
        if not x.type.size:
            return [dy]
        if self.exclusive:
            dy = shift(b, dy, axis, forward=turned, fill=0.0)
        follows = shift(b, x, axis, forward=turned, fill=0.0)
        rest = b.LinearScan(follows, dy, axis=axis, reverse=1 - self.reverse)
        return [b.Mul(b.CumProd(x, axis=axis, exclusive=1, reverse=self.reverse), rest)]

    @classmethod
    def samples(cls, draw):
        for exclusive in (0, 1):
            for reverse in (0, 1):
                x = draw("f64[3,4]")
                x[1, 2] = x[0, 1] = 0
                yield draw.case(cls(reverse - 1, exclusive, reverse), x, export=False)
        yield draw.case(cls(0), draw("f32[0]"), export=False)


class Det(Op, onnx=True):
    """x [..., n, n] → its determinants [...] (ONNX Det-22)."""

    on_host = "factors of matrices"

    def infer(self, x):
        if x.dtype not in ("f32", "f64") or x.ndim < 2 or x.shape[-1] != x.shape[-2]:
            raise self.fail("needs square matrices of f32 or f64", x)
        return (x.with_shape(x.shape[:-2]),)

    def axis_factors(self, ins, outs):
        return in_step(ins, outs, range(ins[0].ndim - 2))

    def compute(self, ins, outs, scratch):
        for at in np.ndindex(*outs[0].shape):
            outs[0][at] = np.linalg.det(ins[0][at])

    def cost(self, ins, outs):
        return Cost(ins[0].size * ins[0].shape[-1], super().cost(ins, outs).bytes)

    def gradient(self, b, ins, outs, grads):
        """dy times the cofactors."""
        dy = b.Reshape(grads[0], shape=(*grads[0].shape, 1, 1))
        return [b.Mul(b.Cofactors(ins[0]), dy)]

    @classmethod
    def samples(cls, draw):
        for shape in ("2,3,3", "2,2", "3,1,1", "0,2,2"):
            yield draw.case(cls(), draw(f"f64[{shape}]"))
        yield draw.case(cls(), draw("f32[2,2]"))


class Cofactors(Op):
    """x [..., n, n] → det(x) · x⁻ᵀ, from singular values, so that it holds for singular matrices too.

    Its own gradient divides by the determinant: nan or inf where that is 0.
    """

    on_host = "factors of matrices"

    def infer(self, x):
        Det().infer(x)
        return (x,)

    def axis_factors(self, ins, outs):
        return in_step(ins, outs, range(ins[0].ndim - 2))

    def compute(self, ins, outs, scratch):
        """x = U S Vᵀ: det(U) det(V) U diag(∏_(j≠i) s_j) Vᵀ."""
        for at in np.ndindex(*ins[0].shape[:-2]):
            if not np.isfinite(ins[0][at]).all():  # svd would raise
                outs[0][at] = np.nan
                continue
            u, s, v = np.linalg.svd(ins[0][at])
            others = np.stack([np.prod(np.delete(s, i)) for i in range(len(s))]) if len(s) else s
            np.matmul(u * (others * (np.linalg.det(u) * np.linalg.det(v))), v, out=outs[0][at])

    def cost(self, ins, outs):
        return Cost(20 * ins[0].size * ins[0].shape[-1], super().cost(ins, outs).bytes)

    def gradient(self, b, ins, outs, grads):
        """(⟨u, C⟩ C - C uᵀ C) / det(x), C the cofactors (Jacobi's formula, and the derivative of the inverse)."""
        u, c = grads[0], outs[0]
        r = c.ndim
        turned = b.Transpose(u, perm=(*range(r - 2), r - 1, r - 2))
        inner = b.ReduceSum(b.Mul(u, c), axes=(r - 2, r - 1), keepdims=1)
        det = b.Det(ins[0])
        top = b.Sub(b.Mul(inner, c), b.MatMul(b.MatMul(c, turned), c))
        return [b.Div(top, b.Reshape(det, shape=(*det.shape, 1, 1)))]

    @classmethod
    def samples(cls, draw):
        for shape in ("2,3,3", "2,2", "0,2,2"):
            x = draw(f"f64[{shape}]")
            yield draw.case(cls(), x + 2 * np.eye(x.shape[-1]), export=False)
        yield draw.case(cls(), np.ones((2, 2)), gradient=False, export=False)


@imports("TensorScatter")
def tensor_scatter(node: ImportedNode) -> Imported:
    """(cache, update, write_indices) → the cache with the update written at its place, by ScatterElements."""
    b, cache, update = node.builder, node.need(0), node.need(1)
    axis, n, size = node.attributes.get("axis", -2) % cache.ndim, cache.ndim, cache.shape
    steps = np.arange(update.shape[axis]).reshape(*(1,) * axis, -1, *(1,) * (n - 1 - axis))
    at = node.named(node.body().constant(steps))
    if node.type(2) is not None:
        at = b.Add(at, b.Reshape(node.input(2), shape=(size[0], *(1,) * (n - 1))))
    if node.attributes.get("mode", "linear") == "circular":
        at = b.Mod(at, b.constant(size[axis], "i64"))
    at = b.Expand(at, shape=update.shape) if at.shape != update.shape else at
    return b.ScatterElements(cache, at, update, axis=axis)


@imports("MelWeightMatrix")
def mel_weight_matrix(node: ImportedNode) -> None:
    """All inputs are settings: where they are known, importing has folded the node already."""
    for i in range(5):
        node.need_constant(i, "settings")


@imports("Compress")
def compress(node: ImportedNode) -> Imported:
    """The elements, or rows along `axis`, where a condition that is known at compile time holds."""
    b, x = node.builder, node.need(0)
    axis = node.attributes.get("axis")
    if axis is None:
        x, axis = b.Reshape(x, shape=(x.type.size,)), 0
    kept = np.flatnonzero(node.need_constant(1, "condition"))
    if kept.size and kept[-1] >= x.shape[axis]:
        raise node.fail(f"keeps entry {kept[-1]} of {x.shape[axis]}")
    return b.Gather(x, node.named(node.body().constant(kept)), axis=axis)
