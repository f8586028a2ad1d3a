"""Perplexity of a language model."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from .base import Total, share
from .classification import IGNORED, ClassMetric


class Perplexity(ClassMetric):
    """exp of the mean of -log softmax(scores)[label], over all labels that count; infinite above 1.8e308.

    Scores are logits or log-probabilities, or the probabilities of a program's softmax.  Labels are the next tokens, as
    for `losses.cross_entropy`: nothing is shifted.  `axis`, `ignore_index`: as in `Accuracy`.
    """

    def __init__(
        self,
        *,
        output: str | None = None,
        label: str | None = None,
        axis: int | None = None,
        ignore_index: int | None = IGNORED,
        name: str = "perplexity",
    ) -> None:
        super().__init__(name, output, label, axis, ignore_index)

    def reset(self) -> None:
        self._total, self._count = Total(), 0

    def update(self, outputs: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]) -> None:
        scores, labels = self.rows(outputs, batch)
        step = max(1, (1 << 22) // max(scores.shape[1], 1))  # rows at a time: 32 MiB in float64
        for i in range(0, len(labels), step):
            rows = scores[i : i + step].astype(np.float64)
            if self.kind == "Softmax":
                with np.errstate(divide="ignore"):
                    rows = np.log(rows)
            self._total.add(_losses(rows, labels[i : i + step]))
        self._count += len(labels)

    def result(self) -> float:
        """The perplexity, at least 1."""
        mean = share(self._total.value, self._count)
        try:
            return math.exp(mean)
        except OverflowError:
            return math.inf


def _losses(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """-log softmax(scores)[label] of each row."""
    best = scores.max(1, keepdims=True)
    score = np.take_along_axis(scores, labels[:, None], 1)[:, 0]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(np.exp(scores - best).sum(1)) + best[:, 0] - score
