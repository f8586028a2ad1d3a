"""Largest and smallest over axes, where they are, and products."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...language.factors import MAX, MIN, PROD, factor
from ...language.op import Case, Draw, Imported, ImportedNode, Op, OperatorBuilder
from ...language.types import Array, Operands, TensorType, Types, Value, Values, present
from ..common import normal_axes, normal_axis
from ..rowwise import OverRows
from ..shape.reshape import reshape
from ..tiles import wide
from .sums import Reduce


class Extreme(Reduce, abstract=True):
    """The largest or smallest element; NaN if there is one."""

    autocast = "follow"

    @classmethod
    def from_onnx(cls, node: ImportedNode) -> Imported:
        """The extreme; PyTorch's `max(dim)` is the element at its index, which alone receives the gradient."""
        v = super().from_onnx(node)
        op, x = node.builder.operators[-1].op, node.need(0)
        one = isinstance(op, cls) and op.axes is not None and len(op.axes) == 1 and x.ndim and x.type.is_float
        if not isinstance(v, Value) or not one or node.source not in ("aten.max.dim", "aten.min.dim"):
            return v
        b, axis = node.builder, op.axes[0]
        b.operators.pop()
        at = (b.ArgMax if cls is ReduceMax else b.ArgMin)(x, axis=axis)
        return reshape(b, b.GatherElements(x, at, axis=axis), v.shape)

    def scratch(self, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        """None: choosing is exact in every type."""
        return ()

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        """One call; of no elements: the worst value of the type."""
        x = ins[0]
        if not x.size:
            outs[0].fill(_worst(x.dtype, self.ufunc))
            return
        axes = normal_axes(self.axes, x.ndim, self)
        getattr(np, self.ufunc)(x, axis=axes, keepdims=bool(self.keepdims), out=outs[0])

    def gradient(self, b: OperatorBuilder, ins: Values, outs: Sequence[Value], grads: Values) -> Values:
        """dy to the element chosen, in equal parts where several tie (as PyTorch's amax)."""
        x, dy = present(ins[0], grads[0])
        return [b.ShareTies(x, self.keep(b, x, outs[0]), self.keep(b, x, dy))]

    @classmethod
    def sample(cls, draw: Draw, text: str) -> Array:
        return draw.distinct(text)

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case]:
        yield from super().samples(draw)
        yield draw.case(cls(axes=(0,)), draw.ints("i64[3,2]", -9, 9))
        yield draw.case(cls(axes=(0,)), draw.bools("3,2"))
        yield draw.case(cls(axes=(0,)), draw("f32[0,2]"))


def _worst(dtype: np.dtype, ufunc: str) -> float:
    if dtype.kind == "b":
        return ufunc == "min"
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.max if ufunc == "min" else limits.min
    return math.inf if ufunc == "min" else -math.inf


class ReduceMax(Extreme):
    """The largest element."""

    partial = MAX
    ufunc = "max"


class ReduceMin(Extreme):
    """The smallest element."""

    partial = MIN
    ufunc = "min"


class ShareTies(OverRows):
    """(x, y, dy) → dy / n where x = y, else 0; n counts them over the axes along which y is repeated."""

    def infer(self, x, y, dy):
        fits = x.is_float and x.ndim == y.ndim and all(d in (1, n) for d, n in zip(y.shape, x.shape, strict=True))
        if y != dy or not fits or x.dtype != y.dtype:
            raise self.fail("y and dy must be floats of x's shape, with ones where it was reduced", x, y, dy)
        return (x,)

    def expand(self, b, x, y, dy):
        mask = b.Equal(x, y)
        count = b.ReduceSum(b.Cast(mask, to=x.dtype), axes=repeated(x, y))
        return (b.Where(mask, b.Div(dy, count), b.constant(0, dy)),)

    def gradient(self, b, ins, outs, grads):
        x, y, _ = ins
        mask, axes = b.Equal(x, y), repeated(x, y)
        total = b.ReduceSum(b.Where(mask, grads[0], b.constant(0, x)), axes=axes)
        return [None, None, b.Div(total, b.ReduceSum(b.Cast(mask, to=x.dtype), axes=axes))]

    @classmethod
    def samples(cls, draw):
        x = draw.ints("i64[3,5]", 0, 3).astype(float)
        y = x.max(axis=1, keepdims=True)
        yield draw.case(cls(), x, y, draw("f64[3,1]"), gradient=False)
        yield draw.case(cls(), x, x, draw("f64[3,5]"), gradient=False)
        x = draw.distinct("f64[3,5]")
        yield draw.case(cls(), x.astype("f2"), x.max(axis=0, keepdims=True).astype("f2"), draw("f16[1,5]"))


def repeated(x: Any, y: Any) -> tuple[int, ...]:
    """The axes of x along which y, of as many dimensions, is repeated."""
    return tuple(i for i, (n, d) in enumerate(zip(x.shape, y.shape, strict=True)) if d == 1 and n != 1)


class ReduceProd(Reduce):
    """Product."""

    partial = PROD
    ufunc = "prod"

    def gradient(self, b, ins, outs, grads):
        """dy times the product of the other elements, which is right for zeros too."""
        return [b.ReduceProdGrad(ins[0], self.keep(b, ins[0], grads[0]))]

    @classmethod
    def samples(cls, draw):
        yield from super().samples(draw)
        x = draw.away("f64[3,4]")
        x[0, 1] = x[1, 2] = x[1, 3] = 0
        yield draw.case(cls(axes=(1,)), x)


class ReduceProdGrad(Op):
    """(x, dy) → dy times the product of all elements but x's own, over the axes along which dy is repeated."""

    def infer(self, x, dy):
        fits = x.ndim == dy.ndim and all(d in (1, n) for d, n in zip(dy.shape, x.shape, strict=True))
        if not fits or x.dtype != dy.dtype:
            raise self.fail("dy must have x's shape with ones where it was reduced", x, dy)
        return (x,)

    def scratch(self, ins, outs):
        """x with the reduced axes last, and products from either end."""
        x = ins[0]
        n = math.prod(x.shape[i] for i in repeated(x, ins[1]))
        rows = TensorType(wide(x.dtype), (x.size // max(n, 1), n))
        return (rows, rows, rows)

    def compute(self, ins, outs, scratch):
        """The product of all before times the product of all after."""
        x, dy = ins
        if not x.size:
            return
        rows, before, after = scratch
        axes = repeated(x, dy)
        order = [i for i in range(x.ndim) if i not in axes] + list(axes)
        moved = x.transpose(order)
        rows.reshape(moved.shape)[...] = moved
        before[:, :1] = 1
        after[:, -1:] = 1
        np.cumprod(rows[:, :-1], axis=1, out=before[:, 1:])
        np.cumprod(rows[:, :0:-1], axis=1, out=after[:, -2::-1])
        np.multiply(before, after, out=rows)
        out = outs[0].transpose(order)
        np.multiply(rows.reshape(moved.shape), dy.transpose(order), out=out, casting="unsafe")

    def expand(self, b, x, dy):
        """x repeated with ones on the diagonal; takes n times x's size."""
        axes = repeated(x, dy)
        order = [i for i in range(x.ndim) if i not in axes] + list(axes)
        n = math.prod(x.shape[i] for i in axes)
        rows = reshape(b, _transpose(b, x, order), (x.size // max(n, 1), 1, n))
        index = b.CumSum(b.Fill(dtype="i64", shape=(n, 1), value=1), axis=0)
        diagonal = b.Equal(index, reshape(b, index, (1, n)))
        others = b.ReduceProd(b.Where(diagonal, b.constant(1, x), rows), axes=(2,))
        moved = reshape(b, others, [x.shape[i] for i in order])
        return (b.Mul(_transpose(b, moved, np.argsort(order).tolist()), dy),)

    @classmethod
    def samples(cls, draw):
        """Rows with no zero, one zero, two; several axes."""
        x = draw.away("f64[3,4]")
        x[0, 1] = x[1, 2] = x[1, 3] = 0
        yield draw.case(cls(), x, draw("f64[3,1]"))
        yield draw.case(cls(), draw.away("f64[2,3,2]"), draw("f64[1,3,1]"))
        yield draw.case(cls(), draw.away("f64[2,3]"), draw("f64[2,3]"))


def _transpose(b: OperatorBuilder, x: Value, order: Sequence[int]) -> Value:
    return x if list(order) == list(range(x.ndim)) else b.Transpose(x, perm=tuple(order))


class ArgMax(Op, onnx=True):
    """Where the largest element along `axis` is (i64): the first one, or with `select_last_index` the last."""

    autocast = "follow"
    axis: int = 0
    keepdims: int = 1
    select_last_index: int = 0

    def infer(self, x):
        """Indices, `axis` 1 or gone."""
        axis = normal_axis(self.axis, x.ndim, self)
        if not x.ndim or not x.shape[axis]:
            raise self.fail("there is nothing to choose from", x)
        kept = [1] if self.keepdims else []
        return (TensorType("i64", (*x.shape[:axis], *kept, *x.shape[axis + 1 :])),)

    def axis_factors(self, ins, outs):
        """All but the one that is searched."""
        x = ins[0]
        axis = normal_axis(self.axis, x.ndim, self)
        return [factor(d, [a], [a - (a > axis and not self.keepdims)]) for a, d in enumerate(x.shape) if a != axis]

    def compute(self, ins, outs, scratch):
        """One search, from the end for the last."""
        x = ins[0]
        axis = normal_axis(self.axis, x.ndim, self)
        out = outs[0].reshape(x.shape[:axis] + x.shape[axis + 1 :])
        if self.select_last_index:
            x = np.flip(x, axis)
        self.search()(x, axis=axis, out=out)
        if self.select_last_index:
            np.subtract(x.shape[axis] - 1, out, out=out)

    @staticmethod
    def search() -> Any:
        """The function that finds it."""
        return np.argmax

    def gradient(self, b, ins, outs, grads):
        return [None]

    @classmethod
    def samples(cls, draw):
        for last in (0, 1):
            yield draw.case(cls(axis=1, select_last_index=last), draw.ints("i64[4,6]", 0, 3))
        yield draw.case(cls(axis=-1, keepdims=0), draw("f64[2,3]"))
        yield draw.case(cls(axis=0, keepdims=0), draw("f32[5]"))


class ArgMin(ArgMax, onnx=True):
    """Where the smallest element along `axis` is (i64)."""

    @staticmethod
    def search() -> Any:
        return np.argmin
