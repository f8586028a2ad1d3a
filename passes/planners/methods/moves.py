"""The moves of local search on flat arrays: plain functions that run as Python, or compiled, with the same results.

The arrays are x, f, alive and given of `layout.py`.  Numbers of nodes, values and slots in x come
from a checked problem or are counted here, and rows that grow are asked for their room before (`fits`): so every index
is inside of its array, whatever a problem holds.
"""

from __future__ import annotations

import math

from ....language.types import Array

# isort: off
from .alive import entered, highest, lift, set_most, settle
from .layout import (
    ABLE, ANNEAL, AT, BEST, BEST_COST, BEST_LENGTH, BORN, BUDGET, BYTES_UNIT, CAN, CHANGE, CHANGES, COST,
    COST_UNIT, COSTS, DESCEND, DIES_AT, ENDED, ENOUGH, FILL, FIXED, LIMIT, MARK, NEXT, NODES, NOW,
    OVERWRITES_AT, PENDING, PUT_IN, READERS_AT, READS_AT, REPEATABLE, RUN_COUNT, RUNS_AT, SCRATCH, SEEN,
    SERVED_AT, SIZE, SLOT_COUNT, SLOTS_AT, STALE, STALES, STAYS, TURN_ON, USE, USES, VALUES, WHAT, WORK,
    WRITES_AT,
)  # fmt: skip
from .twister import below, uniform
# isort: on


def moves(x: Array, f: Array, alive: Array, given: Array, begin: int, stop: int) -> None:
    """Does what `x[WHAT]` says, with items begin to stop of it: nodes, reruns or moves."""
    if x[WHAT] == FILL:
        fill(x, alive)
    elif x[WHAT] == DESCEND:
        descend(x, f, alive, given, begin, stop)
    elif x[WHAT] == ANNEAL:
        anneal(x, f, alive, begin, stop)
    else:
        turn(x, f, alive, given[0], given[1], 1 if x[WHAT] == TURN_ON else 0)
    settle(alive)


# -- lifetimes ---------------------------------------------------------------------------------------------------------


def find(x: Array, i: int, t: int) -> int:
    """How many runs of node i are before slot t."""
    row = x[x[RUNS_AT] + i]
    low, high = 0, x[x[RUN_COUNT] + i]
    while low < high:
        middle = (low + high) // 2
        if x[row + middle] < t:
            low = middle + 1
        else:
            high = middle
    return low


def born(x: Array, v: int, k: int) -> int:
    """The slot in which occurrence k of value v is written; -1 for inputs of the step."""
    p = x[x[BORN] + v]
    return x[x[x[RUNS_AT] + p] + k] if p >= 0 else -1


def last_use(x: Array, v: int, k: int) -> int:
    """The slot of the last use of occurrence k of value v: its own slot where nothing reads it.

    For what is there of an output in the end, that is the number of slots.
    """
    p = x[x[BORN] + v]
    here, beyond = -1, -1
    if p >= 0:
        row = x[x[RUNS_AT] + p]
        here = x[row + k]
        if k + 1 < x[x[RUN_COUNT] + p]:
            beyond = x[row + k + 1]
    if beyond < 0 and x[x[STAYS] + v]:
        return x[NODES]
    last = here
    for at in range(x[x[READERS_AT] + v], x[x[READERS_AT] + v + 1]):
        w = x[at]
        # readers in the slot of the next occurrence come after it there, as their numbers are higher
        n = x[x[RUN_COUNT] + w] if beyond < 0 else find(x, w, beyond)
        if n > 0:
            last = max(last, x[x[x[RUNS_AT] + w] + n - 1])
    return last


def occurrence(x: Array, v: int, t: int) -> int:
    """The number of the occurrence of value v that is there at the end of slot t."""
    p = x[x[BORN] + v]
    return find(x, p, t + 1) - 1 if p >= 0 else 0


def count_life(x: Array, alive: Array, v: int, k: int, sign: int) -> None:
    """Counts the life of an occurrence in (1) or out (-1); the slots at its ends must be walked again."""
    here, last = born(x, v, k), last_use(x, v, k)
    lift(alive, here + 1, last + 1, sign * x[x[SIZE] + v])
    soil(x, here)
    soil(x, last)


def soil(x: Array, t: int) -> None:
    """Notes that slot t must be walked again."""
    if 0 <= t < x[NODES] and not x[x[MARK] + t]:
        x[x[MARK] + t] = 1
        x[x[STALE] + x[STALES]] = t
        x[STALES] += 1


def count_lives(x: Array, alive: Array, i: int, t: int, sign: int) -> None:
    """Counts lives that node i's run in slot t can change: of what it reads, and of what it writes there and before."""
    for at in range(x[x[READS_AT] + i], x[x[READS_AT] + i + 1]):
        count_life(x, alive, x[at], occurrence(x, x[at], t), sign)
    row, first = x[x[RUNS_AT] + i], find(x, i, t)
    for at in range(x[x[WRITES_AT] + i], x[x[WRITES_AT] + i + 1]):
        for k in range(max(first - 1, 0), min(first + 1, x[x[RUN_COUNT] + i])):
            if x[row + k] <= t:
                count_life(x, alive, x[at], k, sign)


def fill(x: Array, alive: Array) -> None:
    """All lifetimes anew."""
    for v in range(x[VALUES]):
        p = x[x[BORN] + v]
        for k in range(x[x[RUN_COUNT] + p] if p >= 0 else 1):
            lift(alive, born(x, v, k) + 1, last_use(x, v, k) + 1, x[x[SIZE] + v])
    for t in range(x[NODES]):
        walk(x, alive, t)


# -- within a slot -----------------------------------------------------------------------------------------------------


def walk(x: Array, alive: Array, t: int) -> None:
    """Sets the most bytes alive within slot t."""
    live, most, row, count = entered(alive, t), 0, x[x[SLOTS_AT] + t], x[x[SLOT_COUNT] + t]
    x[WORK] += count
    dying = deaths(x, t) if count > 1 else 0
    for j in range(count):
        i = x[row + j]
        for at in range(x[x[WRITES_AT] + i], x[x[WRITES_AT] + i + 1]):
            live += x[x[SIZE] + x[at]]
        running = live + x[x[SCRATCH] + i] - saved(x, i, j if count > 1 else -1, dying, t)
        if running > most or count == 1:
            most = running
        d = x[x[DIES_AT] + j] if dying else -1
        while d >= 0:
            live -= x[x[SIZE] + x[x[ENDED] + d]]
            d = x[x[NEXT] + d]
    set_most(alive, t, most)


def deaths(x: Array, t: int) -> int:
    """Fills `ENDED` with values that die in slot t; how many.

    For each place of the slot, `DIES_AT` has the first of those used last there, `NEXT` the one after it; -1: none.
    """
    ended, row = 0, x[x[SLOTS_AT] + t]
    for j in range(x[x[SLOT_COUNT] + t]):
        x[x[DIES_AT] + j] = -1
    for j in range(x[x[SLOT_COUNT] + t]):
        i = x[row + j]
        for at in range(x[x[READS_AT] + i], x[x[READS_AT] + i + 1]):
            x[x[USE] + x[at]] = j
        for at in range(x[x[WRITES_AT] + i], x[x[WRITES_AT] + i + 1]):
            v = x[at]
            if x[x[USE] + v] >= 0:  # the occurrence that was read in this slot ends before this one
                note_end(x, v, ended)
                ended += 1
            x[x[USE] + v] = j
    for j in range(x[x[SLOT_COUNT] + t]):
        i = x[row + j]
        for at in range(x[x[READS_AT] + i], x[x[READS_AT] + i + 1]):
            ended = end(x, x[at], t, ended)
        for at in range(x[x[WRITES_AT] + i], x[x[WRITES_AT] + i + 1]):
            ended = end(x, x[at], t, ended)
    return ended


def end(x: Array, v: int, t: int, ended: int) -> int:
    """Adds value v to those that die in slot t, if its last occurrence there does; once."""
    use = x[x[USE] + v]
    if use >= 0:
        if last_use(x, v, occurrence(x, v, t)) == t:
            note_end(x, v, ended)
            ended += 1
        x[x[USE] + v] = -1
    return ended


def note_end(x: Array, v: int, ended: int) -> None:
    """One more value that dies, after so many: at the place of its last use."""
    first = x[DIES_AT] + x[x[USE] + v]
    x[x[ENDED] + ended], x[x[NEXT] + ended], x[first] = v, x[first], ended


def saved(x: Array, i: int, j: int, dying: int, t: int) -> int:
    """Bytes that node i saves in taking a dying value's place: at place j of the slot, or alone in it (j < 0)."""
    for at in range(x[x[OVERWRITES_AT] + i], x[x[OVERWRITES_AT] + i + 1]):
        v, dies = x[at], False
        if j < 0:
            dies = last_use(x, v, occurrence(x, v, t)) == t
        else:
            d = x[x[DIES_AT] + j] if dying else -1
            while d >= 0:
                dies = dies or x[x[ENDED] + d] == v
                d = x[x[NEXT] + d]
        if dies:
            size = x[x[SIZE] + v]
            for k in range(x[x[WRITES_AT] + i], x[x[WRITES_AT] + i + 1]):
                if x[x[SIZE] + x[k]] == size:
                    return size
    return 0


# -- one change --------------------------------------------------------------------------------------------------------


def put(x: Array, row: int, count: int, number: int) -> None:
    """Puts a number into a sorted row of so many."""
    at = row + count
    while at > row and x[at - 1] > number:
        x[at] = x[at - 1]
        at -= 1
    x[at] = number


def take(x: Array, row: int, count: int, number: int) -> None:
    """Takes a number out of a row of so many."""
    gone = 0
    for at in range(row, row + count):
        if x[at] == number:
            gone = 1
        elif gone:
            x[at - 1] = x[at]


def turn(x: Array, f: Array, alive: Array, i: int, t: int, add: int) -> None:
    """Node i runs again in slot t, or no longer."""
    x[STALES] = 0
    soil(x, t)
    count_lives(x, alive, i, t, -1)
    slot, run = x[x[SLOTS_AT] + t], x[x[RUNS_AT] + i]
    if add:
        put(x, slot, x[x[SLOT_COUNT] + t], i)
        put(x, run, x[x[RUN_COUNT] + i], t)
        x[x[SLOT_COUNT] + t] += 1
        x[x[RUN_COUNT] + i] += 1
        f[COST] += f[COSTS + i]
    else:
        take(x, slot, x[x[SLOT_COUNT] + t], i)
        take(x, run, x[x[RUN_COUNT] + i], t)
        x[x[SLOT_COUNT] + t] -= 1
        x[x[RUN_COUNT] + i] -= 1
        f[COST] -= f[COSTS + i]
    count_lives(x, alive, i, t, 1)
    for k in range(x[STALES]):
        t = x[x[STALE] + k]
        x[x[MARK] + t] = 0
        walk(x, alive, t)


def peak(x: Array, alive: Array) -> int:
    """The most bytes alive at once, with what is always there."""
    return highest(alive, x[NODES]) + x[FIXED]


# -- moves: changes are put down the last one first --------------------------------------------------------------------


def propose(x: Array) -> int:
    """A random move: a rerun taken out, moved, or put in (with what it reads); how many changes it has."""
    x[CHANGES] = 0
    kind = uniform(x)
    if kind >= 0.7:
        put_in(x)
        return x[CHANGES]
    for _ in range(8):
        i = x[x[CAN] + below(x, x[ABLE])]
        if x[x[RUN_COUNT] + i] > 1:
            t = x[x[x[RUNS_AT] + i] + 1 + below(x, x[x[RUN_COUNT] + i] - 1)]
            if kind < 0.45:
                note_change(x, i, t, 0)
            else:
                shift(x, i, t)
            break
    return x[CHANGES]


def note_change(x: Array, i: int, t: int, add: int) -> None:
    """One more change, before those so far."""
    at = x[CHANGE] + 3 * x[CHANGES]
    x[at], x[at + 1], x[at + 2] = i, t, add
    x[CHANGES] += 1


def shift(x: Array, i: int, t: int) -> None:
    """Moves a rerun to another slot between the first reader that it serves and the occurrence before."""
    row, k, high = x[x[RUNS_AT] + i], find(x, i, t), -1
    stop = x[row + k + 1] if k + 1 < x[x[RUN_COUNT] + i] else x[NODES]
    for at in range(x[x[SERVED_AT] + i], x[x[SERVED_AT] + i + 1]):
        w = x[at]
        first = find(x, w, t)
        if first < x[x[RUN_COUNT] + w]:
            reader = x[x[x[RUNS_AT] + w] + first]
            if reader < stop and (high < 0 or reader < high):
                high = reader
    if high < 0:
        note_change(x, i, t, 0)
        return
    to = high
    if uniform(x) >= 0.5:
        low = max(x[row + k - 1] + 1, i + 1)
        to = low + below(x, high + 1 - low)
    if to != t and not runs_in(x, i, to):
        note_change(x, i, to, 1)
        note_change(x, i, t, 0)


def runs_in(x: Array, i: int, t: int) -> bool:
    """Whether node i runs in slot t."""
    at = find(x, i, t)
    return at < x[x[RUN_COUNT] + i] and x[x[x[RUNS_AT] + i] + at] == t


def put_in(x: Array) -> None:
    """A rerun right before some reader of its values."""
    i = x[x[CAN] + below(x, x[ABLE])]
    uses = 0
    for at in range(x[x[SERVED_AT] + i], x[x[SERVED_AT] + i + 1]):
        w = x[at]
        for k in range(x[x[RUN_COUNT] + w]):
            t = x[x[x[RUNS_AT] + w] + k]
            if t > i and not x[x[MARK] + t] and not runs_in(x, i, t):
                x[x[MARK] + t] = 1
                put(x, x[USES], uses, t)
                uses += 1
    for k in range(uses):
        x[x[MARK] + x[x[USES] + k]] = 0
    if uses:
        t = x[x[USES] + below(x, uses)]
        note_change(x, i, t, 1)
        if uniform(x) < 0.5:
            with_inputs(x, i, t)


def with_inputs(x: Array, i: int, t: int) -> None:
    """Puts before it the nodes whose values are not alive in slot t."""
    x[x[SEEN] + i] = 1
    top = 1
    x[x[STALE]] = i
    while top and x[CHANGES] < PUT_IN:
        top -= 1
        j = x[x[STALE] + top]
        for at in range(x[x[READS_AT] + j], x[x[READS_AT] + j + 1]):
            v = x[at]
            p = x[x[BORN] + v]
            if p < 0 or x[x[SEEN] + p] or not x[x[REPEATABLE] + p] or runs_in(x, p, t):
                continue
            if last_use(x, v, occurrence(x, v, t)) < t:
                x[x[SEEN] + p] = 1
                x[x[STALE] + top] = p
                top += 1
                note_change(x, p, t, 1)
    for k in range(x[CHANGES]):
        x[x[SEEN] + x[x[CHANGE] + 3 * k]] = 0


def fits(x: Array) -> bool:
    """Whether the rows of the schedule have room for all changes."""
    for c in range(x[CHANGES]):
        at = x[CHANGE] + 3 * c
        i, t = x[at], x[at + 1]
        if x[x[RUNS_AT] + i] + x[x[RUN_COUNT] + i] + 2 > x[x[RUNS_AT] + i + 1]:
            return False
        if x[x[SLOTS_AT] + t] + x[x[SLOT_COUNT] + t] + x[CHANGES] > x[x[SLOTS_AT] + t + 1]:
            return False
    return True


# -- searches ----------------------------------------------------------------------------------------------------------


def energy(x: Array, f: Array, alive: Array) -> float:
    """Relative cost, and a price on each byte beyond the budget."""
    over = max(0, peak(x, alive) - x[BUDGET])
    return f[COST] / f[COST_UNIT] + 2.0 * over / f[BYTES_UNIT]


def remember(x: Array, f: Array, alive: Array) -> None:
    """Copies the schedule if it is within the budget and the cheapest so far."""
    if peak(x, alive) <= x[BUDGET] and f[COST] < f[BEST_COST] * (1 - 1e-12):
        f[BEST_COST] = f[COST]
        to = x[BEST]
        for t in range(x[NODES]):
            row = x[x[SLOTS_AT] + t]
            for k in range(x[x[SLOT_COUNT] + t]):
                x[to] = x[row + k]
                to += 1
        x[BEST_LENGTH] = to - x[BEST]


def anneal(x: Array, f: Array, alive: Array, begin: int, stop: int) -> None:
    """Random moves begin to stop; `AT`: the first that was not made, for want of work or of room (`PENDING`)."""
    for k in range(begin, stop):
        x[AT] = k
        if not x[PENDING]:
            if x[WORK] > x[ENOUGH]:
                return
            propose(x)
        x[PENDING] = 0
        if not fits(x):
            x[PENDING] = 1
            return
        changes = x[CHANGES]
        if not changes:
            continue
        for c in range(changes - 1, -1, -1):
            at = x[CHANGE] + 3 * c
            turn(x, f, alive, x[at], x[at + 1], x[at + 2])
        then = energy(x, f, alive)
        if then <= f[NOW] or uniform(x) < math.exp((f[NOW] - then) / f[COSTS + x[NODES] + k]):
            f[NOW] = then
            remember(x, f, alive)
        else:
            for c in range(changes):
                at = x[CHANGE] + 3 * c
                turn(x, f, alive, x[at], x[at + 1], 1 - x[at + 2])
    x[AT] = stop


def descend(x: Array, f: Array, alive: Array, given: Array, begin: int, stop: int) -> None:
    """Takes out each of the reruns begin to stop that a limit, which falls to the budget, does not need."""
    for k in range(begin, stop):
        i, t = given[2 * k], given[2 * k + 1]
        turn(x, f, alive, i, t, 0)
        now = peak(x, alive)
        if now > x[LIMIT]:
            turn(x, f, alive, i, t, 1)
        else:
            x[LIMIT] = max(x[BUDGET], now)
