"""The exact packer: plans below a capacity against enumeration, proofs that there is none, compiled as in Python."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import recompute as rc
from recompute.passes.memory import branching, packing_exact
from recompute.passes.memory.packing import Lifetime, first_fit, height, lower_bound, pack
from recompute.passes.memory.packing_exact import Branching, check_plan, pack_exact
from recompute.runtime.cpu import packing_search
from recompute.runtime.cpu.device import jit

#: (units, first, last moment): twelve units at most are alive at once, but no plan is so small (CP-SAT agrees)
GAP = (
    *((4, 0, 0), (5, 0, 3), (3, 0, 0), (6, 1, 2), (1, 1, 2), (4, 3, 5), (2, 3, 3)),
    *((1, 3, 4), (4, 4, 5), (3, 4, 4), (4, 5, 7), (6, 6, 7), (2, 6, 7)),
)


def full(seed: int, moments: int, capacity: int) -> list[Lifetime]:
    """Allocations that take a capacity at each moment, whether or not they fit."""
    g, left, found = np.random.default_rng(seed), np.full(moments, capacity), []
    while left.any():
        start = int(np.argmax(left > 0))
        stop = start + 1
        while stop < moments and left[stop] and stop - start < g.integers(1, 5):
            stop += 1
        size = int(min(left[start:stop].min(), g.integers(1, capacity // 2)))
        left[start:stop] -= size
        found.append(Lifetime(f"v{len(found)}", 64 * size, start, stop - 1))
    return found


def least(items: list[Lifetime]) -> int:
    """The smallest arena: first fit in all orders (in one of them it finds any plan in which nothing can move down)."""
    return min(height(items, first_fit(list(order))) for order in itertools.permutations(items))


@pytest.mark.parametrize("seed", range(4))
def test_smallest_arenas_are_those_of_all_orders(seed: int) -> None:
    items = full(seed, 4, 5)[:6]
    smallest = least(items)
    assert pack_exact(items, seconds=1)[0].keys() == {x.name for x in items}
    outcome, plan = Branching(items, 1).below(smallest)
    assert outcome == branching.FOUND and plan is not None and height(items, plan) == smallest
    check_plan(items, plan)
    assert Branching(items, 1).below(smallest - 64) == (branching.IMPOSSIBLE, None)


def test_what_is_impossible_is_proven() -> None:
    items = [Lifetime(f"v{i}", 64 * z, a, b) for i, (z, a, b) in enumerate(GAP)]
    assert lower_bound(items) == 12 * 64
    assert Branching(items, 10).below(12 * 64) == (branching.IMPOSSIBLE, None)
    plan, bound = pack_exact(items, seconds=10)
    assert height(items, plan) == bound == 13 * 64


def test_preferences_follow_what_is_left_in_a_component(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = Lifetime("bridge", 640, 0, 3)
    items = [bridge, *(Lifetime(f"{side}{z}", 64 * z, at, at + 1) for side, at in (("l", 0), ("r", 2)) for z in (1, 2))]
    monkeypatch.setattr(packing_exact, "_compiler", None)
    search = Branching(items, 1)
    search.g[branching.CAPACITY] = 13 * 64
    search.x[branching.MAJOR, :-1], search.x[branching.MINOR, :-1] = search.orders[2]  # TWA: the bridge comes first
    search._run(0, 1)
    full = search.x[branching.FULL, :-1]
    assert full.tolist() == [13 * 64] * 5
    arrays = (search.x, search.s, search.l, search.undo, search.near, search.memo, search.g)
    branching.open_level(*arrays)  # one side, without the bridge
    assert sorted(full.tolist()) == [3 * 64, 3 * 64, 13 * 64, 13 * 64, 13 * 64]
    search.g[branching.LEVEL] = 0
    branching.take_back(*arrays[:4], search.g)
    assert full.tolist() == [13 * 64] * 5


def test_of_equals_the_preferred_one_is_below(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [Lifetime("small", 64, 0, 5), Lifetime("large", 640, 1, 2), Lifetime("other", 640, 5, 5)]
    for order, below in (("WTA", "small"), ("ZTA", "large")):
        monkeypatch.setattr(packing_exact, "_ORDERS", (order,))
        plan = Branching(items, 1).below(11 * 64)[1]
        assert plan is not None and plan[below] == 0, order


@pytest.mark.slow
@pytest.mark.skipif(bool(jit.unavailable()), reason="the search is compiled by numba (extra `cpu`)")
def test_the_compiled_search_takes_the_same_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    items, found = full(3, 8, 20), []
    for compiler in (None, packing_search.compiled):
        monkeypatch.setattr(packing_exact, "_compiler", compiler)
        search = Branching(items, 100)
        search.g[branching.CAPACITY] = lower_bound(items)
        search.x[branching.MAJOR, :-1], search.x[branching.MINOR, :-1] = search.orders[0]
        search._run(0, 40)
        search._run(40, 80)
        found.append([a.tolist() for a in (search.x, search.s, search.g)])
    assert found[0] == found[1]


def test_effort_ends() -> None:
    items = full(5, 8, 20)
    search = Branching(items, 1)
    search.steps = 20
    search.below(lower_bound(items))
    assert 0 <= search.steps < 20


def test_a_plan_with_an_overlap_is_refused() -> None:
    items = [Lifetime("a", 64, 0, 1), Lifetime("b", 64, 1, 2), Lifetime("c", 64, 2, 2), Lifetime("d", 0, 0, 9)]
    check_plan(items, {"a": 0, "b": 64, "c": 0, "d": 0})
    for plan in ({"a": 0, "b": 63, "c": 200, "d": 0}, {"a": 0, "b": 64, "c": 127, "d": 0}, {"a": -64, "b": 0, "c": 64}):
        with pytest.raises(rc.JobError, match="has no place of its own"):
            check_plan(items, plan)


def test_empty_ones_have_an_address() -> None:
    items = [*full(7, 6, 12), Lifetime("none", 0, 0, 3)]
    plan, bound = pack_exact(items, seconds=0.05)
    assert plan.keys() == pack(items).keys() and bound >= lower_bound(items)
    assert pack_exact([], seconds=1) == ({}, 0)
