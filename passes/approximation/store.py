"""Compressed storage of kept activations: a value rests as codes of few bits, or in a smaller element type.

What reads it after the forward pass reads a copy that is made anew right before.  ActNN (Chen et al. 2021, arXiv
2104.14129) and GACT (Liu et al. 2022, arXiv 2206.11357) store so what gradients read; with stochastic rounding, a
gradient that is linear in the stored value has the right expectation.

The rest of the step is as it was: forward operators, and with them the loss, have the same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import UsageError, nearest
from ...language.builder import Names
from ...language.ir import Block, Free, Operator, Role, Value
from ...language.op import Op
from ...language.types import TensorType
from ...ops.approximation.groups import BITS, CompressGroups, DecompressGroups
from ...ops.optimizer.updates import Increment
from ...ops.shape.reshape import Cast

#: how a value can be stored: in so many bits by groups, or in an element type (`f8`: see `types_of`)
How = int | str
#: name of an element type in `How` → the cast.  f8 has the range of float16: what is beyond it is infinite, as NaN is
#: NaN, where f8e4m3fn would make 448 of both 449 and infinity.  It rounds to 2 bits behind the first and has a bias;
#: 8 bits by groups take 3 % more bytes
CASTS: dict[str, Cast] = {
    "bf16": Cast(to="bf16"), "f16": Cast(to="f16"), "f8": Cast(to="f8e5m2", saturate=0),
}  # fmt: skip
#: elements that share a range
GROUP = 256
#: values of fewer bytes are left alone: a step has many, which together are little
SMALL = 1 << 12
#: readers that are no more operators apart share a copy.  The readers of one layer's gradient are; between those of
#: different layers the copy would take the memory that storing has freed, and another one costs less than a copy does
APART = 8

_FORWARD = (Role.FORWARD, Role.LOSS)


def store(block: Block, name: str, how: How, *, apart: int = APART) -> Block | None:
    """The block in which the value `name` rests as `how` says; None where it cannot (see `why_not`).

    UsageError for a value that is not there, and for a way of storing that there is not.
    """
    found = Stores(block)
    return None if found.why_not(name, how) else found.written({name: how}, apart=apart)


def why_not(block: Block, name: str, how: How) -> str:
    """Why a value cannot be stored so; "" where it can.  Errors as of `store`."""
    return Stores(block).why_not(name, how)


def check_how(how: How) -> None:
    """UsageError unless values can be stored so."""
    if how not in CASTS and (isinstance(how, bool) or how not in BITS):
        raise UsageError(f"values can be stored in 8, 4 or 2 bits or as {', '.join(CASTS)}, not in {how!r}")


def stored_bytes(t: TensorType, how: How, group: int = GROUP) -> int:
    """Bytes that a value of this type takes while it rests."""
    check_how(how)
    if isinstance(how, str):
        return t.with_dtype(CASTS[how].to).nbytes
    return sum(made.nbytes for made in CompressGroups(bits=how, group=group).compressed(t))


def step_counter(block: Block) -> tuple[Block, Value]:
    """The step counter of a block, which random operators read.

    An optimizer brings one, and increments it behind all that reads it.  A block that has none gets the state `step`
    and an increment at its end: the program's data must have a 0 of int64 of that name.
    """
    for op in block.operators:
        if isinstance(op.op, Increment) and op.inputs[0] is not None and op.inputs[0].type == _COUNTER:
            return block, op.inputs[0]
    read = {op.inputs[-1] for op in block.operators if op.op.random}
    counter = next((v for v in block.state if v in read), None)
    if counter is None:
        counter = Value(Names(block.values()).take("step"), _COUNTER)
        block = dataclasses.replace(block, state=(*block.state, counter))
    last = Operator(Increment(), (counter,), (counter,), Role.OPTIMIZE)
    return block.with_operators([*block.operators, last]), counter


_COUNTER = TensorType("i64", ())


def seed_of(name: str) -> int:
    """The seed of a value's random bits: 63 bits that follow from its name, so that a program is the same each time."""
    return int.from_bytes(hashlib.sha256(f"store {name}".encode()).digest()[:8], "little") >> 1


@dataclass(frozen=True)
class Rest:
    """Where a value rests: compressed right before operator `at`; `late`: who reads it afterwards, in order."""

    value: Value
    at: int
    late: tuple[int, ...]

    def runs(self, apart: int) -> list[list[int]]:
        """The readers that share a copy."""
        found = [[self.late[0]]]
        for i in self.late[1:]:
            if i - found[-1][-1] > apart:
                found.append([])
            found[-1].append(i)
        return found


@dataclass
class _Made:
    """Operators by the position that they come before, and what readers read instead."""

    before: dict[int, list[Operator]] = field(default_factory=dict)
    read: dict[int, dict[str, Value]] = field(default_factory=dict)


class Stores:
    """What a block could store, and the block in which it does.  UsageError for a block with frees."""

    def __init__(self, block: Block) -> None:
        if any(isinstance(op.op, Free) for op in block.operators):
            raise UsageError("values are stored before 'liveness': operators are added, and frees must follow")
        self.block = block
        self.values = block.values()
        self.made, self.readers = block.producers(), block.consumers()
        self.kept = {v.name for v in block.persistent()}
        self.outputs = set(block.outputs)
        self.root = self._roots()
        self.family: dict[str, list[str]] = {}
        for name, root in self.root.items():
            self.family.setdefault(root, []).append(name)

    def _roots(self) -> dict[str, str]:
        """For each value that is a view, or has views, the value whose buffer it lies in.

        Views that are made after the forward pass do not count: they will be views of a copy.
        """
        found: dict[str, str] = {}
        for op in self.block.operators:
            if op.role in _FORWARD and not op.op.updates and any(at is not None for at in op.views()):
                (source, *_), root = op.reads(), ""
                root = found.setdefault(source.name, source.name)
                for v, at in zip(op.outputs, op.views(), strict=False):
                    if v is not None and at is not None:
                        found[v.name] = root
        return found

    def why_not(self, name: str, how: How) -> str:
        """Why a value cannot be stored so; "" where it can.  UsageError for names and ways that there are not."""
        check_how(how)
        v = self.values.get(name)
        if v is None:
            raise UsageError(f"there is no value '{name}' to store{nearest(name, self.values)}")
        if name in self.kept:
            return f"'{name}' is kept from step to step"
        if name in self.outputs:
            return f"'{name}' is an output of the step"
        if not v.type.is_float or v.type.host:
            return f"'{name}' is {v.type}: only floats on the device are compressed"
        if v.nbytes < SMALL:
            return f"'{name}' has {v.nbytes:,} bytes: less than {SMALL:,} are not worth it"
        if stored_bytes(v.type, how) >= v.nbytes:
            return f"'{name}' is {v.type}: it would not be smaller"
        return self._no_rest(v)

    def _no_rest(self, v: Value) -> str:
        """Why a value does not rest, or its buffer is needed anyway."""
        at = self.made.get(v.name, -1)
        if at >= 0 and self.block.operators[at].role not in _FORWARD:
            return f"'{v.name}' is made after the forward pass"
        if any(self.block.operators[i].role is Role.COMMUNICATE for i in self.readers.get(v.name, ())):
            return f"'{v.name}' is sent elsewhere: to the host's memory or to other ranks"
        if self.rest(v) is None:
            return f"nothing reads '{v.name}' after the forward pass"
        others = [n for n in self.family.get(self.root.get(v.name, ""), ()) if n != v.name]
        for other in others:
            if other in self.kept or other in self.outputs:
                return f"'{v.name}' lies in the buffer of '{other}', which outlives the step"
            if self.rest(self.values[other]) is not None:
                return f"'{v.name}' shares its buffer with '{other}', which is read after the forward pass, too"
        return ""

    def rest(self, v: Value) -> Rest | None:
        """Where a value rests; None where nothing reads it after its last forward reader."""
        operators, reads = self.block.operators, self.readers.get(v.name, [])
        made = self.made.get(v.name, -1)
        early = [i for i in reads if operators[i].role in _FORWARD]
        late = tuple(i for i in reads if i > max(early, default=made) and operators[i].role not in _FORWARD)
        # before the last forward reader, which may write over it
        return Rest(v, early[-1] if early else made + 1, late) if late else None

    def written(self, choices: Mapping[str, How], *, apart: int = APART) -> Block:
        """The block in which these values rest so.  UsageError with the reason for a value that cannot."""
        for name, how in choices.items():
            if why := self.why_not(name, how):
                raise UsageError(f"a value cannot be stored: {why}")
        block = self.block
        counter = None
        if any(how in BITS for how in choices.values()):
            block, counter = step_counter(block)
        names, made = Names(block.values()), _Made()
        for name, how in choices.items():
            self._put(made, names, name, how, counter, apart)
        result: list[Operator] = []
        for i, op in enumerate(block.operators):
            result += made.before.get(i, ())
            result.append(op.reading(made.read[i]) if i in made.read else op)
        return block.with_operators(result, addresses={})

    def _put(self, made: _Made, names: Names, name: str, how: How, counter: Value | None, apart: int) -> None:
        """The operators of one value."""
        v = self.values[name]
        rest = self.rest(v)
        assert rest is not None
        away, back = _ways(v.type, how, seed_of(name))
        inputs = (v, counter) if isinstance(how, int) else (v,)
        wishes = (f"{name}.codes", f"{name}.ranges") if isinstance(how, int) else (f"{name}.{how}",)
        resting = _apply(away, inputs, wishes, names, Role.FORWARD)
        made.before.setdefault(rest.at, []).append(resting)
        for run in rest.runs(apart):
            copy = _apply(back, resting.outputs, (f"{name}.back",), names, Role.BACKWARD)
            made.before.setdefault(run[0], []).append(copy)
            for i in run:
                made.read.setdefault(i, {})[name] = next(copy.writes())


def _ways(t: TensorType, how: How, seed: int) -> tuple[Op, Op]:
    """The operators that put a value away and bring it back."""
    if isinstance(how, str):
        return CASTS[how], Cast(to=t.dtype)
    return (
        CompressGroups(bits=how, group=GROUP, seed=seed),
        DecompressGroups(bits=how, group=GROUP, shape=t.shape, dtype=t.dtype),
    )


def _apply(op: Op, inputs: Sequence[Value | None], wishes: Sequence[str], names: Names, role: Role) -> Operator:
    types = op.infer(*(None if v is None else v.type for v in inputs))
    outputs = tuple(Value(names.take(w), t) for w, t in zip(wishes, types, strict=True))
    return Operator(op, tuple(inputs), outputs, role)
