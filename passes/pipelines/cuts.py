"""Where to cut a forward pass into stages that take about the same time.

A cut is good where one value crosses it: what is read behind it, and was computed before it, is the output of a layer.
Among these places the largest stage is made as small as it can be, by bisection over its time (the linear partition
problem); so the search is linear in the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import UsageError
from ...language.ir import Block, Operator, Role
from .borders import FORWARD_ROLES, unbound


def balanced_cuts(block: Block, stages: int, seconds: Callable[[Operator], float]) -> tuple[str, ...]:
    """The values behind which to cut a forward pass into so many stages.

    `seconds`: the time of an operator.  UsageError where there are too few places at which one value crosses.
    """
    places = places_of(block)
    if len(places) < stages - 1:
        raise UsageError(
            f"pipeline: the step cannot be cut into {stages} stages: there are {len(places)} places at which a single "
            "value goes from one part of the network to the next; name the cuts, or use fewer stages"
        )
    time, total = [0.0], 0.0
    for o in block.operators:
        total += seconds(o) if o.role in FORWARD_ROLES else 0.0
        time.append(total)
    ends = [time[i + 1] for i, _ in places]
    low, high = 0.0, total
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _cut(ends, total, stages, middle) is not None else (middle, high)
    found = _cut(ends, total, stages, high) or []
    return tuple(places[k][1] for k in _filled(found, len(places), stages - 1))


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
    found = []
    for i, o in enumerate(block.operators):
        alive.difference_update(ending.get(i, ()))
        made = [v.name for v in o.writes() if last.get(v.name, -1) > i and v.name not in free]
        alive.update(made)
        if made and len(alive) == 1 and o.role is Role.FORWARD and shapes[made[0]]:
            found.append((i, made[0]))
    return found


def _cut(ends: Sequence[float], total: float, stages: int, most: float) -> list[int] | None:
    """The places, as few as possible, for stages of at most this time; None where it takes too many."""
    found: list[int] = []
    begin = 0.0
    for k, end in enumerate(ends):
        following = ends[k + 1] if k + 1 < len(ends) else total
        if following - begin > most:
            if end - begin > most or len(found) == stages - 1:
                return None
            found.append(k)
            begin = end
    return found if total - begin <= most else None


def _filled(found: Sequence[int], places: int, wanted: int) -> list[int]:
    """`wanted` places: those found, and others if they are too few."""
    more = (k for k in range(places) if k not in found)
    return sorted([*found, *(k for k, _ in zip(more, range(wanted - len(found)), strict=False))])
