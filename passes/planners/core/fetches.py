"""A step's problem in which some values, once dropped, are fetched from host memory instead of being made again.

The node that writes such a value writes a token of no bytes, and another, the fetch, makes the value of it: a planner
that lets it run again has the value copied back, which needs nothing in memory.  So planners of recomputation choose
among all that they know with both at once.  A fetch costs what the link's time is worth where the bound is proven
(`moves_bound.py`); which values have one is chosen so that a share of the link's time before this moment is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...offloading.offload import find_rests
from ...offloading.transfers import Link
from ...recomputation.recompute import RecomputePlan, Rerun
from .bound import hull, turning_points
from .derive import Derived
from .moves_bound import MovingCut, Prices, Proof, proof_with_moves
from .problem import Node

#: a value made at the end of the step is so much dearer to fetch than one at its beginning: its copy has less time
_SLOPE = 0.1
#: price of a second of copies where none is known
_LEAST = 0.1
#: cuts that look for the prices of a set of values
_CUTS = 14


@dataclass(frozen=True)
class Fetched(Derived):
    """A problem with fetches.  `base`: the one without; `number`: of each node, the base's node, or -1 for a fetch;
    `names`: what a fetch brings back."""

    base: Derived
    number: tuple[int, ...]
    names: Mapping[int, str]

    def for_block(self, plan: RecomputePlan) -> RecomputePlan:
        """The plan by the block's operators, with what is fetched in host memory."""
        after = [*self.number, len(self.base.problem)]
        for i in reversed(range(len(self.number))):
            after[i] = after[i] if after[i] >= 0 else after[i + 1]
        again = [r for r in plan.reruns if r.operator not in self.names]
        real = tuple(Rerun(self.number[r.operator], after[r.before]) for r in again)
        moved = dict.fromkeys(self.names[r.operator] for r in plan.reruns if r.operator in self.names)
        return replace(self.base.for_block(RecomputePlan(real)), offloads=tuple(moved))


def fetched(base: Derived, budget: int, link: Link, shares: Sequence[float]) -> Iterator[Fetched]:
    """Problems in which copies out take some share of the time before the moment at which the bound is proven."""
    names, proof = _names(base), _priced(base, budget, link)
    seen: set[frozenset[int]] = set()
    for share in shares if proof.cut is not None else ():
        prices = _chosen(proof, share, names)
        if prices and frozenset(prices) not in seen:
            seen.add(frozenset(prices))
            yield _with_fetches(base, prices, names)


def _priced(base: Derived, budget: int, link: Link) -> Proof:
    """The proof, or where copies may take no time: the fullest moment, and a byte at what recomputing would cost."""
    problem = base.problem
    proof = proof_with_moves(problem, budget, link)
    if proof.prices.byte or math.isinf(proof.seconds):
        return proof
    cuts = [MovingCut(problem, b, link) for b in turning_points(problem)]
    moving = max(cuts, key=lambda m: m.cut.used + m.cut.solve(0.0).memory)
    lines, room = hull(moving.cut), budget - moving.cut.used
    if lines[0].memory <= room:
        return Proof(proof.seconds)
    byte = next((line.price for line in lines if line.memory <= room), lines[-1].price)
    return Proof(proof.seconds, moving, Prices(before=_LEAST, byte=byte))


def _chosen(proof: Proof, share: float, names: Mapping[int, str]) -> dict[int, float]:
    """Values whose copies out take no more than a share of the time that there is, and the price of fetching each."""
    moving, at = proof.cut, proof.prices
    assert moving is not None
    cut, problem = moving.cut, moving.cut.problem
    before = at.before if at.before or at.after else _LEAST
    price = {v: before * moving.out[v] + at.after * moving.back[v] for v in cut.values if v in names}
    late = [1 + _SLOPE * max(0, problem.producer[v]) / len(problem) for v in cut.values]
    low, high, best = 0.1, 10.0, frozenset[int]()
    for _ in range(_CUTS):
        scale = math.sqrt(low * high)
        fetch = [scale * late[i] * price.get(v, math.inf) for i, v in enumerate(cut.values)]
        moved = cut.solve(at.byte, 1 - at.after, fetch).moved
        if sum(moving.out[v] for v in moved) <= share * moving.before:
            high, best = scale, moved
        else:
            low = scale
    return {v: price[v] for v in best}


def _names(base: Derived) -> dict[int, str]:
    """For each value that can wait in host memory: the name by which the backward pass reads it."""
    block, problem = base.block, base.problem
    resting = {r.value.name for r in find_rests(block, block.values())}
    found = {}
    for node, operators in zip(problem.nodes, base.operators, strict=True):
        large = [v for v in node.writes if v not in problem.outputs]
        names = [v.name for k in operators for v in block.operators[k].writes() if v.name in resting]
        if not node.backward and len(large) == len(names) == 1:
            found[large[0]] = names[0]
    return found


def _with_fetches(base: Derived, prices: Mapping[int, float], names: Mapping[int, str]) -> Fetched:
    problem = base.problem
    sizes, values = list(problem.sizes), list(problem.values)
    nodes: list[Node] = []
    number: list[int] = []
    fetches: dict[int, str] = {}
    for i, n in enumerate(problem.nodes):
        v = next((v for v in n.writes if v in prices), -1)
        number.append(i)
        if v < 0:
            nodes.append(n)
            continue
        token = len(sizes)
        sizes.append(0)
        values.append(f"{problem.values[v]}.host")
        writes = (*(w for w in n.writes if w != v), token)
        over = tuple(u for u in n.overwrites if any(sizes[u] == sizes[w] for w in writes))
        cost, scratch = max(0.0, n.cost - prices[v]), n.scratch + sizes[v]
        nodes.append(replace(n, writes=writes, cost=cost, scratch=scratch, overwrites=over, repeatable=False))
        fetches[len(nodes)] = names[v]
        number.append(-1)
        nodes.append(Node(values[token], prices[v], (token,), (v,)))
    changed = replace(problem, nodes=tuple(nodes), sizes=tuple(sizes), values=tuple(values))
    return Fetched(base.block, changed, (), base, tuple(number), fetches)
