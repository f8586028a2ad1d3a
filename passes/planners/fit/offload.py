"""Which values wait in host memory, so that a step fits: greedily, by what each frees and for how long.

A step comes in the order in which it will run.  Only values that are alive where too many bytes are come into
question.  They are taken in several orders, as long as it takes; what turns out not to be needed is given back; the
order after which the device waits least wins, by the simulated times.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ....language.ir import Block, Free
from ....language.verify_addresses import ALIGNMENT, aligned
from ...memory.liveness import Liveness
from ...memory.memory_plan import live_profile
from ...memory.storage import Storage, storages
from ...offloading.offload import Offload, Rest, find_rests, lowered_names
from ...offloading.transfers import Link, Seconds, StepTimes, simulate


@dataclass(frozen=True)
class Candidate:
    """A value whose move frees `nbytes` while operators of each of `spans` run, first and last, for `seconds`."""

    name: str
    nbytes: int
    spans: tuple[tuple[int, int], ...]
    seconds: float

    def over(self, live: np.ndarray) -> list[np.ndarray]:
        """What is alive meanwhile, as views."""
        return [live[first : last + 1] for first, last in self.spans]


def choose(
    block: Block, target: int, seconds: Seconds, link: Link, among: Container[str] | None = None
) -> tuple[tuple[str, ...], StepTimes] | None:
    """Values to move so that at most `target` bytes are alive on the device, and the step's times then.

    `block`: without frees and copies.  `among`: names that come into question (None: all).  None where no choice is
    found.
    """
    times = {id(op): seconds(op) for op in block.operators}
    live, found = _live(block), candidates(block, lambda op: times[id(op)])
    found = found if among is None else [c for c in found if c.name in among]
    best: tuple[tuple[str, ...], StepTimes] | None = None
    seen: set[tuple[str, ...]] = set()
    for order in _ORDERS:
        names = _taken(live, sorted(found, key=order), target)
        if names is None:
            return None  # in no order then
        if names in seen:
            continue
        seen.add(names)
        moved = Offload(names, seconds=seconds, link=link).run(block) if names else block
        step = simulate(moved, seconds, link)
        if best is None or (step.stalls, step.transfer_seconds) < (best[1].stalls, best[1].transfer_seconds):
            best = names, step
    return best


_ORDERS: tuple[Callable[[Candidate], tuple], ...] = (
    lambda c: (-c.seconds, c.name),  # those that rest longest: their copies have most time
    lambda c: (-c.nbytes * c.seconds, c.name),
    lambda c: (-c.nbytes, -c.seconds, c.name),  # few copies
)


def _taken(live: np.ndarray, order: Sequence[Candidate], target: int) -> tuple[str, ...] | None:
    """The first candidates of an order that bring `live` down to `target`, without those that it takes not."""
    live = live.copy()
    taken = []
    for c in order:
        spans = c.over(live)
        if any((span > target).any() for span in spans):
            for span in spans:
                span -= c.nbytes
            taken.append(c)
    if (live > target).any():
        return None
    kept = []
    for c in reversed(taken):
        spans = c.over(live)
        if all((span + c.nbytes <= target).all() for span in spans):
            for span in spans:
                span += c.nbytes
        else:
            kept.append(c)
    return tuple(c.name for c in reversed(kept))


def _live(block: Block) -> np.ndarray:
    return np.array([live for _, live in live_profile(Liveness().run(block), ALIGNMENT)], np.int64)


def candidates(block: Block, seconds: Seconds) -> list[Candidate]:
    """Every value that waits for a later pass and has its storage for itself while it does."""
    freed = Liveness().run(block)
    readers, made = block.consumers(), block.producers()
    starts = np.concatenate([[0.0], np.cumsum([seconds(op) for op in block.operators])])
    resting = {r.value.name: r for r in find_rests(block, block.values())}
    found = []
    for s in storages(freed):
        rests = [resting[n] for n in s.offsets if n in resting]
        if len(rests) != 1:
            continue
        rest = rests[0]
        first = _quiet_from(s, rest, readers, made)
        if first < rest.late[0]:
            spans = [(first, rest.late[0] - 1)]
            if all(made.get(n, -1) < rest.late[0] for n in s.offsets):  # no late reader's result lies in it
                spans += [(a + 1, b - 1) for a, b in pairwise(rest.late) if a + 1 < b]
            rested = float(sum(starts[b + 1] - starts[a] for a, b in spans))
            found.append(Candidate(rest.value.name, aligned(s.nbytes), tuple(spans), rested))
    return found


def _quiet_from(s: Storage, rest: Rest, readers: Mapping[str, list[int]], made: Mapping[str, int]) -> int:
    """The first operator from which on nothing but the resting value keeps a storage; its next reader if none."""
    until = rest.late[0]
    members = [n for n in s.offsets if made.get(n, -1) < until]  # those that come later are made of the value
    touched = [i for n in members for i in (made.get(n, -1), *readers.get(n, ()))]
    others = any(i >= until for n in members if n != rest.value.name for i in readers.get(n, ()))
    return until if others else max(i for i in touched if i < until) + 1


def bare(block: Block) -> Block:
    """A planned block without frees and addresses: the order in which it runs."""
    return block.with_operators([op for op in block.operators if not isinstance(op.op, Free)], addresses={})


def logical_names(lowered: Block, logical: Block) -> dict[str, str]:
    """For each value that waits in a lowered block, the one of the block before by whose name it is offloaded."""
    rests = [r.value.name for r in find_rests(logical, logical.values())]
    there = lowered_names(rests, logical, lowered)
    return {name: n for n in reversed(rests) for name in there[n]}
