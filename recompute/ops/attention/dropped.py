"""Dropout on weights of attention, tile by tile: the numbers that Dropout would draw for all weights at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..random.philox import numbers_of_blocks


class Dropped:
    """The weights of one application that dropout keeps.

    `rows`: leading axes and queries of the whole weights [*rows, keys], of which this operator's begin at `at`; the
    number of an element in the random stream is its number in the whole weights.
    """

    def __init__(
        self, xp: Any, ratio: float, seed: int, step: Any, rows: Sequence[int], at: Sequence[int], keys: int
    ) -> None:
        self.xp, self.ratio, self.seed, self.step = xp, ratio, seed, step
        self.rows, self.at, self.keys = tuple(rows), tuple(at), keys
        self.numpy = xp.__name__ == "numpy"
        if self.numpy:
            key = np.array([seed, int(step) & 0xFFFF_FFFF_FFFF_FFFF], np.uint64)
            self._bits = np.random.Philox(key=key)
            self._generator = np.random.Generator(self._bits)
            self._block = 0  # the next one that the generator will draw

    def number(self, index: Sequence[int], row: int) -> int:
        """The number of the first weight of a query."""
        place = 0
        for size, start, i in zip(self.rows, self.at, (*index, row), strict=True):
            place = place * size + start + i
        return place * self.keys

    def drop(self, w: Any, index: Sequence[int], rows: slice, columns: slice, room: Sequence[Any]) -> None:
        """Multiplies a tile of weights, in place, by 1 / (1 - ratio) where kept, and by 0 elsewhere.

        `room`: float32s, 8 more than a row of the tile has, and as many booleans as a row has.
        """
        xp, width = self.xp, columns.stop - columns.start
        first = self.number(index, rows.start) + columns.start
        xp.multiply(w, 1 / (1 - self.ratio), out=w)
        if not self.numpy:
            xp.multiply(w, self._tile(first, rows.stop - rows.start, width) >= np.float32(self.ratio), out=w)
            return
        keep = room[1][:width]
        for i, row in enumerate(w):
            start = first + i * self.keys
            block, skipped = divmod(start, 8)
            u = room[0][: skipped + width]
            self._bits.advance((block - self._block) % (1 << 256))
            self._generator.random(dtype=np.float32, out=u)
            self._block = block + -(-len(u) // 8)
            xp.greater_equal(u[skipped:], np.float32(self.ratio), out=keep)
            xp.multiply(row, keep, out=row)

    def _tile(self, first: int, height: int, width: int) -> Any:
        """The numbers of a tile by array operations."""
        starts = first + np.arange(height) * self.keys
        count = (width + 14) // 8
        blocks = (starts // 8)[:, None] + np.arange(count)
        drawn = numbers_of_blocks(self.xp, self.seed, self.step, blocks.reshape(-1).astype(np.uint64))
        at = (np.arange(height) * count * 8 + starts % 8)[:, None] + np.arange(width)
        return drawn[at]


def dropped(b: Any, w: Any, step: Any, ratio: float, seed: int, rows: Sequence[int], at: Sequence[int]) -> Any:
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


def check_part(rows: Sequence[int], at: Sequence[int], own: Sequence[int]) -> str:
    """Why `own` rows at `at` are no part of `rows`; "" if they are."""
    fits = len(rows) == len(at) == len(own) and all(
        a >= 0 and a + d <= n for n, a, d in zip(rows, at, own, strict=True)
    )
    if not fits:
        return f"its rows {list(own)} at {list(at)} are no part of {list(rows)}"
    return "" if math.prod(rows) < 1 << 40 else "there are too many rows to number"
