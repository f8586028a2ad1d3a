"""Requests to planners: a budget, a strategy, or an existing plan."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..budgets import Budget, as_budget
from ..errors import UsageError, expect
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
    case (see `RecomputeOptimizer.set_slices`).  `effort` (None: 1), `seconds`: limits of planning (see `Watch`);
    `progress`: the function that is called with its progress (None: a status line on a terminal).  `approximations`:
    those that the step may use, as few as it takes to fit a budget and where they are faster than recomputation;
    without a budget, wherever they save memory.
    """

    budget: Budget | None = None
    strategy: str | None = None
    options: tuple[tuple[str, Any], ...] = ()
    plan: RecomputePlan | SavedPlan | None = None
    offload: bool = False
    slicing: bool = True
    effort: float | None = None
    seconds: float | None = None
    progress: Callable[[Progress], Any] | None = None
    slices: tuple[str, ...] = ()
    approximations: tuple[Approximation, ...] = ()

    @property
    def plans(self) -> bool:
        """Whether a planner is called, or an existing plan used; approximations alone need none."""
        return self.budget is not None or self.strategy is not None or self.plan is not None

    def checked(self) -> Request | None:
        """The request; None if nothing is requested.  UsageError for fields that are invalid or exclude each other."""
        check_limits(self.effort, self.seconds, self.progress)
        if (self.effort is not None or self.seconds is not None) and self.budget is None:
            option = "effort" if self.effort is not None else "seconds"
            raise UsageError(f"{option} limits planning for a budget: give a budget, such as '60%'")
        if self.offload and self.approximations:
            raise UsageError("values in host memory are not combined with approximations: leave one of them out")
        if self.offload and self.budget is None:
            _check_offload(self.strategy, self.plan)
        if self.plan is not None:
            if self.budget is not None or self.strategy is not None or self.options:
                raise UsageError(
                    "a plan already defines what is recomputed: leave out budget and strategy, or the plan"
                )
            if self.approximations:
                raise UsageError(
                    "a plan already defines what is approximated: leave out the approximations, or the plan"
                )
            return Request(plan=self.plan)
        if self.budget is None and self.strategy is None:
            if self.options:
                raise UsageError("options belong to a strategy: name the strategy")
            return Request(approximations=self.approximations) if self.approximations else None
        if self.strategy is not None and not isinstance(self.strategy, str):
            raise UsageError(f"strategy must be a name such as '{DEFAULT}', not {self.strategy!r}")
        chosen = planner(self.strategy or DEFAULT, **dict(self.options))
        if self.budget is None and chosen.strategy == DEFAULT:
            raise needs_budget(DEFAULT)
        if self.effort is not None and not isinstance(chosen, Auto):
            raise UsageError(f"strategy '{chosen.strategy}' takes no effort: only 'auto' and 'optimal' do")
        return self


def request(
    budget: str | int | Budget | None = None,
    strategy: str | None = None,
    options: Mapping[str, Any] | None = None,
    plan: RecomputePlan | SavedPlan | str | os.PathLike[str] | None = None,
    *,
    approximations: str | Sequence[str | Approximation] = (),
    **others: Any,
) -> Request | None:
    """The request; None if nothing is requested.  UsageError for arguments that are invalid or contradict each other.

    `budget`: see `as_budget`; `plan`: a plan, or the path of a saved one; `others`: further fields of `Request`.
    """
    expect("strategy_options", options, (Mapping, type(None)), "a mapping of the strategy's options")
    permitted = parse_permissions(approximations) if approximations else ()
    result = Request(
        None if budget is None else as_budget(budget),
        strategy,
        tuple((options or {}).items()),
        None if plan is None else existing(plan),
        approximations=permitted,
        **others,
    )
    return result.checked()


def _check_offload(strategy: str | None, plan: object) -> None:
    """UsageError where offloading without a budget has nothing to choose values by."""
    if plan is not None:
        raise UsageError("a plan already defines which values are offloaded: leave out offload, or the plan")
    if strategy is not None:
        raise UsageError(f"offload with strategy '{strategy}' needs a budget, which determines the values to offload")


def existing(plan: RecomputePlan | SavedPlan | str | os.PathLike[str]) -> RecomputePlan | SavedPlan:
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
