"""The cut sweep: what one minimum cut keeps at each price of a byte, rebuilt lazily by the backward pass."""

from __future__ import annotations

from dataclasses import dataclass

from ..recompute import RecomputePlan
from .base import Planner
from .bound import Cut, hull, lower_bound, turning_points
from .frontier import Frontier
from .problem import RematerialisationProblem
from .schedules import keep_schedule
from .simulate import plan_of

#: how much dearer an early byte (or a late one) is made, so that identical layers do not tie
SLOPES = (0.0, 0.05, -0.05)


@dataclass(frozen=True)
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
        point = frontier.best(budget) or frontier.lowest
        return plan_of(point.sequence)

    def bound(self, problem: RematerialisationProblem, budget: int) -> float:
        """The certificate."""
        return lower_bound(problem, budget)


def sweep(frontier: Frontier, cuts: int = 48) -> None:
    """Offers the frontier what the cuts keep at the first backward node, for a few orders of preference among ties."""
    problem = frontier.problem
    if not any(n.backward for n in problem.nodes):
        return
    (b,) = turning_points(problem, 1)
    seen: set[frozenset[int]] = set()
    for slope in SLOPES:
        for line in hull(Cut(problem, b, slope), cuts):
            if line.kept not in seen:
                seen.add(line.kept)
                frontier.offer(keep_schedule(problem, line.kept), "cut-sweep")
