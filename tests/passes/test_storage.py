"""What shares a place and how long, the arena that follows from it, and where values die."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checking import run_checked
from storage_cases import CASES

import recompute as rc
from recompute import Block, Operator, TensorType, Value, parse, show
from recompute.language.op import Op
from recompute.passes import Liveness, MemoryPlan, memory_report, pipeline, run_passes
from recompute.passes.memory.memory_plan import MemoryReport, aligned, as_lifetime, collect_lifetimes, live_profile
from recompute.passes.memory.packing import Lifetime, height, pack
from recompute.passes.memory.storage import dying, offsets_inside, storages
from recompute.runtime.cpu.session import Session
from recompute.testing import evaluate


def freed(body: str) -> Block:
    return run_passes(parse(f"program p {{\n{body}\n}}"), [Liveness()])


def shown(block: Block, *, join: bool) -> list[str]:
    return [
        f"{s.name} {s.nbytes} {s.start}..{s.end} " + " ".join(f"{n}+{o}" for n, o in s.offsets.items())
        for s in storages(block, join=join)
    ]


@pytest.mark.parametrize(("body", "apart", "joined"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_sharing(body: str, apart: list[str], joined: list[str] | None) -> None:
    block = freed(body)
    assert shown(block, join=False) == apart
    assert shown(block, join=True) == (apart if joined is None else joined)
    assert {s.name for s in storages(block) if s.host} == {v.name for v in block.values().values() if v.type.host} - {
        "m"
    }


@pytest.mark.parametrize("body", [c[1] for c in CASES], ids=[c[0] for c in CASES])
def test_shared_places_hold_the_same_numbers(body: str) -> None:
    """Every read sees what was written, with dead memory poisoned."""
    block = run_passes(freed(body), [MemoryPlan()])
    g = np.random.default_rng(0)
    feed = {}
    for v in (*block.inputs, *block.parameters, *block.buffers, *block.state):
        feed[v.name] = np.asarray(g.uniform(0.5, 1.5, v.shape)).astype(v.type.numpy)
    plain = evaluate(parse(f"program p {{\n{body}\n}}"), feed)
    session = Session(block, {v.name: feed[v.name].copy() for v in (*block.parameters, *block.buffers, *block.state)})
    for v in block.inputs:
        session.arrays[v.name][...] = feed[v.name]
    run_checked(session)
    for name, expected in zip(block.outputs, plain, strict=True):
        assert session.arrays[name].tobytes() == expected.tobytes()


def test_offsets_inside_are_aligned_or_none() -> None:
    block = freed("  input %x: f32[64]\n  %a: f32[64] = Tanh(%x)\n  %p: f32[16], %q: f32[32], %r: f32[16] ="
                  " Split(%a) {sizes=[16,32,16]}\n  %s: f32[64] = Relu(%a)\n  output %p, %q, %r, %s")  # fmt: skip
    found = [offsets_inside(op) for op in block.operators if op.op.name != "Free"]
    assert found == [(), (0, 64, 192), ()]


class Half(Op, abstract=True):
    """Says where its first output lies and nothing of the second."""

    def views(self, ins: Any, outs: Any) -> tuple[int | None, ...]:
        return (0,)


def test_offsets_inside_may_be_fewer_than_outputs() -> None:
    x, y = (Value(n, TensorType("f32", (16,))) for n in "xy")
    assert offsets_inside(Operator(Half(), (x,), (y,))) == (0,)
    assert offsets_inside(Operator(Half(), (x,), (y, x))) == ()
    assert offsets_inside(Operator(Half(), (x,), (y, None))) == (0,)


def test_what_dies_after_an_operator() -> None:
    """All frees up to the next operator count, wherever they stand."""
    text = """program p {
  input %x: f32[16]
  %a: f32[16] = Tanh(%x)
  free %x
  %b: f32[16] = Relu(%a)
  %c: f32[16] = Neg(%a)
  free %b
  free %a
  output %c
}"""
    found = [(i, op.op.name, names) for i, op, names in dying(parse(text))]
    assert found == [(0, "Tanh", {"x"}), (2, "Relu", set()), (3, "Neg", {"a", "b"})]


LIVES = """program p {
  input %x: f32[16]
  input %unread: f32[16]
  input %kept: f32[16]
  param %w: f32[16]
  state %step: i64[]
  %a: f32[16] = Tanh(%x)
  %idle: f32[16] = Exp(%a)
  %b: f32[16] = Mul(%a, %a)
  %s: f32[2,8] = Reshape(%b) {shape=[2,8]}
  %m: f32[2,8] = Softmax(%s)
  %c: f32[16] = Add(%w, %x)
  output %kept, %m, %c
}"""
FREED = """\
program p {
  input %x: f32[16]
  input %unread: f32[16]
  input %kept: f32[16]
  param %w: f32[16]
  state %step: i64[]
  free %unread
  %a: f32[16] = Tanh(%x)
  %idle: f32[16] = Exp(%a)
  free %idle
  %b: f32[16] = Mul(%a, %a)
  free %a
  %s: f32[2,8] = Reshape(%b) {shape=[2,8]}
  free %b
  %m: f32[2,8] = Softmax(%s) scratch(%m#0: f32[2,1])
  free %s
  %c: f32[16] = Add(%w, %x)
  free %x
  output %kept, %m, %c
}
"""


def test_liveness_frees_each_value_once_after_its_last_use() -> None:
    once = run_passes(parse(LIVES), [Liveness()])
    assert show(once) == FREED
    planned = run_passes(once, [MemoryPlan()])
    assert planned.addresses and run_passes(planned, [Liveness()]) == once
    assert run_passes(parse("program p {\n  input %x: f32[2]\n  output %x\n}"), [Liveness()]).operators == ()


def test_names_of_scratch_are_new() -> None:
    block = freed("  input %x: f32[2,8]\n  input %m#0: f32[2,8]\n  %y: f32[2,8] = Tanh(%m#0)\n"
                  "  %m: f32[2,8] = Softmax(%x)\n  output %m, %y")  # fmt: skip
    (scratch,) = [v.name for op in block.operators for v in op.scratch]
    assert scratch not in ("m#0", "m", "x", "y") and rc.verify(block) is block


# -- the plan and its figures ---------------------------------------------------------------------------------------

ODD = """
  input %x: f32[3]
  param %w: f32[5]
  buffer %seen: f32[2]
  state %step: i64[]
  const %c: f32[] = [2.0]
  %a: f32[3] = Tanh(%x)
  %b: f32[3,3] = MatMul(%p, %q)
  output %b
""".replace(
    "  %b: f32[3,3] = MatMul(%p, %q)",
    "  %r: f32[3,1] = Reshape(%a) {shape=[3,1]}\n  %b: f32[3,17] = Expand(%r) {shape=[3,17]}\n"
    "  %d: f32[3,17] = Neg(%b)\n  %e: f32[3,17] = Add(%d, %r)",
).replace("output %b", "output %e")


def test_figures_of_a_plan() -> None:
    """Addresses are multiples of 64, live bytes are not: x, a, r share 12 bytes, b, d, e 204."""
    planned = run_passes(freed(ODD), [MemoryPlan()])
    report = memory_report(planned)
    assert report.arena == 64 + 256 and report.live_peak == 12 + 204 and report.persistent == 20 + 8 + 8 + 4
    assert report.peak == report.arena + report.persistent
    assert report.peak_at == [op.op.name for op in planned.operators].index("Expand")
    assert (report.host, report.host_live_peak) == (0, 0)
    assert MemoryReport(report.arena, report.live_peak, report.persistent, report.peak_at) == report
    at = planned.addresses
    assert at["x"] == at["a"] == at["r"] and at["b"] == at["d"] == at["e"] and {at["x"], at["b"]} in ({0, 64}, {0, 256})
    assert list(at) == [n for n in planned.values() if n in at]
    assert [aligned(n) for n in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]


def test_the_profile_counts_every_allocation_while_it_is_there() -> None:
    block = freed(ODD)
    lives = [(block.operators[i].op.name, n) for i, n in live_profile(block)]
    assert lives == [("Tanh", 12), ("Reshape", 12), ("Expand", 216), ("Neg", 216), ("Add", 216)]
    assert [n for _, n in live_profile(block, 64)] == [64, 64, 320, 320, 320]
    assert list(live_profile(block, host=True)) == [(i, 0) for i, _ in live_profile(block)]
    # scratch is there while its operator runs
    block = freed("  input %x: f32[2,8]\n  %y: f32[2,8] = Softmax(%x)\n  %z: f32[2,8] = Exp(%x)\n  output %y, %z")
    assert [n for _, n in live_profile(block)] == [64 + 64 + 8, 64 + 64]
    assert [(x.name, x.size, x.start, x.end) for x in collect_lifetimes(block)] == [
        ("x", 64, -1, 3), ("y", 64, 0, 3), ("y#0", 64, 0, 0)
    ]  # fmt: skip


def test_a_block_without_operators_holds_its_inputs() -> None:
    block = parse("program p {\n  input %x: f32[3]\n  input %y: f32[2]\n  output %x, %y\n}")
    report = memory_report(run_passes(block, pipeline("liveness,memory-plan")))
    assert (report.live_peak, report.peak_at, report.arena) == (20, -1, 128)
    block = parse("program p {\n  param %w: f32[3]\n  output %w\n}")
    report = memory_report(run_passes(block, pipeline("liveness,memory-plan")))
    assert (report.live_peak, report.arena, report.persistent) == (0, 0, 12)


def test_what_waits_in_host_memory_is_counted_there() -> None:
    body = next(c[1] for c in CASES if c[0] == "host")
    block = run_passes(freed(body.replace("[16]", "[5]")), [MemoryPlan()])
    report = memory_report(block)
    assert (report.host, report.host_live_peak) == (64, 20)
    assert (report.arena, report.live_peak) == (128, 40)
    (held,) = collect_lifetimes(block, host=True)
    assert (held.name, held.size) == ("h", 64) and "h" not in {x.name for x in collect_lifetimes(block)}
    assert [n for _, n in live_profile(block, host=True)][-1] == 20


def test_parts_are_joined_where_the_arena_is_no_larger() -> None:
    """In place of the joined value: a tie saves a copy."""
    joined = next(c[1] for c in CASES if c[0] == "several outputs of one operator")
    planned = run_passes(freed(joined), [MemoryPlan()])
    at = planned.addresses
    assert (at["p"], at["q"]) == (at["y"] + 128, at["y"]) and memory_report(planned).arena == 512
    assert {x.name for x in collect_lifetimes(planned)} == {"x", "y"} == {s.name for s in storages(planned, join=True)}
    assert max(n for _, n in live_profile(planned)) == 512
    assert {x.name for x in collect_lifetimes(freed(joined))} == {"x", "p", "q", "y"}


def test_parts_stay_apart_where_the_arena_is_smaller() -> None:
    """Written in place, the first part would keep all of the joined value's bytes while %t is there."""
    block = freed("""
  input %x: f32[2,32]
  input %k: f32[1]
  %p: f32[2,16], %q: f32[2,16] = Split(%x) {sizes=[16,16], axis=1}
  %t: f32[2000] = Tile(%k) {repeats=[2000]}
  %m: f32[1] = ReduceMax(%t)
  %w: f32[120,16] = Expand(%m) {shape=[120,16]}
  %y: f32[124,16] = Concat(%q, %w, %p) {axis=0}
  %z: f32[] = ReduceSum(%y) {keepdims=0}
  output %z
""")
    lives = [[as_lifetime(s) for s in storages(block, join=join)] for join in (False, True)]
    assert [height(found, pack(found)) for found in lives] == [2 * 7936, 8000 + 8000]
    planned = run_passes(block, [MemoryPlan()])
    assert memory_report(planned).arena == 2 * 7936
    assert sorted(x.name for x in collect_lifetimes(planned)) == sorted(s.name for s in storages(block))


def test_the_plan_needs_frees() -> None:
    with pytest.raises(rc.UsageError, match="needs 'liveness' before it"):
        run_passes(parse(LIVES), [MemoryPlan()])
    kept = parse("program p {\n  input %x: f32[3]\n  %y: f32[3] = Tanh(%x)\n  output %x, %y\n}")
    assert run_passes(kept, [MemoryPlan()]).addresses == {"x": 0, "y": 64}


def test_the_exact_packer_is_asked_for_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    from recompute.passes.memory import packing_exact

    asked = []

    def pack_exact(lifetimes: list[Lifetime], *, seconds: float) -> tuple[dict[str, int], int]:
        asked.append(seconds)
        at, plan = 0, {}
        for x in lifetimes:
            plan[x.name], at = at, at + x.size
        return plan, at

    monkeypatch.setattr(packing_exact, "pack_exact", pack_exact)
    planned = run_passes(freed(ODD), [MemoryPlan(exact=2.0)])
    assert asked == [2.0] and sorted(set(planned.addresses.values())) == [0, 64]


def test_live_bytes_are_not_rounded() -> None:
    block = freed("  input %x: f32[3]\n  %a: bool[3] = IsNaN(%x)\n  %b: bool[3] = Not(%a)\n  output %b")
    report = memory_report(run_passes(block, [MemoryPlan()]))
    assert report.live_peak == max(n for _, n in live_profile(block)) == 12 + 3
