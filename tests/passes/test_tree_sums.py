"""Sums over ranks as moved data and a sum of our own: the same bits, verified, with memory that is planned."""

from __future__ import annotations

import numpy as np
import pytest

import recompute as rc
from recompute.communication.lockstep import LockStep
from recompute.communication.mesh import Mesh
from recompute.communication.verify_ranks import verify_ranks
from recompute.language.types import TensorType
from recompute.passes import Target
from recompute.passes.communication.tree_sums import TreeSums
from recompute.passes.sequence import plan_memory, step_passes

TEXT = """program p {{
  input %x: {x}
  communicate %s: {y} = {name}(%x) {{axis="dp", ranks={n}, number=3{more}}}
  %a: {x} = Add(%x, %x)
  communicate %z: {y} = CommWait(%s, %x)
  output %a, %z
}}"""


def block(name: str, x: str, n: int, more: str = "") -> rc.Block:
    t = TensorType.parse(x)
    y = t.with_shape((t.shape[0] // n, *t.shape[1:])) if name == "ReduceScatter" else t
    return rc.verify(rc.parse(TEXT.format(x=x, y=y, name=name, n=n, more=more)))


def bits(b: rc.Block, n: int) -> list[dict[str, bytes]]:
    (x,) = b.inputs
    g = np.random.default_rng(0)
    feeds = [{"x": (g.normal(size=x.shape) * 100).astype(x.type.numpy)} for _ in range(n)]
    return [{k: a.tobytes() for k, a in found.items()} for found in LockStep(b, Mesh.of(dp=n)).run(feeds)]


def names(b: rc.Block) -> list[str]:
    return [o.op.name for o in b.operators]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 64])
@pytest.mark.parametrize(
    ("name", "x"),
    [
        ("AllReduce", "f32[]"),
        ("AllReduce", "f32[3,5]"),
        ("AllReduce", "f32[64,3,50]"),
        ("AllReduce", "f16[5,64,50]"),
        ("AllReduce", "f32[6007]"),
        ("AllReduce", "i64[192]"),
        ("ReduceScatter", "bf16[192,2]"),
        ("Reduce", "f32[7]"),
    ],
)
def test_the_same_bits_before_and_after(name: str, x: str, n: int) -> None:
    before = block(name, x, n)
    after = rc.verify(TreeSums().run(before))
    assert verify_ranks([after] * n, Mesh.of(dp=n)) == 1
    assert not {"AllReduce", "ReduceScatter"} & set(names(after))
    assert ("Reduce" in names(after)) == (name == "Reduce" and n > 1)
    assert bits(after, n) == bits(before, n)
    planned = rc.verify(plan_memory(before, Target(providers=())))
    assert planned.addresses and bits(planned, n) == bits(before, n)


def test_what_moves() -> None:
    """Large sums move a byte twice; small ones, and those that cannot be divided, go to all; one rank moves nothing."""
    large = TreeSums().run(block("AllReduce", "f32[8192]", 4))
    assert names(large) == ["AllToAll", "Add", "CommWait", "TreeSum", "AllGather", "CommWait"]
    assert [(o.op.queue, o.op.number) for o in large.operators if hasattr(o.op, "queue")] == [
        ("dp.parts", 3),
        ("dp.whole", 3),
    ]
    reshaped = TreeSums().run(block("AllReduce", "f32[6,2000]", 4))
    assert names(reshaped) == ["Reshape", "AllToAll", "Add", "CommWait", "TreeSum", "AllGather", "CommWait", "Reshape"]
    for small in ("f32[16]", "f32[8191]"):
        assert names(TreeSums().run(block("AllReduce", small, 4))) == ["AllGather", "Add", "CommWait", "TreeSum"]
    assert names(TreeSums().run(block("ReduceScatter", "f32[16]", 4))) == ["AllToAll", "Add", "CommWait", "TreeSum"]
    for name in ("AllReduce", "AllGather", "AllToAll", "Reduce"):
        assert names(TreeSums().run(block(name, "f32[16]", 1))) == ["Add", "Reshape"]


def test_what_stays() -> None:
    library = block("AllReduce", "f32[8192]", 4, ', order="library"')
    assert TreeSums().run(library) is library
    alone = rc.parse("program p {\n  input %x: f32[2]\n  %y: f32[2] = Relu(%x)\n  output %y\n}")
    assert TreeSums().run(alone) is alone
    for target in (Target(providers=()), Target(providers=("numba",))):
        assert sum(isinstance(p, TreeSums) for p in step_passes(target)) == 1
