"""The executor: what may be fed and fetched, and whose arrays are whose."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.compiling.compiler import compile_step
from recompute.runtime import Session

MLP = Path(__file__).parents[2] / "recompute/models/mlp.onnx"
FEED = {"x": np.linspace(-1, 1, 128, dtype=np.float32).reshape(4, 32), "label": np.zeros(4, np.int64)}


def step() -> tuple[rc.Program, Any]:
    program = rc.load(MLP, batch=4)
    loss = rc.losses.cross_entropy(program)
    rc.SGD(0.1).minimize(loss)
    return program, loss


@pytest.mark.parametrize(
    ("feed", "why"),
    [
        ({}, "inputs not fed: x: f32"),
        ([1, 2], "feed must be a dictionary"),
        ({**FEED, "X": 1}, "no input 'X'"),
        ({**FEED, "x": [[1.0, 2.0], [3.0]]}, "input 'x' is not an array"),
        ({**FEED, "x": 1.0}, r"has shape \[\]"),
        ({**FEED, "x": None}, r"has shape \[\]"),
        ({**FEED, "x": FEED["x"].astype(np.float64)}, r"feed x.astype\('float32'\)"),
        ({**FEED, "label": FEED["label"].astype(np.int32)}, r"feed x.astype\('int64'\)"),
    ],
)
def test_wrong_feeds(feed: Any, why: str) -> None:
    program, loss = step()
    with pytest.raises(rc.UsageError, match=why):
        rc.Executor().run(program, feed, [loss])


def test_wrong_fetches() -> None:
    program, _ = step()
    for fetch, why in ((["nope"], "no value 'nope' to fetch"), ([3], "fetch_list must be a name or Variable")):
        with pytest.raises(rc.UsageError, match=why):
            rc.Executor().run(program, FEED, fetch)
    with pytest.raises(rc.UsageError, match="program must be a Program"):
        rc.Executor().run("program", FEED, [])  # type: ignore[arg-type]


def test_one_value_and_aliases_can_be_fetched() -> None:
    values = []
    for fetch in (["loss"], "loss", ["cost"]):
        program, _ = step()
        program.aliases["cost"] = "loss"
        values.append(float(rc.Executor().run(program, FEED, fetch)[0]))
    assert len(set(values)) == 1


def test_any_layout_may_be_fed_and_held() -> None:
    values = []
    for strange in (False, True):
        program, loss = step()
        feed = FEED
        if strange:
            feed = {**FEED, "x": np.repeat(np.asfortranarray(FEED["x"]), 2, axis=1)[:, ::2]}
            program.data = {n: np.asarray(a, order="F") for n, a in program.data.items()}
        executor = rc.Executor()
        values.append([float(executor.run(program, feed, [loss])[0]) for _ in range(3)])
    assert values[0] == values[1]


def test_what_is_fetched_is_the_callers() -> None:
    program, _ = step()
    executor, w = rc.Executor(), program.parameters[0].name
    before, x = executor.run(program, FEED, [w, "x"])
    kept = before.copy()
    after, _ = executor.run(program, FEED, [w, "x"])
    assert np.array_equal(before, kept) and not np.array_equal(before, after)
    assert np.array_equal(x, FEED["x"]) and not np.shares_memory(x, FEED["x"])


def test_compiled_steps_do_not_share_what_they_train() -> None:
    program = rc.load(MLP, batch=4, init="he")
    loss = rc.losses.cross_entropy(program).name
    start = {n: a.copy() for n, a in program.data.items()}
    losses = []
    for checkpoints in (None, ["fc_1"]):
        compiled = compile_step(program, loss, rc.SGD(0.1), checkpoints=checkpoints)
        executor = rc.Executor()
        losses.append([float(executor.run(compiled.program, FEED, [loss])[0]) for _ in range(3)])
    assert losses[0] == losses[1]
    assert all(np.array_equal(program.data[n], a) for n, a in start.items())


def test_an_arena_that_the_machine_cannot_hold() -> None:
    """One error of ours; a machine gives up at different sizes in different ways."""
    for rows in (1 << 40, 1 << 45):
        x = rc.Value("x", rc.TensorType("f32", (rows,)))
        program = rc.Program(rc.Block("huge", inputs=(x,), outputs=("x",)))
        with pytest.raises(rc.JobError, match=rf"cannot allocate the arena of {4 * rows:,} bytes.*smaller batch") as e:
            rc.Executor().session(program)
        assert isinstance(e.value, MemoryError)


@pytest.mark.parametrize("name", ["fc_1.weight", "learning_rate", "step"])
def test_contents_that_were_taken_away_are_missed(name: str) -> None:
    program, loss = step()
    executor = rc.Executor()
    executor.run(program, FEED, [loss])
    array = program.data.pop(name)
    with pytest.raises(rc.UsageError, match=f"'{name}' .* has no contents"):
        executor.run(program, FEED, [loss])
    program.data[name] = array
    executor.run(program, FEED, [loss])


GATHER = """
program p {
  param %table: f32[64,512]
  input %at: i64[64]
  %y: f32[64,512] = Gather(%table, %at)
  output %y
}"""


def test_kernels_name_the_operator_that_fails() -> None:
    program = rc.Program(rc.parse(GATHER), {"table": np.ones((64, 512), np.float32)})
    for providers in (None, ("numpy",)):
        executor = rc.Executor(providers=providers)
        with pytest.raises(rc.JobError, match=r"Gather\(%table, %at\)"):
            executor.run(program, {"at": np.full(64, 64)}, ["y"])
        executor.run(program, {"at": np.full(64, 63)}, ["y"])


def test_kernels_that_need_another_workspace_are_chosen_again() -> None:
    """A program's text may come from a machine, or a run, with another number of threads."""
    table, feed = np.arange(64 * 512, dtype=np.float32).reshape(64, 512), {"at": np.arange(64)[::-1].copy()}
    executor = rc.Executor()
    planned = rc.show(executor.session(rc.Program(rc.parse(GATHER), {"table": table}), ["y"]).block)
    kernel = next((k for k in (" using numba", " using loops") if k in planned), None)
    if kernel is None:
        pytest.skip("no kernels here")
    larger = ' scratch(%"y#0": f32[1]) @'
    for wrong in (planned.replace(kernel, " using nowhere"), planned.replace(f"{kernel} @", f"{kernel}{larger}4096,")):
        block = rc.verify(rc.parse(wrong))
        assert wrong != planned
        with pytest.raises(rc.UsageError, match="cannot run here"):
            Session(block, {"table": table})
        for chosen in (executor, rc.Executor(providers=("numpy",))):
            (found,) = chosen.run(rc.Program(block, {"table": table}), feed, ["y"])
            np.testing.assert_array_equal(found, table[::-1])


def test_threads_tell_their_own_errors() -> None:
    """A bad index in one thread is that thread's error in every run, and nobody else's."""
    table = np.arange(64 * 512, dtype=np.float32).reshape(64, 512)
    good, bad = np.arange(64), np.full(64, 64)
    told: dict[str, list[str]] = {"good": [], "bad": []}

    def runs(which: str, executor: rc.Executor, program: rc.Program) -> None:
        for _ in range(200):
            try:
                executor.run(program, {"at": good if which == "good" else bad}, ["y"])
                told[which].append("")
            except rc.JobError as e:
                told[which].append(str(e).splitlines()[0])

    threads = []
    for which in told:
        executor, program = rc.Executor(), rc.Program(rc.parse(GATHER), {"table": table})
        executor.run(program, {"at": good}, ["y"])  # kernels are loaded before the threads begin
        threads.append(threading.Thread(target=runs, args=(which, executor, program)))
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert told["good"] == [""] * 200
    where = told["bad"][0]
    assert "index 64 is outside an axis of 64 rows" in where or "index 64 is out of range for 64 entries" in where
    assert told["bad"] == [where] * 200


def test_a_step_after_a_bad_index_is_good() -> None:
    table = np.arange(64 * 512, dtype=np.float32).reshape(64, 512)
    executor, program = rc.Executor(), rc.Program(rc.parse(GATHER), {"table": table})
    for index in (64, -65, 1 << 40):
        with pytest.raises(rc.JobError, match=rf"{index} is out"):
            executor.run(program, {"at": np.full(64, index)}, ["y"])
        (y,) = executor.run(program, {"at": np.arange(64)}, ["y"])
        np.testing.assert_array_equal(y, table)


def test_what_is_planned_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from recompute.runtime import compiled as module

    program = rc.load(rc.models.build("mlp4", batch=4))
    rc.SGD().minimize(program["loss"])
    calls: list[int] = []
    once = module.planned
    monkeypatch.setattr(module, "planned", lambda *a: calls.append(1) or once(*a))
    executor = rc.Executor()
    block = executor.planned(program, ["loss"])
    assert executor.session(program, ["loss"]).block is block and len(calls) == 1
    executor.planned(program, [program.parameters[0].name + "_grad"])
    assert len(calls) == 2
    with_more = program.block
    program.block = with_more.with_operators(with_more.operators)
    executor.planned(program, ["loss"])
    assert len(calls) == 3
