"""Datasets: columns of samples that are taken by number; and streams: batches in the order in which they come."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..errors import ModelError, OutOfMemoryError, RecomputeError, UsageError, nearest

#: element type and shape of one sample of a column; text has the type `TEXT`
Column = tuple[np.dtype, tuple[int, ...]]
#: the type of columns of text: arrays of Python strings
TEXT = np.dtype(object)
#: the size of an axis along which samples have different sizes; such columns are read as arrays of Python objects, the
#: sample's array each
RAGGED = -1
#: samples whose sizes are read at once
_SIZED = 1024
#: most names of columns that an error lists
_LISTED = 8


@contextlib.contextmanager
def readable(path: str | Path, kind: str) -> Iterator[None]:
    """Turns errors inside, while a file of this kind is read, into this package's errors, which name the file."""
    try:
        yield
    except RecomputeError:
        raise
    except OSError as e:
        raise ModelError(f"cannot read the data file '{path}': {e.strerror or e}") from None
    except UnicodeDecodeError as e:
        raise ModelError(f"cannot read the data file '{path}': it is not UTF-8 ({e.reason})") from None
    except MemoryError:
        raise OutOfMemoryError(f"not enough memory on this machine for the data of '{path}'") from None
    except Exception as e:  # damaged archives, headers and compressed data raise exceptions of many kinds
        file = Path(path)
        why = "it is empty" if file.is_file() and not file.stat().st_size else f"not {kind}, or damaged ({e})"
        raise ModelError(f"cannot read the data file '{path}': {why}") from None


class Dataset:
    """Samples that can be taken in any order.  A subclass sets the fields and defines `__len__` and `take` or `read`.

    `columns`: name → element type and shape of one sample (`RAGGED` for an axis of different sizes).  `name`: where it
    is from, for messages.  `notes`: name → what an error about that column should mention (why it was left out, which
    row made it text).  `finite`: columns that cannot contain NaN or infinity, which are not searched for them.
    `costly`: columns that are not read only to search them (decoded by somebody's code, tokenized): their values are
    checked in each batch.
    """

    columns: Mapping[str, Column] = {}
    name: str = "data"
    notes: Mapping[str, str] = {}
    finite: frozenset[str] = frozenset()
    costly: frozenset[str] = frozenset()

    def __len__(self) -> int:
        """Number of samples."""
        raise NotImplementedError

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The samples with these numbers, stacked along axis 0: a C-contiguous array a column.

        Threads may take at the same time.
        """
        return self.read(indices, tuple(self.columns))

    def read(self, indices: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        """`take` for some columns only; the others are not read."""
        taken = self.take(indices)
        return {name: taken[name] for name in names}

    def shapes(self, name: str) -> np.ndarray:
        """int64[samples, axes]: the size of each sample of a column; of a ragged one, all samples are read."""
        if not is_ragged(self.columns[name]):
            return np.broadcast_to(np.array(self.columns[name][1], np.int64), (len(self), len(self.columns[name][1])))
        starts = range(0, len(self), _SIZED)
        parts = (self.read(np.arange(i, min(i + _SIZED, len(self))), (name,))[name] for i in starts)
        return np.array([np.shape(sample) for part in parts for sample in part], np.int64)

    def at_epoch(self, epoch: int) -> Dataset:
        """The dataset in this epoch; another one only where samples are drawn anew in each (augmented images)."""
        return self

    def sized(self, shapes: Sequence[tuple[int, ...]]) -> Dataset:
        """The dataset for a model whose inputs have samples of these shapes; another one where a size was left open."""
        return self

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {len(self)} samples, {show_columns(self.columns)}>"


class Stream:
    """Batches without random access, such as those of a PyTorch DataLoader.  `name`: where it is from."""

    name: str = "stream"

    def batches(self, epoch: int) -> Iterator[dict[str, np.ndarray]]:
        """The batches of an epoch, arrays by column."""
        raise NotImplementedError


class Wrapped(Dataset):
    """A dataset made of another one; by itself it is the same samples."""

    def __init__(self, inner: Dataset) -> None:
        if not isinstance(inner, Dataset):
            raise UsageError(f"a dataset is needed here, not {type(inner).__name__}: rc.data.dataset(...) makes one")
        self.inner = inner
        self.name, self.columns, self.notes = inner.name, inner.columns, inner.notes
        self.finite, self.costly = inner.finite, inner.costly

    def __len__(self) -> int:
        return len(self.inner)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return self.read(indices, tuple(self.columns))

    def read(self, indices: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        return self.inner.read(indices, names)

    def at_epoch(self, epoch: int) -> Dataset:
        """This view of the inner dataset in this epoch."""
        inner = self.inner.at_epoch(epoch)
        return self if inner is self.inner else self.around(inner)

    def sized(self, shapes: Sequence[tuple[int, ...]]) -> Dataset:
        """This view of the inner dataset in these sizes; unchanged if its columns are not the inner ones."""
        inner = self.inner.sized(shapes)
        if inner is self.inner or self.columns is not self.inner.columns:
            return self
        other = self.around(inner)
        other.columns = inner.columns
        return other

    def around(self, inner: Dataset) -> Dataset:
        """A copy of this dataset that is made of another one."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.inner = inner
        return other


def show_column(column: Column) -> str:
    """`float32[3,224,224]`, `int64[?]` for samples of different lengths, or `text`."""
    dtype, shape = column
    sizes = ("?" if d == RAGGED else str(d) for d in shape)
    return "text" if is_text(dtype) else f"{dtype}[{','.join(sizes)}]"


def show_columns(columns: Mapping[str, Column]) -> str:
    """The first columns with their types, for messages."""
    shown = [f"{name}: {show_column(c)}" for name, c in list(columns.items())[:_LISTED]]
    return ", ".join(shown) + ", ..." * (len(columns) > _LISTED) if columns else "no columns"


def is_text(dtype: np.dtype) -> bool:
    """Whether a column has strings."""
    return dtype.kind in "OU"


def is_ragged(column: Column) -> bool:
    """Whether the samples of a column have different sizes."""
    return RAGGED in column[1]


def as_indices(indices: object, count: int, name: str) -> np.ndarray:
    """Numbers of samples as an array of int64.  UsageError where one is no sample of a dataset of `count`."""
    array = np.asarray(indices)
    if array.dtype == np.bool_ and array.shape == (count,):
        return np.flatnonzero(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(f"samples of {name} are chosen by whole numbers, not by {array.dtype}{list(array.shape)}")
    wrong = array[(array < 0) | (array >= count)]
    if wrong.size:
        raise UsageError(f"{name} has no sample {wrong[0]}: its samples are numbered 0 to {count - 1}")
    return array.astype(np.int64, copy=False)


def need_column(dataset: Dataset, column: str) -> Column:
    """The type of a column.  UsageError if there is none of this name."""
    if column in dataset.columns:
        return dataset.columns[column]
    note = dataset.notes.get(column)
    raise UsageError(
        f"{dataset.name} has no column '{column}'{f' ({note})' if note else nearest(column, dataset.columns)}; "
        f"it has: {show_columns(dataset.columns)}"
    )
