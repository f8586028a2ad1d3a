"""Comparison of all strategies on one step, and the curve of memory against time."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..compiling.compiler import CompiledStep
from ..errors import RecomputeError
from ..passes.planners import PLANNERS, plan_of
from ..passes.planners.base import import_all
from ..passes.planners.fit.plan import candidates
from ..passes.planners.fit.problem import Fitting
from ..passes.planners.methods.auto import Auto, frontier_of
from ..planning.figures import cost_of, figures_of, kept_for_backward
from ..support.tables import human_bytes, human_seconds, plain_table, render

#: most plans of one strategy that are compiled
_TRIES = 3
#: approximate number of points of a curve
_POINTS = 20

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """The result of a strategy at a budget; `refusal`: why it gives no plan.

    `overhead`: extra estimated time as a share of the plain step's; `gap`: how far above the bound, as a share of it;
    `seconds`: time of planning and compiling.
    """

    strategy: str
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    overhead: float | None = None
    gap: float | None = None
    fits: bool = False
    seconds: float = 0.0
    refusal: str | None = None


def compare(
    fitting: Fitting, budget: int, checkpoints: CompiledStep | None = None, progress: Progress = lambda text: None
) -> list[Row]:
    """A row for the plain step, for the user's `checkpoints`, and for every fast strategy, best first.

    Peaks are those of compiled steps, parameters and state included.
    """
    import_all()
    plain = figures_of(fitting, fitting.plain, strategy="plain", budget=budget)
    rows = [_row(plain, 0.0)]
    if checkpoints is not None:
        kept = kept_for_backward(checkpoints.program.logical)[1]
        peak = checkpoints.figures.peak_bytes
        overhead = checkpoints.figures.estimated_step_seconds / plain.plain_seconds - 1
        rows.append(Row("your checkpoints", peak, kept, overhead, None, peak <= budget))
    for strategy, cls in PLANNERS.items():
        if cls.quick is not None:
            progress(f"strategy {strategy}")
            rows.append(_tried(fitting, budget, strategy, dict(cls.quick)))
    return sorted(rows, key=lambda r: (r.refusal is not None, not r.fits, r.overhead or 0.0, r.strategy))


def _tried(fitting: Fitting, budget: int, strategy: str, options: dict[str, Any]) -> Row:
    start = time.perf_counter()
    try:
        tried = list(candidates(fitting, budget, strategy, options, _TRIES, reorder=False))
        fitted = fitting.best_of(tried or [fitting.plain], budget)  # none: there is nothing that it would recompute
    except RecomputeError as e:
        return Row(strategy, seconds=time.perf_counter() - start, refusal=str(e))
    return _row(figures_of(fitting, fitted, strategy=strategy, budget=budget), time.perf_counter() - start)


def _row(f: Any, seconds: float) -> Row:
    return Row(f.strategy, f.peak_bytes, f.kept_bytes, f.overhead, f.gap, f.fits, seconds)


def compare_text(rows: Sequence[Row], plain_peak: int, budget: int, costs: str) -> str:
    """The rows as a printed table."""
    heads = ("peak", "of plain", "kept", "time", "gap at most", "found in")
    table = plain_table(f"budget {human_bytes(budget)} ({budget / plain_peak:.0%})", *heads)
    for r in rows:
        if r.refusal is not None:
            continue
        peak, kept = r.peak_bytes or 0, r.kept_bytes or 0
        name = r.strategy if r.fits else f"{r.strategy} (does not fit)"
        gap = "" if r.gap is None else f"{r.gap:.2%}"
        cells = [human_bytes(peak), f"{peak / plain_peak:.1%}", human_bytes(kept), f"{r.overhead or 0:+.1%}", gap]
        table.add_row(name, *cells, human_seconds(r.seconds) if r.seconds else "")
    text = render(table)
    for r in rows:
        if r.refusal is not None:
            text += f"\n{r.strategy}: {r.refusal}"
    return (
        f"{text}\ntimes are estimates for {costs}; gaps are proven for any order and any number of recomputations\n"
        "all rows use the given order of operators; --memory-budget without --compare also reorders them"
    )


@dataclass(frozen=True)
class CurvePoint:
    """A compiled plan: its peak, its overhead, and a lower bound of the overhead of all plans with that peak."""

    peak_bytes: int
    overhead: float
    bound: float
    method: str


@dataclass(frozen=True)
class Curve:
    """Peaks against extra time, from the plain step to the lowest peak that was found."""

    plain_peak_bytes: int
    points: tuple[CurvePoint, ...]
    costs: str

    def to_dict(self) -> dict[str, Any]:
        """The curve as numbers and lists, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        table = plain_table("peak", "of plain", "time", "at least", left=0)
        table.add_column("found by")
        for p in self.points:
            share = f"{p.peak_bytes / self.plain_peak_bytes:.1%}"
            table.add_row(human_bytes(p.peak_bytes), share, f"{p.overhead:+.2%}", f"{p.bound:+.2%}", p.method)
        return f"{render(table)}\ntimes are estimates for {self.costs}"


def pareto(fitting: Fitting, progress: Progress = lambda text: None) -> Curve:
    """The curve of the step: plans by `auto` from the lowest peak to the plain one, each compiled."""
    problem = fitting.derived.problem
    progress("cuts and blocks")
    frontier = frontier_of(problem)
    low, high = frontier.lowest.peak, fitting.plain.peak
    for k in range(_POINTS // 2):
        progress(f"local search, {k + 1} of {_POINTS // 2}")
        Auto(moves=4000, effort=0.2).refine(frontier, low + (high - low) * k // (_POINTS // 2))
    points = list(frontier)
    chosen = [points[round(i * (len(points) - 1) / _POINTS)] for i in range(_POINTS + 1)] if points else []
    curve: dict[int, CurvePoint] = {}
    for p in {p.peak: p for p in chosen}.values():
        progress(f"compiling the plan of {human_bytes(p.peak)}")
        step = fitting.carry_out(fitting.derived.for_block(plan_of(p.sequence)), False)
        f = figures_of(fitting, step, strategy=p.method, budget=step.peak)
        bound = (f.bound or 0.0) / f.plain_seconds - 1
        curve[step.peak] = CurvePoint(step.peak, f.overhead, bound if math.isfinite(bound) else 0.0, p.method)
    curve = {peak: p for peak, p in curve.items() if peak < high}  # the plain step repeats a little itself
    curve[high] = CurvePoint(high, 0.0, 0.0, "plain")
    return Curve(high, tuple(_unbeaten(curve)), cost_of(fitting).name)


def _unbeaten(points: dict[int, CurvePoint]) -> list[CurvePoint]:
    kept: list[CurvePoint] = []
    for peak in sorted(points):
        if not kept or points[peak].overhead < kept[-1].overhead:
            kept.append(points[peak])
    return [dataclasses.replace(p, bound=min(p.bound, p.overhead)) for p in kept]


def draw_curve(curve: Curve, title: str) -> Any:
    """A matplotlib figure of the curve and its bound.  MissingExtraError without matplotlib (extra `plot`)."""
    from ..errors import load_extra

    figure = load_extra("matplotlib.figure", "plot", "a picture of the curve").Figure(
        figsize=(7, 4), layout="constrained"
    )
    axes = figure.add_subplot()
    x = [p.peak_bytes / 2**20 for p in curve.points]
    axes.plot(x, [100 * p.overhead for p in curve.points], marker="o", markersize=3, label="plans")
    axes.plot(x, [100 * p.bound for p in curve.points], linestyle="--", color="gray", label="no plan can be below")
    axes.set(
        xlabel="peak, MiB",
        ylabel="extra time, %",
        title=title,
        ylim=(min(0.0, 100 * min(p.bound for p in curve.points)), None),
    )
    axes.legend()
    return figure
