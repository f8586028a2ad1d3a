"""Which options exclude each other, and which need another: two tables, checked before any work is done."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError


def option(name: str) -> str:
    """How an option is written on the command line; a fact, as it is."""
    dashed = {"budget": "memory-budget", "rank_count": "ranks"}.get(name, name.replace("_", "-"))
    return name if " " in name else f"--{dashed}"


#: options that run or write a step
_DOINGS = ("run", "check", "prove", "output", "dump_ir", "library")
#: options about one rank's step alone
_OF_ONE_RANK = (
    "run", "check", "prove", "output", "library", "compare", "pareto", "save_problem", "plan", "save_plan", "strategy",
    "effort", "seconds", "estimate", "max_batch", "offload", "allow", "slice", "plot", "snapshot", "list_checkpoints",
    "profile", "report",
)  # fmt: skip
_PICTURES = ("report", "plot", "trace", "snapshot")
#: what no list comes with; and options that print a list, each with what it excludes besides
_NOT_OF_LISTS = ("check", "prove", "output", "library", "save_trained", "estimate", "max_batch", "compare", "pareto",
                 "save_plan", "save_problem", "profile", *_PICTURES)  # fmt: skip
_LISTS = {
    "list_models": ("list_parameters", "list_checkpoints", "print_passes", "look", "run", "dump_ir", "json"),
    "list_parameters": ("list_checkpoints", "print_passes", "run", "dump_ir"),
    "list_checkpoints": ("print_passes", "run"),
    "print_passes": ("look", "dump_ir", "json"),
}
_BOTH = "both define what is recomputed"
_ADAPTERS = "--lora says what trains (train=NAMES in it: what else)"

#: option or fact, options that it excludes, why
EXCLUDED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("look", (*_DOINGS, "estimate", "max_batch", "compare", "pareto", "mesh", "list_parameters", "list_checkpoints",
     "checkpoints", "strategy", "plan", "offload", "allow", "slice", "save_plan", "save_problem", "profile",
     *_PICTURES), "--look reads the file, and compiles nothing"),
    ("look", ("input_shapes", "trainable", "freeze", "loss"), "--look says what holds without it"),
    *((name, ("estimate", *_PICTURES), f"{option(name)} is about many plans, and draws no step")
      for name in ("compare", "pareto", "save_problem")),
    *((name, (*_NOT_OF_LISTS, *others), f"{option(name)} prints a list and stops") for name, others in _LISTS.items()),
    ("compare", _DOINGS, "--compare does not run or write a step"),
    ("compare", ("pareto", "save_problem", "max_batch"), "--compare prints a table and stops"),
    ("save_problem", ("pareto", "max_batch"), "--save-problem writes the problem and stops"),
    ("compare", ("strategy", "plan", "save_plan"), "--compare runs every strategy"),
    ("pareto", _DOINGS, "--pareto does not run or write a step"),
    ("pareto", ("strategy", "plan", "save_plan", "budget", "checkpoints"), "--pareto draws the whole curve"),
    ("save_problem", _DOINGS, "--save-problem does not run or write a step"),
    ("allow", ("compare", "pareto", "save_problem", "max_batch", "estimate"),
     "--allow permits approximate gradients, which this option does not consider"),
    ("checkpoints", ("strategy", "plan", "save_plan"), f"--checkpoints and a plan {_BOTH}"),
    ("offload", ("compare", "pareto", "save_problem", "max_batch"),
     "--offload moves values, which this option does not consider"),
    ("offload", ("plan",), "a saved plan already defines which values are offloaded"),
    ("effort", ("compare", "pareto", "save_problem", "checkpoints", "plan"),
     "--effort sets how long planning for a budget may take"),
    ("seconds", ("compare", "pareto", "save_problem", "checkpoints", "plan"),
     "--seconds sets how long planning for a budget may take"),
    ("estimate", ("strategy", "plan"), "--estimate is of the plain step, or of that with --checkpoints"),
    ("max_batch", ("batch", "run", "output", "check", "estimate"), "--max-batch only finds the batch and runs nothing"),
    ("library", ("run", "check", "estimate", "max_batch", "offload", "save_trained"),
     "--library writes a step and runs nothing"),
    ("lora", ("trainable", "dequantize"), _ADAPTERS),
    ("a planning problem", (*_DOINGS, *_PICTURES, "pareto", "plan", "save_plan", "save_problem", "checkpoints",
     "estimate", "max_batch", "look", "list_parameters", "list_checkpoints", "print_passes", "profile", "slice"),
     "the file is a planning problem, and no model"),
    ("a mesh", ("run", "check", "prove", "output", "library", "compare", "pareto", "save_problem"),
     "--mesh only estimates what ranks take"),
    ("a mesh with pp", _OF_ONE_RANK, "with a pipeline, --mesh only estimates the stages (--trace draws the ranks)"),
    ("a mesh with pp", ("budget",), "a memory budget cannot be combined with a pipeline yet"),
    ("--mesh auto", _OF_ONE_RANK, "--mesh auto only searches for the fastest mesh"),
    ("--mesh auto", ("zero", "micro_batches", "schedule", "chunks", "checkpoints", "dump_ir", "print_passes"),
     "--mesh auto tries many configurations"),
)  # fmt: skip

_BUDGET = "--memory-budget SIZE, e.g. --memory-budget 16GiB"
_LIBRARY = "--library DIR, which writes the step as a library"
_BATCH = "--batch N, the samples of a step of all ranks"
#: option or fact, options or facts of which it needs one, what to give
NEEDED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("data", ("run", "check"), "--run N or --check"),
    ("stop_on_nan", ("run",), "--run N"),
    ("save_trained", ("run",), "--run N"),
    ("name", ("library",), _LIBRARY),
    ("target", ("library",), _LIBRARY),
    ("cpu", ("library",), _LIBRARY),
    ("max_batch", ("budget",), _BUDGET),
    ("effort", ("budget",), _BUDGET),
    ("seconds", ("budget",), _BUDGET),
    ("offload", ("checkpoints", "budget", "plan"), "--checkpoints (the values to offload) or --memory-budget SIZE"),
    ("save_plan", ("budget", "strategy", "plan", "allow", "compare", "pareto"),
     "a plan: give --memory-budget SIZE or --strategy NAME"),
    ("zero", ("mesh",), "ranks: give --mesh dp=N"),
    ("micro_batches", ("mesh",), "ranks: give --mesh dp=N"),
    ("link", ("mesh",), "ranks: give --mesh dp=N"),
    ("schedule", ("a mesh with pp", "--mesh auto"), "stages of a pipeline: give a mesh with pp, such as dp=2,pp=4"),
    ("chunks", ("a mesh with pp", "--mesh auto"), "stages of a pipeline: give a mesh with pp, such as dp=2,pp=4"),
    ("rank_count", ("--mesh auto",), "--mesh auto, which finds a mesh for N ranks"),
    ("a mesh with pp", ("batch",), _BATCH),
    ("--mesh auto", ("batch",), _BATCH),
    ("--mesh auto", ("rank_count",), "--ranks N"),
    ("--mesh auto", ("device",), "--device NAME, such as h100-80"),
    ("--mesh auto", ("link",), "--link, how fast ranks send, such as node=8,nvlink=450GB/s,net=50GB/s"),
)  # fmt: skip

#: of `recompute-train`
TRAINING_EXCLUDED = (
    ("checkpoints", ("budget",), f"--checkpoints and a budget {_BOTH}"),
    ("lora", ("trainable", "dequantize"), _ADAPTERS),
    ("library", ("mesh", "buckets"), "a library is a step of one size in one process"),
)
TRAINING_NEEDED = (
    *((n, ("save",), "--save DIR") for n in ("resume", "save_steps", "tensorboard", "log_ranks", "onnx_adapter")),
    ("onnx_adapter", ("lora",), "--lora r=8,targets=A,B,..."),
    *(
        (name, ("mesh",), "several processes: give --mesh, such as dp=N")
        for name in ("zero", "micro_batches", "log_ranks")
    ),
)


def check(
    args: argparse.Namespace,
    facts: Sequence[str],
    excluded: Sequence[tuple[str, tuple[str, ...], str]] = EXCLUDED,
    needed: Sequence[tuple[str, tuple[str, ...], str]] = NEEDED,
) -> None:
    """UsageError for the first pair of options that exclude each other, or the first that lacks what it needs.

    `facts`: what holds besides the options that are given.
    """

    def holds(name: str) -> bool:
        return name in facts if " " in name else _given(getattr(args, name))

    for name, others, why in excluded:
        for other in others:
            if holds(name) and holds(other):
                raise UsageError(f"{why}: leave out {option(other)}")
    for name, others, what in needed:
        if holds(name) and not any(map(holds, others)):
            raise UsageError(f"{option(name)} needs {what}")


def _given(value: Any) -> bool:
    return value not in (None, False, 0, (), []) or isinstance(value, Path)
