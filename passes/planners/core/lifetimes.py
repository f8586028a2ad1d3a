"""Lifetimes in a long sequence of nodes, by arrays in place of Python's loops: the numbers of `simulate.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from .problem import RematerialisationProblem

#: bytes that all runs of a sequence make together, at most: sums of them are words with a sign
_MOST = float(1 << 62)


class Rows:
    """Lists of numbers, one for each node, one after the other in one array."""

    def __init__(self, rows: Iterable[Sequence[int]]) -> None:
        rows = list(rows)
        self.count = np.fromiter(map(len, rows), np.int64, len(rows))
        self.start = np.cumsum(self.count) - self.count
        self.all = np.array([v for row in rows for v in row], np.int64)

    def of(self, sequence: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the nodes of a sequence, and the position in the sequence of each."""
        count = self.count[sequence]
        positions = np.repeat(np.arange(len(sequence)), count)
        within = np.arange(len(positions)) - np.repeat(np.cumsum(count) - count, count)
        return self.all[np.repeat(self.start[sequence], count) + within], positions


class Arrays:
    """A problem as arrays."""

    def __init__(self, problem: RematerialisationProblem) -> None:
        nodes, sizes = problem.nodes, problem.sizes
        self.sizes = np.array(sizes, np.int64)
        self.scratch = np.array([n.scratch for n in nodes], np.int64)
        self.reads, self.writes = Rows(n.reads for n in nodes), Rows(n.writes for n in nodes)
        made = [{sizes[w] for w in n.writes} for n in nodes]
        self.overwrites = Rows([v for v in n.overwrites if sizes[v] in s] for n, s in zip(nodes, made, strict=True))
        self.inputs, self.outputs = np.array(problem.inputs, np.int64), np.array(problem.outputs, np.int64)


def arrays_of(problem: RematerialisationProblem) -> Arrays:
    """The problem's arrays, made once."""
    return problem.remembered("arrays", lambda: Arrays(problem))


@dataclass(frozen=True)
class Lifetimes:
    """Each time that a value comes to be, the inputs first: `made`, the value; `first`, `last`: positions, as
    `simulate.last_uses` has them."""

    arrays: Arrays
    sequence: np.ndarray
    made: np.ndarray
    first: np.ndarray
    last: np.ndarray
    keys: np.ndarray
    order: np.ndarray

    def current(self, values: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Which of the lifetimes each value has that is read at a position."""
        keys = values * (len(self.sequence) + 2) + positions + 1
        return self.order[np.searchsorted(self.keys, keys) - 1]

    def profile(self) -> list[int] | None:
        """Bytes alive while each position runs; None where there may be too many for a word."""
        a, n = self.arrays, len(self.sequence)
        sizes = a.sizes[self.made]
        if float(sizes.sum(dtype=np.float64)) + float(a.scratch.max(initial=0)) >= _MOST:
            return None
        change = np.zeros(n + 2, np.int64)  # one position later than in the sequence
        np.add.at(change, self.first + 1, sizes)
        freed = np.zeros(n + 2, np.int64)
        np.add.at(freed, self.last + 1, sizes)
        live = np.cumsum(change - np.concatenate(([0], freed[:-1])))
        live -= freed[0]  # inputs that nothing reads
        live[1:] += freed[0]
        running = live[1 : n + 1] - freed[0] + a.scratch[self.sequence] - self._saved()
        return running.tolist()

    def _saved(self) -> np.ndarray:
        """Bytes that each position needs less because its output takes a dying input's place: the first that it may."""
        a = self.arrays
        saved = np.zeros(len(self.sequence), np.int64)
        values, positions = a.overwrites.of(self.sequence)
        dies = self.last[self.current(values, positions)] == positions
        values, positions = values[dies][::-1], positions[dies][::-1]  # of several assignments the last one counts
        saved[positions] = a.sizes[values]
        return saved

    def unread(self, done: np.ndarray) -> bool:
        """Whether some rerun (`done`: positions that are none) makes nothing that is read before the next time."""
        read = np.zeros(len(self.sequence) + 1, bool)
        read[self.first[self.last > self.first]] = True  # inputs are at position -1
        return not (read[:-1] | done).all()


def lifetimes(problem: RematerialisationProblem, sequence: Sequence[int]) -> Lifetimes:
    """Lifetimes of values in a sequence of node numbers."""
    a, n = arrays_of(problem), len(sequence)
    seq = np.array(sequence, np.int64)
    values, first = a.writes.of(seq)
    made, first = np.concatenate((a.inputs, values)), np.concatenate((np.full(len(a.inputs), -1), first))
    keys = made * (n + 2) + first + 1
    order = np.argsort(keys, kind="stable")
    found = Lifetimes(a, seq, made, first, first.copy(), keys[order], order)
    read, positions = a.reads.of(seq)
    found.last[found.current(read, positions)] = positions  # in order: the last one counts
    found.last[found.current(a.outputs, np.full(len(a.outputs), n))] = n
    return found
