"""Training steps as text: tests/golden/steps/NAME.rir lists the passes of a step, and the step that they make.

`pytest --update-golden` rewrites the texts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.language.program import Program
from recompute.language.text import parse, show
from recompute.passes.base import Pass, apply_passes
from recompute.training.modes import evaluation_passes
from recompute.training.pipeline import pipeline

FOLDER = Path(__file__).parents[1] / "golden" / "steps"
SOURCE = """program mlp {
  input %x: f32[4,6]
  input %label: i64[4]
  param %w1: f32[6,8]
  param %b1: f32[8]
  param %w2: f32[8,4]
  %p: f32[4,8] = MatMul(%x, %w1)
  %h: f32[4,8] = Add(%p, %b1)
  %r: f32[4,8] = Relu(%h)
  %q: f32[4,4] = MatMul(%r, %w2)
  loss %loss: f32[] = SoftmaxCrossEntropyLoss(%q, %label)
  output %loss
}
"""
CLIP = rc.clip.ClipGradByGlobalNorm(1.0)

CASES: dict[str, Callable[[], Any]] = {
    "clipped": lambda: rc.Adam(grad_clip=CLIP),
    "scaled_and_averaged": lambda: rc.EMA(rc.MixedPrecision(rc.SGD(0.1), "fp16")),
    "offloaded": lambda: rc.RecomputeOptimizer(rc.SGD(0.1)).set_checkpoints(["h"]).set_offload(),
    "merged": lambda: rc.GradientMerge(rc.SGD(0.1), 2, avg=False, batch=4),
    "zero": lambda: rc.DataParallel(rc.Adam(grad_clip=CLIP), rc.Mesh.of(dp=2), 1, zero=1, batch=4),
    "tensor_parallel": lambda: rc.DataParallel(rc.SGD(0.1, grad_clip=CLIP), rc.Mesh.of(tp=2), 1, batch=4),
    "stages": lambda: rc.DataParallel(
        rc.SGD(0.1, grad_clip=CLIP), rc.Mesh.of(pp=2), 0, batch=4, micro_batches=2, cuts=["r"]
    ),
}


def made(name: str) -> tuple[Program, list[Pass]]:
    """The step of a case, made by its list of passes, and the list."""
    block = parse(SOURCE)
    g = np.random.default_rng(0)
    program = Program(block, {v.name: g.standard_normal(v.shape).astype("f4") for v in block.parameters})
    spec = CASES[name]().spec
    program.slices, program.mesh = spec.whole, None if spec.parallel is None else spec.parallel.mesh
    passes = pipeline(spec, program, "loss")
    apply_passes(program, passes)
    return program, passes


@pytest.mark.parametrize("name", CASES)
def test_step(name: str, request: pytest.FixtureRequest) -> None:
    program, passes = made(name)
    text = "".join(f"; {p}\n" for p in passes) + show(program.block)
    if program.sharded or program.divided:
        forward = Program(program.forward_block, program.data)
        forward.divided = program.divided
        evaluation = evaluation_passes(program)
        apply_passes(forward, evaluation)
        text += "\n" + "".join(f"; {p}\n" for p in evaluation) + show(forward.block)
    path = FOLDER / f"{name}.rir"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text


def test_no_file_is_left_over() -> None:
    assert {p.stem for p in FOLDER.glob("*.rir")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_optimizers_make_the_same(name: str) -> None:
    listed, _ = made(name)
    block = parse(SOURCE)
    g = np.random.default_rng(0)
    program = Program(block, {v.name: g.standard_normal(v.shape).astype("f4") for v in block.parameters})
    CASES[name]().minimize(program["loss"])
    assert program.block == listed.block and program.gradients == listed.gradients
    assert set(program.data) == set(listed.data)
    for n, array in program.data.items():
        assert np.array_equal(array, listed.data[n])
