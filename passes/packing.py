"""Packing allocations into one arena: given sizes and lifetimes, choose addresses so that the arena is small.

This is dynamic storage allocation with known lifetimes (NP-hard; Garey & Johnson 1979, SR2).  The bound that counts
is the most bytes alive at once.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

#: how many allocations the quadratic heuristics are tried for
_QUADRATIC = 30_000
#: seconds after which no further improvement is tried; every step before that is taken in the same order, but a slower
#: machine may stop earlier, so the repair steps are bounded by their number first
_REPAIRS = 24


@dataclass(frozen=True)
class Lifetime:
    """An allocation: bytes (aligned), first and last position at which it must hold its contents (inclusive)."""

    name: str
    size: int
    start: int
    end: int


def lower_bound(lifetimes: Sequence[Lifetime]) -> int:
    """The most bytes alive at once."""
    events: dict[int, int] = {}
    for x in lifetimes:
        events[x.start] = events.get(x.start, 0) + x.size
        events[x.end + 1] = events.get(x.end + 1, 0) - x.size
    live = peak = 0
    for at in sorted(events):
        live += events[at]
        peak = max(peak, live)
    return peak


def height(lifetimes: Sequence[Lifetime], plan: dict[str, int]) -> int:
    """Bytes of the arena that a plan needs."""
    return max((plan[x.name] + x.size for x in lifetimes), default=0)


def pack(lifetimes: Sequence[Lifetime]) -> dict[str, int]:
    """Addresses by name: the best of several heuristics, stopping as soon as one reaches the bound."""
    bound = lower_bound(lifetimes)
    best = best_fit_in_time(lifetimes)
    lowest = height(lifetimes, best)
    if lowest == bound or len(lifetimes) > _QUADRATIC:
        return best
    for key in _ORDERS:
        order = sorted(lifetimes, key=key)
        plan = _repaired(order, bound) if len(order) <= 4000 else first_fit(order)
        if height(lifetimes, plan) < lowest:
            best, lowest = plan, height(lifetimes, plan)
        if lowest <= bound * 1.001:
            break
    return best


_ORDERS: tuple[Callable[[Lifetime], tuple], ...] = (
    lambda x: (-x.size, x.start),
    lambda x: (-(x.end - x.start), -x.size),
    lambda x: (-x.size * (x.end - x.start + 1), x.start),
)


def _repaired(order: list[Lifetime], bound: int) -> dict[str, int]:
    """First fit in the given order; then, some times, what ended up on top is placed first."""
    order = list(order)
    plan = first_fit(order)
    best, lowest = plan, height(order, plan)
    deadline = time.perf_counter() + 1.0
    for _ in range(_REPAIRS):
        if lowest <= bound or time.perf_counter() > deadline:
            break
        top = height(order, plan)
        highest = [x for x in order if plan[x.name] + x.size == top]
        rest = [x for x in order if plan[x.name] + x.size != top]
        order = highest + rest
        plan = first_fit(order)
        if height(order, plan) < lowest:
            best, lowest = plan, height(order, plan)
    return best


def best_fit_in_time(lifetimes: Sequence[Lifetime]) -> dict[str, int]:
    """Simulates an allocator with best fit over the order of execution.  O(n log n + n · holes)."""
    holes: list[tuple[int, int]] = [(0, 1 << 62)]  # (start, end), sorted
    running: list[tuple[int, int, int]] = []  # (end of life, address, size), sorted
    plan: dict[str, int] = {}
    for x in sorted(lifetimes, key=lambda x: x.start):
        done = bisect.bisect_left(running, (x.start, -1, -1))
        for _, at, size in running[:done]:
            _release(holes, at, size)
        del running[:done]
        if not x.size:
            plan[x.name] = 0
            continue
        i = min((j for j, (a, b) in enumerate(holes) if b - a >= x.size), key=lambda j: holes[j][1] - holes[j][0])
        at, stop = holes[i]
        plan[x.name] = at
        if stop - at == x.size:
            del holes[i]
        else:
            holes[i] = (at + x.size, stop)
        bisect.insort(running, (x.end, at, x.size))
    return plan


def _release(holes: list[tuple[int, int]], at: int, size: int) -> None:
    """Gives [at, at + size) back and merges it with its neighbours."""
    i = bisect.bisect(holes, (at, 0))
    start, stop = at, at + size
    if i < len(holes) and holes[i][0] == stop:
        stop = holes.pop(i)[1]
    if i > 0 and holes[i - 1][1] == start:
        start = holes.pop(i - 1)[0]
        i -= 1
    holes.insert(i, (start, stop))


def first_fit(order: Sequence[Lifetime]) -> dict[str, int]:
    """Places allocations in the order given, each at the lowest address that is free during its whole life.

    O(n²) in vectorised steps: placed allocations stand in arrays sorted by address.
    """
    n = len(order)
    low, high, start, end = (np.empty(n, np.int64) for _ in range(4))
    count = 0
    plan: dict[str, int] = {}
    for x in order:
        if not x.size:
            plan[x.name] = 0
            continue
        near = np.flatnonzero((start[:count] <= x.end) & (end[:count] >= x.start))
        at = _lowest_gap(low[near], high[near], x.size)
        plan[x.name] = at
        i = int(np.searchsorted(low[:count], at, side="right"))
        for array, value in ((low, at), (high, at + x.size), (start, x.start), (end, x.end)):
            array[i + 1 : count + 1] = array[i:count]
            array[i] = value
        count += 1
    return plan


def _lowest_gap(low: np.ndarray, high: np.ndarray, size: int) -> int:
    """The lowest address at which `size` bytes fit between intervals sorted by their start."""
    if not low.size or low[0] >= size:
        return 0
    reached = np.maximum.accumulate(high)
    gaps = low[1:] - reached[:-1]
    fits = np.flatnonzero(gaps >= size)
    return int(reached[fits[0]] if fits.size else reached[-1])
