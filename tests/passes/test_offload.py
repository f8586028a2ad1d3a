"""Values that wait in host memory: the language, the placing, the numbers, both arenas, and the doors to it."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

import numpy as np
import pytest
from checking import run_checked
from random_blocks import blocks, feeds

import recompute as rc
from recompute import models, parse, show, verify
from recompute.compiling.compiler import CompiledStep, compile_step, without_gc
from recompute.cost import DATASHEETS, device, link_of, step_seconds
from recompute.data.batches import synthetic_batch
from recompute.errors import UsageError, VerifyError
from recompute.language.builder import Builder
from recompute.language.ir import Block, Role, Value
from recompute.language.op import op_class
from recompute.language.types import TensorType
from recompute.passes import (
    ALIGNMENT,
    Autodiff,
    Liveness,
    MemoryPlan,
    Offload,
    live_profile,
    memory_report,
    offloaded,
    run_passes,
)
from recompute.passes.offloading.offload import find_rests, without_copies
from recompute.passes.offloading.transfers import Link, simulate
from recompute.passes.planners.fit.offload import choose
from recompute.report.timeline import timeline
from recompute.runtime.cpu.session import Session
from recompute.training import fleet

hypothesis = pytest.importorskip("hypothesis")

NETWORKS: dict[str, dict[str, Any]] = {
    "mlp4": {},
    "resnet18": {"image": 32, "classes": 10, "width": 8},
    "bert-tiny": {"seq": 16, "vocab": 100},
}
FAST = Link(1e15, 1e15, 0.0)


def network(name: str, batch: int = 4) -> tuple[Any, str, list[str]]:
    """A network of the zoo with its loss, and its checkpoints."""
    program = rc.load(models.build(name, batch=batch, **NETWORKS[name]))
    kind, _ = rc.losses.natural_loss(program)
    loss = kind if kind in program else getattr(rc.losses, kind)(program).name
    return program, loss, [c for c in models.info(name, **NETWORKS[name]).checkpoints if c in program]


def fed(step: CompiledStep, name: str) -> dict[str, np.ndarray]:
    return synthetic_batch(step.program, 0, {s.name: s for s in models.info(name, **NETWORKS[name]).inputs})


# -- the language -----------------------------------------------------------------------------------------------------

MOVED = """\
program moved {
  input %x: f32[16]
  param %w: f32[16]
  %a: f32[16] = Tanh(%x)
  communicate %h: host f32[16] = Offload(%a)
  %b: f32[16] = Exp(%a)
  communicate %h1: host f32[16] = CopyWait(%h, %a)
  communicate %p: f32[16] = Prefetch(%h1)
  %c: f32[16] = Neg(%b)
  communicate %a1: f32[16] = CopyWait(%p, %h1)
  backward %d: f32[16] = Mul(%c, %a1)
  output %d
}
"""


def test_text() -> None:
    block = verify(parse(MOVED))
    assert show(block) == MOVED and parse(show(block)) == block
    assert TensorType.parse("host f32[16]") == TensorType("f32", (16,), host=True)
    planned = run_passes(block, [Liveness(), MemoryPlan()])
    assert parse(show(planned)) == planned
    report = memory_report(planned)
    assert (report.host, report.host_live_peak) == (64, 64) and report.arena == 2 * 64


def changed(*pairs: tuple[str, str]) -> str:
    text = MOVED
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return text


WRONG = {
    "host value read by another operator": (
        changed(("Mul(%c, %a1)", "Mul(%c, %h1)")),
        r"%h1 is in host memory: only copies touch it, Mul is none|is declared f32",
    ),
    "result of a copy read before it is there": (changed(("Neg(%b)", "Neg(%p)")), "%p is read while a copy writes it"),
    "result of a copy read instead of the wait's": (
        changed(("Mul(%c, %a1)", "Mul(%c, %p)")),
        "%p is read while a copy writes it",
    ),
    "a copy out that nobody waits for": (
        changed(("  communicate %h1: host f32[16] = CopyWait(%h, %a)\n", ""), ("Prefetch(%h1)", "Prefetch(%h)"),
                ("CopyWait(%p, %h1)", "CopyWait(%p, %h)")),
        "%h is read while a copy writes it",
    ),
    "a copy back that nobody waits for": (
        changed(("  communicate %a1: f32[16] = CopyWait(%p, %h1)\n", ""), ("Mul(%c, %a1)", "Mul(%c, %a)")),
        "no CopyWait follows the copy to %p",
    ),
    "a wait for another source": (changed(("CopyWait(%h, %a)", "CopyWait(%h, %x)")), "the copy to %h reads %a, not %x"),
    "two waits": (
        changed(("  %c: ", "  communicate %h2: host f32[16] = CopyWait(%h, %a)\n  %c: ")),
        "%h was awaited already",
    ),
    "a wait for no copy": (changed(("CopyWait(%h, %a)", "CopyWait(%h1, %a)")), "before it is written"),
    "a parameter": (changed(("Offload(%a)", "Offload(%w)"), ("(%h, %a)", "(%h, %w)")), "%w is persistent"),
    "an offload of the host's": (changed(("Prefetch(%h1)", "Offload(%h1)")), "copies from the device to the host"),
    "a prefetch of the device's": (changed(("Offload(%a)", "Prefetch(%a)")), "copies from the host to the device"),
    "a source that is freed early": (changed(("  %b: ", "  free %a\n  %b: ")), "%a is read after it was freed"),
    "an output in host memory": (changed(("output %d", "output %d, %h1")), "output %h1 is in host memory"),
    "an input in host memory": (changed(("%x: f32[16]\n", "%x: host f32[16]\n")), "declared in host memory"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_misuse(what: str) -> None:
    text, message = WRONG[what]
    lines = text.replace("= Offload(%h1)", "= Offload(%h1)")
    with pytest.raises((VerifyError, UsageError), match=message):
        verify(parse(lines))


def test_addresses_are_checked_while_a_copy_runs() -> None:
    """Neither end of a copy may be given away before the wait, and each memory has addresses of its own."""
    block = run_passes(parse(MOVED), [Liveness(), MemoryPlan()])
    at = dict(block.addresses)
    for name, other, what in (("b", "a", "%b"), ("c", "p", "%c"), ("a1", "c", "moves nothing")):
        wrong = dataclasses.replace(block, addresses={**at, name: at[other]})
        with pytest.raises(VerifyError, match=what):
            verify(wrong)
    assert at["h"] == at["h1"] == 0  # the host's zero is not the device's
    verify(dataclasses.replace(block, addresses={**at, "h": 640, "h1": 640}))


# -- the pass ---------------------------------------------------------------------------------------------------------


def chain(n: int, width: int = 64) -> Block:
    """n layers of MatMul and Tanh with their gradients: every Tanh waits for the backward pass."""
    x, w = Value("x", TensorType("f32", (width, width))), Value("w", TensorType("f32", (width, width)))
    b = Builder.on(Block(inputs=(x,), parameters=(w,)))
    v = x
    for i in range(n):
        v = b.emit(op_class("Tanh")(), b.MatMul(v, w), name=f"t{i}")
    b.role = Role.LOSS
    loss = b.emit(op_class("ReduceMean")(keepdims=0), v, name="loss")
    block = Block("chain", (x,), (w,), operators=tuple(b.operators), constants=tuple(b.constants), outputs=(loss.name,))
    return Autodiff(loss="loss").run(verify(block))


def peaks(block: Block) -> tuple[int, int]:
    report = memory_report(run_passes(block, [Liveness(), MemoryPlan()]))
    return report.arena, report.host


def test_copies_hide_behind_the_work() -> None:
    """With time enough the device never waits, the peak falls, and what came to the host is what was moved."""
    block, names = chain(12), tuple(f"t{i}" for i in range(12))
    moved = verify(Offload(names, seconds=lambda op: 1.0, link=Link(64 * 64 * 4, 64 * 64 * 4, 0.0)).run(block))
    times = simulate(moved, lambda op: 1.0, Link(64 * 64 * 4, 64 * 64 * 4, 0.0))
    assert times.stalls == 0 and times.compute == len(block.operators)
    before, after = peaks(block), peaks(moved)
    assert after[0] < 0.6 * before[0] and before[1] == 0 and after[1] == len(offloaded(moved)) * 64 * 64 * 4
    assert peaks(Offload(names, tight=True).run(block))[0] == after[0]  # time was won, no memory lost


def test_every_prefetch_is_in_time() -> None:
    moved = Offload(tuple(f"t{i}" for i in range(12)), seconds=lambda op: 1.0, link=Link(16384, 16384, 0.0)).run(
        chain(12)
    )
    times = simulate(moved, lambda op: 1.0, Link(16384, 16384, 0.0))
    back = [t for t in times.transfers if t.back]
    assert back and all(t.stall == 0 for t in times.transfers)
    tight = simulate(without_copies(moved) and Offload(offloaded(moved), tight=True).run(without_copies(moved)),
                     lambda op: 1.0, Link(16384, 16384, 0.0))  # fmt: skip
    assert tight.stalls >= len(back)  # each of them would take a second


def test_slow_links_are_waited_for() -> None:
    """The clocks: a copy of 4 s out behind operator 0, awaited behind operator 1, and 4 s back at once."""
    block = parse(MOVED)
    times = simulate(block, lambda op: 1.0, Link(16.0, 16.0, 0.0))
    assert [(t.name, t.back, t.begin, t.end, t.stall) for t in times.transfers] == [
        ("a", False, 1.0, 5.0, 3.0),
        ("h1", True, 5.0, 9.0, 3.0),
    ]
    assert (times.compute, times.stalls, times.seconds, times.transfer_seconds) == (4.0, 6.0, 10.0, 8.0)


def test_one_copy_after_the_other() -> None:
    """Copies of one direction share a stream, those of the other do not."""
    block, link = chain(6), Link(16384 / 3, 16384 / 3, 0.5)
    times = simulate(Offload(tuple(f"t{i}" for i in range(6)), seconds=lambda op: 1.0, link=link).run(block),
                     lambda op: 1.0, link)  # fmt: skip
    for back in (False, True):
        mine = sorted((t.begin, t.end) for t in times.transfers if t.back is back)
        assert mine and all(e <= b for (_, e), (b, _) in itertools.pairwise(mine))
        assert all(e - b == pytest.approx(3.5) for b, e in mine)


def test_more_room_saves_time() -> None:
    block, names, link = chain(12), tuple(f"t{i}" for i in range(12)), Link(4096, 4096, 0.0)

    def placed(limit: int) -> Block:
        return Offload(names, limit=limit, seconds=lambda op: 1.0, link=link).run(block)

    tight, roomy = placed(0), placed(peaks(block)[0])
    assert simulate(roomy, lambda op: 1.0, link).stalls < simulate(tight, lambda op: 1.0, link).stalls
    assert peaks(tight)[0] <= peaks(roomy)[0] <= peaks(block)[0]


AGAIN = """\
program again {
  input %x: f32[64]
  %a: f32[64] = Tanh(%x)
  %u: f32[256] = Tile(%a) {repeats=[4]}
  %v: f32[256] = Exp(%u)
  %b: f32[64] = Slice(%v) {axes=[0], ends=[64], starts=[0], steps=[1]}
  backward %c: f32[64] = Mul(%b, %a)
  backward %d: f32[256] = Tile(%c) {repeats=[4]}
  backward %e: f32[256] = Exp(%d)
  backward %f: f32[64] = Slice(%e) {axes=[0], ends=[64], starts=[0], steps=[1]}
  backward %g: f32[64] = Mul(%f, %a)
  output %g
}
"""


def test_a_value_comes_back_for_each_late_reader_where_there_is_no_room() -> None:
    """`a` is away while u and v are there, and again for d and e; with room for it then, it stays."""
    block = parse(AGAIN)
    once, twice = (Offload(("a",), limit, link=FAST).run(block) for limit in (peaks(block)[0], 0))
    assert [sum(op.op.name == "Prefetch" for op in b.operators) for b in (once, twice)] == [1, 2]
    assert block == without_copies(once) == without_copies(twice) and offloaded(twice) == ("a",)
    assert peaks(twice)[0] == peaks(block)[0] - 256 and executed(twice) == executed(once) == executed(block)
    assert Offload(link=FAST).run(twice) == twice


def test_placing_again_and_taking_back() -> None:
    block = chain(5)
    moved = Offload(("t0", "t1", "t2")).run(block)
    assert without_copies(moved) == block and offloaded(moved) == ("t0", "t1", "t2")
    assert Offload().run(moved) == moved
    assert Offload(("t1",)).run(moved) == Offload(("t1",)).run(block)


def test_what_has_no_rest_stays() -> None:
    block = chain(3)
    assert [r.value.name for r in find_rests(block, ["w", "loss", "t0", "t2"])] == ["t0", "t2"]
    assert Offload(("loss",)).run(block) == block
    with pytest.raises(UsageError, match=r"there is no value 't9' to offload"):
        Offload(("t9",)).run(block)
    with pytest.raises(UsageError, match="comes before 'liveness'"):
        Offload(("t0",)).run(Liveness().run(block))


def executed(block: Block, outputs: tuple[str, ...] = ()) -> list[bytes]:
    """The outputs' bits by the operators' own numerics, with freed memory poisoned."""
    planned = run_passes(block, [Liveness(), MemoryPlan()])
    data = feeds(block)
    session = Session(planned, {v.name: data[v.name] for v in planned.persistent() if v.name in data})
    for v in planned.inputs:
        session.arrays[v.name][...] = data[v.name]
    run_checked(session)
    return [session.arrays[name].tobytes() for name in outputs or block.outputs]


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(blocks())
def test_random_programs(block: Block) -> None:
    """Every value that can go goes: the same bits, with copies as late as they may be and freed memory poisoned."""
    step = Autodiff(loss="loss").run(block)
    expected = executed(step)
    link = Link(1e9, 1e9, 0.0)
    for moved in (
        Offload(tuple(step.values()), link=link).run(step),
        Offload(tuple(step.values()), tight=True).run(step),
    ):
        assert executed(moved, step.outputs) == expected
        assert peaks(moved)[0] <= peaks(step)[0] + 64 * len(step.operators)


def test_growth() -> None:
    """10,000 operators in seconds, and four times as many take about four times as long."""
    found = []
    for n in (500, 2000):
        block = chain(n, width=4)
        with without_gc():  # as a pipeline runs it
            start = time.process_time()
            moved = Offload(tuple(f"t{i}" for i in range(n))).run(block)
            found.append(time.process_time() - start)
        assert len(offloaded(moved)) == n or len(offloaded(moved)) > 0.9 * n
    assert len(block.operators) >= 10_000 and found[1] < 10 and found[1] < 9 * found[0] + 0.5


# -- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
def test_the_same_bits_and_bytes(name: str) -> None:
    """Plain, recomputed, and with checkpoints in host memory: the same losses and weights, peaks as predicted."""
    program, loss, checkpoints = network(name)
    steps = [
        compile_step(program, loss, rc.Adam()),
        compile_step(program, loss, rc.Adam(), checkpoints=checkpoints),
        compile_step(program, loss, rc.Adam(), checkpoints=checkpoints, offload=True),
    ]
    results = []
    for step in steps:
        executor, feed = rc.Executor(), fed(step, name)
        losses = [executor.run(step.program, feed, [loss])[0].tobytes() for _ in range(2)]
        session = executor.session(step.program, [loss])
        assert session.measured_peak_bytes == step.figures.peak_bytes
        assert session.measured_host_bytes == step.figures.host_bytes
        results.append((losses, {k: a.tobytes() for k, a in step.program.data.items()}))
    assert results[0] == results[1] == results[2]
    last = steps[-1]
    assert last.plan is not None and last.plan.offloads and last.figures.offloaded_values and last.figures.host_bytes
    assert last.figures.peak_bytes <= steps[1].figures.peak_bytes
    assert last.figures.kept_bytes < steps[1].figures.kept_bytes
    logical = step_seconds(last.program.logical, last.cost)
    assert last.figures.estimated_step_seconds == logical + last.figures.stall_seconds


@pytest.mark.parametrize("name", ["mlp4", "bert-tiny"])
def test_checked_steps(name: str) -> None:
    """Copies as late as they may be, freed memory poisoned in both arenas: nothing changes."""
    program, loss, checkpoints = network(name, batch=2)
    step = compile_step(program, loss, rc.Adam(), checkpoints=checkpoints, offload=True)
    feed = fed(step, name)
    plain, checked = step.program.clone(), step.program.clone()
    expected = rc.Executor().run(plain, feed, [loss])[0]
    session = rc.Executor().session(checked, [loss])
    assert session.host is not None
    for v in session.block.inputs:
        session.arrays[v.name][...] = feed[v.name]
    run_checked(session)
    assert session.arrays[loss].tobytes() == expected.tobytes()
    for key, array in plain.data.items():
        assert array.tobytes() == checked.data[key].tobytes(), key


def test_the_peak_falls() -> None:
    """Where checkpoints make the peak, moving them lowers it; by less than the moved bytes, as some come back."""
    program, loss, _ = network("bert-tiny", batch=32)
    names = [f"layer.{i}.{v}" for i in (0, 1) for v in ("attention.out", "out")] + ["embeddings.out"]
    options: dict[str, Any] = {"checkpoints": names, "cost": device("h200"), "providers": ()}
    kept = compile_step(program, loss, rc.SGD(), **options).figures
    moved = compile_step(program, loss, rc.SGD(), offload=True, **options).figures
    assert 0 < kept.arena_bytes - moved.arena_bytes <= moved.host_bytes


def test_an_exported_step_has_one_memory(tmp_path: Any) -> None:
    program, loss, checkpoints = network("mlp4")
    step = compile_step(program, loss, rc.Adam(), checkpoints=checkpoints, offload=True, providers=())
    model = rc.export_step(step.program)
    assert {"Offload", "Prefetch", "CopyWait"} <= {n.op_type for n in model.graph.node}
    assert rc.load_compiled(model).block == step.program.block


# -- plans ------------------------------------------------------------------------------------------------------------


def test_choosing() -> None:
    """Enough is moved, nothing that is not needed, and the values that rest longest first where time is short."""
    block = chain(12)
    live = peaks(block)[0]
    for share in (0.9, 0.7, 0.5):
        found = choose(block, int(share * live), lambda op: 1e-5, FAST)
        assert found is not None and found[1].stalls == 0
        assert peaks(Offload(found[0], seconds=lambda op: 1e-5, link=FAST).run(block))[0] <= share * live
    assert choose(block, live, lambda op: 1e-5, FAST) == ((), simulate(block, lambda op: 1e-5))
    assert choose(block, 1000, lambda op: 1e-5, FAST) is None


@pytest.mark.parametrize("strategy", ["auto", "cut-sweep"])
def test_host_memory_never_costs_time(strategy: str) -> None:
    """Within the same budget the step with moved values is as fast as the one that only recomputes, or faster."""
    program, loss, _ = network("mlp4", batch=512)
    for sheet in ("h200", "t4"):
        options = {"budget": "85%", "strategy": strategy, "cost": device(sheet), "providers": ()}
        alone = compile_step(program, loss, rc.SGD(), **options)
        both = compile_step(program, loss, rc.SGD(), offload=True, **options)
        assert both.planned is not None and alone.planned is not None and both.planned.fits
        assert both.planned.seconds <= alone.planned.seconds
        assert both.figures.peak_bytes <= both.planned.budget
        assert both.figures.host_bytes == both.planned.host_bytes
        assert both.planned.bound is not None and both.planned.bound <= both.planned.seconds * (1 + 1e-9)


def test_saved_plans(tmp_path: Any) -> None:
    program, loss, _ = network("mlp4", batch=512)
    options = {"cost": device("h200"), "providers": ()}
    step = compile_step(program, loss, rc.SGD(), budget="85%", strategy="cut-sweep", offload=True, **options)
    assert step.saved is not None and step.saved.offloads
    step.saved.save(tmp_path / "plan.json")
    again = compile_step(program, loss, rc.SGD(), plan=tmp_path / "plan.json", **options)
    assert again.program.block == step.program.block
    assert again.planned is not None and step.planned is not None and again.planned.seconds == step.planned.seconds
    with pytest.raises(UsageError, match="a plan already defines which values are offloaded"):
        compile_step(program, loss, rc.SGD(), plan=tmp_path / "plan.json", offload=True, **options)


# -- doors ------------------------------------------------------------------------------------------------------------


def test_fleet() -> None:
    """Paddle's configuration, with checkpoints of different shapes; the numbers are the plain optimizer's."""
    results = []
    for configs in ({}, {"enable_offload": True, "checkpoint_shape": []}):
        program, loss, checkpoints = network("resnet18")
        strategy = fleet.DistributedStrategy()
        strategy.recompute = True
        strategy.recompute_configs = {"checkpoints": checkpoints, **configs}
        fleet.distributed_optimizer(rc.Momentum(0.1), strategy).minimize(program[loss])
        executor = rc.Executor()
        feed = synthetic_batch(program, 0, {s.name: s for s in models.info("resnet18", **NETWORKS["resnet18"]).inputs})
        results.append([executor.run(program, feed, [loss])[0].tobytes() for _ in range(2)])
        moved = program.plan.offloads
        assert bool(moved) is bool(configs) and (executor.session(program, [loss]).measured_host_bytes > 0) is bool(
            configs
        )
    assert results[0] == results[1]
    shapes = {program[n].shape for n in moved}
    assert len(shapes) > 1


def test_wrong_requests() -> None:
    program, loss, checkpoints = network("mlp4")
    with pytest.raises(UsageError, match="offload needs checkpoints"):
        compile_step(program, loss, rc.SGD(), offload=True)
    with pytest.raises(UsageError, match="needs a budget"):
        compile_step(program, loss, rc.SGD(), strategy="chen", offload=True)
    with pytest.raises(UsageError, match="offload does not apply to a RecomputeOptimizer: set its enable_offload"):
        compile_step(program, loss, rc.RecomputeOptimizer(rc.SGD()).set_checkpoints(checkpoints), offload=True)
    with pytest.raises(UsageError, match="enable_offload must be True or False"):
        rc.RecomputeOptimizer(rc.SGD()).enable_offload = 1  # type: ignore[assignment]


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    from recompute.cli import main

    assert main(["mlp4", "--checkpoints", "relu_*", "--offload", "--run", "1", "--device", "h200"]) == 0
    out = capsys.readouterr().out
    assert "host memory (or disk)" in out and "(as predicted)" in out
    for wrong, message in (
        (["--offload"], "--offload needs --checkpoints"),
        (
            ["--offload", "--memory-budget", "1GiB", "--max-batch"],
            "does not consider: leave out --max-batch",
        ),
        (["--offload", "--memory-budget", "60%", "--compare"], "does not consider: leave out --compare"),
    ):
        assert main(["mlp4", *wrong]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", DATASHEETS)
def test_links(name: str) -> None:
    """Every data sheet says how fast its host is, slower than its own memory by far."""
    link = link_of(device(name))
    assert link.out == link.back == DATASHEETS[name].link * 1e9 < device(name).bandwidth / 8 + 1


def test_pictures_show_the_device() -> None:
    """The account behind every picture adds up to what is alive on the device, copies and all."""
    program, loss, checkpoints = network("bert-tiny")
    step = compile_step(program, loss, rc.Adam(), checkpoints=checkpoints, offload=True)
    block = step.program.block
    account = timeline(block)
    totals = [sum(rows) for rows in zip(*account.totals().values(), strict=True)]
    assert totals == [live + step.figures.persistent_bytes for _, live in live_profile(block, ALIGNMENT)]
    assert step.figures.host_bytes >= max(live for _, live in live_profile(block, host=True)) > 0
    estimate = rc.estimate(program, loss=loss, checkpoints=checkpoints)
    assert estimate.peak_bytes == sum(estimate.by_role.values())


def test_optimizer_with_a_budget() -> None:
    """What the planner says is what the executor allocates, on the device and beside it."""
    program, loss, _ = network("mlp4", batch=1024)
    optimizer = rc.RecomputeOptimizer(rc.SGD()).set_budget("85%").set_strategy("cut-sweep").set_offload()
    optimizer.minimize(program[loss])
    session = rc.Executor().session(program, [loss])
    assert program.planned.offloads == program.plan.offloads and program.planned.fits
    assert program.planned.gap is not None and program.planned.gap < 0.1
    assert session.measured_peak_bytes == program.planned.peak_bytes
    assert session.measured_host_bytes == program.planned.host_bytes > 0
