"""Datasets for a program: its inputs' names, shapes and element types, checked once; and a search for wrong values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..errors import UsageError, nearest
from ..language.types import DTYPES, FLOATS, TensorType, Value, dtype_name
from .arrays import Arrays
from .base import RAGGED, Column, Dataset, Stream, Wrapped, is_ragged, is_text, need_column, show_column, show_columns
from .casting import cast, first, why_no_cast, why_no_shape
from .combining import select
from .limits import Limit
from .padding import Padding

#: names of labels, any of which stands for any other
LABELS = frozenset({"label", "labels", "target", "targets", "y"})
#: bytes that are searched for wrong values at once
_CHUNK = 8 << 20
#: of a stream of samples
_SINGLE = "is a single value in a batch: samples must come in batches (as from a DataLoader, or source.batch(32))"


class Fit(NamedTuple):
    """Where an input comes from: one column, or several of one number a sample, side by side."""

    need: TensorType
    columns: tuple[str, ...]
    what: str
    padding: Padding | None = None

    def made(self, taken: Mapping[str, np.ndarray], indices: np.ndarray) -> np.ndarray:
        """The input's array."""
        if self.padding is not None:
            return self.padding.made(taken[self.columns[0]], self.need, indices, self.what)
        parts = [taken[c] for c in self.columns]
        if len({p.dtype for p in parts}) > 1:
            parts = [cast(p, self.need, indices, self.what) for p in parts]
        whole = cast(parts[0] if len(parts) == 1 else np.stack(parts, axis=1), self.need, indices, self.what)
        return np.ascontiguousarray(whole.reshape(len(indices), *self.need.shape[1:]))


class Fitted(Wrapped):
    """A dataset whose columns are a program's inputs."""

    def __init__(self, inner: Dataset, fits: Mapping[str, Fit], limits: Mapping[str, Limit]) -> None:
        super().__init__(inner)
        self.fits, self.limits = dict(fits), dict(limits)
        self.columns = {name: (f.need.numpy, f.need.shape[1:]) for name, f in fits.items()}
        whole = {n for n, (dtype, _) in inner.columns.items() if dtype.kind in "biu"}
        self.finite = frozenset(n for n, f in fits.items() if set(f.columns) <= whole | inner.finite)
        self.costly = frozenset(n for n, f in fits.items() if not inner.costly.isdisjoint(f.columns))

    def read(self, indices: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        """See `Dataset.read`: only columns that these inputs need are read."""
        fits = {name: self.fits[name] for name in names}
        taken = self.inner.read(indices, tuple(dict.fromkeys(c for f in fits.values() for c in f.columns)))
        arrays = {name: f.made(taken, indices) for name, f in fits.items()}
        for name in self.costly.intersection(names):  # which `check_values` leaves out
            if name not in self.finite and fits[name].need.is_float:
                _check_finite(arrays[name], indices, fits[name].what)
            if name in self.limits:
                _check_limit(arrays[name], self.limits[name], indices, fits[name].what)
        return arrays


class FittedStream(Stream):
    """A stream whose batches have a program's inputs; types and the limits of labels are checked in each batch."""

    def __init__(
        self, inner: Stream, inputs: Sequence[Value], limits: Mapping[str, Limit], names: Mapping[str, str]
    ) -> None:
        self.inner, self.name, self.inputs, self.limits, self.names = inner, inner.name, tuple(inputs), limits, names

    def batches(self, epoch: int) -> Iterator[dict[str, np.ndarray]]:
        """The batches of an epoch, by input."""
        types: dict[str, Column] = {}
        fits: dict[str, Fit] = {}
        start = 0
        for batch in self.inner.batches(epoch):
            columns = {n: (a.dtype, a.shape[1:]) for n, a in batch.items() if a.ndim}
            if columns != types or not fits:
                notes = {n: _SINGLE for n in batch if n not in columns}
                types, fits = columns, _fits(self.name, columns, notes, self.inputs, self.names)
            rows = {len(batch[c]) for f in fits.values() for c in f.columns}
            if len(rows) > 1:
                raise UsageError(
                    f"a batch of {self.name} has columns with different numbers of samples: {sorted(rows)}"
                )
            indices = np.arange(start, start + rows.pop())
            start += len(indices)
            arrays = {name: f.made(batch, indices) for name, f in fits.items()}
            for name, limit in self.limits.items():
                if name in arrays:
                    _check_limit(arrays[name], limit, indices, fits[name].what)
            yield arrays


def fitted(
    dataset: Dataset | Stream,
    inputs: Sequence[Value],
    limits: Mapping[str, int | Limit] | None = None,
    names: Mapping[str, str] | None = None,
    padded: Mapping[str, Padding] | None = None,
) -> Fitted | FittedStream:
    """The dataset with a program's inputs (`program.block.inputs`) as columns, checked against them.

    A column belongs to the input of its name; labels may have any of the usual names; one column that is left over
    belongs to the one input that is left over, and so do columns of single numbers (of a table), side by side, if they
    are as many as that input has.  `names` (input → column) says it otherwise.  Floats are converted to other floats,
    whole numbers to wider types, or narrower ones where they are in range.  `limits` (input → `Limit` or exclusive
    upper bound; see `limits_of`) are those that `check_values` and every batch of a stream are compared with.
    `padded`: inputs to whose size samples are padded; so are labels of several lengths, by the one that a loss ignores.
    UsageError where a column is missing or does not fit.
    """
    checked = {name: limit if isinstance(limit, Limit) else Limit(int(limit)) for name, limit in (limits or {}).items()}
    if isinstance(dataset, Stream):
        return FittedStream(dataset, inputs, checked, names or {})
    dataset = dataset.sized([v.shape[1:] for v in inputs])
    fits = _fits(dataset.name, dataset.columns, dataset.notes, inputs, names or {}, padded or {}, checked)
    return Fitted(*_side_by_side(dataset, fits), checked)


def _side_by_side(dataset: Dataset, fits: dict[str, Fit]) -> tuple[Dataset, dict[str, Fit]]:
    """Columns of a table that make one input as one column, so that a batch of them is one look-up."""
    several = {n: f for n, f in fits.items() if len(f.columns) > 1}
    if not several or not isinstance(dataset, Arrays):
        return dataset, fits
    kept = {c: c for f in fits.values() if len(f.columns) == 1 for c in f.columns}
    merged = {", ".join(f.columns): f.columns for f in several.values()}
    one = {n: f if n not in several else f._replace(columns=(", ".join(f.columns),)) for n, f in fits.items()}
    return select(dataset, {**kept, **merged}), one


def _fits(
    source: str,
    columns: Mapping[str, Column],
    notes: Mapping[str, str],
    inputs: Sequence[Value],
    names: Mapping[str, str],
    padded: Mapping[str, Padding] = MappingProxyType({}),
    limits: Mapping[str, Limit] = MappingProxyType({}),
) -> dict[str, Fit]:
    """Where each input comes from.  UsageError where something does not fit."""
    matched = _matched(source, columns, notes, {v.name: v for v in inputs}, names)
    fits = {}
    for v in inputs:
        chosen = matched[v.name]
        shape = columns[chosen[0]][1] if len(chosen) == 1 else (len(chosen),)
        for name in chosen:
            dtype, own = columns[name]
            pads = (padded.get(v.name) or _ended(shape, limits.get(v.name))) if len(chosen) == 1 else None
            unlike = why_no_shape(shape, v.shape[1:]) if pads is None else pads.why_not(shape, v.shape[1:])
            if why := (pads is None or not pads.masks) * why_no_cast(dtype, own, v.type) or unlike:
                note = f" ({notes[name]})" if name in notes else ""
                raise UsageError(
                    f"column '{name}' of {source} has samples of {show_column(columns[name])}{note}, but the model's "
                    f"input '{v.name}' needs {_sample(v)}: {why}"
                )
        shown = f"column '{chosen[0]}'" if len(chosen) == 1 else f"one of the columns '{chosen[0]}' to '{chosen[-1]}'"
        fits[v.name] = Fit(v.type, chosen, f"{shown} of {source}", pads)
    return fits


def _ended(shape: tuple[int, ...], limit: Limit | None) -> Padding | None:
    """The padding of labels of several lengths, by the label that a loss ignores; None if it ignores none."""
    if RAGGED not in shape or limit is None or limit.ignored is None:
        return None
    return Padding(limit.ignored, "right", frozenset(i for i, d in enumerate(shape) if d == RAGGED))


def columns_of(dataset: Dataset, inputs: Sequence[Value], names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The columns that belong to each input, as `fitted` finds them.  UsageError where one has none."""
    return _matched(dataset.name, dataset.columns, dataset.notes, {v.name: v for v in inputs}, names)


def _matched(
    source: str,
    columns: Mapping[str, Column],
    notes: Mapping[str, str],
    inputs: Mapping[str, Value],
    names: Mapping[str, str],
) -> dict[str, tuple[str, ...]]:
    """The columns of each input: by `names`, by name, by a usual name of labels, or because nothing else is left."""
    for name, column in names.items():
        if name not in inputs:
            raise UsageError(f"the model has no input '{name}'{nearest(name, inputs)}; it has: {', '.join(inputs)}")
        need_column(_Described(source, columns, notes), column)
    matches: dict[str, tuple[str, ...]] = {n: (c,) for n in inputs if (c := names.get(n, n)) in columns}
    for n in inputs:
        of_labels = _left(columns, matches, only=LABELS)
        if n not in matches and n.rstrip("_0123456789").lower() in LABELS and len(of_labels) == 1:
            matches[n] = of_labels
    missing = [n for n in inputs if n not in matches]
    left = _left(columns, matches)
    if len(missing) == 1 and missing[0] not in notes and _fills(left, columns, inputs[missing[0]]):
        matches[missing[0]] = left
        missing = []
    for n in missing:
        note = f": that column {notes[n]}" if n in notes else nearest(n, left)
        raise UsageError(
            f"{source} has no column '{n}' for the model's input {n}, which needs {_sample(inputs[n])} a sample{note}; "
            f"it has: {show_columns(columns)}. Name the column so, or say which one it is: names={{'{n}': ...}}"
        )
    for n, v in inputs.items():
        if not v.shape:
            raise UsageError(
                f"the model's input '{n}' is a single number, not one a sample: no column can be given for it"
            )
    return matches


class _Described(Dataset):
    """A dataset with columns and notes, but no samples."""

    def __init__(self, name: str, columns: Mapping[str, Column], notes: Mapping[str, str]) -> None:
        self.name, self.columns, self.notes = name, columns, notes


def _left(
    columns: Mapping[str, Column], found: Mapping[str, tuple[str, ...]], only: frozenset[str] | None = None
) -> tuple[str, ...]:
    used = {c for cs in found.values() for c in cs}
    return tuple(c for c in columns if c not in used and (only is None or c.lower() in only))


def _fills(left: Sequence[str], columns: Mapping[str, Column], v: Value) -> bool:
    """Whether the columns that are left are the input's: a single one, or as many numbers as it has."""
    numbers = all(columns[c][1] == () and not is_text(columns[c][0]) for c in left)
    return len(left) == 1 or (numbers and len(left) == math.prod(v.shape[1:]))


def _sample(v: Value) -> str:
    return show_column((v.type.numpy, v.shape[1:]))


def check_values(
    dataset: Dataset,
    inputs: Sequence[Value] | None = None,
    limits: Mapping[str, int | Limit] | None = None,
    samples: np.ndarray | None = None,
) -> None:
    """UsageError for the first sample with NaN or infinity, or with a whole number outside of its limit.

    `inputs`: the columns to search (default: all); `limits`: see `fitted`, whose limits are the default.  The dataset
    (or its `samples` alone, by number) is read once, except for columns that cannot have such values (decoded images),
    and those that are `costly`, which a fitted dataset checks in each batch.
    """
    ranges = limits if limits is not None else dataset.limits if isinstance(dataset, Fitted) else {}
    checked = {name: limit if isinstance(limit, Limit) else Limit(int(limit)) for name, limit in ranges.items()}
    names = list(dataset.columns) if inputs is None else [v.name for v in inputs]
    floats = {n for n in names if _has_fractions(need_column(dataset, n)[0]) and n not in dataset.finite}
    searched = [n for n in names if (n in floats or n in checked) and n not in dataset.costly]
    if not searched:
        return
    size = sum(dataset.columns[n][0].itemsize * abs(math.prod(dataset.columns[n][1])) for n in searched)
    rows = max(1, _CHUNK // max(1, size))
    count = len(dataset) if samples is None else len(samples)
    for start in range(0, count, rows):
        places = np.arange(start, min(start + rows, count))
        indices = places if samples is None else samples[places]
        for name, array in dataset.read(indices, searched).items():
            what = dataset.fits[name].what if isinstance(dataset, Fitted) else f"column '{name}' of {dataset.name}"
            parts = [(array, indices)]
            if is_ragged(dataset.columns[name]):
                parts = [(sample[None], indices[i : i + 1]) for i, sample in enumerate(array) if sample.size]
            for values, numbers in parts:
                if name in floats:
                    _check_finite(values, numbers, what)
                if name in checked:
                    _check_limit(values, checked[name], numbers, what)


def _has_fractions(dtype: np.dtype) -> bool:
    return dtype in DTYPES.values() and dtype_name(dtype) in FLOATS


def _check_finite(array: np.ndarray, indices: np.ndarray, what: str) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        row, value = first(~finite, array)
        shown = "NaN" if np.isnan(value) else str(value)  # type: ignore[call-overload]
        raise UsageError(
            f"{what} has {shown} in sample {indices[row]} (counted from 0): mend or leave out such samples"
        )


def _check_limit(array: np.ndarray, limit: Limit, indices: np.ndarray, what: str) -> None:
    wrong = limit.wrong(array)
    if wrong.any():
        row, value = first(wrong, array)
        raise UsageError(f"{what} has {value} in sample {indices[row]} (counted from 0), but the model takes {limit}")
