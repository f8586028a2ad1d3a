"""Padding of samples of several sizes to the size of a program's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import UsageError
from ..language.ir import Value
from ..language.types import TensorType
from .base import RAGGED
from .casting import cast
from .limits import Limit

#: on which side of a sample its padding is
SIDES = ("right", "left")


class Pad(NamedTuple):
    """How samples of an input are padded: with `value`, on the right (behind the sample, as most models) or left."""

    value: float = 0
    side: str = "right"


class MaskOf(NamedTuple):
    """An input that is no column: 1 where `column` has a sample's values, 0 where it is padded."""

    column: str
    side: str = "right"


@dataclass(frozen=True)
class Padding:
    """The value that pads an input, and the axes of a sample along which it may; `masks`: see `MaskOf`."""

    value: float
    side: str
    axes: frozenset[int]
    masks: bool = False

    def why_not(self, have: Sequence[int], need: Sequence[int]) -> str:
        """Why samples of one shape (with ragged axes) cannot be padded to another; "" if they can."""
        if len(have) != len(need):
            return f"a sample has {len(have)} dimensions, not {len(need)}"
        for axis, (have_size, wanted) in enumerate(zip(have, need, strict=True)):
            if have_size != wanted and axis not in self.axes:
                size = "different sizes" if have_size == RAGGED else str(have_size)
                return f"axis {axis} of a sample has {size}, not {wanted}, and no bucket changes it"
        return ""

    def made(self, samples: np.ndarray, need: TensorType, indices: np.ndarray, what: str) -> np.ndarray:
        """The samples, padded.  UsageError for one that is longer than the input."""
        padded = np.full((len(samples), *need.shape[1:]), self.value, need.numpy)
        for row, sample in enumerate(samples):
            if any(a > b for a, b in zip(sample.shape, need.shape[1:], strict=True)):
                raise UsageError(
                    f"{what} has {list(sample.shape)} in sample {indices[row]} (counted from 0), more than "
                    f"{list(need.shape[1:])}: cut it, or give a larger bucket"
                )
            place = tuple(
                slice(size - n, size) if self.side == "left" and axis in self.axes else slice(n)
                for axis, (n, size) in enumerate(zip(sample.shape, need.shape[1:], strict=True))
            )
            padded[row][place] = 1 if self.masks else cast(sample[None], need, indices[row : row + 1], what)[0]
        return padded


def paddings(
    inputs: Sequence[Value],
    axes: Mapping[str, frozenset[int]],
    limits: Mapping[str, Limit],
    labels: frozenset[str],
    rules: Mapping[str, Any],
) -> dict[str, Padding]:
    """How each input whose samples have several sizes is padded.

    `axes`: input → axes of a sample that buckets change.  `labels`: inputs that a loss compares with, which are padded
    with the label that it ignores.  `rules`: `Pad`, `MaskOf` or a value by input.  UsageError for inputs that have no
    such axes, and for labels without a value that does not count.
    """
    result = {}
    for v in inputs:
        if v.name not in axes:
            continue
        how = rules.get(v.name)
        if how is None:
            how = Pad(_value(v, limits.get(v.name), v.name in labels))
        if isinstance(how, MaskOf):
            result[v.name] = Padding(0, _side(how.side), axes[v.name], masks=True)
            continue
        pad = how if isinstance(how, Pad) else Pad(how)
        result[v.name] = Padding(_checked(pad.value, v), _side(pad.side), axes[v.name])
    for name in rules:
        if name not in result:
            has = ", ".join(result) or "none"
            raise UsageError(f"padding: '{name}' is no input whose size buckets change; these are: {has}")
    return result


def _value(v: Value, limit: Limit | None, is_label: bool) -> float:
    """The value with which an input is padded.  UsageError where it cannot be known."""
    if not is_label:
        return 0
    if limit is not None and limit.ignored is not None:
        return limit.ignored
    raise UsageError(
        f"what pads '{v.name}' ({v.type}), with which the loss compares, cannot be known: the loss ignores no label. "
        "Use one that does (rc.losses.cross_entropy(..., ignore_index=-100)), or, where the model itself makes that "
        f"part of the loss 0, by a mask, say the value: padding={{'{v.name}': 0}} (--pad {v.name}=0)"
    )


def _side(side: str) -> str:
    if side not in SIDES:
        raise UsageError(f"padding: the side must be {' or '.join(map(repr, SIDES))}, not {side!r}")
    return side


def _checked(value: Any, v: Value) -> float:
    """The value, if the input's type has it."""
    number = isinstance(value, (bool, int, float, np.number))
    whole = v.type.numpy.kind in "biu"
    if number and whole and float(value).is_integer():
        low, high = (0, 1) if v.type.numpy.kind == "b" else (np.iinfo(v.type.numpy).min, np.iinfo(v.type.numpy).max)
        if low <= value <= high:
            return int(value)
    elif number and not whole and np.isfinite(value):
        return float(value)
    raise UsageError(f"padding: '{v.name}' ({v.type}) cannot be padded with {value!r}")
