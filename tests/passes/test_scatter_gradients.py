"""Gradients of embeddings that are added row by row."""

from __future__ import annotations

import numpy as np
import pytest

import recompute as rc
from recompute.language.text import parse
from recompute.language.verify import verify
from recompute.passes.lowering.scatter_gradients import ScatterGradients
from recompute.testing import evaluate

_TIED = """
program p {
  input %ids: i64[3,4]
  input %dy: f32[3,4,8]
  input %dense: f32[16,8]
  %rows: f32[16,8] = GatherGrad(%ids, %dy) {shape=[16,8]}
  %dw: f32[16,8] = Add(SIDES)
  output %dw
}
"""


@pytest.mark.parametrize("sides", ["%rows, %dense", "%dense, %rows"])
def test_numbers(sides: str) -> None:
    block = verify(parse(_TIED.replace("SIDES", sides)))
    after = verify(ScatterGradients().run(block))
    assert [op.op.name for op in after.operators] == ["AddRows"]
    draw = np.random.default_rng(0)
    feed = {v.name: draw.standard_normal(v.shape).astype("f4") for v in block.inputs if v.type.is_float}
    feed["ids"] = draw.integers(-16, 16, (3, 4))
    (found,), (wanted,) = evaluate(after, feed), evaluate(block, feed)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("output %dw", "output %dw, %rows"),  # somebody else reads it
        ("f32[3,4,8]", "f32[30,4,8]"),  # more gradients than rows to keep them for
        ("Add(SIDES)", "Add(%rows, %rows)"),
    ],
)
def test_left_alone(old: str, new: str) -> None:
    text = _TIED.replace(old, new).replace("SIDES", "%rows, %dense")
    if "30" in new:
        text = text.replace("i64[3,4]", "i64[30,4]")
    block = verify(parse(text))
    assert ScatterGradients().run(block) == block


def test_a_tied_network_trains_alike_and_takes_less() -> None:
    options = {"layers": 1, "hidden": 64, "heads": 2, "vocab": 4096, "seq": 16, "dropout": 0.0}
    program = rc.load(rc.models.build("gpt2-tiny", batch=2, seed=0, **options))
    loss = rc.losses.cross_entropy(program["logits"]).name
    draw = np.random.default_rng(0)
    feed = {"input_ids": draw.integers(0, 4096, (2, 16)), "label": draw.integers(0, 4096, (2, 16))}
    peaks, losses = [], []
    for providers in (None, ("numpy",)):
        step = rc.compile_step(program, loss, rc.Adam(1e-2), **({"providers": providers} if providers else {}))
        names = [op.op.name for op in step.program.block.operators]
        executor = rc.Executor(providers=providers)
        losses.append([float(executor.run(step.program, feed, [loss])[0]) for _ in range(3)])
        peaks.append(step.figures.peak_bytes)
        if providers is None and "AddRows" not in names:
            pytest.skip("no kernel for it here")
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
