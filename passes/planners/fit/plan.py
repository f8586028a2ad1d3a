"""A step within a budget: the cheapest plan whose compiled arena fits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ....errors import BudgetError, UsageError
from ....language.ir import Block
from ....language.verify import verify
from ...approximation.base import Approximation
from ...offloading.transfers import Seconds
from ...recomputation.recompute import RecomputePlan
from ...target import Target
from ..base import Planned, plan, planner
from ..core.derive import Derived
from ..core.watch import current
from ..methods.auto import REMEDY, Auto, forget
from .problem import Fitted, Fitting, Prices
from .refusal import extended, lower, lowest_quickly, refuse_below_state, refused
from .search import CLOSE, searched
from .with_approximations import approximated_first, with_approximations
from .with_disk import with_disk
from .with_offload import fastest
from .with_slices import Sliced

#: plans tried for one order of a step, at most: each is compiled, and the next one asks for what the last one missed
_TRIES = 5
#: plans of a step in slices, for one order
_SLICED_TRIES = 2


def fit(
    block: Block,
    budget: int | None,
    seconds: Seconds,
    *,
    strategy: str = "auto",
    options: Mapping[str, Any] | None = None,
) -> Fitted:
    """Recomputes as much as it takes for a plain step (without frees) to fit `budget` bytes, arena and persistent.

    The step is planned as it is and in the order that needs less memory; the cheaper result is taken.  As the arena
    can be a little larger than what is alive, and reordering after planning a little smaller, the planner is asked
    again with the difference.  A budget of None lets the strategy choose.  BudgetError where the strategy finds no plan
    that fits, with the least that it found; where none exists, with the proof.
    """
    return fit_within(Fitting(block, Target(providers=(), cost=Prices(seconds))), budget, strategy, options)


def fit_within(
    fitting: Fitting,
    budget: int | None,
    strategy: str = "auto",
    options: Mapping[str, Any] | None = None,
    *,
    offload: bool = False,
    slicing: bool = False,
    allowed: Sequence[Approximation] = (),
    disk: bool = False,
) -> Fitted:
    """`fit` for a step whose problem was made before.

    `offload`: values may also wait in host memory, where the step is faster then.  `slicing`: parts of it may run in
    slices, where the step is faster then, unless it runs in slices as a whole already.  `allowed`: approximations of
    gradients that may be used where the step is faster then, or fits by nothing else.  `disk`: parameters and state may
    be on disk, where the step does not fit without that.
    """
    if budget is not None and (unrepeated := fitting._unrepeated_within(budget)) is not None:
        verify(unrepeated.compiled)
        return unrepeated
    if budget is not None and disk:
        others: dict[str, Any] = {"offload": offload, "slicing": slicing, "allowed": allowed}
        return with_disk(fitting, budget, lambda goal: fit_within(fitting, goal, strategy, options, **others))
    if budget is not None and isinstance(planner(strategy, **(options or {})), Auto):
        refuse_below_state(fitting, budget, strategy)
    if budget is None or not allowed or fitting.plain.peak <= budget:  # then nothing need be approximated
        return _exact(fitting, budget, strategy, options, offload=offload, slicing=slicing)
    near = with_approximations(fitting, budget, strategy, options, allowed)
    found, refusal = next(near, None), BudgetError("")  # the first one needs no planner
    try:
        exact = _exact(fitting, budget, strategy, options, offload=offload, slicing=slicing)
        found = exact if found is None or fitting.cost(exact) <= fitting.cost(found) else found
    except BudgetError as e:
        refusal = e
    first = approximated_first(fitting, allowed)
    for f in (*near, *(_planned_after(first, budget, strategy, options, allowed) if first is not None else ())):
        found = f if found is None or fitting.cost(f) < fitting.cost(found) else found
    if found is None:
        raise BudgetError(f"{refusal} (nor does it fit with the approximations that are permitted)")
    current().best(found)
    verify(found.compiled)
    return found


def _planned_after(
    fitting: Fitting, budget: int, strategy: str, options: Mapping[str, Any] | None, allowed: Sequence[Approximation]
) -> Iterator[Fitted]:
    """Plans for a step that has approximations already, without and with others."""
    watch = current()
    watch.begin_another()
    if watch.over or watch.interrupted:
        return
    with contextlib.suppress(BudgetError):
        yield fit_within(fitting, budget, strategy, options)
    yield from with_approximations(fitting, budget, strategy, options, [a for a in allowed if a.whole])


def _exact(
    fitting: Fitting,
    budget: int | None,
    strategy: str,
    options: Mapping[str, Any] | None,
    *,
    offload: bool,
    slicing: bool,
) -> Fitted:
    """The best step that approximates nothing."""
    if budget is None or not slicing or fitting.slices:  # slices that were asked for are all there are
        return _unsliced(fitting, budget, strategy, options, offload=offload)
    return _in_slices_or_not(fitting, budget, strategy, options, offload=offload)


def _in_slices_or_not(
    fitting: Fitting, budget: int, strategy: str, options: Mapping[str, Any] | None, *, offload: bool
) -> Fitted:
    """The fastest step that fits, in slices or not.  BudgetError where none does."""
    watch, in_slices = current(), Sliced(fitting, budget)
    found: Fitted | None = None
    refusal = BudgetError("")
    try:
        in_slices.quickly()
        found = in_slices.fits
        if found is None or fitting.cost(found) > fitting.bound(budget, moves=offload):  # else nothing else is faster
            found = _faster(fitting, found, _unsliced(fitting, budget, strategy, options, offload=offload))
            in_slices.beyond(fitting.cost(found))
            found = _faster(fitting, in_slices.fits, found)
    except BudgetError as e:
        refusal = e
        if found is None:
            in_slices.beyond()
            if in_slices.fits is None:
                in_slices.in_doubt()
            found = in_slices.fits
    except KeyboardInterrupt:
        found = in_slices.fits if found is None else found
        if not watch.take_interrupt(found is not None):
            raise
    if found is None:
        in_slices.compile_lowest()
    quick = in_slices.least
    if found is None:
        in_slices.searched(lambda f: candidates(f, budget, strategy, options, _SLICED_TRIES, within=budget))
        found = in_slices.fits
    if found is None:
        lowest = lower(refusal.lowest, in_slices.least)
        if lowest is None or lowest is refusal.lowest:
            raise refusal
        raise refused(fitting, budget, strategy, lowest, lower(refusal.sure, quick))
    if found.plan.slices:
        watch.best(found)
        verify(found.compiled)
    return found


def _faster(fitting: Fitting, a: Fitted | None, b: Fitted) -> Fitted:
    """The faster of two steps, stalls for host memory included."""
    if a is None:
        return b
    stalls = fitting.times(b).stalls if b.plan.offloads else 0.0
    return a if fitting.cost(a) < fitting.cost(b) + stalls else b


def _unsliced(
    fitting: Fitting, budget: int | None, strategy: str, options: Mapping[str, Any] | None, *, offload: bool
) -> Fitted:
    """The best step that runs no part in slices, and needs more than it has without recomputation."""
    found = [fitting.plain] if budget is not None and fitting.plain.peak <= budget else []
    try:
        plans = candidates(fitting, budget, strategy, options, within=budget)
        refusal = _collect(fitting, found, plans, budget, offload=offload)
    except BudgetError as e:
        assert budget is not None
        least = lowest_quickly(fitting, budget)
        raise refused(fitting, budget, strategy, least, least, str(e).removesuffix(REMEDY)) from None
    watch = current()
    if offload and budget is not None and not watch.interrupted:
        best_with_host = fastest(fitting, found, budget, strategy, options or {})
        if best_with_host is None:
            quick = lowest_quickly(fitting, budget)
            least = min([quick, *found], key=lambda f: f.peak)
            error = refused(fitting, budget, strategy, least, quick, refusal.removesuffix(REMEDY))
            raise extended(error, " (nor does it fit with values in host memory)")
        verify(best_with_host.compiled)
        return best_with_host
    best = fitting.best_of(found, budget)
    if budget is not None and best.peak > budget:
        sure = lowest_quickly(fitting, budget) if isinstance(planner(strategy, **(options or {})), Auto) else None
        if sure is None or sure.peak > budget:
            lowest = lower(lower(best, fitting.plain), sure)
            assert lowest is not None
            raise refused(fitting, budget, strategy, lowest, sure)
        best = sure
    verify(best.compiled)
    return best


def _collect(
    fitting: Fitting, found: list[Fitted], plans: Iterator[Fitted], budget: int | None, *, offload: bool
) -> str:
    """Adds a strategy's plans to those `found`, or gives the reason why there is none.

    An interrupt ends it where some plan fits: then those so far are taken.
    """
    watch = current()
    try:
        if found:
            watch.best(found[0])
        for f in plans:
            found.append(f)
            best, lowest = fitting.best_of(found, budget), min(found, key=lambda f: f.peak)
            if not offload:  # blocks of large steps are large
                found[:] = [best] if best is lowest else [best, lowest]
            watch.best(best if budget is None or best.peak <= budget else None)
    except UsageError as e:
        if not found and not offload:
            raise
        return str(e)
    except KeyboardInterrupt:
        if not watch.take_interrupt(budget is None or any(f.peak <= budget for f in found)):
            raise
        for derived, _ in fitting.bases():
            forget(derived.problem)
    return ""


def candidates(
    fitting: Fitting,
    budget: int | None,
    strategy: str = "auto",
    options: Mapping[str, Any] | None = None,
    tries: int = _TRIES,
    reorder: bool = True,
    within: int | None = None,
) -> Iterator[Fitted]:
    """Compiled plans of a strategy, whether or not they fit; `tries` for each order of the step, at most.

    `reorder`: whether the step is also planned in the order that needs less memory; `within`: see `carry_out`.
    """
    if budget is not None and isinstance(planner(strategy, **(options or {})), Auto):
        yield from searched(fitting, budget, strategy, options or {}, tries, reorder, within)
        return
    heeds = budget is not None and planner(strategy, **(options or {})).heeds_budget
    for derived, scheduled in fitting.bases() if reorder else [(fitting.derived, False)]:

        def planned(goal: int | None, derived: Derived = derived) -> Planned:
            return plan(derived.problem, budget=goal, strategy=strategy, **(options or {}))

        def carried(p: Planned, derived: Derived = derived, scheduled: bool = scheduled) -> Fitted:
            return fitting.with_planned(fitting.carry_out(derived.for_block(p.plan), scheduled, within), p)

        yield from _tries(planned, carried, budget, tries if heeds else 1, derived.problem.fixed)
        if current().over:
            return


def _tries(
    planned: Callable[[int | None], Planned],
    carried: Callable[[Planned], Fitted],
    budget: int | None,
    tries: int,
    fixed: int,
) -> Iterator[Fitted]:
    """Plans for live bytes under a goal that moves until the arena is just within the budget.

    `carried` compiles what `planned` plans for a goal; no goal is as low as the bytes that are `fixed`.
    """
    goal = budget
    seen: set[RecomputePlan] = set()
    for _ in range(tries):
        try:
            made = planned(goal)
        except UsageError:
            if not seen:
                raise
            return  # the goal has moved to where nothing can be
        if made.plan in seen:
            return
        seen.add(made.plan)
        found = carried(made)
        yield found
        if budget is None or goal is None or current().over:
            return
        if found.peak > budget:
            goal = min(goal, made.outcome.peak) - max(1, found.peak - budget)
            if goal <= fixed:
                return
        elif found.peak < budget * CLOSE and made.outcome.peak > found.peak:
            goal = max(goal, made.outcome.peak) + (budget - found.peak)
        else:
            return
