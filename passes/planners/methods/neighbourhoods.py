"""Large-neighbourhood search: in each round CP-SAT (a constraint solver) decides anew when a few nodes run."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

from ..core.problem import RematerialisationProblem
from ..core.simulate import simulate
from ..core.watch import current
from .retention_intervals import improve

#: how many repeatable nodes are free (may run at other times) in the first round, and at most
_WIDTH, _WIDEST = 20, 120


def search(
    problem: RematerialisationProblem,
    budget: int,
    sequence: Sequence[int],
    *,
    rounds: int = 40,
    effort: float = 1.0,
    copies: int = 3,
    time_limit: float = math.inf,
    seed: int = 0,
) -> list[int]:
    """A sequence at least as good as `sequence` (see `retention_intervals.improve`, which each round calls).

    Rounds rotate through three choices of free nodes: a window of successive nodes; a random sample; up to half nodes
    that run several times, the rest nodes that run once.  After a round without improvement the neighbourhood grows by
    a quarter if CP-SAT proved that there is none, and shrinks by a quarter otherwise.  Deterministic for a seed, unless
    the time limit or an interrupt ends the search.
    """
    deadline = time.monotonic() + time_limit
    draw = random.Random(seed)
    nodes = [i for i, n in enumerate(problem.nodes) if n.repeatable]
    best, width = list(sequence), min(_WIDTH, len(nodes))
    cost = simulate(problem, best).cost
    for number in range(rounds if nodes else 0):
        left = deadline - time.monotonic()
        if left <= 0 or current().over:
            break
        free = _neighbourhood(best, nodes, width, number, draw)
        best, _, proven = improve(
            problem, budget, best, effort=effort, time_limit=left, copies=copies, free=free, seed=seed
        )
        found = simulate(problem, best).cost
        if found == cost:
            width = min(len(nodes), _WIDEST, width * 5 // 4 + 1) if proven else min(len(nodes), max(5, width * 3 // 4))
        cost = found
    return best


def _neighbourhood(sequence: list[int], nodes: list[int], width: int, number: int, draw: random.Random) -> set[int]:
    if number % 3 == 0:
        start = draw.randrange(len(nodes) - width + 1)
        return set(nodes[start : start + width])
    if number % 3 == 1:
        return set(draw.sample(nodes, width))
    count: dict[int, int] = {}
    for i in sequence:
        count[i] = count.get(i, 0) + 1
    again = [i for i in nodes if count[i] > 1]
    once = [i for i in nodes if count[i] == 1]
    half = draw.sample(again, min(len(again), width // 2))
    return {*half, *draw.sample(once, min(len(once), width - len(half)))}
