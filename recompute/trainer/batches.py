"""The batches of an epoch, loaded by a thread while the step before runs."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..errors import UsageError
from .order import Order

T = TypeVar("T")
#: batches that are loaded ahead
AHEAD = 2


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

    def places(self, number: int) -> tuple[int, int]:
        """Begin and end of a batch in the epoch's order."""
        return number * self.batch, min((number + 1) * self.batch, self.samples)


def batches(data: Any, epoch: Epoch, order: Order, first: int = 0) -> Iterator[dict[str, np.ndarray]]:
    """The batches of a dataset from number `first` on, in their order."""
    for number in range(first, epoch.batches):
        yield data.take(order.at(*epoch.places(number)))


def samples_of(feed: Mapping[str, np.ndarray]) -> int:
    """The samples of a batch: the first dimension of its arrays.  UsageError where they differ."""
    counts = {len(a) for a in feed.values() if np.ndim(a)}
    if len(counts) != 1:
        what = ", ".join(f"{n}: {len(a)}" for n, a in feed.items() if np.ndim(a))
        raise UsageError(f"the arrays of a batch must have as many samples each, but have {what or 'none'}")
    return counts.pop()


@contextlib.contextmanager
def ahead(source: Iterator[T], prepare: Callable[[T], T] = lambda x: x) -> Iterator[Iterator[T]]:
    """The items of an iterator, made by a thread up to `AHEAD` before they are asked for.

    An error of the iterator is raised where its item is asked for.  The thread ends with the `with` statement.
    """
    waiting: queue.Queue[tuple[str, Any]] = queue.Queue(AHEAD)
    ended = threading.Event()

    def put(kind: str, item: Any) -> bool:
        while not ended.is_set():
            with contextlib.suppress(queue.Full):
                waiting.put((kind, item), timeout=0.1)
                return True
        return False

    def load() -> None:
        try:
            for item in source:
                if not put("item", prepare(item)):
                    return
            put("end", None)
        except BaseException as e:  # raised in the thread that waits
            put("error", e)

    thread = threading.Thread(target=load, name="recompute-batches", daemon=True)
    thread.start()

    def items() -> Iterator[T]:
        while True:
            kind, item = waiting.get()
            if kind == "error":
                raise item
            if kind == "end":
                return
            yield item

    try:
        yield items()
    finally:
        ended.set()
        thread.join(timeout=10)
