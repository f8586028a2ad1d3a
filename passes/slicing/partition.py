"""Data parallelism operator by operator, for steps in which the whole batch meets: each rank has one micro-batch.

Slices of a step need no other slice until all have run (ranks.py).  Where they do, as with batch statistics over all
ranks or losses that compare samples with each other, the ranks have to go through the step side by side: each operator
runs on the rank's rows, and what it needs whole is summed up or gathered right before it.  An operator that cannot run
on rows runs whole on every rank.  What is added up in a rank and what among ranks depends on their number, and so do
the last bits.
"""

from __future__ import annotations

import dataclasses

from ...errors import UsageError
from ...language.axes import Cut, Followed, Partial, advance, piece
from ...language.builder import Builder
from ...language.factors import Place
from ...language.ir import Block, Operator, Role, Value
from ...ops.communication.shard import Shard
from .pieces import Pieces
from .ranks import RankPieces, Share
from .region import Graph, Region


def partitioned(graph: Graph, starts: dict[str, Place], size: int, share: Share) -> Block:
    """A rank's step.  `starts`: the inputs that are cut, and where; UsageError where ranks cannot have equal parts."""
    if size % share.ranks:
        raise UsageError(f"a batch of {size} samples cannot be shared equally among {share.ranks} ranks")
    return _Partition(graph, starts, size, share).run()


class _Partition(RankPieces):
    """Emits the operators of a block on a rank's rows.  Cut values keep their names, partial results get others."""

    def __init__(self, graph: Graph, starts: dict[str, Place], size: int, share: Share) -> None:
        self.followed = Followed({n: Cut(p, size) for n, p in starts.items()}, {}, {}, {})
        region = Region((), {}, self.followed.states, size)
        super().__init__(graph, Builder.on(graph.block), region, (), share)
        self.size = size // share.ranks
        self.start = share.rank * self.size
        self.own: dict[str, Value] = {
            n: dataclasses.replace(v, type=starts[n].resized(v.type, self.size)) for n, v in self.local.items()
        }
        self.local = dict(self.own)
        self.wholes: dict[str, Value] = {}
        self.roles = {v.name: o.role for o in self.block.operators for v in o.writes()}

    def run(self) -> Block:
        """All operators, then what outputs need."""
        for i, o in enumerate(self.block.operators):
            self.b.role = o.role
            self.operator(i, o)
        for name in sorted(self.graph.outputs):
            if isinstance(self.followed.states.get(name), Partial):
                self.b.role = self.roles[name]
                self.whole(self.graph.values[name])
        inputs = tuple(self.local.get(v.name, v) for v in self.block.inputs)
        constants = (*self.block.constants, *self.b.constants)
        return dataclasses.replace(
            self.block, inputs=inputs, operators=tuple(self.b.operators), constants=constants, addresses={}
        )

    def operator(self, i: int, o: Operator) -> None:
        """One operator: on rows, on partial results, or whole."""
        states = dict(self.followed.states)
        advance(self.followed, i, o)
        f = self.followed.factors.get(i)
        followed_states = {v.name: self.followed.states[v.name] for v in o.writes() if v.name in self.followed.states}
        if self.shard_of_sum(o, states):
            return
        if (
            o.op.updates
            or o.op.communicates
            or o.role is Role.OPTIMIZE
            or (f is not None and f.whole)
            or not followed_states
        ):
            self.everywhere(o)
            return
        if f is None:  # linear in partial results
            inputs = tuple(None if v is None else self.own.get(v.name, v) for v in o.inputs)
            self.emit_own(o, Operator(o.op, inputs, o.outputs, o.role))
            return
        operands: list[Value | None] = []
        for v, place in zip(o.inputs, f.inputs, strict=True):
            if v is None or place is None:
                operands.append(None if v is None else self.whole(v) if v.name in states else v)
            elif states.get(v.name) == Cut(place, f.size):
                operands.append(self.own[v.name])
            else:
                operands.append(self.rows(self.whole(v) if v.name in states else v, place))
        types = o.types
        absent = (None,) * (len(f.outputs) - len(o.outputs))
        op, _, outs = piece(o.op, f, self.start, self.size, types[0], (*types[1], *absent))
        outputs = tuple(
            None if v is None or t is None else Value(v.name, t) for v, t in zip(o.outputs, outs, strict=False)
        )
        self.emit_own(o, Operator(op, tuple(operands), outputs, o.role), f.shares)

    def everywhere(self, o: Operator) -> None:
        """An operator that every rank runs whole."""
        inputs = tuple(self.whole(v) if v is not None else None for v in o.inputs)
        self.b.operators.append(dataclasses.replace(o, inputs=inputs))
        for v in o.writes():
            self.followed.states.pop(v.name, None)

    def emit_own(self, o: Operator, made: Operator, shares: tuple[int, ...] = ()) -> None:
        """An operator of the rank; notes its results.  Partial ones give their names to the sums of all ranks."""
        names = {
            v.name: self.b.names.take(f"{v.name}.part")
            for v in o.writes()
            if isinstance(self.followed.states.get(v.name), Partial)
        }
        outputs = tuple(None if v is None else Value(names.get(v.name, v.name), v.type) for v in made.outputs)
        self.b.operators.append(dataclasses.replace(made, outputs=outputs))
        for k, (v, p) in enumerate(zip(o.outputs, outputs, strict=True)):
            if v is None or p is None:
                continue
            if k in shares:
                p = self.b.Mul(p, self.b.constant(1 / self.share.ranks, p))
            self.own[v.name] = p

    def rows(self, v: Value, place: Place) -> Value:
        """The rank's rows of a whole value."""
        return Pieces.cut(self, v, place, {}, self.start, self.size)

    def whole(self, v: Value) -> Value:
        """A value of all ranks: gathered, or added up, once."""
        state = self.followed.states.get(v.name)
        if state is None:
            return v
        if v.name not in self.wholes:
            parts = self.own[v.name]
            if isinstance(state, Cut):
                self.wholes[v.name] = self.gathered([parts], state.place)
            else:
                self.over_ranks(v, parts, state.how)
                total = self.totals.pop(v.name)
                total = self.b.Cast(total, to=v.dtype) if total.dtype != v.dtype else total
                self.wholes[v.name] = self.renamed(total, v)
        return self.wholes[v.name]

    def renamed(self, found: Value, v: Value) -> Value:
        """The result of the last operator under the name of the whole value."""
        last = self.b.operators[-1]
        if found.name == v.name or found not in last.outputs:
            return found
        self.b.operators[-1] = last.renamed({found.name: v.name})
        return Value(v.name, found.type)

    def shard_of_sum(self, o: Operator, states: dict[str, Cut | Partial]) -> bool:
        """Emits a shard of a sum over ranks as one communication; whether it was one."""
        (v, *_) = (*o.reads(), None)
        if v is None or not isinstance(o.op, Shard) or not isinstance(states.get(v.name), Partial):
            return False
        if v.name in self.wholes:
            return False
        self.over_ranks(v, self.own[v.name], states[v.name].how)  # type: ignore[union-attr]
        (output,) = o.writes()
        if output.name not in self.totals:  # others read the sum, too
            self.wholes[v.name] = self.renamed(self.totals.pop(v.name), v)
            return False
        self.renamed(self.totals.pop(output.name), output)
        self.followed.states.pop(output.name, None)
        return True
