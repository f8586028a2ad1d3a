"""Schedules for a budget in which what is in the way is evicted, and made again right before its next reader.

Nodes run in their order.  Where there is no room for one, values go first whose next reader is far, that are large and
cheap to make again with all that is missing for that: Belády's rule (1966) with the weights of dynamic
tensor rematerialisation (Kirisame et al. 2021, arXiv 2006.09616), which knows no future.  A small budget is kept where
any single node fits, but what was evicted may be made again many times: local search goes on from here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

from ..core.problem import RematerialisationProblem

#: nodes of a schedule, as a multiple of the problem's, at most
_LONGEST = 12


def evicting(problem: RematerialisationProblem, budget: int, *, long_first: bool) -> list[int] | None:
    """A sequence of nodes that keeps the budget where that was possible; None where it would become too long.

    `long_first`: of several missing values those come first for which most has to run.
    """
    work = _Eviction(problem, budget - problem.fixed, long_first)
    try:
        for i in range(len(problem)):
            work.run(i, i, frozenset())
    except (_TooLong, RecursionError):
        return None
    return work.sequence


class _TooLong(Exception):
    """More nodes than a schedule may have."""


class _Eviction:
    """A schedule that is made from its beginning to its end: `live` values, of `used` bytes."""

    def __init__(self, problem: RematerialisationProblem, room: int, long_first: bool) -> None:
        self.problem, self.room, self.long_first = problem, room, long_first
        self.sequence: list[int] = []
        self.live = {v for v in problem.inputs if problem.readers[v]}
        self.used = sum(problem.sizes[v] for v in self.live)
        self.kept = set(problem.outputs)
        self.away: set[int] = set()  # evicted, and read again later
        self.starts = [0.0, *accumulate(n.cost for n in problem.nodes)]
        self.soon = self.starts[-1] / max(1, len(problem))

    def run(self, i: int, t: int, pinned: frozenset[int]) -> None:
        """Runs node i before, or as, node t of the order; `pinned` values stay."""
        if len(self.sequence) > _LONGEST * len(self.problem):
            raise _TooLong
        node, sizes = self.problem.nodes[i], self.problem.sizes
        reads = pinned.union(node.reads)
        missing = [v for v in node.reads if v not in self.live]
        for v in sorted(missing, key=self._again, reverse=True) if self.long_first else missing:
            if v not in self.live:  # it may have come with another
                self.run(self.problem.producer[v], t, reads & self.live)
        after = t + (i == t)
        self._drop(node.writes)
        dies = [v for v in node.overwrites if not self._needed(v, after) and v not in pinned]
        saved = max((sizes[v] for v in dies if any(sizes[w] == sizes[v] for w in node.writes)), default=0)
        need = sum(sizes[w] for w in node.writes)
        self._make_room(need + node.scratch - saved, t, reads)
        self.sequence.append(i)
        self.live.update(node.writes)
        self.used += need
        self.away.difference_update(node.writes)
        own = pinned if i == t else pinned.union(node.writes)
        for v in sorted({*node.reads, *node.writes} - own, reverse=True):  # first what others are no longer needed for
            if not self._needed(v, after):
                self._drop([v])

    def _drop(self, values: tuple[int, ...] | list[int]) -> None:
        for v in set(values) & self.live:
            if size := self.problem.sizes[v]:  # what takes nothing may serve later
                self.live.remove(v)
                self.used -= size

    def _needed(self, v: int, t: int) -> bool:
        """Whether node t or a later one reads a value, or what is away cannot be made again without it."""
        if v in self.kept or self._next(v, t) < len(self.problem):
            return True
        if self._again(v) < math.inf:
            return False
        seen: set[int] = set()
        stack = list(self.away)
        while stack:
            u = stack.pop()
            if u == v:
                return True
            if u not in seen and u not in self.live and (q := self.problem.producer[u]) >= 0:
                stack += self.problem.nodes[q].reads
            seen.add(u)
        return False

    def _next(self, v: int, t: int) -> int:
        """The first node from t on that reads a value."""
        readers = self.problem.readers[v]
        at = bisect_left(readers, t)
        return readers[at] if at < len(readers) else len(self.problem)

    def _make_room(self, need: int, t: int, pinned: frozenset[int]) -> None:
        """Evicts until so many bytes are free, or nothing is left to evict."""
        if self.used + need <= self.room:
            return
        ranked = []
        for v in self.live - pinned - self.kept:
            away = self.starts[self._next(v, t)] - self.starts[t] + self.soon
            if (size := self.problem.sizes[v]) and (cost := self._again(v)) < math.inf:
                ranked.append((cost / (size * away), v))
        for _, v in sorted(ranked):
            if self.used + need <= self.room:
                break
            if self._again(v) < math.inf:  # what it is made of may have gone since
                self._drop([v])
                if self._next(v, t) < len(self.problem):
                    self.away.add(v)

    def _again(self, v: int) -> float:
        """The cost of making a value again with all that is missing for it; infinite where that cannot be."""
        seen: set[int] = set()
        stack, cost = [v], 0.0
        while stack:
            u = stack.pop()
            p = self.problem.producer[u]
            if p < 0 or not self.problem.nodes[p].repeatable:
                return math.inf
            if p not in seen:
                seen.add(p)
                cost += self.problem.nodes[p].cost
                stack += [w for w in self.problem.nodes[p].reads if w not in self.live]
        return cost
