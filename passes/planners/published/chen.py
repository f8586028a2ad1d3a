"""Chen, Xu, Zhang, Guestrin 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise

from ...recomputation.recompute import RecomputePlan
from ..base import Planner
from ..core.chain import Action, Chain, chain_of, emit
from ..core.problem import RematerialisationProblem
from ..core.schedules import after, crossing, keep_schedule
from ..core.simulate import plan_of, pruned, simulate

_PAPER = "Chen et al. 2016, arXiv 1604.06174"
#: fewer stages than this are no chain worth the name: the cuts are then taken from all forward nodes
_FEWEST_STAGES = 4
#: segment budgets that the sweep tries
_TRIES = 24
#: candidates that the recursive form judges
_MOST_JUDGED = 40


class ChenSqrt(Planner, strategy="chen"):
    """√n segments of equally many candidate cuts; only what crosses from one to the next is kept.

    `segments`: how many, None for √n, n being the number of stages that the forward pass can be cut into.
    """

    reference = f"{_PAPER}, section 4.1"
    heeds_budget = False

    segments: int | None = None

    def plan(self, problem: RematerialisationProblem, *, budget: int | None = None) -> RecomputePlan:
        cuts = candidate_cuts(problem)
        n = len(cuts) + 1
        parts = max(1, min(n, self.segments or round(n**0.5)))
        return segment_plan(problem, [cuts[b - 1] for b in even_bounds(0, n, parts)[1:-1]])


class ChenSweep(Planner, strategy="chen-sweep"):
    """The search over segment budgets b: a segment ends at the first candidate at which it holds more than b bytes."""

    reference = f"{_PAPER}, algorithm 3"

    def plan(self, problem: RematerialisationProblem, *, budget: int | None = None) -> RecomputePlan:
        cuts = candidate_cuts(problem)
        holds = segment_bytes(problem, cuts)
        tried = dict.fromkeys(tuple(greedy_cuts(cuts, holds, b)) for b in segment_budgets(holds))
        return segment_plan(problem, min(tried, key=lambda c: rank(problem, segment_schedule(problem, c), budget)))


class ChenRecursive(Planner, strategy="chen-recursive"):
    """Segments within segments: k cuts split a part into k + 1, each of which is run again in the same way.

    Memory g(n) = k + g(n / (k + 1)) = k · log_{k+1} n, with n · log_{k+1} n forward steps.  Without a budget k is
    `cuts` and the recursion goes down to single stages; with one, the cheapest k and depth that fit are taken.
    """

    reference = f"{_PAPER}, section 4.4"

    cuts: int = 1

    def plan(self, problem: RematerialisationProblem, *, budget: int | None = None) -> RecomputePlan:
        chain = chain_of(problem)
        n = len(chain)
        shapes = [(self.cuts, n)] if budget is None else recursive_shapes(chain)
        sequences = (emit(chain, recursive_schedule(n, k, depth)) for k, depth in shapes)
        best = first_fitting(problem, sequences, budget)
        return plan_of(best or range(len(problem)))


def candidate_cuts(problem: RematerialisationProblem) -> tuple[int, ...]:
    """Forward nodes after which segments may end: the chain's borders, or all nodes where it has too few."""
    chain = chain_of(problem)
    return chain.borders if len(chain) >= _FEWEST_STAGES else tuple(problem.forward[:-1])


def segment_schedule(problem: RematerialisationProblem, cuts: Sequence[int]) -> list[int]:
    """Keeps what crosses the cuts and all of the last segment."""
    return keep_schedule(problem, crossing(problem, cuts) | after(problem, max(cuts, default=-1)))


def segment_plan(problem: RematerialisationProblem, cuts: Sequence[int]) -> RecomputePlan:
    """The plan of `segment_schedule`; what crosses the cuts are its checkpoints."""
    kept = tuple(problem.values[v] for v in sorted(crossing(problem, cuts)))
    return plan_of(pruned(problem, segment_schedule(problem, cuts)), checkpoints=kept)


def even_bounds(start: int, stop: int, parts: int) -> list[int]:
    """start, ..., stop in so many parts, whose sizes differ by 1 at most."""
    return [start + (stop - start) * i // parts for i in range(parts + 1)]


def segment_bytes(problem: RematerialisationProblem, cuts: Sequence[int]) -> list[int]:
    """Bytes that the backward pass reads between each cut and the one before, as the sweep adds them up."""
    saved = set(problem.saved)
    marks, found, total = set(cuts), [], 0
    for i in problem.forward:
        total += sum([problem.sizes[v] for v in problem.nodes[i].writes if v in saved])
        if i in marks:
            found.append(total)
            total = 0
    return [*found, total]


def greedy_cuts(cuts: Sequence[int], holds: Sequence[int], budget: float) -> list[int]:
    """Algorithm 3: cuts where more than `budget` bytes have come together since the last one."""
    found, total = [], 0
    for cut, size in zip(cuts, holds, strict=False):
        total += size
        if total > budget:
            found.append(cut)
            total = 0
    return found


def segment_budgets(holds: Sequence[int]) -> list[float]:
    """Segment budgets to try, from every cut to none: a geometric series, finer around the root of the product of the
    paper's x and y (bytes at the cuts, largest segment)."""
    total = sum(holds)
    low = max(1.0, min((h for h in holds if h), default=1) / 2)
    steps = [low * (max(total, low) / low) ** (i / (_TRIES - 1)) for i in range(_TRIES)]
    middle = (total * max(holds, default=0)) ** 0.5
    return sorted({0.0, *steps, *(middle * 2 ** (i / 8) for i in range(-4, 5))})


def recursive_schedule(n: int, k: int, depth: int) -> list[Action]:
    """Stages 0 to n - 1, split by k cuts at each of `depth` levels; parts of the lowest level keep all they have."""
    found: list[Action] = []
    parts = [(0, n, depth)]
    while parts:
        low, high, level = parts.pop()
        if level == 0 or high - low == 1:
            found += [("forward", s, True) for s in range(low, high)]
            found += [("backward", s, True) for s in range(high - 1, low - 1, -1)]
            continue
        bounds = even_bounds(low, high, min(k + 1, high - low))
        found += [("forward", s, False) for s in range(low, bounds[-2])]
        parts += [(a, b, level - 1) for a, b in pairwise(bounds)]
    return found


def recursive_forwards(n: int, k: int, depth: int) -> int:
    """Forward steps of `recursive_schedule`: each part but a level's last is run once more than the level below."""
    if depth == 0 or n == 1:
        return n
    bounds = even_bounds(0, n, min(k + 1, n))
    sizes = [b - a for a, b in pairwise(bounds)]
    return bounds[-2] + sum(c * recursive_forwards(s, k, depth - 1) for s, c in _counted(sizes))


def _counted(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    found: dict[int, int] = {}
    for s in sizes:
        found[s] = found.get(s, 0) + 1
    yield from found.items()


def recursive_shapes(chain: Chain) -> list[tuple[int, int]]:
    """(k, depth) to try, in order of the forward steps that they take, the fewest first."""
    n = len(chain)
    found: dict[tuple[int, int], int] = {}
    ks = sorted({round(2 ** (i / 2)) for i in range(64) if 2 ** (i / 2) < n} | {round(n**0.5), 1})
    for k in ks:
        depths = list(accumulate((k + 1 for _ in range(64)), lambda size, f: size * f))
        for depth in range(1, 2 + sum(d < n for d in depths)):
            found[k, depth] = recursive_forwards(n, k, depth)
    ordered = sorted(found, key=lambda s: (found[s], s))
    step = max(1, len(ordered) // _MOST_JUDGED)
    return [(1, 0), *ordered[::step], ordered[-1]] if ordered else [(1, 0)]


def rank(problem: RematerialisationProblem, sequence: Sequence[int], budget: int | None) -> tuple[float, ...]:
    """Smallest for the cheapest sequence within the budget, or else for the lowest peak; without one for the latter."""
    o = simulate(problem, sequence)
    return (0, o.cost, o.peak) if budget is not None and o.peak <= budget else (1, o.peak, o.cost)


def first_fitting(
    problem: RematerialisationProblem, sequences: Iterable[list[int]], budget: int | None
) -> list[int] | None:
    """The first sequence within the budget, or else, after all, the one with the lowest peak."""
    best, lowest = None, None
    for sequence in sequences:
        mine = rank(problem, sequence, budget)
        if lowest is None or mine < lowest:
            best, lowest = sequence, mine
        if mine[0] == 0:
            break
    return best
