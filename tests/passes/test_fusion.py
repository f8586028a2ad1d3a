"""Fusion: programs keep their numbers and never need more memory; what must stay apart does."""

from __future__ import annotations

import time

import numpy as np
import pytest
from random_blocks import blocks, feeds

from recompute import parse, show, verify
from recompute.language.builder import Builder
from recompute.language.ir import Block, Operator, Role, Value
from recompute.language.program import Program
from recompute.language.types import TensorType
from recompute.ops.fused import loop
from recompute.passes import Autodiff, ChooseKernels, Fusion, Liveness, MemoryPlan, OpenNorms, run_passes
from recompute.passes.lowering.fusion import _profile
from recompute.passes.scheduling.schedule import live_peak
from recompute.runtime.cpu.device import native
from recompute.runtime.executor import Executor

hypothesis = pytest.importorskip("hypothesis")


@pytest.fixture(scope="module", autouse=True)
def small() -> object:
    """Loops of any size."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(loop, "SMALLEST", 1)
        yield


def values_of(block: Block, providers: tuple[str, ...]) -> list[np.ndarray]:
    """The outputs with the kernels of these providers and no lowering but the choice of them."""
    feed = feeds(block)
    data = {v.name: feed[v.name].copy() for v in (*block.parameters, *block.state)}
    chosen = [ChooseKernels(providers)] if providers else []
    ready = run_passes(block, [*chosen, Liveness(), MemoryPlan()])
    program = Program(ready, data)
    return Executor(schedule=False, rebuild=False, providers=()).run(
        program, {v.name: feed[v.name] for v in block.inputs}, list(block.outputs)
    )


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(blocks())
def test_random_programs_keep_their_numbers_and_their_peak(block: Block) -> None:
    plain = run_passes(block, [Autodiff()])
    fused = verify(Fusion().run(plain))
    assert parse(show(fused)) == fused
    assert Fusion().run(fused) == fused, "there is nothing left to fuse"
    assert live_without_scratch(fused) <= live_without_scratch(plain)
    for a, b in zip(values_of(plain, ()), values_of(fused, ()), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.skipif(bool(native.unavailable()), reason="needs llvmlite")
@hypothesis.settings(max_examples=8, deadline=None)
@hypothesis.given(blocks())
def test_random_programs_keep_their_bits_on_kernels(block: Block) -> None:
    plain = run_passes(block, [Autodiff()])
    fused = Fusion().run(plain)
    for a, b in zip(values_of(plain, ("loops",)), values_of(fused, ("loops",)), strict=True):
        assert a.tobytes() == b.tobytes()


def live_without_scratch(block: Block) -> int:
    return max((live for live, _ in _profile(block, range(len(block.operators)))), default=0)


def program(text: str) -> Block:
    return verify(parse("program p {\n" + text + "\n}"))


def bodies(block: Block) -> list[str]:
    return [op.op.body for op in verify(Fusion().run(block)).operators if isinstance(op.op, loop.Loop)]


def test_no_cycle() -> None:
    """%c needs %a through a product, and reads %a too: they cannot be one loop."""
    block = program("""
      input %x: f32[4,4]
      %a: f32[4,4] = Relu(%x)
      %m: f32[4,4] = MatMul(%a, %x)
      %c: f32[4,4] = Add(%a, %m)
      %d: f32[4,4] = Tanh(%c)
      output %d""")
    assert bodies(block) == ["%2 = Add(%0, %1); %3 = Tanh(%2)"]


def test_a_parameter_is_read_before_its_update() -> None:
    block = program("""
      input %x: f32[4,4]
      param %w: f32[4,4]
      const %lr: f32[] = [0.5]
      %a: f32[4,4] = Mul(%x, %w)
      optimize %w: f32[4,4] = SGDUpdate(%w, %x, %lr)
      %b: f32[4,4] = Neg(%a)
      output %b""")
    assert bodies(block) == []


def test_siblings_share_a_read() -> None:
    block = program("""
      input %x: f32[4,4]
      input %v: f32[4]
      %a: f32[4,4] = Mul(%x, %v)
      %b: f32[4,4] = Exp(%x)
      %s: f32[4] = ReduceSum(%b) {axes=[0], keepdims=0}
      %t: f32[4] = ReduceSum(%x) {axes=[-2], keepdims=0}
      output %a, %s, %t""")
    (found,) = verify(Fusion().run(block)).operators
    assert found.op.body == (
        "%2 = Mul(%0, %1); %3 = Exp(%0); %4 = ReduceSum(%3) {axes=[0], keepdims=0}; "
        "%5 = ReduceSum(%0) {axes=[-2], keepdims=0}"
    )
    assert [v.name for v in found.writes()] == ["a", "s", "t"]


def test_roles_do_not_mix() -> None:
    block = program("""
      input %x: f32[4,4]
      %a: f32[4,4] = Exp(%x)
      backward %b: f32[4,4] = Neg(%a)
      output %b""")
    assert bodies(block) == []


def test_nothing_is_kept_longer_for_a_loop() -> None:
    """%a is small and %x and %y large: to make %a late would keep both alive while the products run."""
    block = program("""
      input %x0: f32[4,4]
      %x: f32[4,4] = MatMul(%x0, %x0)
      %y: f32[4,4] = MatMul(%x, %x0)
      %a: f32[4,4] = Add(%x, %y)
      %m: f32[4,4] = MatMul(%x0, %x0)
      %b: f32[4,4] = Mul(%a, %m)
      output %b""")
    assert bodies(block) == []


def test_ten_thousand_operators() -> None:
    b = Builder()
    x = v = Value("x", TensorType("f32", (8, 8)))
    for i in range(10000):
        v = getattr(b, ("Relu", "Tanh", "Neg", "MatMul", "Add")[i % 5])(*((v, x) if i % 5 > 2 else (v,)))
    block = Block(inputs=(x,), operators=tuple(b.operators), outputs=(v.name,))
    start = time.perf_counter()
    fused = Fusion().run(block)
    assert time.perf_counter() - start < 10
    assert len(fused.operators) < 5000
    assert all(isinstance(op, Operator) for op in fused.operators)
    assert live_peak(fused) > 0


def test_the_gradient_of_a_normalisation_becomes_sums_and_a_loop() -> None:
    block = program("""
      input %x: f32[8,16,16,8]
      input %y: f32[8,16,16,8]
      input %dy: f32[8,16,16,8]
      input %v: f32[8]
      input %w: f32[8]
      %var: f32[8] = Mul(%w, %w)
      %mean: f32[8] = Relu(%v)
      backward %g: f32[8,16,16,8] = ReluGrad(%y, %dy)
      backward %dx: f32[8,16,16,8], %dscale: f32[8], %dbias: f32[8] = ChannelsLastBatchNormGrad(%x, %v, %mean, %var, %g)
      output %dx, %dscale, %dbias""")
    opened = verify(OpenNorms().run(block))
    fused = verify(Fusion().run(opened))
    names = [op.op.name for op in fused.operators if op.role is Role.BACKWARD]
    assert names == ["Loop", "BatchNormFactor", "BatchNormSlope"]
    wanted = values_of(block, ())
    for other in (values_of(opened, ()), values_of(fused, ())):
        for a, b in zip(wanted, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(a).max())


@pytest.mark.parametrize("name", ["Relu", "Relu6"])
def test_a_mask_is_made_again_from_what_the_sums_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass does not read y, unless somebody reads it later; the bits are those of reading it."""
    text = f"""
      input %x: f32[8,16,16,8]
      input %dy: f32[8,16,16,8]
      input %v: f32[8]
      input %w: f32[8]
      %z: f32[8,16,16,8], %mean: f32[8], %var: f32[8] = ChannelsLastBatchNormTrain(%x, %v, %w)
      %y: f32[8,16,16,8] = {name}(%z)
      backward %g: f32[8,16,16,8] = {name}Grad(%y, %dy)
      backward %dx: f32[8,16,16,8], %dscale: f32[8], %dbias: f32[8] = ChannelsLastBatchNormGrad(%x, %v, %mean, %var, %g)
      """
    alone, later = program(text + "output %dx, %dscale, %dbias"), program(text + "output %y, %dx, %dscale, %dbias")
    assert "%z.again" in show(verify(OpenNorms().run(alone)))
    read = program(text + "backward %q: f32[8,16,16,8] = Mul(%y, %dx)\n output %q")
    assert "%z.again" not in show(verify(OpenNorms().run(read)))
    for block in (alone, later):
        fused = verify(Fusion().run(OpenNorms().run(block)))
        assert all("y" not in [v.name for v in op.reads()] for op in fused.operators if op.role is Role.BACKWARD)
        again = values_of(fused, ())
        with monkeypatch.context() as m:
            m.setattr("recompute.passes.recomputation.split_norms._masks_again", lambda operators, names: operators)
            for a, b in zip(again, values_of(Fusion().run(OpenNorms().run(block)), ()), strict=True):
                assert a.tobytes() == b.tobytes()
