"""Output files: an early check that all can be written, and the models."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..support.files import is_special, why_no_folder, why_not_writable

if TYPE_CHECKING:
    from .job import Job

#: options that name an output file
_FILES = (
    "output",
    "save_trained",
    "json",
    "report",
    "plot",
    "trace",
    "snapshot",
    "save_plan",
    "save_problem",
    "pareto",
    "profile",
)
#: and those that name a folder
_FOLDERS = ("dump_ir", "library")


def check_arguments(args: argparse.Namespace) -> None:
    """UsageError if a file cannot be written, or if two options name the same file."""
    taken: dict[str, str] = {}
    for name in (*_FILES, *_FOLDERS):
        path, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if path is None or (path == Path() and name in ("pareto", "profile")):  # given without a file
            continue
        if str(path) == "-":
            _check_standard_output(name)
            continue
        if why := _why_not(name, path):
            raise UsageError(f"{option}: cannot write '{path}': {why}")
        for file in _written(name, path):
            check_not_read(args, option, file)
            if file != path and (why := why_not_writable(file)):
                raise UsageError(f"{option}: cannot write '{file}': {why}")
            where = os.path.realpath(file)
            if where in taken and not is_special(file):
                raise UsageError(f"{taken[where]} and {option} would both write '{file}'")
            taken[where] = option


def check_not_read(args: argparse.Namespace, option: str, file: Path) -> None:
    """UsageError if what an option would write is the model or the data, which are read."""
    for what in ("model", "data", "eval"):
        read = getattr(args, what, None)
        if read is not None and os.path.isfile(file) and os.path.realpath(read) == os.path.realpath(file):
            raise UsageError(
                f"{option} would overwrite '{file}', which is the {what} of this command: name another file"
            )


def _written(name: str, path: Path) -> list[Path]:
    from ..exporter.step import state_file

    return [path, state_file(path)] if name == "output" and not is_special(path) else [path]


def _why_not(name: str, path: Path) -> str:
    if name in _FOLDERS:
        return why_no_folder(path)
    if name == "profile" and not path.parent.exists():  # its folder will be created
        return why_no_folder(path.parent)
    return why_not_writable(path)


def _check_standard_output(name: str) -> None:
    if name != "json":
        option = f"--{name.replace('_', '-')}"
        raise UsageError(f"{option} cannot write to standard output ('-'), only --json can: name a file")
    if sys.stdout is None:
        raise UsageError("--json -: standard output is closed")


def list_models() -> int:
    """`--list-models`: prints the networks of the zoo."""
    from .. import models
    from .ending import say

    for name in models.names():
        entry = models.info(name)
        say(f"{name:<16} {entry.description}")
    return 0


def begin_library(args: argparse.Namespace) -> None:
    """`--library`: native code is made for its target.  UsageError for names that it cannot have, and for targets,
    processors and places without one, MissingExtraError without a C compiler or what links."""
    from ..exporter.library.write import check_name

    if args.place != "cpu":
        raise UsageError(f"--library is for processors, not for --place {args.place}")
    if args.name is not None:
        check_name(args.name)
    build_library_for(args.target or "x86_64", args.cpu, portable=args.portable_bits)


def build_library_for(target: str, cpu: str | None, *, portable: bool) -> None:
    """`rc.build_for`, and a look for the tools that a library needs later.  UsageError for names that are not known,
    MissingExtraError without a C compiler or what links."""
    from ..exporter.library.tools import archiver, compiler
    from ..exporter.library.write import build_for

    build_for(target, cpu, portable=portable)
    compiler(target)
    archiver(target)


def begin_portable(args: argparse.Namespace) -> None:
    """`--portable-bits`: native code of this process has the bits of every processor.  UsageError for other places."""
    from ..exporter.library.write import portable_bits

    if args.place.partition(":")[0] != "cpu":
        raise UsageError(f"--portable-bits are those of processors, not of --place {args.place}")
    portable_bits()


def write_models(job: Job, step: Any) -> None:
    """Writes the training step as it is now, after --run with what was trained, and the trained model."""
    from ..exporter.step import save_step
    from ..exporter.trained import export_trained

    if job.args.output is not None:
        state = save_step(step.program, job.args.output, metadata={"recompute.steps_run": str(job.args.run or 0)})
        job.report.output = str(job.args.output)
        after = f", after {job.args.run} steps" if job.args.run else ", with the model's weights"
        job.written.append((job.args.output, f" (the training step{after})"))
        if state != job.args.output:
            job.written.append((state, " (its weights and state)"))
    if job.args.library is not None:
        from ..exporter.library.write import write_library

        files = write_library(step.program, job.args.library, name=job.args.name or "step")
        job.report.library = [str(f) for f in files]
        job.written.append((job.args.library, f" ({', '.join(f.name for f in files)})"))
    if job.args.save_trained is not None:
        export_trained(step.program, job.args.save_trained)
        job.report.trained = str(job.args.save_trained)
        job.written.append((job.args.save_trained, f" (the model after {job.args.run} steps, for inference)"))


def report_attention(job: Any, program: Any) -> None:
    """Says where attention will be one operator, and where not, and why."""
    from ..passes.attention.find_attention import find_attention

    _, notes = find_attention(program.block, program.data)
    count = sum("' is attention" in note for note in notes)
    if notes:
        job.say(f"attention in tiles: {count} of {len(notes)} softmaxes")
    for note in notes:
        job.say(f"  {note}")
