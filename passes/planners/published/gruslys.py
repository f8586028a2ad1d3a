"""Memory-efficient backpropagation through time: schedules for chains of equal stages, such as the steps of a network
that was unrolled.  Gruslys et al. 2016 (arXiv 1606.03401); `gruslys_tables` has the mathematics."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from ...recomputation.recompute import RecomputePlan
from ..base import Planner
from ..core.chain import Chain, chain_of, emit, merged
from ..core.problem import RematerialisationProblem
from ..core.simulate import plan_of, simulate
from .chen import rank
from .gruslys_tables import step_schedule, step_tables

_PAPER = "Gruslys et al. 2016, arXiv 1606.03401"
#: plans may run each step so many times
_MOST_REPEATS = 30
#: rows of a table: memory is cut into so many parts at most
_MOST_ROWS = 400


class Gruslys(Planner, strategy="gruslys"):
    """The mixed policy: states and internals are kept, each where it pays.

    Chains of more than `steps` stages are merged to so many.
    """

    reference = f"{_PAPER}, section 3.4"
    keeps: ClassVar[tuple[bool, bool]] = (True, True)

    steps: int = 1000

    def plan(self, problem: RematerialisationProblem, *, budget: int | None = None) -> RecomputePlan:
        if budget is None or simulate(problem, range(len(problem))).peak <= budget:
            return RecomputePlan()
        chain = merged(chain_of(problem), self.steps)
        found = _within(chain, budget, slot_sizes(chain, budget, *self.keeps))
        plain = list(range(len(problem)))
        better = rank(problem, found, budget) < rank(problem, plain, budget)
        return plan_of(found if better else plain)


class GruslysHidden(Gruslys, strategy="gruslys-hidden"):
    """The hidden policy: slots hold states only."""

    reference = f"{_PAPER}, section 3.1"
    keeps = (True, False)


class GruslysInternal(Gruslys, strategy="gruslys-internal"):
    """The internal policy: slots hold all that a step's backward reads."""

    reference = f"{_PAPER}, section 3.2"
    keeps = (False, True)


def slot_sizes(chain: Chain, budget: int, keep_hidden: bool, keep_internal: bool) -> tuple[int, tuple[int, int, int]]:
    """(bytes of a slot, slots of a state, of a step's internals with its new state, of its old state as far as the
    backward reads it); 0 for what is not kept.

    Slots are fractions of a state where memory is not cut into too many of them.
    """
    inner, b = max(len(chain) - 1, 1), chain.bytes
    state = max(sum(b.border) / inner, 1.0)
    internals, old = state + sum(b.saved) / len(chain), sum(b.held) / inner
    smallest = max(1.0, (budget - chain.problem.fixed) / _MOST_ROWS)
    if not keep_internal:
        return round(state), (1, 0, 0)
    ratio = internals / state
    parts = min(range(1, 5), key=lambda h: (round(abs(round(ratio * h) / (ratio * h) - 1), 3), h))
    unit = max(state / parts, smallest)
    slots = [max(1, round(size / unit)) for size in (state, internals)]
    return round(unit), (slots[0] * keep_hidden, slots[1], round(old / unit))


def _within(chain: Chain, budget: int, slots: tuple[int, tuple[int, int, int]]) -> list[int]:
    """The order of execution with the most slots that fits, or that with the fewest."""
    problem, n = chain.problem, len(chain)
    unit, shape = slots
    rows = max(1, min(int(1.2 * (budget - problem.fixed)) // unit, n * sum(shape)))
    tables = step_tables(n, rows, *shape)
    low = next((m for m in range(rows + 1) if tables.steps[m, n] <= _MOST_REPEATS * n), rows)
    spare = budget - problem.fixed - chain.bytes.constant - max(chain.bytes.backward_peak)

    def sequence(m: int) -> list[int]:
        return emit(chain, step_schedule(tables, n, m))

    def fits(m: int) -> bool:
        return simulate(problem, sequence(m)).peak <= budget

    return sequence(most_that_fits(fits, low, rows, min(max(spare // unit, low), rows)))


def most_that_fits(fits: Callable[[int], bool], low: int, high: int, guess: int) -> int:
    """The largest number in low..high that fits, where smaller ones do too; `low` where none does.

    Looks around the guess first, in steps that double, then halves what is left.
    """
    step = 1
    if fits(guess):
        good, bad = guess, high + 1
        while good + step < bad:
            if fits(good + step):
                good, step = good + step, 2 * step
            else:
                bad = good + step
    else:
        good, bad = low - 1, guess
        while bad - step > good:
            if fits(bad - step):
                good = bad - step
            else:
                bad, step = bad - step, 2 * step
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return max(good, low)
