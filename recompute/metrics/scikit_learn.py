"""Figures by scikit-learn's functions of labels and predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import UsageError, load_extra, nearest
from .classification import IGNORED, ClassMetric


class ScikitLearn(ClassMetric):
    """The figure of `sklearn.metrics`' `function` of all labels and predictions, which are collected over the batches.

    `classes`: predictions are the classes with the best score (-1 where a score is NaN) and settings are those of
    `Accuracy`; False: labels and outputs as they are, flat, of the same shape but for axes of size 1.  `options` go to
    the function, such as `average="macro"`.  UsageError if scikit-learn has no such function, MissingExtraError without
    scikit-learn (extra `metrics`).
    """

    def __init__(
        self,
        function: str,
        *,
        classes: bool = True,
        output: str | None = None,
        label: str | None = None,
        axis: int | None = None,
        ignore_index: int | None = IGNORED,
        threshold: float | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        module = load_extra("sklearn.metrics", "metrics", f"the metric '{name or function}'", "scikit-learn")
        if function not in module.__all__:
            raise UsageError(f"scikit-learn has no metric '{function}'{nearest(function, module.__all__)}")
        self.function: Callable[..., Any] = getattr(module, function)
        self.classes, self.options = classes, options
        super().__init__(name or function, output, label, axis, ignore_index, threshold)

    def reset(self) -> None:
        self._labels: list[np.ndarray] = []
        self._predicted: list[np.ndarray] = []

    def update(self, outputs: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]) -> None:
        if self.classes:
            scores, labels = self.rows(outputs, batch)
            predicted = np.where(np.isnan(scores).any(1), -1, scores.argmax(1))
        else:
            predicted, labels = self.scores(outputs), self.labels(batch)
            if _without_ones(predicted.shape) != _without_ones(labels.shape):
                raise UsageError(
                    f"metric '{self.name}': labels of shape {labels.shape} do not fit values of shape {predicted.shape}"
                )
            predicted, labels = predicted.astype(np.float64).ravel(), labels.astype(np.float64).ravel()
            if self.ignore_index is not None:
                counts = labels != self.ignore_index
                predicted, labels = predicted[counts], labels[counts]
        self._labels.append(labels)
        self._predicted.append(predicted)

    def result(self) -> float:
        """The figure of all batches."""
        labels, predicted = (np.concatenate(parts or [np.zeros(0)]) for parts in (self._labels, self._predicted))
        if not labels.size or not (np.isfinite(labels).all() and np.isfinite(predicted).all()):
            return math.nan
        return float(self.function(labels, predicted, **self.options))


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without axes of size 1 behind the first: [N, 1] fits [N]."""
    return shape[:1] + tuple(s for s in shape[1:] if s != 1)
