"""Gradient clipping, as operators of the program: `Adam(1e-3, grad_clip=ClipGradByGlobalNorm(1.0))`.

As in Paddle, a gradient whose norm is at most the limit is unchanged, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import UsageError
from ..language.builder import Builder
from ..language.ir import Value

__all__ = ["ClipGradByGlobalNorm", "ClipGradByNorm", "ClipGradByValue", "GradientClip"]


def _positive(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise UsageError(f"{what} must be a positive number, not {value!r}")
    return float(value)


class GradientClip:
    """Base class: `begin` gets all gradients, `scaled` returns one of them clipped, right before its update."""

    def begin(self, b: Builder, gradients: Sequence[Value]) -> Value | None:
        """Emits the value that `scaled` needs from all gradients together."""
        return None

    def scaled(self, b: Builder, g: Value, common: Value | None) -> Value:
        """The clipped gradient."""
        raise NotImplementedError


class ClipGradByValue(GradientClip):
    """Clips every element to [min, max]; `min` is -max by default."""

    def __init__(self, max: float, min: float | None = None) -> None:
        if min is None:
            min = -_positive("ClipGradByValue's max", max)
        if not min <= max:
            raise UsageError(f"ClipGradByValue: min {min} is above max {max}")
        self.min, self.max = float(min), float(max)

    def scaled(self, b, g, common):
        """Max and Min."""
        return b.Min(b.Max(g, b.constant(self.min, g)), b.constant(self.max, g))


class ClipGradByNorm(GradientClip):
    """Scales each gradient whose own norm is above `clip_norm` to that norm."""

    def __init__(self, clip_norm: float) -> None:
        self.clip_norm = _positive("clip_norm", clip_norm)

    def scaled(self, b, g, common):
        """g · clip_norm / max(‖g‖, clip_norm)."""
        return _times(b, g, _factor(b, [g], self.clip_norm))


class ClipGradByGlobalNorm(GradientClip):
    """Scales all gradients by one factor if their common norm is above `clip_norm` (Pascanu et al. 2013).

    Updates wait for all gradients, so that all of them are in memory at once.
    """

    def __init__(self, clip_norm: float) -> None:
        self.clip_norm = _positive("clip_norm", clip_norm)

    def begin(self, b, gradients):
        """clip_norm / max(‖all‖, clip_norm)."""
        return _factor(b, gradients, self.clip_norm)

    def scaled(self, b, g, common):
        """g · factor."""
        assert common is not None
        return _times(b, g, common)


def _factor(b: Builder, gradients: Sequence[Value], limit: float) -> Value:
    norm = b.GlobalNorm(*gradients)
    top = b.constant(limit, norm)
    return b.Div(top, b.Max(norm, top))


def _times(b: Builder, g: Value, factor: Value) -> Value:
    return b.Mul(g, factor if factor.dtype == g.dtype else b.Cast(factor, to=g.dtype))
