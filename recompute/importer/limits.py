"""What loading a model may take: bytes and work, counted before they are spent, and a clock behind both.

Work is counted in units of about a nanosecond, so that the same file is loaded or refused on every machine, busy or
not; the clock ends what was counted wrong.  What a file holds itself, its nodes once and its tensors, is its own need
and is not charged: what it makes us compute, copy and write out is.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

from ..errors import ModelError, UsageError

#: seconds of work that a file may ask for
MAX_SECONDS = 6.0
#: units of work that stand for a second: about half of what a core does in one
UNITS = 500_000_000
#: units of a node that is written out by a loop or a function
NODE = 50_000
#: units of one operation of Python's own
PYTHON = 1_000
#: units of a node that ONNX's evaluator computes, whatever its size
EVALUATED = 500_000
#: a single node of more units is not computed while loading, but in the step
MOST_OF_ONE = 1_000_000_000
#: bytes that constants may take, besides `_GROWTH` times what the file holds
_ROOM = 1 << 29
_GROWTH = 16
#: seconds for which the clock waits for a node and a byte that the file holds itself
_OWN_NODE, _OWN_BYTE = 2e-3, 2e-8


class LimitError(ModelError):
    """A limit on loading is reached: nothing more of the model is looked at."""

    placed = False

    def at(self, place: str) -> LimitError:
        """This error with the node at which it happened, said once."""
        if self.placed:
            return self
        found = LimitError(f"{place}: {self}")
        found.placed = True
        return found


def memory_bytes() -> int:
    """The machine's memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 1 << 40


class Limits(TypedDict, total=False):
    """What loading may take: keywords of `load`; see `Budget`."""

    max_bytes: int | None
    max_seconds: float | None


class Budget:
    """What is left for one model.

    `max_bytes`: the most that one tensor of the file may take (None: the machine's memory), and all constants that
    are computed (None: half a GiB and 16 times what the file holds, a quarter of the memory at the most).
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
        self.repeating = 0  # loops that are being written out, one in another
        self._allowed = self.room
        self._deadline = time.monotonic() + self.max_seconds

    def own(self, nodes: int, nbytes: int) -> None:
        """What the file holds itself: the clock waits for it, and constants may grow with it."""
        self._deadline += nodes * _OWN_NODE + nbytes * _OWN_BYTE
        if self.max_bytes is None:
            more = max(0, min(_ROOM + _GROWTH * nbytes, memory_bytes() // 4) - self._allowed)
            self.room += more
            self._allowed += more

    def check_work(self, units: float, what: str) -> None:
        """LimitError where `units` of work are more than is left, or the clock says so.  Nothing is charged."""
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
        """Charges work before it is done.  LimitError where it is more than is left."""
        self.check_work(units, what)
        self.work -= units

    def of_one(self, units: float) -> float:
        """Units of a node's own set-up: charged where nodes are run again and again, not where a file holds each."""
        return units if self.repeating else 0

    @contextmanager
    def again(self) -> Iterator[None]:
        """While the nodes of a loop are written out."""
        self.repeating += 1
        try:
            yield
        finally:
            self.repeating -= 1

    def take(self, nbytes: int) -> None:
        """Charges bytes before they are allocated.  LimitError where they are more than is left."""
        if nbytes > self.room:
            raise LimitError(
                f"constants computed at load time take more memory than is allowed: {nbytes:,} bytes more, after "
                f"{self._allowed - self.room:,} of {self._allowed:,} (max_bytes= or --max-bytes allows more)"
            )
        self.room -= nbytes


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def budget_of(limits: Limits) -> Budget:
    """The budget that keywords of `load` ask for.  TypeError for other keywords."""
    for name in limits:
        if name not in Limits.__annotations__:
            raise TypeError(f"load() got an unexpected keyword argument '{name}'")
    return Budget(**limits)
