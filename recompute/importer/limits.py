"""Limits on loading a model: bytes and work, counted before they are spent, and a clock as a fallback.

Work is counted in units of about a nanosecond, so that the same file is loaded or refused on every machine, busy or
not; the clock ends work that was estimated too low.  The nodes and tensors in the file itself are not charged;
everything that the loader computes, copies or unrolls is.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

from ..errors import ModelError, UsageError

#: limit on the work of loading a file, in seconds
MAX_SECONDS = 6.0
#: units of work per second: about half of what a core can do
UNITS = 500_000_000
#: units of a node that results from unrolling or inlining
NODE = 50_000
#: units of one operation of Python's own
PYTHON = 1_000
#: units of any node that ONNX's evaluator computes, in addition to its elements
EVALUATED = 500_000
#: a node of more units is not evaluated while loading, but in the step
MOST_OF_ONE = 1_000_000_000
#: bytes that computed constants may take, plus `_GROWTH` times the bytes of the file
_ROOM = 1 << 29
_GROWTH = 16
#: additional seconds of the clock for each node and byte of the file
_OWN_NODE, _OWN_BYTE = 2e-3, 2e-8


class LimitError(ModelError):
    """A limit on loading is exceeded: loading ends."""

    placed = False

    def at(self, place: str) -> LimitError:
        """This error with the name of its node, added once."""
        if self.placed:
            return self
        error = LimitError(f"{place}: {self}")
        error.placed = True
        return error


def memory_bytes() -> int:
    """The machine's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 1 << 40


class Limits(TypedDict, total=False):
    """Limits of bytes and seconds for loading: keywords of `load`; see `Budget`."""

    max_bytes: int | None
    max_seconds: float | None


class Budget:
    """The remaining budget for loading one model.

    `max_bytes`: limit on one tensor of the file (None: the machine's memory), and on all computed constants (None: half
    a GiB plus 16 times the bytes of the file, at most a quarter of the memory).
    `max_seconds`: see MAX_SECONDS; math.inf: no limit.  `most_of_one`: see MOST_OF_ONE.
    """

    def __init__(self, max_bytes: int | None = None, max_seconds: float | None = None) -> None:
        if max_bytes is not None and (not _is_number(max_bytes) or max_bytes < 1):
            raise UsageError(f"max_bytes must be at least 1, not {max_bytes!r}")
        seconds = MAX_SECONDS if max_seconds is None else max_seconds
        if not _is_number(seconds) or not seconds > 0:
            raise UsageError(f"max_seconds must be a number of seconds above 0, not {max_seconds!r}")
        self.tensor_bytes = max_bytes or memory_bytes()
        self.max_bytes, self.max_seconds = max_bytes, float(seconds)
        self.work: float = self.max_seconds * UNITS
        self.room = max_bytes or min(_ROOM, memory_bytes() // 4)
        self.most_of_one = MOST_OF_ONE
        self.repeating = 0  # nesting of the loops that are being unrolled
        self._allowed = self.room
        self._deadline = time.monotonic() + self.max_seconds

    def own(self, nodes: int, nbytes: int) -> None:
        """Sets the nodes and bytes of the file, by which the limits of time and constants increase."""
        self._deadline += nodes * _OWN_NODE + nbytes * _OWN_BYTE
        if self.max_bytes is None:
            more = max(0, min(_ROOM + _GROWTH * nbytes, memory_bytes() // 4) - self._allowed)
            self.room += more
            self._allowed += more

    def check_work(self, units: float, what: str) -> None:
        """LimitError if `units` of work exceed the budget, or time has run out.  Nothing is charged."""
        if units > self.work:
            raise LimitError(
                f"{what}: loading this model takes more than {self.max_seconds:g} seconds of work "
                "(max_seconds= or --max-seconds allows more)"
            )
        if time.monotonic() > self._deadline:
            raise LimitError(
                f"{what}: loading this model has taken more than {self.max_seconds:g} seconds beside reading it "
                "(max_seconds= or --max-seconds allows more)"
            )

    def spend(self, units: float, what: str) -> None:
        """Charges work before it is done.  LimitError if it exceeds the budget."""
        self.check_work(units, what)
        self.work -= units

    def of_one(self, units: float) -> float:
        """Units of a node's own overhead: charged inside unrolled loops, not for nodes of the file."""
        return units if self.repeating else 0

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the nodes of a loop are unrolled."""
        self.repeating += 1
        try:
            yield
        finally:
            self.repeating -= 1

    def take(self, nbytes: int) -> None:
        """Charges bytes before they are allocated.  LimitError if they exceed the budget."""
        if nbytes > self.room:
            raise LimitError(
                f"constants computed at load time take more memory than is allowed: {nbytes:,} bytes more, after "
                f"{self._allowed - self.room:,} of {self._allowed:,} (max_bytes= or --max-bytes allows more)"
            )
        self.room -= nbytes


def _is_number(value: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def budget_of(limits: Limits) -> Budget:
    """The budget that keywords of `load` ask for.  TypeError for other keywords."""
    for name in limits:
        if name not in Limits.__annotations__:
            raise TypeError(f"load() got an unexpected keyword argument '{name}'")
    return Budget(**limits)
