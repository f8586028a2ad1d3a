"""The exact packer: branch and bound (`branching.py`) for capacities between the bound and the heuristics' arena."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from ...errors import JobError
from ...language.types import Array
from . import branching
from .branching import FOUND, IMPOSSIBLE, OUTCOME, STEPS
from .packing import MOST, Lifetime, height, lower_bound, pack

#: steps for a second of effort, and as many at a time before the clock is looked at
_RATE, _SLICE = 20_000, 100
#: steps of the first round of all orders; each round takes twice as many
_FIRST = 2_000
#: places for hashes of failed states; entries of `undo` for each allocation
_REMEMBERED, _UNDONE = 1 << 20, 16
#: orders of preference: by the fullest moment (T), length (W), bytes × length (A) and bytes (Z), largest first
_ORDERS = ("WAT", "TAW", "TWA", "AZT", "ZTA", "TZA")
Search = Callable[[int, int], None]
_compiler: Callable[..., Search | None] | None = None


def compile_with(found: Callable[..., Search | None] | None) -> None:
    """Says what binds a compiled `branching.search` to its arrays; it gives None where Python does it."""
    global _compiler
    _compiler = found


def pack_exact(lifetimes: Sequence[Lifetime], *, seconds: float = 10.0) -> tuple[dict[str, int], int]:
    """(addresses by name, proven lower bound of the arena in bytes).

    The search is for an arena of the most bytes alive, then for one between what failed and the smallest found.  The
    effort is 20,000 steps a second, the same on each machine unless so many take longer than `seconds`.
    """
    best = pack(lifetimes)
    some = [x for x in lifetimes if x.size]
    bound, top = lower_bound(some), height(some, best)
    if bound == top or top > MOST:
        return best, bound
    unit = math.gcd(*(x.size for x in some))  # where nothing can be moved down, addresses are sums of sizes
    search = Branching(some, seconds)
    failed = bound - unit
    while failed + unit < top and not search.ended:
        capacity = failed + unit if failed < bound else failed + (top - failed) // (2 * unit) * unit
        outcome, plan = search.below(capacity, 0.15)
        if plan is None:
            failed = capacity
            bound = max(bound, capacity + unit) if outcome == IMPOSSIBLE else bound
        else:
            best = {**{x.name: 0 for x in lifetimes}, **plan}
            top = height(some, best)
    return best, min(bound, top)


def check_plan(lifetimes: Sequence[Lifetime], plan: dict[str, int]) -> None:
    """JobError if two allocations overlap, both in time and in space, or one has a negative address."""
    some = [x for x in lifetimes if x.size]
    at = np.array([plan[x.name] for x in some], np.int64)
    size, start, end = (np.array([getattr(x, k) for x in some], np.int64) for k in ("size", "start", "end"))
    for i, x in enumerate(some):
        over = (start[:i] <= x.end) & (end[:i] >= x.start) & (at[:i] < at[i] + x.size) & (at[:i] + size[:i] > at[i])
        if at[i] < 0 or over.any():
            raise JobError(f"packing: {x.name} at {at[i]:,} has no place of its own")


class Branching:
    """A search for plans below capacities, with a common effort: seconds, as steps and by the clock."""

    def __init__(self, lifetimes: Sequence[Lifetime], seconds: float) -> None:
        self.given = sorted(range(len(lifetimes)), key=lambda i: (lifetimes[i].start, lifetimes[i].end))
        self.lifetimes = [lifetimes[i] for i in self.given]
        self.steps, self.deadline = int(seconds * _RATE), time.process_time() + seconds
        n = len(self.lifetimes)
        starts, ends = {x.start for x in lifetimes}, {x.end + 1 for x in lifetimes}
        times = sorted(starts | ends)
        full = [a for a, b in itertools.pairwise(times) if a in starts and b in ends]
        self.x = np.zeros((branching.ROWS, n + 1), np.int64)
        self.s = np.zeros((5, len(full) + 1), np.int64)
        x = self.x
        x[branching.SIZE, :n] = [a.size for a in self.lifetimes]
        x[branching.LOW, :n] = np.searchsorted(full, [a.start for a in self.lifetimes])
        x[branching.HIGH, :n] = np.searchsorted(full, [a.end for a in self.lifetimes], "right")
        low, high = x[branching.LOW, :n], x[branching.HIGH, :n]
        self.s[branching.FIRST] = np.searchsorted(low, np.arange(len(full) + 1))
        beside = [((low < high[b]) & (high > low[b])).nonzero()[0] for b in range(n)]
        near = [found[found != b] for b, found in enumerate(beside)]
        x[branching.NEAR, 1:] = np.cumsum([len(found) for found in near])
        self.near = np.concatenate(near).astype(np.int64)
        x[branching.KEYS :, :n] = np.random.default_rng(0).integers(1, 2147483629, (6, n))
        self.l = np.zeros((12, n + len(full) + 5), np.int64)
        self.undo = np.zeros((4, len(self.near) + _UNDONE * n + 5), np.int64)
        self.memo, self.g = np.zeros(_REMEMBERED, np.int64), np.zeros(branching.NUMBERS, np.int64)
        self.orders = [self._order(letters) for letters in _ORDERS]
        arrays = (x, self.s, self.l, self.undo, self.near, self.memo, self.g)
        compiled = None if _compiler is None else _compiler(*arrays)
        self._run: Search = compiled or (lambda begin, stop: branching.search(*arrays, begin, stop))

    @property
    def ended(self) -> bool:
        """Whether the effort is spent."""
        return self.steps <= 0 or time.process_time() >= self.deadline

    def below(self, capacity: int, share: float = 1.0) -> tuple[int, dict[str, int] | None]:
        """(outcome, plan): FOUND with a plan that ends below a capacity; IMPOSSIBLE, proven; else RUNNING.

        `share`: of the steps that are left.  The orders take turns, with ever more steps.
        """
        end = self.steps - max(1, int(self.steps * share))
        if capacity < lower_bound(self.lifetimes):
            return IMPOSSIBLE, None
        self.memo[:] = 0
        self.g[branching.CAPACITY] = capacity
        for limit in (_FIRST << k for k in itertools.count()):
            for order in self.orders:
                self.x[branching.MAJOR, :-1], self.x[branching.MINOR, :-1] = order
                outcome = self._turn(limit, end)
                if outcome != branching.RUNNING:
                    return outcome, self._plan(capacity) if outcome == FOUND else None
                if self.ended or self.steps <= end:
                    return outcome, None
        raise AssertionError("unreachable")

    def _turn(self, limit: int, end: int) -> int:
        """One order from the start for so many steps, or until `end` steps are left."""
        done = 0
        while done < limit:
            self._run(done, done + min(_SLICE, limit - done, self.steps - end))
            spent = int(self.g[STEPS]) - done
            done, self.steps = done + spent, self.steps - spent
            if self.g[OUTCOME] != branching.RUNNING or self.ended or self.steps <= end:
                break
        return int(self.g[OUTCOME])

    def _plan(self, capacity: int) -> dict[str, int]:
        plan = {x.name: int(at) for x, at in zip(self.lifetimes, self.x[branching.AT], strict=False)}
        check_plan(self.lifetimes, plan)
        if height(self.lifetimes, plan) > capacity:
            raise JobError(f"packing: an arena of {height(self.lifetimes, plan):,} bytes for {capacity:,}")
        return plan

    def _order(self, letters: str) -> tuple[Array, Array]:
        """The keys before and after the bytes at the fullest moment in an order of preference."""
        length = np.array([x.end + 1 - x.start for x in self.lifetimes])
        size = self.x[branching.SIZE, :-1].astype(float)
        keys = {"W": -length, "A": -size * length, "Z": -size}
        before, after = letters.split("T")
        return _ranks([keys[k] for k in before]), _ranks([*(keys[k] for k in after), np.array(self.given)])


def _ranks(keys: Sequence[Array]) -> Array:
    """The place of each row of the keys among their sorted rows, equal ones alike."""
    rows = np.array(keys) if keys else np.zeros((1, 1))
    return np.unique(rows, axis=1, return_inverse=True)[1].reshape(-1)
