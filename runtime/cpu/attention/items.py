"""The work of the gradient: blocks of queries with blocks of keys, in waves whose items write to different places.

Heads that add to the same gradient (shared keys and values, a shared bias) are a chain: one after the other.  In wave w
of a head, block i of the queries meets block i + w of the keys, counted around.  All of it follows from the shapes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

#: queries or keys of a block, at most, and at least where heads that share keys are few
BLOCK, SMALL = 512, 128
#: items of a wave that are enough
ENOUGH = 8


def offsets(shape: Sequence[int], lead: Sequence[int], size: int, rows: int = 1, beside: int = 1) -> np.ndarray:
    """Element offset of the matrix [rows, size] that each head reads; leading axes are the heads' or 1.

    `beside`: as many matrices lie beside each other, row by row.
    """
    sizes = (1,) * (len(lead) - len(shape)) + tuple(shape)
    at = np.arange(math.prod(sizes), dtype=np.int64).reshape(sizes)
    at = (at // beside * rows * beside + at % beside) * size
    return np.broadcast_to(at, lead).reshape(-1)


class Items:
    """Work items of heads with the leading axes `lead`, of keys `shared`; `bias`: the shape of one with a gradient.

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
        across = [1 if 1 in (a, b) else n for n, a, b in zip(lead, shared, full[:-2], strict=True)]
        self.length, self.chains = math.prod(along), math.prod(across)
        self._counts = self._blocks(queries), self._blocks(keys)
        if full[-2:] == (1, 1):  # all add to one number
            self._counts = (1, 1)
        self.blocks = max(self._counts)
        #: each head's chain and its place in it
        self.chain = np.broadcast_to(np.arange(self.chains).reshape(across), lead).reshape(-1)
        self.places = np.broadcast_to(np.arange(self.length).reshape(along), lead).reshape(-1)
        #: each head's keys
        self.targets = offsets(shared, lead, 1)

    def part(self, parts: int) -> np.ndarray:
        """Which of so many parts of its chain each head is in."""
        return self.places * parts // self.length

    def waves(self, panels: np.ndarray, parts: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each wave its runs (first item, behind the last), and its items (see backward.ITEM).

        A run is done by one thread.  Where a head is one block, all chains run through at once: in one wave.
        """
        cuts = _cut(len(panels), self._counts[0]), _cut(self.keys, self._counts[1])
        touched: set[tuple[str, int, int]] = set()
        waves: list[list[list[tuple[int, ...]]]] = []
        if self.blocks == 1:
            group = self.chain * self.length + (self.part(parts) if parts else 0)
            order = np.argsort(group, kind="stable")  # heads of a chain stay in order
            runs = np.split(order, np.flatnonzero(np.diff(group[order])) + 1)
            heads_of_runs = [[list(self._of_head(int(head), 0, cuts, panels, touched)) for head in run] for run in runs]
            waves.append([list(itertools.chain(*run)) for run in heads_of_runs])
        else:
            for place, turn in itertools.product(range(self.length), range(self.blocks)):
                heads = np.flatnonzero(self.places == place)
                waves.append([[x] for h in heads for x in self._of_head(int(h), turn, cuts, panels, touched)])
        waves[0] += [[x] for x in self._untouched(*cuts, touched)]
        return [_tables(w) for w in waves if any(w)]

    def _blocks(self, size: int) -> int:
        """The number of blocks of so many queries or keys."""
        count = -(-size // BLOCK)
        if self.length > 1:
            count = max(count, min(-(-ENOUGH // self.chains), size // SMALL))
        return count

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
        """Items that fill with 0 the blocks that no pair writes."""
        for head, target in enumerate(self.targets.tolist()):
            for j, (low, high) in enumerate(columns):
                if ("keys", target, j) not in touched:
                    touched.add(("keys", target, j))
                    yield head, 0, 0, low, high, 1, 0
            for i, (begin, end) in enumerate(rows):
                if ("queries", head, i) not in touched:
                    yield head, begin, end, 0, 0, 0, 1


def _tables(runs: list[list[tuple[int, ...]]]) -> tuple[np.ndarray, np.ndarray]:
    """Where each run begins and ends, and the items of all of them."""
    ends = list(itertools.accumulate(len(r) for r in runs))
    bounds = [(end - len(r), end) for r, end in zip(runs, ends, strict=True)]
    return np.array(bounds, np.int64), np.array([x for r in runs for x in r], np.int64)


def _cut(size: int, parts: int) -> list[tuple[int, int]]:
    return list(itertools.pairwise(size * i // parts for i in range(parts + 1)))
