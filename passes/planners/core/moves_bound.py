"""A proven lower bound of the time of steps that recompute values and copy others to host memory and back.

Class: any order of execution, any number of recomputations, any values of the forward pass (and inputs) copied out and
back at any time, any number of times.  A copy's source and target take their bytes from its beginning to its wait.

Look at the moment at which node b runs for the first time, as in `bound.py`: A seconds of ancestors have run before it,
b and its descendants (B seconds) have not, the rest (F) may run on either side.  A value that is read later is there
now, or is made again later (R seconds in all), or is fetched later.  What is fetched later and not there now has left
before: its copy out has ended before this moment, its copy back begins after it.  The device and each direction of the
link do one thing at a time, so that with O and I the seconds of these copies out and back

    time before b ≥ max(O, A + what ran before of F),    time from b on ≥ max(I, B + R + the others of F)

and hence, for all ν, μ in [0, 1] (prices of the link's seconds before and after b) and λ ≥ 0 (the price of a byte),

    time ≥ (1-ν) A + (1-μ) B + min(1-ν, 1-μ) F + min over choices of [ (1-μ) R + ν O + μ I + λ (M - room) ]

where M counts what is kept.  The inner minimum is the cut of `bound.py` in which the arc that keeps a value has the
capacity min(λ m_v, ν o_v + μ i_v), as what is fetched needs nothing else.  For ν = μ = 0 fetching is free; without
fetches it is the bound of `bound.py`.  The right side is concave in (ν, μ, λ): each choice of a cut is linear in them,
and the next prices are those at which the least of these lines is highest (Kelley's cutting planes).
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from ....errors import load_extra
from ....language.verify_addresses import ALIGNMENT
from ...offloading.transfers import Link
from .bound import Cut, Line, dearest, moments, touched_least
from .problem import RematerialisationProblem

#: cuts at one moment, at most; the share of the step's cost below which nothing more is looked for
_CUTS, _CLOSE = 60, 1e-4


@dataclass(frozen=True)
class Prices:
    """Prices of a second of copies before and after the moment, of a byte at it, and the bound that they may give."""

    before: float = 0.0
    after: float = 0.0
    byte: float = 0.0
    most: float = math.inf


class MovingCut:
    """The choice between keeping, repeating and fetching at the first execution of node `b`."""

    def __init__(self, problem: RematerialisationProblem, b: int, link: Link) -> None:
        self.cut = cut = Cut(problem, b, proof=True)
        self.movable = movable(problem)
        costs = [n.cost for n in problem.nodes]
        self.before = sum(costs[i] for i in cut.above)
        self.after = costs[b] + sum(costs[i] for i in cut.below)
        self.either = max(0.0, problem.cost - self.before - self.after)
        # the bytes of a value before they are aligned are not known
        nbytes = {v: max(0, problem.sizes[v] - ALIGNMENT + 1) for v in cut.values}
        self.out = {v: link.seconds(nbytes[v], back=False) for v in cut.values}
        self.back = {v: link.seconds(nbytes[v], back=True) for v in cut.values}
        self.stuck = sum(cut.memory[v] for v in cut.needed if v not in self.movable and not cut.rebuildable(v))

    def solve(self, p: Prices) -> tuple[Line, float]:
        """The best choice at some prices, and what it proves, without the price of the room."""
        fetch = [
            p.before * self.out[v] + p.after * self.back[v] if v in self.movable else math.inf for v in self.cut.values
        ]
        line = self.cut.solve(p.byte, 1 - p.after, fetch)
        held = (1 - p.before) * self.before + (1 - p.after) * self.after
        return line, held + min(1 - p.before, 1 - p.after) * self.either + line.least

    def prove(self, budget: int, best: Proof) -> Proof:
        """The bound at this moment, where it is better than the best of others."""
        room = budget - self.cut.used
        if room < self.stuck:
            return Proof(math.inf)
        lines: list[Line] = []
        prices: Prices | None = Prices()
        while prices is not None and len(lines) < _CUTS and prices.most > best.seconds * (1 + _CLOSE):
            line, proven = self.solve(prices)
            lines.append(line)
            if proven - prices.byte * room > best.seconds:
                best = Proof(proven - prices.byte * room, self, prices)
            prices = self._next(lines, room)
        return best

    def _next(self, lines: list[Line], room: int) -> Prices | None:
        """Where the least of the lines is highest; None where the solver does not say."""
        mathopt = load_extra("ortools.math_opt.python.mathopt", "plan", "the planner's bound (a linear programme)")
        model, total, unit = mathopt.Model(), self.cut.problem.cost or 1.0, max(room, 1)
        most = model.add_variable(ub=1e6)
        before, after, less = (model.add_variable(lb=0.0, ub=1.0) for _ in range(3))
        byte = model.add_variable(lb=0.0, ub=dearest(self.cut) * unit / total)
        model.add_linear_constraint(less <= 1 - before)
        model.add_linear_constraint(less <= 1 - after)
        for x in lines:
            out, back = (sum(t[v] for v in x.moved) / total for t in (self.out, self.back))
            model.add_linear_constraint(
                most
                <= self.before / total * (1 - before)
                + (self.after + x.cost) / total * (1 - after)
                + self.either / total * less
                + out * before
                + back * after
                + (x.memory - room) / unit * byte
            )
        model.maximize(most)
        result = mathopt.solve(model, mathopt.SolverType.GLOP)
        if not result.has_primal_feasible_solution():
            return None
        found = result.variable_values()
        out, back = (min(1.0, max(0.0, found[x])) for x in (before, after))
        return Prices(out, back, max(0.0, found[byte]) * total / unit, found[most] * total)


@dataclass(frozen=True)
class Proof:
    """A bound, and the moment and the prices at which it was found."""

    seconds: float
    cut: MovingCut | None = None
    prices: Prices = Prices()


def movable(problem: RematerialisationProblem) -> Set[int]:
    """Values that may wait in host memory: those of the forward pass, and inputs."""

    def find() -> Set[int]:
        return {v for v, p in enumerate(problem.producer) if p < 0 or not problem.nodes[p].backward}

    return problem.remembered("movable", find)


def bound_with_moves(problem: RematerialisationProblem, budget: int, link: Link) -> float:
    """Seconds that no step within `budget` bytes takes less than, with copies over a link; infinite if there is none.

    The problem's costs are seconds.  The problem remembers it.
    """

    return proof_with_moves(problem, budget, link).seconds


def proof_with_moves(problem: RematerialisationProblem, budget: int, link: Link) -> Proof:
    """`bound_with_moves`, with the moment and the prices that give it."""

    def prove() -> Proof:
        best = Proof(math.inf if budget < touched_least(problem) else problem.cost)
        for b in moments(problem):
            if math.isinf(best.seconds):
                break
            best = MovingCut(problem, b, link).prove(budget, best)
        return best

    return problem.remembered(("bound with moves", budget, link), prove)
