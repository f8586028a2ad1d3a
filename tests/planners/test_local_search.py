"""Local search's schedule keeps its peak and cost by itself: both are the judge's, whatever moves were made."""

from __future__ import annotations

import random

import pytest
from random_problems import random_problem

from recompute.passes.planners import Node, RematerialisationProblem, plan_of, profile, simulate
from recompute.passes.planners.core.chain import chain_of
from recompute.passes.planners.core.frontier import Frontier
from recompute.passes.planners.core.problem import checked_sequence
from recompute.passes.planners.core.simulate import pruned
from recompute.passes.planners.core.synthetic import residual_chain, unit_chain
from recompute.passes.planners.methods.local_search import Schedule, Search


def problem(seed: int) -> RematerialisationProblem:
    return random_problem(seed, 5 + seed % 16).in_two_passes


def state(s: Schedule) -> tuple:
    return s.peak, round(s.cost, 6), s.enter.tolist(), s.most.tolist(), s.sequence(), s.runs


def agrees(s: Schedule) -> None:
    sequence = s.sequence()
    checked_sequence(s.problem, sequence)
    outcome = simulate(s.problem, sequence)
    assert s.peak == outcome.peak
    assert s.cost == pytest.approx(outcome.cost)
    fresh = Schedule(s.problem, sequence)
    assert s.enter.tolist() == fresh.enter.tolist() and s.most.tolist() == fresh.most.tolist()


def some_move(s: Schedule, draw: random.Random) -> tuple[int, int, bool] | None:
    p = s.problem
    if draw.random() < 0.45 and (reruns := s.reruns()):
        return (*draw.choice(reruns), False)
    again = [i for i in range(len(p) - 1) if p.nodes[i].repeatable]
    if not again:
        return None
    i = draw.choice(again)
    t = draw.randrange(i + 1, len(p))
    return None if t in s.runs[i] else (i, t, True)


@pytest.mark.parametrize("seed", range(24))
def test_peak_and_cost_are_the_judges_after_any_moves(seed: int) -> None:
    """Also for reruns that nobody reads, and several at one place."""
    draw, p = random.Random(seed), problem(seed)
    s = Schedule(p, range(len(p)))
    agrees(s)
    for k in range(150):
        move = some_move(s, draw)
        if move is not None:
            (s.insert if move[2] else s.remove)(move[0], move[1])
            outcome = simulate(p, s.sequence())
            assert (s.peak, round(s.cost, 6)) == (outcome.peak, round(outcome.cost, 6)), (seed, k, move)
    agrees(s)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_undone_never_was(seed: int) -> None:
    draw, p = random.Random(seed), problem(seed + 50)
    s = Schedule(p, range(len(p)))
    for _ in range(40):
        before = state(s)
        before = (*before[:-1], [list(r) for r in before[-1]])
        made = []
        for _ in range(draw.randint(1, 6)):
            move = some_move(s, draw)
            if move is not None:
                (s.insert if move[2] else s.remove)(move[0], move[1])
                made.append(move)
        for i, t, add in reversed(made):
            (s.remove if add else s.insert)(i, t)
        assert state(s) == before
        move = some_move(s, draw)
        if move is not None:
            (s.insert if move[2] else s.remove)(move[0], move[1])


@pytest.mark.parametrize("seed", range(16))
def test_search_gives_what_fits_and_is_what_it_says(seed: int) -> None:
    p = problem(seed + 100)
    plain = simulate(p, range(len(p)))
    for share in (1.0, 0.8, 0.6):
        budget = p.fixed + int((plain.peak - p.fixed) * share)
        found = []
        for _ in range(2):
            search = Search(Schedule(p, range(len(p))), budget, seed=3)
            search.run(400, 3e-2)
            search.descend()
            agrees(search.schedule)
            found.append(search.best)
        assert found[0] == found[1], "the same seed, another schedule"
        if found[0] is not None:
            checked_sequence(p, found[0])
            outcome = simulate(p, found[0])
            assert outcome.peak <= budget
            assert outcome.cost == pytest.approx(search.best_cost)
            assert outcome.cost >= plain.cost - 1e-9
        elif share == 1.0:
            pytest.fail("the plain step fits")


@pytest.mark.parametrize("seed", range(8))
def test_the_judge_against_lifetimes_one_by_one(seed: int) -> None:
    """`profile` by its definition: from each write to the last read before the next write of the same value."""
    draw, p = random.Random(seed), problem(seed + 200)
    s = Schedule(p, range(len(p)))
    for _ in range(15):
        move = some_move(s, draw)
        if move is not None:
            (s.insert if move[2] else s.remove)(move[0], move[1])
    sequence = s.sequence()
    live = [p.nodes[i].scratch for i in sequence]
    dies: dict[tuple[int, int], int] = {}
    for v, size in enumerate(p.sizes):
        written = [-1] if v in p.inputs else [j for j, i in enumerate(sequence) if v in p.nodes[i].writes]
        for here, following in zip(written, [*written[1:], len(sequence)], strict=True):
            reads = [j for j in range(here + 1, min(following + 1, len(sequence))) if v in p.nodes[sequence[j]].reads]
            end = max([here, *reads])
            if following == len(sequence) and v in p.outputs:
                end = len(sequence)
            dies[v, end] = size
            for j in range(max(here, 0), end + 1):
                if j < len(sequence) and (here >= 0 or end >= 0):
                    live[j] += size
    for j, i in enumerate(sequence):
        node = p.nodes[i]
        for v in node.overwrites:
            if (v, j) in dies and any(p.sizes[w] == p.sizes[v] for w in node.writes):
                live[j] -= p.sizes[v]
                break
    assert profile(p, sequence) == live


@pytest.mark.parametrize("seed", range(10))
def test_the_frontier_is_the_pareto_set(seed: int) -> None:
    draw, p = random.Random(seed), problem(seed + 300)
    frontier = Frontier(p)
    offered = [(simulate(p, range(len(p))).peak, p.cost)]
    s = Schedule(p, range(len(p)))
    for _ in range(60):
        move = some_move(s, draw)
        if move is not None:
            (s.insert if move[2] else s.remove)(move[0], move[1])
        point = frontier.offer(s.sequence(), "test")
        outcome = simulate(p, pruned(p, s.sequence()))
        assert (point.peak, point.cost) == (outcome.peak, outcome.cost)
        offered.append((point.peak, point.cost))
    best = {a for a in offered if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in offered)}
    kept = [(x.peak, x.cost) for x in frontier]
    assert sorted(best) == kept
    assert [simulate(p, x.sequence).peak for x in frontier] == [x.peak for x in frontier]
    for budget in [p.fixed, *(peak + d for peak, _ in kept for d in (-1, 0, 1))]:
        fitting = [c for b, c in kept if b <= budget]
        found = frontier.best(budget)
        assert (found is None) == (not fitting)
        assert found is None or found.cost == min(fitting)


@pytest.mark.parametrize("seed", (*range(6), 1008, 1030, 1032, 1044, 1059))
def test_schedules_of_blocks_can_be_carried_out(seed: int) -> None:
    """Every schedule that the table of joined blocks gives is an execution, and less memory never costs less in it.

    Among the problems are some where a node of a stage may not run again and others before it do.
    """
    pytest.importorskip("ortools", reason="the extra 'plan' is not installed")
    from recompute.passes.planners.methods.blocks import BlockTable
    from recompute.passes.planners.methods.stage_options import options_of

    chains = {0: unit_chain(9), 1: residual_chain(5)}
    p = chains.get(seed) or random_problem(seed, 14, scale=64).in_two_passes
    chain = chain_of(p)
    options = options_of(chain)
    plain = max(profile(p, range(len(p))))
    table = BlockTable(chain, options, max(1, plain), 40)
    for stage, found in enumerate(options):
        assert found
        for o in found:
            assert o.saved == sum(p.sizes[v] for v in o.kept)
            assert {i for i in o.backward if p.nodes[i].backward} >= set(chain.interval(stage)) & {
                i for i in range(len(p)) if p.nodes[i].backward
            }
            assert o.cost >= 0 and o.forward_peak >= 0 and o.backward_peak >= 0
    costs = []
    for m in range(41):
        sequence = table.schedule(m)
        if sequence is None:
            assert not costs, "more slots, and no schedule"
            continue
        checked_sequence(p, sequence)
        checked_sequence(p, pruned(p, sequence))
        costs.append(float(table.opt[0, len(chain) - 1, m]))
        assert plan_of(pruned(p, sequence)).reruns is not None
    assert costs == sorted(costs, reverse=True)


def test_nothing_takes_the_place_of_an_output() -> None:
    """Not even the last node, nor one behind the output's last run in the last slot."""
    nodes = (Node("a", 1.0, (), (0,)), Node("b", 1.0, (0,), (1,), overwrites=(0,)))
    p = RematerialisationProblem(nodes, (64, 64), ("a", "b"), outputs=(0,))
    for sequence in ([0, 1], [0, 0, 1]):
        assert simulate(p, sequence).peak == Schedule(p, sequence).peak == 128
