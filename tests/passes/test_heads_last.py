"""Attention without transposes around it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.data.batches import synthetic_batch
from recompute.language.text import parse, show
from recompute.language.verify import verify
from recompute.passes import sequence
from recompute.passes.lowering.heads_last import HeadsLast
from recompute.testing import evaluate

_BEFORE = """
program p {
  input %x: f32[2,5,3,4]
  input %k: f32[2,3,6,4]
  input %v: f32[2,6,3,4]
  input %dz: f32[2,5,3,4]
  %q: f32[2,3,5,4] = Transpose(%x) {perm=[0,2,1,3]}
  %w: f32[2,3,6,4] = Transpose(%v) {perm=[0,2,1,3]}
  %y: f32[2,3,5,4], %lse: f32[2,3,5] = TiledAttention(%q, %k, %w) {scale=0.5}
  %z: f32[2,5,3,4] = Transpose(%y) {perm=[0,2,1,3]}
  %again: f32[2,5,3,4] = Transpose(%y) {perm=[0,2,1,3]}
  %sum: f32[2,5,3,4] = Add(%z, %again)
  %dy: f32[2,3,5,4] = Transpose(%dz) {perm=[0,2,1,3]}
  %dq: f32[2,3,5,4], %dk: f32[2,3,6,4], %dw: f32[2,3,6,4] = TiledAttentionGrad(%q, %k, %w, _, %y, %lse, %dy) {scale=0.5}
  %dx: f32[2,5,3,4] = Transpose(%dq) {perm=[0,2,1,3]}
  %dv: f32[2,6,3,4] = Transpose(%dw) {perm=[0,2,1,3]}
  output %sum, %dx, %dk, %dv
}
"""


def same(before: Any, after: Any) -> None:
    draw = np.random.default_rng(3)
    feed = {v.name: draw.standard_normal(v.shape).astype(np.float32) for v in (*before.inputs, *before.parameters)}
    for got, expected in zip(evaluate(after, feed), evaluate(before, feed), strict=True):
        assert np.array_equal(got, expected)


def test_operands_and_results() -> None:
    """Every Transpose goes: keys that have none stay as they are, a result that is turned twice is one value."""
    block = verify(parse(_BEFORE))
    after = verify(HeadsLast().run(block))
    assert [op.op.name for op in after.operators] == ["HeadsLastTiledAttention", "Add", "HeadsLastTiledAttentionGrad"]
    text = show(after)
    assert "%z: f32[2,5,3,4], %lse: f32[2,3,5] = HeadsLastTiledAttention(%x, %k, %v) {" in text
    assert "activations=[0,2], results=[0]" in text and "activations=[0,2,4,6], results=[0,2]" in text
    assert "%sum: f32[2,5,3,4] = Add(%z, %z)" in text
    same(block, after)


@pytest.mark.parametrize(
    ("change", "left"),
    [(("output %sum", "output %y, %sum"), 2),  # the result is asked for: its Transposes stay, and the gradient reads it
     (("Add(%z, %again)", "Add(%z, %again)\n  %other: f32[2,3,5,4] = Relu(%y)"), 2),
     (("output %sum", "output %z, %again, %sum"), 2),  # two names for one value
     (("output %sum", "output %q, %sum"), 1)],
)  # fmt: skip
def test_what_others_read_stays(change: tuple[str, str], left: int) -> None:
    block = verify(parse(_BEFORE.replace(*change)))
    after = verify(HeadsLast().run(block))
    assert [op.op.name for op in after.operators].count("Transpose") == left
    same(block, after)


def test_a_result_that_only_the_gradient_reads_is_turned_with_its_clones() -> None:
    text = _BEFORE.replace("%z: f32[2,5,3,4] = Transpose(%y) {perm=[0,2,1,3]}", "%z: f32[2,5,3,4] = Relu(%x)")
    text = text.replace("%again: f32[2,5,3,4] = Transpose(%y) {perm=[0,2,1,3]}", "%again: f32[2,5,3,4] = Relu(%x)")
    block = verify(parse(text))
    after = verify(HeadsLast().run(block))
    assert "%y.last: f32[2,5,3,4], %lse" in show(after)
    same(block, after)


def test_not_across_an_update() -> None:
    """Attention after an update of what was transposed before it."""
    text = """
program p {
  input %g: f32[5,3,4]
  state %w: f32[5,3,4]
  const %lr: f32[] = [0.5]
  %q: f32[3,5,4] = Transpose(%w) {perm=[1,0,2]}
  optimize %w: f32[5,3,4] = SGDUpdate(%w, %g, %lr)
  %y: f32[3,5,4], %lse: f32[3,5] = TiledAttention(%q, %q, %q)
  output %y
}
"""
    block = verify(parse(text))
    assert HeadsLast().run(block) == block


def test_without_a_kernel_for_it_nothing_is_folded() -> None:
    block = verify(parse(_BEFORE))
    assert HeadsLast(("numba",)).run(block) == block  # too little for a kernel


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-mini", "vit-tiny"])
def test_networks_keep_their_bits(name: str, monkeypatch: Any) -> None:
    """Fewer transposes, and no more memory."""
    pytest.importorskip("llvmlite")

    def trained() -> tuple[Any, int, int]:
        program = rc.load(rc.models.build(name), batch=8, seed=1)
        kind, _ = rc.losses.natural_loss(program)
        loss = program[kind] if kind in program else getattr(rc.losses, kind)(program)
        made = rc.compile_step(program, loss, rc.SGD(0.1))
        entry = rc.models.info(name)
        feed = synthetic_batch(made.program, 0, {s.name: s for s in entry.inputs})
        executor = rc.Executor()
        losses = [executor.run(made.program, feed, [loss.name])[0] for _ in range(2)]
        names = [op.op.name for op in executor.planned(made.program).operators]
        return losses, names.count("Transpose"), made.figures.peak_bytes

    found, few, peak = trained()
    monkeypatch.setattr(sequence, "HeadsLast", lambda names: type("Nothing", (HeadsLast,), {"run": lambda s, b: b})())
    plain, many, before = trained()
    assert np.array_equal(found, plain)
    assert few < many and peak <= before, (few, many, peak, before)
