"""How long planning goes on: a counted effort, seconds, interrupts, and what it tells meanwhile."""

from __future__ import annotations

import gc
import json
import signal
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import recompute as rc
from recompute import models
from recompute.cli import main
from recompute.compiling.compiler import compile_step
from recompute.compiling.steps import attach_loss
from recompute.cost import device
from recompute.errors import UsageError
from recompute.passes.planners.core import watch
from recompute.passes.planners.core.simulate import simulate
from recompute.passes.planners.core.synthetic import residual_chain
from recompute.passes.planners.core.watch import Progress, Watch, interruptible
from recompute.passes.planners.fit.search import _Order
from recompute.passes.planners.fit.with_slices import Sliced
from recompute.passes.planners.methods import moccasin

pytest.importorskip("ortools", reason="the planners' cuts need the extra `plan`")

COST = device("v100-32")
NETWORK = ["mlp4", "--batch", "4096"]


@cache
def network() -> tuple[rc.Program, str, int]:
    """A small network, its loss, and a budget that takes some search."""
    program = rc.load(models.build("mlp4", batch=4096))
    loss = attach_loss(program, None)[0]
    plain = compile_step(program, loss, rc.Adam(), cost=COST).figures
    return program, loss, plain.persistent_bytes + int(0.8 * plain.arena_bytes)


def planned(**limits: Any) -> Any:
    program, loss, budget = network()
    return compile_step(program, loss, rc.Adam(), budget=budget, cost=COST, **limits)


def test_an_effort_gives_the_same_plan_and_a_larger_one_none_that_is_worse() -> None:
    first, again, more = planned(effort=1), planned(), planned(effort=1.2)
    assert first.planned.fits and more.planned.fits
    assert first.plan == again.plan
    assert more.planned.seconds <= first.planned.seconds


def test_a_small_effort_is_an_effort_too() -> None:
    assert planned(effort=0.05).planned.fits


def test_seconds_end_it() -> None:
    begun = time.monotonic()
    step = planned(seconds=0.001)
    taken, hurried = time.monotonic() - begun, step.planned
    assert hurried.fits and hurried.timed_out and not hurried.interrupted and hurried.gap is not None
    assert step.figures.peak_bytes <= hurried.budget
    assert taken < 60


def test_what_is_sure_to_fit_comes_first_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan fitted within the time: without blocks and slices, the lowest plan of the cuts is taken."""
    monkeypatch.setattr(_Order, "walk", lambda self, tries: iter(()))
    monkeypatch.setattr(_Order, "refine", lambda self, number: pytest.fail("a search"))
    monkeypatch.setattr(Sliced, "tried", lambda self, slicings: pytest.fail("slices"))
    assert planned(seconds=1e-6).planned.fits


def interrupting(when: Any) -> tuple[list[Progress], Any]:
    heard: list[Progress] = []

    def hear(p: Progress) -> None:
        heard.append(p)
        if when(p):
            raise KeyboardInterrupt

    return heard, hear


def test_an_interrupt_takes_the_best_plan_so_far() -> None:
    program, loss, budget = network()
    heard, hear = interrupting(lambda p: p.overhead is not None)
    optimizer = rc.RecomputeOptimizer(rc.Adam()).set_budget(budget, cost=COST, progress=hear)
    step = program.clone()
    with pytest.warns(rc.RecomputeWarning, match=r"planning was interrupted: using the best plan so far, [+-]"):
        optimizer.minimize(step[loss])
    assert step.planned.interrupted and step.planned.fits and step.planned.gap is not None
    assert step.planned.overhead == pytest.approx(heard[-1].overhead)
    assert step.planned.gap == pytest.approx(heard[-1].gap)
    assert step.planned.peak_bytes <= budget and step.planned.reruns


def test_an_interrupt_before_there_is_a_plan_is_raised() -> None:
    _, hear = interrupting(lambda p: True)
    with pytest.raises(KeyboardInterrupt):
        planned(progress=hear)


def test_progress_says_where_planning_stands() -> None:
    heard: list[Progress] = []
    found = planned(progress=heard.append).planned
    assert [p.seconds for p in heard] == sorted(p.seconds for p in heard)
    assert heard[0].overhead is None and "no plan that fits yet" in str(heard[0])
    assert heard[-1].overhead == pytest.approx(found.overhead) and heard[-1].plans >= 1
    assert f"best {found.overhead:+.2%} time" in str(heard[-1])


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"effort": 0}, "effort must be a number above 0"),
        ({"seconds": float("nan")}, "seconds must be a number above 0"),
        ({"effort": True}, "not True"),
        ({"effort": 2, "seconds": 2}, "give one of them"),
        ({"progress": 3}, "progress must be a function"),
    ],
)
def test_limits_that_cannot_be(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rc.RecomputeOptimizer(rc.Adam()).set_budget("60%", **limits)


def test_limits_are_for_budgets_and_efforts_for_those_that_search() -> None:
    program, loss, budget = network()
    with pytest.raises(UsageError, match="give a budget"):
        compile_step(program, loss, rc.Adam(), strategy="chen", effort=2)
    with pytest.raises(UsageError, match="strategy 'chen-sweep' takes no effort"):
        compile_step(program, loss, rc.Adam(), budget=budget, strategy="chen-sweep", effort=2)


def test_solvers_leave_interrupts_to_python() -> None:
    """CP-SAT's own handler swallowed them, and left the process without Python's."""
    chain = residual_chain(60)
    budget = simulate(chain, range(len(chain))).peak // 3
    timer = threading.Timer(0.7, signal.raise_signal, [signal.SIGINT])
    begun = time.monotonic()
    timer.start()
    gc.disable()  # an interrupt during a callback of the collector, as hypothesis has one, is lost
    with pytest.raises(KeyboardInterrupt):
        moccasin.improve(chain, budget, range(len(chain)), effort=300.0, time_limit=60.0)
    gc.enable()
    assert time.monotonic() - begun < 30
    moccasin.improve(residual_chain(2), 10**9, range(len(residual_chain(2))), effort=0.01)
    with pytest.raises(KeyboardInterrupt):  # the handler is still there
        signal.raise_signal(signal.SIGINT)


def test_what_a_solver_raises_is_raised_here() -> None:
    def fails() -> None:
        raise UsageError("no")

    with pytest.raises(UsageError, match="no"):
        interruptible(fails, lambda: None)


def test_a_watch_counts() -> None:
    counted = Watch(effort=0.5, work=4.0)
    counted.spend(3.0)
    assert not counted.over  # there is no plan yet
    counted.found = True
    assert counted.over and not counted.timed_out
    more = Watch(effort=3.0, work=4.0)
    more.found = True
    more.spend(1.0)
    more.allow_more()
    assert not more.over
    more.spend(2.0)
    assert more.over
    assert watch.current().work == 0.0


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, budget = network()
    options = [*NETWORK, "--device", "v100-32"]
    report = tmp_path / "r.json"
    wanted = [*options, "--memory-budget", str(budget), "--json", str(report)]
    assert main([*wanted, "--seconds", "0.001"]) == 0
    found = json.loads(report.read_text())["planned"]
    assert found["timed_out"] and not found["interrupted"] and found["fits"]
    assert "reached its time limit" in capsys.readouterr().out
    usual = Watch.best

    def interrupted(self: Watch, best: Any) -> None:
        usual(self, best)
        if best is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(Watch, "best", interrupted)
    assert main([*wanted, "--effort", "2"]) == 0
    found = json.loads(report.read_text())
    assert found["planned"]["interrupted"] and found["planned"]["fits"]
    assert any("planning was interrupted" in note for note in found["notes"])
    monkeypatch.setattr(Watch, "best", lambda self, best: signal.raise_signal(signal.SIGINT))
    monkeypatch.setattr(Watch, "take_interrupt", lambda self, found: False)
    assert main(wanted) == 130
    monkeypatch.undo()
    for wrong, message in (
        (["--effort", "2"], "--effort needs --memory-budget SIZE"),
        (["--memory-budget", "60%", "--effort", "-1"], "above 0"),
        (["--memory-budget", "60%", "--seconds", "1", "--checkpoints", "logits"], "leave out --checkpoints"),
    ):
        assert main([*options, *wrong]) == 2
        assert message in capsys.readouterr().err


def test_max_batch_takes_limits() -> None:
    found = rc.max_batch("mlp", "100KB", effort=2)
    assert found.batch >= rc.max_batch("mlp", "100KB").batch
    with pytest.raises(UsageError, match="give one of them"):
        rc.max_batch("mlp", "100KB", effort=2, seconds=1)
