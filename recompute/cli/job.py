"""What the parts of the command line share: the job, its request to planners, its steps, and its progress."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import UsageError
from ..planning.request import Request, request
from ..support.tables import progress_status
from .values import input_shapes, split, target_of, zoo_option

if TYPE_CHECKING:
    from ..compiling.steps import Steps


class Job(Protocol):
    """One invocation of the command, as its parts see it (see `cli.py`)."""

    args: argparse.Namespace
    report: Any
    written: list[Path]
    available: int | None

    def say(self, text: str) -> None:
        """Prints for people."""

    def compile(self, program: Any, loss: str, **options: Any) -> Any:
        """A training step with a new optimizer."""

    def optimizer(self) -> Any:
        """A new optimizer of the kind asked for."""

    def checkpoint_patterns(self) -> list[str] | None:
        """The patterns of --checkpoints."""


def request_of(args: argparse.Namespace) -> Request | None:
    """What a planner is asked for; None where nothing is to be planned."""
    if args.checkpoints is not None or args.max_batch:
        return None
    budget = None if args.plan is not None else args.budget
    limits = {"effort": args.effort, "seconds": args.seconds} if budget is not None else {}
    return request(budget, args.strategy, None, args.plan, offload=args.offload, **limits)


def steps_of(job: Job) -> Steps:
    """The steps that the command line describes."""
    from ..compiling.steps import Steps

    args = job.args
    options = dict(zoo_option(o) for o in args.option)
    if options and Path(args.model).is_file():
        raise UsageError("--option is for networks of the zoo")
    return Steps(
        args.model,
        loss=args.loss,
        optimizer=job.optimizer(),
        checkpoints=job.checkpoint_patterns(),
        input_shapes=input_shapes(args.input_shapes),
        options=options,
        trainable=split(args.trainable) if args.trainable else None,
        target=target_of(args),
        offload=args.offload,
    )


@contextlib.contextmanager
def progress(args: argparse.Namespace) -> Iterator[Callable[[str], None]]:
    """What is being compiled or measured, on standard error; nothing where that is no terminal."""
    with progress_status(quiet=args.quiet) as update:
        if hasattr(args.cost, "progress"):
            args.cost.progress = update
        yield update
