"""Schedules on flat arrays: what `moves.py` works on, and who runs it.

    compile_with(found)     # `found(nodes)` gives what compiled functions of `moves.py` are bound with, or None

Nothing here needs a compiler: without one, Python runs the same functions on lists.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..core.problem import RematerialisationProblem
from ..core.watch import current
from . import layout, moves

#: x, f, alive and given of `moves.py`
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
#: run(begin, stop) does what x says
Run = Callable[[int, int], None]

#: work for each node that a move looks at: units of `watch`
LOOK = 3e-6
#: rows have room for so many more than are in them, and as many again
_SLACK = 8
_compiler: Callable[[int], Callable[[Arrays], Run] | None] | None = None


def compile_with(found: Callable[[int], Callable[[Arrays], Run] | None] | None) -> None:
    """Says what gives compiled moves for a problem of so many nodes; None: nothing does."""
    global _compiler
    _compiler = found


def interpreted(arrays: Arrays) -> Run:
    """The moves by Python: on lists, as those of NumPy's numbers are slow."""
    x, f, alive, given = arrays

    def run(begin: int, stop: int) -> None:
        numbers, others = x.tolist(), f.tolist()
        moves.moves(numbers, others, alive, given.tolist(), begin, stop)
        x[:], f[:] = numbers, others

    return run


class Schedule:
    """A schedule with its peak, under insertion and removal of reruns.  Costs and bytes as in the problem.

    `peak` counts what is always there.  A sequence in which a slot repeats a node twice, or has its reruns in another
    order than that of their numbers, is normalised.
    """

    def __init__(self, problem: RematerialisationProblem, sequence: Sequence[int]) -> None:
        self.problem = problem
        n = len(problem)
        slots = [[i] for i in range(n)]
        runs = [[i] for i in range(n)]
        done = 0
        for i in sequence:
            if i == done:
                done += 1
            elif not 0 <= i < done < n or not problem.nodes[i].repeatable:
                raise ValueError(f"node {i} cannot run after node {done - 1}")
            elif done not in runs[i]:
                insort(slots[done], i)
                insort(runs[i], done)
        self.bind = (_compiler(n) if _compiler is not None else None) or interpreted
        self.tables = problem.remembered("tables of moves", lambda: _Tables(problem))
        self.alive = np.zeros((4, n + 1), np.int64)
        self.f = np.array([*[0.0] * layout.COSTS, *(node.cost for node in problem.nodes)])
        self.f[layout.COST] = sum(node.cost * len(r) for node, r in zip(problem.nodes, runs, strict=True))
        self.x = self._laid_out(slots, runs)
        self._do(layout.FILL)
        current().spend(LOOK * (n + len(problem.sizes)))

    # -- arrays ----------------------------------------------------------------------------------------------------

    def _laid_out(self, slots: list[list[int]], runs: list[list[int]], wanted: Sequence[int] = ()) -> np.ndarray:
        """x for these rows, with room in each.  `wanted`: slots that shall get more nodes."""
        head, tables = self.tables.head.copy(), self.tables.lists
        parts, at = [head, tables], len(head) + len(tables)
        for place, count, rows in (
            (layout.SLOTS_AT, layout.SLOT_COUNT, slots),
            (layout.RUNS_AT, layout.RUN_COUNT, runs),
        ):
            counts = np.array([len(r) for r in rows], np.int64)
            room = 2 * counts + _SLACK
            if place == layout.SLOTS_AT:
                for t in wanted:
                    room[t] += len(wanted)
            starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(room)])
            head[place], head[count] = at, at + len(starts)
            begin = at + len(starts) + len(counts)
            numbers = np.zeros(starts[-1], np.int64)
            numbers[_within_rows(starts[:-1], counts)] = [i for row in rows for i in row]
            parts += [starts + begin, counts, numbers]
            at = begin + len(numbers)
            if place == layout.SLOTS_AT:  # the best schedule has no more nodes than these rows have room for
                head[layout.BEST] = at
                parts.append(np.zeros(len(numbers), np.int64))
                at += len(numbers)
        return np.concatenate(parts)

    def grow(self) -> None:
        """Gives all rows more room; what else is in x stays."""
        before, slots, runs = self.x, self.slots, self.runs
        best = self.best()
        begin = int(before[layout.CHANGE])
        changes = before[begin : begin + 3 * int(before[layout.CHANGES])]
        self.x = self._laid_out(slots, runs, changes[1::3].tolist())
        self.x[: layout.READS_AT] = before[: layout.READS_AT]  # single numbers
        begin, end = layout.HEAD, layout.HEAD + len(self.tables.lists)
        self.x[begin:end] = before[begin:end]
        self.x[self.x[layout.BEST] : self.x[layout.BEST] + len(best)] = best

    def run(self, what: int, given: Sequence[int] = ()) -> Run:
        """The compiled function for a task of `moves.py`: run(begin, stop).  Not to be used after `grow`."""
        self.x[layout.WHAT] = what
        return self.bind((self.x, self.f, self.alive, np.array(given or [0], np.int64)))

    def _do(self, what: int, *given: int) -> None:
        self.run(what, given)(0, 0)

    def _rows(self, place: int, count: int) -> list[list[int]]:
        numbers, counts = self._joined(place, count)
        found = iter(numbers)
        return [[*itertools.islice(found, c)] for c in counts]

    def _joined(self, place: int, count: int) -> tuple[list[int], list[int]]:
        """All rows in a row, and how long each is."""
        x, n = self.x, len(self.problem)
        starts, counts = x[x[place] : x[place] + n], x[x[count] : x[count] + n]
        return x[_within_rows(starts, counts)].tolist(), counts.tolist()

    # -- what is there ---------------------------------------------------------------------------------------------

    @property
    def slots(self) -> list[list[int]]:
        """Nodes in each slot, its own last."""
        return self._rows(layout.SLOTS_AT, layout.SLOT_COUNT)

    @property
    def runs(self) -> list[list[int]]:
        """Slots in which each node runs."""
        return self._rows(layout.RUNS_AT, layout.RUN_COUNT)

    @property
    def enter(self) -> np.ndarray:
        """Bytes alive at the entry of each slot, and in the end."""
        return self.alive[layout.ENTER]

    @property
    def most(self) -> np.ndarray:
        """The most bytes alive within each slot."""
        return self.alive[layout.MOST, :-1]

    @property
    def cost(self) -> float:
        """Cost of all runs."""
        return float(self.f[layout.COST])

    @property
    def work(self) -> int:
        """Nodes looked at so far: what moves take, counted rather than timed."""
        return int(self.x[layout.WORK])

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return int(self.most.max(initial=0)) + self.problem.fixed

    def sequence(self) -> list[int]:
        """The order of execution."""
        return self._joined(layout.SLOTS_AT, layout.SLOT_COUNT)[0]

    def best(self) -> list[int]:
        """The order of execution that the last search kept; empty where it kept none."""
        begin = int(self.x[layout.BEST])
        return self.x[begin : begin + int(self.x[layout.BEST_LENGTH])].tolist()

    def reruns(self) -> list[tuple[int, int]]:
        """(node, slot) of all reruns."""
        return [(i, t) for i, r in enumerate(self.runs) for t in r[1:]]

    # -- changes ---------------------------------------------------------------------------------------------------

    def insert(self, i: int, t: int) -> None:
        """Node i runs again right before slot t's own node.  ValueError where it cannot, or does already."""
        if not 0 <= i < t < len(self.problem) or moves.runs_in(self.x, i, t):
            raise ValueError(f"node {i} cannot run again in slot {t}")
        self.x[layout.CHANGES] = 1
        at = self.x[layout.CHANGE]
        self.x[at : at + 3] = i, t, 1
        if not moves.fits(self.x):
            self.grow()
        self._do(layout.TURN_ON, i, t)

    def remove(self, i: int, t: int) -> None:
        """The rerun of node i in slot t goes; what read it reads the occurrence before.  ValueError: there is none."""
        if not 0 <= i < t < len(self.problem) or not moves.runs_in(self.x, i, t):
            raise ValueError(f"node {i} does not run again in slot {t}")
        self._do(layout.TURN_OFF, i, t)


def _within_rows(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The places of all that stands in rows which begin here and are so long."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


class _Tables:
    """A problem's lists as x holds them, and room for what is worked out: `head` has their places."""

    def __init__(self, problem: RematerialisationProblem) -> None:
        self.head = np.zeros(layout.HEAD, np.int64)
        self._parts: list[np.ndarray] = []
        self._at = layout.HEAD
        nodes, n, values = problem.nodes, len(problem), len(problem.sizes)
        can = [i for i, v in enumerate(nodes) if v.repeatable]
        self.head[layout.NODES], self.head[layout.VALUES], self.head[layout.ABLE] = n, values, len(can)
        self.head[layout.FIXED] = problem.fixed
        self._rows(layout.READS_AT, (v.reads for v in nodes))
        self._rows(layout.WRITES_AT, (v.writes for v in nodes))
        self._rows(layout.OVERWRITES_AT, (v.overwrites for v in nodes))
        self._rows(layout.SERVED_AT, (sorted({r for v in one.writes for r in problem.readers[v]}) for one in nodes))
        self._rows(layout.READERS_AT, problem.readers)
        stays = set(problem.outputs)
        self._list(layout.SCRATCH, [v.scratch for v in nodes])
        self._list(layout.REPEATABLE, [int(v.repeatable) for v in nodes])
        self._list(layout.BORN, problem.producer)
        self._list(layout.STAYS, [int(v in stays) for v in range(values)])
        self._list(layout.SIZE, problem.sizes)
        self._list(layout.CAN, can)
        self._list(layout.USE, [-1] * values)
        touched = sum(len(v.reads) + 2 * len(v.writes) for v in nodes)
        changes = layout.PUT_IN + max((len(v.reads) for v in nodes), default=0)
        room = {
            layout.ENDED: touched,
            layout.NEXT: touched,
            layout.DIES_AT: n,
            layout.MARK: n,
            layout.STALE: n + changes,
            layout.USES: n,
        }
        room |= {layout.CHANGE: 3 * changes, layout.SEEN: n, layout.TWISTER: 624}
        for name, size in room.items():
            self._list(name, [0] * size)
        self.lists = np.concatenate(self._parts)

    def _list(self, name: int, numbers: Sequence[int]) -> None:
        self.head[name] = self._at
        self._parts.append(np.array(numbers, np.int64))
        self._at += len(numbers)

    def _rows(self, name: int, rows: Iterable[Sequence[int]]) -> None:
        found = list(rows)
        begin = self._at + len(found) + 1
        self._list(name, list(itertools.accumulate(map(len, found), initial=begin)))
        self._parts.append(np.array([x for row in found for x in row], np.int64))
        self._at += len(self._parts[-1])
