"""A proven lower bound of the cost of plans: the first runs of all nodes are in the problem's order.

`bound.py` holds for any order, in which fewer nodes have run when b runs first.  In the problem's order, slot t is node
t with the recomputations right before it, and

- a value that nobody may make again is alive from its node to its last reader (a first run: others only prolong it);
- node p may run again in slot t only if what it touches, and the other values that are surely alive, fit the budget;
- a value of p that node r reads was made in the last slot up to r in which p may run, or before: alive from there on.

The third says of more values that they are surely alive, and so on until nothing changes.  Where a first run does not
fit together with them, there is no plan.  Else the cut at b (all nodes before b have run, none after it) has them kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from ....language.types import Array
from .bound import Cut, bound_of, every_moment, extra_cost, touched
from .problem import RematerialisationProblem

#: values times nodes of a problem, at most: the bound for any order serves larger ones
_MOST = 2_500_000
#: nodes on either side of the best moment at which the bound looks, too
_AROUND = 8


class Sure:
    """What is alive in every plan within a budget, and when nodes may run again.

    `there[v, i]`: value v is alive while node i runs first.  `again[p]`: for each slot, the last one up to it in which
    p may run again, or p.  `fits`: False where a first run does not fit.
    """

    def __init__(self, problem: RematerialisationProblem, budget: int) -> None:
        self.problem, self.room, n = problem, budget - problem.fixed, len(problem)
        shared, outputs = {*problem.shared}, {*problem.outputs}
        self.sizes = np.array([0 if v in shared else s for v, s in enumerate(problem.sizes)], np.int64)
        self.reads = [[*r, *([n] if v in outputs else [])] for v, r in enumerate(problem.readers)]
        self.touched = [touched(problem, i) for i in range(n)]
        self.operands = [sorted({*node.reads, *node.writes}) for node in problem.nodes]
        self.alive = np.zeros((len(self.sizes), n + 1), bool)  # through a slot; the last column: in the end
        for v, p in enumerate(problem.producer):
            if p < 0 or not problem.nodes[p].repeatable:
                self.alive[v, p + 1 : max(self.reads[v], default=p) + 1] = True
        self.again: dict[int, Array] = {}
        while self._more():
            pass
        self.there = self.alive[:, :-1] | self.alive[:, 1:]
        total = self._bytes(self.there)
        self.fits = all(self._with(i, self.there[:, i], total[i]) <= self.room for i in range(n))

    def _bytes(self, alive: Array) -> Array:
        """Bytes of what is alive, a column each; row by row, as a product would copy all of it as whole numbers."""
        return sum((s * a for s, a in zip(self.sizes, alive, strict=True) if s), np.zeros(alive.shape[1], np.int64))

    def _with(self, p: int, alive: Array, total: Array) -> Array:
        """Bytes while node p runs and values of `total` bytes are alive."""
        own = self.operands[p]
        return total - self.sizes[own] @ alive[own] + self.touched[p]

    def _more(self) -> bool:
        """Whether more is surely alive than was known."""
        n, total, before = len(self.problem), self._bytes(self.alive), int(self.alive.sum())
        slots = np.arange(n + 1)
        for p, node in enumerate(self.problem.nodes):
            if not node.repeatable:
                continue
            able = self._with(p, self.alive, total) <= self.room
            able[: p + 1] = False
            self.again[p] = np.maximum.accumulate(np.where(able, slots, p))
            for v in node.writes:
                for r in self.reads[v]:
                    self.alive[v, self.again[p][r] + 1 : r + 1] = True
        return int(self.alive.sum()) > before


class OrderedCut(Cut):
    """`Cut` for plans: all nodes before b have run, none after it."""

    def __init__(self, problem: RematerialisationProblem, b: int, sure: Sure) -> None:
        self.sure = sure
        super().__init__(problem, b, proof=True)
        for v in self.values:
            if sure.there[v, b] and self.rebuildable(v):
                self.used += self.memory[v]
                self.memory[v] = 0

    def sides(self) -> tuple[Collection[int], Collection[int]]:
        return range(self.b), range(self.b + 1, len(self.problem))

    def rebuildable(self, v: int) -> bool:
        return super().rebuildable(v) and self.sure.again[self.problem.producer[v]][-1] > self.b


def order_bound(problem: RematerialisationProblem, budget: int) -> float:
    """A cost below which no plan (`Rerun`s in the problem's order) within the budget exists; infinite: there is none.

    Where loops may run nodes together, and for long problems, it is the bound for any order.  The problem remembers it.
    """
    return problem.remembered(("order bound", budget), lambda: _order_bound(problem, budget))


def _order_bound(problem: RematerialisationProblem, budget: int) -> float:
    least, n = bound_of(problem, budget), len(problem)
    if math.isinf(least) or n * len(problem.sizes) > _MOST or any(node.loop for node in problem.nodes):
        return least
    sure = Sure(problem, budget)
    if not sure.fits:
        return math.inf
    found = {b: extra_cost(OrderedCut(problem, b, sure), budget) for b in every_moment(problem)}
    best = max(found, key=found.__getitem__, default=0)
    for b in range(max(0, best - _AROUND), min(n, best + _AROUND + 1)):
        if b not in found:
            found[b] = extra_cost(OrderedCut(problem, b, sure), budget)
    return max(least, problem.cost + max(found.values(), default=0.0))
