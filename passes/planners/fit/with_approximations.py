"""A step within a budget that approximates gradients, as far as its user permits, where that is faster than
recomputation alone, or the only way.

Plans for larger budgets recompute less.  To each of some of them, as few approximations are added as make the step fit,
those first that save most bytes for the time that they take.  What recomputes only is among the answers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....errors import UsageError
from ...approximation.approximate import permitted_choices
from ...approximation.base import Approximation
from ...approximation.choices import Candidate, best, step_of
from ...approximation.step import Step
from ...recomputation.recompute import RecomputePlan
from ..core.watch import current
from .problem import Fitted, Fitting
from .with_offload import plans_for_more

#: plans that approximations are added to, besides none at all
_PLANS = 4


def approximated(fitting: Fitting, permitted: Sequence[Approximation]) -> Fitted:
    """The step with approximations wherever they save memory, and no other plan.  UsageError where there are none."""
    choices = permitted_choices(fitting.plain.block, permitted)
    return fitting.carry_out(RecomputePlan(approximations=choices), False)


def also_approximated(fitting: Fitting, found: Fitted, permitted: Sequence[Approximation]) -> Fitted:
    """A planned step with approximations wherever they save memory besides.  UsageError where there are none."""
    choices = permitted_choices(found.block, permitted)
    return fitting.carry_out(dataclasses.replace(found.plan, approximations=choices), found.scheduled)


def with_approximations(
    fitting: Fitting,
    budget: int,
    strategy: str,
    options: Mapping[str, Any] | None,
    permitted: Sequence[Approximation],
) -> Iterator[Fitted]:
    """Steps within a budget, each with as few approximations as its plan needs."""
    watch = current()
    for plan, scheduled in dict.fromkeys(_starts(fitting, budget, strategy, options or {})):
        watch.doing("approximations")
        with contextlib.suppress(UsageError):  # nothing waits that could be approximated
            found = _fewest(fitting, plan, scheduled, budget, permitted)
            if found is not None:
                yield found
        if watch.over:
            return


def _starts(
    fitting: Fitting, budget: int, strategy: str, options: Mapping[str, Any]
) -> Iterator[tuple[RecomputePlan, bool]]:
    """No plan, and plans for larger budgets."""
    yield RecomputePlan(), False
    with contextlib.suppress(UsageError):  # no plan of any kind
        yield from plans_for_more(fitting, budget, strategy, options, _PLANS)


def _fewest(
    fitting: Fitting, plan: RecomputePlan, scheduled: bool, budget: int, permitted: Sequence[Approximation]
) -> Fitted | None:
    """A plan with as few approximations as make it fit; None where all of them do not."""
    block = fitting.applied(plan, scheduled) if plan.reruns else fitting.plain.block
    step = step_of(block)
    choices = [str(c.choice) for c in _ranked(fitting, step, permitted)]

    def tried(n: int) -> Fitted:
        return fitting.carry_out(dataclasses.replace(plan, approximations=tuple(choices[:n])), scheduled, budget)

    low, high, found = 0, len(choices), tried(len(choices)) if choices else None
    if found is None or found.peak > budget:
        return None
    while high - low > 1:  # `low` do not fit, `high` do
        middle = (low + high) // 2
        made = tried(middle)
        if made.peak <= budget:
            high, found = middle, made
        else:
            low = middle
    return found


def _ranked(fitting: Fitting, step: Step, permitted: Sequence[Approximation]) -> list[Candidate]:
    """The best candidate of each value, those first that take least time for a byte."""
    price: dict[Any, float] = {}

    def seconds_a_byte(c: Candidate) -> float:
        if c.choice not in price:
            new, old = c.added(step)
            price[c.choice] = (sum(map(fitting.prices, new)) - sum(map(fitting.prices, old))) / c.saved
        return price[c.choice]

    found = best(step, permitted, lambda c: -seconds_a_byte(c))
    return sorted(found, key=seconds_a_byte)
