"""The operators of a region, slice by slice: inputs cut, outputs joined or added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from ...language.axes import Cut, Partial, piece
from ...language.builder import Builder
from ...language.factors import LOGSUMEXP, MAX, MIN, PROD, SUM, Place
from ...language.ir import Block, Operator, Role, Value
from ...ops.communication.base import Communication, Numbers
from ...ops.linear.products import MatMul
from .region import Region

#: how partial results are combined
_COMBINE = {SUM: "Add", MAX: "Max", MIN: "Min", PROD: "Mul"}


def bounds(size: int, pieces: int) -> list[tuple[int, int]]:
    """Start and size of each slice: equal ones, but for the last where they cannot be."""
    step = -(-size // pieces)
    return [(start, min(step, size - start)) for start in range(0, size, step)]


def sum_type(v: Value, state: Partial) -> str:
    """The element type in which partial results of a value are combined: 16-bit floats are added up in float32."""
    return "f32" if v.dtype in ("f16", "bf16") and state.how == SUM else v.dtype


class Pieces:
    """Emits a region in slices.

    `wanted`: the values that must exist whole afterwards, under their own names.  `again`: operators of the forward
    pass that each slice runs first, as recomputation.
    """

    def __init__(
        self, block: Block, builder: Builder, region: Region, wanted: Collection[str], again: Region | None = None
    ) -> None:
        self.block, self.b, self.region, self.again = block, builder, region, again
        self.wanted = wanted
        self.states = {**(again.states if again else {}), **region.states}
        self.roles = {v.name: o.role for i in region.members for o in (block.operators[i],) for v in o.writes()}
        self.parts: dict[str, list[Value]] = {}
        self.totals: dict[str, Value] = {}
        #: each slice has communications of its own, with numbers of their own
        self.numbers = Numbers(block.operators)

    def emit(self, pieces: int) -> list[Operator]:
        """All slices, one after the other, then the joins."""
        mark = len(self.b.operators)
        for start, size in bounds(self.region.size, pieces):
            self.slice(start, size)
        return self.finished(mark)

    def slice(self, start: int, size: int) -> None:
        """One slice of all operators."""
        cache: dict[object, Value] = {}
        for region, repeated in ((self.again, True), (self.region, False)):
            for i in region.members if region else ():
                self.b.role = Role.RECOMPUTE if repeated else self.block.operators[i].role
                self.one(i, region, cache, start, size)  # type: ignore[arg-type]
                self.emitted(i)

    def emitted(self, i: int) -> None:
        """Is called after the operators of a slice of operator `i` were emitted."""

    def finished(self, mark: int) -> list[Operator]:
        """The operators since `mark`, and the joins, under the names of the whole values."""
        for name, parts in self.parts.items():
            self.b.role = self.roles[name]
            self.join(name, parts)
        for name, v in self.region.written(self.block).items():
            if name in self.totals and self.totals[name].dtype != v.dtype:
                self.b.role = self.roles[name]
                self.totals[name] = self.b.Cast(self.totals[name], to=v.dtype)
        operators = self.b.operators[mark:]
        del self.b.operators[mark:]
        names = {v.name: name for name, v in self.totals.items()}
        return [o.renamed(names) for o in operators]

    def one(self, i: int, region: Region, made: dict[object, Value], start: int, size: int) -> None:
        """One slice of an operator."""
        o, f = self.block.operators[i], region.factors[i]
        types = o.types
        operands: list[Value | None] = [
            self.given(v, made) if v is None or p is None else self.cut(v, p, made, start, size)
            for v, p in zip(o.inputs, f.inputs, strict=True)
        ]
        if o.op.updates:
            self.update(i, tuple(operands))
            return
        absent = (None,) * (len(f.outputs) - len(o.outputs))
        op, _, outs = piece(o.op, f, start, size, types[0], (*types[1], *absent))
        outputs = [
            None if v is None or t is None else Value(self.b.names.take(f"{v.name}#{start}"), t)
            for v, t in zip(o.outputs, outs, strict=False)
        ]
        if isinstance(op, Communication):
            op = dataclasses.replace(op, number=self.numbers.take(op.queue))
        self.b.operators.append(Operator(op, tuple(operands), tuple(outputs), self.b.role))
        for k, (v, p) in enumerate(zip(o.outputs, outputs, strict=True)):
            if v is None or p is None:
                continue
            if k in f.shares:
                p = self.b.Mul(p, self.b.constant(size / f.size, p))
            made[v.name] = p
            if region is self.region and v.name in self.wanted:
                self.keep(v, p)

    def update(self, i: int, given: tuple[Value | None, ...]) -> None:
        """An update of running statistics: of the state itself, once for each slice."""
        self.b.operators.append(dataclasses.replace(self.block.operators[i], inputs=given))

    def given(self, v: Value | None, made: dict[object, Value]) -> Value | None:
        """A value that is not cut: the slice's own where each slice has one, as of a partial result."""
        return made.get(v.name, v) if v is not None and isinstance(self.states.get(v.name), Partial) else v

    def cut(self, v: Value, place: Place, made: dict[object, Value], start: int, size: int) -> Value:
        """The slice of a value."""
        if v.name in made:
            return made[v.name]
        if (v.name, place) in made:
            return made[v.name, place]
        b, n = self.b, self.region.size
        x, axis = v, place.axis
        if place.outer > 1:  # the index is inside an axis: it becomes one of its own
            axis += 1
            shape = (*v.shape[: place.axis], place.outer, n * place.inner, *v.shape[place.axis + 1 :])
            x = b.Reshape(x, shape=shape)
        x = b.Slice(x, starts=(start * place.inner,), ends=((start + size) * place.inner,), axes=(axis,))
        if place.outer > 1:
            x = b.Reshape(x, shape=place.resized(v.type, size).shape)
        made[v.name, place] = x
        return x

    def keep(self, v: Value, part: Value) -> None:
        """Takes note of a slice of a value that is needed whole; partial results are combined at once."""
        state = self.states[v.name]
        if isinstance(state, Cut):
            self.parts.setdefault(v.name, []).append(part)
            return
        assert isinstance(state, Partial)
        before = self.totals.get(v.name)
        part = self.b.Cast(part, to=sum_type(v, state)) if part.dtype != sum_type(v, state) else part
        self.totals[v.name] = part if before is None else self.combined(before, part, state.how)

    def combined(self, before: Value, part: Value, how: str) -> Value:
        """The partial result so far and that of one more slice; a matrix product is added to what is there."""
        last = self.b.operators[-1]
        product = isinstance(last.op, MatMul) and last.outputs == (part,) and all(v.ndim == 2 for v in last.reads())
        if how == SUM and product and isinstance(last.op, MatMul):
            self.b.operators.pop()
            return self.b.Gemm(*last.inputs, before, transA=last.op.transA, transB=last.op.transB)
        if how == LOGSUMEXP:
            both = self.b.Concat(*(self.b.Reshape(v, shape=(1, *v.shape)) for v in (before, part)), axis=0)
            return self.b.ReduceLogSumExp(both, axes=(0,), keepdims=0)
        return getattr(self.b, _COMBINE[how])(before, part)

    def join(self, name: str, parts: Sequence[Value]) -> None:
        """A whole value from its slices."""
        state = self.states[name]
        assert isinstance(state, Cut)
        b, place = self.b, state.place
        seen, axis = self.opened(parts, place)
        joined = b.Concat(*seen, axis=axis)
        if place.outer > 1:
            joined = b.Reshape(joined, shape=place.resized(parts[0].type, self.region.size).shape)
        self.totals[name] = joined

    def opened(self, parts: Sequence[Value], place: Place) -> tuple[list[Value], int]:
        """Slices with the index as an axis of its own, which it is not if it is inside one; and that axis."""
        if place.outer == 1:
            return list(parts), place.axis
        seen = []
        for p in parts:
            lead, rest = p.shape[: place.axis], p.shape[place.axis + 1 :]
            seen.append(self.b.Reshape(p, shape=(*lead, place.outer, p.shape[place.axis] // place.outer, *rest)))
        return seen, place.axis + 1


def needed_again(block: Block, forward: Region, backward: Region, kept: Collection[str]) -> Region | None:
    """The operators of a region of the forward pass that each slice of the backward pass has to run again.

    `kept`: values that exist whole, of which slices are read.
    """
    makers = {v.name: i for i in forward.members for v in block.operators[i].writes()}
    written = backward.written(block)
    need = {v.name for i in backward.members for v in block.operators[i].reads() if v.name not in written}
    members: list[int] = []
    for i in reversed(forward.members):
        o = block.operators[i]
        if any(v.name in need and v.name not in kept and makers[v.name] == i for v in o.writes()):
            members.append(i)
            need.update(v.name for v in o.reads())
    return dataclasses.replace(forward, members=tuple(members[::-1])) if members else None
