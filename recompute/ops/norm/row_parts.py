"""The last steps of layer and RMS normalisation, once the statistics of each row are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...language.types import Value
from ..common import Elementwise


class RowCentreScale(Elementwise):
    """(x, mean, 1/deviation, scale, bias) → (x - mean) · inverse · scale + bias: LayerNormalization's, to the bit."""

    inplace = (0,)
    floats = True
    flops_per_element = 4

    def expand(self, b, x, mean, inverse, scale, bias):
        return (b.Add(b.Mul(b.Mul(b.Sub(x, mean), inverse), scale), bias),)

    @classmethod
    def samples(cls, draw):
        """Statistics of rows, vectors along the last axis, two types."""
        yield draw.case(
            cls(), draw("f64[2,4,3]"), draw("f64[2,4,1]"), draw("f64[2,4,1]"), draw("f64[3]"), draw("f64[3]")
        )
        yield draw.case(cls(), draw("f32[5,3]"), draw("f32[5,1]"), draw("f32[5,1]"), draw("f32[3]"), draw("f32[3]"))


class RowScale(Elementwise):
    """(x, 1/deviation, scale) → x · inverse · scale: RMSNormalization's last steps, to the bit."""

    inplace = (0,)
    floats = True
    flops_per_element = 2

    def expand(self, b, x, inverse, scale):
        return (b.Mul(b.Mul(x, inverse), scale),)

    @classmethod
    def samples(cls, draw):
        """Statistics of rows, a vector along the last axis, two types."""
        yield draw.case(cls(), draw("f64[2,4,3]"), draw("f64[2,4,1]"), draw("f64[3]"))
        yield draw.case(cls(), draw("f32[5,3]"), draw("f32[5,1]"), draw("f32[3]"))


def last_steps(ins: Sequence[Value], statistics: Sequence[Value], *, centred: bool) -> Any:
    """The last steps of a normalisation of (x, scale, bias), and their inputs; None where a type is another."""
    x, scale, bias = ins[0], ins[1], (*ins, None)[2]
    inputs = (scale, *statistics) if not centred else (scale, bias, *statistics)
    if len(inputs) < (4 if centred else 2) or any(v is None or v.dtype != x.dtype for v in inputs):
        return None
    if centred:
        return RowCentreScale(), (x, *statistics, scale, bias)
    return RowScale(), (x, *statistics, scale)
