"""The least sum of kept bytes and largest segment, by a division tree (Feng & Huang 2021, arXiv 1808.00079)."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import ClassVar

import numpy as np

from ...recomputation.recompute import RecomputePlan
from ..base import Planner
from ..core.problem import RematerialisationProblem
from ..core.schedules import keep_schedule, kept_plan
from ..core.simulate import Outcome, simulate
from .division_tree import Graph, Piece, division_tree
from .lower_sets import ForwardGraph, forward_graph

#: nodes that judging plans may simulate in all
_SIMULATED = 1_000_000
#: vertices that all candidates together may look at
_OPENED = 2_000_000


class FengHuang(Planner, strategy="feng-huang"):
    """Checkpoints on arbitrary graphs: of all candidates for the largest segment the one with the least sum.

    For a largest segment of mu bytes, pieces of the division tree that hold no more are one segment.  Others are
    opened: branches and closed sets keep the ends of all their parts; of a linear piece, parts above mu keep both
    their ends and are opened in turn, and in between a shortest path over all intervals up to mu keeps the fewest
    bytes.  The choice of which parts to open is greedy, as in the paper: no part is opened that mu does not force.

    The paper counts neither gradients nor liveness nor time, and knows no budget.  Without a budget the plan is the
    paper's minimum.  With one it is, of the plans of all candidates, nothing dropped included, the cheapest that fits
    by the simulator, else that with the lowest peak.

    `candidates`: how many values of mu are tried, 0 for as many as go with the size of the graph (all in graphs of a
    few hundred nodes); where there are more they are thinned, half of them evenly by rank, half by
    size.
    `negligible`: values at the start of the graph (masks, positions) that hold, with all they depend on, less than
    this share of all bytes are kept and connect nothing; the paper knows only graphs with one input.
    """

    reference: ClassVar[str] = (
        "Feng & Huang 2021, Optimal Gradient Checkpoint Search for Arbitrary Computation Graphs (arXiv 1808.00079)"
    )

    candidates: int = 0
    negligible: float = 0.001

    def plan(self, problem: RematerialisationProblem, *, budget: int | None = None) -> RecomputePlan:
        forward = forward_graph(problem)
        graph, numbers, always = _prepared(forward, self.negligible)
        root = division_tree(graph)
        found: dict[frozenset[int], float] = {}  # vertices kept → kept bytes + mu
        most = self.candidates or max(300, _OPENED // max(len(graph.weight), 1))
        for mu in largest_segments(graph, root, most):
            kept = kept_vertices(graph, root, mu)
            found.setdefault(frozenset(kept), sum([graph.weight[v] for v in kept]) + mu)
        plans = [(value, {numbers[v] for v in vertices} | always) for vertices, value in found.items()]
        if budget is None:
            _, best = min(plans, key=lambda x: (x[0], len(x[1]), sorted(x[1])))
        else:
            everything = set(range(len(forward)))
            best = _cheapest(problem, forward, [*(kept for _, kept in plans), everything], budget)
        return kept_plan(problem, _values(problem, forward, best))


def _prepared(forward: ForwardGraph, negligible: float) -> tuple[Graph, list[int], set[int]]:
    """The graph that is divided, which node each of its vertices is, and nodes that are kept whatever happens."""
    limit = negligible * forward.total_memory
    small = [False] * len(forward)
    held = 0.0
    for k, ps in enumerate(forward.preds):
        if all(small[p] for p in ps) and held + forward.memory[k] < limit:
            small[k] = True
            held += forward.memory[k]
    always = {k for k in range(len(forward)) if small[k] or forward.stays[k]}
    nodes = [k for k in range(len(forward)) if not small[k]]
    at = {k: i for i, k in enumerate(nodes)}
    graph = Graph.of(
        [[at[p] for p in forward.preds[k] if not small[p]] for k in nodes],
        [0.0 if forward.stays[k] else float(forward.memory[k]) for k in nodes],
    )
    return graph, [-1, *nodes, -1], always


def _values(problem: RematerialisationProblem, forward: ForwardGraph, kept: Iterable[int]) -> list[int]:
    return [v for k in sorted(kept) for v in problem.nodes[forward.nodes[k]].writes]


def _cheapest(
    problem: RematerialisationProblem, forward: ForwardGraph, plans: Sequence[set[int]], budget: int
) -> set[int]:
    """The cheapest plan that fits, else that with the lowest peak; in large problems some are tried, then neighbours
    of the best."""
    judged: dict[int, Outcome] = {}

    def rank(k: int) -> tuple[float, ...]:
        if k not in judged:
            judged[k] = simulate(problem, keep_schedule(problem, _values(problem, forward, plans[k])))
        o = judged[k]
        return (0, o.cost, o.peak, k) if o.peak <= budget else (1, o.peak, o.cost, k)

    step = max(1, -(-len(plans) * len(problem) // _SIMULATED))
    best = min(range(0, len(plans), step), key=rank)
    while step > 1:
        step = (step + 1) // 2 if step > 2 else 1
        best = min([k for k in (best - step, best, best + step) if 0 <= k < len(plans)], key=rank)
    return plans[best]


# -- the largest segment -----------------------------------------------------------------------------------------------


def largest_segments(graph: Graph, root: Piece, most: int) -> list[float]:
    """Candidates for the largest segment, in order: what pieces and intervals of linear pieces hold, and nothing."""
    found = {0.0}
    stack = [root]
    while stack:
        piece = stack.pop()
        found.add(piece.weight)
        stack += piece.children
        if piece.kind == "linear":
            found.update(_interval_weights(graph, piece))
    values = sorted(found)
    if len(values) <= most:
        return values
    by_rank = {values[round(k * (len(values) - 1) / (most // 2))] for k in range(most // 2 + 1)}
    sizes = np.geomspace(max(values[1], 1.0), values[-1], most // 2)
    return sorted(by_rank | {values[min(bisect_left(values, s), len(values) - 1)] for s in sizes})


#: ends of a linear piece between which all intervals are candidates
_LONGEST = 500


def _interval_weights(graph: Graph, piece: Piece) -> set[float]:
    """Weights between any two ends of a linear piece; in long pieces between every so many-th, and neighbours."""
    inner, held = _prefix(graph, piece)
    marks = range(0, len(inner), -(-len(inner) // _LONGEST))
    near = {inner[j] - held[j - k] for j in range(len(inner)) for k in range(1, min(j, 4) + 1)}
    return near | {inner[j] - held[i] for j in marks for i in marks if i < j}


def _prefix(graph: Graph, piece: Piece) -> tuple[list[float], list[float]]:
    """For the ends, source and target included: bytes before each, and bytes up to and with it.

    The interval between ends i and j holds inner[j] - held[i].
    """
    inner, held = [0.0], [0.0]
    for child, end in zip(piece.children, [*piece.ends, piece.target], strict=True):
        inner.append(held[-1] + child.weight)
        held.append(inner[-1] + (graph.weight[end] if end != piece.target else 0.0))
    return inner, held


def kept_vertices(graph: Graph, root: Piece, mu: float) -> set[int]:
    """Vertices that are kept so that no segment holds more than mu bytes."""
    kept: set[int] = set()
    stack = [root] if root.weight > mu else []
    while stack:
        piece = stack.pop()
        kept.update(_path(graph, piece, mu) if piece.kind == "linear" else piece.ends)
        stack += [c for c in piece.children if c.weight > mu]
    return kept


def _path(graph: Graph, piece: Piece, mu: float) -> set[int]:
    """Ends of a linear piece that are kept: those of children above mu, and shortest paths between them."""
    inner, held = _prefix(graph, piece)
    last = len(inner) - 1
    fixed = [0]
    for k, child in enumerate(piece.children, start=1):
        if child.weight > mu:
            fixed += [k - 1, k] if fixed[-1] != k - 1 else [k]
    if fixed[-1] != last:
        fixed.append(last)
    chosen = set(fixed)
    for a, b in pairwise(fixed):
        if b > a + 1 or piece.children[b - 1].weight <= mu:
            chosen |= _shortest(graph, piece, (a, b), (inner, held), mu)
    return {piece.ends[k - 1] for k in chosen if 0 < k < last}


def _shortest(
    graph: Graph, piece: Piece, run: tuple[int, int], sums: tuple[list[float], list[float]], mu: float
) -> set[int]:
    """Ends with the fewest bytes on a way from one end to another whose intervals hold at most mu each.

    least(j) = weight(j) + min over i < j, inner(j) - held(i) <= mu, of least(i); the window of such i only moves on,
    so that a queue of rising values of least has its minimum in front.
    """
    (a, b), (inner, held) = run, sums
    least, before = {a: 0.0}, {}
    queue = deque([a])
    for j in range(a + 1, b + 1):
        while inner[j] - held[queue[0]] > mu:
            queue.popleft()
        before[j] = queue[0]
        least[j] = least[queue[0]] + (graph.weight[piece.ends[j - 1]] if j < b else 0.0)
        while queue and least[queue[-1]] >= least[j]:
            queue.pop()
        queue.append(j)
    found = set()
    while b != a:
        found.add(b)
        b = before[b]
    return found
