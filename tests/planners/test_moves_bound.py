"""The bound of steps with copies to the host against brute force: no order, reruns and copies take less time."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from random_problems import MovingBruteForce, random_problem, small_step

from recompute.passes.offloading.transfers import Link
from recompute.passes.planners import RematerialisationProblem, simulate

pytest.importorskip("ortools", reason="the extra 'plan' is not installed")

from recompute.passes.planners.core.bound import lower_bound, touched_least
from recompute.passes.planners.core.moves_bound import MovingCut, Prices, bound_with_moves, movable

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


@pytest.mark.parametrize("seed", range(12))
def test_a_cut_is_the_least_of_all_choices(seed: int) -> None:
    """Of nodes that run again; a value that they or later nodes read is made again, kept or fetched, as is cheapest."""
    draw, p, link = random.Random(seed), small_step(seed, 5), LINKS[seed % len(LINKS)]
    b = next(i for i, n in enumerate(p.nodes) if n.backward) + seed % 3
    moving = MovingCut(p, b, link)
    cut, before, after = moving.cut, draw.random(), draw.random()
    price = draw.choice((0.0, 0.01, 0.1))
    best = math.inf
    for again in itertools.chain.from_iterable(itertools.combinations(cut.nodes, k) for k in range(len(cut.nodes) + 1)):
        needed = cut.needed.union(*(p.nodes[i].reads for i in again))
        cost = sum((1 - after) * p.nodes[i].cost for i in again)
        for v in needed:
            seconds = before * moving.out[v] + after * moving.back[v] if v in movable(p) else math.inf
            cost += 0.0 if p.producer[v] in again else min(price * cut.memory[v], seconds)
        best = min(best, cost)
    above = {i for i in range(b) if b in _behind(p, i)}
    parts = [sum(p.nodes[i].cost for i in ns) for ns in (above, {b, *_behind(p, b)})]
    free = p.cost - sum(parts)
    held = (1 - before) * parts[0] + (1 - after) * parts[1] + (1 - max(before, after)) * free
    assert moving.solve(Prices(before, after, price))[1] == pytest.approx(held + best)


def _behind(p: RematerialisationProblem, i: int) -> set[int]:
    """Nodes that depend on a node."""
    return set(p.succs[i]).union(*(_behind(p, j) for j in p.succs[i]))


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
