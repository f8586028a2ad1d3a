"""Planners that ask a solver, against the best of all sequences of tiny problems, found by brute force."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator

import pytest

from recompute.errors import UsageError
from recompute.passes.planners import Node, Planned, RematerialisationProblem, plan, plan_of, sequence_of, simulate
from recompute.passes.planners.core.problem import checked_sequence
from recompute.passes.planners.core.simulate import pruned

pytest.importorskip("ortools", reason="the extra 'plan' is not installed")

from recompute.passes.planners.methods.min_cut import saved_within
from recompute.passes.planners.methods.retention_intervals import improve


def tiny(seed: int) -> RematerialisationProblem:
    """A small step: a forward part with a skip or two, a backward part that reads it, all that a problem may have."""
    draw = random.Random(seed)
    forward, backward = draw.randint(3, 4), draw.randint(2, 4)
    sizes, nodes = [draw.randint(1, 4)], []
    made: list[int] = [0]
    for i in range(forward + backward):
        late = i >= forward
        reads = {made[-1], draw.choice(made), *([draw.choice(made)] if late else ())}
        size = draw.randint(1, 9)
        writes = list(range(len(sizes), len(sizes) + 1 + (draw.random() < 0.2)))
        sizes += [size, *[draw.randint(1, 5)] * (len(writes) - 1)]
        over = tuple(v for v in reads if sizes[v] == size and draw.random() < 0.7)
        scratch = draw.choice((0, 0, 3))
        nodes.append(
            Node(f"n{i}", draw.randint(1, 9), tuple(sorted(reads)), tuple(writes), scratch, late, not late, over)
        )
        made += writes
    outputs = (made[-1],) if draw.random() < 0.5 else ()
    return RematerialisationProblem(
        tuple(nodes), tuple(sizes), tuple(f"v{v}" for v in range(len(sizes))), (0,), outputs, fixed=100
    )


def moves(
    p: RematerialisationProblem, done: int, alive: frozenset[int], last: int, room: int, staged: bool
) -> Iterator[tuple[float, tuple[int, frozenset[int], int]]]:
    """(cost, state) after one more run; a state is how many ran once, what is alive, the stage's last."""
    for i in range(min(done + 1, len(p))):
        node = p.nodes[i]
        if not alive.issuperset(node.reads) or (i < done and (not node.repeatable or (staged and i <= last))):
            continue
        stays = alive - set(node.writes)
        running = sum(p.sizes[v] for v in stays) + sum(p.sizes[v] for v in node.writes) + node.scratch
        after = (done + 1, -1) if i == done else (done, i)
        if running <= room:
            yield node.cost, (after[0], stays | set(node.writes), after[1])
        for v in node.overwrites:
            lends = v not in p.outputs and any(p.sizes[v] == p.sizes[w] for w in node.writes)
            if lends and running - p.sizes[v] <= room:
                yield node.cost, (after[0], (stays - {v}) | set(node.writes), after[1])


def best(p: RematerialisationProblem, budget: int, *, staged: bool = False) -> float | None:
    """The least cost of any sequence within the budget; None where there is none (shortest path over states)."""
    start = (0, frozenset(p.inputs), -1)
    queue: list[tuple[float, int, tuple[int, frozenset[int], int]]] = [(0.0, 0, start)]
    seen, number = set(), itertools.count(1)
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state in seen:
            continue
        seen.add(state)
        done, alive, last = state
        if done == len(p) and alive.issuperset(p.outputs):
            return cost
        for v in alive:
            heapq.heappush(queue, (cost, next(number), (done, alive - {v}, last)))
        if done < len(p):
            for extra, new in moves(p, done, alive, last, budget - p.fixed, staged):
                heapq.heappush(queue, (cost + extra, next(number), new))
    return None


def chain(sizes: tuple[int, ...], costs: tuple[float, ...]) -> RematerialisationProblem:
    """Forward nodes in a row, backward nodes that read the gradient so far and the forward node's input and output."""
    n = len(sizes)
    nodes = [Node(f"f{i}", costs[i], (i - 1,) if i else (), (i,)) for i in range(n)]
    for k, i in enumerate(reversed(range(n))):
        reads = {n + k - 1, i, i - 1} - {-1} if k else {i, i - 1} - {-1}
        nodes.append(Node(f"b{i}", 2 * costs[i], tuple(sorted(reads)), (n + k,), 0, True, False))
    both = sizes + sizes[::-1]
    return RematerialisationProblem(tuple(nodes), both, tuple(f"v{v}" for v in range(2 * n)))


def judged(p: RematerialisationProblem, found: Planned) -> None:
    """A plan that can run, in which nothing runs again for nobody."""
    sequence = sequence_of(p, found.plan)
    checked_sequence(p, sequence)
    assert pruned(p, sequence) == sequence


@pytest.mark.parametrize("seed", range(12))
def test_solvers_find_the_best_of_tiny_problems(seed: int) -> None:
    p = tiny(seed)
    plain = simulate(p, range(len(p)))
    for budget in range(plain.peak - 1, plain.peak - 9, -2):
        exact = best(p, budget, staged=True)
        anything = best(p, budget)
        for strategy, options in (("checkmate", {}), ("moccasin", {"copies": 5}), ("checkmate-lp", {})):
            found = plan(p, budget=budget, strategy=strategy, **options)
            judged(p, found)
            if exact is None:
                assert anything is not None or not found.fits
            elif strategy != "checkmate-lp":
                assert found.fits and found.outcome.cost == pytest.approx(exact)
            if exact is not None and found.fits:
                assert found.outcome.cost >= exact - 1e-6
            if found.bound is not None and exact is not None:
                assert found.bound <= exact + 1e-4


def test_chain_like_vgg() -> None:
    """Big values first: the same optimum from both solvers, proven by each."""
    p = chain((64, 64, 16, 32, 32, 8, 16, 16, 4, 2), (3, 8, 1, 5, 9, 1, 6, 10, 1, 4))
    plain = simulate(p, range(len(p)))
    for share in (0.9, 0.8):
        budget = int(share * plain.peak)
        milp = plan(p, budget=budget, strategy="checkmate")
        assert milp.fits and milp.bound == pytest.approx(milp.outcome.cost, rel=1e-5)
        sequence, bound, proven = improve(p, budget, range(len(p)))
        assert proven and bound == milp.outcome.cost == simulate(p, sequence).cost
        for strategy in ("checkmate-lp", "min-cut"):
            other = plan(p, budget=budget, strategy=strategy)
            judged(p, other)
            assert not other.fits or other.outcome.cost >= milp.outcome.cost
        relaxed = plan(p, budget=budget, strategy="checkmate-lp").bound
        assert relaxed is not None and plain.cost <= relaxed + 1e-6 and relaxed <= milp.outcome.cost + 1e-6


def test_improve_is_deterministic_and_leaves_what_is_not_free() -> None:
    p = chain((8,) * 12, (1.5,) * 12)
    plain = simulate(p, range(len(p)))
    budget = int(0.7 * plain.peak)
    first = improve(p, budget, range(len(p)))
    assert first == improve(p, budget, range(len(p)))
    assert simulate(p, first[0]).peak <= budget
    again = pruned(p, [*range(12), *range(4), *range(12, 24)])  # nothing reads it before the last backward nodes
    free = set(range(4))
    sequence, bound, proven = improve(p, budget, again, free=free)
    assert bound is None and proven
    assert all(r.operator in free for r in plan_of(sequence).reruns)
    assert improve(p, plain.peak, range(len(p)))[0] == list(range(len(p)))


def test_scip_takes_a_warm_start() -> None:
    p = chain((8, 4, 8, 4, 8), (1, 2, 1, 2, 1))
    budget = int(0.8 * simulate(p, range(len(p))).peak)
    one = plan(p, budget=budget, strategy="checkmate")
    two = plan(p, budget=budget, strategy="checkmate", solver="scip", warm_start=one.plan)
    assert one.outcome.cost == two.outcome.cost


def test_without_a_budget_nothing_runs_again() -> None:
    for strategy in ("checkmate", "checkmate-lp", "moccasin"):
        found = plan(chain((8, 4, 8), (1, 2, 1)), strategy=strategy)
        assert found.plan.reruns == () and found.overhead == 0


def test_a_solver_without_time_leaves_a_plan_of_others_and_its_bound() -> None:
    """Far too little time for a plan of 40 nodes: what others find is judged, and a bound is one all the same."""
    p = chain((8, 3) * 10, (1, 2) * 10)
    budget = int(0.7 * simulate(p, range(len(p))).peak)
    found = plan(p, budget=budget, strategy="checkmate", time_limit=0.01)
    judged(p, found)
    assert found.fits and (found.bound is None or found.bound <= found.outcome.cost)


def test_min_cut_saves_no_more_than_its_fraction() -> None:
    p = chain((64, 64, 16, 32, 32, 8, 16, 16, 4, 2), (3, 8, 1, 5, 9, 1, 6, 10, 1, 4))
    whole = sum(p.sizes[v] for v in p.saved)
    saved = [sum(p.sizes[v] for v in saved_within(p, f)) for f in (1.0, 0.8, 0.5, 0.2, 0.0)]
    assert saved == sorted(saved, reverse=True) and saved[0] == whole
    assert all(s <= f * whole for s, f in zip(saved, (1.0, 0.8, 0.5, 0.2, 0.0), strict=True))
    assert plan(p, strategy="min-cut", fraction=1.0).plan.reruns == ()
    assert set(saved_within(p, 0.8)) >= {1, 4, 7}  # what is dear to compute stays


def test_smallest_cut_is_worked_by_hand() -> None:
    """input(4) → a(10) → b(1) → c(10) → loss; the backward pass reads a and c: b alone need be saved, or the input."""
    nodes = (
        Node("a", 5.0, (0,), (1,)),
        Node("b", 5.0, (1,), (2,)),
        Node("c", 1.0, (2,), (3,)),
        Node("c'", 1.0, (3,), (4,), backward=True, repeatable=False),
        Node("a'", 1.0, (1, 4), (5,), backward=True, repeatable=False),
    )
    p = RematerialisationProblem(nodes, (4, 10, 1, 10, 1, 1), tuple("iabcde"), inputs=(0,))
    assert saved_within(p, 1.0) == [1, 3]
    assert saved_within(p, 0.6) == [1, 2]  # a is kept from running again, c follows from b
    assert saved_within(p, 0.2) == [0]  # all follows from the input


@pytest.mark.parametrize(
    "strategy, options, message",
    [
        ("checkmate", {"largest": 3}, "takes up to 3 nodes, problem has 10: choose another strategy"),
        ("checkmate", {"solver": "gurobi"}, "must be highs or scip, not 'gurobi'"),
        ("moccasin", {"largest": 3}, "takes up to 3 nodes"),
        ("moccasin", {"copies": 0}, "copies must be 1 or more"),
        ("min-cut", {"fraction": 2}, "fraction must lie between 0 and 1"),
    ],
)
def test_options_that_make_no_sense(strategy: str, options: dict[str, object], message: str) -> None:
    p = chain((8,) * 5, (1.0,) * 5)
    with pytest.raises(UsageError, match=message):
        plan(p, budget=60, strategy=strategy, **options)
