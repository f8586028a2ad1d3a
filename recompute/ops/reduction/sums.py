"""Sums, means and norms over axes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from ...language.factors import LOGSUMEXP, SUM, Factor, factor
from ...language.layouts import Turned, turned_axes
from ...language.op import Case, Cost, Draw, FunctionWriter, Imported, ImportedNode, Op, OperatorBuilder
from ...language.types import Array, Operands, TensorType, Types, Value, Values, need
from ..common import normal_axes
from ..shape.reshape import reshape
from ..tiles import wide


class Reduce(Op, abstract=True):
    """Reduces over `axes` (None: all); reduced dimensions become 1, or go away with `keepdims=0`.

    The numerics: `prepare` (a ufunc) on every element, `ufunc` over the axes, `finish` on the results.  The half
    precisions are prepared and reduced in float32.
    """

    axes: tuple[int, ...] | None = None
    keepdims: int = 1
    prepare: ClassVar[str | None] = None
    ufunc: ClassVar[str] = "sum"
    #: how the results of slices along a reduced axis are combined; "": they cannot be
    partial: ClassVar[str] = ""
    #: divides by the number of elements
    divides: ClassVar[bool] = False

    def infer(self, x: TensorType) -> tuple[TensorType, ...]:
        """x's type with the reduced dimensions 1 or gone."""
        if self.prepare and not x.is_float and (self.prepare == "exp" or x.dtype == "bool"):
            raise self.fail("takes floats only" if self.prepare == "exp" else "takes numbers, not bool", x)
        axes = normal_axes(self.axes, x.ndim, self)
        if self.keepdims:
            return (x.with_shape([1 if i in axes else d for i, d in enumerate(x.shape)]),)
        return (x.with_shape([d for i, d in enumerate(x.shape) if i not in axes]),)

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...] | None:
        """The axes that stay, and reduced ones if partial results can be combined."""
        x = need(ins[0])
        reduced = normal_axes(self.axes, x.ndim, self)
        kept = [a for a in range(x.ndim) if self.keepdims or a not in reduced]
        factors = [factor(x.shape[a], [a], [i]) for i, a in enumerate(kept) if a not in reduced]
        if self.partial:
            shares = (0,) if self.divides else ()
            factors += [factor(x.shape[a], [a], [self.partial], shares) for a in reduced]
        return tuple(factors)

    def scratch(self, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        """The prepared elements, and wider results."""
        x = need(ins[0])
        precise = wide(x.dtype)
        prepared = (x.with_dtype(precise),) if self.prepare else ()
        return (*prepared, self.infer(x)[0].with_dtype(precise)) if precise != x.dtype else prepared

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        x, total = ins[0], (*scratch, outs[0])[1 if self.prepare else 0]
        if self.prepare:
            if x.dtype != scratch[0].dtype:
                scratch[0][...] = x
                x = scratch[0]
            x = getattr(np, self.prepare)(x, out=scratch[0])
        axes = normal_axes(self.axes, x.ndim, self)
        getattr(np, self.ufunc)(x, axis=axes, dtype=total.dtype, keepdims=bool(self.keepdims), out=total)
        self.finish(total, self.count(ins[0]))
        if total is not outs[0]:
            outs[0][...] = total

    def finish(self, total: Array, count: int) -> None:
        """Changes the results in place."""

    def cost(self, ins: Types, outs: Types) -> Cost:
        """One operation an input element, or two."""
        per_element = 2 if self.prepare else 1
        return Cost(per_element * ins[0].size if ins[0] else 0, super().cost(ins, outs).bytes)

    def keep(self, b: OperatorBuilder, x: Value, reduced: Value) -> Value:
        """A reduced value with its reduced dimensions as ones, so that it broadcasts against x."""
        axes = normal_axes(self.axes, x.ndim, self)
        return reshape(b, reduced, [1 if i in axes else d for i, d in enumerate(x.shape)])

    def count(self, x: Any) -> int:
        """How many elements each result was made of."""
        return math.prod(x.shape[a] for a in normal_axes(self.axes, len(x.shape), self))

    def export(self, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> bool:
        """The ONNX operator of the same name, axes as an input."""
        axes = [] if self.axes is None else [g.ints(self.axes)]
        empty = self.axes == ()
        g.node(self.name, [*ins, *axes], outs, keepdims=self.keepdims, noop_with_empty_axes=int(empty))
        return True

    @classmethod
    def from_onnx(cls, node: ImportedNode) -> Imported:
        """Axes from the attribute or the second input."""
        axes = node.attributes.get("axes")
        if axes is None and node.type(1) is not None:
            axes = node.need_constant(1, "axes").reshape(-1).tolist()
        if not axes:
            axes = [] if node.attributes.get("noop_with_empty_axes", 0) else None
        keepdims = node.attributes.get("keepdims", 1)
        op = cls(axes=None if axes is None else tuple(map(int, axes)), keepdims=keepdims)
        return node.emit(op, node.need(0))

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case]:
        """All axes, some, negative ones, none, with and without keepdims; float16."""
        for axes, keep in ((None, 1), (None, 0), ((1,), 1), ((0, -1), 0), ((), 1)):
            yield draw.case(cls(axes=axes, keepdims=keep), cls.sample(draw, "f64[2,3,4]"))
        yield draw.case(cls(axes=(1,), keepdims=0), cls.sample(draw, "f32[4,9]"))
        yield draw.case(cls(axes=(1,), keepdims=0), cls.sample(draw, "f16[4,9]"))

    @classmethod
    def sample(cls, draw: Draw, text: str) -> Array:
        """An input for a sample."""
        return draw(text)

    def channels_last(self, ins: Values, outs: Values, rank: int) -> Turned | None:
        """Over all axes but the channels', and over images' positions."""
        if self.axes is None or outs[0] is None:
            return None
        axes = {a % rank for a in self.axes}
        positions = set(range(2, rank))
        if axes != {0, *positions} and (axes != positions or rank < 4):
            return None
        new = dataclasses.replace(self, axes=tuple(sorted(turned_axes(tuple(axes), rank))))
        return Turned(new, (rank,), (outs[0].ndim == rank,), always=True)


class ReduceSum(Reduce):
    """Sum."""

    linear = ((0,),)
    partial = SUM

    def gradient(self, b, ins, outs, grads):
        """dy repeated; nothing is kept."""
        return [b.Expand(self.keep(b, ins[0], grads[0]), shape=ins[0].shape)]

    @classmethod
    def samples(cls, draw):
        yield from super().samples(draw)
        yield draw.case(cls(axes=(0,)), draw.ints("i32[3,2]", 0, 9))
        yield draw.case(cls(axes=(0,)), draw("f64[0,2]"))


class ReduceMean(Reduce):
    """Mean."""

    linear = ((0,),)
    divides = True
    partial = SUM

    def finish(self, total, count):
        """Divides by the number of elements."""
        np.divide(total, count, out=total, casting="unsafe")

    def gradient(self, b, ins, outs, grads):
        """dy / n repeated; nothing is kept."""
        dy = self.keep(b, ins[0], grads[0])
        scaled = b.Mul(dy, b.constant(1.0 / max(self.count(ins[0]), 1), dy))
        return [b.Expand(scaled, shape=ins[0].shape)]


class ReduceL1(Reduce):
    """Sum of absolute values."""

    partial = SUM
    prepare = "absolute"

    def gradient(self, b, ins, outs, grads):
        """dy · sign x."""
        return [b.Mul(b.Sign(ins[0]), self.keep(b, ins[0], grads[0]))]

    @classmethod
    def sample(cls, draw, text):
        """Away from 0."""
        return draw.away(text)


class ReduceSumSquare(Reduce):
    """Sum of squares."""

    partial = SUM
    prepare = "square"

    def gradient(self, b, ins, outs, grads):
        """2 · dy · x."""
        dy = self.keep(b, ins[0], grads[0])
        return [b.Mul(ins[0], b.Add(dy, dy))]


class ReduceL2(Reduce):
    """Square root of the sum of squares."""

    prepare = "square"

    def finish(self, total, count):
        np.sqrt(total, out=total, casting="unsafe")

    def gradient(self, b, ins, outs, grads):
        """dy · x / y, and 0 where y = 0 (as PyTorch)."""
        y, zero = outs[0], b.constant(0, outs[0])
        scale = b.Where(b.Equal(y, zero), zero, b.Div(grads[0], y))
        return [b.Mul(ins[0], self.keep(b, ins[0], scale))]

    @classmethod
    def sample(cls, draw, text):
        """Away from 0."""
        return draw.away(text)


class ReduceLogSum(Reduce):
    """Logarithm of the sum."""

    def finish(self, total, count):
        np.log(total, out=total, casting="unsafe")

    def gradient(self, b, ins, outs, grads):
        """dy / exp(y) repeated: from the output."""
        scaled = b.Mul(grads[0], b.Exp(b.Neg(outs[0])))
        return [b.Expand(self.keep(b, ins[0], scaled), shape=ins[0].shape)]

    @classmethod
    def sample(cls, draw, text):
        return draw(text, 0.5, 1.5)


class ReduceLogSumExp(Reduce):
    """ln Σ exp(x), as m + ln Σ exp(x - m) with m the largest x."""

    prepare = "exp"
    partial = LOGSUMEXP

    def scratch(self, ins, outs):
        """The exponentials, the largest elements, which of them are infinite, and the sums."""
        x = ins[0].with_dtype(wide(ins[0].dtype))
        kept = self.infer(x)[0] if self.keepdims else type(self)(axes=self.axes).infer(x)[0]
        return (x, kept, kept.with_dtype("bool"), kept)

    def compute(self, ins, outs, scratch):
        """An infinite m is not subtracted: ∞ - ∞ is NaN."""
        x, (e, m, infinite, total) = ins[0], scratch
        axes = normal_axes(self.axes, x.ndim, self)
        if not x.size:
            outs[0].fill(-math.inf)
            return
        e[...] = x
        np.max(e, axis=axes, keepdims=True, out=m)
        np.isinf(m, out=infinite)
        np.copyto(m, 0, where=infinite)
        np.subtract(e, m, out=e)
        np.exp(e, out=e)
        np.sum(e, axis=axes, keepdims=True, out=total)
        np.log(total, out=total)
        np.add(total, m, out=total)
        outs[0][...] = total.reshape(outs[0].shape)

    def gradient(self, b, ins, outs, grads):
        """dy · exp(x - y)."""
        x = ins[0]
        share = b.Exp(b.Sub(x, self.keep(b, x, outs[0])))
        return [b.Mul(share, self.keep(b, x, grads[0]))]

    @classmethod
    def samples(cls, draw):
        yield from super().samples(draw)
        x = draw("f32[3,4]") * 1000
        x[1] = -math.inf
        x[2, 0] = math.inf
        yield draw.case(cls(axes=(1,)), x)
