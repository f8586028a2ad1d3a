"""A step within a budget that recomputes less and has values wait in host memory instead, where that is faster.

Two ways: `auto` plans problems in which some values are fetched instead of being made again (core/fetches.py); and to
plans for larger budgets, which recompute less, and to those of the first way, as many moves are added as it takes to
fit; by simulated times the best of these are compiled.  What recomputes only is among the answers, so that host memory
never makes a step slower than it would be without.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....errors import BudgetError, UsageError
from ....language.ir import Block
from ...offloading.offload import without_copies
from ...recomputation.recompute import RecomputePlan
from ..base import plan, planner
from ..core.fetches import fetched
from ..core.simulate import plan_of
from ..core.watch import current
from ..methods.auto import Auto, frontier_of
from .offload import bare, choose, logical_names
from .problem import Fitted, Fitting
from .search import searched

#: plans that are looked at between the budget and the plain peak, those of them that are compiled, and how often each
_PLANS, _COMPILED, _TRIES = 8, 3, 4
#: shares of the link's time that values to fetch may take; what the search of each may take of that of the first plan
SHARES, _WORK = (0.7, 0.4), 0.7
#: shares that are tried, in both orders of the step, where nothing so near to the bound is found
FURTHER, _NEAR = (1.0, 1.5), 1.1
#: plans of one such search that are compiled in a round
_JOINT = 2


def fastest(
    fitting: Fitting, found: list[Fitted], budget: int, strategy: str, options: Mapping[str, Any]
) -> Fitted | None:
    """The fastest step within the budget, of `found` (those that only recompute) and those that move values too."""
    tried, fitting_in = [*found], [f for f in found if f.peak <= budget]
    watch = current()
    try:
        watch.doing("values in host memory")
        limit = min((fitting.times(f).seconds for f in fitting_in), default=float("inf"))
        ways = itertools.chain(
            _joint(fitting, budget, strategy, options, SHARES),
            _added(fitting, tried, budget, strategy, options),
            _further(fitting, fitting_in, budget, strategy, options),
        )
        for moved in itertools.chain.from_iterable(hiding(fitting, f, budget) for f in ways):
            tried.append(moved)
            if moved.peak <= budget and fitting.times(moved).seconds < limit:  # each faster than all before
                limit = fitting.times(moved).seconds
                fitting_in.append(moved)
                watch.best(moved)
    except KeyboardInterrupt:
        if not watch.take_interrupt(bool(fitting_in)):
            raise
    if not fitting_in:
        return None
    return min(fitting_in, key=lambda f: (fitting.times(f).seconds, f.peak))


def hiding(fitting: Fitting, f: Fitted, budget: int) -> Iterator[Fitted]:
    """A step, and where it waits for copies, the same with copies that use what is left of the budget."""
    yield f
    if f.peak < budget and fitting.times(f).stalls:
        yield fitting.carry_out(f.plan, f.scheduled, limit=budget - _persistent(f.base))


def _joint(
    fitting: Fitting,
    budget: int,
    strategy: str,
    options: Mapping[str, Any],
    shares: Sequence[float],
    scheduled: bool = False,
) -> Iterator[Fitted]:
    """Steps that `auto` plans with values to fetch in place of recomputing them (core/fetches.py).

    `scheduled`: in the order that needs less memory.
    """
    derived, watch = fitting.reordered if scheduled else fitting.derived, current()
    if fitting.slices or derived is None or not isinstance(planner(strategy, **options), Auto):
        return
    for problem in fetched(derived, budget, fitting.target.rates, shares):
        if watch.late:
            return
        other = copy.copy(fitting)
        vars(other).update(derived=problem, block=derived.block, reordered=None)
        watch.begin_another(_WORK)
        with contextlib.suppress(BudgetError):
            for f in searched(other, budget, strategy, options, _JOINT, False, None):
                yield dataclasses.replace(f, planned=None, scheduled=scheduled)  # its cost has the link's price


def _further(
    fitting: Fitting, found: list[Fitted], budget: int, strategy: str, options: Mapping[str, Any]
) -> Iterator[Fitted]:
    """More values to fetch, and both orders of the step, while all that fit, `found`, are far from the bound."""
    near = fitting.bound(budget, moves=True) * _NEAR
    for scheduled, share in itertools.product((False, True), (*SHARES, *FURTHER)):
        if any(fitting.times(f).seconds < near for f in found):
            return
        if scheduled or share in FURTHER:
            yield from _joint(fitting, budget, strategy, options, (share,), scheduled)


def _added(
    fitting: Fitting, found: list[Fitted], budget: int, strategy: str, options: Mapping[str, Any]
) -> Iterator[Fitted]:
    """Plans that recompute less, with as many values moved as it takes; the fastest by simulated times are compiled."""
    current().begin_another(_WORK)
    for _, start in sorted(_starts(fitting, found, budget, strategy, options), key=lambda s: s[0])[:_COMPILED]:
        if current().over:
            return
        moved = _moved(fitting, start, budget)
        if moved is not None:
            yield moved


def _starts(
    fitting: Fitting, found: list[Fitted], budget: int, strategy: str, options: Mapping[str, Any]
) -> Iterator[tuple[float, tuple[RecomputePlan, bool]]]:
    """(simulated seconds, plan and whether it is for the step as reordered), for plans that moves make fit."""
    others = [f for f in found if f.peak > budget or f.plan.offloads]
    missed = [(dataclasses.replace(f.plan, offloads=()), f.scheduled) for f in others]
    plans = [(RecomputePlan(), False), *plans_for_more(fitting, budget, strategy, options, _PLANS)]
    for start in dict.fromkeys([*plans, *missed]):
        plain = fitting.applied(*start)
        block = fitting.order(plain)
        names = logical_names(block, plain)
        chosen = choose(block, budget - _persistent(block), fitting.prices, fitting.target.rates, names)
        if chosen is not None:
            yield chosen[1].seconds, start


def plans_for_more(
    fitting: Fitting, budget: int, strategy: str, options: Mapping[str, Any], count: int
) -> Iterator[tuple[RecomputePlan, bool]]:
    """Plans of a strategy for `count` budgets between this one and what the step takes without a plan."""
    derived, top = fitting.derived, fitting.unrepeated.peak
    goals = [budget + (top - budget) * k // count for k in range(count)]
    chosen = planner(strategy, **options)
    if isinstance(chosen, Auto):
        points = list(frontier_of(derived.problem))
        for goal in goals:
            below = [p for p in points if p.peak <= goal]
            yield derived.for_block(plan_of((below or points)[-1 if below else 0].sequence)), False
    elif chosen.heeds_budget:
        for goal in goals[1 :: max(1, count // 3)]:
            with contextlib.suppress(UsageError):
                yield derived.for_block(plan(derived.problem, budget=goal, strategy=strategy, **options).plan), False


def _moved(fitting: Fitting, start: tuple[RecomputePlan, bool], budget: int) -> Fitted | None:
    """The step compiled with as many values moved as it takes; the arena can be larger than what is alive."""
    made, scheduled = start
    plain = fitting.applied(made, scheduled)
    block = fitting.order(plain)
    target, names = budget - _persistent(block), logical_names(block, plain)
    seen: set[tuple[str, ...]] = set()
    for _ in range(_TRIES):
        chosen = choose(block, target, fitting.prices, fitting.target.rates, names)
        moved = () if chosen is None else tuple(dict.fromkeys(names[n] for n in chosen[0]))
        if chosen is None or moved in seen:
            return None
        seen.add(moved)
        found = fitting.carry_out(dataclasses.replace(made, offloads=moved), scheduled)
        if found.peak <= budget:
            return found
        block = without_copies(bare(found.compiled))  # the order that was compiled can be another one
        target -= found.peak - budget
    return None


def _persistent(block: Block) -> int:
    return sum(v.nbytes for v in block.persistent())
