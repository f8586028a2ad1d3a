"""The indices of normalisations: images, positions and channels, rows, groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...language.factors import Factor, Place, factor, needed_whole
from ...language.types import TensorType, Types, need


def by_channel(ins: Types, outs: Types) -> tuple[Factor, ...]:
    """The factor of channels: axis 1 of [n, c, ...], the only one of vectors."""
    inputs, outputs = ([None if t is None else min(t.ndim - 1, 1) for t in types] for types in (ins, outs))
    x = need(ins[0])
    return (factor(x.shape[1], inputs, outputs),)


def by_element(ins: Types, outs: Types) -> tuple[Factor, ...]:
    """The factors of all other axes of x, and of whatever has its type."""
    x = need(ins[0])

    def at(types: Types, axis: int) -> list[int | None]:
        return [axis if t is not None and t.shape == x.shape else None for t in types]

    return tuple(factor(x.shape[a], at(ins, a), at(outs, a)) for a in range(x.ndim) if a != 1)


def rows(x: TensorType, outs: Types, count: int) -> tuple[Factor, ...]:
    """Factors of the first `count` axes, along which no statistic is taken; the others are needed whole."""
    factors = [factor(d, [a], [a] * len(outs)) for a, d in enumerate(x.shape[:count])]
    others = [factor(d, [count + a, a, a], [count + a]) for a, d in enumerate(x.shape[count:])]
    return (*factors, *needed_whole(others))


def by_group(x: TensorType, outs: Sequence[Any], groups: int, counts: str = "") -> tuple[Factor, ...]:
    """Factors of images, and of groups of channels; statistics are [n, groups]."""
    each = x.shape[1] // max(groups, 1)
    vector = Place(0, inner=each)
    channels = factor(groups, [Place(1, inner=each), vector, vector], [Place(1, inner=each), 1, 1], counts=counts)
    return (factor(x.shape[0], [0], [0] * len(outs)), channels)
