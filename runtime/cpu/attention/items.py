"""The work of the gradient: blocks of queries with blocks of keys, in waves whose items write to different places.

Heads that add to the same gradient (shared keys and values, a shared bias) are a chain: one after the other.  In wave w
of a head, block i of the queries meets block i + w of the keys, counted around.  All of it follows from the shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

#: queries or keys of a block, at most
BLOCK = 512


def offsets(shape: Sequence[int], lead: Sequence[int], size: int) -> np.ndarray:
    """Element offset of the matrix of `size` elements that each head reads; leading axes are the heads' or 1."""
    own = (1,) * (len(lead) - len(shape)) + tuple(shape)
    at = np.arange(math.prod(own), dtype=np.int64).reshape(own) * size
    return np.broadcast_to(at, lead).reshape(-1)


class Items:
    """Of heads with the leading axes `lead`, of keys `shared`; `bias`: the shape of one that has a gradient.

    `columns(begin, end, keys)`: the keys that some queries may see.
    """

    def __init__(
        self,
        lead: tuple[int, ...],
        shared: tuple[int, ...],
        bias: tuple[int, ...] | None,
        queries: int,
        keys: int,
        columns: Callable[[int, int, int], tuple[int, int]],
    ) -> None:
        self.lead, self.queries, self.keys, self.columns = lead, queries, keys, columns
        full = (*lead, 2, 2) if bias is None else (1,) * (len(lead) + 2 - len(bias)) + bias
        #: whether heads share keys
        self.shares = any(a == 1 < n for a, n in zip(shared, lead, strict=True))
        along = [n if 1 in (a, b) else 1 for n, a, b in zip(lead, shared, full[:-2], strict=True)]
        self.length = math.prod(along)
        self.chains = math.prod(lead) // max(self.length, 1)
        whole = full[-2:] == (1, 1)  # all add to one number
        self._counts = (1, 1) if whole else (-(-queries // BLOCK), -(-keys // BLOCK))
        self.blocks = max(self._counts)
        #: each head's place in its chain
        self.places = np.broadcast_to(np.arange(self.length).reshape(along), lead).reshape(-1)
        #: each head's keys
        self.targets = offsets(shared, lead, 1)

    def part(self, parts: int) -> np.ndarray:
        """Which of so many parts of its chain each head is in."""
        return self.places * parts // self.length

    def waves(self, panels: np.ndarray, parts: int) -> list[np.ndarray]:
        """The tables of items (see backward.ITEM); parts of a chain need not wait for each other."""
        order = self.places
        if parts:
            starts = np.array([-(-self.length * p // parts) for p in range(parts)])
            order = self.places - starts[self.part(parts)]
        rows = _cut(len(panels), self._counts[0])
        columns = _cut(self.keys, self._counts[1])
        touched: set[tuple[str, int, int]] = set()
        found = []
        for place, turn in itertools.product(range(max(order, default=-1) + 1), range(self.blocks)):
            wave: list[tuple[int, ...]] = []
            for head in np.flatnonzero(order == place):
                wave += self._of_head(int(head), turn, (rows, columns), panels, touched)
            found.append(wave)
        found.append(list(self._untouched(rows, columns, touched)))
        return [np.array(w, np.int64) for w in found if w]

    def _of_head(
        self, head: int, turn: int, cuts: tuple[list, list], panels: np.ndarray, touched: set
    ) -> Iterator[tuple[int, ...]]:
        """One head's items of a wave."""
        rows, columns = cuts
        for i, (begin, end) in enumerate(rows):
            j = (i + turn) % self.blocks
            if j >= len(columns):
                continue
            last = panels[end - 1]
            seen = self.columns(int(panels[begin][0]), int(last[0] + last[1]), self.keys)
            if seen[0] >= columns[j][1] or seen[1] <= columns[j][0]:
                continue
            marks = ("keys", int(self.targets[head]), j), ("queries", head, i)
            flags = [int(m not in touched) for m in marks]
            touched.update(marks)
            yield head, begin, end, *columns[j], *flags

    def _untouched(self, rows: list, columns: list, touched: set) -> Iterator[tuple[int, ...]]:
        """What no pair of blocks writes becomes 0."""
        for head, target in enumerate(self.targets.tolist()):
            for j, (low, high) in enumerate(columns):
                if ("keys", target, j) not in touched:
                    touched.add(("keys", target, j))
                    yield head, 0, 0, low, high, 1, 0
            for i, (begin, end) in enumerate(rows):
                if ("queries", head, i) not in touched:
                    yield head, begin, end, 0, 0, 0, 1


def _cut(size: int, parts: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise(size * i // parts for i in range(parts + 1)))
