"""Planners for chains: the mathematics against closed forms and brute force, the plans against published figures."""

from __future__ import annotations

import functools
import random
from itertools import pairwise
from math import comb

import pytest
from test_planners import NETWORKS, derived

from recompute.passes.planners import RematerialisationProblem, plan, planner, sequence_of, simulate
from recompute.passes.planners.core.chain import Action, Chain, chain_of, cut_at, cut_further, emit
from recompute.passes.planners.core.chain import merged as merged_chain
from recompute.passes.planners.core.problem import Node, checked_sequence
from recompute.passes.planners.core.simulate import pruned
from recompute.passes.planners.core.synthetic import lstm, recurrent, residual_chain, unit_chain
from recompute.passes.planners.published.chen import even_bounds, greedy_cuts, recursive_forwards, recursive_schedule
from recompute.passes.planners.published.gruslys import most_that_fits
from recompute.passes.planners.published.gruslys_tables import step_schedule, step_tables
from recompute.passes.planners.published.rotor_table import _Stages, rotor_schedule, rotor_table

STRATEGIES = (
    "chen",
    "chen-sweep",
    "chen-recursive",
    "gruslys",
    "gruslys-hidden",
    "gruslys-internal",
    "rotor",
)
problem_of = functools.cache(lambda network: derived(network).problem)


def binomial_steps(length: int, slots: int) -> int:
    """C(length, slots) of the hidden policy in closed form: revolve (Griewank and Walther 2000, Algorithm 799).

    With r the least number for which binomial(slots + r, slots) ≥ length, each step is run r + 1 times but for
    binomial(slots + r, r - 1) of them.
    """
    r = 0
    while comb(slots + r, slots) < length:
        r += 1
    return (r + 1) * length - (comb(slots + r, r - 1) if r else 0)


def plain_sweep(chain: Chain) -> list[Action]:
    """The schedule of the plain step."""
    n = len(chain)
    return [("forward", k, True) for k in range(n)] + [("backward", k, True) for k in range(n - 1, -1, -1)]


def share(problem: RematerialisationProblem, strategy: str, part: float, **options: int) -> tuple[float, float, bool]:
    """(peak and cost as shares of the plain step's, whether it fits) of a plan with this share of the plain peak."""
    plain = simulate(problem, range(len(problem))).peak
    found = plan(problem, budget=int(plain * part), strategy=strategy, **options)
    return found.outcome.peak / plain, 1 + found.overhead, found.fits


# -- chains -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS)
def test_stages_follow_each_other(network: str) -> None:
    """Stages are all of the forward pass; the backward reads nothing of a stage before its start but what crosses."""
    p = problem_of(network)
    chain = chain_of(p)
    assert [i for s in chain.stages for i in s] == p.forward
    assert list(chain.starts) == sorted(chain.starts, reverse=True)
    assert emit(chain, plain_sweep(chain)) == list(range(len(p)))
    stage = {i: k for k, s in enumerate(chain.stages) for i in s}
    for k in range(len(chain)):
        there = chain.always | (chain.crossing[k - 1] if k else frozenset())
        for i in chain.stages[k]:
            if p.nodes[i].repeatable:
                assert all(v in there or stage[p.producer[v]] == k for v in p.nodes[i].reads)
        for i in chain.interval(k):
            early = [v for v in p.nodes[i].reads if 0 <= p.producer[v] < chain.stages[k][0]]
            assert all(v in there or p.nodes[p.producer[v]].backward for v in early)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plans_are_executions_without_waste(network: str, strategy: str) -> None:
    p = problem_of(network)
    plain = simulate(p, range(len(p))).peak - p.fixed
    for part in (0.3, 0.7):
        budget = p.fixed + int(part * plain)
        found = planner(strategy).plan(p, budget=budget)
        sequence = sequence_of(p, found)
        checked_sequence(p, sequence)
        assert pruned(p, sequence) == sequence
        assert planner(strategy).plan(p, budget=budget) == found
        assert set(found.checkpoints) <= set(p.values)


def test_values_that_cross_everywhere_are_no_obstacle() -> None:
    """A mask that every block reads, and a statistic that an update reads once, leave the borders as they are."""
    nodes = [Node("mask", 1.0, (0,), (1,))]
    sizes = [8, 64]
    for k in range(20):
        nodes.append(Node(f"f{k}", 1.0, (len(sizes) - 1, 1), (len(sizes),)))
        sizes.append(64)
    p = RematerialisationProblem(tuple(nodes), tuple(sizes), tuple(map(str, range(len(sizes)))), inputs=(0,))
    chain = chain_of(p)
    assert 1 in chain.always and len(chain) == 21
    assert [len(c) for c in chain.crossing] == [0] + [1] * 19 + [0]


def test_merging_keeps_what_crosses() -> None:
    chain = chain_of(residual_chain(100))
    merged = merged_chain(chain, 10)
    assert 8 <= len(merged) <= 11
    assert set(merged.borders) <= set(chain.borders)
    assert sum(merged.forward_all_cost) == sum(chain.forward_all_cost)


def test_bytes_of_a_unit_chain() -> None:
    """Each stage is a node of 64 bytes whose backward reads what goes in; gradients take each other's place.

    What goes into the first is empty, so that it needs nothing to be there and has no backward of its own.
    """
    b = chain_of(unit_chain(5)).bytes
    assert b.border == (64, 64, 64, 64, 0) and b.held == b.border
    assert b.saved[:4] == (0, 0, 0, 0)
    assert b.forward_peak[:4] == (64,) * 4
    assert set(b.gradients) <= {0, 64}
    assert b.backward_peak == (0, 128, 128, 128, 192)


def dense_block(n: int) -> RematerialisationProblem:
    """Each layer reads all those before it, and its backward does."""
    nodes = [Node(f"f{k}", 1.0, tuple(range(k + 1)), (k + 1,), scratch=64) for k in range(n)]
    gradients = [
        Node(f"b{k}", 2.0, (*range(k + 1), *([n + n - 1 - k] if k < n - 1 else [])), (n + n - k,), 0, True, False)
        for k in range(n - 1, -1, -1)
    ]
    sizes = (0, *[64] * n, *[64] * n)
    return RematerialisationProblem((*nodes, *gradients), sizes, tuple(map(str, range(len(sizes)))), inputs=(0,))


def test_stages_without_narrow_borders_are_cut_further() -> None:
    p = dense_block(120)
    chain = chain_of(p, width=1)
    assert max(map(len, chain.stages)) > 100
    finer = cut_further(chain)
    assert len(finer) > 10 and set(chain.borders) <= set(finer.borders)
    assert emit(finer, plain_sweep(finer)) == list(range(len(p)))
    whole = chain_of(unit_chain(100))
    assert cut_further(whole) is whole


# -- Chen -------------------------------------------------------------------------------------------------------------


def test_sqrt_of_16_by_hand() -> None:
    """4 segments of 4: 3 borders kept, the last segment whole, 3 nodes of each other segment run again.

    Most is alive when the backward starts: 3 borders, 4 values of the last segment, a gradient.
    """
    found = plan(unit_chain(16), strategy="chen")
    assert found.plan.checkpoints == ("f3", "f7", "f11")
    assert [(r.operator, r.before) for r in found.plan.reruns] == [
        (8, 21), (9, 21), (10, 21), (4, 25), (5, 25), (6, 25), (0, 29), (1, 29), (2, 29),
    ]  # fmt: skip
    assert found.outcome.peak == 8 * 64
    assert found.outcome.cost == 32 + 9


def test_sqrt_takes_two_roots_of_memory() -> None:
    found = plan(unit_chain(10_000), strategy="chen")
    assert found.outcome.peak <= 64 * (2 * 100 + 2)
    assert found.outcome.cost == 20_000 + 99 * 99


def test_greedy_cuts_by_hand() -> None:
    assert greedy_cuts([0, 1, 2, 3], [10, 10, 10, 10, 10], 15) == [1, 3]
    assert greedy_cuts([0, 1, 2, 3], [10, 10, 10, 10, 10], 0) == [0, 1, 2, 3]
    assert greedy_cuts([0, 1, 2], [5, 30, 5, 5], 20) == [1]


def test_sweep_takes_the_cheapest_within_the_budget() -> None:
    p = residual_chain(100)
    costs = []
    for part in (0.15, 0.3, 0.5, 0.8, 1.0):
        peak, cost, fits = share(p, "chen-sweep", part)
        assert fits and peak <= part
        costs.append(cost)
    assert costs == sorted(costs, reverse=True) and costs[-1] == 1.0


@pytest.mark.parametrize("k, n", [(1, 16), (1, 1024), (2, 81), (3, 256), (9, 1000)])
def test_recursion_has_the_papers_values(k: int, n: int) -> None:
    """g(n) = k · log_{k+1} n values, and k / (k + 1) · n further forward steps for each level."""
    levels = next(d for d in range(20) if (k + 1) ** d >= n)
    schedule = recursive_schedule(n, k, levels)
    forwards = sum(kind == "forward" for kind, _, _ in schedule)
    assert forwards == recursive_forwards(n, k, levels) == n + levels * n * k // (k + 1)
    p = unit_chain(n)
    kept = simulate(p, emit(chain_of(p), schedule)).peak // 64
    assert kept <= k * levels + 3  # with the node that runs and its gradients


def test_recursion_of_one_level_is_the_sqrt_plan() -> None:
    p = unit_chain(16)
    assert even_bounds(0, 16, 4) == [0, 4, 8, 12, 16]
    sequence = emit(chain_of(p), recursive_schedule(16, 3, 1))
    assert sequence == sequence_of(p, planner("chen").plan(p))


def test_recursion_goes_below_the_root() -> None:
    p = unit_chain(1000)
    for part in (0.5, 0.05, 0.015):
        peak, _, fits = share(p, "chen-recursive", part)
        assert fits and peak <= part


# -- Gruslys ----------------------------------------------------------------------------------------------------------


def recurrence(t: int, m: int, policy: str, alpha: int = 1) -> int:
    """C(t, m) as the paper writes it."""

    @functools.cache
    def cost(t: int, m: int) -> int:
        if t <= 0:
            return 0
        found = t * (t + 1) // 2
        if policy != "internal" and m > 1:
            found = min([found, *(y + cost(t - y, m - 1) + cost(y, m) for y in range(1, t))])
        if policy != "hidden" and m > alpha:
            found = min([found, *(y + cost(t - y, m - alpha) + cost(y - 1, m) for y in range(1, t + 1))])
        return found

    return cost(t, m)


@pytest.mark.parametrize("policy, hidden, internal", [("hidden", 1, 0), ("internal", 0, 1), ("mixed", 1, 3)])
def test_tables_are_the_recurrences(policy: str, hidden: int, internal: int) -> None:
    tables = step_tables(24, 9, hidden, internal)
    for t in (1, 2, 3, 7, 16, 24):
        for m in (1, 2, 4, 5, 10):
            assert tables.steps[m - 1, t] == recurrence(t, m, policy, max(internal, 1))


def test_hidden_is_revolve() -> None:
    """The binomial form: C(s + r, s) steps with s slots take each r + 1 runs at most."""
    tables = step_tables(120, 12)
    for slots in range(1, 13):
        for t in range(1, 121):
            assert tables.steps[slots - 1, t] == binomial_steps(t, slots)
    assert binomial_steps(comb(6, 3), 3) == 4 * 20 - comb(6, 2)


def test_published_figures_of_a_thousand_steps() -> None:
    """50 slots beside the start: 1.949 forwards a step; with a backward of 2 forwards 5 % of the memory for a third."""
    internal = step_tables(1000, 50, 0, 1).steps[50, 1000] / 1000
    assert round(internal, 3) == 1.949
    assert round((internal + 2) / 3, 3) == 1.316
    assert round(step_tables(1000, 10).steps[10, 1000] / 1000, 3) == 4.545


@pytest.mark.parametrize("shape", [(1, 0, 0), (0, 1, 0), (1, 3, 0), (2, 7, 2)])
def test_schedules_take_the_steps_of_their_table(shape: tuple[int, int, int]) -> None:
    n = 60
    tables = step_tables(n, 20, *shape)
    p = lstm(n)
    chain = cut_at(chain_of(p), range(1, 2 * n - 1, 2))
    assert len(chain) == n
    for m in (0, 1, 5, 20):
        schedule = step_schedule(tables, n, m)
        assert sum(kind == "forward" for kind, _, _ in schedule) == tables.steps[m, n]
        assert [k for kind, k, _ in schedule if kind == "backward"] == list(range(n - 1, -1, -1))
        assert simulate(p, emit(chain, schedule)).cost <= tables.steps[m, n] + 2 * n


def test_a_thousand_steps_in_five_percent() -> None:
    """Criterion 2: 5 % of the plain activations at 1.32 times a plain step, judged by what is alive."""
    peak, cost, fits = share(lstm(1000), "gruslys", 0.05)
    assert fits and peak <= 0.05 and cost <= 1.32
    peak, cost, fits = share(recurrent(1000), "gruslys", 0.05)
    assert fits and peak <= 0.05 and cost <= 1.32


def test_policies_keep_what_they_say() -> None:
    for strategy, part, most in (
        ("gruslys-internal", 0.2, 1.28),
        ("gruslys-hidden", 0.05, 1.75),
        ("gruslys", 0.05, 1.44),
    ):
        peak, cost, fits = share(lstm(200), strategy, part)
        assert fits and peak <= part and cost <= most, strategy


def test_search_for_the_most_that_fits() -> None:
    for answer in range(-1, 41):
        for guess in range(0, 41, 5):
            assert most_that_fits(lambda m, answer=answer: m <= answer, 0, 40, guess) == max(answer, 0)


# -- rotor ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part, most", [(0.66, 1.11), (0.33, 1.23), (0.2, 1.27), (0.1, 1.32), (0.066, 1.47), (0.053, 1.56)]
)
def test_residual_chain_of_100_blocks(part: float, most: float) -> None:
    """Criterion 4 and the curve of the optimum for whole blocks."""
    peak, cost, fits = share(residual_chain(100), "rotor", part)
    assert fits and peak <= part and cost <= most


def random_chain(seed: int) -> RematerialisationProblem:
    """A few nodes of different costs and sizes, each read by the next; backward nodes read in- and output or one."""
    draw = random.Random(seed)
    n = draw.randint(2, 6)
    sizes, nodes, values = [0], [], [0]
    for k in range(n):
        nodes.append(Node(f"f{k}", float(draw.randint(1, 9)), (values[-1],), (len(sizes),), scratch=draw.randint(0, 3)))
        values.append(len(sizes))
        sizes.append(draw.randint(1, 9))
    gradient: tuple[int, ...] = ()
    for k in range(n - 1, -1, -1):
        reads = draw.choice([(values[k],), (values[k + 1],), (values[k], values[k + 1])])
        nodes.append(Node(f"b{k}", 1.0, (*reads, *gradient), (len(sizes),), backward=True, repeatable=False))
        gradient = (len(sizes),)
        sizes.append(draw.randint(1, 9))
    names = tuple(f"v{v}" for v in range(len(sizes)))
    return RematerialisationProblem(tuple(nodes), tuple(sizes), names, inputs=(0,), outputs=gradient)


def brute_force(chain: Chain, m: int) -> float:
    """Least cost of all persistent schedules, by trying each decision; memory as the table has it."""
    stages = _Stages(chain, 1.0)

    def least(s: int, t: int, m: int) -> float:
        if s == t:
            return stages.last_cost[s] if m >= stages.need_leaf(s) else float("inf")
        found = float("inf")
        if m >= max(stages.need_now(s, t), stages.now[s]):
            found = stages.all_cost[s] + least(s + 1, t, m - stages.now[s])
        for j in range(s + 1, t + 1):
            need = max(slots for at, slots in stages.need_later(s, t) if at < j - s)
            if m >= max(need, stages.border[j - 1]):
                runs = sum(chain.forward_cost[s:j])
                found = min(found, runs + least(j, t, m - stages.border[j - 1]) + least(s, j - 1, m))
        return found

    return least(0, len(chain) - 1, m)


def model_cost(chain: Chain, schedule: list[Action]) -> float:
    """Cost of the forward actions, each in the form that it has before a backward or another forward."""
    total = 0.0
    for (kind, k, keep), (after, _, _) in pairwise(schedule):
        if kind == "forward":
            with_saved = chain.forward_saved_cost if after == "backward" else chain.forward_all_cost
            total += with_saved[k] if keep else chain.forward_cost[k]
    return total


@pytest.mark.parametrize("seed", range(20))
def test_rotor_is_the_optimum_of_its_model(seed: int) -> None:
    """And its schedules cost what the table says."""
    chain = chain_of(random_chain(seed))
    table = rotor_table(chain, 90, 90)
    assert table.unit == 1.0
    last = float("inf")
    for m in range(0, table.slots + 1, 3):
        cost = table.total(m)
        assert cost == brute_force(chain, m) and cost <= last
        last = cost
        if cost < float("inf"):
            assert model_cost(chain, rotor_schedule(table, m)) == cost


def test_rotor_never_gets_dearer_with_memory() -> None:
    for p in (residual_chain(30), lstm(40)):
        costs = [share(p, "rotor", part)[1] for part in (0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)]
        assert costs == sorted(costs, reverse=True) and costs[-1] == 1.0


def test_rotor_merges_long_chains() -> None:
    peak, cost, fits = share(residual_chain(400), "rotor", 0.2, stages=40, slots=200)
    assert fits and peak <= 0.2 and cost <= 1.32


def test_budgets_out_of_reach_give_the_lowest_peak_known() -> None:
    for strategy in ("chen-sweep", "chen-recursive", "gruslys", "rotor"):
        peak, _, fits = share(residual_chain(50), strategy, 0.01)
        assert not fits and peak < 0.2, strategy
