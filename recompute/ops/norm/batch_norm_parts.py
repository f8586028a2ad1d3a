"""What a lowering opens channels-last batch normalisation into: a factor a channel, and an element-wise operator."""

from __future__ import annotations

from ...language.element import sqrt
from ..common import Elementwise


class BatchNormFactor(Elementwise):
    """(scale, var) → scale / √(var + epsilon)."""

    epsilon: float = 1e-5
    inplace = (1,)
    floats = True
    flops_per_element = 3

    def expand(self, b, scale, var):
        return (b.Div(scale, b.Sqrt(b.Add(var, b.constant(self.epsilon, var)))),)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(epsilon=0.1), draw("f64[3]"), draw("f64[3]", 0.5, 2))
        yield draw.case(cls(), draw("f32[3]"), draw("f32[3]", 0.5, 2))


class CentreScale(Elementwise):
    """(x, mean, factor, bias) → (x - mean) · factor + bias: BatchNormApply's last steps, to the bit."""

    inplace = (0,)
    floats = True
    flops_per_element = 3

    def expand(self, b, x, mean, factor, bias):
        return (b.Add(b.Mul(b.Sub(x, mean), factor), bias),)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[2,4,3]"), draw("f64[3]"), draw("f64[3]"), draw("f64[3]"))
        yield draw.case(cls(), draw("f32[5,3]"), draw("f32[3]"), draw("f32[3]"), draw("f32[3]"))


class CentredProduct(Elementwise):
    """(x, mean, dy) → (x - mean) · dy, whose column sums a batch normalisation's gradient needs."""

    inplace = (0,)
    floats = True
    flops_per_element = 2

    def expand(self, b, x, mean, dy):
        return (b.Mul(b.Sub(x, mean), dy),)

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[2,4,3]"), draw("f64[3]"), draw("f64[2,4,3]"))
        yield draw.case(cls(), draw("f32[5,3]"), draw("f32[3]"), draw("f32[5,3]"))


class BatchNormSlope(Elementwise):
    """(x, mean, scale, var, total, against, dy) → dx, the rest of a batch normalisation's gradient.

    total = Σ dy and against = Σ (x - mean) · dy over `count` elements of a channel, s = 1 / √(var + epsilon):
    dx = scale · s · (dy - total / count - (x - mean) · s² · against / count).
    """

    count: int
    epsilon: float = 1e-5
    inplace = (6, 0)
    floats = True
    flops_per_element = 5

    def element(self, x, mean, scale, var, total, against, dy):
        """The formula; what has one value a channel is computed once."""
        s = 1 / sqrt(var + self.epsilon)
        factor = scale * s
        steep = against * s * s * factor / -float(self.count)
        return (x - mean) * steep + dy * factor + total * factor / -float(self.count)

    def expand(self, b, x, mean, scale, var, total, against, dy):
        n = b.constant(float(self.count), x)
        s = b.Div(b.constant(1.0, x), b.Sqrt(b.Add(var, b.constant(self.epsilon, var))))
        steep = b.Div(b.Mul(b.Mul(s, s), against), n)
        inner = b.Sub(b.Sub(dy, b.Div(total, n)), b.Mul(b.Sub(x, mean), steep))
        return (b.Mul(b.Mul(scale, s), inner),)

    @classmethod
    def samples(cls, draw):
        for t in ("f64", "f32"):
            v = [draw(f"{t}[3]"), draw(f"{t}[3]"), draw(f"{t}[3]", 0.5, 2), draw(f"{t}[3]"), draw(f"{t}[3]")]
            yield draw.case(cls(count=8, epsilon=0.1), draw(f"{t}[2,4,3]"), *v, draw(f"{t}[2,4,3]"))
