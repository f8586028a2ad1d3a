"""Requests to planners: a budget, a strategy, or an existing plan."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..budgets import Budget, as_budget
from ..errors import UsageError
from ..passes import RecomputePlan
from ..passes.approximation.base import Approximation, parse_permissions
from ..passes.planners import planner
from ..passes.planners.core.watch import Progress
from ..passes.planners.methods.auto import Auto
from .saved import SavedPlan, load_plan

#: the default strategy
DEFAULT = "auto"
#: the name for approximations alone, which no strategy chose
NO_PLAN = "none"


@dataclass(frozen=True)
class Request:
    """A request: a budget, a strategy with its options, or a plan; `offload`: values may also be offloaded.

    `slicing`: with a budget, parts of the step may run in slices; `slices`: those in which it runs as a whole, in any
    case (see `RecomputeOptimizer.set_slices`).  `effort`, `seconds`: limits of planning (see
    `Watch`); `progress`: the function that is called with its progress
    (None: a status line on a terminal).  `approximations`: those that the step may use, as few as it takes to fit a
    budget and where they are faster than recomputation; without a budget, wherever they save memory.
    """

    budget: Budget | None = None
    strategy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: RecomputePlan | SavedPlan | None = None
    offload: bool = False
    slicing: bool = True
    effort: float = 1.0
    seconds: float | None = None
    progress: Callable[[Progress], Any] | None = None
    slices: tuple[str, ...] = ()
    approximations: tuple[Approximation, ...] = ()

    @property
    def plans(self) -> bool:
        """Whether a planner is called, or an existing plan used; approximations alone need none."""
        return self.budget is not None or self.strategy is not None or self.plan is not None


def request(
    budget: str | int | Budget | None = None,
    strategy: str | None = None,
    options: Mapping[str, Any] | None = None,
    plan: RecomputePlan | SavedPlan | str | os.PathLike[str] | None = None,
    *,
    offload: bool = False,
    slicing: bool = True,
    effort: float | None = None,
    seconds: float | None = None,
    progress: Callable[[Progress], Any] | None = None,
    approximations: str | Sequence[str | Approximation] = (),
) -> Request | None:
    """The request; None if nothing is requested.  UsageError for arguments that are invalid or contradict each other.

    `budget`: see `as_budget`; `plan`: a plan, or the path of a saved one; `offload`: whether values may be
    offloaded (with a budget; a plan defines its own offloads); `slicing`: whether the strategy "auto" may run parts of
    the step in slices; `effort`, `seconds`, `progress`, `approximations`: see `Request`.
    """
    permitted = parse_permissions(approximations) if approximations else ()
    check_limits(effort, seconds, progress)
    if (effort is not None or seconds is not None) and budget is None:
        given = "effort" if effort is not None else "seconds"
        raise UsageError(f"{given} limits planning for a budget: give a budget, such as '60%'")
    if offload and permitted:
        raise UsageError("values in host memory are not combined with approximations: leave one of them out")
    if offload and budget is None:
        _check_offload(strategy, plan)
    if plan is not None:
        if budget is not None or strategy is not None or options:
            raise UsageError("a plan already defines what is recomputed: leave out budget and strategy, or the plan")
        if permitted:
            raise UsageError("a plan already defines what is approximated: leave out the approximations, or the plan")
        return Request(plan=_existing(plan))
    if budget is None and strategy is None:
        if options:
            raise UsageError("options belong to a strategy: name the strategy")
        return Request(approximations=permitted) if permitted else None
    if strategy is not None and not isinstance(strategy, str):
        raise UsageError(f"strategy must be a name such as '{DEFAULT}', not {strategy!r}")
    chosen = planner(strategy or DEFAULT, **(options or {}))
    if budget is None and chosen.strategy == DEFAULT:
        raise needs_budget(DEFAULT)
    if effort is not None and not isinstance(chosen, Auto):
        raise UsageError(f"strategy '{chosen.strategy}' takes no effort: only 'auto' and 'optimal' do")
    amount = None if budget is None else as_budget(budget)
    found = Request(amount, strategy, dict(options or {}), None, offload, slicing, effort or 1.0, seconds, progress)
    return replace(found, approximations=permitted)


def _check_offload(strategy: str | None, plan: object) -> None:
    """UsageError where offloading without a budget has nothing to choose values by."""
    if plan is not None:
        raise UsageError("a plan already defines which values are offloaded: leave out offload, or the plan")
    if strategy is not None:
        raise UsageError(f"offload with strategy '{strategy}' needs a budget, which determines the values to offload")


def _existing(plan: RecomputePlan | SavedPlan | str | os.PathLike[str]) -> RecomputePlan | SavedPlan:
    """A plan, which may be given by its path."""
    if isinstance(plan, (str, os.PathLike)):
        return load_plan(plan)
    if not isinstance(plan, (RecomputePlan, SavedPlan)):
        raise UsageError(f"plan must be a RecomputePlan, or the path of a saved plan, not {plan!r}")
    return plan


def check_limits(effort: object, seconds: object, progress: object = None) -> None:
    """UsageError for invalid values of effort, seconds or progress."""
    if effort is not None and seconds is not None:
        raise UsageError("effort (counted work) and seconds (time) both limit planning: give one of them")
    for name, value in (("effort", effort), ("seconds", seconds)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise UsageError(f"{name} must be a number above 0, not {value!r}")
    if progress is not None and not callable(progress):
        raise UsageError(f"progress must be a function that takes a Progress, not {progress!r}")


def needs_budget(strategy: str) -> UsageError:
    """The error for a strategy that was named without a budget."""
    return UsageError(
        f"strategy '{strategy}' needs a budget: set_budget('8GiB'), budget='60%', or --memory-budget 8GiB"
    )
