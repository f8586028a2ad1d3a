"""The search of `auto` for a step within a budget: quick methods first, and more only while more can be gained.

What cuts keep is compiled first; where that is as good as the bound allows, it ends there.  Else blocks, the methods of
others and local search follow, for each order of the step, and go on for as long as `watch` allows.  The sequence of
what is tried depends on nothing but the step, the budget and the seed, so that a longer search finds what a shorter
one does, and more.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from ....errors import UsageError
from ..base import Planned, planner
from ..core.derive import Derived
from ..core.frontier import Point
from ..core.simulate import Outcome, plan_of, simulate
from ..core.watch import current
from ..methods.auto import GOOD, SOLVED_IN_PARTS, Auto, frontier_of, quick_frontier_of, refuse_hopeless
from .problem import Fitted, Fitting
from .refusal import lowest_quickly

#: gaps: where more than by default is wanted, nothing is looked for below the first; little by default below the second
_BEST, _NEARLY = 1e-9, 1e-2
#: plans of the cuts that are compiled, for the first order and the second; of each later round
_FIRST, _SECOND, _LATER = 3, 2, 2
#: arenas that are further from the budget, as a share of it, say nothing about plans that just fit
_NEAR = 0.1
#: plans whose live bytes are more than so many times the budget are far from it
_FAR = 1.25
#: goals around which is looked: they move when arenas of the plans that were found are known
_GOALS = 3
#: rounds in a row that find nothing, after which the search is over
_PATIENCE = 4
#: seconds after the deadline that compiling a plan may end, at most
_OVERTIME = 1.0
#: a plan that leaves no more than this share of the budget unused is not asked to use it
CLOSE = 0.995


def searched(
    fitting: Fitting,
    budget: int,
    strategy: str,
    options: Mapping[str, Any],
    tries: int,
    reorder: bool,
    within: int | None,
) -> Iterator[Fitted]:
    """Compiled plans of `auto` (or a relative), whether or not they fit: see the file and `Fitting.candidates`.

    UsageError where it is proven that nothing fits.
    """
    yield from _Search(fitting, budget, strategy, options, tries, within).run(reorder)


class _Search:
    """One call: `best` is the least cost of a plan that fits."""

    def __init__(
        self, fitting: Fitting, budget: int, strategy: str, options: Mapping[str, Any], tries: int, within: int | None
    ) -> None:
        self.fitting, self.budget, self.strategy, self.tries, self.within = fitting, budget, strategy, tries, within
        found = planner(strategy, **options)
        assert isinstance(found, Auto)
        self.auto, self.watch = found, current()
        problem = fitting.derived.problem
        self.plain = simulate(problem, range(len(problem)))
        self.best = fitting.cost(fitting.plain) if fitting.plain.peak <= budget else math.inf
        self.bound = fitting.bound(budget)
        if self.plain.peak > budget:
            refuse_hopeless(problem, budget, self.bound)
        self.hurried = False  # whether time was up before a plan fitted
        self.by_default = True  # whether no more has been done than is done by default

    def run(self, reorder: bool) -> Iterator[Fitted]:
        """Everything, in order."""
        first = _Order(self, self.fitting.derived, scheduled=False)
        orders = [first]
        if not first.far:
            yield from first.walk(min(self.tries, _FIRST))
        yield from self.sure()
        if self.ends():
            return
        if reorder and not first.far and self.second(orders):
            yield from orders[1].walk(min(self.tries, _SECOND))
            yield from self.sure()
            if self.ends():
                return
        nearly = self.best <= self.bound * (1 + _NEARLY)
        for order in orders[:1] if nearly else self.each(orders, reorder):
            for _ in range(1 if nearly else _GOALS):
                order.refine(0)
                yield from order.walk(self.tries)
                if self.ends():
                    return
        for order in orders:
            if self.auto.go_on(order.frontier, order.goal):
                yield from order.walk(self.tries)
                if self.ends():
                    return
        if not self.ends(last=True):
            yield from self.further(orders)

    def second(self, orders: list[_Order]) -> bool:
        """Adds the order of the step that needs less memory, where there is one and time for it."""
        if self.watch.late or self.fitting.reordered is None:
            return False
        orders.append(_Order(self, self.fitting.reordered, scheduled=True))
        return True

    def each(self, orders: list[_Order], reorder: bool) -> Iterator[_Order]:
        """The orders of the step: a second one that was put off comes when the first is done."""
        yield from tuple(orders)
        if reorder and len(orders) == 1 and self.second(orders):
            yield orders[1]

    def sure(self) -> Iterator[Fitted]:
        """The plan of the lowest peak, once, if time is up and no plan fits yet."""
        if self.watch.late and self.best == math.inf and not self.hurried:
            self.hurried = True
            found = lowest_quickly(self.fitting, self.budget)
            self.best = self.fitting.cost(found) if found.peak <= self.budget else math.inf
            yield found

    def further(self, orders: list[_Order]) -> Iterator[Fitted]:
        """Rounds beyond what is done by default."""
        idle = number = 0
        while idle < _PATIENCE:
            number += 1
            before = self.best
            for order in orders:
                order.refine(number)
                yield from order.walk(_LATER)
                if self.ends():
                    return
            idle = 0 if self.best < before else idle + 1

    def ends(self, last: bool = False) -> bool:
        """Whether the search is over; `last`: nothing more is done by default."""
        if self.by_default and (last or self.watch.over or self.best <= self.bound * (1 + GOOD)):
            self.by_default = False
            self.watch.allow_more()
            if not self.watch.searches_on:
                return True
        return self.watch.over or self.best <= self.bound * (1 + _BEST)


class _Order:
    """One order of the step: the plans of its frontier, and what those that were compiled took."""

    def __init__(self, search: _Search, derived: Derived, *, scheduled: bool) -> None:
        self.search, self.derived, self.scheduled = search, derived, scheduled
        self.frontier = quick_frontier_of(derived.problem)
        room, lowest = search.budget - derived.problem.fixed, self.frontier.lowest.peak - derived.problem.fixed
        #: whether nothing that cuts have found is worth compiling, as that of a long step takes long
        self.far = len(derived.problem) > SOLVED_IN_PARTS and lowest > _FAR * room
        self.goal = search.budget  # live bytes whose arena is about the budget
        self.refined: list[int] = []  # goals around which was looked
        self.beyond = 0  # live bytes of the least plan whose arena is too large
        self.tried: list[tuple[int, int]] = []  # live bytes and peaks of plans that were compiled since
        self.peaks: dict[bytes, int] = {}
        self.took = 0.0  # seconds of the last compilation

    def refine(self, number: int) -> None:
        """Looks for better plans around a goal: of live bytes, while it is arenas that must fit.

        How much of a plan's live bytes its arena takes differs from plan to plan: the budget comes first, then what the
        first plan found there says, then the middle between those that fit and those that do not.
        """
        problem, watch = self.derived.problem, self.search.watch
        goal = self.goal
        if not self.refined:
            goal = self.search.budget
        elif len(self.refined) == 1 and self.tried:
            goal = self.expected(*self.tried[0])
        elif self.beyond > self.goal:
            goal = (self.goal + self.beyond) // 2
        self.tried = []
        if not number and any(abs(goal - g) <= (1 - CLOSE) * (goal - problem.fixed) for g in self.refined):
            return
        self.refined.append(goal)
        if self.search.plain.peak > goal or self.search.best == math.inf or number:
            watch.doing("local search")
            with contextlib.suppress(UsageError):  # so little that nothing can be there
                self.search.auto.refine(self.frontier, goal, number)
        else:
            frontier_of(problem)

    def walk(self, tries: int) -> Iterator[Fitted]:
        """Compiles the plan whose arena is likely to just fit, then others, until the best that does is known."""
        search, points = self.search, list(self.frontier)
        fits, over = -1, len(points)
        for i, p in enumerate(points):
            peak = self.peaks.get(p.sequence.tobytes())
            if peak is not None and peak <= search.budget:
                fits = max(fits, i)
            elif peak is not None:
                over = min(over, i)
        over = max(over, fits + 1)  # arenas do not grow with live bytes alone
        for _ in range(tries):
            low = fits + 1 if fits < over else 0
            at = min(max(sum(p.peak <= self.goal for p in points) - 1, low), over - 1)
            if at < low or points[over - 1].cost >= search.best * (1 - GOOD):
                return  # nothing that is worth it is left
            if search.watch.over or search.watch.left + _OVERTIME < self.took:
                return
            found = self.compiled(points[at])
            yield found
            if found.peak <= search.budget:
                fits = at
                search.best = min(search.best, search.fitting.cost(found))
                if found.peak >= search.budget * CLOSE:
                    return
            else:
                over = at
            self.aim(points[at].peak, found.peak)

    def expected(self, live: int, arena: int) -> int:
        """Live bytes of plans that just fit, by a plan of so many; the goal where its arena is far from the budget."""
        missing = self.search.budget - arena
        near = abs(missing) <= _NEAR * (self.search.budget - self.derived.problem.fixed)
        return live + missing if near else self.goal

    def aim(self, live: int, arena: int) -> None:
        """Sets the goal after a plan of so many live bytes was compiled."""
        self.goal = self.expected(live, arena)
        self.tried.append((live, arena))
        if arena > self.search.budget:
            self.beyond = live

    def compiled(self, point: Point) -> Fitted:
        """The step with a plan of the frontier."""
        search = self.search
        search.watch.doing(f"compiling a plan of {point.method}")
        plan, begun = plan_of(point.sequence), search.watch.elapsed
        found = search.fitting.carry_out(self.derived.for_block(plan), self.scheduled, search.within)
        self.peaks[point.sequence.tobytes()] = found.peak
        self.took = search.watch.elapsed - begun
        return search.fitting.with_planned(found, self._planned(point.sequence, plan, point))

    def _planned(self, sequence: array, plan: Any, point: Point) -> Planned:
        search = self.search
        outcome: Outcome = simulate(self.derived.problem, sequence)
        seconds = search.watch.elapsed
        return Planned(search.strategy, plan, outcome, search.plain, search.budget, search.bound, seconds)
