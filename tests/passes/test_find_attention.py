"""Attention as one operator: where it is found, that it computes the same, and that it keeps no scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute import models, parse, verify
from recompute.language.program import Program
from recompute.passes.attention.find_attention import find_attention
from recompute.testing import evaluate

RNG = np.random.default_rng(0)


def block(body: str, declared: str = "") -> Any:
    """A block with queries, keys, values [2, 3, 40, 8] and further declarations."""
    inputs = "".join(f"  input %{n}: f32[2,3,40,8]\n" for n in "qkv")
    return verify(parse(f"program p {{\n{inputs}{declared}{body}  output %y\n}}"))


SCORES = "  %s: f32[2,3,40,40] = MatMul(%q, %k) {transB=1}\n"
END = "  %y: f32[2,3,40,8] = MatMul(%w, %v)\n"
FORMS = {
    "plain": (SCORES + "  %w: f32[2,3,40,40] = Softmax(%s)\n" + END, ""),
    "scaled after": (
        SCORES + "  %t: f32[2,3,40,40] = Div(%s, %c)\n  %w: f32[2,3,40,40] = Softmax(%t)\n" + END,
        "  const %c: f32[] = [2.8]\n",
    ),
    "transposed keys": (
        "  %kt: f32[2,3,8,40] = Transpose(%k) {perm=[0,1,3,2]}\n  %s: f32[2,3,40,40] = MatMul(%q, %kt)\n"
        "  %w: f32[2,3,40,40] = Softmax(%s)\n" + END,
        "",
    ),
    "bias and mask": (
        SCORES + "  %a: f32[2,3,40,40] = Add(%b, %s)\n  %m: f32[2,3,40,40] = Where(%hide, %low, %a)\n"
        "  %w: f32[2,3,40,40] = Softmax(%m)\n" + END,
        "  input %b: f32[1,40]\n  input %hide: bool[40,40]\n  const %low: f32[] = [-1e38]\n",
    ),
    "casts": (
        SCORES + "  %d: f64[2,3,40,40] = Cast(%s) {to=\"f64\"}\n  %e: f64[2,3,40,40] = Softmax(%d)\n"
        "  %w: f32[2,3,40,40] = Cast(%e) {to=\"f32\"}\n" + END,
        "",
    ),
}  # fmt: skip


def feed(b: Any) -> dict[str, np.ndarray]:
    drawn = {v.name: RNG.standard_normal(v.shape).astype(np.float32) for v in b.inputs}
    return {v.name: np.tri(*v.shape, -1, dtype=bool).T if v.dtype == "bool" else drawn[v.name] for v in b.inputs}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_attention_are_found(form: str) -> None:
    """And compute the same, with their gradients."""
    before = block(*FORMS[form])
    after, notes = find_attention(before)
    assert notes == ["'y' is attention"]
    names = [op.op.name for op in after.operators]
    assert "TiledAttention" in names and "Softmax" not in names
    given = feed(before)
    np.testing.assert_allclose(*(evaluate(b, given, ["y"])[0] for b in (before, after)), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("body", "declared", "why"),
    [
        (SCORES + "  %w: f32[2,3,40,40] = Softmax(%s) {axis=2}\n" + END, "", "it is along axis 2"),
        (
            SCORES + "  %w: f32[2,3,40,40] = Softmax(%s)\n  %z: f32[2,3,40,40] = Relu(%w)\n" + END,
            "",
            "'w' has 2 readers",
        ),
        (
            SCORES + "  %t: f32[2,3,40,40] = Mul(%s, %b)\n  %w: f32[2,3,40,40] = Softmax(%t)\n" + END,
            "  input %b: f32[40,40]\n",
            "scaled by what is no constant",
        ),
        ("  %w: f32[2,3,40,40] = Softmax(%s)\n" + END, "  input %s: f32[2,3,40,40]\n", "its scores are no product"),
        (
            SCORES + "  %t: f32[2,3,40,40] = Relu(%s)\n  %w: f32[2,3,40,40] = Softmax(%t)\n" + END,
            "",
            "a Relu makes its scores",
        ),
    ],
)  # fmt: skip
def test_what_only_looks_like_it_stays(body: str, declared: str, why: str) -> None:
    """With the reason."""
    before = block(body, declared)
    after, notes = find_attention(before)
    assert after is before and len(notes) == 1 and why in notes[0]


def step(fused: bool, **options: Any) -> tuple[Program, dict[str, np.ndarray]]:
    """GPT-2 without dropout: forward pass and loss."""
    program = rc.load(models.build("gpt2-tiny", batch=2, context=1024, **options), mode="eval")
    if fused:
        assert all(n.endswith("is attention") for n in rc.fuse_attention(program))
    rc.losses.cross_entropy(program)
    g = np.random.default_rng(1)
    return program, {v.name: g.integers(0, 90, v.shape) for v in program.inputs}


@pytest.mark.parametrize("place", [None, rc.EmulatedCUDAPlace()], ids=["cpu", "device"])
def test_training_is_the_same(place: Any) -> None:
    """Losses of some steps, within rounding; predicted = measured."""
    losses = []
    for fused in (False, True):
        program, given = step(fused, seq=24)
        rc.SGD(0.05).minimize(program["loss"])
        executor = rc.Executor(place)
        losses.append([float(executor.run(program, given, ["loss"])[0]) for _ in range(3)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_memory_grows_with_the_sequence() -> None:
    """Twice the sequence takes about twice the memory, and recomputing gives the same bits."""
    peaks = []
    for sequence in (512, 1024):
        program, _ = step(True, seq=sequence)
        made = rc.compile_step(program, "loss", rc.SGD(0.1))
        peaks.append(made.figures.peak_bytes - made.figures.persistent_bytes)
    assert peaks[1] < 2.1 * peaks[0]
    program, given = step(True, seq=24)
    found = []
    for optimizer in (rc.SGD(0.1), rc.RecomputeOptimizer(rc.SGD(0.1)).set_checkpoints(["h.1.ln_1"])):
        other = program.clone()
        optimizer.minimize(other["loss"])
        executor = rc.Executor()
        found.append([executor.run(other, given, ["loss"])[0].tobytes() for _ in range(3)])
    assert found[0] == found[1]


def test_a_fused_step_is_exported() -> None:
    """ONNX Runtime computes the same loss; the trained model keeps its own form of attention."""
    ort = pytest.importorskip("onnxruntime")
    program, given = step(True, seq=24)
    rc.SGD(0.05).minimize(program["loss"])
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = rc.export_step(program)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (theirs,) = session.run(["loss"], given)
    (ours,) = rc.Executor().run(program, given, ["loss"])
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert "Softmax" in {n.op_type for n in rc.export_trained(program).graph.node}
