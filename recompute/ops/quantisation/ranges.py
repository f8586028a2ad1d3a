"""Ranges of values that are quantized: moving averages of what steps saw, and the scales and zero points from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...language.element import absolute, equal, maximum, minimum, rint, where
from ..common import Elementwise

#: the least scale, of values that are all 0
LEAST = 1e-15


@dataclass(frozen=True)
class MovingRange(Elementwise):
    """(running, batch) → momentum · running + (1 - momentum) · batch, for one end of a range that holds 0.

    The batch's end is that of its range and 0: at least 0 for the upper end, at most 0 otherwise.  A running end of 0
    has seen nothing: the batch's takes its place.  A batch's end that is infinite or NaN changes nothing.  In inference
    mode: running.
    """

    upper: int = 0
    momentum: float = 0.99

    floats = True
    small_outputs = (0,)
    autocast = "full"
    flops_per_element = 6

    def scratch(self, ins, outs):
        """The batch's end, what it adds, and comparisons."""
        return (outs[0], outs[0], outs[0].with_dtype("bool"))

    def compute(self, xp, ins, outs, scratch):
        """Step by step, and choices."""
        running, batch = ins
        y, (end, part, chosen) = outs[0], scratch
        kind = y.dtype.type
        (xp.maximum if self.upper else xp.minimum)(batch, kind(0), out=end)
        xp.multiply(running, kind(self.momentum), out=y)
        xp.multiply(end, kind(1 - self.momentum), out=part)
        xp.add(part, y, out=y)
        xp.equal(running, kind(0), out=chosen)
        xp.copyto(y, end, where=chosen)
        xp.absolute(end, out=end)
        xp.less(end, kind(np.inf), out=chosen)
        xp.logical_not(chosen, out=chosen)
        xp.copyto(y, running, where=chosen)

    def element(self, running, batch):
        """As the numerics."""
        end = maximum(batch, 0) if self.upper else minimum(batch, 0)
        moved = end * (1 - self.momentum) + running * self.momentum
        return where(equal(end - end, 0), where(equal(running, 0), end, moved), running)

    def expand(self, b, running, batch):
        """The formula."""
        zero = b.constant(0, running)
        end = b.Max(batch, zero) if self.upper else b.Min(batch, zero)
        kept = b.Mul(running, b.constant(self.momentum, running))
        moved = b.Add(b.Mul(end, b.constant(1 - self.momentum, running)), kept)
        moved = b.Where(b.Equal(running, zero), end, moved)
        return (b.Where(b.Equal(b.Sub(end, end), zero), moved, running),)

    def inference(self, b, ins, running):
        """What was seen in training."""
        return (ins[0],)

    def gradient(self, b, ins, outs, grads):
        """None: statistics are not trained."""
        return [None, None]

    @classmethod
    def samples(cls, draw):
        """Both ends, a first batch, one that is not finite."""
        for upper in (0, 1):
            yield draw.case(cls(upper=upper, momentum=0.75), draw("f64[3]"), draw("f64[3]"), gradient=False)
            first = np.zeros((), np.float32)
            yield draw.case(cls(upper=upper), first, draw("f32[]"))
        yield draw.case(cls(upper=1), draw("f32[3]", 1, 2), np.array([np.nan, np.inf, 2], np.float32))


@dataclass(frozen=True)
class RangeScale(Elementwise):
    """(low end, high end) → the scale of `steps` steps from one to the other; at least 1e-15.

    `symmetric`: of that many steps from 0 to the end that is further away.
    """

    steps: int = 255
    symmetric: int = 0

    floats = True
    small_outputs = (0,)
    autocast = "full"
    flops_per_element = 4

    def scratch(self, ins, outs):
        """One end without its sign."""
        return (outs[0],)

    def compute(self, xp, ins, outs, scratch):
        """Step by step."""
        low, high = ins
        y, (end,) = outs[0], scratch
        if self.symmetric:
            xp.absolute(low, out=end)
            xp.absolute(high, out=y)
            xp.maximum(y, end, out=y)
        else:
            xp.subtract(high, low, out=y)
        xp.divide(y, y.dtype.type(self.steps), out=y)
        xp.maximum(y, y.dtype.type(LEAST), out=y)

    def element(self, low, high):
        """As the numerics."""
        width = maximum(absolute(high), absolute(low)) if self.symmetric else high - low
        return maximum(width / self.steps, LEAST)

    def expand(self, b, low, high):
        """The formula."""
        width = b.Max(b.Abs(high), b.Abs(low)) if self.symmetric else b.Sub(high, low)
        return (b.Max(b.Div(width, b.constant(self.steps, width)), b.constant(LEAST, width)),)

    def gradient(self, b, ins, outs, grads):
        """None: statistics are not trained."""
        return [None, None]

    @classmethod
    def samples(cls, draw):
        """Both kinds, nothing seen."""
        for symmetric in (0, 1):
            op = cls(symmetric=symmetric, steps=127)
            yield draw.case(op, draw("f64[3,1]", -2, 0), draw("f64[3,1]", 0, 2), gradient=False)
            yield draw.case(op, np.zeros((), np.float32), np.zeros((), np.float32))


@dataclass(frozen=True)
class RangeZero(Elementwise):
    """(low end, scale) → the zero point: the whole number that stands for 0 where `low` stands for the low end."""

    low: int = 0
    high: int = 255

    floats = True
    small_outputs = (0,)
    autocast = "full"
    flops_per_element = 5

    def compute(self, xp, ins, outs, scratch):
        """Step by step in the output."""
        end, scale = ins
        y = outs[0]
        xp.divide(end, scale, out=y)
        xp.rint(y, out=y)
        xp.subtract(y.dtype.type(self.low), y, out=y)
        xp.maximum(y, self.low, out=y)
        xp.minimum(y, self.high, out=y)

    def element(self, end, scale):
        """As the numerics."""
        return minimum(maximum(self.low - rint(end / scale), self.low), self.high)

    def expand(self, b, end, scale):
        """The formula."""
        q = b.Sub(b.constant(self.low, end), b.Round(b.Div(end, scale)))
        return (b.Clip(q, b.constant(self.low, q), b.constant(self.high, q)),)

    def gradient(self, b, ins, outs, grads):
        """None: statistics are not trained."""
        return [None, None]

    @classmethod
    def samples(cls, draw):
        """Unsigned and signed."""
        yield draw.case(cls(), draw("f64[3]", -1, 0), draw("f64[3]", 0.01, 0.02), gradient=False)
        yield draw.case(cls(low=-128, high=127), draw("f32[]", -1, 0), draw("f32[]", 0.01, 0.02))
