"""Threads and signals: one-time set-up, exclusive use, and interrupts that wait for the end of a step.

docs/threads.md describes what threads may do at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from ..errors import UsageError

T = TypeVar("T")
_set_up = threading.RLock()


def set_up_lock() -> Any:
    """The reentrant lock that is held while anything is set up or compiled once for all threads.

    Code that runs while a module is imported must not take it: another thread may hold it and import that module.
    """
    return _set_up


def _after_fork() -> None:
    global _set_up
    _set_up = threading.RLock()  # after a fork: the thread that held the old lock does not exist here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Once(Generic[T]):
    """A function without arguments whose first result serves all threads; `cache_clear()` forgets it."""

    def __init__(self, function: Callable[[], T]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._results: list[T] = []

    def __call__(self) -> T:
        """The result; it is not stored if the function raises."""
        if self._results:
            return self._results[0]
        with set_up_lock():
            if not self._results:
                self._results.append(self._function())
            return self._results[0]

    @property
    def known(self) -> bool:
        """Whether there is a result."""
        return bool(self._results)

    def cache_clear(self) -> None:
        """Forgets the result, so that the next call computes it."""
        self._results.clear()


def once(function: Callable[[], T]) -> Once[T]:
    """Decorator for one-time set-up; `functools.cache` would let several first threads each compute a result."""
    return Once(function)


@contextlib.contextmanager
def exclusively(lock: Any, message: str) -> Iterator[None]:
    """Holds a lock; UsageError with the message if another thread holds it."""
    if not lock.acquire(blocking=False):
        raise UsageError(message)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Inside, the first Ctrl-C takes effect at the end, a second one at once.

    Only the main thread receives interrupts; other threads are not affected.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    caught: list[Any] = []

    def handler(number: int, frame: Any) -> None:
        if caught:
            before(number, frame)
        caught.append(frame)

    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught:
            before(signal.SIGINT, caught[0])
