"""The dynamic program of Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019 (arXiv 1911.13214): optimal schedules
among those that keep what they decided to keep, for chains of stages with different costs and sizes.

Opt(s, t, m): least cost of the forward and backward of stages s to t, what crosses into s being there, with m further
bytes, those that wait for the backward of t included:

    later: min_j  Σ_{s ≤ i < j} forward(i) + Opt(j, t, m - border(j - 1)) + Opt(s, j - 1, m)
    now:   forward_all(s) + Opt(s + 1, t, m - saved(s) - border(s)) + backward(s)

each where the memory that the runs themselves need is there.  The backward's cost is the same in all, and left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..core.chain import Action, Chain, emit
from ..core.watch import current

Row = NDArray[np.float32]


@dataclass(frozen=True)
class RotorTable:
    """`cost[s, t]`: Opt(s, t, m) for m = 0, 1, ... slots of `unit` bytes; infinite where it does not fit."""

    chain: Chain
    unit: float
    cost: NDArray[np.float32]
    shifted: NDArray[np.float32]
    stages: _Stages
    _sequences: dict[int, list[int]] = field(default_factory=dict)
    _following: dict[tuple[int, int, int], int] = field(default_factory=dict)

    @property
    def slots(self) -> int:
        """The largest m."""
        return self.cost.shape[2] - 1

    def total(self, m: int) -> float:
        """Least cost of all runs of forward stages with m slots."""
        return float(self.cost[0, len(self.chain) - 1, m])

    def sequence(self, m: int) -> list[int]:
        """The order of execution of the schedule for m slots; it is remembered."""
        if m not in self._sequences:
            self._sequences[m] = emit(self.chain, rotor_schedule(self, m))
        return self._sequences[m]

    def following(self, s: int, t: int, m: int) -> int:
        """The j of `later` where that is best for Opt(s, t, m); 0 where `now` is."""
        if (s, t, m) not in self._following:
            later = self.shifted[t, s + 1 : t + 1, m] + self.cost[s, s:t, m]
            later += self.stages.reach[s + 1 : t + 1] - self.stages.reach[s]
            for j, least in self.stages.need_later(s, t):
                if least > m:
                    later[j:] = np.inf
            k = int(later.argmin())
            best = _now(self.stages, self.cost, s, t)[m]
            self._following[s, t, m] = s + 1 + k if later[k] < best else 0
        return self._following[s, t, m]


class _Stages:
    """A chain's numbers in slots."""

    def __init__(self, chain: Chain, unit: float) -> None:
        b, n = chain.bytes, len(chain)
        self.n = n
        self.reach = np.array([0.0, *accumulate(chain.forward_cost)], np.float32)
        self.all_cost, self.last_cost = chain.forward_all_cost, chain.forward_saved_cost
        into, held = [0, *b.border[:-1]], [0, *b.held[:-1]]
        self.border = [_slots(x / unit) for x in b.border]
        # what crosses into a stage and is not read by the backward dies with the stage's run
        self.now = [
            _slots(saved / unit) + out - round((i - h) / unit)
            for saved, out, i, h in zip(b.saved, self.border, into, held, strict=True)
        ]
        self.backward = [peak - h for peak, h in zip(b.backward_peak, held, strict=True)]
        self.chain_bytes, self.unit = b, unit
        running = [i + f for i, f in zip(into, b.forward_peak, strict=True)]
        #: for each s the stages from s on whose run takes more than all before it did, as j - s - 1, and their bytes
        self.rises = [_rises([b.forward_peak[s], *running[s + 1 :]]) for s in range(n)]

    def need_leaf(self, s: int) -> int:
        """Slots for Opt(s, s)."""
        b = self.chain_bytes
        return self._up(max(b.gradients[s] + b.forward_saved_peak[s], self.backward[s]))

    def need_now(self, s: int, t: int) -> int:
        """Slots for the run of s that keeps all, and for its backward."""
        b = self.chain_bytes
        return self._up(max(b.gradients[t] + b.forward_all_peak[s], self.backward[s]))

    def need_later(self, s: int, t: int) -> list[tuple[int, int]]:
        """Slots for the runs of stages s to j - 1, where they change: (the first j - s - 1, slots), j in s + 1..t."""
        waiting, unit = self.chain_bytes.gradients[t], self.unit
        return [(j, max(0, round((peak + waiting) / unit))) for j, peak in self.rises[s] if j < t - s]

    def _up(self, size: int) -> int:
        return max(0, round(size / self.unit))


def _rises(peaks: Sequence[int]) -> list[tuple[int, int]]:
    """Where a list exceeds all that comes before, and by which numbers."""
    found: list[tuple[int, int]] = []
    for at, peak in enumerate(peaks):
        if not found or peak > found[-1][1]:
            found.append((at, peak))
    return found


def _slots(size: float) -> int:
    """Rounded to the nearest, as errors of both signs cancel; but nothing is so small that it is free."""
    return round(size) if size > 1 else math.ceil(size)


def _unit(chain: Chain, most: int, slots: int) -> float:
    """Bytes of a slot: a typical border is a whole number of them if it is larger than one."""
    unit = max(most / slots, 1.0)
    border = statistics.median_high(chain.bytes.border)
    return border / round(border / unit) if border > unit else unit


def rotor_table(chain: Chain, most: int, slots: int) -> RotorTable:
    """Fills the table for up to `most` bytes, in about so many slots.

    Time O(n³ · slots) in whole rows, memory 8 n² · slots bytes.
    """
    n = len(chain)
    unit = _unit(chain, most, slots)
    slots = math.ceil(most / unit)
    stages = _Stages(chain, unit)
    cost = np.full((n, n, slots + 1), np.inf, np.float32)
    # shifted[t, j, m] = cost[j, t, m - border(j - 1)]: what `later` reads, row after row
    shifted = np.full((n, n, slots + 1), np.inf, np.float32)
    watch = current()
    for length in range(n):
        watch.check()
        for s in range(n - length):
            t = s + length
            row = _fill(stages, cost, shifted, s, t)
            cost[s, t] = row
            if s:
                _shift(shifted[t, s], row, stages.border[s - 1])
    return RotorTable(chain, unit, cost, shifted, stages)


def _shift(into: Row, row: Row, by: int) -> None:
    if by < len(row):
        into[by:] = row[: len(row) - by]


def _fill(stages: _Stages, cost: NDArray[np.float32], shifted: NDArray[np.float32], s: int, t: int) -> Row:
    row = _now(stages, cost, s, t)
    if s < t:
        np.minimum(row, _later(stages, cost, shifted, s, t).min(axis=0), out=row)
    return row


def _now(stages: _Stages, cost: NDArray[np.float32], s: int, t: int) -> Row:
    """Cost by m of running stage s with all that its backward reads."""
    row = np.full(cost.shape[2], np.inf, np.float32)
    if s == t:
        row[stages.need_leaf(s) :] = stages.last_cost[s]
        return row
    least = min(max(stages.need_now(s, t), stages.now[s], 0), len(row))
    shift = stages.now[s]
    rest = cost[s + 1, t]
    if shift >= 0:
        row[least:] = rest[least - shift : len(row) - shift]
    else:
        row[least:] = rest[np.minimum(np.arange(least, len(row)) - shift, len(row) - 1)]
    row += stages.all_cost[s]
    return row


def _later(
    stages: _Stages, cost: NDArray[np.float32], shifted: NDArray[np.float32], s: int, t: int
) -> NDArray[np.float32]:
    """Cost by j - s - 1 and m of keeping what crosses into s and j, s < j ≤ t."""
    found = shifted[t, s + 1 : t + 1] + cost[s, s:t]
    found += (stages.reach[s + 1 : t + 1] - stages.reach[s])[:, None]
    for j, least in stages.need_later(s, t):
        found[j:, :least] = np.inf
    return found


def rotor_schedule(table: RotorTable, m: int) -> list[Action]:
    """The schedule that the table's cost for m slots stands for."""
    stages = table.stages
    found: list[Action] = []
    parts: list[tuple[int, int, int]] = [(0, stages.n - 1, m)]
    while parts:
        s, t, m = parts.pop()
        if m < 0:
            found.append(("backward", s, True))
            continue
        if s < t:
            j = table.following(s, t, m)
            if j:
                found += [("forward", i, False) for i in range(s, j)]
                parts += [(s, j - 1, m), (j, t, m - stages.border[j - 1])]
                continue
        found.append(("forward", s, True))
        parts.append((s, s, -1))
        if s < t:
            parts.append((s + 1, t, min(m - stages.now[s], table.slots)))
    return found
