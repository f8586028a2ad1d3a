"""Random programs: the text form, recomputation and the memory plan keep every number, bit for bit."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from checking import run_checked
from random_blocks import blocks, feeds

from recompute import parse, show
from recompute.language.ir import Block, Free, Role
from recompute.passes import Autodiff, Liveness, MemoryPlan, Recompute, live_profile, memory_report, run_passes
from recompute.passes.memory.memory_plan import collect_lifetimes
from recompute.passes.memory.storage import storages
from recompute.runtime.cpu.session import Session
from recompute.testing import evaluate

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(blocks(), st.data())
def test_recompute_keeps_every_bit(block: Block, data: st.DataObject) -> None:
    plain = run_passes(block, [Autodiff()])
    names = [v.name for op in block.operators for v in op.writes()]
    checkpoints = data.draw(st.lists(st.sampled_from(names), max_size=4))
    after = run_passes(plain, [Recompute(tuple(checkpoints))])
    feed = feeds(block)
    outputs = list(plain.outputs)
    for a, b in zip(evaluate(plain, feed, outputs), evaluate(after, feed, outputs), strict=True):
        assert a.tobytes() == b.tobytes()
    read = {v.name for op in after.operators for v in op.reads()} | set(after.outputs)
    idle = [op for op in after.operators if op.role is Role.RECOMPUTE and not any(v.name in read for v in op.writes())]
    assert not idle, "something was recomputed that nobody reads"


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(blocks(), st.data())
def test_the_plan_is_sound_and_the_text_keeps_it(block: Block, data: st.DataObject) -> None:
    names = [v.name for op in block.operators for v in op.writes()]
    checkpoints = data.draw(st.lists(st.sampled_from(names), max_size=3))
    passes = [Autodiff(), Recompute(tuple(checkpoints)), Liveness(), MemoryPlan()]
    planned = run_passes(block, passes)
    assert parse(show(planned)) == planned
    assert run_passes(block, passes) == planned
    report = memory_report(planned)
    assert report.live_peak <= report.arena
    for a, b in combinations(collect_lifetimes(planned), 2):
        if a.start <= b.end and b.start <= a.end and a.size and b.size:
            at, bt = planned.addresses[a.name], planned.addresses[b.name]
            assert at + a.size <= bt or bt + b.size <= at


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(blocks())
def test_every_value_dies_at_its_last_use(block: Block) -> None:
    freed = run_passes(block, [Autodiff(), Liveness()])
    live = max(bytes_ for _, bytes_ in live_profile(freed))
    # the same by brute force: an allocation is alive from its first write to its last member's last use
    operators = [op for op in freed.operators if not isinstance(op.op, Free)]
    members = {name: s for s in storages(freed) for name in s.offsets}
    born = {v.name: -1 for v in freed.inputs}
    last = {v.name: -1 for v in freed.inputs}
    for i, op in enumerate(operators):
        for v in op.reads():
            last[v.name] = i
        for v in (*op.writes(), *op.scratch):
            born[v.name] = last[v.name] = i
    for name in freed.outputs:
        last[name] = len(operators)
    peak = 0
    for i in range(len(operators)):
        alive = {members[n].name: members[n].nbytes for n in born if n in members and born[n] <= i <= last[n]}
        peak = max(peak, sum(alive.values()))
    assert live == peak


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(blocks(), st.data())
def test_every_read_sees_what_was_written(block: Block, data: st.DataObject) -> None:
    """The executor's checking mode: freed and unwritten memory is poisoned, and nobody writes beside his buffers."""
    names = [v.name for op in block.operators for v in op.writes()]
    checkpoints = data.draw(st.lists(st.sampled_from(names), max_size=3))
    planned = run_passes(block, [Autodiff(), Recompute(tuple(checkpoints)), Liveness(), MemoryPlan()])
    feed = feeds(block)
    plain = evaluate(planned, feed)
    session = Session(planned, {n: np.array(a) for n, a in feed.items()})
    for v in planned.inputs:
        session.arrays[v.name][...] = feed[v.name]
    run_checked(session)
    for name, expected in zip(planned.outputs, plain, strict=True):
        assert session.arrays[name].tobytes() == expected.tobytes()
