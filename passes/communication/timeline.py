"""When each rank computes, waits and communicates: the programs of all ranks simulated together.

Each rank runs its operators in order, in the time that they are priced at.  A communication starts when all its members
have begun it and the one before it on the channel is done, and takes what the links take (the α-β model of
communication/links.py).  A wait ends with it.  What a rank waits because another has not begun is a pause, the bubble
of a pipeline; what it waits while data move is communication that nothing hides.  Ranks that do the same at the same
time are one class (communication/verify_ranks.py), of which one rank is simulated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...communication.events import events
from ...communication.links import Network
from ...communication.matching import Begun, Matcher, Places, run_together
from ...communication.mesh import Mesh
from ...communication.verify_ranks import classes_of, first_of, places_of
from ...language.ir import Block, Operator, Role
from ...ops.communication.base import Communication

#: kinds of a rank's activities
FORWARD, BACKWARD, RECOMPUTE, UPDATE, COMMUNICATE, PAUSE = (
    "forward", "backward", "recompute", "update", "communicate", "pause",
)  # fmt: skip
_KINDS = {Role.FORWARD: FORWARD, Role.LOSS: FORWARD, Role.BACKWARD: BACKWARD, Role.RECOMPUTE: RECOMPUTE,
          Role.OPTIMIZE: UPDATE, Role.COMMUNICATE: UPDATE}  # fmt: skip
_MICRO_BATCH = re.compile(r"#(\d+)")


@dataclass(frozen=True)
class Span:
    """A rank's activity from `start` to `end` (seconds); `micro_batch`: the number of its first sample, -1: of none;
    `operators`: the first of the operators that run, and the one behind the last."""

    start: float
    end: float
    kind: str
    micro_batch: int = -1
    operators: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Timeline:
    """The step of all ranks.  `classes`: the class of each rank; `spans`: what the ranks of each class do; `seconds`:
    until the last rank has ended.

    `bubble`: the share of the ranks' time in which they wait for others to begin; `exposed_seconds`: how long the rank
    that waits longest for data that move waits for them.
    """

    classes: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    seconds: float
    bubble: float
    exposed_seconds: float

    def of(self, rank: int) -> tuple[Span, ...]:
        """The spans of a rank, in order."""
        return self.spans[self.classes[rank]]

    def busy(self, rank: int) -> float:
        """Seconds in which a rank computes."""
        return sum(s.end - s.start for s in self.of(rank) if s.kind not in (COMMUNICATE, PAUSE))

    def spent(self, rank: int, kind: str) -> float:
        """Seconds that a rank spends with what is of one kind."""
        return sum(s.end - s.start for s in self.of(rank) if s.kind == kind)


def timeline(
    blocks: Sequence[Block], mesh: Mesh, seconds: Callable[[Operator], float], network: Network | None
) -> Timeline:
    """Simulates a step.  `blocks[rank]`: a rank's program; `seconds`: the time of an operator.

    `network` None: communication takes no time.  VerifyError if the ranks would wait for ever.  Linear in the operators
    of different programs and the communications of all classes.
    """
    different = {id(b): b for b in blocks}
    seen = {name: events(b) for name, b in different.items()}
    classes = classes_of([(str(id(b)), seen[id(b)]) for b in blocks], mesh)
    first = first_of(classes)
    items: dict[int, list[_Item]] = {}
    for rank in first:
        if id(blocks[rank]) not in items:
            items[id(blocks[rank])] = _items(blocks[rank], seconds, mesh, network, rank)
    return _Simulation(places_of(classes, mesh), classes, [items[id(blocks[rank])] for rank in first]).run()


@dataclass(frozen=True)
class _Item:
    """Computation of one kind, or the begin of a communication (`op`), or a wait for the begin of item `waits`;
    `first`, `behind`: the operators."""

    seconds: float
    first: int
    behind: int
    kind: str = ""
    micro_batch: int = -1
    op: Communication | None = None
    types: tuple[str, str] = ("", "")
    waits: int = -1


def _items(
    block: Block, seconds: Callable[[Operator], float], mesh: Mesh, network: Network | None, rank: int
) -> list[_Item]:
    """A program, with neighbours of one kind and micro-batch as one item."""
    items: list[_Item] = []
    begun: dict[str, int] = {}
    for i, o in enumerate(block.operators):
        if isinstance(o.op, Communication) and o.op.ranks > 1:
            out = next(o.writes())
            sent = next((v.type for v in o.reads()), None)
            takes = 0.0 if network is None else network.transfer(o.op, sent, out.type, mesh, rank).seconds
            begun[out.name] = len(items)
            items.append(_Item(takes, i, i + 1, op=o.op, types=("" if sent is None else str(sent), str(out.type))))
        elif o.op.communicates == "wait" and (name := next(o.reads()).name) in begun:
            items.append(_Item(0.0, i, i + 1, waits=begun[name]))
        elif (time := seconds(o)) > 0:
            kind, number = _KINDS[o.role], micro_batch_of(o)
            last = items[-1] if items else None
            if last is not None and last.kind == kind and (number in (last.micro_batch, -1)):  # sums are of no one
                items[-1] = _Item(last.seconds + time, last.first, i + 1, kind, last.micro_batch)
            else:
                items.append(_Item(time, i, i + 1, kind, number))
    return items


def micro_batch_of(o: Operator) -> int:
    """The number of the first sample of the slice that an operator belongs to, which is in its results' names; -1: of
    none."""
    named = (m for v in o.writes() if (m := _MICRO_BATCH.search(v.name)))
    match = next(named, None)
    return -1 if match is None else int(match[1])


class _Simulation:
    """All classes of ranks, each with a clock of its own.  `items[class]`: what its ranks go through."""

    def __init__(self, places: Places, classes: Sequence[int], items: Sequence[list[_Item]]) -> None:
        self.classes, self.items = classes, items
        self.clock = [0.0] * len(items)
        self.spans: list[list[Span]] = [[] for _ in items]
        self.exposed, self.paused = [0.0] * len(items), [0.0] * len(items)
        #: when a channel of a class is free again
        self.free: dict[tuple[int, str], float] = {}
        self.matcher = Matcher(places, self.done)

    def run(self) -> Timeline:
        run_together(self.matcher, {c: self.steps(c) for c in range(len(self.items))})
        total = max(self.clock, default=0.0)
        idle = [paused + total - end for paused, end in zip(self.paused, self.clock, strict=True)]
        bubble = sum(idle[c] for c in self.classes) / (total * len(self.classes)) if total else 0.0
        spans = tuple(map(tuple, self.spans))
        return Timeline(tuple(self.classes), spans, total, bubble, max(self.exposed, default=0.0))

    def done(self, members: list[Begun]) -> None:
        """All members have begun: sets when data begin and end to move."""
        keys = [(m.actor, m.op.queue) for m in members]
        start = max([*(m.payload[0] for m in members), *(self.free.get(k, 0.0) for k in keys)])
        end = start + max(m.payload[1] for m in members)
        for m, key in zip(members, keys, strict=True):
            m.payload = (start, end)
            self.free[key] = end

    def steps(self, c: int) -> Iterator[Begun]:
        """Runs a class's program; yields the communications that it waits for."""
        begun: dict[int, Begun] = {}
        for at, item in enumerate(self.items[c]):
            if item.op is not None:
                begun[at] = Begun(c, item.op, at, item.types, (self.clock[c], item.seconds))
                self.matcher.begin(begun[at])
            elif item.waits >= 0:
                wanted = begun.pop(item.waits)
                yield wanted
                start, end = wanted.payload
                self.waited(c, start, end, (item.first, item.behind))
            else:
                end = self.clock[c] + item.seconds
                operators = item.first, item.behind
                self.spans[c].append(Span(self.clock[c], end, item.kind, item.micro_batch, operators))
                self.clock[c] = end

    def waited(self, c: int, start: float, end: float, operators: tuple[int, int]) -> None:
        """A class waits for data that move from `start` to `end`."""
        now = self.clock[c]
        if start > now:
            self.spans[c].append(Span(now, start, PAUSE, -1, operators))
            self.paused[c] += start - now
        begin = max(now, start)
        if end > begin:
            self.spans[c].append(Span(begin, end, COMMUNICATE, -1, operators))
            self.exposed[c] += end - begin
        self.clock[c] = max(now, end)
