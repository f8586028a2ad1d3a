"""Local search on true liveness: reruns are put in, taken out and moved, and the peak follows at once.

A schedule is, for each node, the set of slots in which it runs: its own, and those right before which it runs again
(slot t is node t with the reruns before it, in the order of their numbers; Checkmate's R[t, v]).  No position shifts
when a rerun comes or goes, so that a move changes a few lifetimes: bytes alive at the entry of each slot, and the most
alive within it, are arrays on which a longer or shorter life is one range addition, and only the slots at its two
ends are walked again.  That is some ten thousand moves a second, or two hundred thousand compiled, whatever the length
of the schedule.  `flat.py` has the schedule, `moves.py` its moves.
"""

from __future__ import annotations

import math
import random

import numpy as np

from ..core.watch import current
from . import layout as m
from .flat import LOOK, Run, Schedule

__all__ = ["Schedule", "Search"]

#: nodes that a move may look at, on average
_WORK = 40
#: work of a move: units of `watch`
_MOVE = 6e-5
#: moves between two looks at the clock
_MOVES = 256
#: budgets are below this: no problem has more bytes
_MOST_BYTES = 1 << 62


class Search:
    """Simulated annealing over schedules that fit a budget, from one that may or may not."""

    def __init__(self, schedule: Schedule, budget: int, seed: int = 0) -> None:
        self.schedule, self.budget = schedule, max(-1, min(budget, _MOST_BYTES))
        self.draw = random.Random(seed)
        problem = schedule.problem
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
        begun = s.work
        order = sorted(s.reruns(), key=lambda r: (-s.problem.nodes[r[0]].cost, r))
        s.x[m.BUDGET], s.x[m.LIMIT] = self.budget, max(self.budget, s.peak)
        run = s.run(m.DESCEND, [x for rerun in order for x in rerun])
        for k in range(0, len(order), _MOVES):
            if watch.tick():
                break
            run(k, min(k + _MOVES, len(order)))
        watch.spend(_MOVE * len(s.reruns()) + LOOK * (s.work - begun))
        self._note()

    def run(self, moves: int, hot: float = 3e-3, cold: float = 1e-5) -> None:
        """`moves` random moves at a temperature that falls from `hot` to `cold` (shares of the plain cost).

        Fewer where moves are dear, because many nodes run again at one place, and where planning is out of time.
        """
        s, watch, begun = self.schedule, current(), self.schedule.work
        if not s.x[m.ABLE]:
            return  # nothing may run again
        self._set(moves, hot, cold)
        made = 0
        while made < moves:
            run = s.run(m.ANNEAL)
            made = self._some(run, made, moves)
            if not s.x[m.PENDING]:
                break
            s.grow()
        s.x[m.PENDING] = 0
        self._take()
        watch.spend(_MOVE * min(made + 1, moves) + LOOK * (s.work - begun))

    def _some(self, run: Run, made: int, moves: int) -> int:
        """Moves until all are made, or rows lack room, or work or time is up; how many were made."""
        x, watch = self.schedule.x, current()
        while made < moves and not watch.tick():
            stop = min(made + _MOVES, moves)
            run(made, stop)
            made = int(x[m.AT])
            if made < stop:
                break
        return made

    def _set(self, moves: int, hot: float, cold: float) -> None:
        """Writes what moves need into the schedule's arrays."""
        s = self.schedule
        heats = [hot * (cold / hot) ** (k / max(1, moves - 1)) for k in range(moves)]
        s.f = np.concatenate([s.f[: m.COSTS + len(s.problem)], heats])
        s.f[m.BEST_COST], s.f[m.NOW] = self.best_cost, self.energy()
        s.f[m.COST_UNIT], s.f[m.BYTES_UNIT] = self.unit, self.room
        s.x[m.BUDGET], s.x[m.ENOUGH] = self.budget, s.work + _WORK * moves
        s.x[m.BEST_LENGTH] = s.x[m.PENDING] = 0
        words = self.draw.getstate()[1]
        at = s.x[m.TWISTER]
        s.x[at : at + 624], s.x[m.DRAWN] = words[:-1], words[-1]

    def _take(self) -> None:
        s = self.schedule
        at = s.x[m.TWISTER]
        version, _, gauss = self.draw.getstate()
        self.draw.setstate((version, (*s.x[at : at + 624].tolist(), int(s.x[m.DRAWN])), gauss))
        if best := s.best():
            self.best, self.best_cost = best, float(s.f[m.BEST_COST])
