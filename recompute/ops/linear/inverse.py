"""Inverse matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...language.factors import in_step
from ...language.op import Cost, Imported, ImportedNode, Op, OperatorBuilder, imports


class Inverse(Op):
    """X⁻¹ of each matrix in the last two axes, by Gauss–Jordan elimination with row pivots (com.microsoft.Inverse)."""

    on_host = "factors of matrices"

    def infer(self, x):
        """The same type.  TypeRuleError unless it holds square matrices of f32 or f64."""
        if x.ndim < 2 or x.shape[-1] != x.shape[-2] or x.dtype not in ("f32", "f64"):
            raise self.fail("needs square matrices of f32 or f64", x)
        return (x,)

    def axis_factors(self, ins, outs):
        return in_step(ins, outs, range(ins[0].ndim - 2))

    def scratch(self, ins, outs):
        """The rest of x, products, a column and a row of each matrix."""
        x = ins[0]
        batch, n = x.size // max(x.shape[-1] ** 2, 1), x.shape[-1]
        return (x, x, x.with_shape((batch, n)), x.with_shape((n,)))

    def compute(self, ins, outs, scratch):
        """One column after the other, in all matrices."""
        x = ins[0]
        n = x.shape[-1]
        if not x.size:
            return
        a, room, y = (v.reshape(-1, n, n) for v in (scratch[0], scratch[1], outs[0]))
        column, spare = scratch[2:]
        a[...] = x.reshape(-1, n, n)
        y[...] = 0
        y[:, range(n), range(n)] = 1
        for k in range(n):
            np.abs(a[:, :, k], out=column)
            for i, down in enumerate(np.argmax(column[:, k:], axis=1).tolist()):
                if down:
                    for m in (a[i], y[i]):
                        spare[...] = m[k]
                        m[k] = m[k + down]
                        m[k + down] = spare
            column[...] = a[:, k, k, None]
            for m in (a, y):
                np.divide(m[:, k], column, out=m[:, k])
            column[...] = a[:, :, k]
            column[:, k] = 0
            for m in (a, y):
                np.multiply(column[:, :, None], m[:, k, None], out=room)
                np.subtract(m, room, out=m)

    def gradient(self, b, ins, outs, grads):
        """-Yᵀ dY Yᵀ."""
        y = outs[0]
        return [b.Neg(b.MatMul(b.MatMul(y, grads[0], transA=1), y, transB=1))]

    def expand(self, b, x):
        """The same elimination; rows change places by choosing between them."""
        n = x.shape[-1]
        rows = b.constant(np.arange(n)[:, None], "i64")
        zero, low = b.constant(0.0, x), b.constant(-1.0, x)
        y = b.Add(b.Mul(x, zero), b.constant(np.eye(n), x))
        for k in range(n):
            here = b.Equal(rows, b.constant(k, "i64"))
            below = b.constant(np.arange(n)[:, None] >= k, "bool")
            at = b.ArgMax(b.Where(below, b.Abs(_column(b, x, k)), low), axis=-2)
            pivot = b.Equal(rows, at)
            x, y = (self._swapped(b, m, here, pivot, k, zero) for m in (x, y))
            first = _column(b, x, k)
            corner = b.Slice(first, starts=(k,), ends=(k + 1,), axes=(-2,))
            first = b.Where(here, zero, first)
            done = []
            for m in (x, y):
                row = b.Div(b.Slice(m, starts=(k,), ends=(k + 1,), axes=(-2,)), corner)
                done.append(b.Where(here, row, b.Sub(m, b.Mul(first, row))))
            x, y = done
        return (y,)

    @staticmethod
    def _swapped(b: OperatorBuilder, m: Any, here: Any, pivot: Any, k: int, zero: Any) -> Any:
        """m with row k and the pivot row in each other's places."""
        chosen = b.ReduceSum(b.Where(pivot, m, zero), axes=(-2,), keepdims=1)
        old = b.Slice(m, starts=(k,), ends=(k + 1,), axes=(-2,))
        return b.Where(here, chosen, b.Where(pivot, old, m))

    def cost(self, ins, outs):
        x = ins[0]
        return Cost(4 * x.size * x.shape[-1], 2 * x.nbytes)

    @classmethod
    def samples(cls, draw):
        """One and several matrices; one that needs other pivots; one element."""
        for shape in ("3,3", "2,2,2", "1,1"):
            n = int(shape[-1])
            yield draw.case(cls(), draw(f"f64[{shape}]") + 2 * np.eye(n))
        yield draw.case(cls(), np.array([[0.0, 2.0, 0.5], [1.0, 0.1, 0.0], [0.3, 0.0, -1.5]]))
        yield draw.case(cls(), draw("f32[2,3,3]") + 2 * np.eye(3, dtype=np.float32))


def _column(b: OperatorBuilder, m: Any, k: int) -> Any:
    return b.Slice(m, starts=(k,), ends=(k + 1,), axes=(-1,))


@imports("Inverse", domain="com.microsoft")
def inverse(node: ImportedNode) -> Imported:
    """Inverse."""
    return node.emit(Inverse(), node.need(0))
