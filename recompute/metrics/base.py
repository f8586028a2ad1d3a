"""The interface of a metric, and what metrics share: names of values, shapes of labels, exact sums."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import numpy as np

from ..errors import UsageError, nearest
from ..language.program import Program
from ..language.scores import main_outputs

#: names of inputs that are taken for the label, the first that exists
LABELS = ("label", "labels", "target", "targets", "y")


class Metric(ABC):
    """A figure of an evaluation, accumulated over batches of any sizes.

    `output`: the name of the forward value that is judged (None: the output that a loss would be of); `label`: the
    name of its label in the batch (None: the first of `LABELS` that is there); `name`: what logs call the figure.
    """

    def __init__(self, name: str, output: str | None, label: str | None) -> None:
        self.name, self.output, self.label = name, output, label
        self.reset()

    @abstractmethod
    def reset(self) -> None:
        """Forgets every batch."""

    @abstractmethod
    def update(self, outputs: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]) -> None:
        """Adds a batch: the values that `needs` names, and what was fed."""

    @abstractmethod
    def result(self) -> float | dict[str, float]:
        """The figure of all batches since `reset`; NaN if nothing counted."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the forward values that `update` reads; empty until `bind` has chosen an output."""
        return () if self.output is None else (self.output,)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the batch that `update` reads and that a program may not have as inputs."""
        return ()

    def bind(self, program: Program) -> Metric:
        """Chooses the names that were not given by a program's outputs and inputs, and returns the metric.

        UsageError if the program has no such value, or none to choose.
        """
        for name in self.needs:
            if name not in program:
                names = [v.name for v in program.outputs]
                raise UsageError(
                    f"metric '{self.name}': the program has no value '{name}'{nearest(name, names)}; its outputs are "
                    f"{_listed(names)}"
                )
        if self.output is None:
            outputs = [v.name for v in main_outputs(program)]
            if not outputs:
                raise UsageError(
                    f"metric '{self.name}': the program has no floating-point output with dimensions to judge; name "
                    "the value (output=...)"
                )
            self.output = outputs[0]
        return self

    def scores(self, outputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """The judged value of a batch.  UsageError if it is missing."""
        if self.output is None:
            if len(outputs) != 1:
                raise UsageError(
                    f"metric '{self.name}': which of {_listed(outputs)} is judged? Name it (output=...), or let the "
                    "program choose (bind)"
                )
            return np.asarray(next(iter(outputs.values())))
        if self.output not in outputs:
            raise UsageError(f"metric '{self.name}' reads the output '{self.output}', but got {_listed(outputs)}")
        return np.asarray(outputs[self.output])

    def labels(self, batch: Mapping[str, np.ndarray]) -> np.ndarray:
        """The labels of a batch.  UsageError if they are missing."""
        if self.label is not None:
            if self.label not in batch:
                raise UsageError(
                    f"metric '{self.name}' reads the label '{self.label}', but the batch has {_listed(batch)}"
                )
            return np.asarray(batch[self.label])
        for name in LABELS:
            if name in batch:
                return np.asarray(batch[name])
        raise UsageError(
            f"metric '{self.name}': the batch has {_listed(batch)}, none of which is called {', '.join(LABELS)}: name "
            "the label (label=...)"
        )


class Total:
    """An exact sum of float64 numbers: no order of samples or batches changes it."""

    def __init__(self) -> None:
        self._parts: list[float] = []  # their sum is exact: each is the rounded rest of those before it
        self._special = 0.0  # the sum of infinities and NaNs

    def add(self, values: np.ndarray) -> None:
        """Adds every element."""
        values = np.asarray(values, np.float64).ravel()
        finite = np.isfinite(values)
        if not finite.all():
            self._special += float(np.sum(values[~finite]))
            values = values[finite]
        rest, self._parts = [*self._parts, *values.tolist()], []
        while part := math.fsum(rest):
            self._parts.append(part)
            rest.append(-part)

    @property
    def value(self) -> float:
        """The sum, rounded once."""
        return math.fsum(self._parts) + self._special


def share(part: float, whole: float) -> float:
    """part / whole; NaN of nothing."""
    return part / whole if whole else math.nan


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "nothing"
