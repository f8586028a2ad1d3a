"""Samples of several sizes: each is padded to the next bucket, and batches have samples of one bucket."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data import Dataset, Stream, check_values, dataset, limits_of
from ..data.fitting import LABELS, Fitted, columns_of, fitted
from ..data.padding import MaskOf, Padding, paddings
from ..errors import RecomputeError, UsageError, expect
from ..language.ir import Value
from ..language.program import Program
from .batches import Epoch, numbers
from .feeding import Beside, Feeding
from .order import Order, mixed
from .programs import Programs

#: the input that is made of this column where the data lack it, as is usual for tokenized text
_MASK, _MASKED = "attention_mask", "input_ids"


class Buckets:
    """The sizes of a model's open dimensions to which samples are padded.

    `given`: sizes by the dimension's name in the model; `padding`: `rc.data.Pad`, `rc.data.MaskOf` or a value by input.
    UsageError for names that are no open dimensions, and for what is not combined.
    """

    def __init__(self, programs: Programs, dims: Mapping[str, Any], padding: Mapping[str, Any] | None) -> None:
        expect("buckets", dims, Mapping, "sizes by dimension, such as {'sequence': (64, 128)}")
        self.padding = dict(expect("padding", padding or {}, Mapping, "paddings by input"))
        self.sizes = {name: _sizes(name, sizes) for name, sizes in dims.items()}
        self.programs = programs
        if programs.ranks.mesh is not None:
            raise UsageError("buckets are not combined with a mesh yet: leave one of them out")
        again = programs.again
        if again is None:
            raise UsageError(
                "buckets need a forward pass that can be made at other sizes: load the model (rc.load, rc.from_torch), "
                "append losses by rc.losses, and give the trainer the optimizer"
            )
        again.check(self.sizes)
        self.places = {name: again.dims[name] for name in self.sizes}
        self._inputs: dict[tuple[tuple[str, int], ...], tuple[Value, ...]] = {}

    def inputs(self, dims: Mapping[str, int]) -> tuple[Value, ...]:
        """The inputs of the forward pass at some sizes."""
        at = self.programs.at(self.programs.batch, dims)
        if at.dims not in self._inputs:
            program = self.programs.program if at == self.programs.own else self.programs.forward(at)
            self._inputs[at.dims] = program.forward_block.inputs
        return self._inputs[at.dims]

    def axes(self) -> dict[str, frozenset[int]]:
        """Input → the axes of a sample that buckets change: those that other sizes make other."""
        dims = dict(self.programs.own.dims)
        by_name: dict[str, set[int]] = {}
        for name, sizes in self.sizes.items():
            other = next((s for s in sizes if s != dims[name]), 2 * dims[name])
            try:
                changed = self.inputs({name: other})
            except RecomputeError as e:
                raise UsageError(f"the model cannot be made for {name}={other}: {e}") from None
            for v, w in zip(self.inputs({}), changed, strict=True):
                by_name.setdefault(v.name, set()).update(i - 1 for i in range(v.ndim) if v.shape[i] != w.shape[i])
        return {name: frozenset(axes) for name, axes in by_name.items() if axes}

    def labels(self, inputs: Sequence[Value]) -> frozenset[str]:
        """The inputs that a loss compares with: by their limits and usual names, and those that the model lacks."""
        program = self.programs.program
        names = {v.name for v in inputs}
        model = names if program.imported is None else {v.name for v in program.imported.inputs}
        classes = {n for n, limit in limits_of(program.forward_block).items() if limit.lowest >= 0}
        usual = {n for n in names if n.rstrip("_0123456789").lower() in LABELS}
        return frozenset(names - model | names & classes | usual)

    def paddings(self, inputs: Sequence[Value], found: Dataset) -> tuple[dict[str, Padding], dict[str, str]]:
        """How inputs are padded, and the columns of those that are masks of others."""
        block = self.programs.program.forward_block
        own = {v.name for v in inputs}
        axes = {name: axes for name, axes in self.axes().items() if name in own}
        rules = {name: how for name, how in self.padding.items() if name in axes or name not in self.axes()}
        names = masks(found, inputs, self.padding)
        rules |= {name: MaskOf(column) for name, column in names.items() if name not in rules}
        limits = limits_of(block)
        return paddings(inputs, axes, limits, self.labels(inputs), rules), names


def assigned(
    data: Dataset,
    buckets: Mapping[str, Sequence[int]],
    places: Mapping[str, Sequence[tuple[str, int]]],
    columns: Mapping[str, str],
) -> dict[tuple[tuple[str, int], ...], np.ndarray]:
    """The numbers of the samples of each bucket that has some, from the smallest bucket on.

    `buckets`: ascending sizes by dimension; `places`: where each dimension stands, as (input, axis); `columns`: input →
    column.  UsageError for a sample that is larger than the largest bucket.
    """
    chosen = []
    for name, sizes in buckets.items():
        lengths = np.zeros(len(data), np.int64)
        for where, axis in places[name]:
            if where in columns:
                lengths = np.maximum(lengths, data.shapes(columns[where])[:, axis - 1])
        if (lengths > sizes[-1]).any():
            sample = int(np.argmax(lengths > sizes[-1]))
            raise UsageError(
                f"sample {sample} of {data.name} (counted from 0) has {name} {lengths[sample]}, more than the "
                f"largest bucket, {sizes[-1]}: give a larger one, or cut such samples (rc.data.mapped)"
            )
        chosen.append(np.searchsorted(sizes, lengths))
    numbers = np.ravel_multi_index(chosen, [len(s) for s in buckets.values()])
    every = list(itertools.product(*buckets.values()))
    order = sorted(range(len(every)), key=lambda i: (np.prod(every[i]), every[i]))
    parts = {tuple(zip(buckets, every[i], strict=True)): np.flatnonzero(numbers == i) for i in order}
    return {dims: part for dims, part in parts.items() if len(part)}


def steps_of_epoch(
    program: Program, data: Dataset, buckets: Mapping[str, Sequence[int]], padding: Mapping[str, Any], batch: int
) -> int:
    """The steps of an epoch in batches of `batch`, smaller last ones of each bucket included."""
    if not buckets or program.again is None:
        return -(-len(data) // batch)
    program.again.check(buckets)
    columns = single_columns(data, program.block.inputs, padding)
    sizes = {name: _sizes(name, s) for name, s in buckets.items()}
    parts = assigned(data, sizes, program.again.dims, columns)
    return sum(-(-len(part) // batch) for part in parts.values())


def single_columns(data: Dataset, inputs: Sequence[Value], padding: Mapping[str, Any]) -> dict[str, str]:
    """The column of each input that has one."""
    columns = columns_of(data, inputs, masks(data, inputs, padding))
    return {name: parts[0] for name, parts in columns.items() if len(parts) == 1}


def masks(data: Dataset, inputs: Sequence[Value], padding: Mapping[str, Any]) -> dict[str, str]:
    """The columns of inputs that say where these have values: as asked, or an attention_mask that the data lack."""
    names = {name: how.column for name, how in padding.items() if isinstance(how, MaskOf)}
    missing = _MASK in (v.name for v in inputs) and _MASK not in data.columns and _MASK not in padding
    return {**names, _MASK: _MASKED} if missing and _MASKED in data.columns else names


def _sizes(name: str, values: Any) -> tuple[int, ...]:
    """Sizes in ascending order.  UsageError for what are none."""
    whole = (int, np.integer)
    sizes = [values] if isinstance(values, whole) else list(expect("buckets", values, Sequence, "sizes by dimension"))
    if not sizes or not all(isinstance(s, whole) and not isinstance(s, bool) and s > 0 for s in sizes):
        raise UsageError(f"buckets: '{name}' needs whole numbers of at least 1, not {values!r}")
    return tuple(sorted({int(s) for s in sizes}))


@dataclass(frozen=True)
class BucketEpoch:
    """How an epoch is cut into batches of samples of one bucket; `parts`: the samples of each, by number.

    `rest` says whether the smaller last batch of a bucket is used.
    """

    parts: tuple[np.ndarray, ...]
    batch: int
    rest: bool

    @property
    def epochs(self) -> list[Epoch]:
        """An epoch for each bucket."""
        return [Epoch(len(part), self.batch, self.rest) for part in self.parts]

    @property
    def batches(self) -> int:
        """The number of batches."""
        return sum(e.batches for e in self.epochs)

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> np.ndarray:
        """The bucket of each batch of an epoch; without `shuffle`, batches are in the order of their last samples."""
        counts = [e.batches for e in self.epochs]
        which = np.repeat(np.arange(len(counts)), counts)
        if shuffle:
            return which[Order(len(which), mixed(seed, len(counts)), epoch).at(0, len(which))]
        pairs = zip(self.parts, self.epochs, strict=True)
        last = [part[e.places(k)[1] - 1] for part, e in pairs for k in range(e.batches)]
        return which[np.argsort(last, kind="stable")]


class BucketFeeding(Feeding):
    """A dataset whose samples are padded to the next bucket; see `Feeding`."""

    def __init__(
        self, source: Any, buckets: Buckets, inputs: Sequence[Value], seed: int, shuffle: bool, also: Sequence[str] = ()
    ) -> None:
        data = dataset(source)
        if isinstance(data, Stream):
            raise UsageError(
                f"buckets need samples that can be taken in any order, and {data.name} gives batches in its own: give "
                "the dataset"
            )
        self.found, self.buckets, self._shuffle, self._seed, self.name = data, buckets, shuffle, seed, data.name
        self.batch, self.rest, self.streams = 1, True, False
        names = [v.name for v in inputs]
        self.labels = buckets.labels(inputs)
        padded, columns = buckets.paddings(inputs, data)
        single = single_columns(data, inputs, buckets.padding)
        self.parts = assigned(data, buckets.sizes, buckets.places, single)
        limits = limits_of(buckets.programs.program.forward_block)
        self._source: Any = []
        for dims, part in self.parts.items():
            values = [v for v in buckets.inputs(dict(dims)) if v.name in names]
            for v in values:
                if v.name in padded:
                    _check_sizes(data, part, single[v.name], v, dims)
            fit = fitted(data, values, limits, columns, padded)
            assert isinstance(fit, Fitted)
            check_values(fit, values, limits, part)
            more = [name for name in also if name not in fit.columns]
            self._source.append(Beside(fit, data, more) if more else fit)

    def by_bucket(self) -> Iterator[tuple[Any, np.ndarray, Dataset]]:
        """The sizes, the samples by number, and the padded dataset of each bucket."""
        for (dims, part), source in zip(self.parts.items(), self._source, strict=True):
            yield dims, part, source

    @property
    def samples(self) -> int:
        return len(self.found)

    def facts(self) -> dict[str, Any]:
        columns = {n: f"{t}{list(s)}" for n, (t, s) in sorted(self.found.columns.items())}
        facts = {"samples": self.samples, "columns": columns, "contents": self._contents(), "shuffle": self._shuffle}
        padding = {name: repr(how) for name, how in sorted(self.buckets.padding.items())}
        return {**facts, "buckets": {n: list(s) for n, s in self.buckets.sizes.items()}, "padding": padding}

    def _some(self, chosen: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
        for source, part in zip(self._source, self.parts.values(), strict=True):
            rows = np.intersect1d(part, chosen)
            if len(rows):
                yield source.at_epoch(0).take(rows)

    def cut(self, batch: int, *, rest: bool) -> BucketEpoch:
        """How an epoch is cut into batches."""
        return BucketEpoch(tuple(self.parts.values()), batch, rest)

    def read(
        self, epoch: Any, number: int, first: int, rows: Any = lambda count: slice(None)
    ) -> Iterator[tuple[dict[str, np.ndarray], int]]:
        """The batches of an epoch from number `first` on, with their samples."""
        which = epoch.order(self._seed, number, shuffle=self._shuffle)
        done = np.bincount(which[:first], minlength=len(epoch.parts))
        orders = (Order(len(p), mixed(self._seed, i), number, self._shuffle) for i, p in enumerate(epoch.parts))
        taken = [numbers(e, o, int(n)) for e, o, n in zip(epoch.epochs, orders, done, strict=True)]
        sources = [source.at_epoch(number) for source in self._source]
        for i in which[first:]:
            samples = epoch.parts[i][next(taken[i])]
            yield sources[i].take(samples[rows(len(samples))]), len(samples)

    def sizes(self, batch: int) -> list[tuple[int, dict[str, int]]]:
        pairs = zip(self.parts, self.cut(batch, rest=True).epochs, strict=True)
        return [(size, dict(dims)) for dims, epoch in pairs for size in epoch.sizes]

    def in_order(self, rank: int = 0, ranks: int = 1) -> Iterator[tuple[dict[str, np.ndarray], int]]:
        """All batches, those of one bucket after the other; one process reads them."""
        return ((source.take(samples), 1) for source, samples in self._in_order())

    def _in_order(self) -> Iterator[tuple[Dataset, np.ndarray]]:
        epochs = self.cut(self.batch, rest=self.rest).epochs
        for source, part, epoch in zip(self._source, self.parts.values(), epochs, strict=True):
            for k in range(epoch.batches):
                yield source, part[slice(*epoch.places(k))]

    def joined(self, parts: Mapping[str, Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
        """See `Feeding.joined`.  UsageError for values whose size depends on the bucket."""
        order = np.argsort(np.concatenate([samples for _, samples in self._in_order()]))
        for name, part in parts.items():
            if len(sizes := {a.shape[1:] for a in part}) > 1:
                raise UsageError(
                    f"'{name}' has another size in each bucket, such as {' and '.join(map(str, sorted(sizes)[:2]))}: "
                    "predict it without buckets, for samples of one size"
                )
        return {name: np.concatenate(part)[order] for name, part in parts.items()}


def _check_sizes(data: Dataset, part: np.ndarray, column: str, v: Value, dims: Any) -> None:
    """UsageError for a sample of a bucket that is larger than an input there, such as more labels than words."""
    shapes = data.shapes(column)[part]
    larger = (shapes > np.array(v.shape[1:], np.int64)).any(axis=1) if shapes.shape[1] == v.ndim - 1 else np.zeros(0)
    if larger.any():
        at = int(np.argmax(larger))
        bucket = ", ".join(f"{name}={size}" for name, size in dims)
        raise UsageError(
            f"column '{column}' of {data.name} has {shapes[at].tolist()} in sample {part[at]} (counted from 0), but "
            f"the other columns of this sample belong to the bucket {bucket}, where '{v.name}' is {list(v.shape[1:])}"
        )
