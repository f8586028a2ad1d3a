"""Parameters that are gathered again, so that they need not stay from the forward to the backward pass (ZeRO 3)."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from ...language.builder import Names
from ...language.ir import Block, Operator, Role, Value
from ...ops.communication.base import Numbers
from ...ops.communication.collectives import AllGather
from ..base import Pass


class Regather(Pass):
    """Repeat gathers that may be repeated (`AllGather.repeat`) before each run of uses.

    Uses belong to one run unless `between` other values that are gathered and repeated are used in between.  Values of
    at most `small` bytes are gathered once.
    """

    between: int = 2
    small: int = 64 << 10

    def run(self, block: Block) -> Block:
        """The block itself without gathers that may be repeated."""
        chains = [c for c in _chains(block) if c.nbytes > self.small]
        return block if not chains else _Repeating(block, chains, self.between).block()


@dataclass(frozen=True)
class _Chain:
    """A gather, its wait, and views of it, by position; `uses`: the other operators that read them."""

    members: tuple[int, ...]
    uses: tuple[int, ...]
    shard: str
    nbytes: int


def _chains(block: Block) -> Iterable[_Chain]:
    """The chains of all gathers that may be repeated."""
    consumers = block.consumers()
    for i, o in enumerate(block.operators):
        if not (isinstance(o.op, AllGather) and o.op.repeat):
            continue
        members, uses, todo = [i], [], [i]
        while todo:
            for v in block.operators[todo.pop()].writes():
                for j in consumers.get(v.name, ()):
                    if j in members:
                        continue
                    if _only_of(block.operators[j], v):
                        members.append(j)
                        todo.append(j)
                    else:
                        uses.append(j)
        names = {v.name for j in members for v in block.operators[j].writes()}
        if uses and not names.intersection(block.outputs):
            (out,), (shard,) = o.writes(), o.reads()
            yield _Chain(tuple(sorted(members)), tuple(sorted(set(uses))), shard.name, out.nbytes)


def _only_of(o: Operator, v: Value) -> bool:
    """Whether an operator is the wait for a value, or moves nothing but it: a lookup in it reads indices, too."""
    return o.op.communicates == "wait" or (o.op.moves_data and all(r.name == v.name for r in o.reads()))


class _Repeating:
    """The block with gathers before each run of uses."""

    def __init__(self, block: Block, chains: list[_Chain], between: int) -> None:
        self.old, self.chains, self.between = block, chains, between
        self.names = Names(block.values())
        self.numbers = Numbers(block.operators)
        #: operators to insert before a position, and other inputs of the operators that use them
        self.inserted: dict[int, list[Operator]] = {}
        self.reading: dict[int, dict[str, Value]] = {}
        self.updated = self._first_updates()

    def _first_updates(self) -> dict[str, int]:
        updates: dict[str, int] = {}
        for i, o in enumerate(self.old.operators):
            for v in o.writes() if o.op.updates else ():
                updates.setdefault(v.name, i)
        return updates

    def block(self) -> Block:
        """All runs but the first get a gather of their own."""
        events = sorted((at, k) for k, c in enumerate(self.chains) for at in c.uses)
        for k, chain in enumerate(self.chains):
            for run in self.runs(k, chain, events)[1:]:
                self.repeat(chain, run)
        operators: list[Operator] = []
        for i, o in enumerate(self.old.operators):
            operators += self.inserted.get(i, ())
            if isinstance(o.op, AllGather) and o.op.repeat:
                o = dataclasses.replace(o, op=dataclasses.replace(o.op, repeat=False))
            operators.append(o.reading(self.reading[i]) if i in self.reading else o)
        return self.old.with_operators(operators)

    def runs(self, k: int, chain: _Chain, events: list[tuple[int, int]]) -> list[list[int]]:
        """The uses of one chain, cut where enough others are used in between."""
        result: list[list[int]] = [[chain.uses[0]]]
        others: set[int] = set()
        at = chain.uses[0]
        mine = set(chain.uses[1:])
        for place, other in events[bisect_right(events, (at, len(events))) :]:
            if other != k:
                others.add(other)
            elif place in mine:
                if len(others) >= self.between:
                    result.append([])
                result[-1].append(place)
                others = set()
        return result

    def repeat(self, chain: _Chain, uses: list[int]) -> None:
        """A gather before a run of uses, and before the shard is updated."""
        at = min(uses[0], self.updated.get(chain.shard, uses[0]))
        role = self.old.operators[uses[0]].role
        role = Role.BACKWARD if role is Role.OPTIMIZE else role
        renamed: dict[str, Value] = {}
        for i in chain.members:
            o = self.old.operators[i]
            op = o.op
            if isinstance(op, AllGather):
                op = dataclasses.replace(op, number=self.numbers.take(op.queue), repeat=False)
            outputs = tuple(None if v is None else Value(self.names.take(f"{v.name}.again"), v.type) for v in o.outputs)
            self.inserted.setdefault(at, []).append(Operator(op, o.reading(renamed).inputs, outputs, role))
            pairs = zip(o.outputs, outputs, strict=True)
            renamed.update((v.name, w) for v, w in pairs if v is not None and w is not None)
        for i in uses:
            self.reading.setdefault(i, {}).update(renamed)
