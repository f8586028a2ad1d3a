"""Blocks: straight lists of operators over named, typed values.

The order of the list is the order of execution.  Inputs, parameters, buffers, state and constants are declared; every
other value is written once.  Blocks are immutable: a pass is a function from block to block.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from .exact import Exact
from .kernels import provider
from .op import Op
from .types import TensorType, Value

Kind = TypeVar("Kind", bound=Op)


class Role(str, enum.Enum):
    """The purpose of an operator."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZE = "optimize"
    COMMUNICATE = "communicate"


@functools.lru_cache(maxsize=1 << 12)
def _workspace(op: Op, ins: tuple[TensorType | None, ...], outs: tuple[TensorType | None, ...]) -> tuple[Any, ...]:
    """The temporary buffers of an operator's numerics: equal layers ask for the same, and every measure of a block."""
    return op.scratch(ins, outs)


@functools.lru_cache(maxsize=1 << 12)
def _inferred(op: Op, *ins: TensorType | None) -> tuple[TensorType, ...]:
    """The types that an operator's rule infers, cached, as many layers are equal."""
    return tuple(op.infer(*ins))


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator applied: inputs and outputs by position, None where an optional one is absent.

    `scratch` holds the temporary buffers that its code needs, once `liveness` has named them.  `kernel`: its kernel
    provider (see kernels.py); "": the operator's own numerics.  `typed`: the verifier has checked its types and the
    buffers of its results.  `facts`: a cache of what passes ask again and again: its workspace,
    its views, its indices (axes.py), and the last cost model that was asked for its seconds, with these.
    """

    op: Op
    inputs: tuple[Value | None, ...]
    outputs: tuple[Value | None, ...]
    role: Role = Role.FORWARD
    scratch: tuple[Value, ...] = ()
    kernel: str = ""
    typed: bool = field(default=False, init=False, repr=False, compare=False)
    facts: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, kind: type[Kind]) -> Kind:
        """The operator with its attributes, which is of this class."""
        assert isinstance(self.op, kind)
        return self.op

    def inferred(self) -> tuple[TensorType, ...]:
        """Types of all outputs by the operator's type rule (see `Op.infer`)."""
        try:
            return _inferred(self.op, *self.types[0])
        except TypeError:  # a field that cannot be hashed, as of an operator from elsewhere
            return tuple(self.op.infer(*self.types[0]))

    def reads(self) -> Iterator[Value]:
        """Inputs that are present."""
        return filter(None, self.inputs)

    def writes(self) -> Iterator[Value]:
        """Outputs that are present, updated state included."""
        return filter(None, self.outputs)

    @property
    def types(self) -> tuple[tuple[TensorType | None, ...], tuple[TensorType | None, ...]]:
        """Types of the inputs and of the outputs; None where one is absent."""
        return (
            tuple([None if v is None else v.type for v in self.inputs]),
            tuple([None if v is None else v.type for v in self.outputs]),
        )

    def workspace(self) -> tuple[TensorType, ...]:
        """Types of the temporary buffers of its kernel or numerics."""
        if self.kernel:
            return provider(self.kernel).scratch(self)
        if type(self.op).scratch is Op.scratch:
            return ()
        if "workspace" not in self.facts:
            self.facts["workspace"] = _workspace(self.op, *self.types)
        return self.facts["workspace"]

    def views(self) -> tuple[int | None, ...]:
        """Byte offsets of the outputs in input 0's buffer (see `Op.views`)."""
        if type(self.op).views is Op.views:  # as of most operators, which are asked often
            return ()
        if "views" not in self.facts:
            self.facts["views"] = self.op.views(*self.types)
        return self.facts["views"]

    def joins(self) -> tuple[int | None, ...]:
        """Byte offsets of the inputs in output 0's buffer (see `Op.joins`)."""
        return () if type(self.op).joins is Op.joins else self.op.joins(*self.types)

    def checks(self) -> tuple[tuple[int, Any], ...]:
        """Inputs whose contents are checked when it runs, and the conditions (see `Op.checks`)."""
        return () if type(self.op).checks is Op.checks else self.op.checks(*self.types)

    def reading(self, others: Mapping[str, Value]) -> Operator:
        """The same operator with other inputs in place of those named; outputs stay."""
        if not any(v.name in others for v in self.reads()):
            return self
        inputs = tuple(v if v is None else others.get(v.name, v) for v in self.inputs)
        return dataclasses.replace(self, inputs=inputs)

    def renamed(self, names: Mapping[str, str]) -> Operator:
        """The same operator with values renamed."""

        def one(v: Value | None) -> Value | None:
            new = names.get(v.name) if v is not None else None
            return v if v is None or new is None else Value(new, v.type)

        inputs, outputs = tuple(map(one, self.inputs)), tuple(map(one, self.outputs))
        if all(map(operator.is_, inputs, self.inputs)) and all(map(operator.is_, outputs, self.outputs)):
            return self
        return Operator(self.op, inputs, outputs, self.role, self.scratch, self.kernel)


def leading_to(operators: Sequence[Operator], wanted: Iterable[Value | None]) -> list[Operator]:
    """The operators that compute the wanted values, in their order; None stands for a value that is not there."""
    needed, kept = {v.name for v in wanted if v is not None}, []
    for o in reversed(operators):
        if any(v.name in needed for v in o.writes()):
            needed.update(v.name for v in o.reads())
            kept.append(o)
    return kept[::-1]


class Free(Op):
    """Ends the lifetimes of its inputs."""

    required_outputs = 0

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        return ()

    def compute(self, ins, outs, scratch):
        """Does nothing: the memory plan reuses the bytes."""


class Constant(Exact):
    """A small declared constant: its value and its elements in row-major order."""

    value: Value
    data: tuple

    def numpy(self) -> np.ndarray:
        """The constant as an array of its type."""
        return np.array(self.data, dtype=self.value.type.numpy).reshape(self.value.shape)

    @staticmethod
    def of(name: str, array: np.ndarray) -> Constant:
        """Declares `array` under `name`."""
        array = np.asarray(array)
        return Constant(Value(name, TensorType.of(array)), tuple(array.reshape(-1).tolist()))


@dataclass(frozen=True)
class Block:
    """The code of a program.

    `outputs` names the values that live to the end of a run.  `addresses` (bytes from the start of the arena, by value
    name) is set once memory is planned.  `products`: "tf32" if a device may round the factors of float32 products to
    TF32's 10 bits of fraction (sums stay float32), else "".  `facts`: a cache of properties derived from the block.
    """

    name: str = "main"
    inputs: tuple[Value, ...] = ()
    parameters: tuple[Value, ...] = ()
    buffers: tuple[Value, ...] = ()
    state: tuple[Value, ...] = ()
    constants: tuple[Constant, ...] = ()
    operators: tuple[Operator, ...] = ()
    outputs: tuple[str, ...] = ()
    addresses: Mapping[str, int] = field(default_factory=dict)
    products: str = ""
    facts: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def batch(self) -> int | None:
        """The first dimension of the first input that has one."""
        return next((v.shape[0] for v in self.inputs if v.shape), None)

    def persistent(self) -> Iterator[Value]:
        """Values that persist across steps: parameters, buffers, state, constants."""
        yield from self.parameters
        yield from self.buffers
        yield from self.state
        yield from (c.value for c in self.constants)

    def declared(self) -> Iterator[Value]:
        """All declared values, which no operator has to write first."""
        yield from self.inputs
        yield from self.persistent()

    def values(self) -> dict[str, Value]:
        """All values by name: declared ones first, then in order of execution, scratch included."""
        values: dict[str, Value] | None = self.facts.get("values")
        if values is None:
            values = {v.name: v for v in self.declared()}
            values.update((v.name, v) for op in self.operators for v in (*op.outputs, *op.scratch) if v is not None)
            self.facts["values"] = values
        return values.copy()

    def producers(self) -> dict[str, int]:
        """Value name → index of the operator that first writes it (declared values have none)."""
        declared = {v.name for v in self.declared()}
        result: dict[str, int] = {}
        for i, op in enumerate(self.operators):
            for v in op.writes():
                if v.name not in declared:
                    result.setdefault(v.name, i)
        return result

    def consumers(self) -> dict[str, list[int]]:
        """Value name → indices of the operators that read it, in order (frees do not count)."""
        result: dict[str, list[int]] = {}
        for i, op in enumerate(self.operators):
            if isinstance(op.op, Free):
                continue
            for name in {v.name for v in op.reads()}:
                result.setdefault(name, []).append(i)
        return result

    def with_operators(self, operators: Iterable[Operator], **changes: object) -> Block:
        """The block with other operators (and other changes); itself if nothing changes."""
        kept = tuple(operators)
        if len(kept) == len(self.operators) and all(map(operator.is_, kept, self.operators)):
            kept = self.operators
            if all(getattr(self, name) == value for name, value in changes.items()):
                return self
        other = dataclasses.replace(self, operators=kept, **changes)  # type: ignore[arg-type]
        if kept is self.operators and changes.keys() == {"addresses"} and "verified" in self.facts:
            other.facts["verified"] = True  # addresses are always compared
        return other
