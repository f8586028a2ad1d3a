"""Parameters that are transposed before they are multiplied: in 16 bits their cast is transposed."""

from __future__ import annotations

from recompute.language.text import parse, show
from recompute.language.verify import verify
from recompute.passes import Precision

_TIED = """
program p {
  input %x: f32[4,8]
  param %w: f32[6,8]
  param %pair: f32[8,4]
  %wt: f32[8,6] = Transpose(%w) {perm=[1,0]}
  %y: f32[4,6] = MatMul(%x, %wt)
  %first: f32[8,2], %second: f32[8,2] = Split(%pair) {axis=1, sizes=[2,2]}
  %a: f32[4,2] = MatMul(%x, %first)
  %b: f32[4,2] = MatMul(%x, %second)
  output %y, %a, %b
}
"""


def test_the_cast_comes_first_and_the_name_stays() -> None:
    text = show(verify(Precision("bf16").run(verify(parse(_TIED)))))
    assert "Transpose(%w.bf16)" in text and "Cast(%wt)" not in text
    assert "%wt: f32[8,6] = Transpose(%w)" in text  # somebody may have named it a checkpoint


def test_parts_of_a_parameter_stay_different() -> None:
    text = show(verify(Precision("bf16").run(verify(parse(_TIED)))))
    assert "Cast(%first)" in text and "Cast(%second)" in text


def test_not_across_an_update() -> None:
    block = verify(
        parse("""
program p {
  input %x: f32[4,8]
  input %g: f32[6,8]
  param %w: f32[6,8]
  const %lr: f32[] = [0.5]
  %wt: f32[8,6] = Transpose(%w) {perm=[1,0]}
  %w: f32[6,8] = SGDUpdate(%w, %g, %lr)
  %y: f32[4,6] = MatMul(%x, %wt)
  output %y
}
""")
    )
    assert "Cast(%wt)" in show(verify(Precision("bf16").run(block)))
