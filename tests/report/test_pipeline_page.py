"""The page about a pipeline: boxes of each stage in time, and its memory."""

import re

import pytest

import recompute as rc
from recompute.cost import device
from recompute.passes import Target
from recompute.passes.communication.timeline import BACKWARD, FORWARD, PAUSE, RECOMPUTE, Span
from recompute.report.pipeline import _joined, _visible

_SMALL = {"layers": 4, "hidden": 32, "heads": 4, "vocab": 32, "seq": 8}


@pytest.fixture(scope="module")
def estimate():
    optimizer = rc.DataParallel(rc.Adam(), rc.Mesh.of(pp=2, dp=2), batch=16, micro_batches=8)
    return rc.estimate_stages(
        "gpt2-tiny", optimizer, checkpoints=["h.*.out"], network="nvlink=450GB/s",
        target=Target(cost=device("h100-80")), options=_SMALL,
    )  # fmt: skip


def test_page(estimate, tmp_path):
    path = tmp_path / "page.html"
    estimate.save_report(str(path), "gpt2 <tiny>")
    text = path.read_text()
    assert "gpt2 &lt;tiny&gt;" in text and "gpt2 <tiny>" not in text
    for word in ("stage 0", "stage 1", "forward", "backward", "recomputation", "bubble", f"{estimate.peak_bytes:,}"):
        assert word in text
    numbers = {int(n) for n in re.findall(r'<text class="n"[^>]*>(\d+)<', text)}
    assert {0, 1, 2, 3} <= numbers  # of the four micro-batches of a rank
    assert "src=" not in text and "http" not in text  # nothing is loaded


def test_memory_over_time(estimate):
    for stage in estimate.stages:
        held = [size for _, size in stage.memory]
        times = [second for second, _ in stage.memory]
        assert times == sorted(times)
        assert stage.persistent_bytes < max(held) <= stage.peak_bytes
        assert max(held) > 0.9 * stage.peak_bytes  # values fill the arena but for gaps
    first, last = ([s.kind for s in estimate.spans(p)] for p in (0, 1))
    assert {FORWARD, BACKWARD, RECOMPUTE, PAUSE} <= set(first) and FORWARD in last


def test_boxes_are_joined():
    spans = [Span(0, 1, FORWARD, 0), Span(1, 2, FORWARD, 0), Span(2, 3, BACKWARD, 0), Span(3.5, 4, BACKWARD, 0)]
    assert list(_joined(spans)) == [(0, 2, FORWARD, 0), (2, 3, BACKWARD, 0), (3.5, 4, BACKWARD, 0)]


def test_thin_boxes_are_drawn_as_one():
    spans = [Span(i / 10, (i + 1) / 10, (FORWARD, PAUSE)[i % 5 == 0], i) for i in range(20)]
    boxes = list(_visible(spans, 0.5))
    assert len(boxes) == 4 and boxes[0][0] == 0 and boxes[-1][1] == 2
    assert all(end - start >= 0.49 for start, end, _, _ in boxes)
