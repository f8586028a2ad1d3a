"""What the plan says is what the runtime takes: no hidden temporaries, exact peaks, sharing that is sound."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from checking import run_checked

import recompute as rc
from recompute import models, parse
from recompute.compiling.compiler import CompiledStep, compile_step
from recompute.data.batches import synthetic_batch
from recompute.language.text import show_operator
from recompute.passes import Liveness, MemoryPlan, memory_report, pipeline, run_passes
from recompute.passes.memory.packing import Lifetime, best_fit_in_time, first_fit, height, lower_bound, pack
from recompute.passes.memory.packing_exact import pack_exact
from recompute.passes.memory.storage import storages
from recompute.runtime.cpu.session import segments

#: networks large enough that a temporary of a whole activation would show
MEDIUM: dict[str, dict[str, Any]] = {
    "resnet18": {"image": 64, "classes": 10},
    "resnet50": {"image": 64, "classes": 10, "width": 32},
    "vgg11": {"image": 64, "classes": 10, "hidden": 256},
    "bert-tiny": {"seq": 64, "vocab": 2000},
    "gpt2-tiny": {"seq": 64, "vocab": 2000},
    "lenet": {},
    "lstm": {},
    "mlp4": {},
    "darts": {"width": 8, "cells": 3, "image": 32},
    "densenet121": {"width": 16, "growth": 8, "blocks": (2, 3, 2), "image": 64, "classes": 10},
    "mobilenet_v2": {"width": 16, "image": 64, "classes": 10},
    "pspnet": {"width": 8, "blocks": (1, 1, 1, 1), "image": (41, 64)},
    "segnet": {"width": 8, "image": (64, 32)},
}


def compiled(name: str, batch: int, checkpoints: bool, options: dict[str, Any]) -> tuple[CompiledStep, str, dict]:
    program = rc.load(models.build(name, batch=batch, **options))
    kind, _ = rc.losses.natural_loss(program)
    loss = kind if kind in program else getattr(rc.losses, kind)(program).name
    entry = models.info(name, **options)
    kept = [c for c in entry.checkpoints if c in program] if checkpoints else None
    step = compile_step(program, loss, rc.Adam(learning_rate=1e-3), checkpoints=kept)
    return step, loss, synthetic_batch(step.program, 0, {s.name: s for s in entry.inputs})


@pytest.mark.parametrize("name", MEDIUM)
def test_a_step_allocates_nothing(name: str) -> None:
    """No operator takes memory beside its planned buffers, but for what NumPy's loops take themselves.

    NumPy converts and gathers through buffers of 8192 elements, one an operand: up to 96 KiB in float32 whatever the
    size of the tensors, each far below 64 KiB.
    """
    made, loss, feed = compiled(name, 8, True, MEDIUM[name])
    executor = rc.Executor()
    executor.run(made.program, feed, [loss])
    session = executor.session(made.program, [loss])
    for v in session.block.inputs:  # the first step has used their places for other values
        session.arrays[v.name][...] = feed[v.name]
    found = []
    tracemalloc.start()
    try:
        for step in session.steps:
            segment = segments([step])[0]
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with np.errstate(all="ignore"):
                segment.run()
            taken = tracemalloc.get_traced_memory()[1] - before
            if taken > 128 * 1024:
                found.append(f"{taken:,} bytes by {show_operator(step.op)}")
    finally:
        tracemalloc.stop()
    assert not found


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", ["mlp", "mlp4", "lenet", "lstm", "resnet18", "bert-tiny", "gpt2-tiny"])
def test_measured_is_predicted(name: str, batch: int) -> None:
    options = MEDIUM.get(name, {})
    for checkpoints in (False, True):
        step, loss, feed = compiled(name, batch, checkpoints, options)
        executor = rc.Executor()
        executor.run(step.program, feed, [loss])
        assert executor.session(step.program, [loss]).measured_peak_bytes == step.figures.peak_bytes
        # small programs are allowed what alignment costs, 64 bytes for each allocation alive
        slack = 64 * len(storages(step.program.block))
        assert step.figures.live_peak_bytes <= step.figures.peak_bytes
        assert step.figures.arena_bytes <= 1.01 * (step.figures.live_peak_bytes - step.figures.persistent_bytes) + slack


@pytest.mark.parametrize("name", ["lenet", "lstm", "mlp4"])
def test_checked_steps(name: str) -> None:
    """Freed memory is poisoned and everything outside of an operator's buffers compared: nothing changes."""
    step, loss, feed = compiled(name, 2, True, {})
    plain, checked = step.program.clone(), step.program.clone()
    expected = rc.Executor().run(plain, feed, [loss])[0]
    session = rc.Executor().session(checked, [loss])
    for v in session.block.inputs:
        session.arrays[v.name][...] = feed[v.name]
    run_checked(session)
    assert session.arrays[loss].tobytes() == expected.tobytes()
    for key, array in plain.data.items():
        assert array.tobytes() == checked.data[key].tobytes(), key


VIEWS = """\
program views {
  input %x: f32[4,16]
  %a: f32[4,16] = Tanh(%x)
  %r: f32[64] = Reshape(%a) {shape=[64]}
  %p: f32[16], %q: f32[48] = Split(%r) {sizes=[16,48]}
  %e: f32[16] = Exp(%p)
  %n: f32[48] = Neg(%q)
  %y: f32[64] = Concat(%e, %n) {axis=0}
  %z: f32[64] = Relu(%y)
  output %z
}
"""


def test_views_parts_and_places_are_shared() -> None:
    """tanh takes the input's place, reshape and split are views, the parts of the concat are written in place."""
    block = run_passes(parse(VIEWS), pipeline("liveness,memory-plan"))
    at = block.addresses
    assert at["x"] == at["a"] == at["r"] == at["p"] == at["q"] - 64
    assert at["y"] == at["z"] == at["e"] == at["n"] - 64
    assert memory_report(block).arena == 2 * 256
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)
    (z,) = rc.Executor().run(rc.Program(block, {}), {"x": x}, ["z"])
    t = np.tanh(x).reshape(-1)
    np.testing.assert_array_equal(z, np.maximum(np.concatenate([np.exp(t[:16]), -t[16:]]), 0))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("%z: f32[64] = Relu(%y) @256", "%z: f32[64] = Relu(%y) @320"), "%z at 320..576 overlaps its input %y"),
        (("%n: f32[48] = Neg(%q) @320", "%n: f32[48] = Neg(%q) @256"), "%e is read, but its bytes"),
    ],
)
def test_plans_that_share_wrongly_are_found(change: tuple[str, str], why: str) -> None:
    planned = run_passes(parse(VIEWS), pipeline("liveness,memory-plan"))
    low, high = sorted({planned.addresses["x"], planned.addresses["y"]})
    text = str(planned) if planned.addresses["x"] == low else ""
    assert high == 256 and change[0] in text
    with pytest.raises(rc.VerifyError) as e:
        rc.verify(parse(text.replace(*change)))
    assert why in str(e.value)


def test_outputs_and_fetched_values_are_not_overwritten() -> None:
    block = parse(VIEWS.replace("output %z", "output %a, %z"))
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(4, 16)
    program = rc.Program(block, {})
    executor = rc.Executor()
    a, e, _ = executor.run(program, {"x": x}, ["a", "e", "z"])
    np.testing.assert_array_equal(a, np.tanh(x))
    np.testing.assert_array_equal(e, np.exp(np.tanh(x).reshape(-1)[:16]))


def lifetimes(seed: int, n: int) -> list[Lifetime]:
    g = np.random.default_rng(seed)
    starts = np.sort(g.integers(0, 3 * n, n))
    lengths = np.where(g.random(n) < 0.3, g.integers(1, 3 * n, n), g.integers(1, 8, n))
    sizes = 64 * g.integers(1, 200, n)
    return [
        Lifetime(f"v{i}", int(s), int(a), int(a + d))
        for i, (s, a, d) in enumerate(zip(sizes, starts, lengths, strict=True))
    ]


def sound(items: list[Lifetime], plan: dict[str, int]) -> bool:
    for i, a in enumerate(items):
        for b in items[:i]:
            if a.start <= b.end and b.start <= a.end:
                low, high = sorted([(plan[a.name], a.size), (plan[b.name], b.size)])
                if low[0] + low[1] > high[0]:
                    return False
    return True


@pytest.mark.parametrize("seed", range(6))
def test_packers_are_sound(seed: int) -> None:
    items = lifetimes(seed, 120)
    bound = lower_bound(items)
    for packer in (best_fit_in_time, first_fit, pack):
        plan = packer(items)
        assert sound(items, plan) and height(items, plan) >= bound
    assert pack(items) == pack(items)
    assert height(items, pack(items)) <= 1.10 * bound


def test_the_exact_packer_is_never_worse() -> None:
    for seed in range(3):
        items = lifetimes(seed, 24)
        plan, bound = pack_exact(items, seconds=0.02)
        assert sound(items, plan)
        assert lower_bound(items) <= bound <= height(items, plan) <= height(items, pack(items))


def test_planning_is_deterministic() -> None:
    program = rc.load(models.build("resnet18", batch=2, image=32, weights=False))
    loss = rc.losses.cross_entropy(program).name
    blocks = [compile_step(program, loss, rc.Adam()).program.block for _ in range(2)]
    assert blocks[0] == blocks[1]
    again = run_passes(parse(str(blocks[0])), [Liveness(), MemoryPlan()])
    assert again.addresses == blocks[0].addresses
