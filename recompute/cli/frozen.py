"""`--freeze`: parts of the model that do not train, and what that saves."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .values import target_of

if TYPE_CHECKING:
    from .job import Job


def unfrozen(program: Any) -> Any:
    """A program that shares the arrays of another one, which will be frozen."""
    from ..language.program import Program

    before = Program(program.block, program.data, source=program.source)
    before.take_origin(program)
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
