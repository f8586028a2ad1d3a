"""The range that a program's integer inputs must be in: of the axis that they index or count, or a loss's classes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..boundary import as_block
from ..language.ir import Block, Value

#: operators whose results are the elements of their first input
_SAME_ELEMENTS = ("Reshape", "Cast", "Transpose", "Identity", "Expand", "Flatten", "Squeeze", "Unsqueeze")


class Limit(NamedTuple):
    """Whole numbers from `lowest` to `below` (exclusive), and `ignored` besides."""

    below: int
    lowest: int = 0
    ignored: int | None = None

    def __str__(self) -> str:
        besides = "" if self.ignored is None else f" (or {self.ignored}, which is ignored)"
        return f"{self.lowest} to {self.below - 1}{besides}"

    def wrong(self, array: np.ndarray) -> np.ndarray:
        """Where an array is outside."""
        outside = (array < self.lowest) | (array >= self.below)
        return outside if self.ignored is None else outside & (array != self.ignored)

    def both(self, other: Limit) -> Limit:
        """The numbers that are within this limit and another."""
        ignored = self.ignored if self.ignored == other.ignored else None
        return Limit(min(self.below, other.below), max(self.lowest, other.lowest), ignored)


def limits_of(block: Block) -> dict[str, Limit]:
    """The limit of every integer input whose readers have one."""
    limits = {v.name: limit_of(block, v) for v in as_block(block).inputs if v.type.numpy.kind in "iu"}
    return {name: limit for name, limit in limits.items() if limit is not None}


def limit_of(block: Block, v: Value) -> Limit | None:
    """The range that all readers of an integer input accept; None if no reader restricts it."""
    names, limit = {v.name}, None
    for op in block.operators:
        if not any(r.name in names for r in op.reads()):
            continue
        if op.op.name in _SAME_ELEMENTS and op.inputs[0] is not None and op.inputs[0].name in names:
            names.update(o.name for o in op.writes())
        for at, condition in op.checks():
            read = op.inputs[at]
            found = _limit(condition) if read is not None and read.name in names else None
            limit = found if limit is None or found is None else limit.both(found)
    return limit


def _limit(condition: Iterable | str) -> Limit | None:
    """The limit that a condition of `Op.checks` sets."""
    kind, *rest = condition if isinstance(condition, tuple) else (condition,)
    if kind == "label":
        classes, ignored, *blank = rest  # a label is not the blank, where that is the first class or the last
        return Limit(classes - (blank == [classes - 1]), int(blank == [0]), ignored)
    if kind == "count":
        return Limit(rest[0] + 1)
    return Limit(rest[0], -rest[0]) if kind == "index" and len(rest) == 1 else None
