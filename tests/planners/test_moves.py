"""The moves of local search: compiled or not, the same moves, and never outside of their arrays."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from guard_pages import Slot
from random_problems import random_problem

from recompute.errors import UsageError
from recompute.passes.planners import Node, RematerialisationProblem, simulate
from recompute.passes.planners.core.problem import problem_from_dict
from recompute.passes.planners.core.schedules import keep_schedule
from recompute.passes.planners.core.synthetic import residual_chain
from recompute.passes.planners.methods import flat, layout, moves, twister
from recompute.passes.planners.methods.auto import Auto
from recompute.passes.planners.methods.local_search import Schedule, Search
from recompute.runtime.cpu import planner_moves
from recompute.runtime.cpu.device import jit

needs_numba = pytest.mark.skipif(bool(jit.unavailable()), reason="moves are compiled by numba (extra `cpu`)")
BYTES = (0, 1, 7, 1 << 20, 1 << 40, (1 << 57) - 1)


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """What compiles is as before after each test."""
    before = flat._compiler
    yield
    flat.compile_with(before)


def hostile(seed: int) -> RematerialisationProblem:
    """A valid problem of a kind that no step has: reads named many times, huge and empty values, nodes without any."""
    draw = random.Random(seed)
    inputs = tuple(range(draw.randint(0, 2)))
    sizes = [draw.choice(BYTES) for _ in inputs]
    nodes = []
    for i in range(draw.choice((0, 1, 2, 5, 12, 20))):
        there = range(len(sizes))
        reads = tuple(draw.choices(there, k=draw.choice((0, 1, 1, 2, 3, 40)))) if sizes else ()
        writes = tuple(range(len(sizes), len(sizes) + draw.choice((0, 1, 1, 1, 3))))
        sizes += [draw.choice(BYTES) for _ in writes]
        over = tuple(draw.sample(reads, draw.randint(0, min(2, len(reads)))))
        cost = draw.choice((0.0, 1.0, 5e-324, 1e-310, 1e308, 3.7))
        nodes.append(Node(f"n{i}", cost, reads, writes, draw.choice(BYTES), i > 8, draw.random() < 0.8, over))
    outputs = tuple(draw.choices(range(len(sizes)), k=draw.choice((0, 1, 3)))) if sizes else ()
    while sum(sizes) >= 1 << 62:
        sizes[sizes.index(max(sizes))] = 3
    names = tuple(f"v{k}" for k in range(len(sizes)))
    return RematerialisationProblem(tuple(nodes), tuple(sizes), names, inputs, outputs, draw.choice((0, 5, 1 << 50)))


def searched(p: RematerialisationProblem, budget: int, seed: int) -> tuple:
    """All that a search leaves behind."""
    search = Search(Schedule(p, range(len(p))), budget, seed)
    search.run(300, 3e-2)
    search.descend()
    search.run(200)
    s = search.schedule
    left = s.enter.tolist(), s.most.tolist(), s.slots, s.runs, repr(s.cost), s.work
    return search.best, repr(search.best_cost), search.draw.random(), left


def budgets(p: RematerialisationProblem) -> list[int]:
    """Some that fit, some that do not, and some that are no word."""
    peak = simulate(p, range(len(p))).peak
    return [-1 << 70, 0, peak // 2, peak * 4 // 5, peak, 1 << 70]


def compiled(nodes: int) -> Callable[[flat.Arrays], flat.Run]:
    """Compiled moves for problems of any size."""
    return planner_moves._bound


@needs_numba
@pytest.mark.parametrize("seed", range(24))
def test_compiled_moves_are_the_same_moves(seed: int) -> None:
    """The same schedules, costs to the last bit, random numbers and counted work."""
    p = random_problem(seed, 5 + seed).in_two_passes if seed % 2 else hostile(seed)
    for budget in budgets(p):
        flat.compile_with(None)
        expected = searched(p, budget, seed)
        flat.compile_with(compiled)
        assert searched(p, budget, seed) == expected


@pytest.mark.parametrize("way", [None, pytest.param(compiled, marks=needs_numba)])
def test_rows_grow(monkeypatch: pytest.MonkeyPatch, way: Any) -> None:
    """Where rows lack room the search goes on with more, from the same place."""
    p = residual_chain(12).in_two_passes
    budget = int(simulate(p, range(len(p))).peak * 0.6)
    flat.compile_with(way)
    expected = searched(p, budget, 3)
    assert any(len(r) > 2 for r in expected[-1][3]), "nothing runs often enough for the test"
    grown = []
    grow = flat.Schedule.grow
    monkeypatch.setattr(flat, "_SLACK", 1)
    monkeypatch.setattr(flat.Schedule, "grow", lambda self: (grow(self), grown.append(len(self.x))))
    assert searched(p, budget, 3) == expected
    assert len(grown) > 3


def test_python_s_random_numbers() -> None:
    """Words, doubles and choices are those of `random`, across the state's renewal."""
    draw, again = random.Random(5), random.Random(5)
    search = Search(Schedule(residual_chain(3), range(len(residual_chain(3)))), 1 << 40)
    search.draw = draw
    search._set(0, 1.0, 1.0)
    x = search.schedule.x.tolist()
    for k in range(1500):
        n = 1 + k % 37
        assert twister.uniform(x) == again.random()
        assert twister.below(x, n) == again.choice(range(n))
    search.schedule.x[:] = x
    search._take()
    assert draw.getstate() == again.getstate()


def guarded(slots: list[Slot], at_end: bool) -> Callable[[flat.Arrays], flat.Run]:
    """Compiled moves on copies of the arrays between pages that nobody may touch."""

    def bind(arrays: flat.Arrays) -> flat.Run:
        copies = []
        for a, slot in zip(arrays, slots, strict=True):
            raw = (np.ctypeslib.ctypes.c_uint8 * max(a.nbytes, 1)).from_address(slot.place(a.nbytes, at_end))
            copies.append(np.frombuffer(raw, a.dtype, a.size).reshape(a.shape))
        run = planner_moves._bound(tuple(copies))  # type: ignore[arg-type]

        def both(begin: int, stop: int) -> None:
            for a, copy in zip(arrays, copies, strict=True):
                copy[...] = a
            run(begin, stop)
            for a, copy in zip(arrays, copies, strict=True):
                a[...] = copy

        return both

    return bind


@needs_numba
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a child process takes the fault")
@pytest.mark.parametrize("at_end", [True, False])
def test_no_problem_leads_out_of_the_arrays(monkeypatch: pytest.MonkeyPatch, at_end: bool) -> None:
    """In a child process that a fault would end; x, which has all indices, ends or begins at a guard page."""
    planner_moves._kernel().address(planner_moves._KINDS)
    pid = os.fork()
    if not pid:
        code = 1
        faulthandler.disable()  # the parent tells what happened
        try:
            slots = [Slot() for _ in range(4)]
            flat.compile_with(lambda nodes: guarded(slots, at_end))
            monkeypatch.setattr(flat, "_SLACK", 2)
            for seed in range(60):
                p = hostile(seed + 1000) if seed % 3 else random_problem(seed, 14).in_two_passes
                for budget in budgets(p):
                    searched(p, budget, seed)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0, "a fault (signal), or an error, in the child"


@needs_numba
def test_the_guards_would_tell() -> None:
    """An index that is outside of x ends the child of the test above."""
    pid = os.fork()
    if not pid:
        faulthandler.disable()
        slots = [Slot() for _ in range(4)]
        flat.compile_with(lambda nodes: guarded(slots, True))
        p = residual_chain(4).in_two_passes
        s = Schedule(p, range(len(p)))
        s.x[layout.SIZE] = len(s.x)
        s.insert(0, len(p) - 1)
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_what_cannot_be_is_refused_before_it_is_done() -> None:
    p = residual_chain(4).in_two_passes
    n = len(p)
    for sequence in ([1, 0], [*range(n), 0], [0, 2], [0, -1]):
        with pytest.raises(ValueError, match="cannot run after"):
            Schedule(p, sequence)
    s = Schedule(p, range(n))
    s.insert(0, 3)
    for i, t in ((0, 3), (3, 3), (4, 3), (-1, 3), (0, n), (0, -1)):
        with pytest.raises(ValueError, match="cannot run again"):
            s.insert(i, t)
    for i, t in ((0, 4), (0, 0), (n, n + 1), (-1, 3)):
        with pytest.raises(ValueError, match="does not run again"):
            s.remove(i, t)
    s.remove(0, 3)
    assert s.sequence() == list(range(n))


def test_where_nothing_may_run_again_nothing_moves() -> None:
    p = residual_chain(4).in_two_passes
    fast = dataclasses.replace(p, nodes=tuple(dataclasses.replace(n, repeatable=False) for n in p.nodes))
    search = Search(Schedule(fast, range(len(fast))), 1)
    search.run(50)
    search.descend()
    assert search.best is None and search.schedule.sequence() == list(range(len(fast)))
    empty = RematerialisationProblem((), (), ())
    search = Search(Schedule(empty, ()), 0)
    search.run(5)
    assert search.best == [] and Auto().plan(empty, budget=0).reruns == ()


def test_bytes_whose_sum_is_no_word_are_refused() -> None:
    """Each value alone would do."""
    values = [{"name": f"v{k}", "bytes": 1 << 62} for k in range(2)]
    nodes = [{"name": "a", "cost": 1, "reads": [], "writes": [0, 1]}]
    with pytest.raises(UsageError, match=r"together take 2\^63 bytes or more"):
        problem_from_dict({"values": values, "nodes": nodes})


@needs_numba
def test_compiled_moves_are_the_same_in_many_blocks_of_slots() -> None:
    """Lives that are longer than a block of slots, and slots that are the highest of their block."""
    p = residual_chain(60).in_two_passes
    assert len(p) > 2 * planner_moves._BLOCK
    budget = simulate(p, range(len(p))).peak * 6 // 10
    start = keep_schedule(p, p.saved[::3])

    def found(way: Any) -> tuple:
        flat.compile_with(way)
        search = Search(Schedule(p, start), budget, 1)
        search.descend()
        search.run(40, 3e-2)
        s = search.schedule
        return search.best, s.enter.tolist(), s.most.tolist(), s.slots, s.peak

    assert found(compiled) == found(None)


class Counted(list):
    """A list that counts how often it is read."""

    reads = 0

    def __getitem__(self, i: Any) -> Any:
        Counted.reads += 1
        return super().__getitem__(i)


def test_a_slot_of_many_reruns_takes_time_in_proportion() -> None:
    """A schedule that rebuilds everything in one slot: twice as many nodes are twice the work, not four times."""

    def reads(length: int) -> int:
        p = residual_chain(length).in_two_passes
        first = next(i for i, n in enumerate(p.nodes) if n.backward)
        again = [i for i in range(first) if p.nodes[i].repeatable]
        flat.compile_with(None)
        # what runs again in the first of two slots ends there, as it runs again in the second
        s = Schedule(p, [*range(first), *again, first, *again, *range(first + 1, len(p))])
        Counted.reads = 0
        moves.walk(Counted(s.x.tolist()), s.alive, first)
        return Counted.reads

    assert reads(32) < 2.2 * reads(16)
