"""A step within a budget that approximates gradients, as far as its user permits, where that is faster than
recomputation alone, or the only way.

Plans for larger budgets recompute less.  To each of some of them, as few approximations are added as make the step fit,
those first that save most bytes for the time that they take.  What recomputes only is among the answers.  These are few
plans, so that counted work does not limit them: the search for an exact plan has used that up.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....errors import UsageError
from ...approximation.approximate import permitted_choices
from ...approximation.base import Approximation
from ...approximation.choices import Candidate, candidates, compatible, step_of
from ...approximation.step import Step
from ...recomputation.recompute import RecomputePlan
from ..core.watch import Watch, current
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


def approximated_first(fitting: Fitting, permitted: Sequence[Approximation]) -> Fitting | None:
    """The step to plan with the approximations that replace readers wherever they save memory; None without any.

    Such a step need not recompute what readers with a sketch or codes no longer read, and gradients from sketches take
    less time, which pays for recomputation.  Whole values in another form are left to the end: reruns read the values.
    """
    kinds = [a for a in permitted if not a.whole]
    if fitting.slices or not kinds:
        return None
    with contextlib.suppress(UsageError):
        return fitting.of((), permitted_choices(fitting.once, kinds))
    return None


def with_approximations(
    fitting: Fitting, budget: int, strategy: str, options: Mapping[str, Any] | None, permitted: Sequence[Approximation]
) -> Iterator[Fitted]:
    """Steps within a budget, each with as few approximations as its plan needs."""
    watch = current()
    seen: set[tuple[RecomputePlan, bool]] = set()
    for plan, scheduled in _starts(fitting, budget, strategy, options or {}):
        if (plan, scheduled) in seen:
            continue
        seen.add((plan, scheduled))
        watch.doing("approximations")
        with contextlib.suppress(UsageError):  # nothing waits that could be approximated
            found = _fewest(fitting, plan, scheduled, budget, permitted)
            if found is not None:
                yield found
        if _ended(watch):
            return


def _starts(
    fitting: Fitting, budget: int, strategy: str, options: Mapping[str, Any]
) -> Iterator[tuple[RecomputePlan, bool]]:
    yield RecomputePlan(), False
    with contextlib.suppress(UsageError):  # no plan of any kind
        yield from plans_for_more(fitting, budget, strategy, options, _PLANS)


def _fewest(
    fitting: Fitting, plan: RecomputePlan, scheduled: bool, budget: int, permitted: Sequence[Approximation]
) -> Fitted | None:
    """A plan with as few approximations as make it fit; None where all of them do not."""
    block = fitting.applied(plan, scheduled) if plan.reruns else fitting.plain.block
    step = step_of(block)
    ranked = _ranked(fitting, step, permitted)

    def tried(n: int) -> Fitted:
        last = {c.value.name: c for c in ranked[:n]}
        choices = tuple(str(c.choice) for c in compatible(list(last.values())))
        return fitting.carry_out(dataclasses.replace(plan, approximations=choices), scheduled, budget)

    low, high, found = 0, len(ranked), tried(len(ranked)) if ranked else None
    if found is None or found.peak > budget:
        return None
    while high - low > 1 and not _ended(current()):  # `low` do not fit, `high` do
        middle = (low + high) // 2
        made = tried(middle)
        if made.peak <= budget:
            high, found = middle, made
        else:
            low = middle
    return found


def _ended(watch: Watch) -> bool:
    """Whether planning ends now: by the clock, or by its user."""
    return watch.interrupted or watch.tick()


def _ranked(fitting: Fitting, step: Step, permitted: Sequence[Approximation]) -> list[Candidate]:
    """Candidates in order of the seconds for each byte that they save, the fewest first.

    A value comes up again where a later candidate saves more than the one before: it takes its place.
    """
    ways: dict[str, list[tuple[int, float, Candidate]]] = {}
    for c in candidates(step, permitted):
        new, old = c.added(step)
        seconds = sum(map(fitting.prices, new)) - sum(map(fitting.prices, old))
        ways.setdefault(c.value.name, []).append((c.saved, seconds, c))
    found = [(price, i, c) for i, each in enumerate(ways.values()) for price, c in _improvements(each)]
    return [c for *_, c in sorted(found, key=lambda f: f[:2])]


def _improvements(ways: Sequence[tuple[int, float, Candidate]]) -> Iterator[tuple[float, Candidate]]:
    """The ways (bytes saved, seconds) to drop a value that are best at some price of a byte, with that price:
    the corners of their convex hull, from nothing saved to most."""
    saved, seconds = 0, 0.0
    while left := [w for w in ways if w[0] > saved]:
        price, _, (saved, seconds, c) = min(
            (((w[1] - seconds) / (w[0] - saved), -w[0], w) for w in left), key=lambda f: f[:2]
        )
        yield price, c
