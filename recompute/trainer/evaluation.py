"""The evaluation of a run: batches in order, by all ranks in turns, and what follows from their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import RecomputeError, UsageError
from ..training.parallel import PIPELINE
from .alike import in_step
from .batches import ahead, samples_of
from .feeding import Feeding
from .programs import At, Programs
from .progress import Progress
from .ranks import DATA, Ranks
from .run import Run

#: outputs, the batch that metrics read, and its samples
_Batch = tuple[dict[str, np.ndarray], dict[str, np.ndarray], int]


def why_no_evaluation(programs: Programs, run: Run, at: At) -> str:
    """Why the smaller last batch of the evaluation is left out; "" if it is not."""
    assert run.eval_data is not None
    batch = at.batch
    try:
        programs.evaluation(at)
    except UsageError as e:
        if batch == run.eval_data.batch:
            raise
        if run.eval_data.samples is not None and run.eval_data.samples < run.eval_data.batch:
            raise UsageError(
                f"{run.eval_data.name} has {batch} samples to evaluate, fewer than a batch of "
                f"{run.eval_data.batch}, and no smaller batch can run: {e}"
            ) from None
        run.eval_data.rest = False
        run.history.notes.append(f"evaluation leaves out the last {batch} samples: {str(e).partition('. ')[0]}")
        return str(e)
    return ""


def evaluated(programs: Programs, metrics: Sequence[Any], data: Feeding, progress: Progress) -> dict[str, Any]:
    """The mean loss and the metrics over a dataset, the same on all ranks.

    Ranks that read the same share of a training batch evaluate a whole batch together, those of other shares another
    one, and rank 0 adds up the results in the order of the dataset, so that they do not depend on the number of ranks.
    UsageError without samples.
    """
    ranks = programs.ranks
    sums, done = _Sums(metrics, data.name), 0
    with ahead(data.in_order(ranks.share, ranks.shares)) as feeds:
        for feed, new in in_step(feeds, data, ranks):
            program = programs.evaluation(programs.fed(samples_of(feed), feed))
            names = programs.fetched(program, training=False)
            inputs = {v.name for v in program.block.inputs}
            values = programs.executor.run(program, {n: a for n, a in feed.items() if n in inputs}, names)
            found = dict(zip(names, values, strict=True)) if ranks.is_first(DATA, PIPELINE) else {}
            mine = found, feed if metrics and ranks.is_first(DATA) else {}, samples_of(feed)
            for outputs, batch, count in _by_share(ranks.gather("the results of an evaluation", mine), ranks)[:new]:
                sums.add(float(outputs[programs.loss].reshape(())), outputs, batch, count)
            done += new
            progress.evaluating(done, data.count())
    return ranks.first("the results of an evaluation", sums.results)


def _by_share(found: Sequence[_Batch], ranks: Ranks) -> list[_Batch]:
    """Outputs of the ranks of each share, merged: a stage of a pipeline has some of them."""
    together: dict[int, _Batch] = {}
    for rank, (outputs, batch, count) in enumerate(found):
        others = together.get(ranks.share_of(rank), ({}, {}, count))
        together[ranks.share_of(rank)] = {**others[0], **outputs}, {**others[1], **batch}, count
    return [together[share] for share in sorted(together)]


class _Sums:
    """Metrics and loss over the batches so far."""

    def __init__(self, metrics: Sequence[Any], name: str) -> None:
        self._metrics, self._name = metrics, name
        self._total, self._samples = 0.0, 0
        self._error: RecomputeError | None = None
        for metric in metrics:
            metric.reset()

    def add(self, loss: float, outputs: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray], count: int) -> None:
        """A batch.  What a metric objects to is raised by `results`, to which all ranks come."""
        self._total, self._samples = self._total + loss * count, self._samples + count
        try:
            for metric in self._metrics if self._error is None else ():
                metric.update(outputs, batch)
        except RecomputeError as e:
            self._error = e

    def results(self) -> dict[str, Any]:
        """The mean loss and the metrics."""
        if self._error is not None:
            raise self._error
        if not self._samples:
            raise UsageError(f"{self._name} has no samples to evaluate")
        return {"loss": self._total / self._samples, **{m.name: m.result() for m in self._metrics}}
