"""What ranks must begin with alike in a program that was written by hand, and what may be their own."""

from __future__ import annotations

import numpy as np
import pytest

import recompute as rc
from recompute.communication.mesh import Mesh
from recompute.communication.replicated import replicated

HEAD = """program p {
  input %x: f32[2,3]
  input %y: f32[2,4]
  param %w: f32[3,4]
  state %m: f32[3,4]
  state %lr: f32[]
  %e: f32[2,4] = Gemm(%x, %w)
  %d: f32[2,4] = Sub(%e, %y)
  %g: f32[3,4] = Gemm(%x, %d) {transA=1}
"""
SUM = """  communicate %s: f32[3,4] = AllReduce(%g) {axis="dp", ranks=2, number=0}
  communicate %t: f32[3,4] = CommWait(%s, %g)
"""
STEP = "  %w: f32[3,4], %m: f32[3,4] = MomentumUpdate(%w, %t, %m, %lr) {momentum=0.9}\n"


def block(*lines: str) -> rc.Block:
    return rc.verify(rc.parse(HEAD + "".join(lines) + "  output %e\n}"))


def axes(*lines: str) -> dict[str, set[str]]:
    return {name: set(found.axes) for name, found in replicated(block(*lines)).items()}


def test_gradients_that_are_summed() -> None:
    assert axes(SUM, STEP) == {"w": {"dp"}, "m": {"dp"}, "lr": {"dp"}}


def test_gradients_of_each_rank() -> None:
    """Only a sum of something else communicates: each rank trains weights of its own."""
    assert axes(SUM, STEP.replace("%t", "%g")) == {}


def test_sums_along_one_of_two_axes() -> None:
    assert axes(SUM.replace("dp", "tp"), STEP) == {"w": {"tp"}, "m": {"tp"}, "lr": {"tp"}}
    both = SUM.replace("%t:", "%h:") + SUM.replace("%g", "%h").replace('"dp"', '"tp"').replace("%s", "%u")
    assert axes(both, STEP)["w"] == {"dp", "tp"}


def test_weights_that_a_step_makes_the_same_may_differ_before() -> None:
    """Means of weights that ranks have trained by themselves for a while."""
    mean = """  const %half: f32[] = [0.5]
  communicate %s: f32[3,4] = AllReduce(%w) {axis="dp", ranks=2, number=0}
  communicate %t: f32[3,4] = CommWait(%s, %w)
  %mean: f32[3,4] = Mul(%t, %half)
  %apart: f32[3,4] = Sub(%w, %mean)
  %w: f32[3,4] = SGDUpdate(%w, %apart, %lr)
"""
    assert axes(mean) == {}


def test_parts_of_weights_are_each_rank_s_own() -> None:
    """A sum in the forward pass; what follows reads each rank's inputs."""
    parts = SUM.replace("3,4", "2,4").replace("%g", "%e")
    step = """  %c: f32[2,4] = Sub(%t, %y)
  %f: f32[3,4] = Gemm(%x, %c) {transA=1}
""" + STEP.replace("%t", "%f")
    assert axes(parts, step) == {}


def test_ranks_that_take_parts_of_a_sum_update_in_another_way() -> None:
    def of(rank: int) -> str:
        part = f"""  %a: f32[1,4] = Slice(%t) {{starts=[{rank}], ends=[{rank + 1}], axes=[0]}}
  %b: f32[3,4] = Expand(%a) {{shape=[3,4]}}
"""
        return replicated(block(SUM, part, STEP.replace("%t", "%b")))["w"].how

    assert of(0) == of(0) != of(1)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_digests_have_the_place_along_other_axes(rank: int) -> None:
    arrays = {"w": np.zeros((3, 4), np.float32), "m": np.zeros((3, 4), np.float32), "lr": np.float32(0.1)}
    found = rc.Program(block(SUM, STEP), arrays).digests(Mesh.of(dp=2, tp=2), rank)
    assert [n.partition("\0")[0] for n in found] == [f"'{n}' (at tp={rank % 2})" for n in ("w", "m", "lr")]
