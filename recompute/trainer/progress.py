"""Progress of a run on a terminal: epoch, steps, loss, samples a second, time left."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ..support.tables import human_bytes
from .history import History
from .log import flat


class Progress:
    """Says how far a run is; this one says nothing."""

    def epoch(self, number: int, of: int, steps: int | None, done: int) -> None:
        """An epoch begins, of `steps` steps (None: not known), of which `done` were done before."""

    def step(self, loss: float, samples: int) -> None:
        """A step has ended."""

    def evaluating(self, done: int, of: int | None) -> None:
        """Batches of the evaluation."""


class _Bar(Progress):
    """A bar on standard error."""

    def __init__(self, bar: Any, peak: int) -> None:
        self._bar, self._peak = bar, human_bytes(peak)
        self._task: Any = None
        self._evaluation: Any = None

    def epoch(self, number: int, of: int, steps: int | None, done: int) -> None:
        for task in (self._task, self._evaluation):
            if task is not None:
                self._bar.remove_task(task)
        self._evaluation = None
        what = f"epoch {number}/{of}"
        self._task = self._bar.add_task(what, total=steps, completed=done, loss="-", rate="", peak=self._peak)

    def step(self, loss: float, samples: int) -> None:
        speed = next(t.speed for t in self._bar.tasks if t.id == self._task)
        rate = f"{speed * samples:,.0f} samples/s" if speed else ""
        self._bar.update(self._task, advance=1, loss=f"{loss:.4g}", rate=rate)

    def evaluating(self, done: int, of: int | None) -> None:
        if self._evaluation is None:
            self._evaluation = self._bar.add_task("evaluation", total=of, loss="", rate="", peak=self._peak)
        self._bar.update(self._evaluation, completed=done)


@contextlib.contextmanager
def shown(peak: int, *, quiet: bool) -> Iterator[Progress]:
    """A bar where standard error is a terminal and not `quiet`; else nothing."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[peak]}"), TimeRemainingColumn(),
    )  # fmt: skip
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar, peak)


def begin_lines(history: History, ranks: Sequence[int]) -> list[str]:
    """Printed lines before the first step: notes, the memory, that of other `ranks`, where the run goes on."""
    peaks = history.peak_bytes
    parts = [f"training {human_bytes(peaks['training'])}"]
    if peaks["evaluation"]:
        parts.append(f"evaluation {human_bytes(peaks['evaluation'])}, in the same arena")
    lines = [f"note: {note}" for note in history.notes]
    each = f", on each of {len(ranks)} ranks" if len(ranks) > 1 else ""
    if len(set(ranks)) > 1:
        each = f", on rank 0; at most {human_bytes(max(ranks))} on one of {len(ranks)} ranks"
    lines.append(f"peak memory: {human_bytes(peaks['predicted'])} ({', '.join(parts)}){each}")
    return lines + ([] if history.resumed_at is None else [f"resumed after step {history.resumed_at:,}"])


def epoch_line(results: dict[str, Any], epochs: int) -> str:
    """The results of an epoch."""
    shown = {k: v for k, v in flat(results).items() if k.startswith(("train.", "eval."))}
    text = ", ".join(f"{k.replace('.', ' ')} {v:.4g}" for k, v in shown.items() if isinstance(v, float))
    return f"epoch {results['epoch']}/{epochs}: {text}, {results['samples_per_second']:,.0f} samples a second"
