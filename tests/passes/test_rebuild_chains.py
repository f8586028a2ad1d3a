"""Cheap values that are made again from what gradients keep: which, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recompute import parse, verify
from recompute.language.ir import Block, Role
from recompute.ops.norm.fused import LayerNormalization, RMSNormalization
from recompute.passes.cleanup.dead_code import DeadCode
from recompute.passes.gradient.autodiff import Autodiff
from recompute.passes.memory.liveness import Liveness
from recompute.passes.memory.memory_plan import live_profile
from recompute.passes.recomputation.rebuild import Rebuild
from recompute.testing import evaluate

WIDE = 256


def step(body: str, hidden: int = 32) -> Block:
    """The training step of x · w1 → body: %a, %b [8,hidden] → %h, whose product with w2 the loss is of."""
    text = f"""program p {{
  input %x: f32[8,{WIDE}]
  param %w1: f32[{WIDE},{hidden}]
  param %w3: f32[{WIDE},{hidden}]
  param %w2: f32[{hidden},{WIDE}]
  param %s: f32[{hidden}]
  const %two: f32[] = [2.0]
  %a: f32[8,{hidden}] = MatMul(%x, %w1)
  %b: f32[8,{hidden}] = MatMul(%x, %w3)
{body}  %y: f32[8,{WIDE}] = MatMul(%h, %w2)
  loss %loss: f32[] = ReduceMean(%y) {{keepdims=0}}
  output %loss
}}"""
    return DeadCode().run(Autodiff().run(verify(parse(text.replace("HIDDEN", str(hidden))))))


def again(block: Block) -> list[str]:
    """What is made again, by operators."""
    return [o.op.name for o in block.operators if o.role is Role.BACKWARD and ".again" in next(o.writes()).name]


def peak(block: Block) -> int:
    return max(live for _, live in live_profile(Liveness().run(block)))


H = "f32[8,HIDDEN]"
CASES: dict[str, tuple[str, list[str]]] = {
    "gated": (f"  %g: {H} = Swish(%a)\n  %h: {H} = Mul(%g, %b)\n", ["Swish", "Mul", "Swish"]),
    "gelu": (f"  %h: {H} = Gelu(%a)\n", ["Gelu"]),
    "through a view": (
        f"  %g: {H} = Gelu(%a)\n  %v: f32[2,4,HIDDEN] = Reshape(%g) {{shape=[2,4,HIDDEN]}}\n"
        f"  %h: {H} = Reshape(%v) {{shape=[8,HIDDEN]}}\n", ["Gelu", "Reshape", "Reshape"],
    ),
    "rows": (f"  %h: {H} = RMSNormalization(%a, %s)\n", ["RowScale"]),
    "the input is not kept": (f"  %h: {H} = Relu(%a)\n", []),
    "costly ones": ("".join(
        f"  %{y}: {H} = {op}(%{x})\n" for op, x, y in
        (("Gelu", "a", "c"), ("Gelu", "c", "d"), ("Gelu", "d", "e"), ("Gelu", "e", "f"), ("Gelu", "f", "h"))
    ), ["Gelu"]),
    "squares": (f"  %g: {H} = Mul(%a, %b)\n  %h: {H} = Mul(%g, %g)\n", ["Mul", "Mul", "Mul"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_made_again(name: str) -> None:
    """Results have the same bits, and live memory is no more."""
    body, expected = CASES[name]
    block = step(body)
    after = verify(Rebuild().run(block))
    assert again(after)[: len(expected)] == expected and bool(again(after)) == bool(expected)
    g = np.random.default_rng(0)
    feed = {v.name: g.standard_normal(v.shape).astype("f4") for v in (*block.inputs, *block.parameters)}
    for a, b in zip(
        evaluate(block, feed, list(block.outputs)), evaluate(after, feed, list(block.outputs)), strict=True
    ):
        assert a.tobytes() == b.tobytes()
    assert peak(after) <= peak(block)


def test_what_costs_more_than_a_twelfth_of_its_product_is_kept() -> None:
    text = "program p {{\n  input %x: f32[8,{n}]\n  param %v: f32[{n},16]\n  param %w: f32[16,{n}]\n" + (
        "  %a: f32[8,16] = MatMul(%x, %v)\n  %h: f32[8,16] = Gelu(%a)\n  %y: f32[8,{n}] = MatMul(%h, %w)\n"
        "  loss %loss: f32[] = ReduceMean(%y) {{keepdims=0}}\n  output %loss\n}}"
    )
    found = [again(Rebuild().run(Autodiff().run(verify(parse(text.format(n=n)))))) for n in (209, 210)]
    assert found == [[], ["Gelu"]]


def test_what_is_made_from_parameters_alone_is_kept() -> None:
    """Such as a weight's copy in low precision."""
    block = step(f"  %t: f32[{WIDE},HIDDEN] = Mul(%w1, %two)\n  %h: {H} = MatMul(%x, %t)\n")
    text = """program p {
  input %x: f32[8,4]
  param %w: f32[4,4]
  const %two: f32[] = [2.0]
  %t: f32[4,4] = Mul(%w, %two)
  %u: f32[8,4] = MatMul(%x, %t)
  %y: f32[8,4] = MatMul(%u, %t)
  loss %loss: f32[] = ReduceMean(%y) {keepdims=0}
  output %loss
}"""
    other = Autodiff().run(verify(parse(text)))
    assert not again(Rebuild().run(block)) and Rebuild().run(other) is other


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("native", [False, True])
def test_the_last_steps_have_the_bits_of_the_whole(dtype: str, native: bool) -> None:
    import recompute as rc

    kind = {"f4": "f32", "f8": "f64"}[dtype]
    text = f"""program p {{
  input %x: {kind}[5,67]
  input %s: {kind}[67]
  input %b: {kind}[67]
  %l: {kind}[5,67], %m: {kind}[5,1], %i: {kind}[5,1] = LayerNormalization(%x, %s, %b)
  %l2: {kind}[5,67] = RowCentreScale(%x, %m, %i, %s, %b)
  %r: {kind}[5,67], %j: {kind}[5,1] = RMSNormalization(%x, %s)
  %r2: {kind}[5,67] = RowScale(%x, %j, %s)
  output %l, %l2, %r, %r2
}}"""
    g = np.random.default_rng(0)
    feed: Any = {n: g.standard_normal(s).astype(dtype) for n, s in (("x", (5, 67)), ("s", 67), ("b", 67))}
    e = rc.Executor() if native else rc.Executor(providers=("numpy",))
    layer, last, rms, scaled = e.run(rc.Program(verify(parse(text))), feed, ["l", "l2", "r", "r2"])
    assert layer.tobytes() == last.tobytes() and rms.tobytes() == scaled.tobytes()


def test_norms_without_their_statistics_or_in_halves_are_not_made_again() -> None:
    block = verify(
        parse("""program p {
  input %x: f16[2,3]
  input %w: f16[3]
  %y: f16[2,3], %i: f32[2,1] = RMSNormalization(%x, %w)
  %z: f16[2,3] = LayerNormalization(%x, %w, %w)
  output %y, %z, %i
}""")
    )
    first, second = block.operators
    assert isinstance(first.op, RMSNormalization) and isinstance(second.op, LayerNormalization)
    assert first.op.again(first.inputs, first.outputs) is None
    assert second.op.again(second.inputs, second.outputs) is None
