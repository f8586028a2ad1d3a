"""Shared by the parts of the command line: the job's interface, its planner request, its steps, and its progress."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..planning.request import Request, request
from ..support.tables import progress_status
from .values import input_shapes, loading_of, target_of, zoo_option

if TYPE_CHECKING:
    from ..compiling.steps import Steps


class Job(Protocol):
    """One invocation of the command, as seen by the other parts (implemented in `command.py`)."""

    args: argparse.Namespace
    report: Any
    written: list[tuple[Path, str]]
    available: int | None
    unfrozen: Any
    estimated: Any

    def say(self, text: str) -> None:
        """Prints text for people."""

    def compile(self, program: Any, loss: str, **options: Any) -> Any:
        """A training step with a new optimizer."""

    def optimizer(self) -> Any:
        """A new optimizer of the requested kind."""

    def checkpoint_patterns(self) -> list[str] | None:
        """The patterns of --checkpoints."""


def request_of(args: argparse.Namespace) -> Request | None:
    """The request to a planner; None if nothing is planned."""
    if args.checkpoints is not None or args.max_batch:
        return None
    budget = None if args.plan is not None else args.budget
    limits: dict[str, Any] = {"effort": args.effort, "seconds": args.seconds} if budget is not None else {}
    limits["slicing"] = not args.no_slicing
    return request(
        budget, args.strategy, None, args.plan, offload=args.offload, approximations=args.allow or (), **limits
    )


def steps_of(job: Job) -> Steps:
    """The training steps that the options describe."""
    from ..compiling.steps import Steps

    args = job.args
    options = dict(zoo_option(o) for o in args.option)
    return Steps(
        args.model,
        loss=args.loss,
        optimizer=job.optimizer(),
        checkpoints=job.checkpoint_patterns(),
        input_shapes=input_shapes(args.input_shapes),
        options=options,
        loading=loading_of(args),
        target=target_of(args),
        offload=args.offload,
        stop_on_nan=args.stop_on_nan,
    )


@contextlib.contextmanager
def progress(args: argparse.Namespace) -> Iterator[Callable[[str], None]]:
    """A status line on standard error (what is compiled or measured); nothing if that is not a terminal."""
    with progress_status(quiet=args.quiet) as update:
        if hasattr(args.cost, "progress"):
            args.cost.progress = update
        yield update
