"""rotor: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019; `rotor_table` has the mathematics."""

from __future__ import annotations

import math

from ...recomputation.recompute import RecomputePlan
from ..base import Planner
from ..core.chain import Chain, chain_of, cut_further, merged
from ..core.problem import RematerialisationProblem
from ..core.simulate import plan_of, simulate
from .chen import rank
from .rotor_table import RotorTable, rotor_table

#: orders of execution judged for one table
_MOST_JUDGED = 24
#: tables of up to so many numbers are remembered, and how many of one chain
_SMALL, _TABLES = 1 << 19, 8


class Rotor(Planner, strategy="rotor"):
    """Optimal schedules that keep what they decided to keep, for a chain of stages with different costs.

    Memory is counted in `slots`; chains of more than `stages` stages are merged to so many.  What a schedule really
    needs is judged by what is alive, and the memory that the program is solved for is set so that this just fits.
    """

    reference = "Beaumont et al. 2019, arXiv 1911.13214"

    slots: int = 500
    stages: int = 150

    def plan(self, problem: RematerialisationProblem, *, budget: int | None = None) -> RecomputePlan:
        plain = simulate(problem, range(len(problem)))
        if budget is None or plain.peak <= budget:
            return RecomputePlan()
        found = _Fitting(problem, budget)
        for tables in problem.remembered(("rotor", self.stages), lambda: self.chains(problem)):
            self.fit(found, tables, plain.peak)
        return plan_of(found.best)

    def chains(self, problem: RematerialisationProblem) -> list[_Tables]:
        """The chains that a problem is seen as."""
        whole = chain_of(problem)
        finer = cut_further(whole)
        return [_Tables(merged(chain, self.stages)) for chain in ((whole,) if finer is whole else (whole, finer))]

    def fit(self, found: _Fitting, tables: _Tables, plain: int) -> None:
        """Offers the schedules of a chain: a coarse table says about how much memory they may count on."""
        fixed = found.problem.fixed
        most, few = plain - fixed, max(self.slots // 4, 1)
        coarse = tables.table(min(2 * max(found.budget - fixed, 1), most), few)
        if math.isinf(coarse.total(coarse.slots)):  # nothing is known that fits: look for the lowest peak
            coarse = tables.table(most, few)
        m = found.search(coarse)
        found.search(tables.table(math.ceil(1.1 * (m + 1) * coarse.unit), self.slots))


class _Tables:
    """The tables of one chain: budgets that are near each other ask for the same ones."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self._known: dict[tuple[int, int], RotorTable] = {}

    def table(self, most: int, slots: int) -> RotorTable:
        """See `rotor_table`."""
        found = self._known.get((most, slots)) or rotor_table(self.chain, most, slots)
        if found.cost.size <= _SMALL:
            if len(self._known) >= _TABLES:
                self._known.pop(next(iter(self._known)))
            self._known[most, slots] = found
        return found


class _Fitting:
    """Looks for the cheapest order of execution within a budget; without one, for the lowest peak."""

    def __init__(self, problem: RematerialisationProblem, budget: int) -> None:
        self.problem, self.budget = problem, budget
        self.best = list(range(len(problem)))
        self.key = rank(problem, self.best, budget)

    def fits(self, table: RotorTable, m: int) -> bool:
        """Judges the schedule with m slots."""
        sequence = table.sequence(m)
        key = rank(self.problem, sequence, self.budget)
        if key < self.key:
            self.best, self.key = sequence, key
        return key[0] == 0

    def search(self, table: RotorTable) -> int:
        """The most slots found to fit (or the fewest that there is a schedule for).

        Peaks nearly grow with the slots: halving first, then a look at the next few levels of cost above.
        """
        levels = self.levels(table)
        if not levels:
            return table.slots
        low, high, judged = -1, len(levels), 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(table, levels[middle]) else (low, middle)
            judged += 1
        for k in range(high + 1, min(high + 1 + _MOST_JUDGED - judged, len(levels))):
            if self.fits(table, levels[k]):
                low = k
        return levels[max(low, 0)]

    @staticmethod
    def levels(table: RotorTable) -> list[int]:
        """The fewest slots for each cost that there is a schedule of, the dearest first."""
        found: list[int] = []
        last = math.inf
        for m in range(table.slots + 1):
            cost = table.total(m)
            if cost < last:
                found.append(m)
                last = cost
        return found
