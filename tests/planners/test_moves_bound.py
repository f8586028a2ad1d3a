"""The bound of steps with copies to the host against brute force: no order, reruns and copies take less time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from random_problems import MovingBruteForce, random_problem, small_step

from recompute.passes.offloading.transfers import Link
from recompute.passes.planners import simulate

pytest.importorskip("ortools", reason="the extra 'plan' is not installed")

from recompute.passes.planners.core.bound import lower_bound, touched_least
from recompute.passes.planners.core.moves_bound import bound_with_moves, movable

#: slow links, as the nodes take a few seconds
LINKS = [
    Link(out, back, latency) for latency in (0.25, 0.0) for out in (16.0, 64.0, 256.0) for back in (64.0, 16.0, 256.0)
]


def refuted(seed: int, forward: int, budgets: int = 3) -> int:
    """How many budgets of a problem have a bound above the plain step's time; none may have a faster schedule."""
    p, link = small_step(seed, forward), LINKS[seed % len(LINKS)]
    nbytes = {v: max(0, p.sizes[v] - 63) for v in movable(p)}  # the fewest that are aligned to the value's size
    out, back = ({v: link.seconds(n, back=b) for v, n in nbytes.items()} for b in (False, True))
    every, said = MovingBruteForce(p, out, back), 0
    least, plain = touched_least(p), simulate(p, range(len(p))).peak
    for budget in sorted({least + (plain - least) * k // budgets for k in range(budgets)}):
        bound = bound_with_moves(p, budget, link)
        assert bound >= p.cost or math.isclose(bound, p.cost)
        if bound > p.cost * (1 + 1e-9):
            said += 1
            assert every.faster(budget, bound * (1 - 1e-9)) is None, (p, budget, bound)
    return said


def test_no_small_step_is_faster() -> None:
    assert sum(refuted(seed, 2, 4) for seed in (6, 19)) == 5


@pytest.mark.parametrize("group", range(6))
def test_no_step_is_faster(group: int) -> None:
    assert sum(refuted(seed, 2, 4) for seed in range(100 * group, 100 * group + 100)) >= 10


def test_no_longer_step_is_faster() -> None:
    assert sum(refuted(seed, 3) for seed in range(60)) >= 10


@pytest.mark.parametrize("seed", range(8))
def test_a_link_that_takes_no_time_leaves_nothing_to_prove_and_one_that_takes_for_ever_nothing_to_gain(
    seed: int,
) -> None:
    p = random_problem(seed, 20, scale=64)
    p = replace(p, nodes=tuple(replace(n, repeatable=not n.backward) for n in p.nodes))
    budget = touched_least(p) + p.fixed // 2
    budget += (simulate(p, range(len(p))).peak - budget) // 3
    free, never = (bound_with_moves(p, budget, Link(rate, rate, 0.0)) for rate in (1e30, 0.1))
    assert free in (math.inf, pytest.approx(p.cost))
    old = lower_bound(p, budget)
    assert never == old or never == pytest.approx(old, rel=5e-3)
    assert bound_with_moves(p, touched_least(p) - 1, Link()) == math.inf
