"""Where to cut a forward pass into stages that take about the same time.

A cut is good where one value crosses it: what is read behind it, and was computed before it, is the output of a layer.
Among these places the largest stage is made as small as it can be, by bisection over its time (the linear partition
problem); so the search is linear in the operators.  Where a rank has several stages, cuts then move as long as this
makes ranks' times more equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from ...errors import UsageError
from ...language.ir import Block, Operator, Role
from .borders import FORWARD_ROLES, unbound

#: how often each cut is tried in another place
_ROUNDS = 50


def balanced_cuts(
    block: Block, stages: int, seconds: Callable[[Operator], float], ranks: int | None = None
) -> tuple[str, ...]:
    """The values behind which to cut a forward pass into so many stages, dealt out to `ranks` in turn (None: one each).

    `seconds`: the time of an operator.  UsageError where there are too few places at which one value crosses.
    """
    places = places_of(block)
    if len(places) < stages - 1:
        raise UsageError(
            f"pipeline: the step cannot be cut into {stages} stages: there are {len(places)} places at which a single "
            "value goes from one part of the network to the next; name the cuts, or use fewer stages"
        )
    time = _times(block, seconds)
    ends, total = [time[i + 1] for i, _ in places], time[-1]
    low, high = 0.0, total
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _cut(ends, total, stages, middle) is not None else (middle, high)
    cuts = _filled(_cut(ends, total, stages, high) or [], len(places), stages - 1)
    if ranks is not None and 1 < ranks < stages:
        cuts = _evened(cuts, ends, total, ranks)
    return tuple(places[k][1] for k in cuts)


def loads(block: Block, cuts: Sequence[str], seconds: Callable[[Operator], float], ranks: int) -> list[float]:
    """The time of each rank's stages in a forward pass that is cut behind these values."""
    time, makers = _times(block, seconds), {v.name: i for i, o in enumerate(block.operators) for v in o.writes()}
    ends = [0.0, *(time[makers[n] + 1] for n in cuts), time[-1]]
    sums = [0.0] * ranks
    for stage in range(len(ends) - 1):
        sums[stage % ranks] += ends[stage + 1] - ends[stage]
    return sums


def _times(block: Block, seconds: Callable[[Operator], float]) -> list[float]:
    """The time of the forward pass up to each operator, and of all."""
    sums = [0.0]
    for o in block.operators:
        sums.append(sums[-1] + (seconds(o) if o.role in FORWARD_ROLES else 0.0))
    return sums


def places_of(block: Block) -> list[tuple[int, str]]:
    """(position, value) where this value alone crosses, in order."""
    free, shapes = unbound(block), {v.name: v.shape for o in block.operators for v in o.writes()}
    last: dict[str, int] = {}
    for i, o in enumerate(block.operators):
        if o.role in FORWARD_ROLES:
            last.update((v.name, i) for v in o.reads() if v.name not in free)
    alive: set[str] = set()
    ending: dict[int, list[str]] = {}
    for name, i in last.items():
        ending.setdefault(i, []).append(name)
    places = []
    for i, o in enumerate(block.operators):
        alive.difference_update(ending.get(i, ()))
        crossing = [v.name for v in o.writes() if last.get(v.name, -1) > i and v.name not in free]
        alive.update(crossing)
        if crossing and len(alive) == 1 and o.role is Role.FORWARD and shapes[crossing[0]]:
            places.append((i, crossing[0]))
    return places


def _cut(ends: Sequence[float], total: float, stages: int, most: float) -> list[int] | None:
    """The places, as few as possible, for stages of at most this time; None where it takes too many."""
    cuts: list[int] = []
    begin = 0.0
    for k, end in enumerate(ends):
        following = ends[k + 1] if k + 1 < len(ends) else total
        if following - begin > most:
            if end - begin > most or len(cuts) == stages - 1:
                return None
            cuts.append(k)
            begin = end
    return cuts if total - begin <= most else None


def _evened(cuts: Sequence[int], ends: Sequence[float], total: float, ranks: int) -> list[int]:
    """Cuts moved place by place while the squares of ranks' times and of stages' times become less in all."""
    borders = [-1, *cuts, len(ends)]
    at = [0.0, *ends, total]  # behind place k: at[k + 1]
    stage = [at[b + 1] - at[a + 1] for a, b in itertools.pairwise(borders)]
    rank = [sum(stage[r::ranks]) for r in range(ranks)]
    for _ in range(_ROUNDS):
        moved = False
        for i in range(1, len(borders) - 1):
            for k in (borders[i] - 1, borders[i] + 1):
                if not borders[i - 1] < k < borders[i + 1]:
                    continue
                more, a, b = at[k + 1] - at[borders[i] + 1], (i - 1) % ranks, i % ranks
                # (x + d)² + (y - d)² - x² - y² = 2d (x - y + d)
                if more * (rank[a] - rank[b] + stage[i - 1] - stage[i] + 2 * more) < -1e-9 * total * total:
                    borders[i], moved = k, True
                    stage[i - 1], stage[i] = stage[i - 1] + more, stage[i] - more
                    rank[a], rank[b] = rank[a] + more, rank[b] - more
        if not moved:
            break
    return borders[1:-1]


def _filled(chosen: Sequence[int], places: int, wanted: int) -> list[int]:
    """`wanted` places: those found, and others if they are too few."""
    more = (k for k in range(places) if k not in chosen)
    return sorted([*chosen, *(k for k, _ in zip(more, range(wanted - len(chosen)), strict=False))])
