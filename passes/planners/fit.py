"""A step within a budget: the cheapest plan whose compiled arena fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError
from ...ir import Block, Operator
from ..dead_code import DeadCode
from ..memory_plan import memory_report
from ..recompute import RecomputePlan, apply
from ..schedule import Schedule, plan_best_order
from .base import Planned, plan, planner
from .bound import least_budget
from .derive import Derived, derive

Seconds = Callable[[Operator], float]

#: plans tried for one order of a step, at most: each is compiled, and the next one asks for what the last one missed
_TRIES = 5
#: a plan that leaves no more than this share of the budget unused is not asked to use it
_CLOSE = 0.995


@dataclass(frozen=True)
class Fitted:
    """A step whose compiled peak is known.

    `block`: with reruns, before frees and addresses; `compiled`: with them.  `peak`: arena and persistent bytes.
    `plan` numbers the operators of `base`, the plain step in the order it was planned in (`scheduled`: in the order
    that needs less memory).  `planned`: the planner's own account, None where no plan was needed.
    """

    block: Block
    compiled: Block
    peak: int
    plan: RecomputePlan
    planned: Planned | None
    base: Block
    scheduled: bool


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
    again with the difference.  A budget of None lets the strategy choose.  UsageError where the strategy finds no plan
    that fits, with the least that it found; where none exists, with the proof.
    """
    plain = plan_best_order(block)
    if budget is not None and peak_of(plain) <= budget:
        return Fitted(block, plain, peak_of(plain), RecomputePlan(), None, block, False)
    found: list[Fitted] = []
    least: list[int] = []
    for derived, scheduled in _bases(block, seconds):
        for fitted in _tries(derived, scheduled, budget, strategy, options or {}):
            (found if budget is None or fitted.peak <= budget else []).append(fitted)
            least.append(fitted.peak)
    if not found:
        assert budget is not None
        raise UsageError(_misses(block, seconds, budget, strategy, min(least)))
    return min(found, key=lambda f: (_cost(f), f.peak))


def carry_out(block: Block, plan: RecomputePlan, scheduled: bool) -> Fitted:
    """Applies a plan that was made for this step before."""
    base = Schedule().run(block) if scheduled else block
    after = DeadCode().run(apply(base, plan))
    compiled = plan_best_order(after)
    return Fitted(after, compiled, peak_of(compiled), plan, None, base, scheduled)


def peak_of(compiled: Block) -> int:
    """Arena and persistent bytes of a planned block."""
    return memory_report(compiled).peak


def _cost(f: Fitted) -> float:
    assert f.planned is not None
    return f.planned.outcome.cost


def _bases(block: Block, seconds: Seconds) -> Iterator[tuple[Derived, bool]]:
    yield derive(block, seconds), False
    ordered = Schedule().run(block)
    if ordered is not block:
        yield derive(ordered, seconds), True


def _tries(
    derived: Derived, scheduled: bool, budget: int | None, strategy: str, options: Mapping[str, Any]
) -> Iterator[Fitted]:
    """Plans for live bytes under a goal that moves until the arena is just within the budget."""
    goal = budget
    seen: set[RecomputePlan] = set()
    heeds = planner(strategy, **options).heeds_budget
    for _ in range(_TRIES if heeds and budget is not None else 1):
        planned = plan(derived.problem, budget=goal, strategy=strategy, **options)
        if planned.plan in seen:
            return
        seen.add(planned.plan)
        fitted = dataclasses.replace(
            carry_out(derived.block, derived.for_block(planned.plan), False), planned=planned, scheduled=scheduled
        )
        yield fitted
        if budget is None or goal is None:
            return
        if fitted.peak > budget:
            goal = min(goal, planned.outcome.peak) - max(1, fitted.peak - budget)
            if goal <= derived.problem.fixed:
                return
        elif fitted.peak < budget * _CLOSE and planned.outcome.peak > fitted.peak:
            goal = max(goal, planned.outcome.peak) + (budget - fitted.peak)
        else:
            return


def _misses(block: Block, seconds: Seconds, budget: int, strategy: str, least: int) -> str:
    bound = least_budget(derive(block, seconds).problem)
    more = f"; no plan of any strategy can need less than {bound:,}" if bound <= budget else ""
    return (
        f"strategy '{strategy}' finds no plan that fits {budget:,} bytes: its lowest peak is {least:,}{more}. "
        "Give a larger budget, a smaller batch, or another strategy"
    )
