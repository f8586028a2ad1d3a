"""Choosing between values: Where, Max, Min, Clip."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...language.element import maximum, minimum, where
from ...language.op import Imported, ImportedNode, Op, imports
from ...language.types import TensorType, Types, Value
from ..common import Elementwise, Ufunc, broadcast


class Where(Elementwise, onnx=True):
    """x where the condition holds, else y; all three broadcast."""

    def infer(self, condition, x, y):
        """The type of x and y, the shape of all three."""
        if condition.dtype != "bool" or x.dtype != y.dtype:
            raise self.fail("wants bool and two values of one element type", condition, x, y)
        return (TensorType(x.dtype, broadcast(self, condition, x, y)),)

    def element(self, condition, x, y):
        return where(condition, x, y)

    def gradient(self, b, ins, outs, grads):
        """dy on either side of the condition, which is all that is kept."""
        condition, x, y = ins
        zero = b.constant(0, grads[0])
        return [
            None,
            b.sum_to(b.Where(condition, grads[0], zero), x.shape),
            b.sum_to(b.Where(condition, zero, grads[0]), y.shape),
        ]

    @classmethod
    def samples(cls, draw):
        for c, x, y in (("2,3", "2,3", "2,3"), ("3", "2,1", ""), ("2,1", "", "3"), ("", "2", "2"), ("0", "1", "")):
            yield draw.case(cls(), draw.bools(c), draw(f"f64[{x}]"), draw(f"f64[{y}]"))
        yield draw.case(cls(), draw.bools("2,3"), draw.ints("i64[3]", 0, 9), draw.ints("i64[3]", 0, 9))


class Prefer(Elementwise):
    """(a, b, dy) → 0 where a < b, whatever dy is, dy / 2 where a = b, else dy: the gradient of a in max(a, b)."""

    flops_per_element = 4

    def expand(self, b, x, y, dy):
        rest = b.Where(b.Equal(x, y), b.Mul(dy, b.constant(0.5, dy)), dy)
        return (b.Where(b.Less(x, y), b.constant(0, dy), rest),)

    def gradient(self, b, ins, outs, grads):
        return [None, None, b.sum_to(b.Prefer(ins[0], ins[1], grads[0]), ins[2].shape)]

    @classmethod
    def samples(cls, draw):
        x = draw.distinct("f64[3,4]")
        yield draw.case(cls(), x, draw.distinct("f64[4]") + 0.05, draw("f64[3,4]"))
        yield draw.case(cls(), x, x, draw("f64[3,4]"), gradient=False)


def _chain(cls: Any, node: ImportedNode) -> Value:
    """A variadic ONNX operator as a chain of binary ones; of one input: itself."""
    total = node.need(0)
    for v in node.inputs[1:]:
        total = node.emit(cls(), total, v)
    return total


class Max(Ufunc, onnx=True):
    """The larger of a and b; NaN if either is."""

    ufunc = "maximum"

    def gradient(self, b, ins, outs, grads):
        """dy to the larger one; halves where they tie (as PyTorch's maximum)."""
        x, y = ins
        dy = grads[0]
        return [b.sum_to(b.Prefer(x, y, dy), x.shape), b.sum_to(b.Prefer(y, x, dy), y.shape)]

    @classmethod
    def from_onnx(cls, node):
        """Any number of inputs; PyTorch's exporter writes a clamp to numbers as Max and Min."""
        bound = node.constant(1) if len(node.inputs) == 2 and node.source.startswith("aten.clamp") else None
        if bound is None or bound.ndim:
            return _chain(cls, node)
        x, bound = node.inputs
        return node.emit(Clip(), x, *((None, bound) if cls is Min else (bound,)))

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw.distinct("f64[3,4]"), draw.distinct("f64[4]") + 0.05)
        yield draw.case(cls(), draw.distinct("f64[2,2]"), draw("f64[]") * 0 + 0.03)
        yield draw.case(cls(), draw.ints("i32[5]", 0, 3), draw.ints("i32[5]", 0, 3))


class Min(Max, onnx=True):
    """The smaller of a and b; NaN if either is."""

    ufunc = "minimum"

    def gradient(self, b, ins, outs, grads):
        """dy to the smaller one; halves where they tie (as PyTorch's minimum)."""
        x, y = ins
        dy = grads[0]
        return [b.sum_to(b.Prefer(y, x, dy), x.shape), b.sum_to(b.Prefer(x, y, dy), y.shape)]


@imports("Sum")
def _sum(node: ImportedNode) -> Imported:
    from .arithmetic import Add

    return _chain(Add, node)


@imports("Mean")
def _mean(node: ImportedNode) -> Imported:
    from .arithmetic import Add

    total = _chain(Add, node)
    count = len(node.inputs)
    return total if count == 1 else node.builder.Mul(total, node.builder.constant(1 / count, total))


def _within(op: Op, x: TensorType, bounds: Types) -> None:
    for t in bounds:
        if t is not None and (t.dtype != x.dtype or t.ndim):
            raise op.fail("the bounds must be scalars of x's element type", x, *bounds)


def _is_relu6(node: ImportedNode) -> bool:
    """Whether the bounds of a Clip are known to be 0 and 6."""
    for i, (name, wanted) in enumerate((("min", 0.0), ("max", 6.0))):
        bound = node.constant(i + 1) if node.type(i + 1) is not None else node.attributes.get(name)
        if bound is None or np.size(bound) != 1 or float(np.ravel(bound)[0]) != wanted:
            return False
    return True


class Clip(Elementwise, onnx=True):
    """(x, lowest?, highest?) → x within the bounds (scalars); `highest` wins where they contradict."""

    flops_per_element = 2

    def infer(self, x, lowest=None, highest=None):
        _within(self, x, (lowest, highest))
        return (x,)

    def element(self, x, lowest=None, highest=None):
        x = x if lowest is None else maximum(x, lowest)
        return x if highest is None else minimum(x, highest)

    def gradient(self, b, ins, outs, grads):
        """dy between the bounds, 0 at them (as PyTorch's clamp since 2.14); to a bound what was cut by it."""
        x, lowest, highest = (*ins, None, None)[:3]
        dy, zero = grads[0], b.constant(0, grads[0])
        gradients = [b.ClipGrad(x, lowest, highest, dy)]
        above = b.GreaterOrEqual(x, highest) if highest is not None else None
        if above is not None and lowest is not None:
            above = b.Or(above, b.Less(highest, lowest))
        if lowest is not None:
            below = b.LessOrEqual(x, lowest)
            if highest is not None:
                below = b.And(below, b.Less(lowest, highest))
            gradients.append(b.sum_to(b.Where(below, dy, zero), ()))
        elif len(ins) > 1:
            gradients.append(None)
        if above is not None:
            gradients.append(b.sum_to(b.Where(above, dy, zero), ()))
        return gradients

    @classmethod
    def from_onnx(cls, node):
        """Bounds as inputs, or as attributes (opset < 11); of floats within 0 and 6, Relu6."""
        x = node.need(0)
        if x.type.is_float and _is_relu6(node):
            return node.builder.Relu6(x)
        bounds = [node.input(1), node.input(2)]
        for i, name in enumerate(("min", "max")):
            if bounds[i] is None and name in node.attributes:
                bounds[i] = node.builder.constant(node.attributes[name], x)
            elif bounds[i] is not None and bounds[i].ndim and bounds[i].size == 1:
                bounds[i] = node.builder.Reshape(bounds[i], shape=())
        if x.type.is_float and any(v is not None and node.constant(i) is None for i, v in enumerate(bounds, 1)):
            for op, bound in zip((Max(), Min()), bounds, strict=True):  # a bound that is trained shares with x at a tie
                x = x if bound is None else node.emit(op, x, bound)
            return x
        return x if bounds == [None, None] else node.emit(cls(), x, *bounds)

    @classmethod
    def samples(cls, draw):
        low, high = draw("f64[]", -0.31, -0.3), draw("f64[]", 0.4, 0.41)
        x = draw.distinct("f64[3,5]") + 0.02
        for bounds in ((low, high), (low, None), (None, high), (None, None), (high, low), (low,)):
            yield draw.case(cls(), x, *bounds)
        yield draw.case(cls(), draw.ints("i32[9]", -9, 9), draw.ints("i32[]", -4, -3), draw.ints("i32[]", 3, 4))


class ClipGrad(Elementwise):
    """(x, lowest?, highest?, dy) → dy where x is between the bounds, else 0, whatever dy is."""

    flops_per_element = 3

    def infer(self, x, lowest, highest, dy):
        _within(self, x, (lowest, highest))
        if x != dy:
            raise self.fail("x and dy differ in type", x, dy)
        return (dy,)

    def expand(self, b, x, lowest, highest, dy):
        zero = b.constant(0, dy)
        if lowest is not None:
            dy = b.Where(b.Greater(x, lowest), dy, zero)
        if highest is not None:
            dy = b.Where(b.Less(x, highest), dy, zero)
        return (dy,)

    def gradient(self, b, ins, outs, grads):
        return [None, None, None, b.ClipGrad(*ins[:3], grads[0])]

    @classmethod
    def samples(cls, draw):
        low, high = draw("f64[]", -0.31, -0.3), draw("f64[]", 0.4, 0.41)
        x, dy = draw.distinct("f64[3,5]") + 0.02, draw("f64[3,5]")
        for bounds in ((low, high), (low, None), (None, high), (None, None)):
            yield draw.case(cls(), x, *bounds, dy)
