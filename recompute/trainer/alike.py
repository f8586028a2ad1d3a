"""Facts that must be equal on all ranks of a run, compared before they do anything else together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from .batches import samples_of
from .feeding import Feeding
from .ranks import Ranks
from .run import Run

#: batches, with the number of samples (or batches) that they stand for
Batches = Iterator[tuple[dict[str, np.ndarray], int]]


def compare_runs(trainer: Any, run: Run, **options: Any) -> None:
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


def compare_evaluations(trainer: Any, data: Feeding) -> None:
    """Compares the facts of all ranks before an evaluation alone.  UsageError if they differ."""
    if trainer.ranks.size > 1:
        facts = {"batch of the evaluation": data.batch, **_of_data(trainer, "data of the evaluation", data)}
        trainer.ranks.must_be_same("the comparison of all ranks' models and data", facts, trainer.program)


def in_step(feeds: Batches, data: Feeding, ranks: Ranks) -> Batches:
    """The batches, compared.  UsageError, on all ranks, if a stream ends on some, or batches have other sizes there."""
    if not data.streams or ranks.size == 1:
        yield from feeds
        return
    for number in itertools.count(1):
        feed, count = next(feeds, (None, 0))
        size = 0 if feed is None else samples_of(feed)
        said = {f"batch {number} of {data.name}": f"{size} of {count} samples"}
        ranks.must_be_same("the next batch of a stream", said)
        if feed is None:
            return
        yield feed, count


def _of_data(trainer: Any, what: str, data: Feeding) -> dict[str, Any]:
    """Facts that must be equal on all ranks that read some data."""
    facts = {"batch": trainer.programs.batch, "seed": trainer.seed, "loss": trainer.loss}
    named = {f"{name} of the {what}": value for name, value in data.facts().items() if name != "contents"}
    return {**facts, **named, what: data.digest()}
