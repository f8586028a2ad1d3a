"""Planning of a step: requests to planners, figures of plans, and saved plans."""

from .figures import PlanFigures, cost_of, figures_of, interruption, kept_for_backward
from .request import Request, check_limits, request
from .saved import SavedPlan, load_plan, saved_plan
from .step import carry, fitting_of, lower, plan_step, target_of

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
