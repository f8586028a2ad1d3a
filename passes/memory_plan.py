"""The memory plan: every value of the step gets an offset in one arena."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..ir import Block, Free, Value
from .base import Pass
from .liveness import live_profile

#: bytes to which every buffer is aligned: a cache line, and the widest vector register
ALIGNMENT = 64
#: up to this many buffers the quadratic heuristics are tried as well
_SMALL = 3000


@dataclass(frozen=True)
class Lifetime:
    """A buffer: bytes (aligned), first and last position at which it must hold its contents (inclusive)."""

    name: str
    size: int
    start: int
    end: int


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a planned block.

    `arena`: what the executor allocates for one step's values; `live_peak`: the most bytes alive at once (no arena
    for this order can be smaller); `persistent`: parameters, buffers, state and constants; `peak`: arena +
    persistent, which is all the memory a step takes; `peak_at`: index of the operator at the live peak.
    """

    arena: int
    live_peak: int
    persistent: int
    peak_at: int

    @property
    def peak(self) -> int:
        """All bytes that the executor allocates."""
        return self.arena + self.persistent


@dataclass(frozen=True)
class MemoryPlan(Pass):
    """Give every buffer of a block with frees an address; the smallest of several heuristics' arenas is taken."""

    def run(self, block: Block) -> Block:
        """Adds addresses.  UsageError where frees have not been placed."""
        freed = any(isinstance(o.op, Free) for o in block.operators)
        keep = {v.name for v in block.persistent()}.union(block.outputs)
        if not freed and any(v.name not in keep for o in block.operators for v in (*o.reads(), *o.writes())):
            raise UsageError("'memory-plan' needs 'liveness' before it")
        lifetimes = collect_lifetimes(block)
        plans = [first_fit_in_time(lifetimes)]
        bound = max((b for _, b in live_profile(block, ALIGNMENT)), default=0)
        orders = [lambda x: (-x.size, x.start), lambda x: (-(x.end - x.start), -x.size)]
        if len(lifetimes) <= _SMALL:
            for key in orders:
                if min(map(_height(lifetimes), plans)) > bound:
                    plans.append(first_fit_by(sorted(lifetimes, key=key)))
        best = min(plans, key=_height(lifetimes))
        return block.with_operators(block.operators, addresses=best)


def _height(lifetimes: Sequence[Lifetime]) -> Callable[[dict[str, int]], int]:
    return lambda plan: max((plan[x.name] + x.size for x in lifetimes), default=0)


def aligned(v: Value) -> int:
    """Bytes of the value's buffer, rounded up to the alignment."""
    return -(-v.nbytes // ALIGNMENT) * ALIGNMENT


def collect_lifetimes(block: Block) -> list[Lifetime]:
    """Lifetimes of all buffers of the arena, in order of their start."""
    persistent = {v.name for v in block.persistent()}
    end = len(block.operators)
    starts: dict[str, tuple[Value, int]] = {v.name: (v, -1) for v in block.inputs}
    ends: dict[str, int] = {}
    scratch: list[Lifetime] = []
    for i, op in enumerate(block.operators):
        if isinstance(op.op, Free):
            ends.update((v.name, i) for v in op.reads())
            continue
        for v in op.writes():
            if v.name not in persistent:
                starts.setdefault(v.name, (v, i))
        scratch += [Lifetime(v.name, aligned(v), i, i) for v in op.scratch]
    found = [Lifetime(n, aligned(v), i, ends.get(n, end)) for n, (v, i) in starts.items()] + scratch
    return sorted(found, key=lambda x: x.start)


def first_fit_in_time(lifetimes: Sequence[Lifetime]) -> dict[str, int]:
    """Simulates an allocator with best fit over the order of execution.  O(n log n + n · holes)."""
    holes: list[tuple[int, int]] = [(0, 1 << 62)]  # (start, end), sorted
    running: list[tuple[int, int, int]] = []  # (end of life, address, size), sorted
    plan: dict[str, int] = {}
    for x in lifetimes:
        while running and running[0][0] < x.start:
            _, at, size = running.pop(0)
            _release(holes, at, size)
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


def first_fit_by(lifetimes: Sequence[Lifetime]) -> dict[str, int]:
    """Places buffers in the order given, each at the lowest address free during its whole life.  O(n²)."""
    placed: list[tuple[int, int, int, int]] = []  # (address, end address, start, end of life), sorted by address
    plan: dict[str, int] = {}
    for x in lifetimes:
        at = 0
        if x.size:
            for low, high, start, end in placed:
                if end < x.start or x.end < start:
                    continue
                if low - at >= x.size:
                    break
                at = max(at, high)
            bisect.insort(placed, (at, at + x.size, x.start, x.end))
        plan[x.name] = at
    return plan


def memory_report(block: Block) -> MemoryReport:
    """The figures of a planned block."""
    profile = list(live_profile(block))
    peak_at, live_peak = max(profile, key=lambda p: p[1], default=(-1, sum(v.nbytes for v in block.inputs)))
    values = block.values()
    arena = max((at + aligned(values[name]) for name, at in block.addresses.items()), default=0)
    return MemoryReport(arena, live_peak, sum(v.nbytes for v in block.persistent()), peak_at)
