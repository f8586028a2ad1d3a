"""The bound of plans in the problem's order against brute force, and what it must prove."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from random_problems import BruteForce, random_problem, tiny_problem

from recompute.passes.planners import Node, RematerialisationProblem, plan, simulate

pytest.importorskip("ortools", reason="the extra 'plan' is not installed")

from recompute.passes.planners.core.bound import bound_of, least_budget
from recompute.passes.planners.core.order_bound import OrderedCut, Sure, order_bound
from recompute.passes.planners.methods import auto

#: problems for one test, in groups that pytest shows one by one
GROUPS, EACH = 8, 75


@pytest.mark.parametrize("group", range(GROUPS))
def test_no_plan_costs_less(group: int) -> None:
    """Nor is a budget refused that holds a plan; and the bound says more than that for any order."""
    more, refused = 0, 0
    for k in range(EACH):
        p = tiny_problem(2000 * group + k, shared=k % 2 == 1)
        p = replace(p, sizes=tuple(s**7 + 3 if s else 0 for s in p.sizes)) if k % 4 == 3 else p
        every = BruteForce(p, ordered=True)
        least, plain = every.least_peak(), simulate(p, range(len(p))).peak
        if math.isinf(least):  # an output that is gone, and nobody may make again
            continue
        for budget in sorted({int(b) for b in (least - 1, least, least + 1, (least + plain) // 2, plain) if b > 0}):
            true, found, free = every.cost(budget), order_bound(p, budget), bound_of(p, budget)
            assert free <= found <= true * (1 + 1e-9) + 1e-9, (p, budget)
            more += found > free
            refused += math.isinf(found)
    assert more > 5 and refused > EACH // 4


def test_an_output_in_a_shared_values_place() -> None:
    p = tiny_problem(913, shared=True)
    least = BruteForce(p).least_peak()
    assert least == 7 < p.sizes[1] and least_budget(p) == 7
    assert order_bound(p, 7) == bound_of(p, 7) == p.cost


def wide_chain(loop: bool = False) -> RematerialisationProblem:
    """x (5 bytes) → a (4) → b → c, whose gradients take 3 each: next to one, 11 bytes are too few for x and a."""
    nodes = (
        Node("a", 1.0, (0,), (1,), loop=loop),
        Node("b", 1.0, (1,), (2,), loop=loop),
        Node("c", 1.0, (2,), (3,), loop=loop),
        Node("dc", 1.0, (3,), (4,), backward=True, repeatable=False, loop=loop),
        Node("db", 1.0, (2, 4), (5,), backward=True, repeatable=False, loop=loop),
        Node("da", 1.0, (1, 5), (6,), backward=True, repeatable=False, loop=loop),
    )
    return RematerialisationProblem(nodes, (5, 4, 1, 1, 3, 3, 1), tuple("xabcdef"), inputs=(0,), outputs=(6,))


def test_what_cannot_run_again_is_kept() -> None:
    p = wide_chain()
    a, b = 1, 2
    sure = Sure(p, 11)
    assert sure.fits and not Sure(p, 10).fits
    assert sure.again[0].tolist() == [0, 1, 2, 3, 3, 3, 6]
    assert sure.there[a].tolist() == [False, False, False, True, True, True]
    assert not sure.there[b].any()
    cut = OrderedCut(p, 3, sure)
    assert cut.memory[a] == 0 and cut.memory[b] == 1
    assert cut.used == 4 + p.sizes[3] + p.sizes[4]
    assert order_bound(p, 10) == BruteForce(p, ordered=True).cost(10) == math.inf


def test_a_budget_that_holds_other_orders_only() -> None:
    """Two gradients of one value: the one that makes much stands first, and the other needs what takes much."""
    nodes = (
        Node("a", 1.0, (0,), (1,)),
        Node("g", 1.0, (1,), (2,), backward=True, repeatable=False),
        Node("much", 1.0, (2,), (3,), backward=True, repeatable=False),
        Node("weight", 1.0, (1, 2), (4,), backward=True, repeatable=False),
        Node("end", 1.0, (3,), (5,), backward=True, repeatable=False),
    )
    p = RematerialisationProblem(nodes, (1, 8, 1, 8, 1, 1), tuple("xagmwe"), inputs=(0,), outputs=(4, 5))
    assert bound_of(p, 12) < math.inf == order_bound(p, 12)
    assert math.isinf(BruteForce(p, ordered=True).cost(12)) and BruteForce(p).cost(12) < math.inf
    found = plan(p, budget=12, moves=60, effort=0.05)
    assert not found.fits and found.bound == math.inf


def test_loops_may_change_the_order() -> None:
    p = wide_chain(loop=True)
    assert order_bound(p, 9) == bound_of(p, 9)


@pytest.mark.parametrize("seed", [0, 8])
def test_wide_gaps_are_searched_longer(seed: int) -> None:
    """Narrow ones are not."""
    p = random_problem(seed, 25, scale=64).in_two_passes
    frontier, planner = auto.quick_frontier_of(p), auto.Auto(moves=30)
    budget = frontier.lowest.peak
    before = frontier.lowest.cost
    assert before > 1.05 * planner.bound(p, budget)
    planner._search_long(frontier, budget, *auto._HOT)
    after = frontier.best(budget)
    assert after is not None and after.cost < 0.9 * before
    narrow = random_problem(2, 25, scale=64).in_two_passes
    frontier = auto.quick_frontier_of(narrow)
    assert frontier.lowest.cost < 1.05 * planner.bound(narrow, frontier.lowest.peak)
    offered = list(frontier)
    planner._search_long(frontier, frontier.lowest.peak, *auto._HOT)
    assert list(frontier) == offered
