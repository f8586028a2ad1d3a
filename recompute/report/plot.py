"""`--plot`: the timeline as a picture (PNG, SVG, PDF), through matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UsageError, load_extra
from ..language.ir import Role
from .timeline import COLOURS, ROLES, Timeline

FORMATS = ("svg", "png", "pdf")


def check_plot(path: Path) -> None:
    """Checks the path before any work: UsageError for a wrong suffix, MissingExtraError without matplotlib."""
    if path.suffix.lower().lstrip(".") not in FORMATS:
        raise UsageError(f"--plot: '{path}' must end in .{', .'.join(FORMATS)}")
    load_extra("matplotlib", "plot", "--plot")


def write_plot(lines: Mapping[str, Timeline], path: Path, title: str, kind: str) -> None:
    """Memory over each step, stacked by role, one above the other on the same axes; `kind` is one of FORMATS."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "recompute", "font.size": 9, "axes.axisbelow": True}):  # deterministic output
        figure = Figure(figsize=(10, 1.0 + 2.6 * len(lines)), layout="constrained")
        FigureCanvasAgg(figure)
        rows = figure.subplots(len(lines), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, (name, line) in zip(rows, lines.items(), strict=True):
            _draw(axes, name, line)
        rows[0].set_xlim(0, max([len(line.operators) for line in lines.values()], default=1))
        figure.suptitle(title)
        rows[-1].set_xlabel("operators of one training step (orange below: run again)")
        used = {label: h for axes in rows for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(used.values(), used.keys(), loc="outside lower center", ncols=5, frameon=False)
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        figure.savefig(path, format=kind, dpi=150, metadata=metadata)


def _draw(axes: Any, name: str, line: Timeline) -> None:
    """One step: filled steps by role, the peak, and marks for recomputed operators."""
    totals = line.totals()
    unit = 2**20
    under = [0.0] * len(line.operators)
    for role, label in ROLES.items():
        over = [u + b / unit for u, b in zip(under, totals[role], strict=True)]
        if over != under:
            axes.fill_between(*_corners(under, over), step="post", color=COLOURS[role], linewidth=0, label=label)
        under = over
    height = max(under, default=0.0)
    peak = under.index(height) if under else 0
    axes.axhline(height, color="0.25", linewidth=0.8, linestyle=":")
    axes.set_title(f"{name}: at most {height:,.2f} MiB at operator {peak:,}", loc="left", fontsize=10)
    again = [i for i, op in enumerate(line.operators) if op.role is Role.RECOMPUTE]
    mark = {"transform": axes.get_xaxis_transform(), "color": COLOURS["recomputed"], "linewidth": 0}
    for first, last in _runs(again):
        axes.fill_between([first, last + 1], -0.035, -0.005, clip_on=False, **mark)
    axes.set_ylim(0, None)
    axes.set_ylabel("MiB")
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _corners(under: list[float], over: list[float]) -> tuple[list[int], list[float], list[float]]:
    """The positions at which a band between two step functions changes, and its end, to keep files small."""
    n = len(under)
    at = [i for i in range(n) if i == 0 or (under[i], over[i]) != (under[i - 1], over[i - 1])]
    return [*at, n], [under[i] for i in [*at, n - 1]], [over[i] for i in [*at, n - 1]]


def _runs(indices: list[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for i in indices:
        if runs and runs[-1][1] == i - 1:
            runs[-1] = (runs[-1][0], i)
        else:
            runs.append((i, i))
    return runs
