"""The axes of operators and blocks: factors of applied operators, the operators of slices, and where an axis goes.

`factors` says along which indices an operator can run in slices; those of a composition follow from its expansion.
`follow` takes an axis of some values through a block: which values are slices along it, which are partial results that
have to be added up, which are the same in every slice, and where a whole value is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import TypeRuleError
from .builder import Builder
from .factors import SUM, Factor, Place
from .ir import Block, Operator, Value, leading_to
from .op import Op
from .types import TensorType

Types = tuple[TensorType | None, ...]


@dataclass(frozen=True)
class Cut:
    """A value of which each slice has its own part: `size` values of the index in all, at `place`."""

    place: Place
    size: int


@dataclass(frozen=True)
class Partial:
    """A value of which each slice has a partial result, combined as `how` says (see `Factor`)."""

    how: str = SUM


State = Cut | Partial


@dataclass(frozen=True)
class Followed:
    """Where an axis goes in a block.

    `states`: the values that are cut or partial; all others are the same in every slice.  `factors`: for an operator
    with a cut input, by its position, the index that is cut.  `cuts`: whole inputs of which it reads a slice, by
    (operator, input).  `needs`: cut or partial inputs that are needed whole: the parts are joined or combined there.
    """

    states: dict[str, State]
    factors: dict[int, Factor]
    cuts: dict[tuple[int, int], Cut]
    needs: dict[tuple[int, int], State]


def factors(op: Op, ins: Sequence[TensorType | None], outs: Sequence[TensorType | None]) -> tuple[Factor, ...]:
    """The indices, of two values or more, along which an operator on these types can run in slices."""
    return tuple(f for f in shared(op, ins, outs) if not f.whole)


def shared(op: Op, ins: Sequence[TensorType | None], outs: Sequence[TensorType | None]) -> tuple[Factor, ...]:
    """The indices that inputs and outputs share, those that are needed whole included."""
    return _factors(op, tuple(ins), tuple(outs))


@functools.lru_cache(maxsize=1 << 14)
def _factors(op: Op, ins: Types, outs: Types) -> tuple[Factor, ...]:
    outs = (*outs, *(None,) * (len(op.infer(*ins)) - len(outs)))
    if not any(t is not None for t in outs):
        return ()
    found = op.axis_factors(ins, outs)
    if found is None:
        return through_expansion(op, ins, outs)
    return tuple(f.fitted(ins, outs) for f in found if f.size > 1)


def piece(
    op: Op, f: Factor, start: int, size: int, ins: Sequence[TensorType | None], outs: Sequence[TensorType | None]
) -> tuple[Op, Types, Types]:
    """The operator of the slice [start, start + size) of a factor, and the types that it reads and writes."""
    given, made = f.types(size, ins, outs)
    return op.sliced(f, start, size, made), given, made


def of_operator(o: Operator) -> tuple[Factor, ...]:
    """The indices that inputs and outputs of an applied operator share (see `shared`)."""
    if "indices" not in o.facts:
        o.facts["indices"] = shared(o.op, *o.types)
    return o.facts["indices"]


# -- where an axis goes -----------------------------------------------------------------------------------------------


def follow(block: Block, starts: Mapping[str, int | Place]) -> Followed:
    """Takes an index through a block, in order: `starts` gives the axis, or the place, that it is of some values."""
    states: dict[str, State] = {}
    values = block.values()
    for name, at in starts.items():
        place = at if isinstance(at, Place) else Place(at)
        states[name] = Cut(place, values[name].shape[place.axis] // (place.outer * place.inner))
    found = Followed(states, {}, {}, {})
    for i, o in enumerate(block.operators):
        advance(found, i, o)
    return found


def advance(found: Followed, i: int, o: Operator) -> None:
    """Takes the index through the next operator, at position `i`: states of its outputs from those of its inputs."""
    states = [None if v is None else found.states.get(v.name) for v in o.inputs]
    if not any(states):
        _write(found, o, [None] * len(o.outputs))
        return
    partial = {k for k, s in enumerate(states) if isinstance(s, Partial)}
    summed = {k for k in partial if states[k] == Partial(SUM)} == partial
    if partial and summed and all(s is None for k, s in enumerate(states) if k not in partial):
        groups = [{k for k in g if k < len(states) and o.inputs[k] is not None} for g in o.op.linear]
        if partial in groups and all(v.type.is_float for v in o.writes()):
            _write(found, o, [Partial(SUM)] * len(o.outputs))
            return
    f = _choose(o, states)
    for k, s in enumerate(states):
        place = None if f is None else f.inputs[k]
        wanted = None if f is None or place is None else Cut(place, f.size)
        if s is not None and (s != wanted or (f is not None and f.whole)):
            found.needs[i, k] = s
        if wanted is not None and s != wanted and f is not None and not f.whole:
            found.cuts[i, k] = wanted
    if f is None:
        _write(found, o, [None] * len(o.outputs))
        return
    found.factors[i] = f
    made = [Cut(p, f.size) if isinstance(p, Place) else None if p is None else Partial(p) for p in f.outputs]
    _write(found, o, made)


def _choose(o: Operator, states: Sequence[State | None]) -> Factor | None:
    """The factor that fits the cut inputs: the one for which the fewest bytes of them have to be joined."""
    cuts = {k: s for k, s in enumerate(states) if isinstance(s, Cut)}
    best: tuple[tuple[int, int], Factor] | None = None
    shares = of_operator(o) if cuts else ()
    for k, s in cuts.items():
        for f in shares:
            fine = matched(f, f.inputs[k], s)
            if fine is None:
                continue
            bad = (o.inputs[j] for j, t in cuts.items() if f.whole or fine.inputs[j] != t.place)
            joined = sum(v.nbytes for v in bad if v is not None)
            price = (joined, sum(not isinstance(p, Place) for p in fine.outputs))
            if best is None or price < best[0]:
                best = price, fine
    return None if best is None else best[1]


def matched(f: Factor, place: Place | str | None, s: Cut) -> Factor | None:
    """The factor, or the part of it, that is at a cut's place in a value where the factor is at `place`."""
    if not isinstance(place, Place):
        return None
    parts = s.place.within(place, s.size, f.size)
    return None if parts is None else f.refined(s.size, *parts)


def _write(found: Followed, o: Operator, states: Sequence[State | None]) -> None:
    for v, s in zip(o.outputs, states, strict=False):
        if v is None:
            continue
        found.states.pop(v.name, None)
        if s is not None:
            found.states[v.name] = s


# -- compositions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Body:
    """The expansion of `op` for these types: operators over inputs `x0`, `x1`, ...

    `outputs` are those that are present, else None.
    """

    op: Op
    ins: Types
    outs: Types
    operators: tuple[Operator, ...]
    constants: dict[str, Any]
    outputs: tuple[Value | None, ...]

    @staticmethod
    def of(op: Op, ins: Types, outs: Types) -> _Body | None:
        """None for an operator without one."""
        b = Builder()
        inputs = [None if t is None else Value(b.names.take(f"x{i}"), t) for i, t in enumerate(ins)]
        made = op.expand(b, *inputs)
        if made is None:
            return None
        wanted = tuple(v if t is not None else None for v, t in zip(made, outs, strict=False))
        constants = {c.value.name: (c.value.type, c.data) for c in b.constants}
        return _Body(op, ins, outs, tuple(leading_to(b.operators, wanted)), constants, wanted)

    def factor(self, i: int, axis: int) -> Factor | None:
        """The factor that is `axis` of input `i`; None where the composition cannot be sliced along it."""
        starts: dict[str, int | Place] = {f"x{i}": axis}
        values = tuple(Value(f"x{k}", t) for k, t in enumerate(self.ins) if t is not None)
        block = Block("body", inputs=values, operators=self.operators)
        names = {v.name for v in block.inputs}
        while True:  # an input that is read in slices is an input that is cut; some day no more are found
            way = follow(block, starts)
            read = {
                v.name: c.place for (k, j), c in way.cuts.items() if (v := block.operators[k].inputs[j]) is not None
            }
            more = {n: p for n, p in read.items() if n in names and n not in starts}
            if way.needs or any(f.shares for f in way.factors.values()):
                return None
            if not more:
                break
            starts |= more
        states = [None if v is None else way.states.get(v.name) for v in self.outputs]
        if any(v is not None and s is None for v, s in zip(self.outputs, states, strict=True)):
            return None
        inputs = tuple(s.place if isinstance(s := way.states.get(f"x{k}"), Cut) else None for k in range(len(self.ins)))
        made = tuple(None if s is None else s.place if isinstance(s, Cut) else s.how for s in states)
        size = next(s.size for s in way.states.values() if isinstance(s, Cut))
        f = Factor(size, inputs, made).fitted(self.ins, self.outs)
        return f if self.is_sliced(f, way) else None

    def is_sliced(self, f: Factor, way: Followed) -> bool:
        """Whether a slice's expansion is the slice of the expansion: for twice the size, which no rule for 1 disturbs.

        So a number that was computed from the size, such as a mean's count, is found.
        """
        large, given, made = piece(self.op, f, 0, 2 * f.size, self.ins, self.outs)
        try:
            if any(t is not None and t != u for t, u in zip(made, large.infer(*given), strict=False)):
                return False
            other = _Body.of(large, given, made)
        except TypeRuleError:
            return False
        if other is None or len(other.operators) != len(self.operators):
            return False
        same: dict[str, str] = {f"x{i}": f"x{i}" for i in range(len(self.ins))}
        same |= {n: m for n, data in self.constants.items() for m, found in other.constants.items() if found == data}
        read = {v.name: c for (k, j), c in way.cuts.items() if (v := self.operators[k].inputs[j]) is not None}
        for k, (a, b) in enumerate(zip(self.operators, other.operators, strict=True)):
            if not _same_operator(a, b, same, way.factors.get(k) or _making(a, read)):
                return False
            same |= {v.name: w.name for v, w in zip(a.writes(), b.writes(), strict=True)}
        pairs = zip(self.outputs, other.outputs, strict=True)
        return all(v is None or (w is not None and same.get(v.name) == w.name) for v, w in pairs)


def through_expansion(op: Op, ins: Types, outs: Types) -> tuple[Factor, ...]:
    """The factors that the expansion has: an axis of an input that goes all the way to the outputs."""
    body = _Body.of(op, ins, outs)
    if body is None:
        return ()
    found: list[Factor] = []
    for i, t in enumerate(ins):
        for axis, d in enumerate(() if t is None else t.shape):
            if d > 1 and all(f.inputs[i] != Place(axis) for f in found):
                f = body.factor(i, axis)
                if f is not None:
                    found.append(f)
    return tuple(found)


def _making(o: Operator, read: Mapping[str, Cut]) -> Factor | None:
    """The factor of an operator that makes, from nothing that is cut, a value that is read in slices."""
    for v in o.writes():
        if v.name in read:
            cut = read[v.name]
            fits = (f for f in of_operator(o) if f.outputs[0] == cut.place and f.size == cut.size)
            return next((f for f in fits if not any(f.inputs) and not f.whole), None)
    return None


def _same_operator(a: Operator, b: Operator, same: Mapping[str, str], f: Factor | None) -> bool:
    """Whether `b` is `a` for twice the size of `f` (None: `a` itself), at any start, on the same inputs."""
    names = [None if v is None else same.get(v.name) for v in a.inputs]
    if names != [None if v is None else v.name for v in b.inputs] or (None in names and None not in a.inputs):
        return False
    if f is None:
        return a.op == b.op and a.types[1] == b.types[1]
    outs = f.types(2 * f.size, *a.types)[1]
    return outs == b.types[1] and all(a.op.sliced(f, start, 2 * f.size, outs) == b.op for start in (0, 1))
