"""First fit of the arena packer and the moves of its repair (passes/memory/packing.py), compiled and kept like kernels.

The results are the same as those of `first_fit` and `Repair`, which run where numba is missing.  The packer gets this
by `packing.compile_with` from above, as passes know no runtime.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...language.types import Array
from ...passes.memory.packing import Lifetime, Repairing
from .device import jit, native

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_KINDS, _PLACING = (("int64", 1),) * 9, (("int64", 1),) * 8
#: fewer allocations are repaired by Python in less time than numba takes to compile
_WORTH_COMPILING = 256


def compiled(order: Sequence[Lifetime]) -> Repairing | None:
    """A repair with compiled moves of first fit in an order; None where Python shall make them."""
    if native.unavailable():
        return None
    if not _kernel().kept(_KINDS) and (len(order) < _WORTH_COMPILING or jit.unavailable()):
        return None
    return CompiledRepair(order)


def placed(order: Sequence[Lifetime], known: Sequence[int] = ()) -> list[int] | None:
    """Addresses by first fit, in order, the first ones as they are known; None where Python shall do it."""
    if native.unavailable() or (not _placing().kept(_PLACING) and jit.unavailable()):
        return None
    n = len(order)
    size, start, end = (np.array([getattr(x, k) for x in order], np.int64) for k in ("size", "start", "end"))
    low = np.zeros(n, np.int64)
    low[: len(known)] = known
    sorted_ones = [np.empty(n + 1, np.int64) for _ in range(4)]
    call = _placing().call(low, size, start, end, *sorted_ones, work=0)
    _SIGNATURE(call.address)(call.words(low).ctypes.data, len(known), n)
    return low.tolist()


def _place(
    low: Array, size: Array, start: Array, end: Array, lows: Any, highs: Any, starts: Any, ends: Any, known: int, n: int
) -> None:
    """`first_fit`.  `lows`, `highs`, `starts`, `ends`: of those that are placed, sorted by address."""
    count = 0
    for x in range(n):
        if size[x] == 0:
            low[x] = 0
            continue
        at = low[x] if x < known else 0
        if x >= known:
            for p in range(count):
                if starts[p] <= end[x] and ends[p] >= start[x]:
                    if lows[p] - at >= size[x]:
                        break
                    at = max(at, highs[p])
            low[x] = at
        p = count
        while p > 0 and lows[p - 1] > at:
            lows[p], highs[p], starts[p], ends[p] = lows[p - 1], highs[p - 1], starts[p - 1], ends[p - 1]
            p -= 1
        lows[p], highs[p], starts[p], ends[p] = at, at + size[x], start[x], end[x]
        count += 1


@functools.cache
def _placing() -> jit.Kernel:
    return jit.kernel(_place)


class CompiledRepair:
    """First fit in an order, and its repair, on flat arrays."""

    def __init__(self, order: Sequence[Lifetime]) -> None:
        n = len(order)
        self.size, self.start, self.end = (
            np.array([getattr(x, k) for x in order], np.int64) for k in ("size", "start", "end")
        )
        self.low, self.order, self.limit = np.zeros(n, np.int64), np.arange(n, dtype=np.int64), np.zeros(1, np.int64)
        place, was, waiting = (np.empty(n, np.int64) for _ in range(3))
        arrays = (self.low, self.size, self.start, self.end, self.order, place, was, waiting, self.limit)
        self.call = _kernel().call(*arrays, work=0)
        self.words = self.call.words(self.low)
        self.function = _SIGNATURE(self.call.address)
        self.move(0, 0)

    @property
    def top(self) -> int:
        """The size of the arena."""
        return int(self.limit[0])

    @property
    def at(self) -> list[int]:
        """Addresses."""
        return self.low.tolist()

    def highest(self) -> list[int]:
        """Places in the order of allocations that end at the top."""
        return (self.low + self.size == self.top)[self.order].nonzero()[0].tolist()

    def move(self, i: int, j: int) -> None:
        """The allocation in place i of the order goes to place j, unless the arena grows."""
        self.function(self.words.ctypes.data, i, j)


def _repair(
    low: Array,
    size: Array,
    start: Array,
    end: Array,
    order: Array,
    place: Array,
    was: Array,
    waiting: Array,
    limit: Array,
    i: int,
    j: int,
) -> None:
    """`Repair.move(i, j)`.  `limit`: the arena's size; 0 before the first call, which is first fit of all.

    `was`: addresses before; `waiting`: places in the order that are to be placed again.
    """
    n, first = len(order), limit[0] == 0
    most = 1 << 62 if first else limit[0]
    for p in range(n):
        x = order[p]
        place[x] = j if p == i else p + (j <= p < i)
        was[x] = low[x]
        waiting[p] = first or p == j
    for p in range(j, n):
        if waiting[p]:
            x = order[i] if p == j else order[p - (p <= i)]
            now = _lowest(low, size, start, end, place, x)
            if now + size[x] > most:
                for y in range(n):
                    low[y] = was[y]
                return
            if now != low[x]:
                low[x] = now
                if not first:
                    _touch(low, size, start, end, place, waiting, x, was[x], i if p == j else p)
    for x in range(n):
        order[place[x]] = x
    limit[0] = 0
    for x in range(n):
        limit[0] = max(limit[0], low[x] + size[x])


@jit.inline
def _lowest(low: Array, size: Array, start: Array, end: Array, place: Array, x: int) -> int:
    """The lowest address at which an allocation fits between those that come before it."""
    at, again = 0, True
    while again:
        again = False
        for y in range(len(low)):
            here = place[y] < place[x] and low[y] < at + size[x] and low[y] + size[y] > at
            if here and size[y] > 0 and start[y] <= end[x] and end[y] >= start[x]:
                at, again = low[y] + size[y], True
    return at


@jit.inline
def _touch(
    low: Array, size: Array, start: Array, end: Array, place: Array, waiting: Array, x: int, was: int, first: int
) -> None:
    """Marks the later places that an allocation which has moved in the arena can matter to (`Repair._touched`)."""
    for y in range(len(low)):
        if place[y] > place[x] and size[y] > 0 and start[y] <= end[x] and end[y] >= start[x]:
            now_in_its_way = low[y] < low[x] + size[x] and low[x] < low[y] + size[y]
            if now_in_its_way or (was < low[y] and place[y] > first):
                waiting[place[y]] = 1


@functools.cache
def _kernel() -> jit.Kernel:
    return jit.kernel(_repair)
