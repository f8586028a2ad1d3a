"""A proven lower bound of the cost of plans within a budget, for any order and any number of recomputations.

At the first execution of a node b its ancestors A have all run once.  Of a value v of A that a descendant of b reads,
either its bytes are there now (a_v = 1, r = 0), or the node that writes it runs again later (r = 1), and then what that
node reads must be there now or be rebuilt in turn.  With c the costs, m the bytes and λ ≥ 0 the price of a byte,

    cost ≥ C_total + max_λ min_{a,r} [ Σ c_p r_p + λ ( Σ_{v∈A, not read by b} m_v (a_v - r_v) - room ) ]
    a_v = 1 if a descendant of b reads v;  r_v ≤ a_v;  r_p ≤ a_u for every u that p reads
    room = budget - what is always there - b's outputs, scratch and inputs

The inner minimum is one s-t cut (Lagrange dual of the weakest statement about memory that every schedule satisfies).
A negative room, or values that cannot be rebuilt and do not fit into it, prove that the budget holds no schedule.

What generated loops run may pass between the nodes of a loop without being in memory, and be made again there: of such
values (`Node.loop`, `Node.remade`) a bound counts nothing.  Planners, which look for good choices, count them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ....errors import load_extra
from .problem import RematerialisationProblem

#: total cost in units of the cut's whole-number capacities
_UNITS = 10**12
#: nodes of all cuts of one bound, about
_CUTS = 50_000


@dataclass(frozen=True)
class Line:
    """A point of one cut: keeping `kept` values means repeating nodes of `cost` in total.

    `memory`: bytes of the values, each as dear as the cut's slope makes it; `moved`: values fetched from elsewhere;
    `least`: what no choice is below at these prices, as the flow proves it.
    """

    price: float
    cost: float
    memory: int
    kept: frozenset[int]
    moved: frozenset[int] = frozenset()
    least: float = 0.0


class Cut:
    """The choice between keeping and repeating at the first execution of node `b`.

    `slope` makes values dearer the earlier they are made (by up to that share), so that identical layers do not tie;
    a bound must not use it.  `proof`: without what loops may not need, for a bound.
    """

    def __init__(self, problem: RematerialisationProblem, b: int, slope: float = 0.0, proof: bool = False) -> None:
        self.problem, self.b = problem, b
        node, nodes, producer = problem.nodes[b], problem.nodes, problem.producer
        above, below = self.above, self.below = self.sides()
        reads = {i: {*nodes[i].reads}.difference(nodes[i].remade if proof else ()) for i in below}
        needed = {v for i in below for v in reads[i] if (p := producer[v]) < 0 or p in above}
        needed.update(v for v in problem.outputs if (p := producer[v]) < 0 or p in above)
        fused = _fused(problem, b) if proof else set()
        passing = {v for v in needed if _passes(problem, v, b, below)} if proof else set()
        free = {*node.reads, *problem.shared}.difference(fused) | passing
        self.values, self.nodes = self._closure(needed, above)
        self.needed = needed
        sizes = problem.sizes
        self.memory = {v: 0 if v in free else sizes[v] for v in self.values}
        self.used = problem.fixed + touched(problem, b, fused if proof else None)
        self.stuck = sum(self.memory[v] for v in needed if not self.rebuildable(v))
        self.slope = self._slopes(slope)

    def sides(self) -> tuple[Collection[int], Collection[int]]:
        """Nodes that have run when b runs first, and nodes that have not."""
        return _reach(self.problem.preds, self.b), _reach(self.problem.succs, self.b)

    def _slopes(self, slope: float) -> list[float]:
        producer, n = self.problem.producer, len(self.problem)
        return [1.0 + slope * (1 - max(producer[v], 0) / n) for v in self.values]

    def sloped(self, slope: float) -> Cut:
        """This cut with another slope."""
        other = copy.copy(self)
        vars(other).pop("_flow", None)
        other.slope = other._slopes(slope)
        return other

    @property
    def least(self) -> int:
        """Bytes without which no schedule gets past b."""
        return self.used + self.stuck

    def rebuildable(self, v: int) -> bool:
        """Whether the node that writes a value may run again."""
        p = self.problem.producer[v]
        return p >= 0 and self.problem.nodes[p].repeatable

    def _closure(self, needed: set[int], above: Collection[int]) -> tuple[list[int], list[int]]:
        """Values that may be needed, and nodes that may run again, for `needed`."""
        problem = self.problem
        values, nodes, stack = set(needed), set(), list(needed)
        while stack:
            v = stack.pop()
            p = problem.producer[v]
            if self.rebuildable(v) and p not in nodes and p in above:
                nodes.add(p)
                fresh = [u for u in problem.nodes[p].reads if u not in values]
                values.update(fresh)
                stack += fresh
        return sorted(values), sorted(nodes)

    @cached_property
    def _flow(self) -> _Flow:
        return _Flow(self)

    def solve(self, price: float, rerun: float = 1.0, fetch: Sequence[float] = ()) -> Line:
        """The best choice where a byte costs `price`, and a node that runs again `rerun` times its cost.

        `fetch`: for each of `values`, the price at which it need be neither kept nor made again.
        """
        return self._flow.solve(price, rerun, np.array(fetch) if len(fetch) else np.inf)


class _Flow:
    """The cut's graph: source → value (needed) → the node that writes it → sink; a node needs what it reads."""

    def __init__(self, cut: Cut) -> None:
        max_flow = load_extra("ortools.graph.python.max_flow", "plan", "the planner's bound (a minimum cut)")
        self.cut = cut
        problem = cut.problem
        self.value = {v: i for i, v in enumerate(cut.values)}
        self.node = {p: len(self.value) + i for i, p in enumerate(cut.nodes)}
        self.source = len(self.value) + len(self.node)
        self.sink = self.source + 1
        total = problem.cost or 1.0
        self.units = _UNITS / total
        self.costs = np.array([problem.nodes[p].cost for p in cut.nodes]) * self.units
        pays = [(self.node[p], self.sink, 0) for p in cut.nodes]
        wall = int(np.floor(self.costs).sum()) + 10 * _UNITS
        must = [(self.source, self.value[v], wall) for v in cut.needed]
        must += [(self.node[p], self.value[u], wall) for p in cut.nodes for u in problem.nodes[p].reads]
        keeps = [(self.value[v], self.node.get(problem.producer[v], self.sink)) for v in cut.values]
        self.weights = np.array([cut.memory[v] * slope for v, slope in zip(cut.values, cut.slope, strict=True)])
        self.wall = wall
        self.flow = max_flow.SimpleMaxFlow()
        arcs = np.array(pays + must, dtype=np.int64).reshape(-1, 3)
        added = self.flow.add_arcs_with_capacity(arcs[:, 0], arcs[:, 1], arcs[:, 2])
        self.pay_arcs = added[: len(pays)]
        ends = np.array(keeps, dtype=np.int64).reshape(-1, 2)
        self.keep_arcs = self.flow.add_arcs_with_capacity(ends[:, 0], ends[:, 1], np.zeros(len(keeps), np.int64))

    def solve(self, price: float, rerun: float, fetch: np.ndarray | float) -> Line:
        problem, cut = self.cut.problem, self.cut
        dear = price * self.weights
        capacities = np.minimum(np.floor(np.minimum(dear, fetch) * self.units), self.wall).astype(np.int64)
        self.flow.set_arcs_capacity(self.keep_arcs, capacities)
        self.flow.set_arcs_capacity(self.pay_arcs, np.floor(rerun * self.costs).astype(np.int64))
        self.flow.solve(self.source, self.sink)
        reached = set(self.flow.get_source_side_min_cut())
        again = [p for p in cut.nodes if self.node[p] in reached]
        there = [
            i
            for i, v in enumerate(cut.values)
            if i in reached and self.node.get(problem.producer[v], self.sink) not in reached
        ]
        cost = sum(problem.nodes[p].cost for p in again)
        away = np.broadcast_to(fetch < dear, dear.shape)
        keeps, moved = [i for i in there if not away[i]], frozenset(cut.values[i] for i in there if away[i])
        kept = frozenset(cut.values[i] for i in keeps)
        memory = round(sum(cut.memory[cut.values[i]] * cut.slope[i] for i in keeps))
        return Line(price, cost, memory, kept, moved, self.flow.optimal_flow() / self.units)


def _reach(edges: list[tuple[int, ...]], start: int) -> set[int]:
    found: set[int] = set()
    stack = list(edges[start])
    while stack:
        i = stack.pop()
        if i not in found:
            found.add(i)
            stack += edges[i]
    return found


def hull(cut: Cut, most: int = 64) -> list[Line]:
    """Choices on the lower convex hull of (memory, cost), from keeping all to keeping as little as can be.

    Between two neighbours the price at which they tie is tried, the widest gap in memory first, `most` cuts at most.
    """
    free, dear = cut.solve(0.0), cut.solve(dearest(cut))
    lines = {free.memory: free, dear.memory: dear}
    gaps = [(free.memory - dear.memory, dear.memory, free.memory)]
    for _ in range(most):
        gaps.sort()
        if not gaps or gaps[-1][0] <= 0:
            break
        _, low, high = gaps.pop()
        a, b = lines[low], lines[high]
        between = cut.solve((a.cost - b.cost) / (high - low)) if a.cost > b.cost else a
        if between.memory not in lines and low < between.memory < high:
            lines[between.memory] = between
            gaps += [(between.memory - low, low, between.memory), (high - between.memory, between.memory, high)]
    return [lines[m] for m in sorted(lines, reverse=True)]


def dearest(cut: Cut) -> float:
    """A price at which anything is rather repeated than kept."""
    smallest = min((m for m in cut.memory.values() if m), default=1)
    return 10 * max(cut.problem.cost, 1e-30) / smallest


def extra_cost(cut: Cut, budget: int) -> float:
    """A lower bound of the cost of recomputation, in the problem's unit; infinite if no schedule fits the budget."""
    room = budget - cut.used
    if room < cut.stuck:
        return math.inf
    low, high = cut.solve(dearest(cut)), cut.solve(0.0)
    if high.memory <= room:
        return 0.0
    best = max(0.0, low.least - low.price * room)
    if best > sum(cut.problem.nodes[p].cost for p in cut.nodes) * (1 + 1e-9):  # not with all repeated
        return math.inf
    for _ in range(40):
        if high.memory == low.memory:
            break
        price = (low.cost - high.cost) / (high.memory - low.memory)
        line = cut.solve(price)
        best = max(best, line.least - price * room)
        if line.memory > room:
            if line.memory >= high.memory:
                break
            high = line
        else:
            if line.memory <= low.memory:
                break
            low = line
    return best


def least_budget(problem: RematerialisationProblem) -> int:
    """Bytes without which no schedule exists: outputs, what a node touches, what nobody rebuilds at turning points.

    The problem remembers it.
    """
    return problem.remembered("least budget", lambda: _least_budget(problem))


def _least_budget(problem: RematerialisationProblem) -> int:
    return max([touched_least(problem), *(Cut(problem, b, proof=True).least for b in turning_points(problem, 4))])


def touched_least(problem: RematerialisationProblem) -> int:
    """Bytes without which no step exists, whatever waits elsewhere: its outputs, and what any node touches.

    The last node may write its output over a shared value.
    """
    shared, sizes = set(problem.shared), problem.sizes
    lent = max((sizes[v] for n in problem.nodes for v in n.overwrites if v in shared), default=0)
    least = sum(sizes[v] for v in set(problem.outputs) - shared) - lent
    return problem.fixed + max([least, *(touched(problem, b, _fused(problem, b)) for b in range(len(problem)))])


def touched(problem: RematerialisationProblem, b: int, fused: Set[int] | None = None) -> int:
    """Bytes of what node b reads, writes and needs for itself, without shared values.

    `fused`: for a bound, those that may pass within a loop.  Of a loop any operand may be overwritten, and the scratch
    may be smaller than that of its parts, as that of normalisations is.
    """
    node, sizes = problem.nodes[b], problem.sizes
    away = {*(fused or ()), *problem.shared}
    over, scratch = node.overwrites, node.scratch
    if fused is not None and node.loop:
        over, scratch = tuple(v for v in node.reads if sizes[v] in {sizes[w] for w in node.writes}), 0
    saved = max((sizes[v] for v in over), default=0)
    outs = sum(sizes[v] for v in node.writes if v not in away)
    return sum(sizes[v] for v in node.reads if v not in away) + max(0, outs - saved) + scratch


def _fused(problem: RematerialisationProblem, b: int) -> set[int]:
    """Values that b reads or writes which may stay within a loop: a reader may compute its own copy there."""
    nodes, node = problem.nodes, problem.nodes[b]
    if not node.loop:
        return set()

    def passes(v: int) -> bool:
        p = problem.producer[v]
        alone = p >= 0 and nodes[p].repeatable and p != b
        return p >= 0 and nodes[p].loop and (alone or all(nodes[r].loop for r in problem.readers[v]))

    return {v for v in (*node.reads, *node.writes) if passes(v)}


def _passes(problem: RematerialisationProblem, v: int, b: int, below: Collection[int]) -> bool:
    """Whether what comes before b and is read behind it may pass within a loop that runs b, too."""
    nodes, p = problem.nodes, problem.producer[v]
    if p < 0 or not (nodes[b].loop and nodes[p].loop) or nodes[p].backward is not nodes[b].backward:
        return False
    return all(nodes[r].loop for r in problem.readers[v] if r in below) and v not in problem.outputs


def turning_points(problem: RematerialisationProblem, most: int = 8) -> list[int]:
    """Nodes whose first execution is likely to say the most: the first backward ones, and the fullest moments after."""
    from .simulate import profile

    first = _first_turn(problem)
    live = profile(problem, range(len(problem)))
    if first is None:
        first = live.index(max(live)) if live else 0
    rest = sorted(range(first + 1, len(problem)), key=lambda i: -live[i])
    chosen = [first, *rest[:1]][:most]
    apart = (len(problem) - first) // (2 * most)
    for i in rest:
        if len(chosen) >= most:
            break
        if all(abs(i - j) > apart for j in chosen):
            chosen.append(i)
    return chosen[: len(problem)]


def moments(problem: RematerialisationProblem) -> list[int]:
    """The turning points at which bounds look: as many as take about as long for any problem."""
    return turning_points(problem, max(8, min(64, _CUTS // max(1, len(problem)))))


def every_moment(problem: RematerialisationProblem) -> Sequence[int]:
    """All nodes where cuts at all of them take no longer than at the moments of larger problems; else those."""
    return range(len(problem)) if len(problem) ** 2 <= _CUTS else moments(problem)


def _first_turn(problem: RematerialisationProblem) -> int | None:
    """The first backward node that depends on the forward pass: a gradient's seed of ones does not."""
    nodes, producer = problem.nodes, problem.producer
    for i, n in enumerate(nodes):
        if n.backward and any(producer[v] >= 0 and not nodes[producer[v]].backward for v in n.reads):
            return i
    return None


def lower_bound(problem: RematerialisationProblem, budget: int, points: Iterable[int] | None = None) -> float:
    """A cost below which no schedule within `budget` bytes exists; infinite where there is none at all.

    `points`: nodes b to look at (default: all nodes of a small problem, else a few turning points).
    """
    if budget < least_budget(problem):
        return math.inf
    found = every_moment(problem) if points is None else points
    return problem.cost + max((extra_cost(Cut(problem, b, proof=True), budget) for b in found), default=0.0)


def bound_of(problem: RematerialisationProblem, budget: int) -> float:
    """`lower_bound` at the usual points, which the problem remembers."""
    return problem.remembered(("bound", budget), lambda: lower_bound(problem, budget))
