"""What all ranks of a run must have alike, compared before they do anything else together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .feeding import Feeding
from .run import Run

if TYPE_CHECKING:
    from .trainer import Trainer


def compare_runs(trainer: Trainer, run: Run, **options: Any) -> None:
    """UsageError, on all ranks, that names what they do not have alike: options, data, model, weights or state."""
    if trainer.ranks.size == 1:
        return
    facts = {**options, "epochs": run.epochs, **_of_data(trainer, "data", run.data)}
    facts["evaluation"] = run.eval_data is not None
    if run.eval_data is not None:
        facts |= _of_data(trainer, "data of the evaluation", run.eval_data)
    facts["monitor"], facts["metrics"] = run.monitor, ", ".join(type(m).__name__ for m in trainer.metrics)
    saving = run.saving
    facts["save"] = saving and f"steps={saving.steps}, keep={saving.checkpoints.keep}, log_ranks={saving.log_ranks}"
    trainer.ranks.must_be_same("the comparison of all ranks' models, data and options", facts, trainer.program)


def compare_evaluations(trainer: Trainer, data: Feeding) -> None:
    """The same for an evaluation alone."""
    if trainer.ranks.size > 1:
        facts = {"batch of the evaluation": data.batch, **_of_data(trainer, "data of the evaluation", data)}
        trainer.ranks.must_be_same("the comparison of all ranks' models and data", facts, trainer.program)


def _of_data(trainer: Trainer, what: str, data: Feeding) -> dict[str, Any]:
    """What must be the same on all ranks that read some data."""
    facts = {"batch": trainer.programs.batch, "seed": trainer.seed, "loss": trainer.loss}
    named = {f"{name} of the {what}": value for name, value in data.facts().items() if name != "contents"}
    return {**facts, **named, what: data.digest()}
