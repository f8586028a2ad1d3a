"""Schedules that evict: valid for any problem, and within small budgets that cuts do not keep."""

from __future__ import annotations

import pytest
from random_problems import random_problem

from recompute.passes.planners import simulate
from recompute.passes.planners.core.simulate import plan_of, sequence_of
from recompute.passes.planners.methods.eviction import evicting

pytest.importorskip("ortools", reason="the extra 'plan' is not installed")

from recompute.passes.planners.core.bound import least_budget
from recompute.passes.planners.methods.auto import quick_frontier_of


def test_small_budgets_are_kept() -> None:
    """More often than by cuts; every node runs once in order, and again only if it may."""
    kept = by_cuts = 0
    for seed in range(12):
        p = random_problem(seed, 40, scale=64)
        least, plain = least_budget(p), simulate(p, range(len(p))).peak
        budget = least + (plain - least) // 4
        found = [s for first in (False, True) if (s := evicting(p, budget, long_first=first)) is not None]
        for s in found:
            assert sequence_of(p, plan_of(s)) == s
            assert all(p.nodes[r.operator].repeatable for r in plan_of(s).reruns)
        kept += any(simulate(p, s).peak <= budget for s in found)
        by_cuts += quick_frontier_of(p).best(budget) is not None
    assert kept >= 9 > by_cuts


@pytest.mark.parametrize("first", (False, True))
def test_what_fits_is_left_as_it_is_and_what_never_fits_ends(first: bool) -> None:
    p = random_problem(1, 20, scale=64)
    plain = simulate(p, range(len(p))).peak
    assert evicting(p, plain + 1000, long_first=first) == list(range(len(p)))
    tight = evicting(p, p.fixed, long_first=first)
    assert tight is None or simulate(p, tight).peak > p.fixed


@pytest.mark.parametrize("seed, nodes", ((1, 90), (12, 90), (14, 40), (20, 40)))
def test_only_what_may_run_again_does(seed: int, nodes: int) -> None:
    """Also where what an evicted value is made of goes after it, and what that was made of has gone before."""
    p = random_problem(seed, nodes, scale=64)
    plain = simulate(p, range(len(p))).peak
    for share in (0.2, 0.35, 0.5):
        for first in (False, True):
            s = evicting(p, p.fixed + int((plain - p.fixed) * share), long_first=first)
            assert s is not None
            there, done = set(p.inputs), 0
            for i in s:
                assert i == done or (0 <= i < done and p.nodes[i].repeatable)
                assert there.issuperset(p.nodes[i].reads)
                there.update(p.nodes[i].writes)
                done += i == done
            assert done == len(p)
