"""The zoo's networks (narrowed, most in their depth): with any checkpoints the numbers are the same bits, the measured
peak is the predicted one, and recomputation is worth it with the checkpoints that the zoo proposes."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
from zoo_cases import compiled, narrow, network, zoo

import recompute as rc
from recompute import models
from recompute.compiling.compiler import CompiledStep, compile_step
from recompute.language.ir import Role

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")


def trained(step: CompiledStep, loss: str, feed: dict[str, np.ndarray], steps: int) -> tuple[list[bytes], rc.Program]:
    """The bits of the losses, and the trained program; the step's own arrays are not changed."""
    program, executor = step.program.clone(), rc.Executor()
    losses = [executor.run(program, feed, [loss])[0].tobytes() for _ in range(steps)]
    assert executor.session(program, [loss]).measured_peak_bytes == step.figures.peak_bytes
    return losses, program


@cache
def plain(name: str) -> tuple[list[bytes], rc.Program]:
    _, loss, feed = network(name)
    return trained(compiled(name), loss, feed, 2)


def same_bits(name: str, checkpoints: list[str]) -> CompiledStep:
    program, loss, feed = network(name)
    step = compile_step(program, loss, rc.Momentum(learning_rate=0.01), checkpoints=checkpoints)
    expected, before = plain(name)
    losses, after = trained(step, loss, feed, 2)
    assert losses == expected
    for key, array in before.data.items():
        assert array.tobytes() == after.data[key].tobytes(), key
    return step


@pytest.mark.parametrize("name", zoo())
@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_random_checkpoints_keep_every_bit(name: str, data: st.DataObject) -> None:
    program, _, _ = network(name)
    names = [v.name for op in program.operators for v in op.writes() if not op.op.updates]
    count = data.draw(st.integers(1, min(6, len(names))))
    same_bits(name, data.draw(st.lists(st.sampled_from(names), min_size=count, max_size=count)))


@pytest.mark.parametrize("name", zoo())
def test_the_proposed_checkpoints_keep_every_bit(name: str) -> None:
    program, _, _ = network(name)
    step = same_bits(name, [c for c in models.info(name, **narrow(name)).checkpoints if c in program])
    writers = {v.name for op in step.program.operators if op.role is Role.RECOMPUTE for v in op.writes()}
    assert all("@" in n for n in writers)
    moved = [op for op in step.program.operators if op.role is Role.RECOMPUTE and op.op.updates]
    assert not moved, "statistics may not move in a recomputed segment"


ONE_EACH = """alexnet amoebanet darts densenet121 fcn8 googlenet inception_v3 mobilenet_v1 mobilenet_v2 nasnet pspnet
    resnet50 segnet unet vgg11_bn"""


@pytest.mark.parametrize("name", ONE_EACH.split())
def test_forward_is_onnx_runtimes_and_training_stays_finite(name: str) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model, entry = models.build(name, batch=2, **narrow(name)), models.info(name, **narrow(name))
    feed = {spec.name: spec.sample(np.random.default_rng(5), batch=2) for spec in entry.inputs}
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, feed)
    (found,) = rc.Executor().run(rc.load(model, mode="eval"), feed, [entry.output])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * max(1.0, np.abs(expected).max()))
    before, after = network(name)[0].data, plain(name)[1].data
    assert all(np.isfinite(array).all() for array in after.values())
    moved = [key for key in models.parameters(model) if (before[key] != after[key]).any()]
    assert len(moved) > 0.9 * len(models.parameters(model))


@pytest.mark.parametrize(
    ("name", "options", "checkpoints", "share"),
    [
        ("resnet50", {"width": 16, "image": 64, "classes": 10}, "layer?.?.out", 0.55),
        ("bert-tiny", {"layers": 6, "seq": 64, "vocab": 100}, "layer.*.out", 0.55),
        ("gpt2-tiny", {"layers": 6, "seq": 64, "vocab": 100}, "h.*.out", 0.55),
    ],
)
def test_the_arena_shrinks(name: str, options: dict[str, Any], checkpoints: str, share: float) -> None:
    """Deep networks in segments: the arena falls to about (kept values + one segment) of the plain one."""
    from recompute.compiling.compiler import resolve_checkpoints

    program = rc.load(models.build(name, batch=8, **options))
    loss = rc.losses.cross_entropy(program).name
    names = [n for n in resolve_checkpoints(program, [checkpoints]) if n.count(".") == checkpoints.count(".")]
    figures = [
        compile_step(program, loss, rc.SGD(learning_rate=0.1), checkpoints=c, rebuild=c is not None).figures
        for c in (None, names)  # against a plain step that keeps everything
    ]
    assert figures[1].recomputed_operators > 0
    assert figures[1].arena_bytes < share * figures[0].arena_bytes
    assert figures[1].kept_bytes < 0.3 * figures[0].kept_bytes


@pytest.mark.parametrize(("name", "rate"), [("resnet50", 1e-3), ("bert-tiny", 5e-3)])
def test_the_loss_falls(name: str, rate: float) -> None:
    program, loss, feed = network(name)
    checkpoints = [c for c in models.info(name, **narrow(name)).checkpoints if c in program]
    step = compile_step(program, loss, rc.Adam(learning_rate=rate), checkpoints=checkpoints)
    program, executor = step.program.clone(), rc.Executor()
    losses = [float(executor.run(program, feed, [loss])[0]) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_figures_are_whole() -> None:
    program, loss, _ = network("lenet")
    figures = dataclasses.asdict(compile_step(program, loss, rc.SGD(learning_rate=0.1)).figures)
    assert figures["peak_bytes"] == figures["arena_bytes"] + figures["persistent_bytes"]
    assert figures["live_peak_bytes"] <= figures["peak_bytes"]
    assert figures["recomputed_operators"] == 0 and figures["repeated_flops"] == 0
