"""Mean absolute and mean squared error."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np

from ..errors import UsageError
from .base import Metric, Total, share


class _Mean(Metric):
    """The mean of a figure of each element."""

    def __init__(self, name: str, output: str | None, label: str | None, ignore_index: float | None) -> None:
        self.ignore_index = ignore_index
        super().__init__(name, output, label)

    def reset(self) -> None:
        """Forgets every batch."""
        self._total, self._count = Total(), 0

    @abstractmethod
    def each(self, difference: np.ndarray) -> np.ndarray:
        """The figure of each element's difference."""

    def update(self, outputs: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]) -> None:
        """Adds a batch."""
        values, labels = self.scores(outputs), self.labels(batch)
        if _without_ones(values.shape) != _without_ones(labels.shape):
            raise UsageError(
                f"metric '{self.name}': labels of shape {labels.shape} do not fit values of shape {values.shape}"
            )
        values, labels = values.astype(np.float64).ravel(), labels.astype(np.float64).ravel()
        if self.ignore_index is not None:
            counts = labels != self.ignore_index
            values, labels = values[counts], labels[counts]
        self._total.add(self.each(values - labels))
        self._count += values.size

    def result(self) -> float:
        """The mean over all elements that count."""
        return share(self._total.value, self._count)


class MeanAbsoluteError(_Mean):
    """The mean of |output - label| over all elements.  `ignore_index`: labels of this value do not count."""

    def __init__(
        self,
        *,
        output: str | None = None,
        label: str | None = None,
        ignore_index: float | None = None,
        name: str = "mae",
    ) -> None:
        super().__init__(name, output, label, ignore_index)

    def each(self, difference: np.ndarray) -> np.ndarray:
        """|d|."""
        return np.abs(difference)


class MeanSquaredError(_Mean):
    """The mean of (output - label)² over all elements.  `ignore_index`: labels of this value do not count."""

    def __init__(
        self,
        *,
        output: str | None = None,
        label: str | None = None,
        ignore_index: float | None = None,
        name: str = "mse",
    ) -> None:
        super().__init__(name, output, label, ignore_index)

    def each(self, difference: np.ndarray) -> np.ndarray:
        """d²."""
        return difference * difference


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without axes of size 1 behind the first: [N, 1] fits [N]."""
    return shape[:1] + tuple(s for s in shape[1:] if s != 1)
