"""The trace of a pipeline: what each rank does in time, and its memory."""

import json

import pytest

import recompute as rc
from recompute.cost import device
from recompute.passes import Target
from recompute.passes.communication.timeline import BACKWARD, FORWARD, PAUSE, RECOMPUTE

_SMALL = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 32, "seq": 8}


@pytest.fixture(scope="module")
def estimate():
    optimizer = rc.DataParallel(rc.Adam(), rc.Mesh.of(pp=2, dp=2), batch=16, micro_batches=8)
    return rc.estimate_stages(
        "gpt2-tiny", optimizer, checkpoints=["h.*.out"], network="nvlink=450GB/s",
        target=Target(cost=device("h100-80")), options=_SMALL,
    )  # fmt: skip


def test_trace(estimate, tmp_path):
    estimate.save_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans, counters = ([e for e in events if e["ph"] == kind] for kind in "XC")
    assert {e["cat"] for e in spans} >= {FORWARD, BACKWARD, RECOMPUTE, PAUSE} and {e["tid"] for e in spans} == set(
        range(4)
    )
    names = {e["name"] for e in spans if e["tid"] == 0 and e["cat"] == FORWARD}
    assert len(names - {FORWARD}) == 4  # of the four micro-batches of a rank
    for stage in estimate.stages:
        held = [e["args"]["bytes"] for e in counters if e["name"].startswith(f"bytes of stage {stage.place},")]
        assert held == [size for _, size in stage.memory]


def test_memory_over_time(estimate):
    for stage in estimate.stages:
        held = [size for _, size in stage.memory]
        times = [second for second, _ in stage.memory]
        assert times == sorted(times)
        assert stage.persistent_bytes < max(held) <= stage.peak_bytes
        assert max(held) > 0.9 * stage.peak_bytes  # values fill the arena but for gaps
    first, last = ([s.kind for s in estimate.spans(p)] for p in (0, 1))
    assert {FORWARD, BACKWARD, RECOMPUTE, PAUSE} <= set(first) and FORWARD in last
