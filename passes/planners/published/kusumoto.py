"""Recomputation over lower sets (Kusumoto, Inoue, Watanabe, Akiba & Koyama 2019, arXiv 1905.11722).

A plan is a chain of lower sets of the forward graph, {} = L0 < L1 < ... < Lk = V.  The forward pass keeps the
boundary of each; the backward pass runs each L(i) - L(i-1) again, the last first, from what is kept.  In the paper's
model of memory a segment needs its bytes twice, for values and gradients, besides what is kept before it and what
the gradients behind it read, and dynamic programming over states (lower set, time of the kept nodes, their bytes)
finds the chain with the least (time-centric) or the most (memory-centric) time run again within a budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ...recomputation.recompute import RecomputePlan
from ..base import Planner
from ..core.problem import RematerialisationProblem
from ..core.schedules import keep_schedule, kept_plan
from ..core.simulate import Outcome, simulate
from ..core.watch import current
from .lower_sets import (
    ForwardGraph,
    Lattice,
    Steps,
    all_lower_sets,
    forward_graph,
    kept_nodes,
    principal_lower_sets,
    thinned,
)

_PAPER = (
    "Kusumoto, Inoue, Watanabe, Akiba & Koyama 2019, A Graph Theoretic Framework of Recomputation (arXiv 1905.11722)"
)


class Kusumoto(Planner, strategy="kusumoto"):
    """The approximate method, time-centric: lower sets of the form {a node and all that it depends on} only.

    The model of memory knows no liveness and overestimates the peak, so that its budget is searched: `samples` values
    from the smallest that has a solution to the largest that makes a difference, then bisection between the last plan
    whose simulated peak fits and the next one that does not.  The cheapest plan that fits is taken; without a budget,
    that with the lowest peak.  The paper drops the last segment like all others; what it makes is kept instead where
    that fits, as it is read again at once.

    `states`: how many (time, bytes) a lower set has at most; time is divided into as many steps where there are more,
    as the paper does.  `candidates`: how many lower sets are states; where there are more, one of each of as many equal
    ranges of bytes, and steps between neighbours may go through all that lie in between.
    """

    reference: ClassVar[str] = _PAPER
    #: whether the most time is run again, not the least: less is alive at once, which the model does not see
    memory_centric: ClassVar[bool] = False

    samples: int = 8
    states: int = 100
    candidates: int = 500

    def lattice(self, graph: ForwardGraph) -> Lattice:
        """The lower sets that chains are made of."""
        found = principal_lower_sets(graph)
        return Lattice(graph, thinned(graph, found, self.candidates), found)

    def plan(self, problem: RematerialisationProblem, *, budget: int | None = None) -> RecomputePlan:
        search = _Search(problem, self.chains(problem), budget, self.states, self.memory_centric)
        return search.run(self.samples)

    def chains(self, problem: RematerialisationProblem) -> Chains:
        """The chains found in the lattice, cached for other budgets."""
        return problem.remembered(("kusumoto", self.candidates), lambda: Chains(self.lattice(forward_graph(problem))))


class KusumotoMemory(Kusumoto, strategy="kusumoto-memory"):
    """The approximate method, memory-centric: the most time run again, for less memory once liveness is known."""

    memory_centric: ClassVar[bool] = True


class KusumotoExact(Kusumoto, strategy="kusumoto-exact"):
    """The exact method, time-centric: all lower sets, up to `limit` of them (UsageError beyond).

    The time it takes grows with the square of their number: seconds for 1,000, minutes for 10,000.
    """

    quick: ClassVar[Mapping[str, Any] | None] = {"limit": 600}

    limit: int = 4_000

    def chains(self, problem: RematerialisationProblem) -> Chains:
        """Not remembered: all lower sets can be many."""
        return Chains(self.lattice(forward_graph(problem)))

    def lattice(self, graph: ForwardGraph) -> Lattice:
        return Lattice(graph, all_lower_sets(graph, self.limit))


class KusumotoExactMemory(KusumotoExact, strategy="kusumoto-exact-memory"):
    """The exact method, memory-centric."""

    memory_centric: ClassVar[bool] = True


# -- the dynamic programme ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """Lower sets, the time of the nodes that they keep, and the peak, both in the paper's model."""

    sets: tuple[int, ...]
    kept_time: float
    peak: float


def least_budget(lattice: Lattice) -> float:
    """The smallest budget, to 0.1 %, for which the model has a solution.

    Of two ways to a lower set the one that keeps fewer bytes is as good as the other, so that no times are needed.
    """
    low, high = 0.0, 2 * lattice.graph.total_memory + float(lattice.beyond[-1])
    while high - low > high * 1e-3:
        middle = (low + high) / 2
        found = _least_peak(lattice, middle)
        if found <= middle:
            high = found
        else:
            low = middle
    return high


def _least_peak(lattice: Lattice, budget: float) -> float:
    """The peak of the way through the lattice that always keeps least, within a budget; infinite if there is none."""
    kept = np.full(len(lattice), np.inf)
    peak = np.zeros(len(lattice))
    kept[0] = 0.0
    for target in range(1, len(lattice)):
        s = lattice.steps(target)
        need = kept[s.source] + s.peak
        sum_kept = np.where(need <= budget, kept[s.source] + s.kept, np.inf)
        best = int(np.argmin(sum_kept))
        kept[target] = sum_kept[best]
        peak[target] = max(peak[s.source[best]], need[best])
        f = lattice.fine(target)
        if f is not None and kept[f.source] + f.kept < kept[target] and kept[f.source] + f.peak <= budget:
            kept[target] = kept[f.source] + f.kept
            peak[target] = max(peak[f.source], kept[f.source] + f.peak)
    return float(peak[-1]) if kept[-1] < np.inf else np.inf


def best_chain(
    lattice: Lattice, budget: float, memory_centric: bool = False, states: int = 100, known: float | None = None
) -> Chain | None:
    """The chain within a budget that keeps nodes of the most time, or of the least (memory-centric).

    A state of a lower set is (time, bytes) of what is kept; of two states the one with fewer bytes and the better
    time is as good as the other whatever follows.  `known`: the time of a chain that is known to be within the
    budget; states that cannot come as far are left out.
    """
    sign = -1.0 if memory_centric else 1.0
    table = _States(lattice, sign, min(budget, 1e300), -np.inf if known is None else known * sign)
    watch = current()
    for target in range(1, len(lattice)):
        watch.check()
        table.extend(target, states)
    return table.chain()


class _States:
    """(time, bytes) of each lower set, one set after another, and from which state each came.

    `sign` is -1 where less time is better.  `origin` is the number of a state, or, after a step through the sets in
    between, -2 - that number.
    """

    def __init__(self, lattice: Lattice, sign: float, budget: float, floor: float) -> None:
        self.lattice, self.sign, self.budget = lattice, sign, budget
        self.floor = floor - 1e-9 * abs(floor)
        size = len(lattice)
        self.starts = [0, 1]  # of each lower set's states
        self.need, self.step_kept, self.step_time = np.full(size, np.inf), np.zeros(size), np.zeros(size)
        self.owner = np.zeros(1024, dtype=np.int32)
        self.time, self.bytes = np.zeros(1024), np.zeros(1024)
        self.origin = np.full(1024, -1, dtype=np.int64)

    def extend(self, target: int, most: int) -> None:
        """The states of the next lower set."""
        t, m, origin = self.coarse(self.lattice.steps(target))
        fine = self.lattice.fine(target)
        if fine is not None:
            state = np.arange(self.starts[fine.source], self.starts[fine.source + 1])
            state = state[self.bytes[state] + fine.peak <= self.budget]
            t = np.concatenate([t, self.time[state] + fine.time * self.sign])
            m = np.concatenate([m, self.bytes[state] + fine.kept])
            origin = np.concatenate([origin, -2 - state])
        rest = self.lattice.time[-1] - self.lattice.time[target] if self.sign > 0 else 0.0
        able = np.flatnonzero(t + rest >= self.floor)
        front = able[_front(t[able], m[able], most)] if len(able) else able
        self.add(target, t[front], m[front], origin[front])

    def coarse(self, s: Steps) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Times, bytes and origins of all states one step on, within the budget."""
        self.need[s.source], self.step_kept[s.source], self.step_time[s.source] = s.peak, s.kept, s.time * self.sign
        near = s.source[s.peak <= self.budget]
        first, end = (self.starts[near[0]], self.starts[-1]) if len(near) else (0, 0)
        state = first + np.flatnonzero(self.bytes[first:end] + self.need[self.owner[first:end]] <= self.budget)
        self.need[s.source] = np.inf
        owner = self.owner[state]
        return self.time[state] + self.step_time[owner], self.bytes[state] + self.step_kept[owner], state

    def add(self, owner: int, time: np.ndarray, kept: np.ndarray, origin: np.ndarray) -> None:
        start = self.starts[-1]
        end = start + len(time)
        while end > len(self.owner):
            for name in ("owner", "time", "bytes", "origin"):
                setattr(self, name, np.concatenate([getattr(self, name)] * 2))
        self.owner[start:end], self.time[start:end] = owner, time
        self.bytes[start:end], self.origin[start:end] = kept, origin
        self.starts.append(end)

    def chain(self) -> Chain | None:
        """The chain that ends in the last lower set with the best time."""
        lattice = self.lattice
        if self.starts[-2] == self.starts[-1]:
            return None
        at = self.starts[-2] + int(np.argmax(self.time[self.starts[-2] : self.starts[-1]]))
        kept_time, peak, path = float(self.time[at]) * self.sign, 0.0, [lattice.sets[-1]]
        while self.origin[at] != -1:
            target, before = int(self.owner[at]), int(self.origin[at])
            if before < 0:
                before = -2 - before
                fine = lattice.fine(target)
                assert fine is not None
                path += fine.inner[::-1]
                need = fine.peak
            else:
                s = lattice.steps(target)
                need = float(s.peak[np.searchsorted(s.source, self.owner[before])])
            peak = max(peak, float(self.bytes[before]) + need)
            path.append(lattice.sets[self.owner[before]])
            at = before
        return Chain(tuple(path[::-1]), kept_time, peak)


def _front(t: np.ndarray, m: np.ndarray, most: int) -> np.ndarray:
    """Numbers of the states that no other one beats in time (more is better) and bytes, `most` of them.

    Where there are many more, time is divided into steps first, and of each only states with the fewest bytes remain.
    """
    chosen = np.arange(len(t))
    if len(t) > 16 * most:
        chosen = _lightest(t, m, 4 * most)
    order = chosen[np.lexsort((-t[chosen], m[chosen]))]
    ahead = np.maximum.accumulate(t[order])
    front = order[np.concatenate([[True], t[order][1:] > ahead[:-1]])]
    if len(front) > most:
        front = front[np.unique(np.linspace(0, len(front) - 1, most).round().astype(np.int64))]
    return front


def _lightest(t: np.ndarray, m: np.ndarray, bins: int) -> np.ndarray:
    """The states with the fewest bytes in each of `bins` equal ranges of time, and the one of the longest time."""
    low, high = t.min(), t.max()
    place = ((t - low) * (bins / max(high - low, 1e-300))).astype(np.int64)  # the longest time has a bin of its own
    least = np.full(bins + 1, np.inf)
    np.minimum.at(least, np.minimum(place, bins), m)
    return np.flatnonzero(m == least[np.minimum(place, bins)])


class Chains:
    """The best chains of one lattice, each looked for once."""

    def __init__(self, lattice: Lattice) -> None:
        self.lattice = lattice
        self._found: dict[tuple, Chain | None] = {}

    @cached_property
    def least(self) -> float:
        """See `least_budget`."""
        return least_budget(self.lattice)

    def best(self, budget: float, memory_centric: bool, states: int, known: float | None) -> Chain | None:
        """See `best_chain`."""
        key = budget, memory_centric, states, known
        if key not in self._found:
            self._found[key] = best_chain(self.lattice, *key)
        return self._found[key]


# -- from the model to a plan ------------------------------------------------------------------------------------------


class _Search:
    """Chains for several of the model's budgets, judged by the simulator."""

    def __init__(
        self, problem: RematerialisationProblem, chains: Chains, budget: int | None, states: int, memory_centric: bool
    ) -> None:
        self.problem, self.chains, self.budget = problem, chains, budget
        self.graph = chains.lattice.graph
        self.states, self.memory_centric = states, memory_centric
        self.judged: dict[frozenset[int], Outcome] = {}
        self.known: list[tuple[float, float]] = []  # budgets of the model, and the time that its best chain keeps

    def run(self, samples: int) -> RecomputePlan:
        """The best of all chains that were tried."""
        nodes = self.problem.nodes
        self.judge(frozenset(v for i in self.graph.nodes for v in nodes[i].writes))
        low = self.chains.least
        everything = self.chains.best(math.inf, False, self.states, None)
        assert everything is not None  # one step to all nodes
        high = max(everything.peak, low)
        budgets = np.geomspace(max(low, 1.0), max(high, 1.0), max(samples, 2))
        budgets[0], budgets[-1] = low, high
        fits = [self.fits(b) for b in budgets]
        if self.budget is not None and any(fits) and not all(fits):
            last = max(k for k, ok in enumerate(fits) if ok)
            if last + 1 < len(budgets):
                self.bisect(float(budgets[last]), float(budgets[last + 1]), 5)
        kept, _ = min(self.judged.items(), key=lambda item: self.rank(item[1]))
        return kept_plan(self.problem, kept)

    def rank(self, outcome: Outcome) -> tuple[float, ...]:
        """Less is better."""
        if self.budget is None:
            return (outcome.peak, outcome.cost)
        return (0, outcome.cost, outcome.peak) if outcome.peak <= self.budget else (1, outcome.peak, outcome.cost)

    def bisect(self, low: float, high: float, steps: int) -> None:
        """Tries the model's budgets between one that fits and one that does not."""
        for _ in range(steps):
            middle = (low + high) / 2
            if self.fits(middle):
                low = middle
            else:
                high = middle

    def fits(self, budget: float) -> bool:
        """Judges the chain of one of the model's budgets, with the last segment dropped and kept."""
        times = [t for b, t in self.known if b <= budget]
        known = (min(times) if self.memory_centric else max(times)) if times else None
        chain = self.chains.best(float(budget), self.memory_centric, self.states, known)
        if chain is None:
            return False
        self.known.append((budget, chain.kept_time))
        outcomes = [self.judge(kept) for kept in self.kept(chain)]
        return self.budget is None or any(o.peak <= self.budget for o in outcomes)

    def kept(self, chain: Chain) -> Iterator[frozenset[int]]:
        """Values that a chain keeps: those of the boundaries, and those with all of the last segment."""
        graph, nodes = self.graph, self.problem.nodes
        kept = kept_nodes(graph, chain.sets)
        yield frozenset(v for k in kept for v in nodes[graph.nodes[k]].writes)
        rest = graph.full & ~chain.sets[-2] if len(chain.sets) > 1 else 0
        kept.update(k for k in range(len(graph)) if rest >> k & 1)
        yield frozenset(v for k in kept for v in nodes[graph.nodes[k]].writes)

    def judge(self, kept: frozenset[int]) -> Outcome:
        """The simulated outcome of the plan that keeps these values."""
        if kept not in self.judged:
            self.judged[kept] = simulate(self.problem, keep_schedule(self.problem, kept))
        return self.judged[kept]
