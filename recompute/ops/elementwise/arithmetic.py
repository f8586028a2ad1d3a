"""Arithmetic on tensors with broadcasting, and the unary functions of mathematics."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...language.element import cast, function, power
from ...language.op import Case, Op
from ...language.samples import Draw
from ...language.types import TensorType, present
from ..common import Elementwise, Ufunc


class Add(Ufunc, onnx=True):
    """a + b."""

    linear = ((0, 1),)
    ufunc = "add"

    def gradient(self, b, ins, outs, grads):
        """Both gradients are dy, summed over what was broadcast; nothing is kept."""
        return [b.sum_to(grads[0], v.shape) for v in ins]

    @classmethod
    def samples(cls, draw):
        """Equal shapes, broadcasting on both sides, a scalar, an empty dimension."""
        yield from _binary_samples(cls(), draw)


class Sub(Ufunc, onnx=True):
    """a - b."""

    linear = ((0, 1),)
    ufunc = "subtract"
    truths = False

    def gradient(self, b, ins, outs, grads):
        """dy and -dy; nothing is kept."""
        return [b.sum_to(grads[0], ins[0].shape), b.Neg(b.sum_to(grads[0], ins[1].shape))]

    @classmethod
    def samples(cls, draw):
        yield from _binary_samples(cls(), draw)


class Mul(Ufunc, onnx=True):
    """a · b, element by element."""

    linear = ((0,), (1,))
    ufunc = "multiply"

    def gradient(self, b, ins, outs, grads):
        """dy · b and dy · a."""
        x, y = ins
        return [b.sum_to(b.Mul(grads[0], y), x.shape), b.sum_to(b.Mul(grads[0], x), y.shape)]

    @classmethod
    def samples(cls, draw):
        yield from _binary_samples(cls(), draw)


class Div(Elementwise, onnx=True):
    """a / b; integers are divided towards zero (as in C, and in ONNX)."""

    linear = ((0,),)
    truths = False

    def compute(self, ins, outs, scratch):
        """True division for floats; exact truncation for integers."""
        if outs[0].dtype.kind in "iu":
            # floor division, corrected where the signs differ and there is a remainder
            a, b = ins
            quotient = np.floor_divide(a, b)
            wrong = (np.remainder(a, b) != 0) & ((a < 0) != (b < 0))
            np.add(quotient, wrong, out=outs[0], casting="unsafe")
        else:
            np.divide(ins[0], ins[1], out=outs[0])

    def element(self, x, y):
        return x / y if x.type.is_float else function("quotient")(x, y)

    def gradient(self, b, ins, outs, grads):
        """dy / b and -dy · y / b: the second from the output."""
        x, y = ins
        dx = b.Div(grads[0], y)
        return [b.sum_to(dx, x.shape), b.Neg(b.sum_to(b.Mul(dx, outs[0]), y.shape))]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[3,4]"), draw("f64[3,4]", 0.5, 2.0))
        yield draw.case(cls(), draw("f64[3,4]"), draw("f64[4]", 0.5, 2.0))
        yield draw.case(cls(), draw("f64[]"), draw("f64[2,1]", -2.0, -0.5))
        yield draw.case(cls(), draw.ints("i64[9]", -9, 9), draw.ints("i64[9]", 1, 5))


def _binary_samples(op: Op, draw: Draw) -> Iterator[Case]:
    for a, b in (("2,3", "2,3"), ("2,3", "3"), ("2,1", "1,3"), ("", "2,3"), ("0,3", "1,3")):
        yield draw.case(op, draw(f"f64[{a}]"), draw(f"f64[{b}]"))
    yield draw.case(op, draw("f32[2,3]"), draw("f32[2,3]"))


class Neg(Ufunc, onnx=True):
    """-x."""

    linear = ((0,),)
    ufunc = "negative"
    truths = False

    def gradient(self, b, ins, outs, grads):
        return [b.Neg(grads[0])]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[2,3]"))


class LogGrad(Elementwise):
    """(x, dy) → dy / x, 0 where dy is 0: x may be 0 where a logarithm is cut off, as in a binary cross entropy."""

    autocast = "full"
    floats = True
    flops_per_element = 5

    def expand(self, b, x, dy):
        zero = b.constant(0, dy)
        return (b.Where(b.Equal(dy, zero), zero, b.Div(dy, x)),)

    def gradient(self, b, ins, outs, grads):
        """Linear in dy; -dy / x² by x."""
        x = ins[0]
        return [b.Neg(b.LogGrad(x, b.Mul(grads[0], outs[0]))), b.LogGrad(x, grads[0])]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[2,3]", 0.5, 3.0), draw("f64[2,3]"))


class Pow(Elementwise, onnx=True):
    """x^e; the exponent's element type may differ from the base's, the result has the base's."""

    autocast = "full"
    flops_per_element = 16

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        """The base's element type, the broadcast shape."""
        x, e = present(*inputs)
        return super().infer(x, e.with_dtype(x.dtype))

    def compute(self, ins, outs, scratch):
        """One power call (products for the common squares and cubes come from `from_onnx`)."""
        np.power(ins[0], ins[1], out=outs[0], casting="unsafe")

    def element(self, x, e):
        """The power, in the base's type."""
        return power(x, cast(e, x.dtype)) if x.type.is_float else None

    def gradient(self, b, ins, outs, grads):
        """dy · e · x^(e-1), 0 where e = 0; dy · y · ln x for a floating exponent, 0 where x = 0 ≤ e (as in PyTorch)."""
        x, e = ins
        exponent = e if e.dtype == x.dtype else b.Cast(e, to=x.dtype)
        dx = b.Mul(grads[0], b.Mul(exponent, b.Pow(x, b.Sub(exponent, b.constant(1, x)))))
        none, zero = b.constant(0, x), b.constant(0, exponent)
        dx = b.Where(b.Equal(exponent, zero), none, dx)
        if not e.type.is_float:
            return [b.sum_to(dx, x.shape), None]
        flat = b.And(b.Equal(x, none), b.GreaterOrEqual(exponent, zero))
        de = b.Where(flat, none, b.Mul(grads[0], b.Mul(outs[0], b.Log(x))))
        de = b.sum_to(de, e.shape)
        return [b.sum_to(dx, x.shape), de if e.dtype == x.dtype else b.Cast(de, to=e.dtype)]

    @classmethod
    def from_onnx(cls, node):
        """x² and x³ as products, √x as a root: exact, and what a gradient needs is smaller."""
        x, e = node.inputs
        exponent = node.constant(1)
        if exponent is not None and exponent.size == 1 and x.type.is_float and exponent.ndim <= x.ndim:
            b = node.builder
            power = float(exponent.reshape(()))
            if power == 2.0:
                return b.Mul(x, x)
            if power == 3.0:
                return b.Mul(b.Mul(x, x), x)
            if power == 0.5:
                return b.Sqrt(x)
            if math.isfinite(power) and e.dtype != x.dtype:
                return b.Pow(x, b.constant(power, x))
        return node.emit(cls(), x, e)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[2,3]", 0.5, 2.0), draw("f64[2,3]"))
        yield draw.case(cls(), draw("f64[2,3]", 0.5, 2.0), draw("f64[]", 1.5, 2.5))
        yield draw.case(cls(), draw("f64[2,3]", 0.5, 2.0), draw.ints("i64[3]", 1, 4))
