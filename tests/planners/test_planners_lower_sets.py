"""Kusumoto et al.'s planners: their lower sets, their dynamic programme against brute force, their plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache

import pytest

import recompute as rc
from recompute.compiling.steps import attach_loss
from recompute.cost import device
from recompute.errors import UsageError
from recompute.passes import DeadCode
from recompute.passes.planners import Node, RematerialisationProblem, plan, plan_of, sequence_of, simulate
from recompute.passes.planners.core.derive import derive
from recompute.passes.planners.core.problem import checked_sequence
from recompute.passes.planners.core.schedules import keep_schedule
from recompute.passes.planners.core.simulate import pruned
from recompute.passes.planners.published.kusumoto import best_chain, least_budget
from recompute.passes.planners.published.lower_sets import (
    Lattice,
    all_lower_sets,
    forward_graph,
    kept_nodes,
    principal_lower_sets,
    thinned,
)

STRATEGIES = ("kusumoto", "kusumoto-memory", "kusumoto-exact", "kusumoto-exact-memory")


def paper_step(
    preds: Sequence[Sequence[int]],
    memory: Sequence[int] | None = None,
    time: Sequence[int] | None = None,
    stays: Sequence[int] = (),
) -> RematerialisationProblem:
    """A step as the paper has it: the gradient of v is made from those of the nodes that read v, and from all values
    that those nodes read; it has v's size."""
    n = len(preds)
    memory, time = memory or [1] * n, time or [1] * n
    nodes = [Node(f"f{k}", time[k], tuple(ps), (k,), repeatable=k not in stays) for k, ps in enumerate(preds)]
    succs = [[j for j in range(n) if k in preds[j]] for k in range(n)]
    for k in reversed(range(n)):
        values = {u for w in succs[k] for u in preds[w]} | ({k} if not succs[k] else set())
        grads = [2 * n - 1 - w for w in succs[k]]
        nodes.append(
            Node(f"g{k}", time[k], (*sorted(values), *grads), (2 * n - 1 - k,), backward=True, repeatable=False)
        )
    sizes = [*memory, *memory[::-1]]
    return RematerialisationProblem(tuple(nodes), tuple(sizes), tuple(n.name for n in nodes))


def chain(n: int) -> list[list[int]]:
    return [[k - 1] if k else [] for k in range(n)]


def random_step(seed: int, n: int) -> RematerialisationProblem:
    """A connected graph with skips, integer bytes and times."""
    draw = random.Random(seed)
    preds: list[list[int]] = [[]]
    for k in range(1, n):
        preds.append(sorted({draw.randrange(max(0, k - 3), k) for _ in range(draw.choice((1, 1, 2)))}))
    memory, time = [draw.randint(1, 9) for _ in preds], [draw.randint(1, 9) for _ in preds]
    return paper_step(preds, memory, time, [k for k in range(n) if draw.random() < 0.1])


@cache
def network(name: str, batch: int = 2) -> RematerialisationProblem:
    program = rc.load(rc.models.build(name, batch=batch, weights=False))
    loss, _ = attach_loss(program, None)
    rc.SGD().minimize(program[loss])
    return derive(DeadCode().run(program.block), device("v100-32").seconds).problem


# -- lower sets --------------------------------------------------------------------------------------------------------


def test_a_chain_has_a_lower_set_for_each_end() -> None:
    graph = forward_graph(paper_step(chain(7)))
    assert all_lower_sets(graph, 100) == [(1 << k) - 1 for k in range(8)] == principal_lower_sets(graph)


def test_parallel_chains_multiply() -> None:
    preds = [[], [0], [1], [], [3], [4], [5], [2, 6]]  # chains of 3 and 4 nodes, and one that joins them
    graph = forward_graph(paper_step(preds))
    assert len(all_lower_sets(graph, 100)) == 4 * 5 + 1
    assert len(principal_lower_sets(graph)) == 8 + 1


@pytest.mark.parametrize("name, published", [("vgg19", 47), ("resnet50", 241), ("densenet161", 569)])
def test_as_many_lower_sets_as_the_paper_counts(name: str, published: int) -> None:
    """One fewer each: softmax and cross-entropy are one node of ours."""
    assert len(all_lower_sets(forward_graph(network(name)), 10_000)) == published - 1


def test_lower_sets_are_those_of_brute_force() -> None:
    for seed in range(20):
        graph = forward_graph(random_step(seed, 9))
        expected = {
            s
            for s in range(1 << len(graph))
            if all(s >> p & 1 for k, ps in enumerate(graph.preds) if s >> k & 1 for p in ps)
        }
        found = all_lower_sets(graph, 1 << 9)
        assert set(found) == expected and len(found) == len(expected)
        assert set(principal_lower_sets(graph)) <= expected


def test_too_many_lower_sets_are_refused() -> None:
    preds = [*([[]] * 20), list(range(20))]
    with pytest.raises(UsageError, match=r"more than 4,000 lower sets.*'kusumoto'"):
        plan(paper_step(preds), strategy="kusumoto-exact")


def test_what_nothing_reads_is_no_node() -> None:
    """A forward node for its own sake (a running statistic) would double the number of lower sets."""
    nodes = (
        Node("a", 1.0, (), (0,)),
        Node("statistic", 1.0, (0,), (), repeatable=False),
        Node("metric", 1.0, (0,), (1,)),
        Node("b", 1.0, (0,), (2,)),
        Node("g", 1.0, (0, 2), (3,), backward=True, repeatable=False),
    )
    p = RematerialisationProblem(nodes, (8, 8, 8, 8), ("a", "metric", "b", "g"), outputs=(1,))
    assert forward_graph(p).nodes == (0, 3)


# -- the dynamic programme ---------------------------------------------------------------------------------------------


def brute_force(problem: RematerialisationProblem, budget: float) -> tuple[float, float] | None:
    """The most and the least time that a chain of lower sets keeps: every chain, by the paper's definitions."""
    graph = forward_graph(problem)
    n = len(graph)
    sets = [frozenset(k for k in range(n) if s >> k & 1) for s in all_lower_sets(graph, 1000)]
    ways: list[set[tuple[float, float]]] = [set() for _ in sets]
    ways[0] = {(0.0, 0.0)}
    for j, to in enumerate(sets):
        readers = {w for v in to for w in graph.succs[v]}
        peak = sum(graph.memory[v] for v in readers - to)
        peak += sum(graph.memory[v] for v in {u for w in readers for u in graph.preds[w]} - to)
        for i, base in enumerate(sets):
            if base < to:
                kept = [v for v in to - base if graph.stays[v] or any(w not in to for w in graph.succs[v])]
                for t, m in ways[i]:
                    if m + 2 * sum(graph.memory[v] for v in to - base) + peak <= budget:
                        ways[j].add((t + sum(graph.time[v] for v in kept), m + sum(graph.memory[v] for v in kept)))
    times = [t for t, _ in ways[-1]]
    return (max(times), min(times)) if times else None


@pytest.mark.parametrize("seed", range(12))
def test_exact_method_finds_the_best_chain_of_all(seed: int) -> None:
    p = random_step(seed, 8)
    graph = forward_graph(p)
    lattice = Lattice(graph, all_lower_sets(graph, 1000))
    some = Lattice(graph, principal_lower_sets(graph))
    total = graph.total_memory
    for budget in [total * k / 6 for k in range(3, 19)]:
        best = brute_force(p, budget)
        time, memory = best_chain(lattice, budget), best_chain(lattice, budget, memory_centric=True)
        if best is None:
            assert time is None and memory is None
            continue
        assert time is not None and memory is not None
        assert (time.kept_time, memory.kept_time) == best
        assert max(time.peak, memory.peak) <= budget
        approximate = best_chain(some, budget)
        assert approximate is None or approximate.kept_time <= time.kept_time


@pytest.mark.parametrize("seed", range(6))
def test_least_budget_is_where_solutions_begin(seed: int) -> None:
    p = random_step(seed, 8)
    graph = forward_graph(p)
    lattice = Lattice(graph, all_lower_sets(graph, 1000))
    low = least_budget(lattice)
    assert brute_force(p, low) is not None
    assert brute_force(p, low * 0.998 - 0.001) is None


@pytest.mark.parametrize("n", [5, 12, 30])
def test_simulated_peak_is_within_the_models(n: int) -> None:
    """On chains, where the order of execution is that of the lower sets."""
    draw = random.Random(n)
    p = paper_step(chain(n), [draw.randint(1, 9) for _ in range(n)], [draw.randint(1, 9) for _ in range(n)])
    graph = forward_graph(p)
    lattice = Lattice(graph, all_lower_sets(graph, 1000))
    low = least_budget(lattice)
    for share in (1.0, 1.2, 1.5, 2.0, 3.0):
        for memory_centric in (False, True):
            found = best_chain(lattice, low * share, memory_centric)
            assert found is not None
            sequence = keep_schedule(p, kept_nodes(graph, found.sets))
            outcome = simulate(p, sequence)
            assert outcome.peak <= found.peak <= low * share
            assert outcome.cost == p.cost + graph.time.sum() - found.kept_time


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, strategy",
    [*itertools.product(("resnet18", "lstm"), STRATEGIES), *itertools.product(("bert-tiny",), STRATEGIES[:2])],
)
def test_plans_of_networks(name: str, strategy: str) -> None:
    p = network(name, 16)
    plain = simulate(p, range(len(p)))
    least = plan(p, strategy=strategy)
    assert least.outcome.peak <= plain.peak
    for share in (0.9, 0.7):
        budget = least.outcome.peak + int((plain.peak - least.outcome.peak) * share)
        found = plan(p, strategy=strategy, budget=budget, samples=5)
        sequence = sequence_of(p, found.plan)
        checked_sequence(p, sequence)
        assert pruned(p, sequence) == sequence
        assert plan_of(sequence).reruns == found.plan.reruns
        assert found.fits
    assert found.plan == plan(p, strategy=strategy, budget=budget, samples=5).plan


def test_time_centric_plans_run_less_again() -> None:
    p = network("resnet18", 16)
    for exact in ("", "-exact"):
        time, memory = plan(p, strategy=f"kusumoto{exact}"), plan(p, strategy=f"kusumoto{exact}-memory")
        assert time.overhead <= memory.overhead
        assert memory.outcome.peak <= time.outcome.peak


def test_a_budget_that_nothing_exceeds_costs_next_to_nothing() -> None:
    p = network("resnet18", 16)
    found = plan(p, strategy="kusumoto-exact", budget=10**12)
    assert found.overhead == 0.0


def test_thinned_lower_sets_still_reach_every_budget() -> None:
    """A few states only, but steps through those in between: from little memory to nothing run again."""
    p = paper_step(chain(300))
    graph = forward_graph(p)
    found = principal_lower_sets(graph)
    few = thinned(graph, found, 20)
    assert len(few) <= 22 and few[0] == 0 and few[-1] == graph.full
    plain = simulate(p, range(len(p))).peak
    for share, overhead in ((1.0, 0.02), (0.5, 0.3), (0.2, 0.45)):
        r = plan(p, strategy="kusumoto", budget=int(plain * share), candidates=20)
        assert r.fits and r.overhead <= overhead


def test_long_chains_are_no_trouble() -> None:
    p = paper_step(chain(2500))
    plain = simulate(p, range(len(p))).peak
    found = plan(p, strategy="kusumoto", budget=plain // 2, candidates=60, samples=3, states=30)
    assert found.fits and found.overhead < 0.3
