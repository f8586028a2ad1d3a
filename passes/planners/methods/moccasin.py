"""Retention intervals in constraint programming: each node runs a few times, each time its values stay for a while."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar

from ....errors import UsageError
from ...recomputation.recompute import RecomputePlan
from ..base import Planner
from ..core.problem import RematerialisationProblem
from ..core.simulate import plan_of, pruned, simulate
from .neighbourhoods import search
from .retention_intervals import improve, start

#: runs of a node that are tried where fewer are proven not to fit
_MOST_COPIES = 12


class Moccasin(Planner, strategy="moccasin"):
    """At most `copies` runs of each node, their values' intervals under the budget at every moment (CP-SAT).

    Where so few are proven not to fit, twice as many are tried.

    The event at which node v runs for the sake of node j is number j(j+1)/2 + v, so that within the stage of j nodes
    run in order, each once.  Two phases: where the start does not fit, the footprint is minimised first.

    `effort`: CP-SAT's deterministic time, about seconds, of each phase; `time_limit`: seconds, after which it ends in
    any case (and is deterministic no more); `rounds` of search in neighbourhoods follow where the optimum was not
    proven; `workers` > 1 search interleaved, which is deterministic too; `largest`:
    graphs with more nodes are refused.
    """

    quick: ClassVar[Mapping[str, Any] | None] = {"time_limit": 6.0, "effort": 3.0}
    reference = "Bartan, Li, Teague, Lott, Dilkina: Moccasin (ICML 2023, arXiv 2304.14463)"

    copies: int = 3
    effort: float = 10.0
    time_limit: float = 60.0
    rounds: int = 60
    workers: int = 1
    seed: int = 0
    largest: int = 2000

    def plan(self, problem: RematerialisationProblem, *, budget: int | None = None) -> RecomputePlan:
        if self.copies < 1:
            raise UsageError(f"strategy 'moccasin': copies must be 1 or more, not {self.copies}")
        if len(problem) > self.largest:
            raise UsageError(
                f"strategy 'moccasin' takes up to {self.largest} nodes, {problem.name} has {len(problem)}: "
                "choose another strategy, or raise its option 'largest'"
            )
        if budget is None:
            return RecomputePlan()
        return plan_of(pruned(problem, self.sequence(problem, budget)))

    def sequence(self, problem: RematerialisationProblem, budget: int) -> list[int]:
        """The best sequence that is found within effort and time."""
        deadline = time.monotonic() + self.time_limit
        sequence, copies, proven = start(problem, budget), self.copies, True
        while proven and copies <= max(self.copies, _MOST_COPIES):
            sequence, _, proven = improve(
                problem,
                budget,
                sequence,
                effort=self.effort,
                time_limit=(deadline - time.monotonic()) / 2,
                copies=copies,
                workers=self.workers,
                seed=self.seed,
            )
            if simulate(problem, sequence).peak <= budget:
                break
            copies *= 2 if proven else 1
        if not proven:
            left = deadline - time.monotonic()
            sequence = search(
                problem, budget, sequence, rounds=self.rounds, copies=copies, time_limit=left, seed=self.seed
            )
        return sequence
