"""Ragged columns: samples of several sizes, one after another in one array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from ..language.types import DTYPES
from .base import RAGGED
from .rows import Rows


class RaggedRows(Rows):
    """A column of samples of several sizes: `values` has those of all, one after another, `shapes` int64[n, axes]."""

    def __init__(self, values: np.ndarray, shapes: np.ndarray) -> None:
        sizes = (int(s[0]) if len(s) and (s == s[0]).all() else RAGGED for s in shapes.T)
        super().__init__(values.dtype, (len(shapes), *sizes), lambda: values)
        self._values, self._shapes = values, shapes
        self._starts = np.concatenate([[0], np.cumsum(shapes.prod(axis=1))])

    def take(self, indices: np.ndarray) -> np.ndarray:
        """An array of Python objects: the sample's array of each of the rows, a view."""
        samples = np.empty(len(indices), object)
        for at, i in enumerate(indices.tolist()):
            samples[at] = self._values[self._starts[i] : self._starts[i + 1]].reshape(self._shapes[i])
        return samples

    def shapes(self) -> np.ndarray:
        """int64[n, axes]: the size of every sample."""
        return self._shapes


def rows_of_lists(values: np.ndarray, lengths: np.ndarray, inner: Sequence[int] = ()) -> Rows:
    """The column of lists that lie one after another, of these lengths; each element has the shape `inner`."""
    shapes = np.empty((len(lengths), 1 + len(inner)), np.int64)
    shapes[:, 0], shapes[:, 1:] = lengths, inner
    return _rows(values.reshape(-1), shapes)


def rows_of_samples(samples: Iterable[Any], what: str) -> Rows:
    """The column of samples, arrays or nested lists of numbers.  UsageError for others."""
    arrays = [_array(sample, i, what) for i, sample in enumerate(samples)]
    filled = [a for a in arrays if a.size] or arrays[:1]
    axes = {a.ndim for a in filled}
    if len(axes) > 1:
        other = next(i for i, a in enumerate(arrays) if a.size and a.ndim != filled[0].ndim)
        raise UsageError(f"{what} has samples of {filled[0].ndim} axes, and of {arrays[other].ndim} in sample {other}")
    dtype = np.result_type(*{a.dtype for a in filled})
    if dtype.newbyteorder("=") not in DTYPES.values():
        raise UsageError(f"{what} has elements of type {dtype}, which programs do not have: store numbers")
    ndim = axes.pop()
    shapes = np.array([a.shape if a.ndim == ndim else (0,) * ndim for a in arrays], np.int64).reshape(-1, ndim)
    return _rows(np.concatenate([a.reshape(-1) for a in arrays], dtype=dtype, casting="unsafe"), shapes)


def _array(sample: Any, i: int, what: str) -> np.ndarray:
    try:
        array = np.asarray(sample)
    except ValueError:
        array = np.empty(1, object)
    if array.dtype.kind not in "biufV" or not array.ndim:
        raise UsageError(f"{what} has no array of numbers in sample {i} (counted from 0)")
    return array


def _rows(values: np.ndarray, shapes: np.ndarray) -> Rows:
    """A plain column where all samples have one shape."""
    if len(shapes) and (shapes == shapes[0]).all():
        return Rows.of(values.reshape(len(shapes), *map(int, shapes[0])))
    return RaggedRows(np.ascontiguousarray(values, values.dtype.newbyteorder("=")), shapes)


def is_list_of_samples(value: Any) -> bool:
    """Whether this is a list, or an array of Python objects, whose elements are lists or arrays."""
    if isinstance(value, np.ndarray):
        listed = value.dtype.kind == "O" and value.ndim == 1
    else:
        listed = isinstance(value, (list, tuple))
    return listed and len(value) > 0 and all(isinstance(e, (list, tuple, np.ndarray)) for e in value)
