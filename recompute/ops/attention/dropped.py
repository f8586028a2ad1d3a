"""Dropout on weights of attention, tile by tile: the numbers that Dropout would draw for all weights at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...language.contexts import OperatorBuilder
from ...language.types import Array, Operands


class Dropped:
    """The weights of one application that dropout keeps.

    `rows`: leading axes and queries of the whole weights [*rows, keys], of which this operator's begin at `at`; the
    number of an element in the random stream is its number in the whole weights.
    """

    def __init__(self, ratio: float, seed: int, step: Any, rows: Sequence[int], at: Sequence[int], keys: int) -> None:
        self.ratio = ratio
        self.rows, self.at, self.keys = tuple(rows), tuple(at), keys
        self._bits = np.random.Philox(key=np.array([seed, int(step) & 0xFFFF_FFFF_FFFF_FFFF], np.uint64))
        self._generator = np.random.Generator(self._bits)
        self._block = 0  # the next one that the generator will draw

    def number(self, index: Sequence[int], row: int) -> int:
        """The number of the first weight of a query."""
        place = 0
        for size, start, i in zip(self.rows, self.at, (*index, row), strict=True):
            place = place * size + start + i
        return place * self.keys

    def keep(self, index: Sequence[int], rows: slice, columns: slice, room: Operands) -> Array:
        """Which weights of a tile are kept; `room`: as many float32s as the tile has and 8 more, and booleans."""
        height, width = rows.stop - rows.start, columns.stop - columns.start
        first = self.number(index, rows.start) + columns.start
        ratio = np.float32(self.ratio)
        mask = room[1][: height * width].reshape(height, width)
        if width == self.keys:  # one run of the stream
            np.greater_equal(self._run(first, height * width, room[0]), ratio, out=mask.reshape(-1))
            return mask
        for i in range(height):
            np.greater_equal(self._run(first + i * self.keys, width, room[0]), ratio, out=mask[i])
        return mask

    def drop(self, w: Array, keep: Array) -> None:
        """Multiplies a tile of weights, in place, by 1 / (1 - ratio) where kept, and by 0 elsewhere."""
        np.multiply(w, 1 / (1 - self.ratio), out=w)
        np.multiply(w, keep, out=w)

    def _run(self, first: int, count: int, room: Array) -> Array:
        """Numbers of the stream one after the other."""
        block, skipped = divmod(first, 8)
        u = room[: skipped + count]
        self._bits.advance((block - self._block) % (1 << 256))
        self._generator.random(dtype=np.float32, out=u)
        self._block = block + -(-len(u) // 8)
        return u[skipped:]


def dropped(
    b: OperatorBuilder, w: Any, step: Any, ratio: float, seed: int, rows: Sequence[int], at: Sequence[int]
) -> Any:
    """All weights after dropout, by the operator Dropout; `rows`, `at`: see `Dropped`."""
    options = {"ratio": ratio, "seed": seed}
    own, keys = w.shape[:-1], w.shape[-1]
    lead = next((i for i, d in enumerate(own) if d != 1), 0)
    first = 0
    for size, start in zip(rows, at, strict=True):
        first = first * size + start
    if tuple(own[lead + 1 :]) == tuple(rows[lead + 1 :]):  # one run of the stream
        return b.Dropout(w, step, first=first * keys, **options)
    every = b.Dropout(b.fill(1.0, w.type.with_shape((*rows, keys))), step, **options)
    stops = [start + d for start, d in zip(at, own, strict=True)]
    part = b.Slice(every, starts=tuple(at), ends=tuple(stops), axes=tuple(range(len(own))))
    return b.Mul(w, part)


def check_part(rows: Sequence[int], at: Sequence[int], lead: Sequence[int]) -> str:
    """Why `lead` rows at `at` are no part of `rows`; "" if they are."""
    fits = len(rows) == len(at) == len(lead) and all(
        a >= 0 and a + d <= n for n, a, d in zip(rows, at, lead, strict=True)
    )
    if not fits:
        return f"its rows {list(lead)} at {list(at)} are no part of {list(rows)}"
    return "" if math.prod(rows) < 1 << 40 else "there are too many rows to number"
