"""Piecewise activations.  Where the gradient can be had from the output, the input is not kept."""

from __future__ import annotations

from collections.abc import Iterator

from ...language.element import maximum, minimum, where
from ...language.op import Case, Op
from ...language.samples import Draw
from ..common import Elementwise
from ..tiles import Tiled


class TanhGrad(Tiled):
    """(y, dy) → dy · (1 - y²)."""

    flops_per_element = 3

    def expand(self, b, y, dy):
        return (b.Mul(dy, b.Sub(b.constant(1, y), b.Mul(y, y))),)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[3,4]"), draw("f64[3,4]"))


def unary_samples(op: Op, draw: Draw, scale: float = 1.0) -> Iterator[Case]:
    """Away from 0 in all float types, `scale` times as large; a scalar, nothing, more than a tile."""
    for shape in ("3,4", "", "0,2"):
        yield draw.case(op, draw.away(f"f64[{shape}]") * scale)
    yield draw.case(op, draw.away("f32[33,1001]") * scale)
    yield draw.case(op, (draw.away("f32[5]") * scale).astype("f2"))


def gradient_samples(op: Op, draw: Draw, scale: float = 1.0) -> Iterator[Case]:
    """Samples of an operator (x or y, dy)."""
    for shape in ("3,4", "0,2"):
        yield draw.case(op, draw.away(f"f64[{shape}]") * scale, draw(f"f64[{shape}]"))
    yield draw.case(op, (draw.away("f32[5]") * scale).astype("f2"), draw("f16[5]"))


class LeakyRelu(Tiled, onnx=True):
    """x where x ≥ 0, else alpha · x."""

    alpha: float = 0.01

    flops_per_element = 2

    def element(self, x):
        low = x * self.alpha
        return maximum(low, x) if 0 < self.alpha <= 1 else where(x > 0, x, low)

    def gradient(self, b, ins, outs, grads):
        """From the output, whose sign is x's for alpha ≥ 0; alpha · dy at the kink, as PyTorch."""
        return [b.LeakyReluGrad(outs[0] if self.alpha >= 0 else ins[0], grads[0], alpha=self.alpha)]

    @classmethod
    def samples(cls, draw):
        yield from unary_samples(cls(alpha=0.125), draw)
        for alpha in (2.0, -0.5, 0.0):
            yield draw.case(cls(alpha=alpha), draw.away("f64[3,4]"))


class LeakyReluGrad(Tiled):
    """(x or y, dy) → dy where x > 0, else alpha · dy."""

    alpha: float = 0.01

    flops_per_element = 2

    def expand(self, b, x, dy):
        return (b.Where(b.Greater(x, b.constant(0, x)), dy, b.Mul(dy, b.constant(self.alpha, dy))),)

    def gradient(self, b, ins, outs, grads):
        """Linear in dy; flat in x."""
        return [None, b.LeakyReluGrad(ins[0], grads[0], alpha=self.alpha)]

    @classmethod
    def samples(cls, draw):
        yield from gradient_samples(cls(alpha=0.125), draw)


class PRelu(Elementwise, onnx=True):
    """(x, slope) → x where x ≥ 0, else slope · x; the slope broadcasts to x."""

    flops_per_element = 2
    weights = (1,)

    def infer(self, x, slope):
        if super().infer(x, slope) != (x,):
            raise self.fail("the slope does not broadcast to x", x, slope)
        return (x,)

    def element(self, x, slope):
        return where(x >= 0, x, slope * x)

    def gradient(self, b, ins, outs, grads):
        """dx by a choice; the slope's is the sum of dy · min(x, 0)."""
        x, slope = ins
        cut = b.Mul(grads[0], b.Min(x, b.constant(0, x)))
        return [b.PReluGrad(x, slope, grads[0]), b.sum_to(cut, slope.shape)]

    @classmethod
    def samples(cls, draw):
        for slope in ("1", "3,1,1", "2,3,2,2", ""):
            yield draw.case(cls(), draw.away("f64[2,3,2,2]"), draw(f"f64[{slope}]"))


class PReluGrad(Elementwise):
    """(x, slope, dy) → dy where x > 0, else slope · dy."""

    flops_per_element = 2

    def infer(self, x, slope, dy):
        if super().infer(x, slope, dy) != (dy,):
            raise self.fail("x and the slope do not fit dy", x, slope, dy)
        return (dy,)

    def expand(self, b, x, slope, dy):
        return (b.Where(b.Greater(x, b.constant(0, x)), dy, b.Mul(dy, slope)),)

    @classmethod
    def samples(cls, draw):
        for slope in ("3,1,1", "2,3,2,2"):
            x = draw.away("f64[2,3,2,2]")
            yield draw.case(cls(), x, draw(f"f64[{slope}]"), draw("f64[2,3,2,2]"))


class ThresholdedRelu(Tiled, onnx=True):
    """0 where x ≤ alpha, else x; NaN stays."""

    alpha: float = 1.0

    def element(self, x):
        return where(x <= self.alpha, 0, x)

    def gradient(self, b, ins, outs, grads):
        """From the output, which is above alpha where x is, for alpha ≥ 0."""
        return [b.ThresholdedReluGrad(outs[0] if self.alpha >= 0 else ins[0], grads[0], alpha=self.alpha)]

    @classmethod
    def samples(cls, draw):
        for alpha in (0.0, 0.1, -0.1):
            yield draw.case(cls(alpha=alpha), draw.away("f64[3,4]"))


class ThresholdedReluGrad(Elementwise):
    """(x or y, dy) → 0 where it is at most alpha, whatever dy is, else dy."""

    alpha: float = 1.0

    def expand(self, b, x, dy):
        return (b.Where(b.LessOrEqual(x, b.constant(self.alpha, x)), b.constant(0, dy), dy),)

    def gradient(self, b, ins, outs, grads):
        """Linear in dy; flat in x."""
        return [None, b.ThresholdedReluGrad(ins[0], grads[0], alpha=self.alpha)]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(alpha=0.1), draw.away("f64[3,4]"), draw("f64[3,4]"))


class Shrink(Tiled, onnx=True):
    """x + bias where x < -lambd, x - bias where x > lambd, else 0."""

    bias: float = 0.0
    lambd: float = 0.5

    flops_per_element = 4

    def element(self, x):
        return where(x < -self.lambd, x + self.bias, where(x <= self.lambd, 0, x - self.bias))

    def gradient(self, b, ins, outs, grads):
        """dy outside of the gap."""
        x = ins[0]
        if self.lambd >= 0:
            return [b.ThresholdedReluGrad(b.Abs(x), grads[0], alpha=self.lambd)]
        return [grads[0]]

    @classmethod
    def samples(cls, draw):
        yield from unary_samples(cls(bias=0.1, lambd=0.1), draw)
        yield draw.case(cls(bias=0.25, lambd=0.5), draw("f64[3,4]", 0.6, 0.9))
        yield draw.case(cls(), draw("f64[3,4]", -0.4, 0.4))


class HardSigmoid(Elementwise, onnx=True):
    """alpha · x + beta, held within 0 and 1."""

    alpha: float = 0.2
    beta: float = 0.5

    flops_per_element = 4
    floats = True

    def element(self, x):
        return minimum(maximum(x * self.alpha + self.beta, 0), 1)

    def gradient(self, b, ins, outs, grads):
        """From the output: alpha · dy strictly inside, as PyTorch."""
        return [b.HardSigmoidGrad(outs[0], grads[0], alpha=self.alpha)]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw.away("f64[3,4]", 0.3))
        yield draw.case(cls(alpha=1.0, beta=0.5), draw.away("f64[3,4]", 0.6))
        yield draw.case(cls(), draw("f32[3]", -5, 5))


class HardSigmoidGrad(Tiled):
    """(y, dy) → 0 where y ≤ 0 or y ≥ 1, whatever dy is, else alpha · dy."""

    alpha: float = 0.2

    flops_per_element = 4

    def expand(self, b, y, dy):
        cut = b.Or(b.LessOrEqual(y, b.constant(0, y)), b.GreaterOrEqual(y, b.constant(1, y)))
        return (b.Where(cut, b.constant(0, dy), b.Mul(dy, b.constant(self.alpha, dy))),)

    def gradient(self, b, ins, outs, grads):
        """Linear in dy; flat in y."""
        return [None, b.HardSigmoidGrad(ins[0], grads[0], alpha=self.alpha)]

    @classmethod
    def samples(cls, draw):
        yield from gradient_samples(cls(alpha=0.5), draw, 1.5)


class HardSwish(Tiled, onnx=True):
    """x · HardSigmoid(x) with slope 1/6: x · min(max(x + 3, 0), 6) / 6."""

    flops_per_element = 5

    def element(self, x):
        return minimum(maximum(x + 3, 0), 6) * x / 6

    def gradient(self, b, ins, outs, grads):
        return [b.HardSwishGrad(ins[0], grads[0])]

    @classmethod
    def samples(cls, draw):
        yield from unary_samples(cls(), draw, 2.0)
        yield draw.case(cls(), draw.away("f64[3,4]", 0.8) * 4)


class HardSwishGrad(Tiled):
    """(x, dy) → dy · (x/3 + 1/2) between -3 and 3; below that 0, whatever dy is, above it dy."""

    flops_per_element = 9

    def expand(self, b, x, dy):
        three = b.constant(3, x)
        middle = b.Mul(b.Add(b.Div(x, three), b.constant(0.5, x)), dy)
        left = b.Where(b.LessOrEqual(x, b.constant(-3, x)), b.constant(0, dy), middle)
        return (b.Where(b.GreaterOrEqual(x, three), dy, left),)

    @classmethod
    def samples(cls, draw):
        yield from gradient_samples(cls(), draw, 2.0)
        yield draw.case(cls(), draw.away("f64[3,4]", 0.8) * 4, draw("f64[3,4]"))
