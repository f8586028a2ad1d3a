"""Every operator with element types that its samples do not have: the type rule refuses them, or the numerics run."""

from __future__ import annotations

import numpy as np
import pytest

from recompute import Program, RecomputeError, parse, show, verify
from recompute.errors import JobError
from recompute.language.types import TensorType
from recompute.runtime import Executor
from recompute.testing import all_ops, case_block, cases


def contents(t: TensorType) -> np.ndarray:
    return (np.arange(t.size) % 2).reshape(t.shape).astype(t.numpy)


@pytest.mark.parametrize("dtype", ["bool", "u8", "i32", "u64", "bf16"])
def test_other_element_types_are_refused_or_run(dtype: str) -> None:
    ran, wrong = 0, []
    for cls in all_ops():
        if cls.__name__ == "Reference":  # which asks ONNX's evaluator, and says what that gives
            continue
        for case in cases(cls)[:3]:
            text = show(case_block(case)[0])
            for old in ("f64", "f32"):
                if old not in text:
                    continue
                try:
                    block = verify(parse(text.replace(old, dtype)))
                except RecomputeError:
                    continue
                try:
                    run = Program(block, {v.name: contents(v.type) for v in block.state})
                    feed = {v.name: contents(v.type) for v in block.inputs}
                    Executor(providers=("numpy",)).run(run, feed, block.outputs)
                    ran += 1
                except JobError as e:
                    if "Error" in str(e):
                        wrong.append(str(e))
    assert not wrong, "\n".join(wrong)
    assert ran > 100


def test_regions_that_are_no_numbers_or_far_away() -> None:
    """MaxRoiPool: a region beyond all sides is the whole image, one without numbers an error that says so."""
    text = "program p {\n  input %x: f32[1,1,2,3]\n  input %r: f32[1,5]\n  %y: f32[1,1,1,1] = MaxRoiPool(%x, %r) {A}\n}"
    block = verify(
        parse(text.replace("{A}", "{pooled_shape=[1,1], spatial_scale=1e30}").replace("\n}", "\n  output %y\n}"))
    )
    x = np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3)

    def pooled(*roi: float) -> float:
        (y,) = Executor(providers=("numpy",)).run(Program(block), {"x": x, "r": np.array([roi], np.float32)}, ["y"])
        return float(y.reshape(()))

    assert pooled(0, -1e30, -1e30, 1e30, 1e30) == 5
    assert pooled(0, -np.inf, -np.inf, np.inf, np.inf) == 5
    for roi in ((np.inf, 0, 0, 1, 1), (np.nan, 0, 0, 1, 1), (1, 0, 0, 1, 1), (-1, 0, 0, 1, 1), (0, np.nan, 0, 1, 1)):
        with pytest.raises(JobError, match=r"is out of range for 1 images|is NaN"):
            pooled(*roi)


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_regions_larger_than_any_image(mode: str) -> None:
    """RoiAlign takes a sample an element where nobody says how many: not of a region of 1e9 elements."""
    text = (
        "program p {\n  input %x: f32[1,1,2,3]\n  input %r: f32[1,4]\n  input %i: i64[1]\n  %y: f32[1,1,1,1] = "
        f'RoiAlign(%x, %r, %i) {{output_height=1, output_width=1, mode="{mode}"}}\n  output %y\n}}'
    )
    feed = {
        "x": np.ones((1, 1, 2, 3), np.float32),
        "r": np.array([[0, 0, 1e9, 1]], np.float32),
        "i": np.zeros(1, np.int64),
    }
    with pytest.raises(JobError, match=r"a region has 1e\+09 elements a bin: give a sampling_ratio"):
        Executor(providers=("numpy",)).run(Program(verify(parse(text))), feed, ["y"])
    with pytest.raises(RecomputeError, match="sampling_ratio is 4096 at the most"):
        verify(parse(text.replace("mode=", "sampling_ratio=5000, mode=")))


def test_a_width_of_nothing_is_refused() -> None:
    """Celu divides by alpha, its gradient does when it is made."""
    text = "program p {\n  input %x: f32[2]\n  %y: f32[2] = Celu(%x) {alpha=0.0}\n  output %y\n}"
    with pytest.raises(RecomputeError, match="divides by its alpha, which is 0"):
        verify(parse(text))
    with pytest.raises(RecomputeError, match="divides by its width, which is 0"):
        verify(parse(text.replace("Celu(%x) {alpha=0.0}", "UnitGrad(%x, %x) {gain=1.0, height=1.0, width=0.0}")))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("%y: f32[1,1,0,3] = MaxRoiPool(%x, %r) {pooled_shape=[0,3], spatial_scale=1}", "at least 1 by 1"),
        ("%y: f32[1,1,0,3] = RoiAlign(%x, %s, %n) {output_height=0, output_width=3}", "must be at least 1"),
        ("%y: f32[1,2,3] = Im2Col(%x) {image=[1,3], block=[1,1], strides=[0,1]}", "dilations must be positive"),
        ("%y: f32[1,2,3] = Im2Col(%x) {image=[1,3], block=[1,1,1]}", "need the same axes"),
        ("%y: u8[2,2] = Gemm(%u, %u) {alpha=-inf}", "whole numbers of their type"),
        ("%y: u8[2,2] = Gemm(%u, %u, %u) {beta=0.5}", "whole numbers of their type"),
        ("%y: u8[2,2] = Gemm(%u, %u) {alpha=256}", "whole numbers of their type"),
        ("%y: f32[2,3,1,1] = Transpose(%x) {perm=[false,2,3,1]}", "should be tuple"),
    ],
)
def test_attributes_that_cannot_be(line: str, why: str) -> None:
    inputs = {"x": "f32[1,1,2,3]", "r": "f32[1,5]", "s": "f32[1,4]", "n": "i64[1]", "u": "u8[2,2]"}
    declared = "".join(f"  input %{n}: {t}\n" for n, t in inputs.items())
    with pytest.raises(RecomputeError, match=why):
        verify(parse(f"program p {{\n{declared}  {line}\n  output %y\n}}"))
