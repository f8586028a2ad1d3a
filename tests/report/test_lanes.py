"""Lanes of computation and communication: the report's data, the timeline, what is alive by role."""

from __future__ import annotations

import itertools
import json

import pytest

import recompute as rc
from recompute.analysis.alive import by_role, holdings, roles_of
from recompute.communication.links import Network
from recompute.communication.mesh import Mesh
from recompute.compiling.compiler import CompiledStep, compile_step
from recompute.passes import ALIGNMENT, live_profile
from recompute.passes.communication.clock import Exchange, times
from recompute.report.data import report_data
from recompute.report.timeline import timeline

EXCHANGE = Exchange(Network.parse("node=2,nvlink=1GB/s,net=0.1GB/s"), Mesh.of(dp=4))


@pytest.fixture(scope="module")
def step() -> CompiledStep:
    program = rc.load(rc.models.build("mlp4", batch=64))
    optimizer = rc.DataParallel(rc.Adam(1e-3), EXCHANGE.mesh, zero=1, batch=64)
    return compile_step(program, "loss", optimizer, cost=rc.cost.device("h100-80"))


def test_operators_and_transfers_are_on_one_clock(step: CompiledStep) -> None:
    block, cost = step.program.block, step.cost
    line = timeline(block, cost, EXCHANGE)
    clock = times(block, cost.seconds, EXCHANGE)
    assert sum(line.seconds) == pytest.approx(clock.seconds)
    starts = dict(zip(line.positions, line.starts(), strict=True))
    assert clock.stalls > 0 and set(line.lanes()) == set(clock.busy())
    for moved in line.lanes().values():
        assert all(a.end <= b.begin + 1e-12 for a, b in itertools.pairwise(moved))
        assert all(t.begin >= starts[t.operator] - 1e-12 for t in moved)


def test_the_page_has_the_lanes(step: CompiledStep) -> None:
    data = json.loads(json.dumps(report_data(step.program, step, exchange=EXCHANGE, ranks={"ranks": 4})))
    (program,) = data["programs"]
    assert data["ranks"] == {"ranks": 4} and len(program["lanes"]) > 2
    kinds = [data["kinds"][k] for k in program["operators"]["kind"]]
    for lane in program["lanes"]:
        assert {kinds[i] for i in lane["operator"]} <= {"AllGather", "AllToAll"}
        assert all(0 <= a < b for a, b in zip(lane["begin"], lane["end"], strict=True))
    assert report_data(step.program, step)["programs"][0]["lanes"] == []


def test_what_ranks_receive_has_a_role(step: CompiledStep) -> None:
    block = step.program.block
    line = timeline(block, step.cost)
    totals = line.totals()
    assert max(totals["communication"]) > 0
    live = [b for _, b in live_profile(block, ALIGNMENT)]
    persistent = step.figures.persistent_bytes
    assert [sum(row[i] for row in totals.values()) - persistent for i in range(len(live))] == live
    kinds = roles_of(block)
    waits = [next(o.writes()).name for o in block.operators if o.op.communicates == "wait"]
    assert waits and {kinds[name] for name in waits} == {"communication"}
    assert sum(by_role(holdings(block), step.figures.peak_bytes).values()) == step.figures.peak_bytes
