"""Softmax, its logarithm, and Hardmax, along any axis.

Up to opset 12 ONNX flattened to two dimensions first; bringing a model up to date writes that out (see `onnx_model`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from ...language.factors import Factor, all_but
from ...language.op import Case, Cost, Draw, Op
from ...language.types import Array, TensorType, Types, Value, need
from ..common import normal_axis
from ..rowwise import Rowwise


class AlongAxis(Op, abstract=True):
    """Normalises along `axis`: x is seen as [outer, n, inner]."""

    axis: int = -1
    #: how many inputs there are
    takes: ClassVar[int] = 1

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        x = need(inputs[0])
        if any(t != x for t in inputs) or len(inputs) != self.takes:
            raise self.fail("types differ", *inputs)
        if not x.is_float:
            raise self.fail("takes floats only", *inputs)
        normal_axis(self.axis, x.ndim, self)
        return (x,)

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...] | None:
        """All; the normalised one is needed whole."""
        x = need(ins[0])
        return all_but(ins, outs, normal_axis(self.axis, x.ndim, self))

    def form(self, x: Any) -> tuple[int, ...]:
        """outer, n and inner, the last left out where it is 1."""
        axis = normal_axis(self.axis, len(x.shape), self)
        n = x.shape[axis] if x.shape else 1
        inner = math.prod(x.shape[axis + 1 :])
        return (math.prod(x.shape[:axis]), n) if inner == 1 else (math.prod(x.shape[:axis]), n, inner)

    def reduced(self, x: Value) -> tuple[int, ...]:
        """The axis as reductions take it; none of a scalar."""
        return (normal_axis(self.axis, x.ndim, self),) if x.ndim else ()

    def cost(self, ins: Types, outs: Types) -> Cost:
        """An exponential and four operations an element."""
        base = super().cost(ins, outs)
        return Cost(12 * base.flops, base.bytes)

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case]:
        """Every axis, a scalar's worth, nothing, more than a tile, large numbers, float16."""
        count = 2 if cls.__name__.endswith("Grad") else 1

        def case(axis: int, text: str, scale: float = 1.0) -> Case:
            return draw.case(cls(axis=axis), *[draw(text, -scale, scale) for _ in range(count)])

        yield from (case(axis, "f64[2,3,4]") for axis in (-1, 0, 1))
        yield case(-1, "f64[1]")
        yield case(1, "f64[2,0]")
        yield case(-1, "f32[300,101]", 30.0 if count == 1 else 0.1)
        yield case(0, "f16[5,3]")


class AlongRows(AlongAxis, Rowwise, abstract=True):
    """The base of operators along an axis with a formula over rows."""


class Softmax(AlongRows, onnx=True):
    """exp(x - m) / Σ exp(x - m), m the largest x along the axis.

    16-bit floats are computed in float32 and rounded once, so that mixed precision need not widen them before.
    """

    autocast = "follow"
    inplace = (0,)

    def row_formula(self, b, x):
        axes = self.reduced(x)
        e = b.Exp(b.Sub(x, b.ReduceMax(x, axes=axes)))
        return (b.Mul(e, b.Reciprocal(b.ReduceSum(e, axes=axes))),)

    def gradient(self, b, ins, outs, grads):
        return [b.SoftmaxGrad(outs[0], grads[0], axis=self.axis)]


class SoftmaxGrad(AlongRows):
    """(y, dy) → y · (dy - Σ y · dy)."""

    inplace = (1, 0)
    takes = 2

    def expand(self, b, y, dy):
        return (b.Mul(y, b.Sub(dy, b.ReduceSum(b.Mul(y, dy), axes=self.reduced(y)))),)


class LogSoftmax(AlongRows, onnx=True):
    """x - m - ln Σ exp(x - m), m the largest x along the axis."""

    inplace = (0,)

    def row_formula(self, b, x):
        axes = self.reduced(x)
        moved = b.Sub(x, b.ReduceMax(x, axes=axes))
        return (b.Sub(moved, b.Log(b.ReduceSum(b.Exp(moved), axes=axes))),)

    def gradient(self, b, ins, outs, grads):
        return [b.LogSoftmaxGrad(outs[0], grads[0], axis=self.axis)]


def log_softmax(x: Array, out: Array, number: Array, e: Array) -> None:
    """Rows x ([rows, n, ...]) to their log-softmax along axis 1, in the type of `out`; `e` is as large as x."""
    if x.dtype != out.dtype:
        out[...] = x
        x = out
    np.max(x, axis=1, keepdims=True, out=number)
    np.subtract(x, number, out=out)
    np.exp(out, out=e)
    np.sum(e, axis=1, keepdims=True, out=number)
    np.log(number, out=number)
    np.subtract(out, number, out=out)


class LogSoftmaxGrad(AlongRows):
    """(y, dy) → dy - exp(y) · Σ dy."""

    inplace = (1, 0)
    takes = 2

    def expand(self, b, y, dy):
        return (b.Sub(dy, b.Mul(b.Exp(y), b.ReduceSum(dy, axes=self.reduced(y)))),)


class Hardmax(AlongAxis, onnx=True):
    """1 at the first of the largest elements along the axis, else 0."""

    def scratch(self, ins, outs):
        """Indices of the maximum."""
        outer, _, *inner = self.form(ins[0])
        return (TensorType("i64", (outer, *inner)),)

    def compute(self, ins, outs, scratch):
        outs[0].fill(0)
        if ins[0].size:
            x, y = (a.reshape(self.form(a)) for a in (ins[0], outs[0]))
            np.argmax(x, axis=1, out=scratch[0])
            np.put_along_axis(y, np.expand_dims(scratch[0], 1), 1, axis=1)

    def gradient(self, b, ins, outs, grads):
        """None: it is constant between jumps."""
        return [None]

    @classmethod
    def samples(cls, draw):
        for axis in (0, 1, 2):
            yield draw.case(cls(axis=axis), draw.distinct("f64[2,3,4]"))
        yield draw.case(cls(axis=-1), draw.ints("i64[3,5]", 0, 3).astype("f4"))
