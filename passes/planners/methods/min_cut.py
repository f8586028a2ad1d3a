"""torch's partitioner: the fewest saved bytes.  For comparison, since saved bytes are not the peak."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np

from ....errors import UsageError, load_extra
from ...recomputation.recompute import RecomputePlan
from ..base import Planner
from ..core.problem import RematerialisationProblem
from ..core.schedules import keep_schedule
from ..core.simulate import plan_of, pruned, simulate

#: fractions that are tried when a budget of bytes is given
_FRACTIONS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)


class MinCut(Planner, strategy="min-cut"):
    """Saves the smallest cut between what the forward pass must compute once and what the backward pass reads.

    `fraction`: what may be saved, as a share of the bytes that the backward pass reads (torch's `memory_budget`).
    Without one, and with a budget, a few are tried, and the cheapest whose peak fits is taken; with neither, a half.
    """

    reference = "PyTorch, torch/_functorch/partitioners.py: min-cut rematerialisation with a memory budget"

    fraction: float | None = None

    def plan(self, problem: RematerialisationProblem, *, budget: int | None = None) -> RecomputePlan:
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise UsageError(f"strategy 'min-cut': fraction must lie between 0 and 1, not {self.fraction}")
        if self.fraction is not None or budget is None:
            return _plan(problem, saved_within(problem, 0.5 if self.fraction is None else self.fraction))
        found: list[tuple[bool, float, int, list[int]]] = []
        for kept in _distinct(problem):
            outcome = simulate(problem, keep_schedule(problem, kept))
            over = outcome.peak > budget
            found.append((over, outcome.peak if over else outcome.cost, len(found), kept))
        return _plan(problem, min(found)[-1])


def _plan(problem: RematerialisationProblem, kept: Collection[int]) -> RecomputePlan:
    sequence = pruned(problem, keep_schedule(problem, kept))
    return plan_of(sequence, tuple(problem.values[v] for v in sorted(kept)))


def _distinct(problem: RematerialisationProblem) -> Iterator[list[int]]:
    seen = set()
    for fraction in _FRACTIONS:
        kept = saved_within(problem, fraction)
        if tuple(kept) not in seen:
            seen.add(tuple(kept))
            yield kept


def saved_within(problem: RematerialisationProblem, fraction: float) -> list[int]:
    """Values to save: as many dear nodes as possible are kept from running again.

    torch bans its compute-intensive operators from recomputation, lets a knapsack over their bytes lift some of the
    bans, and cuts.  Here cost per byte written says what is dear, and the bans are lifted from the cheap end until
    the smallest cut that heeds the others is within the fraction (or none is left).
    """
    whole = sum(problem.sizes[v] for v in problem.saved)
    nodes = problem.nodes
    dear = sorted(
        (i for i in problem.forward if nodes[i].repeatable),
        key=lambda i: (-nodes[i].cost / max(1, sum(problem.sizes[v] for v in nodes[i].writes)), i),
    )
    low, high = 0, len(dear)
    best = smallest_cut(problem, dear if fraction == 1 else ())
    while fraction < 1 and low < high:
        middle = (low + high + 1) // 2
        kept = smallest_cut(problem, dear[:middle])
        if sum(problem.sizes[v] for v in kept) <= fraction * whole:
            low, best = middle, kept
        else:
            high = middle - 1
    return best


def smallest_cut(problem: RematerialisationProblem, banned: Collection[int]) -> list[int]:
    """Values of the smallest sum of bytes from which the backward pass can be fed without running a `banned` node.

    A value is an edge of its bytes between two vertices, a node a vertex before what it writes and behind what it
    reads; inputs, banned nodes and those that may not run again hang at the source, what the backward pass reads at
    the sink.  Of equal cuts the one nearest to the sink: it runs the least again.
    """
    max_flow = load_extra("ortools.graph.python.max_flow", "plan", "strategy 'min-cut'")
    tails, heads, sizes, end = _arcs(problem, set(banned))
    flow = max_flow.SimpleMaxFlow()
    flow.add_arcs_with_capacity(np.asarray(tails), np.asarray(heads), np.asarray(sizes, np.int64))
    status = flow.solve(end - 1, end)
    if status != flow.OPTIMAL:
        raise UsageError(f"{problem.name}: strategy 'min-cut' found no flow ({status})")
    behind = set(flow.get_sink_side_min_cut())
    n, values = len(problem), len(problem.sizes)
    return [v for v in range(values) if n + values + v in behind and n + v not in behind]


def _arcs(problem: RematerialisationProblem, banned: set[int]) -> tuple[list[int], list[int], list[int], int]:
    """(tails, heads, capacities, the sink's number); nodes come first, then values' two ends, the source, the sink."""
    n, values = len(problem), len(problem.sizes)
    source, sink = n + 2 * values, n + 2 * values + 1
    unit = max(1, sum(problem.sizes) * (n + values) >> 60)  # capacities must not overflow where they meet
    sizes = [-(-s // unit) for s in problem.sizes]
    infinite = sum(sizes) + 1
    arcs: list[tuple[int, int, int]] = [(n + v, n + values + v, sizes[v]) for v in range(values)]
    arcs += [(source, n + v, infinite) for v in problem.inputs]
    needed: set[int] = set()
    for i, node in enumerate(problem.nodes):
        if node.backward:
            needed.update(node.reads)
            continue
        arcs += [(i, n + v, infinite) for v in node.writes]
        arcs += [(n + values + v, i, infinite) for v in node.reads]
        if i in banned or not node.repeatable:
            arcs.append((source, i, infinite))
    arcs += [(n + values + v, sink, infinite) for v in sorted(needed) if _is_forward(problem, v)]
    arcs.append((source, sink, 0))
    tails, heads, capacities = zip(*arcs, strict=True)
    return list(tails), list(heads), list(capacities), sink


def _is_forward(problem: RematerialisationProblem, v: int) -> bool:
    p = problem.producer[v]
    return p < 0 or not problem.nodes[p].backward
