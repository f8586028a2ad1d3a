"""FakeQuantize: what QuantizeLinear and DequantizeLinear leave of a value, with a gradient through the rounding."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...language.samples import Draw
from ..common import Elementwise, broadcast


class _Quantizer(Elementwise, abstract=True):
    """(x, scale, zero, ...) whose scale and zero point, floats of x's type, broadcast to x."""

    low: int = -128
    high: int = 127
    floats = True

    def infer(self, *inputs):
        types = super().infer(*inputs)
        x = inputs[0]
        if x.dtype not in ("f32", "f64") or broadcast(self, *inputs) != x.shape:
            raise self.fail("needs float32 or float64, and a scale and zero point that broadcast to x", *inputs)
        if self.low >= self.high:
            raise self.fail(f"low {self.low} is not below high {self.high}", *inputs)
        return types


class FakeQuantize(_Quantizer):
    """(x, scale, zero) → (clip(round(x / scale) + zero, low, high) - zero) · scale; halves are rounded to even.

    Jacob et al. 2018 (arXiv 1712.05877).  The gradient is the straight-through estimator (Bengio et al. 2013, arXiv
    1308.3432): dy where nothing was clipped, else 0.  Scale and zero point get none: they follow from statistics.
    """

    inplace = (0,)
    flops_per_element = 7

    def gradient(self, b, ins, outs, grads):
        """dy where x was not clipped."""
        return [b.FakeQuantizeGrad(*ins, grads[0], low=self.low, high=self.high), None, None]

    def expand(self, b, x, scale, zero):
        """The formula, whose rounding passes gradients on."""
        q = b.Add(b.RoundStraight(b.Div(x, scale)), zero)
        q = b.Clip(q, b.constant(self.low, q), b.constant(self.high, q))
        return (b.Mul(b.Sub(q, zero), scale),)

    @classmethod
    def samples(cls, draw):
        """One scale, one for each index of an axis; nothing.  No gradient check: it is an estimator."""
        yield draw.case(cls(), *quantities(draw, "f64[3,4]", "f64[]"), gradient=False)
        yield draw.case(cls(low=0, high=15), *quantities(draw, "f64[3,4]", "f64[3,1]"), gradient=False)
        yield draw.case(cls(low=-7, high=7), *quantities(draw, "f32[33,1001]", "f32[33,1]"), gradient=False)
        yield draw.case(cls(), *quantities(draw, "f32[0,2]", "f32[]"), gradient=False)


class FakeQuantizeGrad(_Quantizer):
    """(x, scale, zero, dy) → dy where round(x / scale) + zero is within low and high, else 0."""

    linear = ((3,),)
    inplace = (3, 0)
    flops_per_element = 6

    def gradient(self, b, ins, outs, grads):
        """Linear in dy; flat in x."""
        return [None, None, None, b.FakeQuantizeGrad(*ins[:3], grads[0], low=self.low, high=self.high)]

    def expand(self, b, x, scale, zero, dy):
        q = b.Add(b.Round(b.Div(x, scale)), zero)
        inside = b.And(b.GreaterOrEqual(q, b.constant(self.low, q)), b.LessOrEqual(q, b.constant(self.high, q)))
        return (b.Where(inside, dy, b.constant(0, dy)),)

    @classmethod
    def samples(cls, draw):
        """One scale, one for each index of an axis; nothing."""
        for x, scale in (("f64[3,4]", "f64[]"), ("f64[3,4]", "f64[3,1]"), ("f32[33,1001]", "f32[33,1]")):
            yield draw.case(cls(low=-7, high=7), *quantities(draw, x, scale), draw(x), still=(0, 1, 2))
        yield draw.case(cls(), *quantities(draw, "f32[0,2]", "f32[]"), draw("f32[0,2]"))


def quantities(draw: Draw, x: str, scale: str) -> tuple[Any, Any, Any]:
    """x, some of it beyond a few bits of its scale, and away from where its rounding changes; scale; zero point."""
    s = draw(scale, 0.1, 0.2)
    zero = np.rint(draw(scale, -2, 2))
    whole = np.rint(draw(x, -12, 12))
    return ((whole + 0.3 * draw(x)) * s).astype(whole.dtype), s, zero
