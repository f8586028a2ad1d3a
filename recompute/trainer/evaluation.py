"""The evaluation of a run: batches in order, by all ranks in turns, and what follows from their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import RecomputeError, UsageError
from .alike import in_step
from .batches import ahead, samples_of
from .feeding import Feeding
from .programs import Programs
from .progress import Progress


def evaluated(programs: Programs, metrics: Sequence[Any], data: Feeding, progress: Progress) -> dict[str, Any]:
    """The mean loss and the metrics over a dataset, the same on all ranks.

    Each rank runs whole batches, and rank 0 adds up their results in the order of the dataset, so that they do not
    depend on the number of ranks.  UsageError without samples.
    """
    ranks, names = programs.ranks, programs.fetched(training=False)
    sums, done = _Sums(metrics, data.name), 0
    with ahead(data.in_order(ranks.rank, ranks.size)) as feeds:
        for feed, new in in_step(feeds, data, ranks):
            program = programs.evaluation(samples_of(feed))
            inputs = {v.name for v in program.block.inputs}
            values = programs.executor.run(program, {n: a for n, a in feed.items() if n in inputs}, names)
            own = dict(zip(names, values, strict=True)), feed if metrics else {}, samples_of(feed)
            for outputs, batch, count in ranks.gather("the results of an evaluation", own)[:new]:
                sums.add(float(outputs[names[0]].reshape(())), outputs, batch, count)
            done += new
            progress.evaluating(done, data.count())
    return ranks.first("the results of an evaluation", sums.results)


class _Sums:
    """What the batches so far add up to."""

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
