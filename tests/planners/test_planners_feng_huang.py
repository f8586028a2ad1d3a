"""Feng & Huang's planner: its division tree, its sums against brute force, its plans."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from test_planners_lower_sets import chain, network, paper_step

from recompute.passes.planners import Node, RematerialisationProblem, plan, sequence_of, simulate
from recompute.passes.planners.core.problem import checked_sequence
from recompute.passes.planners.core.simulate import pruned
from recompute.passes.planners.published.division_tree import Graph, Piece, division_tree, splitting_vertices
from recompute.passes.planners.published.feng_huang import kept_vertices, largest_segments


def random_graph(seed: int, n: int) -> Graph:
    draw = random.Random(seed)
    preds: list[list[int]] = [[]]
    for k in range(1, n):
        preds.append(sorted({draw.randrange(max(0, k - 4), k) for _ in range(draw.choice((1, 1, 1, 2)))}))
    return Graph.of(preds, [draw.randint(1, 9) for _ in preds])


def paths(graph: Graph) -> list[list[int]]:
    """All ways from source to target."""
    found, stack = [], [[0]]
    while stack:
        way = stack.pop()
        if way[-1] == len(graph.weight) - 1:
            found.append(way)
        stack += [[*way, s] for s in graph.succs[way[-1]]]
    return found


def best(graph: Graph) -> tuple[float, set[int]]:
    """The least sum of kept bytes and largest segment, and what is kept."""
    root = division_tree(graph)
    sums = []
    for mu in largest_segments(graph, root, 10**6):
        kept = kept_vertices(graph, root, mu)
        assert largest(graph, kept) <= mu
        sums.append((sum(graph.weight[v] for v in kept) + mu, sorted(kept)))
    value, kept_list = min(sums)
    return value, set(kept_list)


def largest(graph: Graph, kept: set[int]) -> float:
    """Bytes of the largest part that is connected when kept vertices are taken away."""
    left = set(range(1, len(graph.weight) - 1)) - kept
    most = 0.0
    while left:
        stack = [left.pop()]
        held = 0.0
        while stack:
            v = stack.pop()
            held += graph.weight[v]
            near = left.intersection((*graph.succs[v], *graph.preds[v]))
            left -= near
            stack += near
        most = max(most, held)
    return most


def pieces(root: Piece) -> list[Piece]:
    found, stack = [], [root]
    while stack:
        found.append(stack.pop())
        stack += found[-1].children
    return found


# -- the tree ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_splitting_vertices_are_on_all_paths(seed: int) -> None:
    graph = random_graph(seed, 10)
    common = set.intersection(*map(set, paths(graph)))
    assert splitting_vertices(graph, graph.whole()) == sorted(common - {0, len(graph.weight) - 1})


@pytest.mark.parametrize("seed", range(30))
def test_each_vertex_is_an_end_of_one_piece(seed: int) -> None:
    """And what is inside a piece touches only that and its ends."""
    graph = random_graph(seed, 14)
    found = pieces(division_tree(graph))
    ends = sorted(v for p in found for v in p.ends)
    assert ends == list(range(1, len(graph.weight) - 1))
    for p in found:
        allowed = {p.source, p.target, *p.inside}
        for v in p.inside:
            assert allowed.issuperset((*graph.succs[v], *graph.preds[v]))
        assert p.weight == sum(graph.weight[v] for v in p.inside)


def test_kinds_of_pieces() -> None:
    """One vertex, two branches of two, one vertex; then a graph with crossing branches, one of them longer."""
    root = division_tree(Graph.of([[], [0], [1], [0], [3], [2, 4]], [1] * 6))
    assert root.kind == "linear" and root.ends == [1, 6]
    branches = root.children[1]
    assert branches.kind == "branch" and [c.inside for c in branches.children] == [[2, 3], [4, 5]]
    assert [c.kind for c in branches.children] == ["linear", "linear"]

    crossing = Graph.of([[], [0], [0], [1, 2], [1], [4], [5, 2], [3, 6]], [1] * 8)
    middle = division_tree(crossing).children[1]
    assert middle.kind == "closed"
    assert [(c.source, c.target, c.inside) for c in middle.children] == [(2, 7, [5, 6])]
    assert middle.ends == [2, 3, 4, 7]


def test_branches_between_inner_ends_are_one_closed_set() -> None:
    preds = [[], [0], [0], [1], [1], [3, 4, 2], [2, 5], [1, 6], [6, 7]]
    found = [p for p in pieces(division_tree(Graph.of(preds, [1] * 9))) if p.kind == "branch"]
    assert [(p.source, p.target, p.inside) for p in found] == [(2, 6, [4, 5])]


# -- sums --------------------------------------------------------------------------------------------------------------


def test_hand_worked_chain() -> None:
    """Eight equal vertices: two kept leave three segments of two, and 2 + 2 is the least there is."""
    value, kept = best(Graph.of(chain(8), [1] * 8))
    assert value == 4 and len(kept) == 2
    # 10 in the middle of ones: keep two light ones around it, or just one
    assert best(Graph.of(chain(5), [1, 1, 10, 1, 1])) == (12.0, {2, 4})


def brute_force(weight: Sequence[int]) -> int:
    n = len(weight)
    found = []
    for count in range(n + 1):
        for kept in combinations(range(n), count):
            marks = [-1, *kept, n]
            segments = [sum(weight[a + 1 : b]) for a, b in pairwise(marks)]
            found.append(sum(weight[k] for k in kept) + max(segments))
    return min(found)


@pytest.mark.parametrize("seed", range(12))
def test_linear_graphs_have_the_optimum(seed: int) -> None:
    draw = random.Random(seed)
    weight = [draw.randint(1, 20) for _ in range(11)]
    assert best(Graph.of(chain(11), weight))[0] == brute_force(weight)


def test_parallel_branches() -> None:
    """Three branches of four between two light vertices: keep these, and each branch is a segment."""
    preds = [[], *[[0], [1], [2], [3]], *[[0], [5], [6], [7]], *[[0], [9], [10], [11]], [4, 8, 12]]
    value, kept = best(Graph.of(preds, [1, *[3] * 12, 1]))
    # kept 1 + 1 + a third-or-so of each branch and a segment of 6, or nothing of the branches and a segment of 12
    assert value == 14.0 and kept == {1, 14}


def test_a_skip_keeps_its_two_ends() -> None:
    """A chain of six with an edge from the first to the last: both lie on all paths, the edge holds nothing.

    Dropped, the two would be one segment with all in between but what is kept there, 16 and more.
    """
    preds = [[], [0], [1], [2], [3], [0, 4]]
    graph = Graph.of(preds, [1, 5, 5, 5, 5, 1])
    value, kept = best(graph)
    root = division_tree(graph)
    assert root.ends == [1, 6] and root.children[1].kind == "linear"
    assert value == min(0 + 22, 1 + 21, 2 + 20, 2 + 5 + 10, 2 + 10 + 5) and kept >= {1, 6}


@pytest.mark.parametrize("seed", range(12))
def test_never_below_the_best_of_all_subsets(seed: int) -> None:
    graph = random_graph(seed, 9)
    vertices = range(1, 10)
    least = min(
        sum(graph.weight[v] for v in kept) + largest(graph, set(kept))
        for count in range(10)
        for kept in combinations(vertices, count)
    )
    assert least <= best(graph)[0] <= sum(graph.weight)


# -- plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet50", "googlenet", "densenet121", "unet", "bert-tiny"])
def test_plans_of_networks(name: str) -> None:
    p = network(name, 16)
    plain = simulate(p, range(len(p)))
    least = plan(p, strategy="feng-huang")
    assert least.outcome.peak < plain.peak
    found = plan(p, strategy="feng-huang", budget=(least.outcome.peak + plain.peak) // 2, candidates=200)
    for r in (least, found):
        sequence = sequence_of(p, r.plan)
        checked_sequence(p, sequence)
        assert pruned(p, sequence) == sequence
    assert found.fits and found.outcome.cost <= least.outcome.cost


def test_a_budget_of_the_plain_peak_costs_nothing() -> None:
    p = network("googlenet", 16)
    assert plan(p, strategy="feng-huang", budget=simulate(p, range(len(p))).peak).overhead == 0.0


def test_a_mask_at_the_start_connects_nothing() -> None:
    """Every layer reads a small mask: it is kept, and the layers are a chain as without it."""
    preds = [[], [0], *[[k, 1] for k in range(1, 31)]]
    p = paper_step(preds, [1, 1, *[1000] * 30])
    masked = plan(p, strategy="feng-huang", negligible=0.01)
    alone = plan(paper_step(chain(30), [1000] * 30), strategy="feng-huang")
    assert len(masked.plan.checkpoints) - 2 == len(alone.plan.checkpoints)


def test_long_chains_and_deep_trees_are_no_trouble() -> None:
    draw = random.Random(1)
    n = 3000
    p = paper_step(chain(n), [draw.randint(1, 99) for _ in range(n)])
    plain = simulate(p, range(len(p))).peak
    found = plan(p, strategy="feng-huang", budget=plain // 2, candidates=40)
    assert found.fits
    nested = [[k - 1] if k else [] for k in range(1200)]
    for k in range(600, 1200):
        nested[k].append(1199 - k)
    graph = Graph.of(nested, [1] * 1200)
    assert len(kept_vertices(graph, division_tree(graph), 0.0)) == 1200


def test_values_that_may_not_be_made_again_are_kept() -> None:
    nodes = (
        Node("a", 1.0, (), (0,)),
        Node("b", 1.0, (0,), (1,), repeatable=False),
        Node("c", 1.0, (1,), (2,)),
        Node("g", 1.0, (0, 1, 2), (3,), backward=True, repeatable=False),
    )
    p = RematerialisationProblem(nodes, (64, 64, 64, 8), ("a", "b", "c", "g"))
    assert "b" in plan(p, strategy="feng-huang").plan.checkpoints
