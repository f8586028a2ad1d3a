"""Parameters and optimizer state in host memory or on disk: the language, the windows, the numbers, the planner."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from checking import run_checked

import recompute as rc
from recompute import parse, show, verify
from recompute.data.batches import synthetic_batch
from recompute.errors import BudgetError, JobError, UsageError, VerifyError
from recompute.language.ir import Block, Value
from recompute.language.types import TensorType
from recompute.ops.memory.offload import Prefetch
from recompute.passes import Liveness, MemoryPlan, Offload, memory_report, offloaded, run_passes
from recompute.passes.offloading.offload import without_copies
from recompute.passes.offloading.transfers import Link, simulate
from recompute.passes.offloading.windows import storable
from recompute.passes.sequence import planned
from recompute.proof.prove import prove
from recompute.runtime.cpu import disk as disks
from recompute.runtime.cpu.session import Session
from recompute.support.memory import is_stored
from recompute.training.averages import applied

NETWORKS: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "mlp": ({}, lambda: rc.AdamW(1e-2)),
    "lenet": ({}, lambda: rc.Momentum(1e-2)),
    "resnet18": ({"image": 32, "classes": 10, "width": 8}, lambda: rc.EMA(rc.SGD(1e-2), 0.9)),
    "bert-tiny": ({"seq": 16, "vocab": 100}, lambda: rc.Adam(1e-3, moments="8-bit")),
    "gpt2-tiny": ({"seq": 16, "vocab": 100}, lambda: rc.Lamb(1e-3)),
}
#: seconds of an operator, and a link that takes as long for 1 KiB
SECONDS, SLOW = (lambda op: 1e-3), Link(1e6, 1e6, 0.0)


def made(name: str, **options: Any) -> tuple[Any, str]:
    """A compiled training step, and its loss."""
    sizes, optimizer = NETWORKS[name]
    program = rc.load(rc.models.build(name, **sizes), batch=4)
    kind, _ = rc.losses.natural_loss(program)
    loss = kind if kind in program else getattr(rc.losses, kind)(program).name
    loss = rc.stop_on_nan(program[loss]).name
    return rc.compile_step(program, loss, optimizer(), **options), loss


def feed_of(step: Any, name: str) -> dict[str, np.ndarray]:
    """Inputs of a step."""
    return synthetic_batch(step.program, 0, {s.name: s for s in rc.models.info(name, **NETWORKS[name][0]).inputs})


def trained(
    step: Any, loss: str, name: str, executor: rc.Executor, steps: int = 3
) -> tuple[list[bytes], dict[str, bytes]]:
    """Losses of some steps, and everything that persists, as bytes."""
    feed = feed_of(step, name)
    losses = [executor.run(step.program, feed, [loss])[0].tobytes() for _ in range(steps)]
    return losses, {n: np.array(step.program.data[n]).tobytes() for n in step.program.data}


# -- the language -----------------------------------------------------------------------------------------------------

FAR = """\
program far {
  input %x: f32[16]
  param %w: host f32[16]
  state %rate: f32[]
  communicate %p: f32[16] = Prefetch(%w)
  communicate %a: f32[16] = CopyWait(%p, %w)
  %g: f32[16] = Mul(%x, %a)
  optimize %b: f32[16] = SGDUpdate(%a, %g, %rate)
  communicate %w: host f32[16] = Store(%w, %b)
  %loss: f32[] = ReduceSum(%g) {keepdims=0}
  communicate %w: host f32[16] = StoreWait(%w, %b)
  output %loss
}
"""


def far(*changes: tuple[str, str]) -> Block:
    text = FAR
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse(text)


def test_a_parameter_in_host_memory() -> None:
    block = verify(far())
    assert parse(show(block)) == block and offloaded(block) == ("w",)
    plan = verify(run_passes(block, [Liveness(), MemoryPlan()]))
    assert plan.addresses["b"] == plan.addresses["a"] == plan.addresses["p"]
    assert memory_report(plan).stored == 64 and memory_report(plan).persistent == 4
    w = np.arange(16, dtype=np.float32)
    session = Session(plan, {"w": w, "rate": np.array(0.5, np.float32)})
    session.feed("x", np.ones(16, np.float32))
    run_checked(session)
    assert np.array_equal(w, np.arange(16) / 2) and session.measured_host_bytes == 64


STORE, WAIT = "  communicate %w: host f32[16] = Store(%w, %b)\n", "  communicate %w: host f32[16] = StoreWait(%w, %b)\n"
FAULTS = {
    "an update that is lost": (((STORE, ""), (WAIT, "")), "no Store copies it"),
    "no wait": (((WAIT, ""),), "no CopyWait follows the copy to %w"),
    "another value is stored": (((STORE, STORE.replace("%b)", "%g)")),), "%g is not an update"),
    "stored twice": (((WAIT, WAIT + STORE + WAIT),), "is not an update"),
    "read after its update": (((WAIT, "  %late: f32[16] = Neg(%a)\n" + WAIT),), "%a is read after it was updated"),
    "fetched after its update": (((WAIT, WAIT + "  communicate %q: f32[16] = Prefetch(%w)\n"),), "%w is read while"),
    "fetched between its update and the Store": (
        ((STORE, "  communicate %q: f32[16] = Prefetch(%w)\n" + STORE),),
        "%w is read while",
    ),
    "stored while it is fetched": (
        (
            ("  %g:", "  communicate %q: f32[16] = Prefetch(%w)\n  %g:"),
            (WAIT, WAIT + "  communicate %r: f32[16] = CopyWait(%q, %w)\n"),
        ),
        "%w is stored while a copy reads it",
    ),
    "a constant": ((("  state", "  const %c: host f32[2] = [1, 2]\n  state"),), "is declared in host memory"),
    "read where it is": ((("Mul(%x, %a)", "Mul(%x, %w)"),), "%w is in host memory|does not accept|declared"),
    "a wait of another kind": (
        ((WAIT, "  communicate %z: host f32[16] = CopyWait(%w, %b)\n"),),
        "a StoreWait awaits it",
    ),
    "a value of the step": (
        (("param %w: host f32[16]", "param %w: host f32[16]\n  param %v: f32[16]"), ("Prefetch(%w)", "Offload(%v)")),
        "declared f32|%v is persistent",
    ),
    "an input": ((("input %x: f32[16]", "input %x: host f32[16]"),), "is declared in host memory"),
    "updated elsewhere": ((("optimize %b: f32[16]", "optimize %p: f32[16]"), ("%b)", "%p)")), "%p is written twice"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    changes, why = FAULTS[fault]
    with pytest.raises(VerifyError, match=why):
        verify(far(*changes))


def test_an_update_stays_in_its_buffer() -> None:
    plan = run_passes(far(), [Liveness(), MemoryPlan()])
    other = dataclasses.replace(plan, addresses={**plan.addresses, "b": 1 << 20})
    with pytest.raises(VerifyError, match="%b is not where %a is, which it updates"):
        verify(other)


# -- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_steps_train_the_same(name: str, tmp_path: Path) -> None:
    """In memory, in a second arena and on disk, with values of the step there too; nothing is read too early."""
    step, loss = made(name)
    plain = trained(step, loss, name, rc.Executor())
    block = step.program.logical
    names = (*storable(block), *list(block.values())[::3])
    for place in (rc.CPUPlace(), rc.CPUPlace(tmp_path)):
        other, _ = made(name)
        tight = Offload(names, tight=True).run(other.program.logical)
        assert without_copies(tight) == other.program.logical
        target = dataclasses.replace(other.program.compiled.target, place=place)
        other.program.block, other.program.compiled = verify(planned(tight, target)), None
        assert set(storable(block)) <= set(offloaded(other.program.block))
        executor = rc.Executor(place)
        assert trained(other, loss, name, executor) == plain
        report = memory_report(other.program.block)
        session = executor.session(other.program, [loss])
        assert session.measured_host_bytes == report.stored + report.host
        assert session.measured_peak_bytes == report.peak
        if place == rc.CPUPlace():
            for n, array in feed_of(other, name).items():
                session.feed(n, array)
            run_checked(session)


def test_copies_use_the_room_that_there_is() -> None:
    """More room: fewer bytes are copied, and the step waits less; never more bytes than the room."""
    block = made("mlp")[0].program.logical
    names, found = tuple(storable(block)), []
    tight = verify(run_passes(Offload(names, tight=True).run(block), [Liveness(), MemoryPlan()]))
    for limit in (0, 40_000, 60_000, 1 << 20):
        moved = Offload(names, limit, seconds=SECONDS, link=SLOW).run(block)
        plan = verify(run_passes(moved, [Liveness(), MemoryPlan()]))
        assert memory_report(plan).live_peak <= max(memory_report(tight).arena, limit)
        times = simulate(moved, SECONDS, SLOW)
        found.append((sum(t.nbytes for t in times.transfers), times.stalls))
    assert found == sorted(found, reverse=True) and found[-1] < found[0]
    assert found[-1][0] == 2 * sum(v.nbytes for v in storable(block).values() if v.name != "learning_rate") + 4


# -- the planner ------------------------------------------------------------------------------------------------------

SHARE = {"gpt2-tiny": 0.75, "resnet18": 0.8}


@pytest.mark.parametrize("name", SHARE)
def test_budgets_below_the_state(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"gpt2-tiny": {"seq": 16, "vocab": 2000}, "resnet18": {"image": 32, "classes": 10}}[name]
    monkeypatch.setitem(NETWORKS, name, (sizes, lambda: rc.AdamW(1e-3)))
    plain, loss = made(name)
    budget = int(plain.figures.persistent_bytes * SHARE[name])
    with pytest.raises(BudgetError, match="Every plan holds"):
        made(name, budget=budget)
    step, _ = made(name, budget=budget, slicing=False, place=f"cpu:{tmp_path}", prove=True)
    assert step.figures.peak_bytes <= budget and step.figures.host_bytes > 0
    executor = rc.Executor()  # the step knows its disk
    assert trained(step, loss, name, executor, 2) == trained(plain, loss, name, rc.Executor(), 2)
    session = executor.session(step.program, [loss])
    assert session.measured_peak_bytes == step.figures.peak_bytes
    assert session.measured_host_bytes == step.figures.host_bytes
    assert session.disk is not None and session.disk.read > 0 < session.disk.written
    with pytest.raises(BudgetError, match="though all parameters and optimizer state may be on disk"):
        made(name, budget=budget // 20, place=f"cpu:{tmp_path}")


OTHERS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "slices": (lambda o: rc.RecomputeOptimizer(o).set_slices(["all:0:2"]), {}),
    "gradient merge": (lambda o: rc.GradientMergeOptimizer(o, 2), {}),
    "bfloat16": (lambda o: o, {"precision": "bf16"}),
    "loss scaling": (lambda o: o, {"precision": "fp16"}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_with_others(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped, options = OTHERS[other]
    monkeypatch.setitem(NETWORKS, "gpt2-tiny", ({"seq": 32, "vocab": 2000}, lambda: wrapped(rc.AdamW(1e-3))))
    plain, loss = made("gpt2-tiny", **options)
    budget = plain.figures.persistent_bytes * 3 // 4
    step, _ = made("gpt2-tiny", budget=budget, slicing=False, place=f"cpu:{tmp_path}", **options)
    assert step.figures.peak_bytes <= budget and step.figures.host_bytes > budget // 2
    executors = rc.Executor(), rc.Executor()
    found = [trained(s, loss, "gpt2-tiny", e, 2) for s, e in zip((plain, step), executors, strict=True)]
    assert found[0] == found[1]
    assert executors[1].session(step.program, [loss]).measured_peak_bytes == step.figures.peak_bytes


def test_what_has_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.chdir(tmp_path)
        assert rc.CPUPlace(".") == rc.CPUPlace(tmp_path)  # the working directory may change
        m.delattr(os, "posix_fallocate")
        with pytest.raises(UsageError, match="this system has no posix_fallocate"):
            rc.CPUPlace(tmp_path)
    with pytest.raises(UsageError, match="there is no such folder"):
        rc.CPUPlace(tmp_path / "none")
    with pytest.raises(UsageError, match="the path of a folder"):
        rc.CPUPlace(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the biggest batch is that of steps in memory"):
        rc.max_batch(rc.models.build("mlp"), "1MiB", target=rc.Target(f"cpu:{tmp_path}"))
    step, loss = made("mlp")
    step.program.block = planned(Offload(("fc_1.weight",)).run(step.program.logical), step.program.compiled.target)
    step.program.compiled = None
    with pytest.raises(UsageError, match="are for the CPU"):
        rc.Executor(rc.EmulatedCUDAPlace(), providers=("numpy",)).session(step.program, [loss])


# -- the disk ---------------------------------------------------------------------------------------------------------


def on_disk(folder: Path) -> tuple[Any, str, rc.Executor]:
    """A step all of whose parameters and state are on disk."""
    step, loss = made("mlp")
    target = dataclasses.replace(step.program.compiled.target, place=rc.CPUPlace(folder))
    block = step.program.logical
    step.program.block, step.program.compiled = planned(Offload(tuple(storable(block))).run(block), target), None
    return step, loss, rc.Executor(rc.CPUPlace(folder))


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first update nothing has changed and the next step runs; after it, the state must be loaded."""
    step, loss, executor = on_disk(tmp_path)
    rc.save_state(step.program, tmp_path / "state")
    first = trained(step, loss, "mlp", executor, 1)
    rc.load_state(step.program, tmp_path / "state")

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "preadv", full)
        with pytest.raises(JobError, match="was not copied: No space left on device"):
            trained(step, loss, "mlp", executor, 1)
    assert trained(step, loss, "mlp", executor, 1) == first
    with monkeypatch.context() as m:
        m.setattr(os, "pwrite", full)
        with pytest.raises(JobError, match="No space left on device"):
            trained(step, loss, "mlp", executor, 1)
    with pytest.raises(JobError, match="partly updated"):
        trained(step, loss, "mlp", executor, 1)
    rc.load_state(step.program, tmp_path / "state")
    assert trained(step, loss, "mlp", executor, 1) == first


def test_averages_and_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Averages on disk are applied as in memory; what was not finite is looked for."""
    optimizer = rc.EMA(rc.AdamW(1e-2), 0.9)
    monkeypatch.setitem(NETWORKS, "mlp", ({}, lambda: optimizer))
    (far, loss, executor), (near, _) = on_disk(tmp_path), made("mlp")
    found = []
    for step, runs in ((far, executor), (near, rc.Executor())):
        trained(step, loss, "mlp", runs)
        feed = feed_of(step, "mlp")
        with applied(step.program):
            averaged = step.program.evaluate(feed, [loss])[0].tobytes()
        assert averaged == step.program.evaluate(feed, [loss], averaged=True)[0].tobytes()
        nan = {n: np.full_like(a, np.nan) if a.dtype == np.float32 else a for n, a in feed.items()}
        with pytest.raises(JobError, match=r"input .* has nan"):
            runs.run(step.program, nan, [loss])
        found.append((averaged, trained(step, loss, "mlp", runs, 1)))
    assert found[0] == found[1]


def test_copies_and_arithmetic_are_in_memory(tmp_path: Path) -> None:
    """A clone, and what a user puts in the place of an array on disk, go there with the next step."""
    (far, loss, executor), (near, _) = on_disk(tmp_path), made("mlp")
    found = []
    for step, runs in ((far, executor), (near, rc.Executor())):
        trained(step, loss, "mlp", runs, 1)
        copy = dataclasses.replace(step, program=step.program.clone())
        first = trained(copy, loss, "mlp", runs)
        data = step.program.data
        data["fc_1.weight"], data["fc_1.bias"] = data["fc_1.weight"] * np.float32(0.5), data["fc_1.bias"][:]
        data["pred.bias"] = np.full_like(data["pred.bias"], -0.0)  # which differ from the file's zeros by their signs
        found.append((first, data["pred.bias"].tobytes(), trained(step, loss, "mlp", runs)))
    assert found[0] == found[1]


def test_a_step_on_disk_is_exported_and_fetched(tmp_path: Path) -> None:
    """The model's inputs and outputs are those of the step in memory; a parameter on disk can be fetched."""
    (far, loss, _), (near, _), found = on_disk(tmp_path), made("mlp"), []
    for step in far, near:
        model = rc.export_step(step.program)
        updates = json.loads(next(p.value for p in model.metadata_props if p.key == "recompute.updates"))
        assert set(updates) <= {i.name for i in model.graph.input}
        assert set(updates.values()) <= {o.name for o in model.graph.output}
        assert len(model.graph.output) == len(updates) + 1
        place = rc.CPUPlace(tmp_path) if step is far else None
        feed, fetch = feed_of(step, "mlp"), [loss, "fc_1.weight"]
        runs = [
            rc.Executor(place).run(p, feed, f)
            for p in (rc.load_compiled(model), step.program)
            for f in (fetch, fetch[:1], fetch)
        ]
        found.append((sorted(updates), [[a.tobytes() for a in arrays] for arrays in runs]))
    assert found[0] == found[1]


def test_few_files_are_open_and_none_is_left(tmp_path: Path) -> None:
    """However many arrays there are; nothing waits for the garbage collector."""
    opened = len(os.listdir("/proc/self/fd"))
    arrays = {f"v{i}": np.full((3, i + 1), -0.0, np.float32) for i in range(50)}
    values = [Value(n, TensorType.of(a)) for n, a in arrays.items()]
    disks.move_to_disk(str(tmp_path), arrays, values)
    assert all(np.signbit(a).all() and a.shape == v.shape for a, v in zip(arrays.values(), values, strict=True))
    assert len(os.listdir("/proc/self/fd")) <= opened + 2
    gc.disable()
    try:
        arrays.clear()
        assert len(os.listdir("/proc/self/fd")) == opened
    finally:
        gc.enable()


def test_an_interrupt_waits_for_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a step waits: what is read then is not written over the next step's values."""
    disk, buffer, done = disks.Disk(str(tmp_path), 64), np.empty(16, np.float32), []

    def slow(*_: Any) -> int:
        time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
        time.sleep(0.05)
        done.append(1)
        return 64

    monkeypatch.setattr(os, "preadv", slow)
    with pytest.raises(KeyboardInterrupt), disk.settled():
        disk.begin(Prefetch(), "x", buffer, (disk.file.fileno(), 0))
        disk.wait("x")
    assert done and not disk.flying


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    step, loss, executor = on_disk(tmp_path)
    with pytest.raises(UsageError, match=r"no room for .* bytes of parameters, state and values: No space left"):
        executor.session(step.program, [loss])


def test_files_have_no_names_and_are_written_as_in_memory(tmp_path: Path) -> None:
    step, loss, executor = on_disk(tmp_path)
    plain, _ = made("mlp")
    trained(step, loss, "mlp", executor)
    trained(plain, loss, "mlp", rc.Executor())
    assert not list(tmp_path.iterdir())
    assert all(is_stored(dict.__getitem__(step.program.data, n)) for n in storable(step.program.block))
    for name, of in (("far", step), ("near", plain)):
        rc.save_state(of.program, tmp_path / name)
    assert (tmp_path / "far").read_bytes() == (tmp_path / "near").read_bytes()
    other, _, runs = on_disk(tmp_path)
    runs.session(other.program, [loss])
    rc.load_state(other.program, tmp_path / "far")
    assert trained(other, loss, "mlp", runs, 2) == trained(plain, loss, "mlp", rc.Executor(), 2)


def test_a_run_with_evaluation_and_resume(tmp_path: Path) -> None:
    """The same checkpoints, hashes and metrics as in memory; the evaluation fetches its parameters from disk."""
    rows = np.random.default_rng(0).integers(0, 100, (16, 16))
    data, found = {"input_ids": rows, "label": rows}, {}
    sizes = {"seq": 16, "vocab": 1000}

    def run(place: str, save: str, epochs: int) -> Any:
        program = rc.load(rc.models.build("gpt2-tiny", **sizes), batch=4)
        loss = rc.losses.cross_entropy(program["logits"]).name
        optimizer: Any = rc.AdamW(1e-3)
        if place != "cpu":
            optimizer = rc.RecomputeOptimizer(optimizer).set_budget("60%", target=rc.Target(place), slicing=False)
        trainer = rc.Trainer(program, optimizer, loss=loss, place=place, quiet=True)
        return trainer.fit(data, epochs=epochs, eval_data=data, save=tmp_path / save, resume=True)

    for save, place in (("near", "cpu"), ("far", f"cpu:{tmp_path}")):
        run(place, save, 1)
        found[save] = run(place, save, 2)
    near, far_run = found["near"], found["far"]
    assert far_run.weights_sha256 == near.weights_sha256 and far_run.epochs[-1]["eval"] == near.epochs[-1]["eval"]
    assert far_run.peak_bytes["measured"] == far_run.peak_bytes["predicted"] <= 0.6 * near.peak_bytes["training"]
    models = [onnx.load(tmp_path / n / "model.onnx") for n in ("near", "far")]
    assert list((tmp_path / "far").glob("model.onnx.*.data"))  # what is on disk is written beside it
    weights = [{t.name: onnx.numpy_helper.to_array(t) for t in m.graph.initializer} for m in models]
    assert weights[0].keys() == weights[1].keys()
    assert all(np.array_equal(weights[0][n], weights[1][n]) for n in weights[0])
    states = [next(tmp_path.glob(f"{n}/checkpoints/*/state.safetensors")).read_bytes() for n in ("near", "far")]
    assert states[0] == states[1]


def test_a_step_on_disk_is_proved(tmp_path: Path) -> None:
    """What is stored is the update; a step that stores another one is not the same."""
    step, near = on_disk(tmp_path)[0], made("mlp")[0].program.block
    assert not prove(near, step.program.block).unproved
    other = made("mlp")[0].program.logical
    changed = [
        dataclasses.replace(o, op=dataclasses.replace(o.op, beta1=0.5)) if hasattr(o.op, "beta1") else o
        for o in other.operators
    ]
    far = Offload(tuple(storable(other))).run(other.with_operators(changed))
    with pytest.raises(VerifyError, match="it is not proved that"):
        prove(near, far)
