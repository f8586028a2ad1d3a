"""Planners asked: what a request means for a step, its figures, and plans in files."""

from .plan_step import (
    PlanFigures,
    Request,
    SavedPlan,
    carry,
    check_limits,
    cost_of,
    figures_of,
    fitting_of,
    interruption,
    kept_for_backward,
    load_plan,
    lower,
    plan_step,
    request,
    saved_plan,
    target_of,
)

__all__ = [
    "PlanFigures",
    "Request",
    "SavedPlan",
    "carry",
    "check_limits",
    "cost_of",
    "figures_of",
    "fitting_of",
    "interruption",
    "kept_for_backward",
    "load_plan",
    "lower",
    "plan_step",
    "request",
    "saved_plan",
    "target_of",
]
