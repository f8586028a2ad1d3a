"""Operators of communication: types, text, a group of one, gradients, what a rank sends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.communication.links import Link
from recompute.communication.lockstep import LockStep
from recompute.communication.mesh import Mesh
from recompute.language.builder import Builder
from recompute.language.op import op_class
from recompute.language.types import TensorType
from recompute.ops.communication.base import Communication, Traffic, tree_sum
from recompute.passes.cleanup.dead_code import DeadCode
from recompute.passes.gradient.autodiff import differentiate

COLLECTIVES = ("AllReduce", "ReduceScatter", "AllGather", "AllToAll", "Broadcast", "Reduce")
ONE = """program p {{
  input %x: f64[4,3]
  communicate %s: f64[4,3] = {name}(%x) {{axis="dp", ranks=1, number=3{more}}}
  %a: f64[4,3] = Mul(%x, %x)
  communicate %t: f64[4,3] = CommWait(%s, %x)
  %y: f64[4,3] = Add(%a, %t)
  output %y
}}"""


def traffic_of(block: rc.Block) -> dict[str, Traffic]:
    """What a rank sends along each axis in one step: bytes, and messages that follow one another."""
    found: dict[str, Traffic] = {}
    for o in block.operators:
        if not isinstance(o.op, Communication):
            continue
        one = o.op.traffic(next((v.type for v in o.reads()), None), next(o.writes()).type)
        so_far = found.get(o.op.axis, Traffic(0, 0))
        found[o.op.axis] = Traffic(so_far.bytes + one.bytes, so_far.steps + one.steps)
    return found


def op(name: str, ranks: int = 4, **more: Any) -> Communication:
    return op_class(name)(axis="dp", ranks=ranks, number=0, **more)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("more", ["", ', channel="w", order="library"'])
def test_a_group_of_one_is_the_identity(name: str, more: str) -> None:
    block = rc.verify(rc.parse(ONE.format(name=name, more=more)))
    assert rc.parse(rc.show(block)) == block
    x = np.arange(12.0).reshape(4, 3)
    (y,) = rc.Executor().run(rc.Program(block), {"x": x}, ["y"])
    np.testing.assert_array_equal(y, x * x + x)
    (found,) = LockStep(block, Mesh.of(dp=1)).run({"x": x})
    np.testing.assert_array_equal(found["y"], y)


def test_more_ranks_do_not_run_alone() -> None:
    block = rc.verify(rc.parse(ONE.format(name="AllReduce", more="").replace("ranks=1", "ranks=2")))
    with pytest.raises(rc.RecomputeError, match=r"number 3 on channel 'dp.parts' needs 2 ranks.* an engine"):
        rc.Executor().run(rc.Program(block), {"x": np.zeros((4, 3))}, ["y"])


@pytest.mark.parametrize(
    ("name", "x", "y"),
    [
        ("AllReduce", "f32[3]", "f32[3]"),
        ("AllReduce", "i64[]", "i64[]"),
        ("ReduceScatter", "bf16[8,3]", "bf16[2,3]"),
        ("AllGather", "bool[2,3]", "bool[8,3]"),
        ("AllToAll", "f32[8]", "f32[8]"),
        ("Broadcast", "u8[5]", "u8[5]"),
        ("Send", "f32[5]", "u8[1]"),
    ],
)
def test_types(name: str, x: str, y: str) -> None:
    assert op(name).infer(TensorType.parse(x)) == (TensorType.parse(y),)


@pytest.mark.parametrize(
    ("name", "x", "more", "why"),
    [
        ("AllReduce", "bool[3]", {}, "booleans cannot be added"),
        ("AllReduce", "host f32[3]", {}, "host memory"),
        ("AllReduce", "f32[3]", {"ranks": 0}, "ranks must be from 1"),
        ("AllReduce", "f32[3]", {"order": "ring"}, "order must be one of tree, library"),
        ("AllReduce", "f32[3]", {"channel": "a b"}, "names of letters"),
        ("ReduceScatter", "f32[6]", {}, "axis 0 cannot be divided among 4 ranks"),
        ("AllToAll", "f32[]", {}, "axis 0 cannot be divided"),
        ("AllGather", "f32[]", {}, "has no axis 0"),
        ("Broadcast", "f32[2]", {"root": 4}, "root must be a coordinate from 0 to 3"),
        ("Send", "f32[2]", {"peer": -1}, "peer must be a coordinate"),
        ("Send", "f32[2]", {"ranks": 1}, "two ranks or more"),
    ],
)
def test_types_that_cannot_be(name: str, x: str, more: dict[str, Any], why: str) -> None:
    with pytest.raises(rc.RecomputeError, match=why):
        op(name, **more).infer(TensorType.parse(x))


@pytest.mark.parametrize("more", [{"dtype": "f99"}, {"shape": (2.0,)}, {"peer": 7}])
def test_what_cannot_be_received(more: dict[str, Any]) -> None:
    with pytest.raises(rc.RecomputeError, match=r"is no type|peer must be"):
        op("Recv", **more).infer()


def test_sums_are_a_tree() -> None:
    """Neighbours first: with float32, another order gives other bits."""
    a, b, c, d = (np.float32(v) for v in (1e8, 3.0, -1e8, 3.0))
    assert tree_sum([a, b, c, d]) == np.float32(a + b) + np.float32(c + d)
    assert tree_sum([a, b, c, d]) != ((a + c) + b) + d
    assert tree_sum([a, b, c]) == np.float32(a + b) + c
    assert tree_sum([a]) is a


@pytest.mark.parametrize("name", COLLECTIVES)
def test_gradients_are_those_of_the_sum_of_all_losses(name: str) -> None:
    """Central differences by each rank's input, of a loss that weighs every element of every rank differently."""
    ranks, x_type = 4, TensorType.parse("f64[4,2]")
    attributes = {"root": 2} if name in ("Broadcast", "Reduce") else {}
    (y_type,) = op(name, **attributes).infer(x_type)
    b = rc.parse("program p {\n  input %x: f64[4,2]\n  input %w: " + str(y_type) + "\n}")
    builder = Builder.on(b)
    x, w = b.inputs
    y = builder.CommWait(builder.emit(op(name, **attributes), x), x)
    loss = builder.ReduceSum(builder.Mul(builder.Mul(y, y), w), keepdims=0)
    block = b.with_operators(builder.operators, outputs=(loss.name,), constants=tuple(builder.constants))
    after, ((_, grad),) = differentiate(block, loss.name, ["x"])
    after = rc.verify(after.with_operators(after.operators, outputs=(loss.name, grad.name)))
    generator = np.random.default_rng(3)
    xs = [generator.uniform(-1, 1, x_type.shape) for _ in range(ranks)]
    ws = [generator.uniform(-1, 1, y_type.shape) for _ in range(ranks)]

    def run(step: float, rank: int, at: tuple[int, int]) -> float:
        moved = [a.copy() for a in xs]
        moved[rank][at] += step
        found = LockStep(block, Mesh.of(dp=ranks)).run([{"x": a, "w": v} for a, v in zip(moved, ws, strict=True)])
        return sum(float(f[loss.name]) for f in found)

    found = LockStep(after, Mesh.of(dp=ranks)).run([{"x": a, "w": v} for a, v in zip(xs, ws, strict=True)])
    for rank in range(ranks):
        for at in ((0, 0), (3, 1)):
            want = (run(1e-5, rank, at) - run(-1e-5, rank, at)) / 2e-5
            assert abs(found[rank][grad.name][at] - want) < 1e-6, (rank, at)


def test_what_a_rank_sends() -> None:
    x = TensorType.parse("f32[1024]")

    def sent(name: str, ranks: int = 4) -> Traffic:
        found = op(name, ranks)
        return found.traffic(x, found.infer(x)[0])

    assert sent("AllReduce") == Traffic(2 * 3 * 1024, 4)
    assert sent("ReduceScatter") == Traffic(3 * 1024, 2)
    assert sent("AllGather") == Traffic(3 * 4096, 2)
    assert sent("AllToAll") == Traffic(3 * 1024, 3)
    assert sent("Broadcast") == Traffic(2 * 4096, 2)
    assert sent("Send") == Traffic(4096, 1)
    assert all(sent(name, 1) == Traffic(0, 0) for name in COLLECTIVES)
    assert Link(1024, 0.5).seconds(sent("ReduceScatter")) == 0.5 * 2 + 3
    block = rc.parse(ONE.format(name="AllReduce", more="").replace("ranks=1", "ranks=2"))
    assert traffic_of(block) == {"dp": Traffic(96, 2)}
    with pytest.raises(rc.UsageError, match="bandwidth above 0"):
        Link(0)


SEND = """program p {
  input %x: f32[4]
  communicate %s: u8[1] = Send(%x) {axis="pp", ranks=2, number=0, peer=1}
  communicate %t: u8[1] = CommWait(%s, %x)
  %y: f32[4] = Relu(%x)
  output %y
}"""


def test_dead_code_leaves_what_other_ranks_wait_for() -> None:
    block = rc.verify(rc.parse(SEND))
    assert [o.op.name for o in DeadCode().run(block).operators] == ["Send", "CommWait", "Relu"]


FAULTS = {
    "no wait": (("  communicate %t: u8[1] = CommWait(%s, %x)\n", ""), "no CommWait follows"),
    "two waits": (("  %y: ", "  communicate %z: u8[1] = CommWait(%s, %x)\n  %y: "), "was awaited already"),
    "a wait for nothing": (("  %y: ", "  communicate %z: f32[4] = CommWait(%x, %x)\n  %y: "), "is not what a"),
    "another source": (("CommWait(%s, %x)", "CommWait(%s, %s)"), "names %s"),
    "no source": (("CommWait(%s, %x)", "CommWait(%s)"), "names nothing"),
    "an output": (("output %y", "output %s"), "name the result of its CommWait"),
    "an early read": (("Relu(%x)", "Relu(%x)\n  %e: u8[1] = Identity(%s)"), "while other ranks write it"),
    "one number twice": (
        ("  %y: ", '  communicate %u: u8[1] = Send(%x) {axis="pp", ranks=2, number=0, peer=1}\n  %y: '),
        "has number 0 already",
    ),
    "two axes": (
        ("  %y: ", '  communicate %u: f32[4] = AllReduce(%x) {axis="dp", ranks=2, number=1, channel="pp"}\n  %y: '),
        "give it another channel",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_faults_of_one_program(what: str) -> None:
    (old, new), why = FAULTS[what]
    assert old in SEND
    with pytest.raises(rc.VerifyError, match=why):
        rc.verify(rc.parse(SEND.replace(old, new)))


def test_what_is_sent_is_not_updated() -> None:
    text = """program p {
  input %g: f32[2]
  param %w: f32[2]
  const %c: f32[] = [0.1]
  communicate %s: f32[2] = AllReduce(%w) {axis="dp", ranks=1, number=0}
  optimize %w: f32[2] = SGDUpdate(%w, %g, %c)
  communicate %t: f32[2] = CommWait(%s, %w)
  output %t
}"""
    with pytest.raises(rc.VerifyError, match="%w is updated while it is sent"):
        rc.verify(rc.parse(text))
    lines = text.splitlines()
    lines[5], lines[6] = lines[6], lines[5]
    rc.verify(rc.parse("\n".join(lines)))
