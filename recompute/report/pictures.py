"""The command line's pictures: `--report`, `--plot`, `--trace`, `--snapshot`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..compiling.compiler import CompiledStep
from ..language.program import Program
from ..passes.communication.clock import Exchange
from ..support.files import replacing
from .timeline import timeline

_FLAGS = ("report", "plot", "trace", "snapshot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    group = parser.add_argument_group("pictures")
    group.add_argument(
        "--report", type=Path, metavar="FILE.html", help="one page about memory, arena, checkpoints and times"
    )
    group.add_argument("--plot", type=Path, metavar="FILE.svg", help="memory over the step as .svg, .png or .pdf")
    group.add_argument("--trace", type=Path, metavar="FILE.json", help="a trace for Perfetto or chrome://tracing")
    group.add_argument("--snapshot", type=Path, metavar="FILE.pickle", help="a snapshot for PyTorch's memory_viz page")


def paths(args: argparse.Namespace) -> list[Path]:
    """The requested files."""
    return [p for p in (getattr(args, flag) for flag in _FLAGS) if p is not None]


def check_arguments(args: argparse.Namespace) -> None:
    """Checks the options before any work: UsageError for a wrong suffix, MissingExtraError without matplotlib."""
    if args.plot is not None:
        from .plot import check_plot

        check_plot(args.plot)


@dataclasses.dataclass(frozen=True)
class Pictures:
    """The data of the pictures.

    `facts`: the command's report; `forward`: the forward program; `step`: the recomputed step, or
    `plain` again; `recompile`: the program with other checkpoints; `measured`: seconds of `step`'s operators;
    `exchange`: how ranks communicate, if there are several.
    """

    facts: Any
    forward: Program
    plain: CompiledStep
    step: CompiledStep
    recompile: Callable[[list[str]], CompiledStep]
    measured: list[float] | None = None
    exchange: Exchange | None = None

    def write(self, args: argparse.Namespace) -> Iterator[Path]:
        """Writes the requested files, each atomically; returns their paths."""
        for flag in _FLAGS:
            path = getattr(args, flag)
            if path is not None:
                with replacing(path) as temporary:
                    getattr(self, flag)(temporary, path)
                yield path

    def steps(self) -> dict[str, CompiledStep]:
        """The steps by name: plain, and recomputed if there is recomputation."""
        return {"plain": self.plain} if self.step is self.plain else {"plain": self.plain, "recompute": self.step}

    def title(self) -> str:
        """One line: model, batch, optimizer."""
        return f"{Path(self.facts.model).name}, batch {self.facts.batch}, {self.facts.optimizer}"

    def report(self, temporary: Path, path: Path) -> None:
        """The page."""
        from .data import curve_points, report_data
        from .page import page

        step = None if self.step is self.plain else self.step
        facts = self.facts
        data = report_data(
            self.forward,
            self.plain,
            step,
            title={
                "model": Path(facts.model).name, "batch": facts.batch, "optimizer": facts.optimizer,
                "loss": facts.loss, "parameters": facts.parameters, "costs": self.step.cost.name,
            },
            curve=curve_points(self.forward, self.plain, step, self.recompile),
            measured=self.measured,
            run=facts.run,
            exchange=self.exchange,
            ranks=facts.ranks,
        )  # fmt: skip
        temporary.write_text(page(data), encoding="utf-8")

    def plot(self, temporary: Path, path: Path) -> None:
        """The timeline."""
        from .plot import write_plot

        lines = {name: timeline(s.program.block, s.cost) for name, s in self.steps().items()}
        write_plot(lines, temporary, self.title(), path.suffix.lower().lstrip("."))

    def trace(self, temporary: Path, path: Path) -> None:
        """The trace."""
        from .trace import trace

        steps = self.steps()
        lines = {name: timeline(s.program.block, s.cost, self.exchange) for name, s in steps.items()}
        measured = None if self.measured is None else {list(steps)[-1]: self.measured}
        temporary.write_text(json.dumps(trace(lines, measured, self.title())))

    def snapshot(self, temporary: Path, path: Path) -> None:
        """The snapshot of the last step."""
        from .snapshot import snapshot

        line = timeline(self.step.program.block, self.step.cost)
        data = snapshot(line, self.measured, Path(self.facts.model).stem + ".rir")
        temporary.write_bytes(pickle.dumps(data, protocol=4))
