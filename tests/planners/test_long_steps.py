"""Long steps: what is looked for first, where the search ends, and what is done once however long a step is."""

from __future__ import annotations

import dataclasses
import itertools
import types
from typing import Any

import pytest

import recompute as rc
from recompute import models
from recompute.compiling.compiler import compile_step
from recompute.compiling.steps import attach_loss
from recompute.cost import device
from recompute.passes.planners.core import watch
from recompute.passes.planners.core.simulate import simulate
from recompute.passes.planners.core.synthetic import unit_chain
from recompute.passes.planners.core.watch import OutOfTime, Watch, watching
from recompute.passes.planners.fit.problem import Fitting
from recompute.passes.planners.methods import auto
from recompute.passes.planners.methods.auto import GOOD, Auto, frontier_of, quick_frontier_of
from recompute.passes.scheduling.schedule import Schedule
from recompute.passes.slicing import slicing

pytest.importorskip("ortools", reason="the planners' cuts need the extra `plan`")


def half(problem: Any) -> int:
    return simulate(problem, range(len(problem))).peak // 2


@pytest.mark.parametrize("length", [20, 520])
def test_a_long_problem_ends_with_the_first_method_that_is_good_enough(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short one is asked about by all methods."""
    asked: list[str] = []
    ask, join = auto.ask, auto.join_blocks
    monkeypatch.setattr(auto, "ask", lambda f, b, s: (asked.append(s), ask(f, b, s)))
    monkeypatch.setattr(auto, "join_blocks", lambda *a, **k: (asked.append("blocks"), join(*a, **k)))
    problem = unit_chain(length).in_two_passes
    frontier, budget = quick_frontier_of(problem), half(problem)
    Auto(moves=100).refine(frontier, budget)
    if length == 20:
        assert asked == ["blocks", "gruslys", "rotor", "kusumoto", "kusumoto-memory"]
        return
    best = frontier.best(budget)
    assert best is not None and best.cost <= (1 + GOOD) * Auto().bound(problem, budget)
    assert asked == ["gruslys", "rotor"][: len(asked)] and asked


class Clock:
    """A second passes each time that it is read."""

    def __init__(self) -> None:
        self.read = itertools.count()

    def monotonic(self) -> int:
        return next(self.read)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Planning has a plan that fits, and ten looks at the clock left."""
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    found = Watch(seconds=10)
    found.found = True
    with watching(found):
        yield clock


@pytest.mark.parametrize("strategy", ["gruslys", "rotor", "kusumoto"])
def test_time_ends_methods_in_the_middle(strategy: str, late: Clock) -> None:
    problem = unit_chain(40).in_two_passes
    frontier = auto.Frontier(problem)
    auto.ask(frontier, half(problem), strategy)
    assert watch.current().timed_out
    assert frontier.tried == 1  # the plain order alone
    assert next(late.read) < 20


def test_time_ends_blocks_and_cuts(late: Clock) -> None:
    problem = unit_chain(40).in_two_passes
    frontier = frontier_of(problem)
    assert not frontier.joined
    with watching(Watch()):
        assert frontier.tried < quick_frontier_of(unit_chain(40).in_two_passes).tried
    with pytest.raises(OutOfTime):
        watch.current().check()
    assert next(late.read) < 100


def test_without_a_plan_that_fits_time_ends_nothing() -> None:
    with watching(Watch(seconds=1e-9)):
        watch.current().check()
        assert frontier_of(unit_chain(12).in_two_passes).joined


def test_what_is_done_does_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders that are looked for, steps that are compiled and regions that are found: as many for 2 layers as for 4."""
    counts: dict[str, int] = {}

    def counted(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return inner(*args, **options)

        monkeypatch.setattr(owner, name, call)

    counted(Schedule, "reorder")
    counted(Fitting, "compiled")
    counted(slicing, "_whole_step")
    found = []
    for layers in (2, 4):
        counts.clear()
        program = rc.load(models.build("gpt2-tiny", batch=64, layers=layers, weights=False))
        loss = attach_loss(program, None)[0]
        target = rc.Target(providers=(), cost=dataclasses.replace(device("a100-80"), launch=0.0))  # slices cost little
        step = compile_step(program, loss, rc.SGD(), budget="50%", target=target)
        assert step.planned.fits and step.planned.slices
        found.append(dict(counts))
    assert found[0] == found[1]
    assert found[0]["_whole_step"] == 1


def test_what_the_bound_excludes_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    program = rc.load(models.build("mlp4", batch=4096, weights=False))
    rc.SGD().minimize(program[attach_loss(program, None)[0]])
    target = rc.Target(providers=(), cost=types.SimpleNamespace(seconds=lambda op: 1.0, name="ones"))
    fitting = Fitting(program.block, target)
    budget = int(fitting.peak_before * 0.8)
    assert fitting.bound(budget) > fitting.derived.problem.cost
    rebuilt = dataclasses.replace(fitting.once)  # as if something were rebuilt in the plain step
    fitting.__dict__["plain"] = fitting._unplanned(rebuilt, fitting.once)
    monkeypatch.setattr(Fitting, "_within", lambda *_: pytest.fail("compiled"))
    assert fitting._unrepeated_within(budget) is None
