"""Estimates of pipelines: peaks of compiled stages, pauses as the schedule has them, a trace for viewers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import recompute as rc
from recompute.analysis import compiled_stages
from recompute.analysis.compiled_stages import compiled_stage
from recompute.analysis.ranks import shape_of
from recompute.analysis.stages import StagesEstimate, estimate_stages
from recompute.compiling.steps import Steps
from recompute.cost import device
from recompute.errors import UsageError
from recompute.passes import Target

OPTIONS = {"layers": 4, "hidden": 64, "heads": 4, "vocab": 64, "seq": 32}


def estimate(**more: Any) -> StagesEstimate:
    given = {"batch": 8, "micro_batches": 8, "cuts": ["h.0.out", "h.1.out", "h.2.out"], **more}
    optimizer = rc.DataParallel(rc.Adam(), rc.Mesh.of(pp=4), **given)
    target = Target(cost=device("h100-80"))
    return estimate_stages("gpt2-tiny", optimizer, network="nvlink=450GB/s", target=target, options=OPTIONS)


def test_peaks_are_those_of_the_ranks_and_pauses_fall_with_chunks(tmp_path: Path) -> None:
    found = estimate()
    assert [s.place for s in found.stages] == [0, 1, 2, 3]
    program = rc.load(rc.models.build("gpt2-tiny", seed=0, **OPTIONS), batch=8)
    loss = rc.losses.cross_entropy(program["logits"])
    optimizer = rc.DataParallel(
        rc.Adam(), rc.Mesh.of(pp=4), 1, micro_batches=8, batch=8, cuts=["h.0.out", "h.1.out", "h.2.out"]
    )
    optimizer.minimize(loss)
    kept = (*program.block.parameters, *program.block.state)
    assert found.stages[1].persistent_bytes >= sum(v.nbytes for v in kept)
    assert 3 / 11 < found.bubble < 0.6  # (p-1)/(m+p-1), more as stages differ
    assert found.step_seconds > found.exposed_communication_seconds > 0
    assert all(0 < s.compute_seconds <= found.step_seconds for s in found.stages)
    more = ["h.0.attn.out", "h.0.out", "h.1.attn.out", "h.1.out", "h.2.attn.out", "h.2.out", "h.3.attn.out"]
    interleaved = estimate(schedule="interleaved", chunks=2, cuts=more)
    assert interleaved.bubble < found.bubble
    assert "pauses" in str(found) and found.to_dict()["peak_bytes"] == found.peak_bytes
    found.save_trace(str(tmp_path / "trace.json"))
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["tid"] for e in events} == {0, 1, 2, 3}
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(found.step_seconds * 1e6)


@pytest.mark.parametrize(
    ("model", "options", "mesh", "more"),
    [
        ("gpt2-tiny", {**OPTIONS, "layers": 8}, {"pp": 2, "tp": 2}, {}),
        ("gpt2-tiny", {**OPTIONS, "layers": 8}, {"dp": 2, "pp": 2}, {"schedule": "interleaved", "chunks": 2}),
        ("llama-tiny", {"layers": 8}, {"pp": 4}, {"schedule": "zb"}),
        ("resnet18", {"width": 4, "blocks": (2, 2, 2, 2), "image": 32, "classes": 3}, {"pp": 3}, {}),
    ],
)
def test_layers_of_other_stages_do_not_matter(
    model: str, options: dict[str, Any], mesh: dict[str, int], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled among few layers of the other stages, a stage has the operators and bytes that it has among all."""
    inner = rc.Adam(grad_clip=rc.clip.ClipGradByGlobalNorm(1.0))
    optimizer = rc.DataParallel(inner, rc.Mesh.of(**mesh), batch=8, micro_batches=4, accumulate="running", **more)
    steps = Steps(model, optimizer=optimizer, options=options, target=Target(cost=device("h100-80")))
    places = range(mesh["pp"])
    found = [compiled_stage(steps, optimizer.spec.parallel, place) for place in places]
    monkeypatch.setattr(compiled_stages, "with_own_layers", lambda program, pipe, cuts: program)
    for place, few in zip(places, found, strict=True):
        every = compiled_stage(steps, optimizer.spec.parallel, place)
        assert few.figures.peak_bytes == every.figures.peak_bytes
        assert shape_of(few.program.block) == shape_of(every.program.block)


def test_a_mesh_without_stages_is_refused() -> None:
    with pytest.raises(UsageError, match="use rc\\.estimate"):
        rc.estimate_stages("gpt2-tiny", rc.DataParallel(rc.Adam(), rc.Mesh.of(dp=2), batch=8))
    with pytest.raises(UsageError, match="samples of a step"):
        rc.estimate_stages("gpt2-tiny", rc.DataParallel(rc.Adam(), rc.Mesh.of(pp=2)))
