"""Operators with channels-last activations: [n, spatial..., c] in place of ONNX's [n, c, spatial...].

An operator says it by `Op.channels_last`; the pass `channels-last` decides which operators are turned.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .types import TensorType


@dataclass(frozen=True)
class Turned:
    """An operator, `op`, whose activations are channels-last.

    `inputs`: for each the rank of the activations it goes with, 0 where it stays as it is; one of fewer dimensions is
    broadcast against them.  `outputs`: whether each is channels-last.  `always`: the form does not depend on what
    stands around the operator, as the order of its sums, or its kernel, depends on it.
    """

    op: Any
    inputs: tuple[int, ...]
    outputs: tuple[bool, ...]
    always: bool = False


@functools.cache
def to_last(ndim: int) -> tuple[int, ...]:
    """The permutation of axes that puts the second one last."""
    return (0, *range(2, ndim), 1) if ndim > 2 else tuple(range(ndim))


@functools.cache
def to_first(ndim: int) -> tuple[int, ...]:
    """The permutation of axes that makes the last one the second."""
    return (0, ndim - 1, *range(1, ndim - 1)) if ndim > 2 else tuple(range(ndim))


def permuted(t: TensorType, perm: Sequence[int]) -> TensorType:
    """The type with its axes in another order."""
    return t.with_shape([t.shape[p] for p in perm])


def turned_axis(axis: int, rank: int) -> int:
    """Where an axis stands in the channels-last form."""
    return to_last(rank).index(axis % rank)


def turned_axes(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Where axes stand in the channels-last form."""
    return tuple(turned_axis(a, rank) for a in axes)


def turned_list(values: Sequence[Any]) -> tuple[Any, ...]:
    """One entry an axis, in channels-last order."""
    return tuple(values[p] for p in to_last(len(values)))


def turned_pads(pads: Sequence[Any]) -> tuple[Any, ...]:
    """Two entries an axis, first all in front, then all behind, in channels-last order."""
    half = len(pads) // 2
    return (*turned_list(pads[:half]), *turned_list(pads[half:]))


def turned_whole(op: Any, ins: Sequence[Any], outs: Sequence[Any], rank: int, **changes: Any) -> Turned:
    """The form of an operator all of whose values have `rank` dimensions and are turned; `changes`: its attributes."""
    return Turned(dataclasses.replace(op, **changes), (rank,) * len(ins), (True,) * len(outs))
