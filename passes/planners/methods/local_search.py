"""Local search on true liveness: reruns are put in, taken out and moved, and the peak follows at once.

A schedule is, for each node, the set of slots in which it runs: its own, and those right before which it runs again
(slot t is node t with the reruns before it, in the order of their numbers; Checkmate's R[t, v]).  No position shifts
when a rerun comes or goes, so that a move changes a few lifetimes: bytes alive at the entry of each slot, and the most
alive within it, are arrays on which a longer or shorter life is one range addition, and only the slots at its two
ends are walked again.  That is thousands of moves a second, whatever the length of the schedule.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np

from ..core.problem import RematerialisationProblem
from ..core.watch import current

#: nodes that a move may look at, on average
_WORK = 40
#: what a move, and a node that it looks at, take: units of `watch`
_MOVE, _LOOK = 6e-5, 3e-6


class Schedule:
    """A schedule with its peak, under insertion and removal of reruns.  Costs and bytes as in the problem.

    `peak` counts what is always there.  A sequence in which a slot repeats a node twice, or has its reruns in another
    order than that of their numbers, is normalised.
    """

    def __init__(self, problem: RematerialisationProblem, sequence: Sequence[int]) -> None:
        self.problem = problem
        n = len(problem)
        self.slots: list[list[int]] = [[i] for i in range(n)]  # nodes in each slot, its own last
        self.runs: list[list[int]] = [[i] for i in range(n)]  # slots in which each node runs
        done = 0
        for i in sequence:
            if i == done:
                done += 1
            elif done not in self.runs[i]:
                insort(self.slots[done], i)
                insort(self.runs[i], done)
        self.cost = sum(problem.nodes[i].cost * len(r) for i, r in enumerate(self.runs))
        self.readers = [sorted({r for v in node.writes for r in problem.readers[v]}) for node in problem.nodes]
        self.born = [p if p >= 0 else -1 for p in problem.producer]
        self.stays = set(problem.outputs)
        self.enter = np.zeros(n + 1, np.int64)
        self.most = np.zeros(n, np.int64)
        self.work = 0  # nodes looked at: what moves take, counted rather than timed
        self._fill()

    # -- what is there ---------------------------------------------------------------------------------------------

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return int(self.most.max(initial=0)) + self.problem.fixed

    def sequence(self) -> list[int]:
        """The order of execution."""
        return [i for slot in self.slots for i in slot]

    def reruns(self) -> list[tuple[int, int]]:
        """(node, slot) of all reruns."""
        return [(i, t) for i, r in enumerate(self.runs) for t in r[1:]]

    def last_use(self, v: int, k: int) -> int:
        """The slot of the last use of value v's occurrence number k: its own slot where nothing reads it.

        For what is there of an output in the end, that is the number of slots.
        """
        p = self.born[v]
        slots = self.runs[p] if p >= 0 else (-1,)
        here, beyond = slots[k], (slots[k + 1] if k + 1 < len(slots) else -1)
        if beyond < 0 and v in self.stays:
            return len(self.slots)
        last = here
        for w in self.problem.readers[v]:
            runs = self.runs[w]
            if beyond < 0:
                if runs[-1] > last:
                    last = runs[-1]
            else:  # readers in the slot of the next occurrence come after it there, as their numbers are higher
                at = bisect_left(runs, beyond)
                if at and runs[at - 1] > last:
                    last = runs[at - 1]
        return last

    def _fill(self) -> None:
        """All lifetimes anew."""
        n = len(self.slots)
        change = np.zeros(n + 2, np.int64)
        for v, size in enumerate(self.problem.sizes):
            p = self.born[v]
            for k, here in enumerate(self.runs[p] if p >= 0 else (-1,)):
                last = self.last_use(v, k)
                if last > here:  # alive at the entries of the slots (here, last]
                    change[here + 1] += size
                    change[last + 1] -= size
        self.enter = np.cumsum(change)[: n + 1]
        for t in range(n):
            self.most[t] = self._walk(t)
        current().spend(_LOOK * (n + len(self.problem.sizes)))

    def _walk(self, t: int) -> int:
        """The most bytes alive within a slot."""
        nodes, sizes = self.problem.nodes, self.problem.sizes
        live = int(self.enter[t])
        slot = self.slots[t]
        self.work += len(slot)
        if len(slot) == 1:
            node = nodes[t]
            for v in node.writes:
                live += sizes[v]
            live += node.scratch
            return live - self._saved(t, t) if node.overwrites else live
        most = 0
        dies = self._deaths(t)
        for i in slot:
            node = nodes[i]
            for v in node.writes:
                live += sizes[v]
            running = live + node.scratch
            if node.overwrites:
                running -= self._saved_among(i, dies)
            if running > most:
                most = running
            live -= sum([sizes[v] for v in dies.get(i, ())])
        return most

    def _deaths(self, t: int) -> dict[int, list[int]]:
        """Node of slot t → values that die after it, those that outlive the slot left out."""
        slot = self.slots[t]
        uses: dict[int, int] = {}  # value → node of its last use so far in this slot
        ended: dict[int, list[int]] = {}
        for i in slot:
            node = self.problem.nodes[i]
            for v in node.reads:
                uses[v] = i
            for v in node.writes:
                if v in uses:  # the occurrence that was read in this slot ends before this one
                    ended.setdefault(uses[v], []).append(v)
                uses[v] = i
        for v, i in uses.items():
            if self._alive_until(v, t) == t:
                ended.setdefault(i, []).append(v)
        return ended

    def _alive_until(self, v: int, t: int) -> int:
        """The last use of the occurrence of v that is there at the end of slot t."""
        p = self.born[v]
        return self.last_use(v, bisect_right(self.runs[p], t) - 1 if p >= 0 else 0)

    def _saved(self, i: int, t: int) -> int:
        node, sizes = self.problem.nodes[i], self.problem.sizes
        for v in node.overwrites:
            if self._alive_until(v, t) == t:
                for w in node.writes:
                    if sizes[w] == sizes[v]:
                        return sizes[v]
        return 0

    def _saved_among(self, i: int, dies: dict[int, list[int]]) -> int:
        node, sizes = self.problem.nodes[i], self.problem.sizes
        for v in node.overwrites:
            if v in dies.get(i, ()):
                for w in node.writes:
                    if sizes[w] == sizes[v]:
                        return sizes[v]
        return 0

    # -- moves -----------------------------------------------------------------------------------------------------

    def insert(self, i: int, t: int) -> None:
        """Node i runs again right before slot t's own node."""
        self._change(i, t, add=True)

    def remove(self, i: int, t: int) -> None:
        """The rerun of node i in slot t goes; what read it reads the occurrence before."""
        self._change(i, t, add=False)

    def _change(self, i: int, t: int, *, add: bool) -> None:
        node = self.problem.nodes[i]
        touched = self._lives(node.reads, t) + self._own(node.writes, t)
        stale = {t}
        for v, here, last in touched:
            self._add(v, here, last, -1, stale)
        if add:
            insort(self.slots[t], i)
            insort(self.runs[i], t)
            self.cost += node.cost
        else:
            self.slots[t].remove(i)
            self.runs[i].remove(t)
            self.cost -= node.cost
        for v, here, last in self._lives(node.reads, t) + self._own(node.writes, t):
            self._add(v, here, last, 1, stale)
        for s in stale:
            if 0 <= s < len(self.slots):
                self.most[s] = self._walk(s)

    def _lives(self, values: Sequence[int], t: int) -> list[tuple[int, int, int]]:
        """(value, slot of birth, slot of last use) of the occurrences that are there for a read in slot t."""
        found = []
        for v in values:
            p = self.born[v]
            k = bisect_right(self.runs[p], t) - 1 if p >= 0 else 0
            found.append((v, self.runs[p][k] if p >= 0 else -1, self.last_use(v, k)))
        return found

    def _own(self, values: Sequence[int], t: int) -> list[tuple[int, int, int]]:
        """The same of the occurrence before slot t, and of the one in slot t if there is one."""
        found = []
        for v in values:
            slots = self.runs[self.born[v]]
            at = bisect_left(slots, t)
            for k in (at - 1, at):
                if 0 <= k < len(slots) and slots[k] <= t:
                    found.append((v, slots[k], self.last_use(v, k)))
        return found

    def _add(self, v: int, here: int, last: int, sign: int, stale: set[int]) -> None:
        """Counts a lifetime in (1) or out (-1); slots that must be walked again are marked."""
        if last > here:
            size = sign * self.problem.sizes[v]
            self.enter[here + 1 : last + 1] += size
            self.most[here + 1 : last + 1] += size
        stale.add(here)
        stale.add(last)

    def live_across(self, t: int) -> list[tuple[int, int]]:
        """(value, occurrence) of what is alive at the entry of slot t and not used in it."""
        used = {v for i in self.slots[t] for v in self.problem.nodes[i].reads}
        found = []
        for v in range(len(self.problem.sizes)):
            p = self.born[v]
            if p >= t or v in used:
                continue
            k = bisect_left(self.runs[p], t) - 1 if p >= 0 else 0
            if self.last_use(v, k) > t:
                found.append((v, k))
        return found


class Search:
    """Simulated annealing over schedules that fit a budget, from one that may or may not."""

    def __init__(self, schedule: Schedule, budget: int, seed: int = 0) -> None:
        self.schedule, self.budget = schedule, budget
        self.draw = random.Random(seed)
        problem = schedule.problem
        self.can = [i for i in range(len(problem)) if problem.nodes[i].repeatable]
        self.unit = max(problem.cost, 1e-30)
        self.room = max(1, budget - problem.fixed)
        self.best: list[int] | None = None
        self.best_cost = math.inf
        self._note()

    def _note(self) -> None:
        s = self.schedule
        if s.peak <= self.budget and s.cost < self.best_cost * (1 - 1e-12):
            self.best, self.best_cost = s.sequence(), s.cost

    def energy(self) -> float:
        """Relative cost, and a price on each byte beyond the budget."""
        over = max(0, self.schedule.peak - self.budget)
        return self.schedule.cost / self.unit + 2.0 * over / self.room

    def descend(self) -> None:
        """Takes out each rerun that is not needed to stay within the budget, the dearest first."""
        s, watch = self.schedule, current()
        limit, begun = max(self.budget, s.peak), s.work
        for i, t in sorted(s.reruns(), key=lambda r: (-s.problem.nodes[r[0]].cost, r)):
            if watch.tick():
                break
            s.remove(i, t)
            if s.peak > limit:
                s.insert(i, t)
            else:
                limit = max(self.budget, s.peak)
        watch.spend(_MOVE * len(s.reruns()) + _LOOK * (s.work - begun))
        self._note()

    def run(self, moves: int, hot: float = 3e-3, cold: float = 1e-5) -> None:
        """`moves` random moves at a temperature that falls from `hot` to `cold` (shares of the plain cost).

        Fewer where moves are dear, because many nodes run again at one place, and where planning is out of time.
        """
        watch, begun = current(), self.schedule.work
        now, enough = self.energy(), begun + _WORK * moves
        k = 0
        for k in range(moves):
            if self.schedule.work > enough or watch.tick():
                break
            heat = hot * (cold / hot) ** (k / max(1, moves - 1))
            changes = self.propose()
            if not changes:
                continue
            self.apply(changes)
            then = self.energy()
            if then <= now or self.draw.random() < math.exp((now - then) / heat):
                now = then
                self._note()
            else:
                self.apply([(i, t, not add) for i, t, add in reversed(changes)])
        watch.spend(_MOVE * (k + 1 if moves else 0) + _LOOK * (self.schedule.work - begun))

    def apply(self, changes: list[tuple[int, int, bool]]) -> None:
        """Carries out insertions (True) and removals (False)."""
        for i, t, add in changes:
            (self.schedule.insert if add else self.schedule.remove)(i, t)

    def propose(self) -> list[tuple[int, int, bool]]:
        """A random move: a rerun taken out, moved, or put in (with what it reads, where that is not there)."""
        kind = self.draw.random()
        if kind < 0.45:
            return self._take_out()
        if kind < 0.7:
            return self._move()
        return self._put_in()

    def _some_rerun(self) -> tuple[int, int] | None:
        for _ in range(8):
            i = self.draw.choice(self.can)
            runs = self.schedule.runs[i]
            if len(runs) > 1:
                return i, self.draw.choice(runs[1:])
        return None

    def _take_out(self) -> list[tuple[int, int, bool]]:
        found = self._some_rerun()
        return [] if found is None else [(*found, False)]

    def _move(self) -> list[tuple[int, int, bool]]:
        """To another slot between the first reader that it serves and the occurrence before."""
        found = self._some_rerun()
        if found is None:
            return []
        i, t = found
        runs = self.schedule.runs[i]
        k = runs.index(t)
        low = runs[k - 1] + 1
        high = self._first_reader(i, t, runs[k + 1] if k + 1 < len(runs) else len(self.schedule.slots))
        if high is None:
            return [(i, t, False)]
        to = high if self.draw.random() < 0.5 else self.draw.randint(max(low, i + 1), high)
        return [] if to == t or to in runs else [(i, t, False), (i, to, True)]

    def _first_reader(self, i: int, t: int, end: int) -> int | None:
        first = None
        for w in self.schedule.readers[i]:
            runs = self.schedule.runs[w]
            at = bisect_left(runs, t)
            if at < len(runs) and runs[at] < end and (first is None or runs[at] < first):
                first = runs[at]
        return first

    def _put_in(self) -> list[tuple[int, int, bool]]:
        """A rerun right before some reader of a value, as far from its last use before as it may be."""
        s, draw = self.schedule, self.draw
        i = draw.choice(self.can)
        uses = sorted({t for w in s.readers[i] for t in s.runs[w] if t > i})
        uses = [t for t in uses if t not in s.runs[i]]
        if not uses:
            return []
        t = draw.choice(uses)
        changes = [(i, t, True)]
        if draw.random() < 0.5:
            self._with_inputs(i, t, changes, 12)
        return changes

    def _with_inputs(self, i: int, t: int, changes: list[tuple[int, int, bool]], most: int) -> None:
        """Puts before it the nodes whose values are not alive in slot t."""
        s = self.schedule
        stack, seen = [i], {i}
        while stack and len(changes) < most:
            for v in s.problem.nodes[stack.pop()].reads:
                p = s.born[v]
                if p < 0 or p in seen or not s.problem.nodes[p].repeatable or t in s.runs[p]:
                    continue
                k = bisect_right(s.runs[p], t) - 1
                if s.last_use(v, k) < t:
                    seen.add(p)
                    stack.append(p)
                    changes.insert(0, (p, t, True))
