"""Accuracy and top-k accuracy from scores of classes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import UsageError
from ..language.program import Program
from ..language.scores import scores_of, steps_of
from .base import Metric, share

#: the label that does not count by default, as in the losses
IGNORED = -100


class ClassMetric(Metric):
    """A metric of scores with class indices as labels."""

    def __init__(
        self,
        name: str,
        output: str | None,
        label: str | None,
        axis: int | None,
        ignore_index: int | None,
        threshold: float | None = None,
    ) -> None:
        self.axis, self.ignore_index, self.threshold = axis, ignore_index, threshold
        self.kind = ""  # what makes the scores, where `bind` has seen it
        super().__init__(name, output, label)

    def bind(self, program: Program) -> Metric:
        """The metric of a program's outputs; probabilities of a sigmoid are divided at 0.5."""
        super().bind(program)
        assert self.output is not None
        self.kind = scores_of(program[self.output].name, steps_of(program.forward_block)).kind
        if self.kind == "Sigmoid" and self.threshold is None:
            self.threshold = 0.5
        return self

    def rows(self, outputs: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Scores [labels, classes] and labels [labels], of the labels that count."""
        scores, labels = self.scores(outputs), self.labels(batch)
        whole = np.asarray(labels, np.int64)
        if labels.dtype.kind not in "iub" and not np.array_equal(whole, labels):
            raise UsageError(
                f"metric '{self.name}' needs class indices as labels, but they are {labels.dtype} fractions"
            )
        if scores.size == labels.size and scores.ndim and not self._has_classes(scores, labels):
            scores = self._both(scores).reshape(-1, 2)
        else:
            axis = class_axis(self.name, scores, labels, self.axis)
            scores = np.moveaxis(scores, axis, -1).reshape(-1, scores.shape[axis])
        whole = whole.ravel()
        if self.ignore_index is not None:
            counts = whole != self.ignore_index
            scores, whole = scores[counts], whole[counts]
        self._check_labels(whole, scores.shape[1])
        return scores, whole

    def _has_classes(self, scores: np.ndarray, labels: np.ndarray) -> bool:
        return self.axis is not None or (scores.ndim == labels.ndim + 1 and labels.ndim > 0 and scores.shape[-1] > 1)

    def _both(self, scores: np.ndarray) -> np.ndarray:
        """Scores of the classes 0 and 1 from one score that a threshold divides."""
        if self.threshold is None:
            raise UsageError(
                f"metric '{self.name}': one score for each label needs a threshold: threshold=0.5 for probabilities, "
                "threshold=0 for scores before a sigmoid"
            )
        above = (scores > self.threshold).astype(np.float64)
        return np.stack([np.where(np.isnan(scores), np.nan, 1 - above), above], -1)

    def _check_labels(self, labels: np.ndarray, classes: int) -> None:
        wrong = labels[(labels < 0) | (labels >= classes)]
        if wrong.size:
            raise UsageError(
                f"metric '{self.name}': label {wrong[0]} is not one of the {classes} classes of the scores; a label "
                "that does not count is given by ignore_index"
            )


def class_axis(metric: str, scores: np.ndarray, labels: np.ndarray, axis: int | None) -> int:
    """The axis of the scores that the labels' shape is without; where several fit, that of `losses.cross_entropy`."""
    usual = 1 if scores.ndim in (2, 4, 5) else scores.ndim - 1
    wanted = [usual, *range(1, scores.ndim)] if axis is None else [axis % max(scores.ndim, 1)]
    for i in wanted:
        if scores.shape[:i] + scores.shape[i + 1 :] == labels.shape and 0 <= i < scores.ndim:
            return i
    raise UsageError(
        f"metric '{metric}': labels of shape {labels.shape} do not fit scores of shape {scores.shape}"
        + ("" if axis is None else f" with classes along axis {axis}")
        + ": their shape must be that of the scores without the axis of the classes"
    )


class TopK(ClassMetric):
    """The share of labels that are among the k best scores; of equal scores the lower class is better.

    A row of scores with NaN counts as wrong.  `axis`: where the classes are (default: by the labels' shape);
    `ignore_index`: labels of this value do not count (None: all do).
    """

    def __init__(
        self,
        k: int = 5,
        *,
        output: str | None = None,
        label: str | None = None,
        axis: int | None = None,
        ignore_index: int | None = IGNORED,
        threshold: float | None = None,
        name: str | None = None,
    ) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise UsageError(f"metric 'top-k': k must be a whole number of at least 1, not {k!r}")
        self.k = k
        super().__init__(name or f"top{k}", output, label, axis, ignore_index, threshold)

    def reset(self) -> None:
        self._right = self._count = 0

    def update(self, outputs: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]) -> None:
        scores, labels = self.rows(outputs, batch)
        score = np.take_along_axis(scores, labels[:, None], 1)
        before = (scores == score) & (np.arange(scores.shape[1]) < labels[:, None])
        better = ((scores > score) | before).sum(1)
        self._right += int(((better < self.k) & ~np.isnan(scores).any(1)).sum())
        self._count += len(labels)

    def result(self) -> float:
        """The share, from 0 to 1."""
        return share(self._right, self._count)


class Accuracy(TopK):
    """The share of labels whose class has the best score; settings as in `TopK`.

    Scores in the shape of the labels are those of class 1, and need `threshold`: 0.5 for probabilities, 0 for scores
    before a sigmoid.
    """

    def __init__(
        self,
        *,
        output: str | None = None,
        label: str | None = None,
        axis: int | None = None,
        ignore_index: int | None = IGNORED,
        threshold: float | None = None,
        name: str = "accuracy",
    ) -> None:
        super().__init__(
            1, output=output, label=label, axis=axis, ignore_index=ignore_index, threshold=threshold, name=name
        )
