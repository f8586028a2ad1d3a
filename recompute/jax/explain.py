"""A policy as text: what is kept of the forward pass, and what computing the rest again takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..devices import Device
from ..support.tables import human_bytes, human_seconds, plain_table, render
from .costs import FUSED, VIEWS, nbytes, seconds
from .flat import Flat, Step
from .problem import value_name

#: rows of the table, at most
_ROWS = 24


@dataclass
class _Row:
    """Results of one line of code with one shape."""

    source: str
    primitive: str
    shape: str
    kept: int = 0
    dropped: int = 0
    bytes: int = 0
    seconds: float = 0.0


def table(plan: Any, device: Device) -> str:
    """The largest results of a `Policy`'s forward pass, equal ones (layers) in one row, and the plan's figures below.

    Kept are those that take long to compute again for their bytes; a dropped one that no gradient reads costs nothing.
    """
    rows: dict[tuple[str, str, str], _Row] = {}
    names = set(plan.names)
    for flat, step, times in _steps(plan.flat):
        for k, v in enumerate(step.writes):
            aval = flat.avals[v]
            if not nbytes(aval):
                continue
            key = (step.source, step.primitive, f"{aval.dtype}{list(aval.shape)}" + (f" x {times}" * (times > 1)))
            row = rows.setdefault(key, _Row(*key))
            kept = value_name(step.name, k) in names
            row.kept, row.dropped = row.kept + kept, row.dropped + (not kept)
            row.bytes += nbytes(aval) * times
            row.seconds += seconds(step.equation, device) * times
    shown = plain_table()
    for name, justify in (("line", "left"), ("operation", "left"), ("result", "left"), ("kept", "right"),
                          ("dropped", "right"), ("bytes", "right"), ("computing all again", "right")):  # fmt: skip
        shown.add_column(name, justify=justify, overflow="fold")
    ranked = sorted(rows.values(), key=lambda r: -r.bytes)
    for r in ranked[:_ROWS]:
        cells = (str(r.kept), str(r.dropped), human_bytes(r.bytes), human_seconds(r.seconds))
        shown.add_row(r.source, r.primitive, r.shape, *cells)
    return f"{render(shown, 150)}\n{_figures(plan, len(ranked) - _ROWS)}"


def _steps(flat: Flat, times: int = 1) -> Iterator[tuple[Flat, Step, int]]:
    for step in flat.steps:
        if step.body:
            yield from _steps(step.body, step.equation.params["length"])
        elif step.primitive not in VIEWS and step.primitive not in FUSED:
            yield flat, step, times


def _figures(plan: Any, left: int) -> str:
    lines = [f"{left} smaller rows left out"] if left > 0 else []
    lines.append(
        f"peak {human_bytes(plan.peak)} of a budget of {human_bytes(plan.budget)}; {human_bytes(plan.plain_peak)} "
        "without recomputation (XLA's arguments, outputs and temporaries)"
    )
    if plan.recomputes:
        bound = "" if plan.bound is None else f"; no plan of this simulated peak takes less than {plan.bound:+.1%}"
        lines.append(f"{plan.overhead:+.1%} time by the rates of {plan.device.name}{bound}")
    else:
        lines.append("nothing is recomputed: the function fits as it is")
    for name, (count, saved) in plan.given_names.items():
        lines.append(f"your name {name!r}: " + (f"{saved} of {count} values kept" if count else "only arguments"))
    lines.append(f"{plan.tried} plans compiled")
    return "\n".join(lines)
