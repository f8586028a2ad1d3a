"""What a lowering opens channels-last batch normalisation into: a factor a channel, and an element-wise operator."""

from __future__ import annotations

from dataclasses import dataclass

from ..element import sqrt
from .common import Elementwise


@dataclass(frozen=True)
class BatchNormFactor(Elementwise):
    """(scale, var) → scale / √(var + epsilon)."""

    epsilon: float = 1e-5
    inplace = (1,)
    flops_per_element = 3

    def compute(self, xp, ins, outs, scratch):
        """Three steps in the output, which is not `scale`."""
        scale, var = ins
        xp.add(var, var.dtype.type(self.epsilon), out=outs[0])
        xp.sqrt(outs[0], out=outs[0])
        xp.divide(scale, outs[0], out=outs[0])

    def element(self, scale, var):
        """The formula."""
        return scale / sqrt(var + self.epsilon)

    def expand(self, b, scale, var):
        """The formula."""
        return (b.Div(scale, b.Sqrt(b.Add(var, b.constant(self.epsilon, var)))),)

    @classmethod
    def samples(cls, draw):
        """Two types."""
        yield draw.case(cls(epsilon=0.1), draw("f64[3]"), draw("f64[3]", 0.5, 2))
        yield draw.case(cls(), draw("f32[3]"), draw("f32[3]", 0.5, 2))


@dataclass(frozen=True)
class CentreScale(Elementwise):
    """(x, mean, factor, bias) → (x - mean) · factor + bias: BatchNormApply's last steps, to the bit."""

    inplace = (0,)
    flops_per_element = 3

    def compute(self, xp, ins, outs, scratch):
        """Three steps in the output."""
        x, mean, factor, bias = ins
        xp.subtract(x, mean, out=outs[0])
        xp.multiply(outs[0], factor, out=outs[0])
        xp.add(outs[0], bias, out=outs[0])

    def element(self, x, mean, factor, bias):
        """The formula."""
        return (x - mean) * factor + bias

    def expand(self, b, x, mean, factor, bias):
        """The formula."""
        return (b.Add(b.Mul(b.Sub(x, mean), factor), bias),)

    @classmethod
    def samples(cls, draw):
        """Vectors along the last axis, two types."""
        yield draw.case(cls(), draw("f64[2,4,3]"), draw("f64[3]"), draw("f64[3]"), draw("f64[3]"))
        yield draw.case(cls(), draw("f32[5,3]"), draw("f32[3]"), draw("f32[3]"), draw("f32[3]"))
