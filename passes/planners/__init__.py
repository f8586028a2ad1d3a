"""Planners, which choose what to recompute: one file per method; `plan` calls them."""

from .base import PLANNERS, Planned, Planner, plan, planner
from .core.problem import Node, RematerialisationProblem, load_problem
from .core.simulate import Outcome, plan_of, profile, sequence_of, simulate

__all__ = [
    "PLANNERS",
    "Node",
    "Outcome",
    "Planned",
    "Planner",
    "RematerialisationProblem",
    "load_problem",
    "plan",
    "plan_of",
    "planner",
    "profile",
    "sequence_of",
    "simulate",
]
