"""The lock-step interpreter: what ranks get from each other, the same bits for any number of ranks, clear errors."""

from __future__ import annotations

import numpy as np
import pytest

import recompute as rc
from recompute.communication.lockstep import LockStep
from recompute.communication.matching import Begun, Matcher, Places, run_together
from recompute.communication.mesh import Mesh
from recompute.language.builder import Builder
from recompute.language.op import op_class
from recompute.ops.communication.base import tree_sum

COLLECTIVE = """program p {{
  input %x: f32[{n},3]
  communicate %s: {out} = {name}(%x) {{axis="dp", ranks={n}, number=0{more}}}
  communicate %y: {out} = CommWait(%s, %x)
  output %y
}}"""


def collected(name: str, n: int, more: str = "") -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Inputs and outputs of all ranks."""
    out = {"ReduceScatter": "f32[1,3]", "AllGather": f"f32[{n * n},3]"}.get(name, f"f32[{n},3]")
    block = rc.parse(COLLECTIVE.format(n=n, name=name, out=out, more=more))
    xs = [np.random.default_rng(r).normal(size=(n, 3)).astype(np.float32) for r in range(n)]
    found = LockStep(block, Mesh.of(dp=n)).run([{"x": x} for x in xs])
    return xs, [f["y"] for f in found]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 64])
def test_what_each_rank_gets(n: int) -> None:
    same = np.testing.assert_array_equal
    xs, ys = collected("AllReduce", n)
    total = tree_sum(xs)
    np.testing.assert_allclose(total, np.sum(xs, axis=0), rtol=1e-3, atol=1e-5)
    assert all(y.tobytes() == total.tobytes() for y in ys)
    same(np.concatenate(collected("ReduceScatter", n)[1]), total)
    assert all(y.tobytes() == np.concatenate(xs).tobytes() for y in collected("AllGather", n)[1])
    same(np.stack(collected("AllToAll", n)[1]), np.stack(xs).swapaxes(0, 1))
    root = n - 1
    assert all(y.tobytes() == xs[root].tobytes() for y in collected("Broadcast", n, f", root={root}")[1])
    reduced = collected("Reduce", n, f", root={root}")[1]
    same(reduced[root], total)
    assert not np.any(reduced[:root])


def test_groups_of_a_mesh() -> None:
    """Ranks 0 1 2 / 3 4 5: sums along either axis."""
    lines = [
        f'communicate %{a}: f32[1] = AllReduce(%x) {{axis="{a}", ranks={n}, number=0}}\n'
        f"communicate %{a}.t: f32[1] = CommWait(%{a}, %x)"
        for a, n in (("dp", 2), ("tp", 3))
    ]
    block = rc.parse("\n".join(["program p {", "input %x: f32[1]", *lines, "output %dp.t, %tp.t", "}"]))
    found = LockStep(block, Mesh.of(dp=2, tp=3)).run([{"x": np.array([10.0**r], np.float32)} for r in range(6)])
    assert [float(f["dp.t"][0]) for f in found] == [1001, 10010, 100100] * 2
    assert [float(f["tp.t"][0]) for f in found] == [111] * 3 + [111000] * 3


RING = """program p {{
  input %x: f32[2]
  communicate %r: f32[2] = Recv() {{axis="pp", ranks=3, number=0, channel="to{here}", peer={before}, shape=[2]}}
  communicate %s: u8[1] = Send(%x) {{axis="pp", ranks=3, number=0, channel="to{after}", peer={after}}}
  communicate %y: f32[2] = CommWait(%r)
  communicate %t: u8[1] = CommWait(%s, %x)
  output %y
}}"""


def test_messages_in_a_ring() -> None:
    blocks = [rc.parse(RING.format(here=r, before=(r - 1) % 3, after=(r + 1) % 3)) for r in range(3)]
    assert all(rc.parse(rc.show(b)) == b for b in blocks)
    found = LockStep(blocks, Mesh.of(pp=3)).run([{"x": np.full(2, r, np.float32)} for r in range(3)])
    assert [float(f["y"][0]) for f in found] == [2, 0, 1]


def regression(ranks: int, micro: int) -> rc.Block:
    """One step of regression: each rank has `micro` micro-batches of two samples; gradients are added in the tree over
    all micro-batches of all ranks, inside a rank and then between ranks."""
    declared = "\n".join(f"input %x{i}: f32[2,3]\ninput %y{i}: f32[2,1]" for i in range(micro))
    block = rc.parse(f"program p {{\n{declared}\nparam %w: f32[3,1]\nconst %lr: f32[] = [0.1]\n}}")
    b = Builder.on(block)
    w, lr = block.parameters[0], block.constants[0].value
    grads = []
    for x, y in zip(block.inputs[::2], block.inputs[1::2], strict=True):
        grads.append(b.Gemm(x, b.Sub(b.Gemm(x, w), y), transA=1))
    while len(grads) > 1:
        grads = [b.Add(grads[i], grads[i + 1]) for i in range(0, len(grads), 2)]
    total = b.CommWait(b.emit(op_class("AllReduce")(axis="dp", ranks=ranks, number=0), grads[0]), grads[0])
    b.SGDUpdate(w, total, lr)
    return rc.verify(block.with_operators(b.operators, constants=(*block.constants,)))


def test_any_number_of_ranks_gives_the_same_bits() -> None:
    """Eight micro-batches on 1, 2, 4 and 8 ranks, six steps; and left to right, which differs, so that the sums are
    worth comparing."""
    generator = np.random.default_rng(5)
    xs = generator.normal(size=(6, 8, 2, 3)).astype(np.float32)
    ys = generator.normal(size=(6, 8, 2, 1)).astype(np.float32)
    start = {"w": generator.normal(size=(3, 1)).astype(np.float32)}
    found = set()
    for ranks in (1, 2, 4, 8):
        k = 8 // ranks
        steps = LockStep(regression(ranks, k), Mesh.of(dp=ranks), start)
        for x, y in zip(xs, ys, strict=True):
            feeds = [{f"{n}{i}": a[r * k + i] for i in range(k) for n, a in (("x", x), ("y", y))} for r in range(ranks)]
            steps.run(feeds)
        found |= {s["w"].tobytes() for s in steps.state}
    assert len(found) == 1
    w = start["w"]
    for x, y in zip(xs, ys, strict=True):
        total = sum((x[i].T @ (x[i] @ w - y[i]) for i in range(1, 8)), x[0].T @ (x[0] @ w - y[0]))
        w = w - np.float32(0.1) * total
    assert w.tobytes() not in found
    np.testing.assert_allclose(w, np.frombuffer(found.pop(), np.float32).reshape(3, 1), rtol=1e-4)


def test_a_communication_is_done_when_all_members_have_begun_it() -> None:
    """Whoever begins first: its members are in the order of their coordinates."""
    places = Places(lambda a, axis: (0, 1), lambda a, axis: a, lambda a: a)
    seen: list[list[int]] = []
    matcher = Matcher(places, lambda members: seen.append([m.actor for m in members]))
    op = op_class("AllReduce")(axis="dp", ranks=2, number=0)
    first, second = (Begun(a, op, 0, ("f32[1]", "f32[1]")) for a in (0, 1))
    matcher.begin(second)
    assert not second.done and not seen
    matcher.begin(first)
    assert first.done and second.done and seen == [[0, 1]]
    assert matcher.head(0, "dp") is None
    run_together(matcher, {0: iter([first]), 1: iter([second])})


def test_programs_are_verified_first() -> None:
    a = rc.parse(COLLECTIVE.format(n=2, name="AllReduce", out="f32[2,3]", more=""))
    b = rc.parse(COLLECTIVE.format(n=2, name="Broadcast", out="f32[2,3]", more=""))
    with pytest.raises(rc.VerifyError, match=r"rank 1: Broadcast number 0 on channel 'dp' .* different operators"):
        LockStep([a, b], Mesh.of(dp=2))
    with pytest.raises(rc.VerifyError, match="the mesh tp=2 has no such axis"):
        LockStep(a, Mesh.of(tp=2))
    with pytest.raises(rc.VerifyError, match="is for 2 ranks of axis 'dp', but the mesh dp=4 has 4"):
        LockStep(a, Mesh.of(dp=4))


def test_what_is_given() -> None:
    block = regression(2, 1)
    w, x, y = np.zeros((3, 1), np.float32), np.zeros((2, 3), np.float32), np.zeros((2, 1), np.float32)
    with pytest.raises(rc.UsageError, match="rank 0: no array is given for kept value 'w'"):
        LockStep(block, Mesh.of(dp=2))
    with pytest.raises(rc.UsageError, match="has 2 ranks, but there are data of 3"):
        LockStep(block, Mesh.of(dp=2), [{"w": w}] * 3)
    steps = LockStep(block, Mesh.of(dp=2), {"w": w})
    with pytest.raises(rc.UsageError, match=r"rank 1: input 'x0' is f32\[2,3\], but its array is f64\[2,3\]"):
        steps.run([{"x0": x, "y0": y}, {"x0": x.astype(np.float64), "y0": y}])
    with pytest.raises(rc.UsageError, match="there are 1 feeds"):
        steps.run([{"x0": x, "y0": y}])
    with pytest.raises(rc.UsageError, match="rank 0: its program has no value 'z'"):
        steps.run({"x0": x, "y0": y}, ["z"])


def test_an_operator_that_fails_names_its_rank() -> None:
    text = "program p {\n  input %i: i64[1]\n  input %x: f32[2]\n  %y: f32[1] = Gather(%x, %i) {axis=0}\n  output %y\n}"
    steps = LockStep(rc.parse(text), Mesh.of(dp=2))
    x = np.zeros(2, np.float32)
    with pytest.raises(rc.RecomputeError, match="rank 1: Gather, which makes 'y'"):
        steps.run([{"i": np.array([1]), "x": x}, {"i": np.array([5]), "x": x}])
