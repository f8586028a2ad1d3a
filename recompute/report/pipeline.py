"""A page about a pipeline: what the ranks of each stage do when, and what they hold meanwhile."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..passes.communication.timeline import BACKWARD, COMMUNICATE, FORWARD, PAUSE, RECOMPUTE, UPDATE, Span
from ..support.tables import human_bytes, human_seconds

#: colours that are distinguishable with any colour vision; neighbouring micro-batches have two shades
_COLOURS = {
    FORWARD: ("#1f6fb5", "#66b5ea"), BACKWARD: ("#a05fb4", "#c99ad8"), RECOMPUTE: ("#e0651b", "#f09a63"),
    UPDATE: ("#6b7683",), COMMUNICATE: ("#c2406b",), PAUSE: ("#e9ecef",),
}  # fmt: skip
_WORDS = {
    FORWARD: "forward", BACKWARD: "backward", RECOMPUTE: "recomputation", UPDATE: "sums and updates",
    COMMUNICATE: "waits for data that move", PAUSE: "waits for other ranks (bubble)",
}  # fmt: skip
#: pixels: of a row of boxes, of the memory below it, between stages, left of the chart; of the narrowest and widest
_ROW, _MEMORY, _GAP, _LEFT = 20, 34, 12, 128
_NARROW, _WIDE = 1000, 6000
#: pixels that the box of a micro-batch should have, and below which boxes are drawn with their neighbours
_BOX, _THIN = 14, 0.7

_STYLE = """
:root { --page: #f6f7f8; --card: #fff; --ink: #1d2329; --soft: #5d6874; --line: #dde1e6; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --card: #1c2024; --ink: #e6e9ec; --soft: #9aa5b1; --line: #323940; } }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 25px; margin: 0; } h2 { font-size: 17px; margin: 0 0 8px; } .soft { color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 18px 20px;
  margin-top: 18px; }
.chart { overflow-x: auto; } svg { display: block; } svg text { fill: var(--ink); font-size: 11px; }
.chart text.n { fill: #fff; font-size: 9px; text-anchor: middle; }
.key { display: inline-block; margin-right: 18px; } .key i { display: inline-block; width: 12px; height: 12px;
  margin-right: 6px; border: 1px solid var(--line); vertical-align: -1px; }
table { border-collapse: collapse; } td, th { padding: 3px 14px 3px 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } th { color: var(--soft); font-weight: 500; }
"""


def pipeline_page(estimate: Any, title: str = "") -> str:
    """The page of a `StagesEstimate`: a row of boxes for each stage, its memory over time, and a table."""
    name = html.escape(title or f"mesh {estimate.mesh}")
    facts = (
        f"mesh {estimate.mesh}, {estimate.schedule}, batch {estimate.batch:,} in {estimate.micro_batches:,} "
        f"micro-batches. Step {human_seconds(estimate.step_seconds)}, of which {estimate.bubble:.1%} pauses; "
        f"communication that nothing hides {human_seconds(estimate.exposed_communication_seconds)}; largest peak "
        f"{human_bytes(estimate.peak_bytes)}. Times: {estimate.costs}."
    )
    keys = "".join(
        f'<span class="key"><i style="background:{_COLOURS[k][0]}"></i>{html.escape(w)}</span>'
        for k, w in _WORDS.items()
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{name}: a step of a pipeline</title><style>{_STYLE}</style></head>'
        f'<body><main><h1>{name}</h1><p class="soft">{html.escape(facts)}</p>'
        f"<section><h2>What each stage does, and what it holds</h2><p>{keys}</p>"
        f'<div class="chart">{_chart(estimate)}</div><p class="soft">Numbers are micro-batches. Below each row: bytes '
        "of parameters, state and live values of one rank; the line is the peak that it allocates.</p></section>"
        f"<section><h2>Stages</h2>{_table(estimate)}</section></main></body></html>\n"
    )


# -- the chart --------------------------------------------------------------------------------------------------------


def _chart(estimate: Any) -> str:
    """The rows of all stages as SVG."""
    rows = [estimate.spans(s.place) for s in estimate.stages]
    total = estimate.step_seconds or 1.0
    width = _width(rows, total)
    height = len(rows) * (_ROW + _MEMORY + _GAP) + 24
    most = max(s.peak_bytes for s in estimate.stages)
    parts = [f'<svg width="{_LEFT + width + 12}" height="{height}" role="img" aria-label="what each stage does">']
    for number, (stage, spans) in enumerate(zip(estimate.stages, rows, strict=True)):
        top = number * (_ROW + _MEMORY + _GAP)
        parts.append(f'<text x="0" y="{top + 14}">stage {stage.place}</text>')
        parts.append(f'<text x="0" y="{top + _ROW + 14}">peak {human_bytes(stage.peak_bytes)}</text>')
        parts += _boxes(spans, total, width, top)
        parts += _memory(stage, total, width, top + _ROW + 2, most)
    foot = height - 8
    for k in range(5):
        at, word = _LEFT + width * k / 4, human_seconds(total * k / 4) if k else "0"
        parts.append(f'<text x="{at:.0f}" y="{foot}" text-anchor="{"end" if k == 4 else "start"}">{word}</text>')
    return "".join([*parts, "</svg>"])


def _width(rows: Sequence[Sequence[Span]], total: float) -> int:
    """Pixels for the step, such that a usual box of a micro-batch is wide enough for its number."""
    boxes = sorted(e - s for row in rows for s, e, k, _ in _joined(row) if k in (FORWARD, BACKWARD))
    usual = boxes[len(boxes) // 2] if boxes else total
    return int(min(max(_BOX * total / usual if usual else _NARROW, _NARROW), _WIDE))


def _joined(spans: Iterable[Span]) -> Iterator[tuple[float, float, str, int]]:
    """Start, end, kind and micro-batch of boxes: what follows each other and is alike is one."""
    last: tuple[float, float, str, int] | None = None
    for s in spans:
        if last is not None and last[2:] == (s.kind, s.micro_batch) and math.isclose(last[1], s.start):
            last = (last[0], s.end, s.kind, s.micro_batch)
            continue
        if last is not None:
            yield last
        last = (s.start, s.end, s.kind, s.micro_batch)
    if last is not None:
        yield last


def _visible(spans: Iterable[Span], least: float) -> Iterator[tuple[float, float, str, int]]:
    """The boxes; those of less than `least` seconds are drawn as what takes most of the time around them."""
    group: list[tuple[float, float, str, int]] = []
    for box in _joined(spans):
        if box[1] - box[0] >= least:
            if group:
                yield _one(group)
                group = []
            yield box
            continue
        group.append(box)
        if group[-1][1] - group[0][0] >= least:
            yield _one(group)
            group = []
    if group:
        yield _one(group)


def _one(group: Sequence[tuple[float, float, str, int]]) -> tuple[float, float, str, int]:
    """Thin boxes as one."""
    taken: dict[tuple[str, int], float] = {}
    for start, end, kind, micro_batch in group:
        taken[kind, micro_batch] = taken.get((kind, micro_batch), 0.0) + end - start
    kind, micro_batch = max(taken, key=taken.__getitem__)
    return group[0][0], group[-1][1], kind, micro_batch


def _boxes(spans: Sequence[Span], total: float, width: int, top: int) -> list[str]:
    """A path for each colour, and the numbers of micro-batches where they fit."""
    order = {n: i for i, n in enumerate(sorted({s.micro_batch for s in spans if s.micro_batch >= 0}))}
    paths: dict[str, list[str]] = {}
    numbers = []
    for start, end, kind, micro_batch in _visible(spans, _THIN * total / width):
        x, w = _LEFT + start / total * width, (end - start) / total * width
        shades, number = _COLOURS[kind], order.get(micro_batch, 0)
        paths.setdefault(shades[number % len(shades)], []).append(f"M{x:.1f} {top}h{w:.1f}v{_ROW}h{-w:.1f}z")
        if micro_batch >= 0 and w >= 5 * len(str(number)) + 3:
            numbers.append(f'<text class="n" x="{x + w / 2:.1f}" y="{top + 14}">{number}</text>')
    return [*(f'<path fill="{colour}" d="{"".join(d)}"/>' for colour, d in paths.items()), *numbers]


def _memory(stage: Any, total: float, width: int, top: int, most: int) -> list[str]:
    """The bytes of a stage over time, the largest in each pixel, and a line at its peak."""
    bottom = top + _MEMORY
    columns: dict[int, int] = {}
    for (start, held), (end, _) in zip(stage.memory, [*stage.memory[1:], (total, 0)], strict=True):
        for x in {int(start / total * width), max(int(start / total * width), int(end / total * width) - 1)}:
            columns[x] = max(columns.get(x, 0), held)
    line = [f"M{_LEFT} {bottom}"]
    for x in sorted(columns):
        line.append(f"L{_LEFT + x} {bottom - columns[x] / most * _MEMORY:.1f}")
    peak = bottom - stage.peak_bytes / most * _MEMORY
    return [
        f'<path fill="#0f9d76" fill-opacity=".45" d="{"".join(line)}L{_LEFT + width} {bottom}z"/>',
        f'<path stroke="#0b7a54" d="M{_LEFT} {peak:.1f}h{width}"/>',
    ]


def _table(estimate: Any) -> str:
    """The figures of the stages."""
    heads = ("stage", "peak", "bytes", "parameters and state", "computes", "waits for ranks", "waits for data")
    rows = [
        (s.place, human_bytes(s.peak_bytes), f"{s.peak_bytes:,}", f"{s.persistent_bytes:,}",
         *map(human_seconds, (s.compute_seconds, s.pause_seconds, s.communication_seconds)))
        for s in estimate.stages
    ]  # fmt: skip
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(str(c))}</td>' for c in row)}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{h}</th>' for h in heads)}</tr>{body}</table>"
