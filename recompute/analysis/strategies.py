"""The strategies that are compared at a batch: checkpoints that cut the graph, and plans."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..compiling.compiler import Candidate, checkpoint_candidates
from ..compiling.steps import Steps
from ..errors import UsageError
from ..passes import RecomputePlan
from ..passes.planners import plan_of
from ..passes.planners.core.watch import Watch, watching
from ..passes.planners.methods.auto import Auto, forget, frontier_of

#: by what share of the lowest peak local search looks for lower ones, first and last: half as much where it finds none;
#: its number of moves
_LOWER, _FINEST, _MOVES = 0.07, 0.008, 3000
#: rounds of local search for an effort of 1; how often it begins again with other random numbers, at most
_ROUNDS, _AGAIN = 10, 4


@dataclass(frozen=True)
class Strategy:
    """A recomputation strategy: the checkpoints that it keeps, or its plan (both None: everything is kept)."""

    name: str
    checkpoints: tuple[str, ...] | None = None
    plan: RecomputePlan | None = None

    @property
    def slices(self) -> tuple[str, ...]:
        """The parts that run in slices (see passes/slicing)."""
        return () if self.plan is None else self.plan.slices

    @property
    def plain(self) -> Strategy:
        """This strategy without recomputation."""
        return in_slices(*self.slices) if self.slices else Strategy("plain")

    @property
    def kept(self) -> tuple[str, ...] | RecomputePlan | None:
        """The argument for `Steps`: checkpoints or plan."""
        return self.checkpoints if self.plan is None else self.plan


def in_slices(*parts: str) -> Strategy:
    """Slices without recomputation."""
    return Strategy("slices", plan=RecomputePlan(slices=parts))


def candidates_of(steps: Steps) -> list[Candidate]:
    """Values that cut the forward pass, at the default batch."""
    if steps.is_step:
        return []
    return checkpoint_candidates(steps.program(steps.default_batch)[0].block)[0]


def fixed_strategies(steps: Steps) -> list[Strategy]:
    """Strategies without a search: plain, the given checkpoints, and √n."""
    strategies = [Strategy("plain")]
    if steps.asked is not None:
        strategies.append(Strategy("checkpoints", steps.resolved(steps.asked)))
    candidates = candidates_of(steps)
    if candidates:
        strategies.append(Strategy("sqrt", equal_work(candidates, max(1, round(math.sqrt(len(candidates)))))))
    return strategies


def best_k(steps: Steps, batch: int, peaks: Callable[[Strategy, int], int]) -> Strategy | None:
    """The equally spaced cuts with the lowest peak at `batch`; None if no value cuts the graph."""
    candidates = candidates_of(steps)
    n = len(candidates)
    counts = sorted({min(max(k, 1), n) for k in (round(n**0.5 * 1.5), n // 3, n // 2, n)} if n else ())
    choices = [Strategy("best-k", spaced(candidates, k)) for k in counts]
    return min(choices, key=lambda s: peaks(s, batch), default=None)


def lowest_plan(steps: Steps, batch: int, watch: Watch | None = None, slices: str = "") -> Strategy | None:
    """The plan with the lowest peak at `batch` whose extra cost is at most one forward pass; of the step in `slices`.

    None if recomputation cannot help, or if the step cannot be planned.  An interrupt ends the search.
    """
    if steps.is_step:
        return None
    parts = (slices,) if slices else ()
    derived = steps.fitting(batch).of(parts).derived
    problem = derived.problem
    most = problem.cost + sum(n.cost for n in problem.nodes if not n.backward)
    frontier = frontier_of(problem)
    watch = watch or Watch()
    watch.found = True  # plans from cuts and blocks
    point = lowest = next((p for p in frontier if p.cost <= most), None)
    try:
        with watching(watch):
            share, again = _LOWER, 0
            for number in itertools.count():
                done = watch.over or (number >= _ROUNDS * watch.effort and watch.seconds is None)
                if lowest is None or again > _AGAIN or (number and done):
                    break
                goal = problem.fixed + int((lowest.peak - problem.fixed) * (1 - share))
                moves = int(_MOVES * min(1.0, watch.effort))
                with contextlib.suppress(UsageError):  # proven: no plan has so low a peak
                    Auto(moves=moves, effort=0.0).refine(frontier, goal, again)
                lowest, before = next((p for p in frontier if p.cost <= most), None), lowest
                point = lowest
                if lowest is before:
                    share /= 2
                if share < _FINEST:
                    share, again = _LOWER, again + 1
    except KeyboardInterrupt:
        watch.interrupted = True
        forget(problem)
    point = point if watch.interrupted else next((p for p in frontier if p.cost <= most), None)
    plan = None if point is None else derived.for_block(plan_of(point.sequence))
    if plan is None or not plan.reruns:
        return None
    return Strategy("slices+auto" if slices else "auto", plan=dataclasses.replace(plan, slices=parts))


def equal_work(candidates: Sequence[Candidate], k: int) -> tuple[str, ...]:
    """k candidates that divide the work of the forward pass into about equal parts."""
    done: list[int] = []
    for c in candidates:
        done.append((done[-1] if done else 0) + c.flops)
    picked: dict[int, None] = {}
    for i in range(1, k + 1):
        want = done[-1] * i / (k + 1)
        at = bisect_left(done, want)
        nearest = min((j for j in (at - 1, at) if 0 <= j < len(done)), key=lambda j: abs(done[j] - want))
        picked[nearest] = None
    return tuple(candidates[j].value.name for j in sorted(picked))


def spaced(candidates: Sequence[Candidate], k: int) -> tuple[str, ...]:
    """k candidates at equal distances in their list, without both ends if there are enough."""
    n = len(candidates)
    return tuple(candidates[j].value.name for j in sorted({min(n - 1, (i * n) // (k + 1)) for i in range(1, k + 1)}))


# -- a batch beyond memory --------------------------------------------------------------------------------------------
