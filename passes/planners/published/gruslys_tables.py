"""The dynamic programs of Gruslys, Munos, Danihelka, Lanctot, Graves 2016 (arXiv 1606.03401), and the binomial form.

C(t, m): fewest forward steps that backpropagation through t equal steps takes with m slots of memory, the first of
which holds the state that they start from.

    C(t, 1) = t (t + 1) / 2
    hidden:    C(t, m) = min_y  y + C(t - y, m - 1) + C(y, m)        a slot holds the state after step y
    internal:  C(t, m) = min_y  y + C(t - y, m - 1) + C(y - 1, m)    a slot holds all that step y's backward reads
    mixed:     the smaller of both, an internal slot taking as much memory as several hidden ones

Ours: where a step's backward reads the state that the step began with too, internals take `extra` slots more for y > 1;
for y = 1 that state is the one that the part starts from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.chain import Action
from ..core.watch import current


@dataclass(frozen=True)
class StepTables:
    """`steps[m, t]`: C(t, m + 1), m being the slots besides the first; `choice[m, t]`: y where the state after step y
    is kept, -y where step y's internals are, 0 where each step is reached from the start anew."""

    steps: NDArray[np.int32]
    choice: NDArray[np.int16]
    hidden: int
    internal: int
    extra: int


def step_tables(length: int, slots: int, hidden: int = 1, internal: int = 0, extra: int = 0) -> StepTables:
    """Tables for up to `length` steps and `slots` slots besides the first.

    `hidden`, `internal`: slots that a state and a step's internals take; 0 forbids to keep them.  `extra`: see above.
    """
    t = np.arange(length + 1, dtype=np.int32)
    steps = np.empty((slots + 1, length + 1), np.int32)
    steps[:] = t * (t + 1) // 2
    choice = np.zeros((slots + 1, length + 1), np.int16)
    near, far = internal, internal + extra if internal else 0
    watch = current()
    for n in range(2, length + 1):
        watch.check()
        # both sums are over y; `rest` are the steps behind the cut, `front` those before it
        if 0 < hidden <= slots:
            _improve(steps, choice, n, hidden, t[1:n], rest=steps[:-hidden, n - 1 : 0 : -1], front=steps[hidden:, 1:n])
        if 0 < near <= slots and extra:
            _improve(steps, choice, n, near, -t[1:2], rest=steps[:-near, n - 1 : n], front=steps[near:, :1])
        if 0 < far <= slots:
            _improve(steps, choice, n, far, -t[1 : n + 1], rest=steps[:-far, n - 1 :: -1], front=steps[far:, :n])
    return StepTables(steps, choice, hidden, internal, extra)


def _improve(
    steps: NDArray[np.int32],
    choice: NDArray[np.int16],
    n: int,
    slots: int,
    y: NDArray[np.int32],
    rest: NDArray[np.int32],
    front: NDArray[np.int32],
) -> None:
    """Takes the best |y| for n steps, for all m ≥ `slots` at once, where it is better than what is known."""
    total = rest + front
    total += abs(y)
    best = total.argmin(axis=1)
    cost = np.take_along_axis(total, best[:, None], 1)[:, 0]
    better = cost < steps[slots:, n]
    steps[slots:, n][better] = cost[better]
    choice[slots:, n][better] = y[best][better]


def step_schedule(tables: StepTables, length: int, slots: int) -> list[Action]:
    """The schedule that C(length, slots + 1) stands for; it has as many 'forward' actions."""
    found: list[Action] = []
    parts: list[tuple[int, int, int]] = [(0, length, slots)]
    while parts:
        start, t, m = parts.pop()
        if t < 0:  # the backward of a step whose internals were kept
            found.append(("backward", start, True))
        elif (y := int(tables.choice[m, t]) if t > 1 else 0) > 0:
            found += [("forward", k, False) for k in range(start, start + y)]
            parts += [(start, y, m), (start + y, t - y, m - tables.hidden)]
        elif y < 0:
            found += [("forward", k, k == start - y - 1) for k in range(start, start - y)]
            parts += [
                (start, -y - 1, m),
                (start - y - 1, -1, 0),
                (start - y, t + y, m - tables.internal - (y < -1) * tables.extra),
            ]
        else:
            for last in range(start + t - 1, start - 1, -1):
                found += [("forward", k, k == last) for k in range(start, last + 1)]
                found.append(("backward", last, True))
    return found
