"""Datasets and loaders of other libraries: PyTorch's and Hugging Face's, and any iterable of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from .arrays import as_array, why_no_column
from .base import RAGGED, TEXT, Column, Dataset, Stream, is_ragged, is_text


class Samples(Dataset):
    """Objects with `__getitem__` and `__len__` that give one sample each, such as a map-style dataset of PyTorch.

    A sample is a dict of values by column, or a tuple of values, named by `columns`.  Samples are read one by one.
    """

    def __init__(self, source: Any, names: Sequence[str] | None = None) -> None:
        self.source, self.names = source, names
        self.name = f"the {type(source).__name__}"
        if not len(source):
            raise UsageError(f"{self.name} is empty")
        self.columns = {n: _column(a, n, self.name) for n, a in self._sample(0).items()}
        self.costly = frozenset(self.columns)

    def __len__(self) -> int:
        return len(self.source)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        samples = [self._sample(int(i)) for i in indices]
        taken = {}
        for name, (dtype, shape) in self.columns.items():
            batch = np.empty((len(samples), *shape), dtype)
            for at, sample in enumerate(samples):
                value = sample.get(name)
                if value is None or value.shape != shape or (value.dtype != dtype and not is_text(dtype)):
                    description = "nothing" if value is None else f"{value.dtype}{list(value.shape)}"
                    raise UsageError(
                        f"sample {indices[at]} of {self.name} has {description} as '{name}', where sample 0 has "
                        f"{dtype}{list(shape)}: all samples must have one type and shape"
                    )
                batch[at] = value[()]
            taken[name] = batch
        return taken

    def _sample(self, i: int) -> dict[str, np.ndarray]:
        return named(self.source[i], self.names, f"a sample of {self.name}")


class HuggingFace(Dataset):
    """A `datasets.Dataset`, whose rows are taken by number."""

    def __init__(self, source: Any) -> None:
        self.source = source.with_format("numpy")
        #: the source with some columns only, by their names
        self._views: dict[tuple[str, ...], Any] = {}
        self.name = (
            f"the Hugging Face dataset {getattr(source.info, 'dataset_name', None) or source.split or ''}".strip()
        )
        if not len(source):
            raise UsageError(f"{self.name} is empty")
        first, notes = self.source[:1], {}
        ragged = _ragged_columns(source)
        columns: dict[str, Column] = {}
        for name, value in first.items():
            array = _rows(value)
            if why := why_no_column(array.dtype, array.shape, array):
                notes[name] = why
            else:
                shape = (RAGGED, *array.shape[2:]) if name in ragged else array.shape[1:]
                columns[name] = (TEXT if is_text(array.dtype) else array.dtype, shape)
        self.columns, self.notes = columns, notes

    def __len__(self) -> int:
        return len(self.source)

    def read(self, indices: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        view = self._views.get(tuple(names))
        if view is None:  # takes longer than reading a batch
            view = self._views[tuple(names)] = self.source.with_format("numpy", columns=list(names))
        rows = view[indices.tolist()]
        taken = {}
        for name in names:
            dtype, shape = self.columns[name]
            if is_ragged(self.columns[name]):
                taken[name] = np.empty(len(indices), object)
                for at, row in enumerate(rows[name]):
                    taken[name][at] = np.asarray(row, dtype)
                continue
            array = _rows(rows[name])
            if array.shape[1:] != shape or (array.dtype.kind == "O") != is_text(dtype):
                raise UsageError(
                    f"column '{name}' of {self.name} has samples of different shapes: rc.data.Tokenized makes rows of "
                    "one length of text; pad other lists"
                )
            taken[name] = np.ascontiguousarray(array, dtype)
        return taken

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return self.read(indices, tuple(self.columns))


class Batches(Stream):
    """The batches of a PyTorch DataLoader or of any iterable: dicts by column, or tuples that `columns` names."""

    def __init__(self, source: Any, names: Sequence[str] | None = None) -> None:
        self.source, self.names = source, names
        self.name = (
            f"the {type(source).__name__}" if not callable(source) else f"{getattr(source, '__name__', 'function')}()"
        )
        self._begun = False

    def batches(self, epoch: int) -> Iterator[dict[str, np.ndarray]]:
        """See `Stream.batches`.  UsageError if the source gives nothing, or is a generator that was used before."""
        sampler = getattr(self.source, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)  # type: ignore[union-attr]
        source = self.source() if callable(self.source) else self.source
        if source is self.source and isinstance(source, Iterator):
            if self._begun:
                raise UsageError(
                    f"{self.name} was read in an earlier epoch and cannot be read again: give a list of batches, or a "
                    "function that returns an iterator"
                )
            self._begun = True
        empty = True
        for batch in source:
            empty = False
            yield named(batch, self.names, f"a batch of {self.name}")
        if empty:
            raise UsageError(f"{self.name} gives no batches")


def named(sample: Any, names: Sequence[str] | None, what: str) -> dict[str, np.ndarray]:
    """A sample or batch as arrays by column.  UsageError where columns have no names, or values are no arrays."""
    if not isinstance(sample, Mapping):
        values = list(sample) if isinstance(sample, (tuple, list)) else [sample]
        if names is None:
            raise UsageError(
                f"{what} is {_shown(sample, values)} without names: columns=('image', 'label') names its columns"
            )
        if len(names) != len(values):
            raise UsageError(f"{what} is {_shown(sample, values)}, but columns= names {len(names)}: {', '.join(names)}")
        sample = dict(zip(names, values, strict=True))
    elif names is not None:
        missing = [n for n in names if n not in sample]
        if missing:
            raise UsageError(f"{what} has no column '{missing[0]}'; it has: {', '.join(map(str, sample))}")
        sample = {n: sample[n] for n in names}
    return {str(n): as_array(v, f"'{n}' of {what}") for n, v in sample.items()}


def _shown(sample: Any, values: Sequence[Any]) -> str:
    return f"{len(values)} values" if isinstance(sample, (tuple, list)) else f"one {type(sample).__name__}"


def _column(array: np.ndarray, name: str, source: str) -> Column:
    """The type of a column of which this is a sample."""
    if why := why_no_column(array.dtype, (1, *array.shape), array):
        raise UsageError(f"'{name}' of {source} {why}")
    return (TEXT if is_text(array.dtype) else array.dtype, array.shape)


def _rows(sample: Any) -> np.ndarray:
    """A column of a batch of `datasets` as an array: of lists of different lengths, an array of Python objects."""
    if isinstance(sample, np.ndarray):
        array = sample
    else:
        same = len({np.shape(row) for row in sample}) == 1
        array = np.asarray(sample) if same else np.array([None], dtype=object)
    return array.astype(object) if array.dtype.kind == "U" else array


def _ragged_columns(source: Any) -> set[str]:
    """The columns of a `datasets.Dataset` whose rows are lists of different lengths: those of Arrow's list types."""
    import pyarrow.compute as pc
    import pyarrow.types as kinds

    arrow = source.with_format("arrow")
    lists = [f.name for f in source.data.schema if kinds.is_list(f.type) or kinds.is_large_list(f.type)]
    columns = set()
    for name in lists:
        ends = pc.min_max(pc.list_value_length(arrow.select_columns([name])[:][name])).as_py()
        if ends["min"] != ends["max"]:
            columns.add(name)
    return columns


def is_loader(source: Any) -> bool:
    """Whether this is a DataLoader, or looks like one: an iterable over batches of a dataset."""
    return hasattr(source, "__iter__") and hasattr(source, "dataset") and hasattr(source, "batch_size")


def is_hugging_face(source: Any) -> bool:
    """Whether this is a `datasets.Dataset`."""
    return any((c.__module__, c.__name__) == ("datasets.arrow_dataset", "Dataset") for c in type(source).__mro__)


def is_frame(source: Any) -> bool:
    """Whether this is a data frame of pandas or polars."""
    return type(source).__name__ == "DataFrame" and hasattr(source, "columns")


def has_samples(source: Any) -> bool:
    """Whether samples can be taken by number; lists are taken for lists of batches."""
    return hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, (list, tuple))


def is_stream(source: Any) -> bool:
    """Whether this gives batches: an iterable, or a function that returns one."""
    return isinstance(source, (Iterable, Callable))  # type: ignore[arg-type]
