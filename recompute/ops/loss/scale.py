"""Dynamic loss scaling: whether all gradients are finite, and the scale that follows (Micikevicius et al. 2018).

Both are decided by operators on scalars in memory, so that a step is the same list of operators whatever happens.
"""

from __future__ import annotations

import numpy as np

from ...language.op import Cost, Op
from ...language.types import TensorType
from ..optimizer.base import PART

#: the smallest and the largest scale: both have an inverse in float32
LEAST, MOST = 2.0**-126, 2.0**126


class InverseIfFinite(Op):
    """(scale, gradients...) → 1 / scale, or 0 where an element of a gradient is infinite or NaN: f32[].

    What updates take as `unscale`.
    """

    def infer(self, scale, *gradients):
        if scale != TensorType("f32", ()):
            raise self.fail("the scale must be f32[]", scale, *gradients)
        if not gradients or any(not g.is_float for g in gradients):
            raise self.fail("it takes one or more floating-point gradients", scale, *gradients)
        return (scale,)

    def scratch(self, ins, outs):
        return (TensorType("bool", (min(max(g.size for g in ins[1:]), PART),)),)

    def compute(self, ins, outs, scratch):
        good = np.ones((), bool)
        for g in ins[1:]:
            g = g.reshape(-1)
            for start in range(0, g.size, PART):
                part = g[start : start + PART]
                good = good & np.all(np.isfinite(part, out=scratch[0][: part.size]))
        outs[0][...] = np.where(good, 1 / ins[0], 0)

    def cost(self, ins, outs):
        return Cost(sum(g.size for g in ins), super().cost(ins, outs).bytes)

    def expand(self, b, scale, *gradients):
        """x - x is 0 where x is finite, else NaN, and so is a sum of it."""
        parts = []
        for g in gradients:
            if g.size:
                wide = g if g.dtype in ("f32", "f64") else b.Cast(g, to="f32")
                total = b.ReduceSum(b.Sub(wide, wide), keepdims=0)
                parts.append(total if total.dtype == "f32" else b.Cast(total, to="f32"))
        zero = b.constant(0.0, scale)
        inverse = b.Div(b.constant(1.0, scale), scale)
        return (b.Where(b.Equal(b.add_all(parts), zero), inverse, zero) if parts else inverse,)

    @classmethod
    def samples(cls, draw):
        """Finite, infinite, NaN; several of different types, an empty one; more than a part."""
        scale = np.array(1024, np.float32)
        for bad in (1.0, np.inf, -np.inf, np.nan):
            x, y = draw("f32[3,4]"), draw("f16[5]")
            y[3] = bad
            yield draw.case(cls(), scale, x, y, draw("f64[]"), draw("f32[0]"), gradient=False)
        long = draw(f"f32[{PART + 7}]")
        yield draw.case(cls(), scale, long.copy(), gradient=False)
        long[-1] = np.inf
        yield draw.case(cls(), scale, long, gradient=False)


class LossScaleUpdate(Op):
    """(scale, good, unscale) → both in place: the next step's scale, and how many steps in a row were finite.

    After a step that was skipped (`unscale` 0) the scale is multiplied by `backoff`; after `interval` good ones in a
    row by `growth`.  PyTorch's GradScaler and its defaults.
    """

    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    updates = (0, 1)
    required_outputs = 2

    def infer(self, scale, good, unscale):
        if scale != TensorType("f32", ()) or good != TensorType("i64", ()) or unscale != scale:
            raise self.fail("needs f32[], i64[], f32[]", scale, good, unscale)
        return scale, good

    def compute(self, ins, outs, scratch):
        scale, good, unscale = ins
        skipped, count = unscale == 0, good + 1
        grown = count >= self.interval
        after = np.where(skipped, scale * np.float32(self.backoff), scale * np.where(grown, np.float32(self.growth), 1))
        outs[1][...] = np.where(skipped | grown, 0, count)
        outs[0][...] = np.clip(after, LEAST, MOST)

    def expand(self, b, scale, good, unscale):
        skipped = b.Equal(unscale, b.constant(0.0, unscale))
        count = b.Add(good, b.constant(1, good))
        grown = b.GreaterOrEqual(count, b.constant(self.interval, count))
        one, factor, less = (b.constant(v, scale) for v in (1.0, self.growth, self.backoff))
        after = b.Mul(scale, b.Where(skipped, less, b.Where(grown, factor, one)))
        after = b.Min(b.Max(after, b.constant(LEAST, scale)), b.constant(MOST, scale))
        return after, b.Where(b.Or(skipped, grown), b.constant(0, good), count)

    @classmethod
    def samples(cls, draw):
        for scale, good, unscale in ((64, 5, 0.0), (64, 5, 1 / 64), (64, 9, 1 / 64), (MOST, 9, 0.5), (LEAST, 0, 0.0)):
            given = np.array(scale, np.float32), np.array(good, np.int64), np.array(unscale, np.float32)
            yield draw.case(cls(interval=10), *given)
