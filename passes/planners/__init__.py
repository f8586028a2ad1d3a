"""Planners: what to keep and what to run again.  One file a method; `plan` is the door to all."""

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
