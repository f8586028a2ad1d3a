"""Functions whose formulas overflow or cancel where they need not; `find-stable` finds those that are written out."""

from __future__ import annotations

import math

import numpy as np

from ...language.types import Value
from ..common import Elementwise
from ..tiles import Tiled
from .elementary import Function
from .piecewise import unary_samples

#: the largest loss of one label in PyTorch's binary cross entropy, and what its gradient divides by at least
BCE_BOUND, BCE_LEAST = 100.0, 1e-12


class Log1p(Function):
    """ln(1 + x), also of an x that 1 + x loses."""

    ufunc = "log1p"
    domain = (-0.5, 2.0)

    def gradient(self, b, ins, outs, grads):
        """dy / (1 + x), 0 where dy is 0."""
        return [b.LogGrad(b.Add(ins[0], b.constant(1, ins[0])), grads[0])]

    def expand(self, b, x):
        return (b.Log(b.Add(x, b.constant(1, x))),)


class Expm1(Function):
    """e^x - 1, also where e^x is close to 1."""

    ufunc = "expm1"

    def gradient(self, b, ins, outs, grads):
        """dy · e^x."""
        return [b.Mul(grads[0], b.Exp(ins[0]))]

    def expand(self, b, x):
        return (b.Sub(b.Exp(x), b.constant(1, x)),)


class LogAddExp(Elementwise):
    """ln(e^a + e^b)."""

    autocast = "full"
    floats = True
    takes = 2
    flops_per_element = 24

    def compute(self, ins, outs, scratch):
        np.logaddexp(ins[0], ins[1], out=outs[0])

    def expand(self, b, x, y):
        """max + ln(1 + e^-|a - b|); equal numbers apart, since the difference of infinite ones is none."""
        apart = b.Add(b.Max(x, y), b.Softplus(b.Neg(b.Abs(b.Sub(x, y)))))
        return (b.Where(b.Equal(x, y), b.Add(x, b.constant(math.log(2), x)), apart),)

    def gradient(self, b, ins, outs, grads):
        """dy · σ(a - b) and dy · σ(b - a)."""
        x, y = ins
        return [b.sum_to(b.Mul(grads[0], b.Sigmoid(b.Sub(p, q))), p.shape) for p, q in ((x, y), (y, x))]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[2,3]"), draw("f64[3]"))
        yield draw.case(cls(), draw("f64[]"), draw("f64[2,1]"))
        yield draw.case(cls(), draw("f32[9]", -200, 200), draw("f32[9]", -200, 200))


class Atan2(Elementwise):
    """(y, x) → the angle of the point (x, y), from -π to π, by the signs of zeros where it is on an axis."""

    autocast = "full"
    floats = True
    takes = 2
    flops_per_element = 16

    def compute(self, ins, outs, scratch):
        np.arctan2(ins[0], ins[1], out=outs[0])

    def expand(self, b, y, x):
        """The arc tangent of the smaller over the larger, turned to where it belongs."""
        zero, half = b.constant(0, x), b.constant(math.pi / 2, x)
        steep, alike = b.Greater(b.Abs(y), b.Abs(x)), b.Equal(b.Abs(y), b.Abs(x))
        over, under = b.Where(steep, x, y), b.Where(steep, y, x)
        part = b.Atan(b.Where(alike, b.Mul(b.Sign(over), b.Sign(under)), b.Div(over, under)))

        def negative(v: Value) -> Value:  # -0 as well
            return b.Or(b.Less(v, zero), b.Less(b.Reciprocal(v), zero))

        half = b.Where(negative(y), b.Neg(half), half)
        flat = b.Add(part, b.Where(negative(x), b.Add(half, half), zero))
        return (b.Where(steep, b.Sub(half, part), flat),)

    def gradient(self, b, ins, outs, grads):
        """dy · x / (x² + y²) and -dy · y / (x² + y²), 0 in the origin; x and y scaled, so that no square overflows."""
        y, x = ins
        far = b.Max(b.Abs(x), b.Abs(y))
        zero, one = b.constant(0, far), b.constant(1, far)
        origin = b.Equal(far, zero)
        far = b.Where(b.Or(origin, b.Equal(far, b.constant(math.inf, far))), one, far)
        p, q = b.Div(x, far), b.Div(y, far)
        squares = b.Add(b.Mul(p, p), b.Mul(q, q))
        scale = b.Div(grads[0], b.Where(origin, one, b.Mul(squares, far)))
        return [b.sum_to(b.Mul(scale, p), y.shape), b.Neg(b.sum_to(b.Mul(scale, q), x.shape))]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw.away("f64[3,4]"), draw.away("f64[4]"))
        yield draw.case(cls(), draw.away("f64[]"), draw.away("f64[2,1]"))
        yield draw.case(cls(), draw("f32[9]"), draw("f32[9]"))


class Sinc(Tiled):
    """sin(x) / x, 1 at 0."""

    autocast = "full"
    flops_per_element = 14

    def expand(self, b, x):
        zero, one = b.constant(0, x), b.constant(1, x)
        return (b.Where(b.Equal(x, zero), one, b.Div(b.Sin(x), x)),)

    def gradient(self, b, ins, outs, grads):
        """dy · (cos x - y) / x; by its series where |x| < 1, since the difference loses there."""
        x = ins[0]
        square = b.Mul(x, x)
        # (cos x - sin x / x) / x is the sum of (-1)^k x^(2k-1) · 2k / (2k+1)!
        terms = [(-1) ** k * 2 * k / math.factorial(2 * k + 1) for k in range(1, 10)]
        series = b.constant(terms[-1], x)
        for term in terms[-2::-1]:
            series = b.Add(b.Mul(series, square), b.constant(term, x))
        slope = b.Div(b.Sub(b.Cos(x), outs[0]), x)
        near = b.Less(square, b.constant(1, x))
        return [b.Mul(grads[0], b.Where(near, b.Mul(series, x), slope))]

    @classmethod
    def samples(cls, draw):
        yield from unary_samples(cls(), draw, 3.0)
        yield draw.case(cls(), draw("f64[7]", 1.5, 9.0))


class BoundedLogSigmoid(Tiled):
    """ln σ(x), but no less than -100: a label's part of PyTorch's binary cross entropy of a sigmoid."""

    autocast = "full"
    flops_per_element = 22

    def expand(self, b, x):
        return (b.Max(b.Neg(b.Softplus(b.Neg(x))), b.constant(-BCE_BOUND, x)),)

    def gradient(self, b, ins, outs, grads):
        """dy · σ(-x), times σ(x) · σ(-x) / 1e-12 where that is below 1, as PyTorch's binary cross entropy has it."""
        x = ins[0]
        rest = b.Sigmoid(b.Neg(x))
        slope = b.Mul(b.Mul(rest, b.Sigmoid(x)), b.constant(1 / BCE_LEAST, x))
        return [b.Mul(grads[0], b.Mul(rest, b.Min(slope, b.constant(1, x))))]

    @classmethod
    def samples(cls, draw):
        yield from unary_samples(cls(), draw, 3.0)
        yield draw.case(cls(), draw("f32[9]", -200, 200))
