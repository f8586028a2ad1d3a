"""Operators divided among ranks: tensor, sequence, expert and context parallelism as one propagation of shardings.

Some values are cut along an axis of the mesh: parameters of which each rank has a part, activations that are cut where
they are made.  From there on every operator runs on what its rank has, along the index of its axis trait that fits
(language/axes.py): cut inputs give cut outputs, an index that is summed over gives partial sums, and only where no
index fits are values changed to another state, for the fewest bytes (reshard.py).  Megatron's column and row pairs
(Shoeybi et al. 2019, arXiv 1909.08053) and its sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198) come
out of it.  The pass runs on the forward and backward pass together, so collectives need no gradients here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import TypeRuleError
from ...language.axes import Cut, Partial, matched, of_operator, piece
from ...language.builder import Builder
from ...language.factors import OWN, SUM, Factor
from ...language.ir import Block, Operator, Role, Value
from ...language.op import Op
from ...language.types import TensorType
from ...ops.communication.base import Numbers
from ...ops.elementwise.arithmetic import Add
from ...ops.random.draws import Dropout
from ...ops.random.dropout_part import DropoutPart, part_of
from ...ops.shape.reshape import Cast, Reshape, Transpose
from ..slicing.region import widens
from .reshard import Division, Reshard, State, local_type, price
from .rows import row_way, rows_of_part

#: by how much bytes of parameters count more: they are never communicated where activations could be
_PARAMETER = 1e6
#: rounds in which whole values that are only read in parts are cut themselves
_ROUNDS = 12


@dataclass(frozen=True)
class Divided:
    """A rank's block, and the cuts of all values of which it has a part.

    `sent`: bytes that a rank sends in all; `gathered`: those of them that are no sums.  `sums`: values
    that are added up.
    """

    block: Block
    cuts: Mapping[str, Cut]
    sent: float = 0
    gathered: float = 0
    sums: tuple[Value, ...] = ()


@dataclass(frozen=True)
class _Way:
    """One way to run an operator: states of its inputs and outputs; `factor`: the index, if there is one; `rows`: the
    cut of a table of which rows are taken by number (rows.py)."""

    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    factor: Factor | None = None
    rows: Cut | None = None


def divide(
    block: Block,
    how: Division,
    cuts: Mapping[str, Cut],
    gradients: Mapping[str, str] | None = None,
    *,
    whole: Sequence[str] | None = None,
    closed: bool = False,
) -> Divided:
    """The block of one rank.

    `cuts`: parameters, buffers, inputs and activations that are cut.  `gradients`: those of parameters, which get the
    parameter's cut.  Whole values that all readers read the same part of are cut, too, parameters among them.
    `whole`: values that must be whole (None: the block's outputs).  `closed`: only what `cuts` names.
    """
    wanted: dict[str, State] = dict(cuts)
    divided = _Divide(block, how, wanted, gradients or {}, block.outputs if whole is None else whole)
    for _ in range(_ROUNDS):
        divided.run()
        more = {} if closed else divided.read_in_parts()
        if not more:
            break
        wanted |= more
        divided = _Divide(block, how, wanted, gradients or {}, block.outputs if whole is None else whole)
    return divided.result()


@dataclass
class _Read:
    """The parts of a whole value that readers take."""

    parts: set[Cut] = field(default_factory=set)
    whole: bool = False


class _Divide:
    """One round: emits the operators of a block as one rank runs them."""

    def __init__(
        self,
        block: Block,
        how: Division,
        wanted: Mapping[str, State],
        gradients: Mapping[str, str],
        whole: Sequence[str],
    ) -> None:
        self.block, self.how = block, how
        self.b = Builder.on(block)
        self.reshard = Reshard(self.b, how, Numbers(block.operators))
        self.declared = {v.name for v in block.declared()}
        self.kept = {v.name for v in (*block.parameters, *block.buffers, *block.state)}
        #: values that stay in place: parameters, buffers and state, parameters also in other precisions and shapes
        self.weights = set(self.kept)
        for o in block.operators:
            if isinstance(o.op, (Cast, Transpose)) and next(o.reads()).name in self.weights:
                self.weights.update(v.name for v in o.writes())
        self.inputs = {v.name for v in block.inputs}
        self.wanted = dict(wanted)
        #: the states that values must have once they are made
        self.final: dict[str, State] = {n: s for n, s in wanted.items() if n not in self.declared}
        self.final |= {g: wanted.get(p) for p, g in gradients.items()}
        self.final |= dict.fromkeys(whole)
        #: gradients of parameters, also in low precision
        self.gradients = set(gradients.values())
        self.gradients_above()
        for o in block.operators:  # what is recomputed is divided as it was
            for v in o.writes() if o.role is Role.RECOMPUTE else ():
                if isinstance(cut := self.final.get(v.name.rpartition("@")[0]), Cut):
                    self.final.setdefault(v.name, cut)
        #: value → its (state, local value) on a rank; whole ones that were not changed are left out
        self.own: dict[str, tuple[State, Value]] = {}
        #: values in other states, by the pass in which they were made: what was gathered in the forward pass is
        #: gathered again in the backward pass
        self.others: dict[tuple[str, State, bool], Value] = {}
        #: values that another one is in another shape: gathered once, they are gathered in both
        self.reshaped: dict[str, tuple[Value, Op]] = {}
        self.reads: dict[str, _Read] = {}
        self.backward = False
        self.sent = self.gathered = 0.0
        self.sums: list[Value] = []

    def gradients_above(self) -> None:
        """A gradient in low precision is divided as what it is cast to, and so are the summands of a gradient."""
        for o in reversed(self.block.operators):
            if o.role is not Role.BACKWARD or not isinstance(o.op, (Cast, Add, Transpose)):
                continue
            (y,) = o.writes()
            cut = self.final.get(y.name)
            if not isinstance(cut, Cut) or y.name not in self.gradients:
                continue
            if isinstance(o.op, Transpose):
                cut = Cut(dataclasses.replace(cut.place, axis=o.op.perm[cut.place.axis]), cut.size)
            for x in o.reads():
                if x.ndim == y.ndim and x.size == y.size:
                    self.final.setdefault(x.name, cut)
                    self.gradients.add(x.name)

    def run(self) -> None:
        """All operators, in order."""
        for v in self.block.declared():
            state = self.wanted.get(v.name)
            if v.name in self.kept and state is not None:
                self.own[v.name] = state, dataclasses.replace(v, type=local_type(v.type, state))
        self.b.role = Role.FORWARD
        for v in self.block.inputs:
            state = self.wanted.get(v.name)
            if state is not None:
                self.own[v.name] = state, self.reshard.change(v, v.type, None, state)
        for o in self.block.operators:
            self.b.role, self.backward = o.role, o.role not in (Role.FORWARD, Role.LOSS)
            self.operator(o)
        values = self.block.values()
        for name in self.block.outputs:
            if isinstance(self.state(name), Partial):
                self.get(values[name], None)

    def result(self) -> Divided:
        """The rank's block."""

        def local(values: tuple[Value, ...]) -> tuple[Value, ...]:
            return tuple(self.own[v.name][1] if v.name in self.own else v for v in values)

        old = self.block
        block = dataclasses.replace(
            old, parameters=local(old.parameters), buffers=local(old.buffers), state=local(old.state),
            operators=tuple(self.b.operators), constants=(*old.constants, *self.b.constants), addresses={},
        )  # fmt: skip
        cuts = {n: s for n, (s, _) in self.own.items() if isinstance(s, Cut)}
        return Divided(block, cuts, self.sent, self.gathered, tuple(self.sums))

    # -- one operator -------------------------------------------------------------------------------------------------

    def operator(self, o: Operator) -> None:
        """One operator, in the way that takes the fewest bytes."""
        ways = self.ways(o)
        if len(ways) > 1:
            ways.sort(key=lambda w: self.price(o, w))
        way, (op, outs) = next((w, part) for w in ways if (part := self.part(o, w.factor)) is not None)
        self.note(o, way)
        inputs = tuple(None if v is None else self.get(v, s) for v, s in zip(o.inputs, way.inputs, strict=True))
        if isinstance(o.op, Reshape):
            self.reshaped[next(o.writes()).name] = next(o.reads()), o.op
        outputs = tuple(
            None if v is None or t is None else Value(v.name, t) for v, t in zip(o.outputs, outs, strict=False)
        )
        shares = () if way.factor is None else way.factor.shares
        if way.rows is not None:
            self.emit(o, rows_of_part(self.b, o, way.rows, self.how.rank, inputs), way.outputs)
        else:
            self.emit(o, Operator(op, inputs, outputs, o.role), way.outputs, shares)

    def part(self, o: Operator, f: Factor | None) -> tuple[Op, tuple[TensorType | None, ...]] | None:
        """The rank's part of an operator along an index (None: all of it), and the types of its results.

        None where the operator cannot run on this part.
        """
        types = o.types
        if f is None:
            return o.op, types[1]
        absent = (None,) * (len(f.outputs) - len(o.outputs))
        if f.whole:
            op = self.drawn(o, f)
            return None if op is None else (op, f.types(1, types[0], (*types[1], *absent))[1])
        try:
            op, _, outs = piece(o.op, f, self.how.rank, 1, types[0], (*types[1], *absent))
        except TypeRuleError:
            return None
        return op, outs

    def ways(self, o: Operator) -> list[_Way]:
        """The ways to run an operator: whole, as sums of partial results, along an index of a value that is cut."""
        states = [None if v is None else self.state(v.name) for v in o.inputs]
        whole = _Way((None,) * len(o.inputs), (None,) * len(o.outputs))
        if o.op.updates and any(self.state(v.name) is not None for v in o.writes()):
            return self.along(o, states) or [whole]
        if o.op.updates:  # state that follows what is cut is cut: in the next round
            for w in self.along(o, states, updates=True)[:1]:
                for v, s in zip(o.writes(), w.outputs, strict=True):
                    if isinstance(s, Cut):
                        self.reads.setdefault(v.name, _Read()).parts.add(s)
            return [whole]
        result = [whole]
        if not any(states) and not any(self.final.get(v.name) for v in o.writes()):
            return result
        if o.op.communicates:
            return self.together(o, states) or result
        if widens(o) and states == [
            Partial(SUM)
        ]:  # 16-bit floats are added up in float32, where a sum that is too large for them fits
            return [_Way((Partial(SUM),), (Partial(SUM),))]
        partial = {k for k, s in enumerate(states) if s == Partial(SUM)}
        groups = [{k for k in g if k < len(states) and o.inputs[k] is not None} for g in o.op.linear]
        if partial and partial in groups and all(v.type.is_float for v in o.writes()):
            others = tuple(s if k in partial else None for k, s in enumerate(states))
            if sum(v.nbytes for v in o.writes()) <= max(o.inputs[k].nbytes for k in partial):  # type: ignore[union-attr]
                result.append(_Way(others, (Partial(SUM),) * len(o.outputs)))
        if (rows := row_way(o, self.state, self.final.get)) is not None:
            cut = next(s for s in (*rows[0], *rows[1]) if isinstance(s, Cut))
            result.append(_Way(*rows, rows=cut))
        return [*result, *self.along(o, states)]

    def along(self, o: Operator, states: list[State], updates: bool = False) -> list[_Way]:
        """The ways along an index of an input that is cut, or of an output that is to be.

        `updates`: also those in which the state that an operator updates is cut, and is not yet.
        """
        ways: dict[_Way, None] = {}
        random = isinstance(o.op, (Dropout, DropoutPart))
        for f in of_operator(o):
            if any(p == OWN for p in f.outputs) or (f.whole and not random):
                continue
            for fine in self.fitting(f, o, states):
                outs = tuple(
                    None
                    if v is None
                    else Partial(p)
                    if isinstance(p, str)
                    else None
                    if p is None
                    else Cut(p, fine.size)
                    for v, p in zip(o.outputs, fine.outputs, strict=False)
                )
                ins = tuple(
                    None if v is None or p is None else Cut(p, fine.size)
                    for v, p in zip(o.inputs, fine.inputs, strict=True)
                )
                if (
                    updates
                    or not o.op.updates
                    or all(s == self.state(v.name) for v, s in zip(o.writes(), outs, strict=True))
                ):
                    ways[_Way(ins, outs, fine)] = None
        return list(ways)

    def drawn(self, o: Operator, f: Factor) -> Op | None:
        """Dropout inside of its axes: the numbers of the whole tensor at the rank's places."""
        place, (x, *_) = f.inputs[0], o.reads()
        assert place is not None
        return part_of(o.op, place, self.how.rank, self.how.ranks, x.shape)

    def fitting(self, f: Factor, o: Operator, states: list[State]) -> Iterator[Factor]:
        """The parts of a factor that are where values of the operator are cut."""
        for k, s in enumerate(states):
            if isinstance(s, Cut) and (fine := matched(f, f.inputs[k], s)) is not None:
                yield fine
        for k, v in enumerate(o.outputs):
            s = None if v is None else self.final.get(v.name)
            if isinstance(s, Cut) and (fine := matched(f, f.outputs[k], s)) is not None:
                yield fine

    def together(self, o: Operator, states: list[State]) -> list[_Way]:
        """A communication along another axis of the mesh, or the wait for it, on the parts of this one."""
        return [w for w in self.along(o, states) if all(s is not None for s in w.inputs)]

    def price(self, o: Operator, way: _Way) -> tuple[float, int, int]:
        """The cost of a way: bytes to send, then how much stays whole, then partial results."""
        sent = 0.0
        for v, s in zip(o.inputs, way.inputs, strict=True):
            if v is not None:
                sent += self.cost(v, s) * (_PARAMETER if v.name in self.weights else 1)
        for v, s in zip(o.outputs, way.outputs, strict=True):
            if v is not None and v.name in self.final:
                divided = v.name in self.gradients and isinstance(self.final[v.name], Cut)
                sent += price(v.nbytes, self.how.ranks, s, self.final[v.name]) * (_PARAMETER if divided else 1)
        return sent, sum(s is None for s in way.outputs), sum(isinstance(s, Partial) for s in way.outputs)

    # -- values -------------------------------------------------------------------------------------------------------

    def state(self, name: str) -> State:
        """The state of a value on a rank: its cut, a partial result, or None if it is whole."""
        return self.own[name][0] if name in self.own else None

    def cost(self, v: Value, then: State) -> float:
        """Bytes to send until a value is in a state."""
        if (v.name, then, self.backward) in self.others:
            return 0
        if then is None and v.name in self.reshaped and isinstance(self.state(v.name), Cut):
            return self.cost(self.reshaped[v.name][0], None)
        return price(v.nbytes, self.how.ranks, self.state(v.name), then)

    def get(self, v: Value, then: State) -> Value:
        """A value in a state."""
        now, local = self.own.get(v.name, (None, v))
        if now == then:
            return local
        if v.name in self.inputs and then is None:
            return v
        key = (v.name, then, self.backward)
        if key not in self.others and then is None and v.name in self.reshaped and isinstance(now, Cut):
            source, op = self.reshaped[v.name]
            self.others[key] = self.b.emit(op, self.get(source, None))
        if key not in self.others:
            self.count(v, now, then)
            value = self.reshard.change(local, v.type, now, then)
            if isinstance(now, Partial):  # the sum takes the value's name and its place
                value = self.named(value, v.name)
                self.own[v.name] = then, value
                return value
            self.others[key] = value
        return self.others[key]

    def count(self, v: Value, now: State, then: State) -> None:
        """Counts what is sent."""
        sent = price(v.nbytes, self.how.ranks, now, then)
        self.sent += sent
        if isinstance(now, Partial):
            self.sums.append(v)
        else:
            self.gathered += sent

    def named(self, made: Value, name: str) -> Value:
        """The result of the last operator under another name."""
        self.b.operators[-1] = self.b.operators[-1].renamed({made.name: name})
        return Value(name, made.type)

    def emit(self, o: Operator, made: Operator, states: tuple[State, ...], shares: tuple[int, ...] = ()) -> None:
        """Emits an operator; results that are to be in another state get their names there."""
        outputs = list(made.outputs)
        late: list[tuple[Value, Value, State]] = []
        for k, (v, p) in enumerate(zip(o.outputs, made.outputs, strict=True)):
            if v is None or p is None or o.op.updates:
                continue
            s = states[k]
            change = v.name in self.final and self.final[v.name] != s
            if isinstance(s, Partial) or change or k in shares:
                p = outputs[k] = Value(self.b.names.take(f"{v.name}.part"), p.type)
            if change or isinstance(s, Partial) or k in shares:
                late.append((v, p, s))
            elif s is not None:
                self.own[v.name] = s, p
        self.b.operators.append(dataclasses.replace(made, outputs=tuple(outputs)))
        for v, p, s in late:
            self.finish(v, p, s, o.outputs.index(v) in shares)

    def finish(self, v: Value, p: Value, s: State, share: bool) -> None:
        """Finishes a result: takes its share of a mean, and brings it into the state that is wanted."""
        if share:
            p = self.b.Mul(p, self.b.constant(1 / self.how.ranks, p))
        then = self.final.get(v.name, s)
        if then != s:
            self.count(v, s, then)
            p = self.reshard.change(p, v.type, s, then)
        if not isinstance(then, Partial):
            p = self.named(p, v.name)
        if then is not None:
            self.own[v.name] = then, p

    # -- whole values that are read in parts --------------------------------------------------------------------------

    def note(self, o: Operator, way: _Way) -> None:
        """Takes note of what an operator reads of whole values."""
        for v, s in zip(o.inputs, way.inputs, strict=True):
            if v is None or self.state(v.name) is not None:
                continue
            if o.op.updates and v in o.outputs and v.name in self.reads:
                continue
            if self.backward and v.name in self.kept and v.name in self.reads:
                continue  # the forward pass decides what is cut
            read = self.reads.setdefault(v.name, _Read())
            if isinstance(s, Cut):
                read.parts.add(s)
            else:
                read.whole = True

    def read_in_parts(self) -> dict[str, State]:
        """Whole values of which all readers read the same part: parameters, and what is made of whole values."""
        makers = {v.name: o for o in self.block.operators for v in o.writes()}
        states: dict[str, State] = {}
        for name, read in self.reads.items():
            if read.whole or len(read.parts) != 1 or name in self.wanted or name in self.block.outputs:
                continue
            if name not in self.kept:
                maker = makers.get(name)
                if maker is None or name in self.final or maker.op.communicates:
                    continue
                if any(self.state(v.name) is not None for v in maker.reads()):
                    continue
            states[name] = next(iter(read.parts))
        return states
