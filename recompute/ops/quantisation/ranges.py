"""Ranges of values that are quantised: moving averages of what steps saw, and the scales and zero points from them."""

from __future__ import annotations

import numpy as np

from ..common import Elementwise

#: the least scale, of values that are all 0
LEAST = 1e-15


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

    def expand(self, b, running, batch):
        zero = b.constant(0, running)
        end = b.Max(batch, zero) if self.upper else b.Min(batch, zero)
        kept = b.Mul(running, b.constant(self.momentum, running))
        moved = b.Add(b.Mul(end, b.constant(1 - self.momentum, running)), kept)
        moved = b.Where(b.Equal(running, zero), end, moved)
        return (b.Where(b.Equal(b.Sub(end, end), zero), moved, running),)

    def inference(self, b, ins, running):
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

    def expand(self, b, low, high):
        width = b.Max(b.Abs(high), b.Abs(low)) if self.symmetric else b.Sub(high, low)
        return (b.Max(b.Div(width, b.constant(self.steps, width)), b.constant(LEAST, width)),)

    def gradient(self, b, ins, outs, grads):
        """None: statistics are not trained."""
        return [None, None]

    @classmethod
    def samples(cls, draw):
        for symmetric in (0, 1):
            op = cls(symmetric=symmetric, steps=127)
            yield draw.case(op, draw("f64[3,1]", -2, 0), draw("f64[3,1]", 0, 2), gradient=False)
            yield draw.case(op, np.zeros((), np.float32), np.zeros((), np.float32))


class RangeZero(Elementwise):
    """(low end, scale) → the zero point: the whole number that stands for 0 where `low` stands for the low end."""

    low: int = 0
    high: int = 255

    floats = True
    small_outputs = (0,)
    autocast = "full"
    flops_per_element = 5

    def expand(self, b, end, scale):
        q = b.Sub(b.constant(self.low, end), b.Round(b.Div(end, scale)))
        return (b.Clip(q, b.constant(self.low, q), b.constant(self.high, q)),)

    def gradient(self, b, ins, outs, grads):
        """None: statistics are not trained."""
        return [None, None]

    @classmethod
    def samples(cls, draw):
        yield draw.case(cls(), draw("f64[3]", -1, 0), draw("f64[3]", 0.01, 0.02), gradient=False)
        yield draw.case(cls(low=-128, high=127), draw("f32[]", -1, 0), draw("f32[]", 0.01, 0.02))
