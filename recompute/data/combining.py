"""Datasets made of other datasets: parts, other columns, functions of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from .arrays import Arrays
from .base import RAGGED, TEXT, Column, Dataset, Wrapped, as_indices, need_column
from .drawing import permutation


class Subset(Wrapped):
    """Samples of another dataset."""

    def __init__(self, inner: Dataset, indices: Any) -> None:
        super().__init__(inner)
        self.indices = as_indices(indices, len(inner), inner.name)

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, indices: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        return self.inner.read(self.indices[indices], names)

    def shapes(self, name: str) -> np.ndarray:
        return self.inner.shapes(name)[self.indices]


class Selected(Wrapped):
    """Some columns of another dataset, under other names; of several columns of one number each, a row."""

    def __init__(self, inner: Dataset, columns: Sequence[str] | Mapping[str, str | Sequence[str]]) -> None:
        super().__init__(inner)
        sources = columns if isinstance(columns, Mapping) else {c: c for c in columns}
        self.sources = {n: (c,) if isinstance(c, str) else tuple(c) for n, c in sources.items()}
        self.columns = {n: self._column(n, cs) for n, cs in self.sources.items()}
        self.finite = frozenset(n for n, cs in self.sources.items() if set(cs) <= inner.finite)
        self.costly = frozenset(n for n, cs in self.sources.items() if not inner.costly.isdisjoint(cs))
        self.notes = {n: inner.notes[cs[0]] for n, cs in self.sources.items() if cs[0] in inner.notes}

    def _column(self, name: str, sources: Sequence[str]) -> Column:
        columns = [need_column(self.inner, c) for c in sources]
        if len(columns) == 1:
            return columns[0]
        for source, (dtype, shape) in zip(sources, columns, strict=True):
            if dtype == TEXT or shape:
                raise UsageError(
                    f"column '{source}' of {self.name} is not one number a sample: '{name}' cannot join it"
                )
        return np.result_type(*(dtype for dtype, _ in columns)), (len(columns),)

    def read(self, indices: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        taken = self.inner.read(indices, tuple(dict.fromkeys(c for n in names for c in self.sources[n])))
        return {n: self._joined(n, taken) for n in names}

    def _joined(self, name: str, taken: Mapping[str, np.ndarray]) -> np.ndarray:
        sources = self.sources[name]
        if len(sources) == 1:
            return taken[sources[0]]
        return np.stack([taken[c] for c in sources], axis=1, dtype=self.columns[name][0], casting="unsafe")


class Mapped(Wrapped):
    """Another dataset, with a function applied to its batches, which must treat every sample by itself."""

    def __init__(self, inner: Dataset, function: Callable[[dict[str, np.ndarray]], Mapping[str, Any]]) -> None:
        super().__init__(inner)
        self.function = function
        self.columns = {n: self._column(n, a) for n, a in self._made(np.zeros(1, np.int64)).items()}
        self.notes, self.finite = {}, frozenset()
        self.costly = frozenset(self.columns) if inner.costly else frozenset()

    def read(self, indices: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        arrays = self._made(indices)
        for n in names:
            if n not in arrays or (self._column(n, arrays[n]) != self.columns[n] and len(indices)):
                raise UsageError(f"the function mapped over {self.name} gives '{n}' another type for other samples")
        return {n: arrays[n] for n in names}

    def _column(self, name: str, array: np.ndarray) -> Column:
        """The type of a column that the function makes; one of arrays as Python objects is ragged along all axes."""
        first = array[0] if array.dtype.kind == "O" and array.ndim == 1 and len(array) else None
        if not isinstance(first, (np.ndarray, list)):
            return array.dtype, array.shape[1:]
        return np.asarray(first).dtype, (RAGGED,) * np.ndim(first)

    def _made(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        samples = self.function(self.inner.take(indices))
        if not isinstance(samples, Mapping):
            raise UsageError(
                f"the function mapped over {self.name} must return arrays by column, not {type(samples).__name__}"
            )
        arrays = {n: np.ascontiguousarray(a) for n, a in samples.items()}
        for n, a in arrays.items():
            if len(a) != len(indices):
                raise UsageError(
                    f"the function mapped over {self.name} gives {len(a)} rows of '{n}' for {len(indices)} samples"
                )
        return arrays


class Encoded(Wrapped):
    """A column of text as numbers of classes (int64)."""

    def __init__(self, inner: Dataset, column: str, classes: Sequence[str]) -> None:
        super().__init__(inner)
        need_column(inner, column)
        self.column, self.classes = column, tuple(classes)
        self.columns = {**inner.columns, column: (np.dtype(np.int64), inner.columns[column][1])}
        self._numbers = {text: i for i, text in enumerate(self.classes)}

    def read(self, indices: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        taken = self.inner.read(indices, names)
        if self.column in taken:
            texts = taken[self.column]
            numbers = [self._numbers.get(str(t), -1) for t in texts.flat]
            if -1 in numbers:
                raise UsageError(
                    f"column '{self.column}' of {self.name} has {texts.flat[numbers.index(-1)]!r}, none of its "
                    f"{len(self.classes)} classes: {', '.join(self.classes[:8])}"
                )
            taken[self.column] = np.array(numbers, np.int64).reshape(texts.shape)
        return taken


def encoded(dataset: Dataset, column: str, classes: Sequence[str] | None = None) -> Encoded:
    """The dataset with a column of class names as numbers: positions in `classes` (default: all there are, sorted)."""
    if classes is None:
        need_column(dataset, column)
        whole = dataset.read(np.arange(len(dataset)), (column,))[column]
        classes = sorted({str(text) for text in whole.flat})
    return Encoded(dataset, column, classes)


def subset(dataset: Dataset, indices: Any) -> Subset:
    """The samples with these numbers, in this order; or those that a boolean mask says."""
    return Subset(dataset, indices)


def split(dataset: Dataset, fraction: float, seed: int = 0) -> tuple[Subset, Subset]:
    """Two parts without common samples, drawn by `seed`; the second has `fraction` of them (at least one)."""
    if not 0 < fraction < 1:
        raise UsageError(f"the fraction of a split must be between 0 and 1, not {fraction}")
    count = len(dataset)
    second = min(max(1, round(count * fraction)), count - 1)
    if count < 2:
        raise UsageError(f"{dataset.name} has {count} sample, which cannot be split")
    order = permutation(count, seed)
    return Subset(dataset, np.sort(order[second:])), Subset(dataset, np.sort(order[:second]))


def mapped(dataset: Dataset, function: Callable[[dict[str, np.ndarray]], Mapping[str, Any]]) -> Mapped:
    """The dataset that a function makes of each batch (arrays by column, samples along axis 0), sample by sample."""
    return Mapped(dataset, function)


def select(dataset: Dataset, columns: Sequence[str] | Mapping[str, str | Sequence[str]]) -> Dataset:
    """Some columns: a list of names, or new name → column, or → columns of one number each that make a row."""
    if isinstance(columns, str):
        raise UsageError(f"columns= takes a list of names, or a dict of new names: [{columns!r}]")
    selected = Selected(dataset, columns)
    if not isinstance(dataset, Arrays):
        return selected
    rows = {n: dataset.joined(sources, selected.columns[n][0]) for n, sources in selected.sources.items()}
    return Arrays(rows, dataset.name, selected.notes)
