"""Communication beside computation: it begins as early as it can, and is awaited as late as it need be.

Gradients are sent as soon as they are there, while the backward pass goes on; the sum, the update and what else follows
come some communications later, so that few of them are in flight at a time.  Values that computation waits for, such
as gathered parameters, are requested some communications ahead of their first use.

Communications of one channel keep the order that they have before operators are moved: it is the same on all ranks,
while the order of computation need not be (a part of a value may be a view on one rank, and a copy on another).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from ...language.ir import Block, Operator, Role
from ...ops.communication.base import Communication
from ...ops.communication.messages import Message
from ...ops.communication.row_sums import RowSums
from ...ops.communication.shard import Shard
from ...ops.communication.tree_sum import TreeSum
from ...ops.elementwise.arithmetic import Add
from ...ops.shape.reshape import Cast
from ..base import Pass
from ..cleanup.commit_updates import checking_operators


class Overlap(Pass):
    """Move begins and waits of communication away from each other; computation keeps its order.

    `ahead`: how many communications are requested before the one that computation needs; `behind`: how many more have
    begun on a channel when one is awaited that only updates need.  Blocks without communication are unchanged.
    """

    ahead: int = 2
    behind: int = 1

    def run(self, block: Block) -> Block:
        if not any(o.op.communicates for o in block.operators):
            return block
        placing = _Placing(block, self.ahead, self.behind)
        order = list(placing.order())
        return block.with_operators([block.operators[i] for i in order], addresses={})


def _light(o: Operator) -> bool:
    """Whether an operator may stand behind a communication that computation does not wait for."""
    if o.role is Role.OPTIMIZE or o.op.updates or o.op.communicates or o.op.moves_data:
        return True
    return isinstance(o.op, (TreeSum, RowSums, Shard, Cast))


class _Placing:
    """The order of a block's operators, by position.

    `late`: operators of which nothing but updates and outputs is made, by light ones alone: sums over ranks, and what
    follows them and feeds them.  `early`: begins and what feeds them, waits and views of what computation waits for.
    All others keep their order.
    """

    def __init__(self, block: Block, ahead: int, behind: int) -> None:
        self.operators, self.ahead, self.behind = block.operators, ahead, behind
        self.before = _dependencies(block)
        self.after: list[list[int]] = [[] for _ in self.before]
        for i, edges in enumerate(self.before):
            for j in edges:
                self.after[j].append(i)
        #: messages between stages, and their waits: they stand where the schedule of the pipeline puts them
        self.messages = _messages(block)
        self.late = self._late()
        self.early = self._early()
        self._keep_channels_in_order()
        self.done = [False] * len(self.operators)
        self.missing = [len(edges) for edges in self.before]
        #: late operators whose inputs are there
        self.ready = [i for i in self.late if not self.missing[i]]
        heapify(self.ready)
        #: late waits: how many communications had begun on their channel when theirs did
        self.flying: deque[tuple[int, str, int]] = deque()
        self.begun: dict[str, int] = {}

    def _late(self) -> set[int]:
        positions: set[int] = set()
        for i in reversed(range(len(self.operators))):
            light = _light(self.operators[i]) or self._adds_sums(i)
            if light and i not in self.messages and all(j in positions for j in self.after[i]):
                positions.add(i)
        return self._connected(positions, {i for i in positions if self._begins(i)})

    def _adds_sums(self, i: int) -> bool:
        """Whether an operator adds up sums over ranks, as of the shards of several micro-batches."""
        sources = [self.operators[j].op for j in self.before[i]]
        sums = any(isinstance(op, (TreeSum, RowSums)) or op.communicates == "wait" for op in sources)
        return sums and isinstance(self.operators[i].op, Add)

    def _connected(self, among: set[int], starts: set[int]) -> set[int]:
        """The operators of a set that lead to some of them, or follow from them."""
        positions = set(starts)
        for i in sorted(among):
            if any(j in positions for j in self.before[i]):
                positions.add(i)
        for i in sorted(among, reverse=True):
            if any(j in positions for j in self.after[i]):
                positions.add(i)
        return positions

    def _early(self) -> set[int]:
        """Communication that computation waits for: begins, waits and views, and casts that feed begins alone."""
        positions: set[int] = set()
        for i, o in enumerate(self.operators):
            if i in self.late or i in self.messages:
                continue
            if o.op.communicates or (
                o.op.moves_data and self.before[i] and all(j in positions for j in self.before[i])
            ):
                positions.add(i)
        for i in reversed(range(len(self.operators))):
            o = self.operators[i]
            feeds = self.after[i] and all(self._begins(j) and j in positions for j in self.after[i])
            if feeds and i not in positions and i not in self.late and i not in self.messages and _light(o):
                positions.add(i)
        return positions

    def _keep_channels_in_order(self) -> None:
        """A collective comes after the one before it on its channel, whatever waits for it."""
        latest: dict[str, int] = {}
        for i, o in enumerate(self.operators):
            if not isinstance(o.op, Communication) or i in self.messages:
                continue
            before = latest.get(o.op.queue)
            if before is not None and before not in self.before[i]:
                self.before[i] = sorted((*self.before[i], before))
                self.after[before].append(i)
            latest[o.op.queue] = i

    def _begins(self, i: int) -> bool:
        return isinstance(self.operators[i].op, Communication)

    def order(self) -> Iterator[int]:
        """The positions, each once."""
        main = [i for i in range(len(self.operators)) if i not in self.late and i not in self.early]
        requests, first = self._requests(main)
        asked = 0
        yield from self._drained()
        for place, i in enumerate(main):
            if i in first or not place:
                asked_for = first.get(i, -1)
                while asked < min(asked_for + 1 + self.ahead, len(requests)):
                    needed = self._needed(requests[asked])
                    if asked > asked_for and any(j not in self.early for j in needed):
                        break  # what feeds it is computed later
                    for j in needed:
                        yield from self._emitted(j)
                    asked += 1
            yield from self._with_needs(i)
            yield from self._drained()
        for i in sorted(self.early):
            yield from self._with_needs(i)
        yield from self._drained()
        while self.flying:
            yield from self._emitted(self.flying.popleft()[0])
            yield from self._drained()

    def _requests(self, main: list[int]) -> tuple[list[int], dict[int, int]]:
        """The begins that computation needs, in the order in which it does; and for each operator that is the first to
        need some, the last of them."""
        requests: list[int] = []
        first: dict[int, int] = {}
        seen: set[int] = set()
        for i in main:
            stack, mine = [i], []
            while stack:
                for j in self.before[stack.pop()]:
                    if j in self.early and j not in seen:
                        seen.add(j)
                        stack.append(j)
                        mine.append(j)
            begins = sorted(filter(self._begins, mine))
            if begins:
                requests += begins
                first[i] = len(requests) - 1
        return requests, first

    def _needed(self, i: int) -> list[int]:
        """The operators that have to run before operator i, in order, and i itself as the last."""
        positions, stack, seen = [], [i], {i}
        while stack:
            at = stack.pop()
            positions.append(at)
            for j in self.before[at]:
                if not self.done[j] and j not in seen:
                    seen.add(j)
                    stack.append(j)
        return sorted(positions)

    def _with_needs(self, i: int) -> Iterator[int]:
        """An operator, and before it what it needs."""
        for j in self._needed(i) if not self.done[i] else ():
            yield from self._emitted(j)

    def _emitted(self, i: int) -> Iterator[int]:
        if self.done[i]:
            return
        self.done[i] = True
        op = self.operators[i].op
        if isinstance(op, Communication):
            self.begun[op.queue] = self.begun.get(op.queue, 0) + 1
        yield i
        for j in self.after[i]:
            self.missing[j] -= 1
            if not self.missing[j] and j in self.late:
                heappush(self.ready, j)

    def _drained(self) -> Iterator[int]:
        """Late operators whose turn it is: all whose inputs are there, but waits only after some communications."""
        while True:
            while self.ready:
                i = heappop(self.ready)
                if self.done[i]:
                    continue
                if self.operators[i].op.communicates == "wait":
                    queue = self._queue_of(i)
                    self.flying.append((i, queue, self.begun[queue]))
                else:
                    yield from self._emitted(i)
            due = next((f for f in self.flying if self.begun[f[1]] - f[2] >= self.behind), None)
            if due is None:
                return
            self.flying.remove(due)
            yield from self._emitted(due[0])

    def _queue_of(self, wait: int) -> str:
        """The channel of what a wait waits for."""
        target = self.operators[wait].inputs[0]
        operators = (self.operators[j] for j in self.before[wait])
        ops = [o.op for o in operators if isinstance(o.op, Communication) and target in o.outputs]
        assert ops
        return ops[0].queue


def _messages(block: Block) -> set[int]:
    """The positions of messages and of their waits."""
    targets: set[str] = set()
    positions: set[int] = set()
    for i, o in enumerate(block.operators):
        if isinstance(o.op, Message):
            targets.update(v.name for v in o.writes())
            positions.add(i)
        elif o.op.communicates == "wait" and next(o.reads()).name in targets:
            positions.add(i)
    return positions


def _dependencies(block: Block) -> list[list[int]]:
    """For each operator, those that must come before it: writers of what it reads, readers of what it updates, and for
    updates the last check before them, so that a step that fails has changed nothing."""
    checking = checking_operators(block)
    last = checking[-1] if checking else len(block.operators)
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    edges: list[list[int]] = []
    for i, o in enumerate(block.operators):
        before = {writer[v.name] for v in (*o.reads(), *o.writes()) if v.name in writer}
        if o.op.updates:
            before.update([last] if last < i else ())
            for v in o.writes():
                before.update(readers.get(v.name, ()))
        for v in o.reads():
            readers.setdefault(v.name, []).append(i)
        for v in o.writes():
            writer[v.name] = i
            if o.op.updates:
                readers[v.name] = []
        before.discard(i)
        edges.append(sorted(before))
    return edges
