"""Tables and progress bars for the terminal, made with rich."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..errors import one_line


def human_bytes(n: int) -> str:
    """Formats bytes as `1.50 GiB`."""
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError


def human_seconds(s: float) -> str:
    """Formats a time as `12.3 ms`."""
    return f"{s:.2f} s" if s >= 1 else f"{s * 1e3:.2f} ms" if s >= 1e-3 else f"{s * 1e6:.0f} µs"


def human_flops(n: int) -> str:
    """Formats an operation count as `12.3 GFLOP`."""
    size = float(n)
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.2f} TFLOP"


def plain_table(*columns: str, left: int = 1, **options: Any) -> Any:
    """A rich table whose cells are plain text: printable, on one line, without markup.

    `columns`: their heads, of which the first `left` stand to the left, the others to the right; `options`: of each.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    class Plain(Table):
        def add_column(self, header: Any = "", *more: Any, **options: Any) -> None:
            super().add_column(one_line(header), *more, **options)

        def add_row(self, *cells: Any, **options: Any) -> None:
            super().add_row(*map(one_line, cells), **options)

    table = Plain(box=SIMPLE_HEAD)
    for i, head in enumerate(columns):
        table.add_column(head, justify="left" if i < left else "right", **options)
    return table


def render(table: Any, width: int = 110) -> str:
    """A rich table as plain text, also in a notebook, where rich would display it besides."""
    from rich.console import Console

    out = io.StringIO()
    Console(
        file=out, width=width, force_terminal=False, force_jupyter=False, no_color=True, highlight=False, markup=False,
        emoji=False,
    ).print(table)  # fmt: skip
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())


def before_after(report: Any) -> str:
    """The table of a compiled step: plain, recomputed, and the change."""
    plain, after = report.plain, report.recompute
    more = () if after is None else ("recompute", "change")
    table = plain_table(f"{report.model}, batch {report.batch}, {report.optimizer}", "plain", *more)
    rows = _ROWS if after is None or not after["offloaded_values"] else (*_ROWS, *_OFFLOAD_ROWS)
    for label, key, show in rows:
        if key == "estimated_step_seconds" and getattr(report, "ranks", None) is not None:
            continue  # that of all ranks is another
        if key == "estimated_step_seconds" and report.costs != "this CPU":
            label += f" ({report.costs})"
        row = [label, show(plain[key])]
        if after is not None:
            row += [show(after[key]), _change(plain[key], after[key]) if key in _COMPARED else ""]
        table.add_row(*row)
    text = render(table)
    if report.checkpoints:
        text += f"\ncheckpoints: {', '.join(map(one_line, report.checkpoints))}"
    return text


_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("operators", "operators", lambda n: f"{n:,}"),
    ("recomputed operators", "recomputed_operators", lambda n: f"{n:,}"),
    ("peak memory", "peak_bytes", lambda n: f"{human_bytes(n)}"),
    ("  in bytes", "peak_bytes", lambda n: f"{n:,}"),
    ("  parameters and state", "persistent_bytes", human_bytes),
    ("  arena of the step", "arena_bytes", human_bytes),
    ("kept for the backward pass", "kept_bytes", human_bytes),
    ("FLOPs per step", "flops", human_flops),
    ("recomputed forward FLOPs", "repeated_forward_share", lambda x: f"{x:.1%}"),
    ("estimated step time", "estimated_step_seconds", human_seconds),
)
#: additional rows of a step that offloads values
_OFFLOAD_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("  waiting for transfers", "stall_seconds", human_seconds),
    ("transfers (asynchronous)", "transfer_seconds", human_seconds),
    ("offloaded values", "offloaded_values", lambda n: f"{n:,}"),
    ("host memory (or disk)", "host_bytes", human_bytes),
    ("  in bytes", "host_bytes", lambda n: f"{n:,}"),
)
_COMPARED = {"operators", "peak_bytes", "arena_bytes", "kept_bytes", "flops", "estimated_step_seconds"}


def _change(before: float, after: float) -> str:
    return "" if not before else f"{after / before - 1:+.1%}"


def candidates_table(candidates: Sequence[Any], always: Sequence[Any]) -> str:
    """The table of checkpoint candidates with their sizes, and the values that cross most of the graph."""
    if not candidates:
        return "no value cuts the graph: several values cross every point of it"
    table = plain_table("candidate", "type", "bytes", "work since the previous", left=2, overflow="fold")
    for c in candidates:
        table.add_row(c.value.name, str(c.value.type), f"{c.value.nbytes:,}", human_flops(c.flops))
    text = render(table)
    if always:
        text += "\nalways kept as well (they cross most of the graph): " + ", ".join(one_line(v.name) for v in always)
    return text


def tensors_table(tensors: Sequence[Any]) -> str:
    """Floating-point tensors of a model: type, whether each is trained, and why; sums below."""
    table = plain_table("tensor", "type", "trains", "why", left=4, overflow="fold")
    for t in tensors:
        table.add_row(one_line(t.name), str(t.type), "yes" if t.trains else "no", t.why)
    numbers = sum(t.type.size for t in tensors if t.trains)
    count = sum(t.trains for t in tensors)
    said = f"{count} of {len(tensors)} tensors are trained: {numbers:,} numbers (--trainable sets it)"
    return f"{render(table, 150)}\n{said}"


def passes_table(passes: Sequence[Any]) -> str:
    """The table of passes in order, each with the first paragraph of its docstring; nested passes are indented."""
    table = plain_table("", "pass", "what it does", left=3, overflow="fold")
    for number, (p, inside) in enumerate(_flat(passes, inside=False), 1):
        does = (type(p).__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        table.add_row(str(number), ("  " if inside else "") + str(p), " ".join(does.split()))
    return render(table, 150)


def _flat(passes: Sequence[Any], *, inside: bool) -> Iterator[tuple[Any, bool]]:
    for p in passes:
        yield p, inside
        yield from _flat(getattr(p, "then", ()), inside=True)


def _to_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def progress_bar(steps: int, *, quiet: bool) -> Iterator[Callable[[int, float], None]]:
    """A progress bar with the loss on standard error; nothing if that is not a terminal or `quiet`."""
    if quiet or not _to_terminal():
        yield lambda step, loss: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]}"),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=steps, loss="-")
        yield lambda step, loss: bar.update(task, completed=step, loss=f"{loss:.6g}")


@contextlib.contextmanager
def progress_binding(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar for compiling a step's kernels, on standard error; nothing if not a terminal or `quiet`."""
    if quiet or not _to_terminal():
        yield lambda done, count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("preparing kernels"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, count: bar.update(task, completed=done, total=count)


@contextlib.contextmanager
def progress_status(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A status line on standard error; nothing if that is not a terminal or `quiet`."""
    if quiet or not _to_terminal():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("compiling") as status:
        yield lambda text: status.update(escape(one_line(text)))
