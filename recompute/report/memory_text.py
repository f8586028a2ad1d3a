"""Estimates and biggest batches as printed text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ..errors import one_line
from ..support.tables import human_bytes, human_flops, human_seconds, plain_table, render


def estimate_text(e: Any) -> str:
    """An `Estimate` as text: peak, values alive at the peak, checkpoints, memory by batch."""
    at = e.peak_at
    lines = [
        f"{e.model}, batch {e.batch}: peak {human_bytes(e.peak_bytes)} ({e.peak_bytes:,} bytes), "
        f"estimated step time {human_seconds(e.step_seconds)} ({e.costs})",
        f"at operator {at.index} of {at.operators}: {at.text}",
    ]
    if e.process_bytes is not None:
        beside = human_bytes(e.process_bytes - e.peak_bytes)
        lines.append(f"the process: about {human_bytes(e.process_bytes)}, with {beside} for Python and libraries")
    table = plain_table("alive at the peak", "bytes", "share", overflow="fold")
    rows = [(role, n) for role, n in e.by_role.items() if n]
    for role, n in rows:
        table.add_row(role, f"{n:,}", f"{n / e.peak_bytes:.1%}")
    lines.append(render(table))
    table = plain_table("by layer", "bytes", "share", overflow="fold")
    shown = list(e.by_layer.items())[:12]
    rest = e.peak_bytes - sum(n for _, n in shown)
    for layer, n in [*shown, *([(f"{len(e.by_layer) - len(shown)} more", rest)] if rest else [])]:
        table.add_row(layer, f"{n:,}", f"{n / e.peak_bytes:.1%}")
    lines.append(render(table))
    if e.checkpoints:
        table = plain_table("checkpoint", "keeps", "saves", "recomputed FLOPs", "time", overflow="fold")
        for c in e.checkpoints:
            table.add_row(
                c.name, human_bytes(c.kept_bytes), human_bytes(c.saved_bytes), human_flops(c.rebuild_flops),
                human_seconds(c.rebuild_seconds),
            )  # fmt: skip
        lines.append(render(table))
    lines += [f"note: {n}" for n in e.notes]
    lines.append(_batch_text(e.by_batch) if e.by_batch else "memory by batch: the model fixes its batch")
    lines += [str(e.ranks)] if e.ranks is not None else []
    return "\n".join(lines)


def _batch_text(f: Any) -> str:
    table = plain_table("batch", "peak in bytes", "largest error in bytes", overflow="fold")
    for p in f.pieces:
        span = f"{p.first}" if p.first == p.last else f"{p.first} to {p.last}"
        formula = f"{round(p.fixed):,} + {p.per_sample:,.10g} · batch" if p.first < p.last else f"{p.at(p.first):,}"
        table.add_row(span, formula, f"{p.deviation:,}" if p.checked else "not checked")
    why = "alignment, tiles of scratch and packing make small steps"
    said = f"memory by batch (from {len(f.compiled)} compiled batches; {why})"
    return f"{said}\n{render(table)}"


def max_batch_text(m: Any) -> str:
    """A `MaxBatch` as text: the table of strategies, and a curve."""
    table = plain_table(
        f"{m.model} in {human_bytes(m.budget)}", "batch", "peak", "step", "a sample", "time", overflow="fold"
    )
    for s in m.strategies:
        name = s.strategy if s.checkpoints is None else f"{s.strategy} ({len(s.checkpoints)})"
        if not s.batch:
            table.add_row(name, "none", f"{human_bytes(s.peak_bytes)} at 1", "", "", "")
            continue
        table.add_row(
            name, f"{s.batch:,}", human_bytes(s.peak_bytes), human_seconds(s.step_seconds),
            human_seconds(s.seconds_per_sample), f"{s.overhead:+.1%}" if s.overhead else "",
        )  # fmt: skip
    best = m.best
    said = f"biggest batch: {best.batch:,}, with '{best.strategy}'"
    lines = [render(table), f"  times: {m.costs}", *(f"  {n}" for n in m.notes), "", *_curve_lines(m), "", said]
    if best.checkpoints:
        lines.append(f"--batch {best.batch} --checkpoints {','.join(map(one_line, best.checkpoints))}")
    elif best.strategy == "slices":
        lines.append(f"--batch {best.batch} --slice {best.slices[0]}")
    elif best.strategy in ("auto", "slices+auto"):
        lines.append(f"--batch {best.batch} --memory-budget {m.budget}")
    lines += ["", str(m.ranks)] if m.ranks is not None else []
    return "\n".join(lines)


def _curve_lines(m: Any, width: int = 64, height: int = 12) -> list[str]:
    """Peak over batch as text: a letter for each strategy, a line at the budget."""
    last = max(s.curve[-1][0] for s in m.strategies)
    top = max(m.budget, *(p for s in m.strategies for _, p in s.curve if p <= 1.3 * m.budget))
    grid = [[" "] * width for _ in range(height)]
    level = height - 1 - round((height - 1) * m.budget / top)
    grid[level] = ["·"] * width
    signs = {s.strategy: "+" if "+" in s.strategy else s.strategy[0] for s in m.strategies}
    signs |= {"slices": "|"} if "slices" in signs else {}
    for s in m.strategies:
        for x in range(width):
            batch = 1 + (last - 1) * x / (width - 1)
            peak = _between(s.curve, batch)
            if peak is not None and peak <= top:
                grid[height - 1 - round((height - 1) * peak / top)][x] = signs[s.strategy]
    label = human_bytes(m.budget)
    lines = [f"{label if i == level else '':>12} │{''.join(row).rstrip()}" for i, row in enumerate(grid)]
    lines.append(f"{'0':>12} └{'─' * width}")
    lines.append(f"{'':>14}1{f'batch {last:,}':>{width - 1}}")
    lines.append(f"{'':>14}" + ", ".join(f"{sign} {name}" for name, sign in signs.items()))
    return lines


def _between(curve: Sequence[tuple[int, int]], batch: float) -> float | None:
    """The curve's peak at a batch, linearly interpolated; None outside its range."""
    for (a, p), (b, q) in pairwise(curve):
        if a <= batch <= b:
            return p + (q - p) * (batch - a) / (b - a)
    return None
