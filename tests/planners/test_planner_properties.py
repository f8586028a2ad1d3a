"""Every planner on random problems: its plan can be carried out, does nothing for nobody, and is what it says."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
from random_problems import random_problem

from recompute.errors import UsageError
from recompute.language.options import option_fields
from recompute.passes.planners import PLANNERS, Planned, RematerialisationProblem, plan, planner, sequence_of, simulate
from recompute.passes.planners.base import import_all
from recompute.passes.planners.core.problem import checked_sequence
from recompute.passes.planners.core.simulate import pruned

import_all()
#: planners that ask a solver take seconds of effort as an option: here little
LITTLE: dict[str, dict[str, Any]] = {
    "auto": {"moves": 600, "effort": 0.2},
    "optimal": {"moves": 1200, "effort": 0.2, "solved": 40, "rounds": 1},
    "checkmate": {"time_limit": 1.0},
    "checkmate-lp": {"time_limit": 1.0},
    "moccasin": {"time_limit": 1.0},
}
SHARES = (1.0, 0.85, 0.7, 0.5)
SOLVERS = ("auto", "optimal", "cut-sweep", "checkmate", "checkmate-lp", "moccasin", "min-cut")
needs_solver = pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="the extra 'plan' (ortools)")
STRATEGIES = [pytest.param(s, marks=needs_solver if s in SOLVERS else ()) for s in sorted(PLANNERS)]


def options(strategy: str) -> dict[str, Any]:
    known = {f.name for f in option_fields(PLANNERS[strategy])}
    return {k: v for k, v in LITTLE.get(strategy, {}).items() if k in known}


def copy(p: RematerialisationProblem) -> RematerialisationProblem:
    """An equal problem that nothing is remembered of."""
    return dataclasses.replace(p)


def problem(seed: int, forward: int = 12) -> RematerialisationProblem:
    return random_problem(seed, forward, shared=seed % 3 == 0, scale=64 if seed % 2 else 1)


def budgets(p: RematerialisationProblem) -> list[int | None]:
    peak = simulate(p, range(len(p))).peak
    return [None, *(max(1, p.fixed + int((peak - p.fixed) * share)) for share in SHARES)]


def asked(p: RematerialisationProblem, strategy: str, budget: int | None) -> Planned | None:
    """The plan as judged, None where the planner refuses; it refuses in words, never otherwise."""
    try:
        return plan(p, budget=budget, strategy=strategy, **options(strategy))
    except UsageError as e:
        assert len(str(e)) > 20
        return None


def check(p: RematerialisationProblem, found: Planned) -> None:
    sequence = sequence_of(p, found.plan)
    checked_sequence(p, sequence)
    assert pruned(p, sequence) == sequence, "something runs again for nobody"
    assert found.outcome == simulate(p, sequence)
    assert set(found.plan.checkpoints) <= set(p.values)
    assert found.outcome.cost >= p.cost - 1e-9
    if found.bound is not None and found.fits:
        assert found.outcome.cost >= found.bound * (1 - 1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plans_of_random_problems(strategy: str) -> None:
    solver = strategy in ("auto", "optimal", "checkmate", "checkmate-lp", "moccasin")
    for seed in range(4 if solver else 24):
        p = problem(seed, 9 if solver else 6 + seed % 17)
        for budget in budgets(p)[:: 2 if solver else 1]:
            found = asked(p, strategy, budget)
            if found is None:
                continue
            check(p, found)
            if budget is not None and found.plain.peak <= budget and planner(strategy).heeds_budget:
                assert found.fits and found.outcome.cost == pytest.approx(p.cost), "the plain step is within the budget"
