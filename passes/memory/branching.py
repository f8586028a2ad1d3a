"""Branch and bound for packing below a capacity: plain functions, run as Python or compiled, with the same results.

Allocations are put on top of what is below them.  At each place in the search one of them, the lowest that it could be
(of equally low ones the first in an order of preference), either lies directly on what has been put below it, or is
*barred* there: one of those that are left, alive at the same time, lies below it.  So a plan in which nothing can be
moved down is found once; others are not looked at (canonical solutions and dominance: Moffitt, MiniMalloc, ASPLOS
2023).  Bounds: a barred allocation lies above the lowest top of those that are left beside it; all that is left at one
moment must fit in below the capacity, one above another, none below its bound (as jobs with release times on one
machine).  What is left falls into components that share no moment; each is solved for itself, with preferences that
follow what is left in it, and if one fails, so does what made them.  States that failed are remembered by a linear
hash modulo two primes with random factors: two different states are taken for one with probability 2**-61.

Moments are *sections*: the largest sets of allocations alive together.  The arrays are int64:

    x[row, allocation]   sorted by the first section; rows below
    s[row, section]
    v[row, level]        levels of the search, and components that wait
    undo[4, entry]       allocation; base, bar and fullest moment as they were
    near                 of each allocation those alive at the same time, from x[NEAR] on
    memo                 hashes of failed states
    g                    numbers below
"""

from __future__ import annotations

from ...language.types import Array

#: rows of x: bytes; sections from, to; order of preference: a key before the bytes left at the fullest moment when its
#: component came about, these bytes, a key after them; the lowest free address above what is placed; a bound on the
#: address; whether it is placed; the base at which it is barred; room for sorting; its address; where its neighbours
#: start; factors of the hash
SIZE, LOW, HIGH, MAJOR, FULL, MINOR, BASE, BOUND, PLACED, BARRED, SORTED, AT, NEAR, KEYS = range(14)
ROWS = KEYS + 6
#: rows of s: the first allocation that starts there or later, those left that cross its left border, those
#: left, their bytes, their top
FIRST, CROSSING, COUNT, TOTAL, REACH = range(5)
#: rows of v: the allocation, the level to go back to, sections from, to, the next component, its free place, lengths of
#: `undo` before the placement, hash; of components that wait: from, to, level that made it, the next one
CHOSEN, PARENT, FROM, TO, AGENDA, POOL, MARK, HASH, WAIT_FROM, WAIT_TO, WAIT_PARENT, WAIT_NEXT = range(12)
#: of g: the capacity, steps made, lengths of undo and of waiting components, the one to open (-1: none),
#: level, outcome, whether a level is to be opened, allocations left in SORTED
CAPACITY, STEPS, UNDONE, WAITING, HEAD, LEVEL, OUTCOME, OPENING, LEFT, NUMBERS = range(10)
RUNNING, FOUND, IMPOSSIBLE = range(3)
MOST = 1 << 62
_PRIMES = (2147483647, 2147483629)


def search(
    x: Array, s: Array, v: Array, undo: Array, near: Array, memo: Array, g: Array, begin: int, stop: int
) -> None:
    """Searches from step `begin` (0: from the start) up to step `stop`; g[OUTCOME] says what came out."""
    if begin == 0:
        restart(x, s, v, g)
    while g[OUTCOME] == RUNNING and g[STEPS] < stop:
        if g[OPENING]:
            open_level(x, s, v, undo, near, memo, g)
        b = choose(x, s, v, g)
        d = g[LEVEL]
        if b < 0:
            memo[v[HASH, d] & (len(memo) - 1)] = v[HASH, d]
            if v[PARENT, d] < 0:
                g[OUTCOME] = IMPOSSIBLE
                return
            while g[LEVEL] > v[PARENT, d]:
                g[LEVEL] -= 1
                take_back(x, s, v, undo, g)
            bar(x, s, v, undo, near, g)
            continue
        g[STEPS] += 1
        put(x, s, v, undo, near, g, b)
        if bounded(x, s, near, g, v[FROM, d], v[TO, d]):
            split(s, v, g, v[FROM, d], v[TO, d], d, v[AGENDA, d])
            g[OPENING] = 1
            if g[HEAD] < 0:
                g[OUTCOME] = FOUND
        else:
            take_back(x, s, v, undo, g)
            bar(x, s, v, undo, near, g)


def restart(x: Array, s: Array, v: Array, g: Array) -> None:
    """Everything as it is before the first step."""
    sections = s.shape[1] - 1
    for t in range(sections + 1):
        s[CROSSING, t] = s[COUNT, t] = s[TOTAL, t] = 0
    for b in range(x.shape[1] - 1):
        x[BASE, b] = x[PLACED, b] = 0
        x[BARRED, b] = -1
        for t in range(x[LOW, b], x[HIGH, b]):
            s[COUNT, t] += 1
            s[TOTAL, t] += x[SIZE, b]
            s[CROSSING, t] += t > x[LOW, b]
    g[STEPS] = g[UNDONE] = g[WAITING] = g[LEFT] = 0
    g[LEVEL], g[OUTCOME], g[OPENING] = -1, RUNNING, 1
    split(s, v, g, 0, sections, -1, -1)


def split(s: Array, v: Array, g: Array, begin: int, stop: int, level: int, after: int) -> None:
    """Adds the components that are left in sections begin to stop to those that wait, before `after`."""
    first, some, head = begin, False, after
    for t in range(begin, stop + 1):
        if t > begin and (t == stop or s[CROSSING, t] == 0):
            if some:
                p = g[WAITING]
                g[WAITING] += 1
                v[WAIT_FROM, p], v[WAIT_TO, p], v[WAIT_PARENT, p], v[WAIT_NEXT, p] = first, t, level, head
                head = p
            first, some = t, False
        if t < stop and s[COUNT, t] > 0:
            some = True
    g[HEAD] = head


def open_level(x: Array, s: Array, v: Array, undo: Array, near: Array, memo: Array, g: Array) -> None:
    """The next level is about the component at the head of those that wait."""
    p = g[HEAD]
    g[LEVEL] += 1
    d = g[LEVEL]
    v[FROM, d], v[TO, d], v[PARENT, d], v[AGENDA, d] = (
        v[WAIT_FROM, p],
        v[WAIT_TO, p],
        v[WAIT_PARENT, p],
        v[WAIT_NEXT, p],
    )
    g[OPENING] = 0
    if d == 0 or v[TO, d] - v[FROM, d] < v[TO, v[PARENT, d]] - v[FROM, v[PARENT, d]]:
        prefer(x, s, undo, g, v[FROM, d], v[TO, d])
    v[HASH, d] = hashed(x, s[FIRST, v[FROM, d]], s[FIRST, v[TO, d]])
    failed = memo[v[HASH, d] & (len(memo) - 1)] == v[HASH, d]
    fresh = d > 0 and v[PARENT, d] == d - 1  # the placement that made it has just been looked at
    if failed or not (fresh or bounded(x, s, near, g, v[FROM, d], v[TO, d])):
        bar_all(x, s, undo, g, v[FROM, d], v[TO, d])


def prefer(x: Array, s: Array, undo: Array, g: Array, begin: int, stop: int) -> None:
    """Preferences in a new component, in sections begin to stop, follow what is left there; if `undo` has room."""
    room = undo.shape[1] - x[NEAR, x.shape[1] - 1] - 2 * x.shape[1]  # of placements and bars
    for c in range(s[FIRST, begin], s[FIRST, stop]):
        if x[PLACED, c] == 0 and g[UNDONE] < room:
            change(x, undo, g, c, x[BASE, c], x[BARRED, c])
            x[FULL, c] = 0
            for t in range(x[LOW, c], x[HIGH, c]):
                x[FULL, c] = max(x[FULL, c], s[TOTAL, t])


def hashed(x: Array, begin: int, stop: int) -> int:
    """Names the state of what is left of allocations begin to stop; never 0."""
    one, two = 0, 0
    for b in range(begin, stop):
        if x[PLACED, b] == 0:
            barred = 1 if x[BARRED, b] == x[BASE, b] else 0
            at = x[BASE, b] % _PRIMES[0]
            one = (one + at * x[KEYS, b] % _PRIMES[0] + barred * x[KEYS + 1, b] + x[KEYS + 2, b]) % _PRIMES[0]
            at = x[BASE, b] % _PRIMES[1]
            two = (two + at * x[KEYS + 3, b] % _PRIMES[1] + barred * x[KEYS + 4, b] + x[KEYS + 5, b]) % _PRIMES[1]
    return (one << 31) + two + 1


def choose(x: Array, s: Array, v: Array, g: Array) -> int:
    """The lowest allocation of the level's component that is not barred, by preference; -1: none."""
    best, low = -1, MOST
    d = g[LEVEL]
    for b in range(s[FIRST, v[FROM, d]], s[FIRST, v[TO, d]]):
        at = x[BASE, b]
        if x[PLACED, b] == 0 and x[BARRED, b] != at and (at < low or (at == low and preferred(x, b, best))):
            best, low = b, at
    return best


def preferred(x: Array, b: int, c: int) -> bool:
    """Whether allocation b comes before c in the order of preference."""
    if x[MAJOR, b] != x[MAJOR, c]:
        return x[MAJOR, b] < x[MAJOR, c]
    return x[FULL, b] > x[FULL, c] or (x[FULL, b] == x[FULL, c] and x[MINOR, b] < x[MINOR, c])


def put(x: Array, s: Array, v: Array, undo: Array, near: Array, g: Array, b: int) -> None:
    """Places an allocation at its base; what is beside it and left comes above it.

    Of two that lie on each other and live equally long, the preferred one is below: they could change places.
    """
    d = g[LEVEL]
    v[CHOSEN, d], v[MARK, d], v[POOL, d] = b, g[UNDONE], g[WAITING]
    x[AT, b], x[PLACED, b] = x[BASE, b], 1
    top = x[BASE, b] + x[SIZE, b]
    for t in range(x[LOW, b], x[HIGH, b]):
        s[COUNT, t] -= 1
        s[TOTAL, t] -= x[SIZE, b]
        s[CROSSING, t] -= t > x[LOW, b]
    for k in range(x[NEAR, b], x[NEAR, b + 1]):
        c = near[k]
        if x[PLACED, c] == 0 and x[BASE, c] < top:
            same = x[LOW, c] == x[LOW, b] and x[HIGH, c] == x[HIGH, b]
            change(x, undo, g, c, top, top if same and preferred(x, c, b) else -1)


def change(x: Array, undo: Array, g: Array, c: int, base: int, barred: int) -> None:
    """Sets base and bar of an allocation so that it can be undone."""
    n = g[UNDONE]
    undo[0, n], undo[1, n], undo[2, n], undo[3, n] = c, x[BASE, c], x[BARRED, c], x[FULL, c]
    g[UNDONE] = n + 1
    x[BASE, c], x[BARRED, c] = base, barred


def take_back(x: Array, s: Array, v: Array, undo: Array, g: Array) -> None:
    """Undoes the placement of the level, and what came after it."""
    d = g[LEVEL]
    b = v[CHOSEN, d]
    x[PLACED, b] = 0
    for t in range(x[LOW, b], x[HIGH, b]):
        s[COUNT, t] += 1
        s[TOTAL, t] += x[SIZE, b]
        s[CROSSING, t] += t > x[LOW, b]
    while g[UNDONE] > v[MARK, d]:
        g[UNDONE] -= 1
        n = g[UNDONE]
        c = undo[0, n]
        x[BASE, c], x[BARRED, c], x[FULL, c] = undo[1, n], undo[2, n], undo[3, n]
    g[WAITING] = v[POOL, d]


def bar(x: Array, s: Array, v: Array, undo: Array, near: Array, g: Array) -> None:
    """Excludes the place where the level put its value without success."""
    d = g[LEVEL]
    b = v[CHOSEN, d]
    change(x, undo, g, b, x[BASE, b], x[BASE, b])
    if not bounded(x, s, near, g, v[FROM, d], v[TO, d]):
        bar_all(x, s, undo, g, v[FROM, d], v[TO, d])


def bar_all(x: Array, s: Array, undo: Array, g: Array, begin: int, stop: int) -> None:
    """Nothing of the component in sections begin to stop can be placed any more: there is no plan."""
    for c in range(s[FIRST, begin], s[FIRST, stop]):
        if x[PLACED, c] == 0 and x[BARRED, c] != x[BASE, c]:
            change(x, undo, g, c, x[BASE, c], x[BASE, c])


def bounded(x: Array, s: Array, near: Array, g: Array, begin: int, stop: int) -> bool:
    """Whether what is left in sections begin to stop may still fit: bounds of addresses, then tops of the sections."""
    count = 0
    for c in range(s[FIRST, begin], s[FIRST, stop]):
        if x[PLACED, c] == 0:
            x[BOUND, c], x[SORTED, count] = x[BASE, c], c
            count += 1
    g[LEFT] = count
    for _ in range(2):
        changed = raised(x, near, g)
        if changed < 0:
            return False
        if changed == 0:
            break
    for i in range(1, count):  # by insertion: they are nearly sorted
        c, j = x[SORTED, i], i - 1
        while j >= 0 and x[BOUND, x[SORTED, j]] > x[BOUND, c]:
            x[SORTED, j + 1] = x[SORTED, j]
            j -= 1
        x[SORTED, j + 1] = c
    for t in range(begin, stop):
        s[REACH, t] = 0
    for i in range(count):
        c = x[SORTED, i]
        for t in range(x[LOW, c], x[HIGH, c]):
            s[REACH, t] = max(s[REACH, t], x[BOUND, c]) + x[SIZE, c]
            if s[REACH, t] > g[CAPACITY]:
                return False
    return True


def raised(x: Array, near: Array, g: Array) -> int:
    """Raises the bounds of barred allocations once: 1 if one was raised, 0 if none, -1 if one cannot be placed.

    One that has something below it lies on the top of one that is left.  And it cannot stay barred if all that are left
    beside it are so high that it fits in below them.
    """
    changed = 0
    for i in range(g[LEFT]):
        c = x[SORTED, i]
        if x[BARRED, c] != x[BASE, c]:
            continue
        lowest, top = MOST, MOST
        for k in range(x[NEAR, c], x[NEAR, c + 1]):
            e = near[k]
            if x[PLACED, e] == 0:
                lowest, top = min(lowest, x[BOUND, e]), min(top, x[BOUND, e] + x[SIZE, e])
        if top > g[CAPACITY] - x[SIZE, c] or lowest >= x[BASE, c] + x[SIZE, c]:
            return -1
        if top > x[BOUND, c]:
            x[BOUND, c], changed = top, 1
    return changed
