"""Programs, compiled steps and estimates as HTML for notebooks: memory over the step, figures, what is kept.

The pictures are inline SVG without scripts, so that saved notebooks show them, and in the colours of the page's text.
"""

from __future__ import annotations

import functools
import html
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..compiling.compiler import CompiledStep
from ..cost import kept_values
from ..language.ir import Role
from ..language.program import Program
from ..support.tables import human_bytes, human_flops, human_seconds
from .timeline import COLOURS, ROLES, Timeline, columns, timeline

#: width and height of a picture in pixels; left margin for the scale
_WIDTH, _HEIGHT, _LEFT = 760, 190, 64
#: rows of a table that are shown
_MOST = 10


@functools.singledispatch
def html_of(shown: Any) -> str:
    """An object as HTML: its text, where nothing better is registered."""
    return f"<pre>{html.escape(str(shown))}</pre>"


@html_of.register
def program_html(program: Program) -> str:
    """A program: what it takes and trains, and its memory over time where it is compiled."""
    block = program.block
    roles = {role: sum(o.role is role for o in block.operators) for role in Role}
    trained = sum(v.size for v in block.parameters)
    rows = [
        ("inputs", ", ".join(f"{v.name}: {v.type}" for v in block.inputs)),
        ("outputs", ", ".join(block.outputs)),
        ("parameters", f"{len(block.parameters)} tensors, {trained:,} numbers"),
        ("operators", ", ".join(f"{n:,} {role.value}" for role, n in roles.items() if n)),
    ]
    pictures = _memory(timeline(block)) if block.addresses else ""
    return f"<b>{html.escape(block.name)}</b>{_table(rows)}{pictures}"


@html_of.register
def step_html(step: CompiledStep) -> str:
    """A compiled step: memory over time by role, its figures, and the largest activations that are kept."""
    f, plan = step.figures, step.planned
    recomputed = f"{f.recomputed_operators:,} of {f.operators:,} operators ({human_flops(f.repeated_flops)})"
    rows = [
        ("peak", f"{human_bytes(f.peak_bytes)} ({f.peak_bytes:,} bytes): all that the executor allocates"),
        ("estimated step", f"{human_seconds(f.estimated_step_seconds)} ({step.cost.name})"),
        ("recomputed", recomputed if f.recomputed_operators else "nothing"),
    ]
    if f.host_bytes:
        rows.append(("in host memory", f"{human_bytes(f.host_bytes)}, {human_seconds(f.stall_seconds)} of waiting"))
    if plan is not None:
        gap = "" if not plan.bound else f"; at most {plan.seconds / plan.bound - 1:.1%} above the fastest possible"
        plain = f"{human_bytes(plan.plain_peak_bytes)} and {human_seconds(plan.plain_seconds)} without it"
        rows.append(("plan", f"{plan.strategy}, {plain}{gap}"))
    kept = sorted(kept_values(step.program.block).items(), key=lambda x: -x[1])
    total = sum(n for _, n in kept)
    listed = [(name, human_bytes(n)) for name, n in kept[:_MOST]]
    more = f", the largest {_MOST} of {len(kept)}" if len(kept) > _MOST else ""
    said = f"kept for the backward pass: {human_bytes(total)}{more}"
    below = f"<details><summary>{said}</summary>{_table(listed)}</details>"
    block = step.program.block
    return f"<b>{html.escape(block.name)}</b>{_table(rows)}{_memory(timeline(block, step.cost))}{below}"


def bars_html(title: str, rows: Mapping[str, str], shares: Mapping[str, int]) -> str:
    """Facts, and bytes by name as bars with their shares."""
    total = sum(shares.values()) or 1
    lines = [
        f"<tr><th style='text-align:left'>{html.escape(name)}</th><td style='text-align:right'>{human_bytes(n)}</td>"
        f"<td><div style='width:{300 * n / total:.0f}px;height:.7em;background:{COLOURS['kept']}'></div></td></tr>"
        for name, n in shares.items()
        if n
    ]
    return f"<b>{html.escape(title)}</b>{_table(rows.items())}<table>{''.join(lines)}</table>"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = (
        f"<tr><th style='text-align:left'>{html.escape(label)}</th>"
        f"<td style='text-align:left'>{html.escape(said)}</td></tr>"
        for label, said in rows
    )
    return f"<table>{''.join(cells)}</table>"


def _memory(line: Timeline) -> str:
    """Bytes over the step as an SVG, stacked by role; the strip below marks recomputed operators."""
    n = len(line.operators)
    if not n:
        return ""
    totals = line.totals()
    sums = [sum(at) for at in zip(*totals.values(), strict=True)]
    height, parts = max(sums), columns(sums, _WIDTH)
    picked = [i for _, i in parts]  # in each column the operator of the highest sum stands for all
    under = [0] * len(picked)
    areas = []
    for role, label in ROLES.items():
        over = [u + totals[role][i] for u, i in zip(under, picked, strict=True)]
        if over != under:
            areas.append(_area(under, over, height, role, label, max(totals[role])))
        under = over
    peak = max(range(len(picked)), key=under.__getitem__)
    again = [any(line.operators[i].role is Role.RECOMPUTE for i in part) for part, _ in parts]
    wide = _WIDTH / len(parts)
    mark = f"y='{_HEIGHT + 2}' width='{wide + 0.3:.1f}' height='5' fill='{COLOURS['recomputed']}'"
    marks = "".join(f"<rect x='{_LEFT + k * wide:.1f}' {mark}/>" for k, on in enumerate(again) if on)
    said = (
        f"at most {human_bytes(height)}, at operator {picked[peak]:,} of {n:,}: {line.operators[picked[peak]].op.name}"
    )
    return (
        f"<svg width='{_LEFT + _WIDTH + 8}' height='{_HEIGHT + 28}' role='img' aria-label='{html.escape(said)}' "
        f"style='max-width:100%;font:12px sans-serif' fill='currentColor'>{_scale(height)}{''.join(areas)}{marks}"
        f"<text x='{_LEFT}' y='{_HEIGHT + 22}'>{html.escape(said)}{'; below: recomputed' if any(again) else ''}</text>"
        f"</svg>{_legend(totals)}"
    )


def _area(under: Sequence[int], over: Sequence[int], height: int, role: str, label: str, most: int) -> str:
    """One role's band between two step functions."""
    wide = _WIDTH / len(under)

    def edge(levels: Sequence[int]) -> list[str]:
        points: list[str] = []
        for b, same in itertools.groupby(range(len(levels)), key=lambda k: levels[k]):
            first, *others = same
            last, y = others[-1] if others else first, _HEIGHT * (1 - b / height)
            points += [f"{_LEFT + first * wide:.1f},{y:.1f}", f"{_LEFT + (last + 1) * wide:.1f},{y:.1f}"]
        return points

    points = " ".join([*edge(over), *reversed(edge(under))])
    title = f"{label}: at most {human_bytes(most)}"
    return f"<polygon points='{points}' fill='{COLOURS[role]}'><title>{html.escape(title)}</title></polygon>"


def _scale(height: int) -> str:
    """Lines at round numbers of bytes."""
    step = 2 ** math.ceil(math.log2(max(1, height / 5)))
    lines = []
    for b in range(0, height + 1, step):
        y = _HEIGHT * (1 - b / height)
        lines.append(
            f"<path d='M{_LEFT} {y:.1f}h{_WIDTH}' stroke='currentColor' stroke-opacity='.15'/>"
            f"<text x='{_LEFT - 6}' y='{max(10, y + 4):.1f}' text-anchor='end'>{human_bytes(b) if b else '0'}</text>"
        )
    return "".join(lines)


def _legend(totals: Mapping[str, Sequence[int]]) -> str:
    squares = (
        f"<span style='white-space:nowrap;margin-right:1em'><span style='display:inline-block;width:.8em;height:.8em;"
        f"background:{COLOURS[role]}'></span> {html.escape(ROLES[role])}</span> "
        for role, bytes_ in totals.items()
        if any(bytes_)
    )
    return f"<div style='font:12px sans-serif;max-width:{_LEFT + _WIDTH}px'>{''.join(squares)}</div>"
