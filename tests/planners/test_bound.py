"""The certificate against brute force: no schedule in any order, with any number of repeats, costs less.

A plan's gap is only worth something if the bound never lies, so that these problems are made to be awkward: values that
take another's place, values in `shared`, inputs, outputs, scratch, nodes that may not run again.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
from random_problems import BruteForce, random_problem, reordered, tiny_problem

from recompute.errors import UsageError
from recompute.passes.planners import RematerialisationProblem, plan, simulate

pytest.importorskip("ortools", reason="the extra 'plan' is not installed")

from recompute.passes.planners.core.bound import Cut, bound_of, hull, least_budget, lower_bound, turning_points

#: problems for one test, in groups that pytest shows one by one
GROUPS, EACH = 6, 70


def stretched(p: RematerialisationProblem) -> RematerialisationProblem:
    """The same problem with bytes of very different magnitudes."""
    return replace(p, sizes=tuple(s**7 + 3 if s else 0 for s in p.sizes))


def problems(group: int, shared: bool) -> list[RematerialisationProblem]:
    found = [tiny_problem(1000 * group + k, shared=shared) for k in range(EACH)]
    return [stretched(p) if k % 4 == 3 else p for k, p in enumerate(found)]


def below(bound: float, cost: float) -> bool:
    return bound <= cost * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("shared", (False, True), ids=("plain", "shared"))
@pytest.mark.parametrize("group", range(GROUPS))
def test_no_schedule_costs_less(group: int, shared: bool) -> None:
    """Nor does any need less memory than `least_budget`; and infeasible is only what is."""
    said = 0
    for p in problems(group, shared):
        every = BruteForce(p)
        least, floor = every.least_peak(), least_budget(p)
        if math.isinf(least):  # an output that is gone, and nobody may make again
            continue
        assert floor <= least
        plain = simulate(p, range(len(p))).peak
        before = math.inf
        for budget in sorted({b for b in (least - 1, least, least + 2, (least + plain) // 2, plain) if b > 0}):
            true = every.cost(int(budget))
            bounds = [lower_bound(p, int(budget)), lower_bound(p, int(budget), range(len(p)))]
            assert all(below(b, true) for b in bounds), (p, budget)
            assert below(bounds[0], before), "more memory, and a higher bound"
            assert bounds[0] >= p.cost or math.isclose(bounds[0], p.cost)
            before = bounds[0]
            said += bounds[1] > p.cost
    assert said > EACH // 4, "the bound says nothing of interest about these problems"


@pytest.mark.parametrize("seed", range(20))
def test_the_order_does_not_matter_to_the_truth(seed: int) -> None:
    """The bound of a problem in one order holds for the same problem in any other."""
    p = tiny_problem(seed)
    other = reordered(p, seed)
    truth = BruteForce(p)
    budget = truth.least_peak()
    assert budget == BruteForce(other).least_peak()
    if math.isfinite(budget):
        assert below(max(lower_bound(p, int(budget)), lower_bound(other, int(budget))), truth.cost(int(budget)))


@pytest.mark.parametrize(("seed", "budget"), [(34, 20), (145, 39), (240, 38), (349, 47)])
def test_where_the_smallest_kept_set_does_not_fit_there_is_no_schedule(seed: int, budget: int) -> None:
    """At one moment nothing can be dropped but what is no smaller than what it is made of: what is kept is proof."""
    p = tiny_problem(seed)
    assert least_budget(p) <= budget and math.isinf(BruteForce(p).cost(budget))
    assert math.isinf(lower_bound(p, budget, range(len(p))))


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_falls_as_the_budget_grows(seed: int) -> None:
    p = random_problem(seed, 20, scale=64)
    plain = simulate(p, range(len(p))).peak
    floor = least_budget(p)
    found = [lower_bound(p, floor + (plain - floor) * k // 12) for k in range(-1, 13)]
    assert all(below(late, early) for early, late in itertools.pairwise(found))
    assert below(found[-1], p.cost)
    assert lower_bound(p, floor - 1) == math.inf


@pytest.mark.parametrize("seed", range(8))
def test_a_budget_below_the_provable_minimum_is_refused_with_it(seed: int) -> None:
    p = random_problem(seed, 15, scale=64)
    floor = least_budget(p)
    with pytest.raises(UsageError, match=f"at least {floor:,} are needed"):
        plan(p, budget=floor - 1, strategy="auto")


@pytest.mark.parametrize("seed", [6, 21, 54])
def test_a_budget_that_the_bound_refutes_is_refused_with_one_that_it_refutes_too(seed: int) -> None:
    p = random_problem(seed)
    floor = least_budget(p)
    with pytest.raises(UsageError, match=r"more than \d+ are needed even with full recomputation") as caught:
        plan(p, budget=floor, strategy="auto")
    said = re.search(r"more than (\d+) are", str(caught.value))
    assert said and int(said[1]) > floor and lower_bound(p, int(said[1])) == math.inf


def test_a_refused_budget_of_a_few_bytes_has_a_refuted_one_too() -> None:
    """An eighth of seven bytes is none."""
    p = tiny_problem(7015)
    with pytest.raises(UsageError, match=r"more than 7 are needed"):
        plan(p, budget=7)


@pytest.mark.parametrize("seed", range(30))
def test_no_planner_is_below_the_bound(seed: int) -> None:
    """Nor above the truth, where small problems are solved: what `auto` calls optimal is."""
    p = tiny_problem(7000 + seed)
    every = BruteForce(p, ordered=True)
    plain = simulate(p, range(len(p))).peak
    for budget in {plain, plain - 1, int(min(every.least_peak(), plain))}:
        try:
            found = plan(p, budget=max(1, budget), strategy="auto", moves=600, effort=0.2)
        except UsageError:
            assert math.isinf(BruteForce(p).cost(budget))
            continue
        if found.fits:
            assert found.bound is not None and below(found.bound, found.outcome.cost)
            assert below(every.cost(max(1, budget)), found.outcome.cost)


def test_a_slope_changes_nothing_else() -> None:
    for seed in range(20):
        p = tiny_problem(seed, shared=True)
        for b in turning_points(p, 2):
            cut = Cut(p, b)
            before, sloped = hull(cut), hull(cut.sloped(0.05))
            assert sloped == hull(Cut(p, b, 0.05))
            assert hull(cut.sloped(0.0)) == before == hull(cut)


def test_a_problem_remembers_its_bound() -> None:
    p = tiny_problem(3)
    budget = simulate(p, range(len(p))).peak - 1
    assert bound_of(p, budget) == bound_of(p, budget) == lower_bound(p, budget)
    assert bound_of(replace(p, fixed=p.fixed + 1), budget) == lower_bound(replace(p, fixed=p.fixed + 1), budget)
