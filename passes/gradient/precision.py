"""Mixed precision: inserts casts for operators that compute in a 16-bit type."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from ...errors import TypeRuleError, UsageError, nearest
from ...language.builder import Builder
from ...language.ir import Block, Constant, Operator, Role, Value
from ...language.program import Program
from ...ops.loss.linear_cross_entropy import LinearLoss
from ...ops.shape.reshape import Cast, Reshape, Transpose
from ...support.memory import taken
from ..base import Pass

#: value of the option → the low element type (None: types stay as they are)
PRECISIONS: Mapping[str, str | None] = {"fp32": None, "tf32": None, "bf16": "bf16", "bf16-pure": "bf16", "fp16": "f16"}
#: the one in which parameters and state are bfloat16, too
PURE = "bf16-pure"


def check_precision(name: str) -> str:
    """The name itself.  UsageError for others."""
    if not isinstance(name, str) or name not in PRECISIONS:
        raise UsageError(f"unknown precision '{name}'{nearest(name, PRECISIONS)}; known: {', '.join(PRECISIONS)}")
    return name


class Precision(Pass):
    """Insert casts so that operators compute in bfloat16 or float16 as their class declares (`autocast`).

    `to`: "bf16" or "fp16" (types change), "bf16-pure" (the same for a block whose parameters are bfloat16, see
    `StoreParameters`), "tf32" (none do: the block says that a device may round the factors of float32 products), "fp32"
    (neither).  `full`: names or globs of values whose operators stay in float32; `losses`: values that do, too, except
    where one operator is both the head's product and its loss: that loss is float32 in any case, its product is not.

    It runs on the forward pass with its loss, before autodiff: gradients then have the types of their values, and
    gradients of parameters, which stay float32, are float32.  Values keep their names; NAME.bf16 is the cast of NAME.
    Each value is cast once, for all its readers.  Values that are not float32 in the model keep their types, and so do
    inputs, parameters, buffers and state.
    """

    refuses = ("gradients",)

    to: str = "bf16"
    full: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()

    def run(self, block: Block) -> Block:
        """The block with casts.  UsageError where it has a backward pass already."""
        low = PRECISIONS[check_precision(self.to)]
        if any(o.role not in (Role.FORWARD, Role.LOSS) for o in block.operators):
            raise UsageError("'precision' comes before 'autodiff': gradients follow the types of the forward pass")
        if low is None:
            return dataclasses.replace(block, products="tf32" if self.to == "tf32" else "")
        names = [v.name for o in block.operators for v in o.writes()]
        full: set[str] = set()
        for pattern in self.full:
            matches = fnmatch.filter(names, pattern)
            if not matches:
                raise UsageError(f"precision: no operator writes '{pattern}'{nearest(pattern, names)}")
            full.update(matches)
        written = {v.name for o in block.operators if not isinstance(o.op, LinearLoss) for v in o.writes()}
        full |= written.intersection(self.losses)
        return _Casting(block, low, full, pure=self.to == PURE).run()


class StoreParameters(Pass):
    """Make float32 parameters bfloat16, with their contents; what reads one reads a cast of it to float32.

    `precision` removes the casts again that only operators in bfloat16 read.  `names`: these parameters alone.
    """

    refuses = ("gradients",)

    names: tuple[str, ...] = ()

    def run(self, block: Block) -> Block:
        """The block with other parameters, and a cast of each before its first reader."""
        stored = [v for v in block.parameters if v.dtype == "f32" and (not self.names or v.name in self.names)]
        if not stored:
            return block
        if changed := [v.name for o in block.operators if o.op.updates for v in o.writes() if v in stored]:
            raise UsageError(f"{PURE}: '{changed[0]}' is written by the forward pass: give another precision")
        b = Builder.on(block, role=Role.FORWARD)
        new = {v.name: Value(v.name, v.type.with_dtype("bf16")) for v in stored}
        wide: dict[str, Value] = {}
        for o in block.operators:
            for v in o.reads():
                if v.name in new and v.name not in wide:
                    wide[v.name] = Value(b.names.take(f"{v.name}.f32"), v.type)
                    b.operators.append(Operator(Cast(to="f32"), (new[v.name],), (wide[v.name],), Role.FORWARD))
            b.operators.append(o.reading(wide))
        parameters = tuple(new.get(v.name, v) for v in block.parameters)
        return dataclasses.replace(block, parameters=parameters, operators=tuple(b.operators))

    def rewrite(self, program: Program) -> Block:
        block = self.run(program.block)
        for v in block.parameters:
            array = dict.get(program.data, v.name)
            if array is not None and array.dtype != v.type.numpy:
                program.data[v.name] = _rounded(array, v.type.numpy)
        return block


def _rounded(array: np.ndarray, kind: np.dtype) -> np.ndarray:
    """An array in another type; one number everywhere takes no memory."""
    if array.size and not any(array.strides):
        return np.broadcast_to(array[(0,) * array.ndim].astype(kind), array.shape)
    return taken(array, kind)


class _Casting:
    """Visits the operators once, and casts the inputs of each to the required types."""

    def __init__(self, block: Block, low: str, full: set[str], *, pure: bool = False) -> None:
        self.block, self.low, self.full, self.pure = block, low, full, pure
        self.b = Builder.on(block)
        #: value, type → the value with that type: casts that were made
        self.casts: dict[tuple[str, str], Value] = {}
        #: values that a Cast of the model has made from the low type → that one's input
        self.sources: dict[str, Value] = {}
        #: values that have another type now than the program says
        self.changed: dict[str, Value] = {}
        #: transposes and the like of parameters, by result: a parameter is cast first, as its cast is half as large
        self.moves: dict[str, Operator] = {}
        changing = {v.name for o in block.operators if o.op.updates for v in o.writes()}
        self.fixed = {v.name for v in block.parameters if v.dtype == "f32"} - changing
        self.constants = {c.value.name: c for c in block.constants}
        #: values that take the type of the activations that they are combined with: parameters, and constants that fit
        self.weak = {v.name for v in block.parameters} | {n for n, c in self.constants.items() if _fits(c, low)}
        #: values worked out from constants and integers alone (masks); weak too where the low type has float32's range
        self.plain = {v.name for v in (*block.inputs, *block.buffers) if not v.type.is_float} | self.constants.keys()
        if low == "bf16":
            self.plain.update(v.name for v in block.buffers)
            self.weak |= self.plain

    def run(self) -> Block:
        """The block with other operators, and constants in the low type."""
        for op in self.block.operators:
            self.operator(op)
        read = {v.name for o in self.b.operators for v in o.reads()} | set(self.block.outputs)
        constants = [c for c in (*self.block.constants, *self.b.constants) if c.value.name in read]
        unread = self.sources.keys() - read if self.pure else set()  # casts of parameters that are read as they are
        kept = [o for o in self.b.operators if o.outputs[0] is None or o.outputs[0].name not in unread]
        return self.block.with_operators(kept, constants=tuple(constants))

    def operator(self, op: Operator) -> None:
        """Appends it in the type that its class, its role and its inputs say; in float32 where it has no other."""
        self.b.role = op.role
        about = [i for i, v in enumerate(op.inputs) if v is not None and v.dtype == "f32"]
        chosen = about if op.op.autocast_inputs is None else [i for i in about if i in op.op.autocast_inputs]
        if chosen and not op.op.updates and self.is_low(op, chosen):
            kinds = {i: self.low if i in chosen else "f32" for i in about}
            if self.append(op, kinds):
                return
        self.append(op, dict.fromkeys(about, "f32"), must=True)

    def is_low(self, op: Operator, chosen: list[int]) -> bool:
        """Whether an operator should compute in the low type."""
        if op.role is Role.LOSS or any(v.name in self.full for v in op.writes()):
            return False
        if isinstance(op.op, Cast):
            return self.given(op, 0).dtype == self.low
        if op.op.autocast != "follow":
            return op.op.autocast == "low"
        strong = [i for i in chosen if self.given(op, i).name not in self.weak]
        if self.pure and op.op.moves_data and not strong:
            return any(self.given(op, i).name in self.sources for i in chosen)
        return bool(strong) and all(self.given(op, i).dtype == self.low for i in strong)

    def given(self, op: Operator, i: int) -> Value:
        """An input with the type that it has now."""
        v = op.inputs[i]
        assert v is not None
        return self.changed.get(v.name, v)

    def append(self, op: Operator, kinds: Mapping[int, str], *, must: bool = False) -> bool:
        """Appends the operator with inputs of these types; False (and nothing) where its type rule has no such form."""
        types = [None if v is None else self.changed.get(v.name, v).type for v in op.inputs]
        for i, kind in kinds.items():
            t = types[i]
            assert t is not None
            types[i] = t.with_dtype(kind)
        try:
            found = op.op.infer(*types)
        except TypeRuleError:
            if must:
                raise
            return False
        inputs = [
            v if v is None else self.cast(v, kinds[i]) if i in kinds else self.changed.get(v.name, v)
            for i, v in enumerate(op.inputs)
        ]
        outputs = [v if v is None else Value(v.name, t) for v, t in zip(op.outputs, found, strict=False)]
        self.b.operators.append(dataclasses.replace(op, inputs=tuple(inputs), outputs=tuple(outputs)))
        for old, new in zip(op.outputs, outputs, strict=True):
            if new is not None:
                self.wrote(op, new, was=old.dtype if old is not None else "")
        return True

    def wrote(self, op: Operator, v: Value, *, was: str) -> None:
        """Remembers what an operator has written: its type, and whether it is weak."""
        if op.op.updates:  # what was cast before is not its value any more
            for key in [k for k in self.casts if k[0] == v.name]:
                del self.casts[key]
            return
        if v.dtype != was:
            self.changed[v.name] = v
        if isinstance(op.op, Cast):
            source = self.given(op, 0)
            if (source.dtype, v.dtype) == (self.low, "f32"):
                self.sources[v.name] = source
                if self.pure and source in self.block.parameters:
                    self.weak.add(v.name)
        read = [x.name for x in op.reads()]
        if self.plain.issuperset(read) and not op.op.random:
            self.plain.add(v.name)
            if self.low == "bf16":
                self.weak.add(v.name)
        if op.op.moves_data and read and all(n in self.weak or n in self.constants for n in read):
            self.weak.add(v.name)
            if isinstance(op.op, (Transpose, Reshape)) and op.inputs[0] is not None and op.inputs[0].name in self.fixed:
                self.fixed.add(v.name)
                self.moves[v.name] = self.b.operators[-1]

    def cast(self, v: Value, kind: str) -> Value:
        """The value in a type: itself, a constant, or a cast that all its readers share."""
        v = self.changed.get(v.name, v)
        if v.dtype == kind:
            return v
        if kind == self.low and v.name in self.sources:
            return self.sources[v.name]
        if v.name in self.constants:
            return self.b.constant(self.constants[v.name].numpy(), kind)
        value = self.casts.get((v.name, kind))
        if value is None:
            move, source = self.moves.get(v.name), None
            if move is not None:
                source = self.cast(next(move.reads()), kind)
            name = self.b.names.take(f"{v.name}.{kind}")
            value = self.casts[v.name, kind] = Value(name, v.type.with_dtype(kind))
            operator = Operator(Cast(to=kind), (v,), (value,), self.b.role)
            if move is not None:
                operator = dataclasses.replace(move, inputs=(source,), outputs=(value,), role=self.b.role)
            self.b.operators.append(operator)
        return value


def _fits(constant: Constant, low: str) -> bool:
    """Whether no finite element of a constant is beyond the range of the low type."""
    if not constant.value.type.is_float:
        return False
    most = float(ml_dtypes.finfo("bfloat16" if low == "bf16" else "float16").max)
    return all(not math.isfinite(x) or abs(x) <= most for x in constant.data)
