"""Estimates of pipelines: peaks of compiled stages, pauses as the schedule has them, a trace for viewers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import recompute as rc
from recompute.analysis import compiled_stages, stages
from recompute.analysis.compiled_stages import compiled_stage
from recompute.analysis.ranks import shape_of
from recompute.analysis.stage import Stage
from recompute.analysis.stages import StagesEstimate, estimate_stages
from recompute.analysis.steady import of_each
from recompute.compiling.steps import Steps
from recompute.cost import device
from recompute.errors import UsageError
from recompute.passes import Target
from recompute.passes.communication.timeline import BACKWARD, FORWARD, UPDATE, Span

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


def test_a_mesh_that_divides_nothing_is_refused() -> None:
    optimizer = rc.DataParallel(rc.Adam(), rc.Mesh.of(pp=2, tp=3), batch=4, micro_batches=4)
    with pytest.raises(UsageError, match="nothing is divided along tp: its 3 ranks"):
        estimate_stages("gpt2-tiny", optimizer, target=Target(cost=device("h100-80")), options=OPTIONS)


def test_more_stages_than_cuts_are_refused_by_name() -> None:
    optimizer = rc.DataParallel(rc.Adam(), rc.Mesh.of(pp=64), batch=64, micro_batches=64)
    with pytest.raises(UsageError, match="cannot be cut into 64 stages: there are"):
        estimate_stages("gpt2-tiny", optimizer, target=Target(cost=device("h100-80")), options=OPTIONS)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are compiled with few micro-batches, however small they are."""
    monkeypatch.setattr(stages, "MANY_OPERATORS", 0)


@pytest.mark.parametrize("schedule", ["1f1b", "zb"])
def test_many_micro_batches_from_few(schedule: str, few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the steady state on a micro-batch adds what the slowest stage takes, and the rows that ranks are fed."""
    cuts = ["h.0.out", "h.1.out", "h.2.out"]
    one = {"batch": 24, "micro_batches": 24, "cuts": cuts, "schedule": schedule, "accumulate": "running"}
    extended = estimate(**one)
    assert (extended.simulated_micro_batches, extended.micro_batches, extended.exact) == (10, 24, False)
    monkeypatch.setattr(stages, "MANY_OPERATORS", 1 << 62)
    whole = estimate(**one)
    assert whole.simulated_micro_batches == 24 and whole.exact
    assert extended.step_seconds == pytest.approx(whole.step_seconds, rel=0.02)
    assert extended.bubble == pytest.approx(whole.bubble, rel=0.06)
    assert extended.mfu == pytest.approx(whole.mfu, rel=0.02)
    for a, b in zip(extended.stages, whole.stages, strict=True):
        assert a.peak_bytes == pytest.approx(b.peak_bytes, rel=0.06)
        assert a.compute_seconds == pytest.approx(b.compute_seconds, rel=0.03)  # of the first stage: sums of the table
    assert "all peaks are extrapolated from 10 micro-batches of each data-parallel replica" in str(extended)
    assert "extrapolated" not in str(whole)


def test_replicas_have_their_own_micro_batches() -> None:
    """`micro_batches` counts those of all replicas, `simulated_micro_batches` those of one: all may be compiled."""
    two = tuple(Stage(place, 100, 0, 0.0, 0.0, 0.0) for place in range(2))
    whole = StagesEstimate("dp=2,pp=2", "1f1b", 4, 4, two, 1.0, 0.0, 0.0, None, "", Mock(), 2)
    assert "extrapolated" not in str(whole)
    assert "extrapolated from 1 micro-batch" in str(dataclasses.replace(whole, simulated_micro_batches=1))


def test_what_is_done_once_is_of_no_micro_batch() -> None:
    """Weights are cast before the first one, gradients are added up over ranks after the last."""
    kinds = [(FORWARD, -1), (FORWARD, 0), (BACKWARD, 0), (FORWARD, 1), (BACKWARD, 1), (BACKWARD, -1), (UPDATE, -1)]
    spans = [Span(i, i + 1, kind, number) for i, (kind, number) in enumerate(kinds)]
    assert of_each(spans, None, 2) == (2.0, 0.0)


def test_sums_in_a_tree_are_compiled_for_all_micro_batches(few: None) -> None:
    """They grow with the logarithm of micro-batches: nothing repeats itself."""
    found = estimate(batch=12, micro_batches=12, accumulate="tree")
    assert (found.simulated_micro_batches, found.exact) == (12, True)


def test_the_largest_stage_has_all_micro_batches_where_its_peak_is_near_the_memory(few: None) -> None:
    one = {"batch": 16, "micro_batches": 16, "cuts": ["h.0.out", "h.1.out", "h.2.out"], "accumulate": "running"}
    target = Target(cost=dataclasses.replace(device("h100-80"), memory=1_600_000))
    optimizer = rc.DataParallel(rc.Adam(), rc.Mesh.of(pp=4), **one)
    found = estimate_stages("gpt2-tiny", optimizer, target=target, options=OPTIONS)
    whole = compiled_stage(Steps("gpt2-tiny", optimizer=optimizer, options=OPTIONS, target=target),
                           optimizer.spec.parallel, max(found.stages, key=lambda s: s.peak_bytes).place)  # fmt: skip
    assert found.simulated_micro_batches == 10
    assert found.exact and found.peak_bytes == whole.figures.peak_bytes


def test_what_exceeds_the_device_is_said() -> None:
    target = Target(cost=dataclasses.replace(device("h100-80"), memory=1_000_000), precision="bf16")
    optimizer = rc.DataParallel(rc.Adam(), rc.Mesh.of(pp=2), batch=4, micro_batches=4)
    found = estimate_stages("gpt2-tiny", optimizer, target=target, options=OPTIONS)
    assert not found.fits and found.to_dict()["fits"] is False and found.to_dict()["precision"] == "bf16"
    assert [s.fits for s in found.stages] == [s.peak_bytes <= 1_000_000 for s in found.stages]
    assert "exceeds the device: stage" in str(found) and "bf16, 4 micro-batches; exceeds the device" in str(found)


def test_labels_are_compared_with_words_in_each_micro_batch() -> None:
    """Vocabularies that ranks share: what a label is compared with does not exist for the whole batch."""
    optimizer = rc.DataParallel(rc.Adam(), rc.Mesh.of(pp=2, tp=2), batch=8, micro_batches=8, accumulate="running")
    steps = Steps("gpt2-tiny", optimizer=optimizer, options=OPTIONS, target=Target(cost=device("h100-80")))
    block = compiled_stage(steps, optimizer.spec.parallel, 1).program.block
    words = OPTIONS["vocab"] // 2
    rows = {v.size // words for o in block.operators for v in o.writes() if v.shape and v.shape[-1] == words}
    assert OPTIONS["seq"] in rows and 8 * OPTIONS["seq"] not in rows


def test_the_stage_that_is_largest_in_the_end_has_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first one turns out smaller than another, that one's peak is no estimate either."""
    guessed = tuple(Stage(p, 100 - p, 0, 0.0, 0.0, 0.0) for p in range(4))
    peaks = {0: 10, 1: 98}
    blocks = Mock(operators=())

    def compiled(steps: Any, parallel: Any, places: Any, checkpoints: Any) -> Any:
        return {p: Mock(figures=Mock(peak_bytes=peaks[p])) for p in places}

    monkeypatch.setattr(stages, "compiled_stages", compiled)
    parallel = rc.DataParallel(rc.Adam(), rc.Mesh.of(pp=4), batch=4, micro_batches=4).spec.parallel
    guess = StagesEstimate("pp=4", "1f1b", 24, 24, guessed, 1.0, 0.0, 0.0, None, "", Mock(), 10, exact=False)
    every: Any = {p: Mock(block=blocks) for p in range(4)}
    whole = stages.at_largest(guess, Mock(), parallel, every, None, lambda text: None)
    assert whole.exact and [s.peak_bytes for s in whole.stages] == [10, 98, 98, 97]
