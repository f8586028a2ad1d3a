"""Leading axes of queries, keys, values, scores and weights, which exporters join and split on the way.

A level is the leading axes at one place, such as [batch, heads] or [batch · heads].  All levels of one attention number
the same matrices in the same order; the finest has an axis for each part that some level tells apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

Level = tuple[int, ...]


def finest(levels: Iterable[Level]) -> Level | None:
    """The axes, none of them 1, of which those of every level consist; None: there are none."""
    refined_levels = list(levels)
    if len({math.prod(level) for level in refined_levels}) != 1 or any(0 in level for level in refined_levels):
        return None
    borders = sorted({math.prod(level[i:]) for level in refined_levels for i in range(len(level) + 1)})
    if any(b % a for a, b in itertools.pairwise(borders)):
        return None
    return tuple(b // a for a, b in itertools.pairwise(borders))[::-1]


def refined(groups: Sequence[int], level: Level, fine: Level) -> Level | None:
    """The axes at the finest level of a value with `groups` leading axes at a level: its sizes, or 1 where repeated."""
    groups = (1,) * (len(level) - len(groups)) + tuple(groups)
    left = list(fine)
    sizes: list[int] = []
    for d, n in zip(groups, level, strict=True):
        if d not in (1, n):
            return None
        size = 1
        while size < n:
            size *= left[0]
            part = left.pop(0)
            sizes.append(part if d == n else 1)
    return tuple(sizes)
