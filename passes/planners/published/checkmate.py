"""Checkmate: an integer programme over the nodes that run and the values kept in each stage; rounded relaxation."""

from __future__ import annotations

import datetime
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from ....errors import UsageError, load_extra
from ...recomputation.recompute import RecomputePlan
from ..base import Planner
from ..core.problem import RematerialisationProblem
from ..core.simulate import plan_of, pruned, sequence_of, simulate
from ..core.watch import current, interruptible
from ..methods.retention_intervals import start

#: bytes in the programme are such that the budget is this: solvers allow rows to be off by a millionth
_BUDGET = 1024.0


class Checkmate(Planner, strategy="checkmate"):
    """The cheapest plan in which, between two first runs, each node runs at most once, in order (MILP by HiGHS).

    `time_limit`: seconds; `largest`: graphs of more nodes are refused, since the programme has about n² unknowns;
    `warm_start`: a plan to begin with, where the solver takes one (`solver`: "highs" or "scip"; SCIP does);
    `gap`: how far from the best, as a share, is good enough.
    """

    quick: ClassVar[Mapping[str, Any] | None] = {"time_limit": 8.0}
    reference = "Jain et al.: Checkmate (MLSys 2020, arXiv 1910.02653)"

    time_limit: float = 60.0
    largest: int = 150
    warm_start: RecomputePlan | None = None
    solver: str = "highs"
    gap: float = 1e-6

    def plan(self, problem: RematerialisationProblem, *, budget: int | None = None) -> RecomputePlan:
        if budget is None:
            return RecomputePlan()
        found, _ = _solved(self, problem, budget)
        candidates = [] if found is None else [list(found)]
        return plan_of(_best(problem, budget, [*candidates, *_fallbacks(problem, budget)]))

    def bound(self, problem: RematerialisationProblem, budget: int) -> float | None:
        """The solver's dual bound: no plan of the kind that the class describes costs less.

        A plan that runs nodes out of order or twice within a stage is beyond the method, and its proof.
        """
        return _solved(self, problem, budget)[1]


class CheckmateLP(Checkmate, strategy="checkmate-lp"):
    """Checkmate's relaxation with two-phase rounding: what stays is rounded, what runs again follows from it.

    As in the paper the relaxation is given somewhat less memory, so that what is rounded fits: each share of
    `allowances` is tried with each of `thresholds`, the cheapest that fits the judge wins.
    """

    allowances: tuple[float, ...] = (0.0, 0.1, 0.2)
    thresholds: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)

    def plan(self, problem: RematerialisationProblem, *, budget: int | None = None) -> RecomputePlan:
        if budget is None:
            return RecomputePlan()
        found = []
        for allowance in self.allowances:
            room = problem.fixed + math.floor((budget - problem.fixed) * (1 - allowance))
            stays, _ = _relaxed(self, problem, room)
            if stays is not None:
                found += [two_phase_rounding(problem, stays, t) for t in self.thresholds]
        return plan_of(_best(problem, budget, [*found, *_fallbacks(problem, budget)]))

    def bound(self, problem: RematerialisationProblem, budget: int) -> float | None:
        return _relaxed(self, problem, budget)[1]


@lru_cache(maxsize=4)
def _solved(
    planner: Checkmate, problem: RematerialisationProblem, budget: int
) -> tuple[tuple[int, ...] | None, float | None]:
    """(sequence or None, bound or None)."""
    programme = Programme(problem, budget, planner.largest)
    values, bound = programme.solve(planner.time_limit, True, planner.solver, planner.gap, planner.warm_start)
    return None if values is None else tuple(programme.sequence(values)), bound


@lru_cache(maxsize=4)
def _relaxed(
    planner: Checkmate, problem: RematerialisationProblem, budget: int
) -> tuple[dict[tuple[int, int], float] | None, float | None]:
    """(share to which value v stays before stage t, by (t, v), or None; bound or None)."""
    programme = Programme(problem, budget, planner.largest)
    values, bound = programme.solve(planner.time_limit, False, planner.solver, planner.gap, None)
    return None if values is None else {k: values[x] for k, x in programme.stays.items()}, bound


def _best(problem: RematerialisationProblem, budget: int, sequences: Iterable[Sequence[int]]) -> list[int]:
    def rank(sequence: Sequence[int]) -> tuple[int, float]:
        outcome = simulate(problem, sequence)
        return max(outcome.peak, budget), outcome.cost

    return min((pruned(problem, s) for s in sequences), key=rank)


def _fallbacks(problem: RematerialisationProblem, budget: int) -> list[list[int]]:
    return [start(problem, budget), list(range(len(problem)))]


def two_phase_rounding(
    problem: RematerialisationProblem, stays: dict[tuple[int, int], float], threshold: float
) -> list[int]:
    """The paper's algorithm 2: values stay before a stage where the relaxation has more than `threshold` of them;
    what runs is then the least that each stage and the values that must be there after it need."""
    n, producer = len(problem), problem.producer
    there = set(problem.inputs)
    sequence: list[int] = []
    for t in range(n):
        kept = {v for v in range(len(problem.sizes)) if producer[v] < t and _stays(problem, stays, t, v, threshold)}
        there &= kept
        wanted = {t}
        wanted |= {producer[v] for v in range(len(problem.sizes)) if stays.get((t + 1, v), 0.0) > threshold} - {-1}
        runs: set[int] = set()
        for i in sorted(wanted, reverse=True):
            if i == t or (problem.nodes[i].repeatable and any(v not in there for v in problem.nodes[i].writes)):
                _closure(problem, i, there, runs)
        sequence += sorted(runs)
        there.update(v for i in runs for v in problem.nodes[i].writes)
    return pruned(problem, sequence)


def _stays(
    problem: RematerialisationProblem, stays: dict[tuple[int, int], float], t: int, v: int, threshold: float
) -> bool:
    p = problem.producer[v]
    return p < 0 or not problem.nodes[p].repeatable or stays.get((t, v), 0.0) > threshold


def _closure(problem: RematerialisationProblem, node: int, there: set[int], runs: set[int]) -> None:
    """Adds a node to those that run in a stage, with all that it needs and that is not there."""
    stack = [node]
    while stack:
        i = stack.pop()
        if i not in runs:
            runs.add(i)
            stack += [problem.producer[v] for v in problem.nodes[i].reads if v not in there]


class Programme:
    """The paper's programme (its section 4), for nodes with several values, scratch, inputs and places taken over.

    Stage t ends with the first run of node t.  R[t,i]: node i runs in it; S[t,v]: value v stays from before it;
    F[t,v,k]: v is freed once node k has run in it; U[t,k]: bytes alive while k runs in it.  The paper's U counts
    before frees: U[t,k] = U[t,k-1] - what k-1 frees + what k writes.
    """

    def __init__(self, problem: RematerialisationProblem, budget: int, largest: int) -> None:
        if len(problem) > largest:
            raise UsageError(
                f"strategy 'checkmate' takes up to {largest} nodes, {problem.name} has {len(problem)}: "
                "choose another strategy, or raise its option 'largest'"
            )
        self.problem = problem
        self.room = budget - problem.fixed
        # where a value is far larger than the room, the programme has no solution, whatever the room is
        self.unit = _BUDGET / max(1, self.room, max(problem.sizes, default=0) // 10**6)
        whole = sum(n.cost for n in problem.nodes)
        self.cost_unit = len(problem) / whole if whole else 1.0
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.costs: list[float] = []
        self.whole: list[bool] = []
        self.rows: list[tuple[list[int], list[float], float, float]] = []
        self.runs: dict[tuple[int, int], int] = {}
        self.stays: dict[tuple[int, int], int] = {}
        self.frees: dict[tuple[int, int, int], int] = {}
        # a node frees an output of its own only where it runs again for another one's sake; to leave out all that
        # cannot help makes the relaxation tighter than the paper's
        several = [p >= 0 and len(problem.nodes[p].writes) > 1 for p in problem.producer]
        self.users = [[p, *r] if s else r for p, r, s in zip(problem.producer, problem.readers, several, strict=True)]
        self.variables()
        for t in range(len(problem)):
            self.stage(t)
            self.memory(t)

    def variable(self, lower: float, upper: float, cost: float = 0.0, whole: bool = True) -> int:
        """Adds a variable and returns its number; `whole`: it takes integers only."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.costs.append(cost)
        self.whole.append(whole)
        return len(self.lower) - 1

    def row(self, terms: Iterable[tuple[int, float]], lower: float, upper: float) -> None:
        """Adds a constraint: the sum of variables times factors lies between two numbers."""
        columns, factors = zip(*terms, strict=True)
        self.rows.append((list(columns), list(factors), lower, upper))

    def variables(self) -> None:
        """Adds the variables: what runs and what stays before each node."""
        p, n = self.problem, len(self.problem)
        for t in range(n):
            for i in range(t + 1):
                if i == t or p.nodes[i].repeatable:
                    self.runs[t, i] = self.variable(float(i == t), 1.0, p.nodes[i].cost * self.cost_unit)
            for v, maker in enumerate(p.producer):
                if maker < t and (p.readers[v] or v in p.outputs):
                    self.stays[t, v] = self.variable(0.0, 1.0)

    def stage(self, t: int) -> None:
        """Constraints of stage t: a value that stays was there, a run finds its reads, outputs exist in the end."""
        p = self.problem
        for v, maker in enumerate(p.producer):
            if t and (t, v) in self.stays:
                before = [(x, -1.0) for x in self.present(t - 1, v)]
                self.row([(self.stays[t, v], 1.0), *before], -math.inf, 0.0)
            if t == len(p) - 1 and v in p.outputs and maker < t:
                self.row([(x, 1.0) for x in self.present(t, v)], 1.0, math.inf)
        for k in range(t + 1):
            run = self.runs.get((t, k))
            for v in p.nodes[k].reads if run is not None else ():
                assert run is not None
                self.row([(run, 1.0), *((x, -1.0) for x in self.present(t, v))], -math.inf, 0.0)

    def present(self, t: int, v: int) -> list[int]:
        """Unknowns of which one is 1 where value v can be read in stage t."""
        return [x for x in (self.stays.get((t, v)), self.runs.get((t, self.problem.producer[v]))) if x is not None]

    def memory(self, t: int) -> None:
        """Adds the constraints of the memory in use while node `t` runs."""
        p = self.problem
        for v in range(len(p.sizes)):
            if p.sizes[v] and not (t == len(p) - 1 and v in p.outputs):
                self.free(t, v)
        alive = [(self.stays[t, v], -self.bytes(v)) for v in range(len(p.sizes)) if (t, v) in self.stays]
        before: int | None = None
        freed: list[tuple[int, float]] = []
        for k in range(t + 1):
            run = self.runs.get((t, k))
            if run is None:
                continue
            used = self.variable(0.0, math.inf, whole=False)
            terms = alive if before is None else [*freed, (before, -1.0)]
            self.row([(used, 1.0), *terms, (run, -sum(self.bytes(v) for v in p.nodes[k].writes))], 0.0, 0.0)
            self.fits(t, k, used, run)
            freed = [
                (self.frees[t, v, k], self.bytes(v))
                for v in dict.fromkeys((*p.nodes[k].reads, *p.nodes[k].writes))
                if (t, v, k) in self.frees
            ]
            before = used

    def bytes(self, v: int) -> float:
        """The size of a value, in the programme's unit."""
        return self.problem.sizes[v] * self.unit

    def free(self, t: int, v: int) -> None:
        """v is freed by the last of its users that runs in this stage, unless it stays."""
        users = [(k, self.runs[t, k]) for k in self.users[v] if (t, k) in self.runs]
        frees = [self.variable(0.0, 1.0, whole=False) for _ in users]
        for at, ((k, run), free) in enumerate(zip(users, frees, strict=True)):
            self.frees[t, v, k] = free
            self.row([(free, 1.0), (run, -1.0)], -math.inf, 0.0)
            for _, later in users[at + 1 :]:
                self.row([(free, 1.0), (later, 1.0)], -math.inf, 1.0)
        if frees:
            stays = self.stays.get((t + 1, v))
            self.row([(x, 1.0) for x in frees] + ([] if stays is None else [(stays, 1.0)]), -math.inf, 1.0)

    def fits(self, t: int, k: int, used: int, run: int) -> None:
        """Within the budget while k runs, its scratch included; a dying input may lend its place to an output."""
        p = self.problem
        node = p.nodes[k]
        terms = [(used, 1.0), (run, node.scratch * self.unit)]
        lenders = [v for v in node.overwrites if (t, v, k) in self.frees and self.borrows(k, v)]
        saved = []
        for size in dict.fromkeys(p.sizes[v] for v in lenders):
            lent = self.variable(0.0, 1.0, whole=False)
            alike = [(self.frees[t, v, k], -1.0) for v in lenders if p.sizes[v] == size]
            self.row([(lent, 1.0), *alike], -math.inf, 0.0)
            saved.append((lent, 1.0))
            terms.append((lent, -size * self.unit))
        if saved:
            self.row([*saved, (run, -1.0)], -math.inf, 0.0)
        self.row(terms, -math.inf, max(0.0, self.room * self.unit))

    def borrows(self, k: int, v: int) -> bool:
        """Whether node `k` writes a value of the size of `v`, in whose buffer it may be."""
        return any(self.problem.sizes[w] == self.problem.sizes[v] for w in self.problem.nodes[k].writes)

    def solve(
        self, seconds: float, whole: bool, solver: str, gap: float, start: RecomputePlan | None
    ) -> tuple[list[float] | None, float | None]:
        """(values of the unknowns, None where none were found; the dual bound in the problem's unit of cost)."""
        mathopt = load_extra("ortools.math_opt.python.mathopt", "plan", "strategy 'checkmate'")
        kinds = {"highs": mathopt.SolverType.HIGHS, "scip": mathopt.SolverType.GSCIP}
        if solver not in kinds:
            raise UsageError(f"strategy 'checkmate': solver must be highs or scip, not '{solver}'")
        kind = kinds[solver] if whole else mathopt.SolverType.HIGHS
        model = mathopt.Model.from_model_proto(self.proto(whole))
        parameters = mathopt.SolveParameters(
            time_limit=datetime.timedelta(seconds=max(0.01, min(seconds, current().left))),
            threads=1 if kind is mathopt.SolverType.GSCIP else None,
            relative_gap_tolerance=gap if whole else None,
        )
        hints = mathopt.ModelSolveParameters()
        if start is not None and kind is mathopt.SolverType.GSCIP:
            hints.solution_hints.append(
                mathopt.SolutionHint({model.get_variable(x): y for x, y in self.hint(start).items()})
            )
        result = _interruptible(mathopt.solve, model, kind, params=parameters, model_params=hints)
        if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
            return None, None
        bound = result.termination.objective_bounds.dual_bound
        bound = bound / self.cost_unit if math.isfinite(bound) else None
        if not result.has_primal_feasible_solution():
            return None, bound
        values = result.variable_values()
        return [values[model.get_variable(x)] for x in range(len(self.lower))], bound

    def hint(self, plan: RecomputePlan) -> dict[int, float]:
        """The variables in a plan: its runs, and values that stay from a run to the last use before the next."""
        p = self.problem
        found = dict.fromkeys([*self.runs.values(), *self.stays.values()], 0.0)
        made: dict[int, int] = dict.fromkeys(p.inputs, -1)
        t = 0
        for i in sequence_of(p, plan):
            for v in p.nodes[i].reads:
                for stage in range(made[v] + 1, t + 1):
                    found[self.stays[stage, v]] = 1.0
            found[self.runs[t, i]] = 1.0
            made.update((v, t) for v in p.nodes[i].writes)
            t += i == t
        return found

    def proto(self, whole: bool) -> Any:
        """The programme as MathOpt takes it in bulk."""
        from ortools.math_opt import model_pb2

        model = model_pb2.ModelProto()
        n = len(self.lower)
        model.variables.ids.extend(range(n))
        model.variables.lower_bounds.extend(self.lower)
        model.variables.upper_bounds.extend(self.upper)
        model.variables.integers.extend(x and whole for x in self.whole)
        costs = [(x, c) for x, c in enumerate(self.costs) if c]
        model.objective.linear_coefficients.ids.extend(x for x, _ in costs)
        model.objective.linear_coefficients.values.extend(c for _, c in costs)
        model.linear_constraints.ids.extend(range(len(self.rows)))
        model.linear_constraints.lower_bounds.extend(r[2] for r in self.rows)
        model.linear_constraints.upper_bounds.extend(r[3] for r in self.rows)
        matrix = model.linear_constraint_matrix
        for number, (columns, factors, _, _) in enumerate(self.rows):
            cells: dict[int, float] = {}
            for x, factor in zip(columns, factors, strict=True):
                cells[x] = cells.get(x, 0.0) + factor
            matrix.row_ids.extend(itertools.repeat(number, len(cells)))
            matrix.column_ids.extend(sorted(cells))
            matrix.coefficients.extend(cells[x] for x in sorted(cells))
        return model

    def sequence(self, values: list[float]) -> list[int]:
        """The nodes that run, in order."""
        return pruned(self.problem, [i for (t, i), x in sorted(self.runs.items()) if values[x] > 0.5])


def _interruptible(solve: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A solve that Ctrl-C ends, where this version of the solvers can be asked to stop."""
    try:
        from ortools.util.python.solve_interrupter import SolveInterrupter
    except ImportError:
        return interruptible(lambda: solve(*args, **options), lambda: None)
    asked = SolveInterrupter()
    return interruptible(lambda: solve(*args, interrupter=asked, **options), asked.interrupt)
