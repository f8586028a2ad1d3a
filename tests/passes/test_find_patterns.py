"""Normalisations and gated activations as one operator: where they are found, and that they compute the same."""

from __future__ import annotations

import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.attention import drawn

import recompute as rc
from recompute import parse, verify
from recompute.language.ir import Block
from recompute.passes.gradient.autodiff import differentiate
from recompute.passes.patterns.find_gates import FindGates, find_gates
from recompute.passes.patterns.find_norms import FindNorms, find_norms
from recompute.testing import evaluate, weighted_loss

ARCHIVE = Path(__file__).parents[1] / "data" / "attention" / "attention.zip"
NORMS = ("LayerNormalization", "RMSNormalization", "Swish", "Gelu", "Sqrt", "Sigmoid")
#: what is found in PyTorch's exports of Hugging Face's networks
FAMILIES: dict[str, tuple[int, ...]] = {
    "bloom.script": (6, 0, 0, 2, 0, 0),
    "clip_text.dynamo": (5, 0, 2, 0, 0, 0),
    "deberta.script": (5, 0, 0, 2, 0, 0),
    "gemma2_padded.dynamo": (0, 9, 0, 2, 0, 0),
    "gpt2.dynamo": (5, 0, 0, 2, 0, 0),
    "gpt2_eager.script": (5, 0, 0, 2, 0, 0),
    "llama.dynamo": (0, 5, 2, 0, 0, 0),
    "llama_padded.script": (0, 5, 2, 0, 0, 0),
    "t5.script": (0, 7, 0, 0, 0, 0),
}


def found(block: Block) -> Block:
    return verify(FindGates().run(FindNorms().run(block)))


def counts(block: Block) -> tuple[int, ...]:
    names = Counter(o.op.name for o in block.operators)
    return tuple(names[n] for n in NORMS)


def gradients(block: Block, feed: dict[str, np.ndarray], data: Any) -> list[np.ndarray]:
    """The loss, a weighted sum of the first output, and all gradients."""
    scalar, loss = weighted_loss(block, block.outputs[:1])
    made, pairs = differentiate(scalar, loss)
    program = rc.Program(made, {v.name: data[v.name] for v in made.declared() if v.name in data})
    names = [loss, *(g.name for _, g in sorted(pairs, key=lambda pair: pair[0].name))]
    return rc.Executor(providers=("numpy",), schedule=False).run(program, feed, names)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    with zipfile.ZipFile(ARCHIVE) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p = rc.load(drawn.fill(archive.read(f"{name}.onnx")), batch=2, mode="train")
    after = found(p.block)
    assert counts(after) == FAMILIES[name]
    g = np.random.default_rng(1)
    feed = {}
    for v in p.block.inputs:
        mask = "mask" in v.name or v.name == "input_1"
        feed[v.name] = np.ones(v.shape, v.type.numpy) if mask else g.integers(3, 31, v.shape)
    for got, want in zip(gradients(after, feed, p.data), gradients(p.block, feed, p.data), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5 * max(float(np.abs(want).max()), 0.05))


def norm(**changed: str) -> Block:
    """An RMS normalisation, or what looks like one."""
    lines = {
        "x2": "f32[2,3,4] = Mul(%x, %x)",
        "m": "f32[2,3,1] = ReduceMean(%x2) {axes=[-1]}",
        "a": "f32[2,3,1] = Add(%m, %eps)",
        "s": "f32[2,3,1] = Sqrt(%a)",
        "n": "f32[2,3,4] = Div(%x, %s)",
        "y": "f32[2,3,4] = Mul(%n, %w)",
    } | changed
    head = "  input %x: f32[2,3,4]\n  input %u: f32[2,3,4]\n  input %w: f32[4]\n  input %full: f32[2,3,4]\n"
    body = "".join(f"  %{name}: {text}\n" for name, text in lines.items())
    return verify(parse(f"program p {{\n{head}  const %eps: f32[] = [0.01]\n{body}  output %y\n}}"))


LOOK_ALIKES: dict[str, dict[str, str]] = {
    "another is divided": {"n": "f32[2,3,4] = Div(%u, %s)"},
    "another is squared": {"x2": "f32[2,3,4] = Mul(%u, %u)"},
    "no square": {"x2": "f32[2,3,4] = Mul(%x, %u)"},
    "not the last axis": {
        "m": "f32[2,1,4] = ReduceMean(%x2) {axes=[1]}", "a": "f32[2,1,4] = Add(%m, %eps)", "s": "f32[2,1,4] = Sqrt(%a)"
    },
    "a scale for each element": {"y": "f32[2,3,4] = Mul(%n, %full)"},
    "the normalised rows are read twice": {"y": "f32[2,3,4] = Mul(%n, %n)"},
    "an epsilon that is computed": {"a": "f32[2,3,1] = Add(%m, %m)"},
}  # fmt: skip


def test_a_norm_is_found() -> None:
    assert [o.op.name for o in find_norms(norm()).operators] == ["RMSNormalization"]


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_only_looks_like_a_norm_stays(name: str) -> None:
    block = norm(**LOOK_ALIKES[name])
    assert find_norms(block) is block


def test_casts_around_a_norm_are_part_of_it() -> None:
    text = """program p {
  input %x: f16[2,4]
  input %w: f16[4]
  const %eps: f32[] = [0.01]
  %c: f32[2,4] = Cast(%x) {to="f32"}
  %x2: f32[2,4] = Mul(%c, %c)
  %m: f32[2,1] = ReduceMean(%x2) {axes=[-1]}
  %a: f32[2,1] = Add(%m, %eps)
  %s: f32[2,1] = Sqrt(%a)
  %r: f32[2,1] = Reciprocal(%s)
  %n: f32[2,4] = Mul(%c, %r)
  %h: f16[2,4] = Cast(%n) {to="f16"}
  %y: f16[2,4] = Mul(%w, %h)
  output %y
}"""
    before = verify(parse(text))
    after = verify(find_norms(before))
    assert [o.op.name for o in after.operators] == ["RMSNormalization"]
    feed = {"x": np.arange(8, dtype="f2").reshape(2, 4), "w": np.array([1, 2, 0.5, 3], "f2")}
    (got,), (want,) = evaluate(after, feed, ["y"]), evaluate(before, feed, ["y"])
    np.testing.assert_allclose(got, want, rtol=2e-3)


@pytest.mark.parametrize(
    "body",
    [
        "  %g: f32[4] = Sigmoid(%x)\n  %y: f32[4] = Mul(%u, %g)\n",
        "  %g: f32[4] = Sigmoid(%x)\n  %h: f32[4] = Mul(%x, %g)\n  %y: f32[4] = Mul(%h, %g)\n",
        "  %z: f32[4] = Mul(%x, %u)\n  %g: f32[4] = Sigmoid(%z)\n  %y: f32[4] = Mul(%x, %g)\n",
        "  %g: f32[4] = Tanh(%x)\n  %h: f32[4] = Add(%g, %one)\n  %y: f32[4] = Mul(%x, %h)\n",
        "  %g: f32[4] = Erf(%x)\n  %h: f32[4] = Add(%g, %one)\n  %k: f32[4] = Mul(%x, %h)\n"
        "  %y: f32[4] = Mul(%k, %half)\n",
    ],
)  # fmt: skip
def test_what_only_looks_like_a_gate_stays(body: str) -> None:
    head = "  input %x: f32[4]\n  input %u: f32[4]\n  const %one: f32[] = [1.0]\n  const %half: f32[] = [0.5]\n"
    block = verify(parse(f"program p {{\n{head}{body}  output %y\n}}"))
    assert find_gates(block) is block
