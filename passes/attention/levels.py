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
    found = list(levels)
    if len({math.prod(level) for level in found}) != 1 or any(0 in level for level in found):
        return None
    borders = sorted({math.prod(level[i:]) for level in found for i in range(len(level) + 1)})
    if any(b % a for a, b in itertools.pairwise(borders)):
        return None
    return tuple(b // a for a, b in itertools.pairwise(borders))[::-1]


def refined(own: Sequence[int], level: Level, fine: Level) -> Level | None:
    """The axes at the finest level of a value that has `own` leading axes at a level: its own, or 1 where repeated."""
    own = (1,) * (len(level) - len(own)) + tuple(own)
    left = list(fine)
    found: list[int] = []
    for d, n in zip(own, level, strict=True):
        if d not in (1, n):
            return None
        size = 1
        while size < n:
            size *= left[0]
            part = left.pop(0)
            found.append(part if d == n else 1)
    return tuple(found)
