"""The data of a run: a dataset that fits the program's inputs, cut into batches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..data import Dataset, Stream, check_values, dataset, fitted, limits_of
from ..data.base import need_column
from ..language.ir import Value
from ..language.program import Program
from ..training.origin import digest
from .batches import Epoch, batches, samples_of
from .order import Order

#: samples by which data are recognised, at least; and bytes that are read for it, about
_HASHED, _BYTES = 16, 1 << 28


class Beside(Dataset):
    """A dataset with further columns of another one that has the same samples.  UsageError where it lacks them."""

    def __init__(self, fitted: Dataset, other: Dataset, more: Sequence[str]) -> None:
        self._fitted, self._other, self._more, self.name = fitted, other, tuple(more), fitted.name
        self.columns = {**fitted.columns, **{n: need_column(other, n) for n in more}}

    def __len__(self) -> int:
        return len(self._fitted)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {**self._fitted.take(indices), **self._other.read(indices, self._more)}


class Feeding:
    """A dataset, or a stream of batches, with a column for each of `inputs`; what does not fit is an error.

    `also`: further columns that batches have, for metrics.  `batch`, `rest`: for `in_order`, the size of batches, and
    whether the smaller last one is used.
    """

    #: the sizes to which samples are padded (`Buckets`)
    buckets: Any = None

    def __init__(
        self, source: Any, program: Program, inputs: Sequence[Value], seed: int, shuffle: bool, also: Sequence[str] = ()
    ) -> None:
        data = dataset(source)
        self.name = data.name
        self._seed, self._shuffle = seed, shuffle
        self.batch, self.rest = program.block.batch or 1, True
        limits = limits_of(program.forward_block)
        self._source: Any = fitted(data, inputs, limits) if inputs else data
        self.streams = isinstance(self._source, Stream)
        if inputs and isinstance(self._source, Dataset):
            check_values(self._source, inputs, limits)
            more = [name for name in also if name not in self._source.columns]
            self._source = Beside(self._source, data, more) if more and isinstance(data, Dataset) else self._source

    @property
    def samples(self) -> int | None:
        """The number of samples; None for a stream."""
        return None if self.streams else len(self._source)

    def facts(self) -> dict[str, Any]:
        """Facts that must be equal when a run is resumed."""
        if self.streams:
            return {"stream": True}
        columns = {n: f"{np.dtype(t)}{list(s)}" for n, (t, s) in sorted(self._source.columns.items())}
        return {"samples": self.samples, "columns": columns, "contents": self._contents(), "shuffle": self._shuffle}

    def digest(self) -> str:
        """A digest of all samples, "" of a stream.

        Of columns that are costly to read (decoded images), and of the part of data beyond 256 MiB, evenly spaced
        samples stand for all.
        """
        if self.streams:
            return ""
        count, source, found = len(self._source), self._source.at_epoch(0), hashlib.sha256()
        for costly in (False, True):
            names = [n for n in sorted(source.columns) if (n in source.costly) == costly]
            size = sum(t.itemsize * math.prod(s) for t, s in (source.columns[n] for n in names)) or 1
            most = min(count, _HASHED if costly else max(_HASHED, _BYTES // size))
            chosen = np.unique(np.linspace(0, count - 1, most).astype(np.int64))
            step = max(1, _BYTES // 16 // size)
            for at in range(0, len(chosen) if names else 0, step):
                taken = source.read(chosen[at : at + step], names)
                found.update("".join(f"{n}:{digest(taken[n])};" for n in names).encode())
        return found.hexdigest()[:16]

    def _contents(self) -> str:
        """A hash of some samples, from the first to the last: other data of the same form are noticed."""
        count = self.samples or 0
        chosen = np.unique(np.linspace(0, count - 1, min(count, _HASHED)).astype(np.int64))
        digest = hashlib.sha256()
        for taken in self._some(chosen):
            for name in sorted(taken):
                digest.update(name.encode() + np.ascontiguousarray(taken[name]).tobytes())
        return digest.hexdigest()[:16]

    def _some(self, chosen: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
        yield self._source.at_epoch(0).take(chosen)

    def cut(self, batch: int, *, rest: bool) -> Any:
        """How an epoch is cut into batches; `rest`: whether smaller last ones are used."""
        return Epoch(len(self._source), batch, rest)

    def read(
        self, epoch: Any, number: int, first: int, rows: Callable[[int], slice] = lambda count: slice(None)
    ) -> Iterator[tuple[dict[str, np.ndarray], int]]:
        """The batches of epoch `number` from number `first` on, with their samples; `rows`: which of these are read.

        Random changes of samples differ from epoch to epoch.
        """
        order = Order(len(self._source), self._seed, number, self._shuffle)
        places = map(epoch.places, range(first, epoch.batches))
        found = batches(self._source.at_epoch(number), epoch, order, first, rows)
        return zip(found, (end - begin for begin, end in places), strict=True)

    def stream(self, epoch: int, first: int = 0) -> Iterator[dict[str, np.ndarray]]:
        """The batches of a stream from number `first` on."""
        for number, feed in enumerate(self._source.batches(epoch)):
            if number >= first:
                yield feed

    def sizes(self, batch: int) -> list[tuple[int, dict[str, int]]]:
        """The sizes of batches of at most `batch` samples, and of dimensions, as far as they are known before."""
        return [(batch, {})] if self.streams else [(size, {}) for size in self.cut(batch, rest=True).sizes]

    def count(self) -> int | None:
        """The number of batches of `in_order`; None for a stream."""
        return None if self.streams else self.cut(self.batch, rest=self.rest).batches

    def joined(self, parts: Mapping[str, Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
        """Values of the batches of `in_order`, in the order of the dataset."""
        return {name: np.concatenate(part) for name, part in parts.items()}

    def in_order(self, rank: int = 0, ranks: int = 1) -> Iterator[tuple[dict[str, np.ndarray], int]]:
        """All batches in the order of the dataset, `ranks` of them at a time: that of the rank, and how many are new.

        Where fewer batches of one size are left than ranks, the last ranks repeat the last one.
        """
        if self.streams:
            return _at_a_time(self.stream(0), rank, ranks)
        return self._at_a_time(rank, ranks)

    def _at_a_time(self, rank: int, ranks: int) -> Iterator[tuple[dict[str, np.ndarray], int]]:
        epoch = self.cut(self.batch, rest=self.rest)
        full = epoch.samples // epoch.batch
        for first in range(0, full, ranks):
            new = min(ranks, full - first)
            yield self._source.take(np.arange(*epoch.places(first + min(rank, new - 1)))), new
        if epoch.left_over:
            yield self._source.take(np.arange(*epoch.places(full))), 1


def _at_a_time(
    stream: Iterator[dict[str, np.ndarray]], rank: int, ranks: int
) -> Iterator[tuple[dict[str, np.ndarray], int]]:
    """See `Feeding.in_order`; of a stream, whose batches may have any sizes."""
    there: list[dict[str, np.ndarray]] = []
    for feed in stream:
        if there and samples_of(feed) != samples_of(there[0]):
            yield there[min(rank, len(there) - 1)], len(there)
            there = []
        there.append(feed)
        if len(there) == ranks:
            yield there[rank], ranks
            there = []
    if there:
        yield there[min(rank, len(there) - 1)], len(there)
