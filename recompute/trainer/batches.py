"""The batches of an epoch, loaded by a thread while the step before runs, where they take long to load."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from ..errors import UsageError
from .order import Order

T = TypeVar("T")
#: batches that are loaded ahead
AHEAD = 2
#: batches that are loaded before it is known how long they take; the part of a step's time that is not worth a thread
_TRIED, _QUICK = 4, 0.05
#: samples whose order is computed at once
_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class Epoch:
    """How an epoch is cut into batches: `samples` in batches of `batch`, the last of what is left over.

    `rest` says whether that smaller last batch is used.
    """

    samples: int
    batch: int
    rest: bool

    @property
    def left_over(self) -> int:
        """Samples in the smaller last batch; 0 if there is none."""
        return self.samples % self.batch if self.rest else 0

    @property
    def batches(self) -> int:
        """The number of batches."""
        return self.samples // self.batch + bool(self.left_over)

    @property
    def sizes(self) -> list[int]:
        """The sizes of its batches, each once."""
        full = [self.batch] if self.samples >= self.batch else []
        return full + ([self.left_over] if self.left_over else [])

    def places(self, number: int) -> tuple[int, int]:
        """Begin and end of a batch in the epoch's order."""
        return number * self.batch, min((number + 1) * self.batch, self.samples)


def batches(
    data: Any, epoch: Epoch, order: Order, first: int = 0, rows: Callable[[int], slice] = lambda batch: slice(None)
) -> Iterator[dict[str, np.ndarray]]:
    """The batches of a dataset from number `first` on, in their order; `rows`: which of a batch of a size are read."""
    return (data.take(batch[rows(len(batch))]) for batch in numbers(epoch, order, first))


def numbers(epoch: Epoch, order: Order, first: int = 0) -> Iterator[np.ndarray]:
    """The numbers of the samples of each batch from number `first` on."""
    many = max(1, _AT_ONCE // epoch.batch)
    for start in range(first, epoch.batches, many):
        begin, _ = epoch.places(start)
        samples = order.at(begin, epoch.places(min(start + many, epoch.batches) - 1)[1])
        for at in range(0, len(samples), epoch.batch):
            yield samples[at : at + epoch.batch]


def samples_of(feed: Mapping[str, np.ndarray]) -> int:
    """The samples of a batch: the first dimension of its arrays.  UsageError where they differ."""
    counts = {len(a) for a in feed.values() if np.ndim(a)}
    if len(counts) != 1:
        what = ", ".join(f"{n}: {len(a)}" for n, a in feed.items() if np.ndim(a))
        raise UsageError(f"the arrays of a batch must have as many samples each, but have {what or 'none'}")
    return counts.pop()


@contextlib.contextmanager
def ahead(source: Iterator[T]) -> Iterator[Iterator[T]]:
    """The items of an iterator, which a thread makes ahead of time if they take long to make.

    The first items are made where they are asked for.  If these take more than a small part of the time that passes
    between them, a thread makes the others, up to `AHEAD` before they are asked for; quick ones are not worth one, as
    it would take turns with the threads of the kernels.  Errors of the iterator are raised where its item is asked for.
    The thread ends with the `with` statement.
    """
    thread = _Ahead(source)
    try:
        yield _items(source, thread)
    finally:
        thread.end()


def _items(source: Iterator[T], thread: _Ahead[T]) -> Iterator[T]:
    making = between = 0.0
    for _ in range(_TRIED):
        begin = time.perf_counter()
        try:
            item = next(source)
        except StopIteration:
            return
        start = time.perf_counter()
        yield item
        making, between = making + start - begin, between + time.perf_counter() - start
    if making < _QUICK * between:
        yield from source
    else:
        yield from thread.items()


class _Ahead(Generic[T]):
    """A thread that makes the items of an iterator."""

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._waiting: queue.Queue[tuple[str, Any]] = queue.Queue(AHEAD)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def items(self) -> Iterator[T]:
        """The items, from a thread that starts now."""
        self._thread = threading.Thread(target=self._make, name="recompute-batches", daemon=True)
        self._thread.start()
        while True:
            kind, item = self._waiting.get()
            if kind == "error":
                raise item
            if kind == "end":
                return
            yield item

    def end(self) -> None:
        """Ends the thread, if there is one."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=10)

    def _make(self) -> None:
        try:
            for item in self._source:
                if not self._put("item", item):
                    return
            self._put("end", None)
        except BaseException as e:  # raised in the thread that waits
            self._put("error", e)

    def _put(self, kind: str, item: Any) -> bool:
        """Whether an item was taken over; False if nobody waits any more."""
        while not self._ended.is_set():
            with contextlib.suppress(queue.Full):
                self._waiting.put((kind, item), timeout=0.1)
                return True
        return False
