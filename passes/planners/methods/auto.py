"""The default planner: combines several methods on one frontier, and proves a bound.

Where about half of the memory is left, what a minimum cut keeps is near the optimum (`sweep.py`).  Below that, blocks
are joined by dynamic programming (`blocks.py`).  Local search on true liveness (`local_search.py`) then works on what
both have found, around the budget that is asked for; small problems go on to constraint programming
(`moccasin.py`).  `bound.py` bounds how far the result can be above the optimum.

Nothing here depends on the clock: efforts are counted in cuts, slots and moves, so that the same problem, budget and
seed give the same plan.  Plans of one problem share a frontier: what was found for a smaller budget serves a larger,
and is searched further.  What a search has found for a larger is no start: it leads a later one astray.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ....errors import BudgetError
from ...recomputation.recompute import RecomputePlan
from ..base import Planner, planner
from ..core.bound import bound_of, least_budget
from ..core.chain import chain_of, merged
from ..core.frontier import Frontier, Point
from ..core.order_bound import order_bound
from ..core.problem import RematerialisationProblem
from ..core.simulate import plan_of, sequence_of, simulate
from ..core.watch import WORK, OutOfTime, current
from . import moccasin
from .blocks import join_blocks
from .eviction import evicting
from .local_search import Schedule, Search
from .neighbourhoods import search
from .sweep import sweep

#: stages of a chain that are joined, at most; slots of memory in the table
_STAGES, _SLOTS = 160, 240
#: the name by which a problem remembers what was found for it
_FOUND = "_frontier"
#: shares of the budget that local search works at
_RUNGS = (0.94, 0.97, 1.0)
#: budgets that differ by less than this share: the second one is given a quarter of the moves, unless its best plan's
#: gap is so much wider
_NEAR, _WIDER = 0.05, 0.01
#: problems of no more nodes are solved at once, and every time; those of no more than the second in parts; those of
#: more are long: they end as soon as some method is within `GOOD` of the bound
_TINY, SOLVED_IN_PARTS = 100, 1000
#: the gap below which nothing more is looked for by default
GOOD = 1e-3
#: problems of no more nodes are searched a second time where the gap is wider than this
_SHORT, _CLOSE = 600, 5e-3
#: so many times the moves go to the best plan where its gap is wider than the last of (temperature, gap): of a short
#: problem, of a longer one, whose moves take longer and are fewer
_TIMES, _HOT, _MILD = 20, (1.5e-2, 5e-2), (3e-3, 2e-2)
#: neighbourhoods that are solved each time that the search goes on; it takes up to so many times more moves then
_ROUNDS, _LONGER = 4, 7
#: work for each node of cuts (and blocks), and of another method: units of `watch`
_SWEPT, _ASKED = 6e-4, 5e-4
#: longer sequences than so many times the problem (or than the second) are left as they are: a move takes too long
_LONGEST, _ALWAYS = 3, 3000
#: methods of others that are asked: those with tables of few stages; those for problems of no more nodes than this
_TABLES, _OTHERS, _OTHERS_MOST = ("gruslys", "rotor"), ("kusumoto", "kusumoto-memory"), 3000


class Auto(Planner):
    """The cheapest plan that all of our methods find together, and a bound for what any method could find.

    `moves`: of local search, for a budget.  `seed`: of its random numbers.  `effort`: of constraint programming on
    problems of up to `solved` nodes, in CP-SAT's deterministic units (about seconds); `rounds`: neighbourhoods of
    larger ones that are solved.
    """

    reference = "cut sweep, block-wise dynamic programming, local search; bound by Lagrangian cuts (bound.py)"
    work: ClassVar[float] = WORK  # that planning for a program takes at most (see `watch`)
    moves: int = 12_000
    seed: int = 0
    effort: float = 0.5
    rounds: int = 0
    solved: int = 200

    def plan(self, problem: RematerialisationProblem, *, budget: int | None = None) -> RecomputePlan:
        """BudgetError for a budget that no schedule can keep, with the least that one can."""
        if budget is None:
            return plan_of(range(len(problem)))
        if simulate(problem, range(len(problem))).peak > budget:
            refuse_hopeless(problem, budget)
            self.refine(quick_frontier_of(problem), budget)
            self.go_on(quick_frontier_of(problem), budget)
        frontier = quick_frontier_of(problem)
        point = frontier.best(budget) or frontier.lowest
        return plan_of(point.sequence)

    def bound(self, problem: RematerialisationProblem, budget: int) -> float:
        return order_bound(problem, budget)

    def refine(self, frontier: Frontier, budget: int, number: int = 0) -> None:
        """Blocks, the methods of others, then local search at and a little below the budget, from the nearest plans.

        `number`: how often that was done for this budget before: more moves then, other random ones.
        """
        problem, watch = frontier.problem, current()
        near = [g for g in frontier.refined if abs(budget - g) < _NEAR * (budget - problem.fixed)]
        wider = (self._gap(frontier, budget) > self._gap(frontier, g) + _WIDER for g in near)
        again = not number and bool(near) and not any(wider)
        # where the search asks again, the arena of what was good enough has missed the budget: then others are wanted
        ends_early = not (number or self.rounds or frontier.ended_early) and len(problem) > SOLVED_IN_PARTS
        frontier.refined.append(budget)
        for _ in self._steps(frontier, budget, number, again=again, quickest_first=ends_early):
            if watch.over or (watch.late and frontier.best(budget) is not None):
                return
            if ends_early and not self._worth_solving(frontier, budget):
                frontier.ended_early = True
                frontier.refined.pop()
                return
        if not (again or number) and len(problem) <= _SHORT:
            self._search_long(frontier, budget, *_HOT)
        if not again or len(problem) <= _TINY:
            self._solve(frontier, budget, number)

    def go_on(self, frontier: Frontier, budget: int) -> bool:
        """Many moves for a problem that is not short (what is, gets them from `refine`), from the best plan so far.

        Whether any were made.
        """
        watch = current()
        before = watch.work
        if _SHORT < len(frontier.problem) <= _OTHERS_MOST:
            self._search_long(frontier, budget, *_MILD)
        watch.grant(watch.work - before)  # bounded by itself
        return watch.work > before

    def _search_long(self, frontier: Frontier, budget: int, heat: float, gap: float) -> None:
        """Local search with many moves where the best plan may be far above the optimum."""
        best = frontier.best(budget)
        if best is not None and not current().over and self._worth_solving(frontier, budget, gap):
            current().doing("local search, many moves")
            moves = _TIMES * self.moves * _SHORT // max(len(frontier.problem), _SHORT)
            improve(frontier, best, budget, moves, heat, self.seed)

    def _steps(
        self, frontier: Frontier, budget: int, number: int, *, again: bool, quickest_first: bool
    ) -> Iterator[None]:
        """All but solvers, one at a time.  `quickest_first`: tables of few stages come before blocks."""
        problem, fixed = frontier.problem, frontier.problem.fixed
        large = max(1.0, len(problem) / 2000) * (4 if again else 1) / (1 + min(number, _LONGER))
        first = _TABLES if quickest_first else ()
        others = () if number else (*_TABLES[len(first) :], *(_OTHERS if len(problem) <= _OTHERS_MOST else ()))

        def search(share: float, seed: int = self.seed + number) -> Iterator[None]:
            current().doing(f"local search{f', round {number + 1}' if number else ''}")
            goal = fixed + int((budget - fixed) * share)
            starts = neighbours(frontier, goal)
            moves = int(self.moves / large / max(1, len(starts)) / len(_RUNGS))
            for start, hot in starts:
                improve(frontier, start, goal, moves, hot, seed)
                yield

        for strategy in first:
            ask(frontier, budget, strategy)
            yield
        if quickest_first and len(problem) > _OTHERS_MOST:  # blocks take long
            yield from search(1.0)
        if not again:
            frontier_of(problem, budget)
        yield
        for strategy in others:
            ask(frontier, budget, strategy)
            yield
        if len(problem) <= _OTHERS_MOST and frontier.best(budget) is None:
            evict(frontier, budget)
        for share in _RUNGS:
            yield from search(share)
        if not (again or number) and len(problem) <= _SHORT and self._worth_solving(frontier, budget, _CLOSE):
            for share in _RUNGS:
                yield from search(share, self.seed + 1)

    def _solve(self, frontier: Frontier, budget: int, number: int) -> None:
        """Constraint programming: on all of a small problem, on neighbourhoods of a larger one."""
        problem = frontier.problem
        current().doing("constraint programming")
        effort, seed = self.effort * (1 + number), self.seed + number
        if len(problem) <= self.solved and self._worth_solving(frontier, budget):
            start = frontier.best(budget) or frontier.lowest
            sequence, _, _ = moccasin.improve(problem, budget, start.sequence, effort=effort, seed=seed)
            frontier.offer(sequence, "solver", searched=True)
        rounds = self.rounds or (_ROUNDS if number else 0)
        if rounds and _TINY < len(problem) <= SOLVED_IN_PARTS and self._worth_solving(frontier, budget):
            start = frontier.best(budget) or frontier.lowest
            sequence = search(problem, budget, start.sequence, rounds=rounds, effort=self.effort / 2, seed=seed)
            frontier.offer(sequence, f"{start.method.split('+')[0]}+solver", searched=True)

    def _worth_solving(self, frontier: Frontier, budget: int, gap: float = GOOD) -> bool:
        """Whether more than a share of the bound is left to gain, as far as it tells."""
        return self._gap(frontier, budget) > gap

    def _gap(self, frontier: Frontier, budget: int) -> float:
        best = frontier.best(budget)
        if best is None:
            return math.inf
        bound = self.bound(frontier.problem, budget)
        if not bound:
            return math.inf if best.cost else 0.0
        return best.cost / bound - 1


class Optimal(Auto):
    """Auto with more of everything, for a step that will run for days."""

    quick: ClassVar[Mapping[str, Any] | None] = None
    work: ClassVar[float] = math.inf
    moves: int = 400_000
    effort: float = 60.0
    rounds: int = 100
    solved: int = 400


def ask(frontier: Frontier, budget: int, strategy: str) -> None:
    """Offers the frontier what a published method finds for a budget."""
    watch, problem = current(), frontier.problem
    watch.doing(f"strategy {strategy}")
    with contextlib.suppress(OutOfTime):
        frontier.offer(sequence_of(problem, planner(strategy).plan(problem, budget=budget)), strategy)
    watch.spend(_ASKED * len(problem))


def evict(frontier: Frontier, budget: int) -> None:
    """Offers the frontier plans that evict what is in the way."""
    for long_first in (False, True):
        sequence = evicting(frontier.problem, budget, long_first=long_first)
        if sequence is not None:
            frontier.offer(sequence, "eviction")
    current().spend(_ASKED * len(frontier.problem))


def improve(frontier: Frontier, start: Point, budget: int, moves: int, hot: float, seed: int) -> None:
    """Offers the frontier what local search makes of a plan."""
    if len(start.sequence) > max(_LONGEST * len(frontier.problem), _ALWAYS):
        return
    search = Search(Schedule(frontier.problem, start.sequence), budget, seed)
    search.descend()
    search.run(moves, hot)
    if search.best is not None:
        last = Search(Schedule(frontier.problem, search.best), budget, seed)
        last.descend()
        frontier.offer(last.best or search.best, f"{start.method.split('+')[0]}+search", searched=True)


def neighbours(frontier: Frontier, budget: int) -> list[tuple[Point, float]]:
    """Plans to start from, each with a temperature: the best within the budget, and those a little beyond.

    Beyond it a plan that takes more bytes can be so much cheaper that it is the better start: those on the convex hull.
    """
    below = [p for p in frontier if p.peak <= budget][-1:]
    above = [p for p in convex(frontier.starts) if p.peak > budget][:2]
    nearest = [p for p in frontier.starts if p.peak > budget][:1]
    above = [*nearest, *(p for p in above if p not in nearest)][:2]
    found = [(p, 3e-3) for p in below + above]
    found += [(p, 3e-2) for p in (below or above[:1])]
    return found


def convex(points: list[Point]) -> list[Point]:
    """The convex hull: of points sorted by peak, those that no mixture of two others beats."""
    hull: list[Point] = []
    for p in points:
        while len(hull) > 1:
            a, b = hull[-2:]
            if (b.cost - a.cost) * (p.peak - a.peak) < (p.cost - a.cost) * (b.peak - a.peak):
                break
            hull.pop()
        hull.append(p)
    return hull


def quick_frontier_of(problem: RematerialisationProblem) -> Frontier:
    """The frontier of a problem: points of cuts, and all found since; cached with the problem."""
    known: Frontier | None = vars(problem).get(_FOUND)
    if known is None:
        watch = current()
        watch.doing("cuts")
        frontier = Frontier(problem)
        sweep(frontier, max(6, int(48 / _large(problem))))
        watch.spend(_SWEPT * len(problem))
        frontier.first = frontier.lowest
        known = vars(problem)[_FOUND] = frontier
    return known


def deepest_of(problem: RematerialisationProblem) -> Point:
    """The lowest peak that is found without a search: by cuts, or by tables that repeat as much as it takes.

    The same whatever was found for the problem before.
    """

    def deepest() -> Point:
        first = quick_frontier_of(problem).first
        assert first is not None
        frontier = Frontier(problem)
        for strategy in _TABLES if len(problem) <= _OTHERS_MOST else ():
            ask(frontier, problem.fixed + 1, strategy)
        return min(first, frontier.lowest, key=lambda p: p.peak)

    return problem.remembered("deepest", deepest)


def frontier_of(problem: RematerialisationProblem, budget: int | None = None) -> Frontier:
    """`quick_frontier_of`, with what blocks find; of a long problem, for a budget, only those for about as much."""
    frontier = quick_frontier_of(problem)
    if not frontier.joined:
        budget = budget if len(problem) > SOLVED_IN_PARTS else None
        watch = current()
        watch.doing("blocks")
        chain = merged(chain_of(problem), _STAGES)
        with contextlib.suppress(OutOfTime):
            join_blocks(frontier, chain, slots=_SLOTS, tries=max(8, int(48 / _large(problem))), budget=budget)
            frontier.joined = budget is None
        watch.spend(_SWEPT * len(problem))
    return frontier


def forget(problem: RematerialisationProblem) -> None:
    """Forgets what was found for a problem: an interrupt can have left it half done."""
    vars(problem).pop(_FOUND, None)


def _large(problem: RematerialisationProblem) -> float:
    return max(1.0, len(problem) / 3000)


#: how an error ends that says what is proven
REMEDY = ". Give a larger budget, or a smaller batch"


def refuse_hopeless(problem: RematerialisationProblem, budget: int, bound: float | None = None) -> None:
    """BudgetError where the bound (given where it is known) proves that the budget holds no schedule."""
    least = least_budget(problem)
    text = f"{problem.name}: no schedule fits into {budget:,} bytes"
    if budget < least:
        raise BudgetError(f"{text}: at least {least:,} are needed even with full recomputation{REMEDY}")
    if math.isinf(bound_of(problem, budget) if bound is None else bound):
        least = _refuted(problem, budget)
        raise BudgetError(f"{text}: more than {least:,} are needed even with full recomputation{REMEDY}")


def _refuted(problem: RematerialisationProblem, budget: int) -> int:
    """The largest budget, to about a hundredth, of which the bound proves that it holds no schedule; `budget`: one."""
    low, high = budget, budget * 9 // 8 + 1
    while math.isinf(bound_of(problem, high)):
        low, high = high, high * 9 // 8 + 1
    for _ in range(4):
        middle = (low + high) // 2
        low, high = (middle, high) if math.isinf(bound_of(problem, middle)) else (low, middle)
    return low
