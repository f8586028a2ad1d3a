"""Products without transposes around them."""

from __future__ import annotations

import numpy as np

from recompute.language.text import parse, show
from recompute.language.verify import verify
from recompute.passes.lowering.fold_transposes import FoldTransposes
from recompute.testing import evaluate

_BEFORE = """
program p {
  input %x: f32[4,8]
  input %dy: f32[4,6]
  input %a: f32[2,3,5]
  input %b: f32[2,4,5]
  param %w: f32[6,8]
  %wt: f32[8,6] = Transpose(%w) {perm=[1,0]}
  %y: f32[4,6] = MatMul(%x, %wt)
  %dx: f32[4,8] = MatMul(%dy, %wt) {transB=1}
  %bt: f32[2,5,4] = Transpose(%b) {perm=[0,2,1]}
  %ab: f32[2,3,4] = MatMul(%a, %bt)
  %dwt: f32[8,6] = MatMul(%x, %dy) {transA=1}
  %dw: f32[6,8] = Transpose(%dwt) {perm=[1,0]}
  %g: f32[4,6] = Gemm(%x, %wt)
  %kept: f32[8,4] = Transpose(%x) {perm=[1,0]}
  output %y, %dx, %ab, %dw, %g, %kept
}
"""


def test_operands_and_results() -> None:
    """Every Transpose beside a product goes, one that is asked for stays; the numbers are the same."""
    block = verify(parse(_BEFORE))
    after = verify(FoldTransposes().run(block))
    assert [op.op.name for op in after.operators].count("Transpose") == 1
    assert "%y: f32[4,6] = MatMul(%x, %w) {transB=1}" in show(after)
    assert "%dx: f32[4,8] = MatMul(%dy, %w)\n" in show(after)
    assert "%dw: f32[6,8] = MatMul(%dy, %x) {transA=1}" in show(after)
    draw = np.random.default_rng(3)
    feed = {v.name: draw.standard_normal(v.shape).astype(np.float32) for v in (*block.inputs, *block.parameters)}
    for got, expected in zip(evaluate(after, feed), evaluate(block, feed), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_not_across_an_update() -> None:
    """A product after an update of the weights reads what was transposed before it."""
    text = """
program p {
  input %x: f32[4,8]
  input %g: f32[6,8]
  state %w: f32[6,8]
  const %lr: f32[] = [0.5]
  %wt: f32[8,6] = Transpose(%w) {perm=[1,0]}
  optimize %w: f32[6,8] = SGDUpdate(%w, %g, %lr)
  %y: f32[4,6] = MatMul(%x, %wt)
  output %y
}
"""
    block = verify(parse(text))
    assert FoldTransposes().run(block) == block
