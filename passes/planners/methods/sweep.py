"""The cut sweep: sets of kept values from minimum cuts at a range of prices per byte."""

from __future__ import annotations

from ...recomputation.recompute import RecomputePlan
from ..base import Planner
from ..core.bound import Cut, hull, lower_bound, turning_points
from ..core.frontier import Frontier
from ..core.problem import RematerialisationProblem
from ..core.schedules import keep_schedule
from ..core.simulate import plan_of
from ..core.watch import current

#: how much dearer an early byte (or a late one) is made, so that identical layers do not tie
SLOPES = (0.0, 0.05, -0.05)
#: moments of the step at which cuts are made; problems of more nodes than the second are cut at two
_MOMENTS, _LONG = 5, 20_000


class CutSweep(Planner):
    """Keeps what a minimum cut keeps: the dual of the bound (`bound.py`) swept over the price of a byte.

    Each price gives a set of values that are kept; all others are rebuilt right before the backward node that needs
    them.  Near-optimal while about half of the memory is left; below that segments must be rebuilt in pieces.
    """

    reference = "Lagrange dual of the certificate in bound.py; keep sets as in torch's min-cut partitioner"
    cuts: int = 48

    def plan(self, problem: RematerialisationProblem, *, budget: int | None = None) -> RecomputePlan:
        """The cheapest of the sweep that fits, or the one with the lowest peak."""
        frontier = Frontier(problem)
        sweep(frontier, self.cuts)
        point = (None if budget is None else frontier.best(budget)) or frontier.lowest
        return plan_of(point.sequence)

    def bound(self, problem: RematerialisationProblem, budget: int) -> float:
        return lower_bound(problem, budget)


def sweep(frontier: Frontier, cuts: int = 48) -> None:
    """Offers the frontier what the cuts keep, at the turn to the backward pass and at the fullest moments after it.

    A few orders of preference among ties are tried at the first moment.  What the backward pass has used up before a
    moment is kept.  It ends where time is up.
    """
    problem = frontier.problem
    seen: set[frozenset[int]] = set()
    watch = current()
    for k, b in enumerate(turning_points(problem, _MOMENTS if len(problem) <= _LONG else 2)):
        if not problem.nodes[b].backward:
            continue
        before = {v for v in problem.saved if problem.readers[v][-1] <= b}
        cut = Cut(problem, b)
        for slope in SLOPES if k == 0 else SLOPES[1:2]:
            for line in hull(cut.sloped(slope), cuts if k < 2 else cuts // 3):
                kept = line.kept | before
                if watch.tick():
                    return
                if kept not in seen:
                    seen.add(kept)
                    frontier.offer(keep_schedule(problem, kept), "cut-sweep")
