"""What planners are asked for: a budget, a strategy, or a plan made before."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..budgets import Budget, parse_budget
from ..errors import UsageError
from ..passes import RecomputePlan
from ..passes.planners import planner
from ..passes.planners.core.watch import Progress
from ..passes.planners.methods.auto import Auto
from .saved import SavedPlan, load_plan

#: the strategy where nobody says another
DEFAULT = "auto"


@dataclass(frozen=True)
class Request:
    """What was asked for: a budget, a strategy with its options, or a plan; `offload`: host memory may serve too.

    `effort`, `seconds`: how long planning goes on (see `Watch`); `progress`: what hears of it (None: a line on a
    terminal).
    """

    budget: Budget | None = None
    strategy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: RecomputePlan | SavedPlan | None = None
    offload: bool = False
    effort: float = 1.0
    seconds: float | None = None
    progress: Callable[[Progress], Any] | None = None


def request(
    budget: str | int | Budget | None = None,
    strategy: str | None = None,
    options: Mapping[str, Any] | None = None,
    plan: RecomputePlan | SavedPlan | str | os.PathLike[str] | None = None,
    *,
    offload: bool = False,
    effort: float | None = None,
    seconds: float | None = None,
    progress: Callable[[Progress], Any] | None = None,
) -> Request | None:
    """The request, None where nothing was asked for.  UsageError for what contradicts itself or does not exist.

    `budget`: see `parse_budget`; `plan`: a plan, or the path of one that was saved; `offload`: whether values may
    wait in host memory (with a budget; a plan says it itself); `effort`, `seconds`, `progress`: see `Request`.
    """
    check_limits(effort, seconds, progress)
    if (effort is not None or seconds is not None) and budget is None:
        given = "effort" if effort is not None else "seconds"
        raise UsageError(f"{given} says how long planning for a budget may take: give a budget, such as '60%'")
    if offload and plan is not None:
        raise UsageError("a plan says what waits in host memory: leave out offload, or the plan")
    if offload and budget is None and strategy is not None:
        raise UsageError(
            f"offload beside strategy '{strategy}' needs a budget: without one nobody can say what is to be moved"
        )
    if plan is not None:
        if budget is not None or strategy is not None or options:
            raise UsageError("a plan says what runs again: leave out budget and strategy, or the plan")
        if isinstance(plan, (str, os.PathLike)):
            plan = load_plan(plan)
        if not isinstance(plan, (RecomputePlan, SavedPlan)):
            raise UsageError(f"a plan is a RecomputePlan, or the path of a file with one, not {plan!r}")
        return Request(plan=plan)
    if budget is None and strategy is None:
        if options:
            raise UsageError("options are a strategy's: name the strategy")
        return None
    if strategy is not None and not isinstance(strategy, str):
        raise UsageError(f"a strategy is named by a text such as '{DEFAULT}', not {strategy!r}")
    chosen = planner(strategy or DEFAULT, **(options or {}))
    if budget is None and chosen.strategy == DEFAULT:
        raise needs_budget(DEFAULT)
    if effort is not None and not isinstance(chosen, Auto):
        raise UsageError(f"strategy '{chosen.strategy}' has no effort: it is for 'auto' and 'optimal', which search")
    amount = None if budget is None else parse_budget(budget)
    return Request(amount, strategy, dict(options or {}), None, offload, effort or 1.0, seconds, progress)


def check_limits(effort: object, seconds: object, progress: object = None) -> None:
    """UsageError for an effort, seconds or a listener that cannot be."""
    if effort is not None and seconds is not None:
        raise UsageError("effort (counted) and seconds (by the clock) both say when planning ends: give one of them")
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
