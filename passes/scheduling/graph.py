"""The scheduler's graph: dependencies between operators, and the buffers that each one accesses.

Everything is a number: operators by their place in the given order, buffers by order of appearance.  A buffer is alive
from the first operator that touches it to the last one, so a program read backwards is a program of the same kind, and
whatever moves operators up also moves them down.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...language.ir import Block, Operator, Role, Value
from ...language.verify_addresses import ALIGNMENT, aligned
from ..cleanup.commit_updates import checking_operators


@dataclass(frozen=True)
class Graph:
    """Operators 0..n-1 in the given order.

    `follows[i]`, `leads[i]`: operators that must run before, after i.  `touches[i]`: buffers that i reads or writes.
    `size`, `opened`, `kept`: bytes of each buffer; whether it is alive before the first operator, after the last one.
    `scratch[i]`: bytes that i needs while it runs.  `takes[i]`: buffers whose place the result of i may take, and
    the bytes that this saves.  `backward`: whether the order of time is turned round.
    """

    follows: list[tuple[int, ...]]
    leads: list[tuple[int, ...]]
    touches: list[tuple[int, ...]]
    touched_by: list[tuple[int, ...]]
    size: list[int]
    opened: list[bool]
    kept: list[bool]
    scratch: list[int]
    takes: list[tuple[tuple[int, ...], int]]
    backward: bool = False

    def __len__(self) -> int:
        return len(self.touches)

    def reversed(self) -> Graph:
        """The same program backwards; operator i becomes n-1-i."""
        n = len(self)

        def flip(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
            return [tuple(n - 1 - i for i in row) for row in reversed(rows)]

        return Graph(
            flip(self.leads),
            flip(self.follows),
            self.touches[::-1],
            [tuple(n - 1 - i for i in reversed(row)) for row in self.touched_by],
            self.size,
            self.kept,
            self.opened,
            self.scratch[::-1],
            self.takes[::-1],
            not self.backward,
        )

    def profile(self, order: Iterable[int], walk: Walk | None = None) -> list[int]:
        """Live bytes while each operator of `order` runs, from the start or from where `walk` is."""
        walk = walk or Walk(self)
        levels = []
        for i in order:
            levels.append(walk.running(i))
            walk.step(i)
        return levels

    def bound(self, moments: Iterable[int] = ()) -> int:
        """No order has a lower peak: what an operator touches is alive while it runs.

        `moments`: operators of which it is also asked what else must be alive then.
        """
        always = sum(s for s, o, k in zip(self.size, self.opened, self.kept, strict=True) if o and k)
        most = 0
        for touched, scratch, (places, saved) in zip(self.touches, self.scratch, self.takes, strict=True):
            need = sum(self.size[b] for b in touched if not (self.opened[b] and self.kept[b]))
            most = max(most, need + scratch - (saved if places else 0))
        return max([always + most, *map(self.alive_at, moments)])

    def alive_at(self, i: int) -> int:
        """Bytes that are alive while operator i runs, in any order.

        Those that it touches, and those that something that must run before it and something that must run after it do.
        """
        before, after = (
            {b for j in _reached(edges, i) for b in self.touches[j]}.union(itertools.compress(itertools.count(), ends))
            for edges, ends in ((self.follows, self.opened), (self.leads, self.kept))
        )
        alive = (before & after).union(self.touches[i])
        places, saved = self.takes[i]
        return sum(self.size[b] for b in alive) + self.scratch[i] - (saved if places else 0)


def _reached(edges: Sequence[tuple[int, ...]], start: int) -> Iterator[int]:
    """The operators that are reached from one, by one edge or more."""
    found, stack = bytearray(len(edges)), list(edges[start])
    while stack:
        i = stack.pop()
        if not found[i]:
            found[i] = 1
            stack += edges[i]
    return itertools.compress(itertools.count(), found)


class Walk:
    """A set of operators that have run, the bytes that are alive after them, and what running one more would do."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.done = bytearray(len(graph))
        self.waits = [len(f) for f in graph.follows]
        self.seen = [int(o) for o in graph.opened]
        self.left = [len(t) + int(k) for t, k in zip(graph.touched_by, graph.kept, strict=True)]
        self.live = sum(s for s, o in zip(graph.size, graph.opened, strict=True) if o)

    def running(self, i: int) -> int:
        """Live bytes while operator i runs, were it the next one."""
        g, seen = self.graph, self.seen
        total = self.live + g.scratch[i]
        for b in g.touches[i]:
            if not seen[b]:
                total += g.size[b]
        places, saved = g.takes[i]
        if places:
            count, alone = (seen, 0) if g.backward else (self.left, 1)
            for b in places:
                if count[b] == alone:
                    return total - saved
        return total

    def change(self, i: int) -> int:
        """Live bytes after operator i less those before it."""
        seen, left, size = self.seen, self.left, self.graph.size
        total = 0
        for b in self.graph.touches[i]:
            if not seen[b]:
                total += size[b]
            if left[b] == 1:
                total -= size[b]
        return total

    def step(self, i: int) -> None:
        """Runs operator i."""
        g, seen, left, live = self.graph, self.seen, self.left, self.live
        for b in g.touches[i]:
            if not seen[b]:
                live += g.size[b]
            if left[b] == 1:
                live -= g.size[b]
            seen[b] += 1
            left[b] -= 1
        self.live = live
        for j in g.leads[i]:
            self.waits[j] -= 1
        self.done[i] = 1

    def undo(self, i: int) -> None:
        """Takes back `step(i)`, the latest one."""
        for b in self.graph.touches[i]:
            self.seen[b] -= 1
            self.left[b] += 1
        for j in self.graph.leads[i]:
            self.waits[j] += 1
        self.done[i] = 0
        self.live -= self.change(i)

    def ready(self, i: int) -> bool:
        """Whether operator i may be the next one."""
        return not self.waits[i] and not self.done[i]


def graph_of(block: Block) -> Graph:
    """The graph of a block without frees.  Views share their input's buffer, as the memory plan will have it."""
    buffers = _Buffers(block)
    follows = _dependencies(block)
    leads: list[list[int]] = [[] for _ in follows]
    for i, before in enumerate(follows):
        for j in before:
            leads[j].append(i)
    rows = [buffers.add(op) for op in block.operators]
    touched_by: list[list[int]] = [[] for _ in buffers.size]
    for i, (touched, _) in enumerate(rows):
        for b in touched:
            touched_by[b].append(i)
    kept = [False] * len(buffers.size)
    for name in block.outputs:
        if name in buffers.of:
            kept[buffers.of[name]] = True
    opened = [o and (k or bool(t)) for o, k, t in zip(buffers.opened, kept, touched_by, strict=True)]
    scratch = [sum(aligned(t.nbytes) for t in op.workspace()) for op in block.operators]
    return Graph(
        follows,
        [tuple(x) for x in leads],
        [touched for touched, _ in rows],
        [tuple(x) for x in touched_by],
        buffers.size,
        opened,
        kept,
        scratch,
        [takes for _, takes in rows],
    )


def _dependencies(block: Block) -> list[tuple[int, ...]]:
    """Operators that each operator must follow.

    A reader follows the writer; an operator that updates state in place follows the update before it and all that
    has read the state since.  Operators that communicate keep their order: it is the same on every device.  So do those
    that may refuse what they read, and updates that stand behind the last of them stay there.
    """
    checking = checking_operators(block)
    last = checking[-1] if checking else -1
    previous = dict(zip(checking, [-1, *checking], strict=False))
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    sent = -1
    edges: list[tuple[int, ...]] = []
    for i, op in enumerate(block.operators):
        before = {writer[v.name] for v in op.reads() if v.name in writer}
        before.add(previous.get(i, -1))
        if op.role is Role.COMMUNICATE or op.op.communicates:
            before.add(sent)
            sent = i
        for v in op.reads():
            readers.setdefault(v.name, []).append(i)
        for v in op.writes():
            if op.op.updates:
                before.add(last if last < i else -1)
                before.update(readers.pop(v.name, ()))
                before.add(writer.get(v.name, -1))
            writer[v.name] = i
        edges.append(tuple(sorted(before - {i, -1})))
    return edges


class _Buffers:
    """Assigns a buffer to each value of the arena."""

    def __init__(self, block: Block) -> None:
        self.persistent = {v.name for v in block.persistent()}
        self.of: dict[str, int] = {}
        self.size: list[int] = []
        self.opened: list[bool] = []
        for v in block.inputs:
            self.new(v, opened=True)

    def new(self, v: Value, opened: bool = False) -> None:
        self.of[v.name] = len(self.size)
        self.size.append(0 if v.type.host else aligned(v.nbytes))
        self.opened.append(opened)

    def add(self, op: Operator) -> tuple[tuple[int, ...], tuple[tuple[int, ...], int]]:
        """The buffers that an operator touches, and (those whose place its result may take, bytes saved)."""
        base = None if not op.inputs or op.inputs[0] is None else self.of.get(op.inputs[0].name)
        offsets = op.views() if base is not None else ()
        fresh = set()
        for i, v in enumerate(op.outputs):
            if v is None or v.name in self.persistent:
                continue
            offset = offsets[i] if i < len(offsets) else None
            if base is not None and offset is not None and offset % ALIGNMENT == 0:
                self.of[v.name] = base
            else:
                self.new(v)
                fresh.add(v.name)
        touched = dict.fromkeys(self.of[v.name] for v in (*op.reads(), *op.writes()) if v.name in self.of)
        return tuple(touched), self.places(op, fresh)

    def places(self, op: Operator, fresh: set[str]) -> tuple[tuple[int, ...], int]:
        """Inputs' buffers of the same type whose place a result may take when they die, and the bytes saved.

        Of several results the largest that may take one: the memory plan may find places for more of them.
        """
        used = [None if v is None else self.of.get(v.name) for v in op.inputs]
        best: tuple[tuple[int, ...], int] = ((), 0)
        for at, out in enumerate(op.outputs):
            if out is None or out.name not in fresh:
                continue
            size = self.size[self.of[out.name]]
            buffers = []
            for k in op.op.overwrites(at) if size > best[1] else ():
                v, b = (op.inputs[k], used[k]) if k < len(op.inputs) else (None, None)
                if v is not None and b is not None and v.type == out.type:
                    buffers += [b] if self.size[b] == size and used.count(b) == 1 else []
            if buffers:
                best = tuple(buffers), size
        return best
