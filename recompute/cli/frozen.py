"""`--freeze`: parts of the model that do not train, and what that saves."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .values import split, target_of

if TYPE_CHECKING:
    from .job import Job


def freeze(program: Any, patterns: str) -> Any:
    """Freezes parameters of a program; returns a program that shares its arrays, with nothing frozen."""
    from ..language.program import Program

    before = Program(program.block, program.data, source=program.source)
    before.take_origin(program)
    program.freeze(split(patterns), eval=True)
    return before


def report_frozen(job: Job, plain: Any) -> None:
    """Prints what --freeze saves: a plain step that trains all of the model beside the one that trains what is left."""
    args, before = job.args, job.unfrozen
    if before is None or (args.quiet and args.json is None):
        return
    from ..tuning.savings import TrainingSaved, training, training_of

    whole = training(before, job.optimizer(), loss=args.loss, target=target_of(args))
    saved = TrainingSaved(whole, training_of(plain))
    job.report.frozen = asdict(saved)
    job.say(str(saved))
