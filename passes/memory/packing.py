"""Packing allocations into one arena: given sizes and lifetimes, choose addresses so that the arena is small.

This is dynamic storage allocation with known lifetimes (NP-hard; Garey & Johnson 1979, SR2).  The bound that counts
is the most bytes alive at once.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...errors import UsageError

#: how many allocations the quadratic heuristics are tried for
_QUADRATIC = 70_000
#: bytes of all allocations, at the most: addresses and their sums are words with a sign
MOST = (1 << 62) - 1
#: up to so many allocations single ones are moved in the order, so often at the most, and for so many allocations
#: altogether (that bounds the time)
_REPAIRED, _REPAIRS, _REPAIR_WORK = 800, 32, 12_000
#: of more allocations all those above the bound are moved together: for so many altogether and twice at least, in so
#: many of the best orders
_RAISE_WORK, _RAISED = 40_000, 3
#: up to so many allocations are searched, that often, where the heuristics are further off the bound than this
_FEW, _TRIES, _FAR = 96, 10_000, 1.005
#: allocations are small that take less than this part of the bound
_SMALL = 512
#: from so many allocations on first fit is worth compiling
_MANY = 256
_placer: Callable[[Sequence[Lifetime], Sequence[int]], list[int] | None] | None = None


def compile_with(placed: Callable[[Sequence[Lifetime], Sequence[int]], list[int] | None] | None) -> None:
    """Says what gives addresses by compiled first fit, or None where Python does it.  None: nothing does."""
    global _placer
    _placer = placed


class Lifetime(NamedTuple):
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
    """The size of the arena for a memory plan."""
    return max((plan[x.name] + x.size for x in lifetimes), default=0)


def pack(lifetimes: Sequence[Lifetime]) -> dict[str, int]:
    """Addresses by name: the best of several heuristics, stopping as soon as one is within 0.1 % of the bound.

    UsageError if their total size exceeds 64-bit addresses.
    """
    if (total := sum(x.size for x in lifetimes)) > MOST:
        raise UsageError(f"the values of a step take {total:,} bytes together: no machine has so much")
    bound = lower_bound(lifetimes)
    best = best_fit_in_time(lifetimes)
    lowest = height(lifetimes, best)
    if len(lifetimes) > _QUADRATIC:
        return best
    found: list[tuple[int, list[Lifetime], dict[str, int]]] = []
    for order in _orders(lifetimes):
        if lowest <= bound * 1.001:
            break
        plan = _repaired(order, bound) if len(order) <= _REPAIRED else first_fit(order)
        top = height(lifetimes, plan)
        found.append((top, order, plan))
        if top < lowest:
            best, lowest = plan, top
    for top, order, plan in sorted(found, key=lambda x: x[0])[:_RAISED]:
        if lowest > bound * 1.001 and len(order) > _REPAIRED:
            plan, top = _raised(order, plan, top, bound)
            if top < lowest:
                best, lowest = plan, top
    if lowest > bound * 1.001:
        plan = _large_first(lifetimes, bound)
        best = min(best, plan, key=lambda p: height(lifetimes, p))
    if height(lifetimes, best) > bound * _FAR and len(lifetimes) <= _FEW:
        best = min(best, _searched(lifetimes, bound), key=lambda p: height(lifetimes, p))
    return best


def _raised(order: Sequence[Lifetime], plan: dict[str, int], top: int, bound: int) -> tuple[dict[str, int], int]:
    """The lowest of first fit's plans, with its height, in orders in which what ended above the bound comes earlier
    each time, the further the higher it was ("squeaky wheels": Joslin & Clements 1999, JAIR 10).  `top`: of `plan`."""
    places, best = {x.name: float(i) for i, x in enumerate(order)}, plan
    for _ in range(max(_RAISE_WORK // len(order), 2)):
        if top <= bound * 1.001:
            break
        for x in order:
            over = plan[x.name] + x.size - bound
            if over > 0:
                places[x.name] -= len(order) * (1 + 10 * over / bound) / 20
        plan = first_fit(sorted(order, key=lambda x: places[x.name]))
        reached = height(order, plan)
        if reached < top:
            best, top = plan, reached
    return best, top


def _repaired(order: Sequence[Lifetime], bound: int) -> dict[str, int]:
    """First fit in the given order, in which some of those that ended up on top move to earlier places."""

    def draw(g: np.random.Generator, highest: list[int]) -> tuple[int, int]:
        i = highest[int(g.integers(len(highest)))]
        return i, int(g.integers(i)) if i else 0

    return _moved(order, bound, min(_REPAIRS, _REPAIR_WORK // max(len(order), 1)), draw)


def _searched(lifetimes: Sequence[Lifetime], bound: int) -> dict[str, int]:
    """First fit of a few, in an order found by many moves: an allocation, mostly one on top, moves to any place."""

    def draw(g: np.random.Generator, highest: list[int]) -> tuple[int, int]:
        i = highest[int(g.integers(len(highest)))] if g.random() < 0.7 else int(g.integers(len(lifetimes)))
        return i, int(g.integers(len(lifetimes)))

    return _moved(sorted(lifetimes, key=lambda x: (-x.size, x.start)), bound, _TRIES, draw)


def _moved(
    order: Sequence[Lifetime],
    bound: int,
    tries: int,
    draw: Callable[[np.random.Generator, list[int]], tuple[int, int]],
) -> dict[str, int]:
    """First fit in the given order, improved by local search.

    `draw`: from a generator with a fixed seed, so that the same program gets the same plan, and the places in the order
    of what ends at the top: from which place to which one an allocation moves.  A move stays unless the arena grows;
    many leave it as it is, which leads away from where no single one helps.
    """
    plan, g = first_fit(order), np.random.default_rng(0)
    places = [plan[x.name] for x in order]
    changed, same, top = list(order), len(order), MOST
    for _ in range(tries + 1):
        fitted = _first_fit_of_few(changed, places[:same], top)
        if fitted is not None:
            order, places = changed, fitted
            ends = [at + x.size for at, x in zip(places, order, strict=True)]
            top = max(ends, default=0)
            highest = [i for i, end in enumerate(ends) if end == top]
            if top <= bound * 1.001:
                break
        i, j = draw(g, highest)
        changed = [*order[:i], *order[i + 1 :]]
        changed.insert(j, order[i])
        same = min(i, j)  # places before both are as they were
    return {x.name: at for x, at in zip(order, places, strict=True)}


def _first_fit_of_few(order: Sequence[Lifetime], known: Sequence[int] = (), most: int = MOST) -> list[int] | None:
    """Addresses by `first_fit` without arrays: faster for few, or where many are `known`.  None where one ends above
    `most`."""
    addresses = list(known)
    # (address, its end, first and last position), sorted
    placed = sorted((at, at + x.size, x.start, x.end) for at, x in zip(known, order, strict=False) if x.size)
    for _, size, first, last in order[len(known) :]:
        at = 0
        for low, high, start, end in placed if size else ():
            if start <= last and end >= first:
                if low - at >= size:
                    break
                if high > at:
                    at = high
        if at + size > most:
            return None
        addresses.append(at)
        if size:
            bisect.insort(placed, (at, at + size, first, last))
    return addresses


def _large_first(lifetimes: Sequence[Lifetime], bound: int) -> dict[str, int]:
    """The large ones by themselves, in the order of their addresses; then the small ones into the gaps they leave.

    Small allocations with long lives obstruct large ones where all are placed together.
    """
    large = [x for x in lifetimes if x.size * _SMALL >= bound]
    small = [x for x in lifetimes if x.size * _SMALL < bound]
    if not small or not large:
        return first_fit(lifetimes)
    plan = pack(large)
    return first_fit([*sorted(large, key=lambda x: plan[x.name]), *sorted(small, key=lambda x: (-x.size, x.start))])


def _orders(lifetimes: Sequence[Lifetime]) -> Iterator[list[Lifetime]]:
    """Orders for `first_fit`.

    By breadth (as in TensorFlow Lite's planner): what is alive at the fullest moment comes first, so that this moment
    has no gaps and the rest fits into what it leaves; then by size, by length of life, and by their product.
    """
    breadth = _breadth(lifetimes)
    yield sorted(lifetimes, key=lambda x: (-breadth[x.name], x.start - x.end, x.start))
    yield sorted(lifetimes, key=lambda x: (-breadth[x.name], -x.size, x.start))
    yield sorted(lifetimes, key=lambda x: (-x.size, x.start))
    yield sorted(lifetimes, key=lambda x: (x.start - x.end, -x.size))
    yield sorted(lifetimes, key=lambda x: (-x.size * (x.end - x.start + 1), x.start))


def _breadth(lifetimes: Sequence[Lifetime]) -> dict[str, int]:
    """The most bytes alive at once during each allocation's life."""
    if not lifetimes:
        return {}
    first = min(x.start for x in lifetimes)
    change = np.zeros(max(x.end for x in lifetimes) - first + 2, np.int64)
    for x in lifetimes:
        change[x.start - first] += x.size
        change[x.end + 1 - first] -= x.size
    levels = [np.cumsum(change)]  # a sparse table: levels[k][i] = the largest of 2**k from i on
    while 2 << (len(levels) - 1) <= len(change):
        step = 1 << (len(levels) - 1)
        levels.append(np.maximum(levels[-1][:-step], levels[-1][step:]))
    found = {}
    for x in lifetimes:
        length = x.end - x.start + 1
        k = length.bit_length() - 1
        low = x.start - first
        found[x.name] = int(max(levels[k][low], levels[k][low + length - (1 << k)]))
    return found


def best_fit_in_time(lifetimes: Sequence[Lifetime]) -> dict[str, int]:
    """Simulates an allocator with best fit over the order of execution.  O(n log n)."""
    holes = _Holes()
    running: list[tuple[int, int, int]] = []  # a heap of (end of life, address, size)
    plan: dict[str, int] = {}
    for x in sorted(lifetimes, key=lambda x: x.start):
        while running and running[0][0] < x.start:
            _, at, size = heapq.heappop(running)
            holes.release(at, size)
        plan[x.name] = holes.take(x.size) if x.size else 0
        if x.size:
            heapq.heappush(running, (x.end, plan[x.name], x.size))
    return plan


class _Holes:
    """The free ranges between allocations, and everything from `top` on."""

    def __init__(self) -> None:
        self.top = 0
        self.ends: dict[int, int] = {}  # start of a hole → its end
        self.starts: dict[int, int] = {}  # and the other way round
        self.sizes: list[int] = []  # of the holes, each once, sorted
        #: size → heap of the starts of holes that were once of this size
        self.sized: dict[int, list[int]] = {}

    def take(self, size: int) -> int:
        """The address of `size` bytes in the smallest hole that they fit, the lowest of those."""
        i = bisect.bisect_left(self.sizes, size)
        while i < len(self.sizes):
            found = self.sizes[i]
            heap = self.sized[found]
            while heap and self.ends.get(heap[0]) != heap[0] + found:
                heapq.heappop(heap)  # gone since
            if heap:
                at = heapq.heappop(heap)
                self._forget(at)
                if found > size:
                    self._note(at + size, at + found)
                return at
            del self.sized[found], self.sizes[i]
        at, self.top = self.top, self.top + size
        return at

    def release(self, at: int, size: int) -> None:
        """Gives [at, at + size) back and merges it with its neighbours."""
        start, stop = at, at + size
        if stop in self.ends:
            stop = self._forget(stop)
        if start in self.starts:
            start = self.starts[start]
            self._forget(start)
        if stop == self.top:
            self.top = start
        else:
            self._note(start, stop)

    def _note(self, start: int, stop: int) -> None:
        self.ends[start], self.starts[stop] = stop, start
        heap = self.sized.get(stop - start)
        if heap is None:
            heap = self.sized[stop - start] = []
            bisect.insort(self.sizes, stop - start)
        heapq.heappush(heap, start)

    def _forget(self, start: int) -> int:
        """Takes a hole away; returns its end."""
        stop = self.ends.pop(start)
        del self.starts[stop]
        return stop


def first_fit(order: Sequence[Lifetime], known: Sequence[int] = ()) -> dict[str, int]:
    """Places allocations in the given order, each at the lowest address that is free during its whole lifetime.

    `known`: fixed addresses of the first ones.  O(n²) in vectorised steps: placed allocations are stored in arrays
    sorted by address.
    """
    if _placer is not None and len(order) >= _MANY and (found := _placer(order, known)) is not None:
        return {x.name: at for x, at in zip(order, found, strict=True)}
    table = np.empty((4, len(order)), np.int64)
    low, high, start, end = table
    plan = {x.name: at for x, at in zip(order, known, strict=False)}
    placed = sorted(((at, x) for x, at in zip(order, known, strict=False) if x.size), key=lambda found: found[0])
    count = len(placed)
    for i, (at, x) in enumerate(placed):
        table[:, i] = at, at + x.size, x.start, x.end
    for x in order[len(known) :]:
        if not x.size:
            plan[x.name] = 0
            continue
        near = ((start[:count] <= x.end) & (end[:count] >= x.start)).nonzero()[0]
        at = _lowest_gap(low[near], high[near], x.size)
        plan[x.name] = at
        i = int(low[:count].searchsorted(at, side="right"))
        table[:, i + 1 : count + 1] = table[:, i:count]
        table[:, i] = at, at + x.size, x.start, x.end
        count += 1
    return plan


def _lowest_gap(low: np.ndarray, high: np.ndarray, size: int) -> int:
    """The lowest address at which `size` bytes fit between intervals sorted by their start."""
    if not low.size or low[0] >= size:
        return 0
    reached = np.maximum.accumulate(high)
    fits = (low[1:] - reached[:-1] >= size).nonzero()[0]
    return int(reached[fits[0]] if fits.size else reached[-1])
