"""A loss under construction: shared by the losses of `losses.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from ..language.ir import Operator, Role, Value
from ..language.program import Program, Variable
from ..language.types import TensorType

#: reductions that every loss has
REDUCTIONS = ("mean", "sum", "none")


class LossBuilder:
    """A loss under construction: the builder, the output x, and the declarations."""

    def __init__(self, output: Variable | Program, name: str, reduction: str, extra: Sequence[str] = ()) -> None:
        if isinstance(output, Program):
            output = first_float_output(output)
        if not isinstance(output, Variable):
            raise UsageError(f"the output of a loss must be a Variable (program['name']) or a Program, not {output!r}")
        known = (*REDUCTIONS, *extra)
        if reduction not in known:
            raise UsageError(f"reduction must be one of {', '.join(known)}, not {reduction!r}")
        if not output.value.type.is_float:
            raise UsageError(f"a loss needs a floating-point output, but '{output.name}' is {output.value.type}")
        self.program, self.name, self.reduction = output.program, name, reduction
        if name in self.program:
            raise UsageError(f"the program already has a value '{name}': give the loss another name (name=...)")
        self.b = self.program.builder(Role.LOSS, name)
        self.output = self.x = output.value
        self.inputs: list[Value] = []

    def producer(self) -> Operator | None:
        """The operator that writes the output."""
        return producer(self.program, self.output)

    def take(self, x: Value | None) -> None:
        """Replaces the output of which the loss is taken."""
        assert x is not None
        self.x = x

    def wide(self) -> Value:
        """x, cast to f32 if it is f16 or bf16."""
        if self.x.dtype in ("f16", "bf16"):
            self.x = self.b.Cast(self.x, to="f32")
        return self.x

    def label(self, given: Variable | str | None, name: str, t: TensorType) -> Value:
        """The label: the given one, checked and cast to the type, or a new input."""
        if given is None:
            if name in self.program:
                raise UsageError(
                    f"the program already has a value '{name}': pass it (label={name!r}) or name the new label's "
                    "input (label_name=...)"
                )
            self.b.names.take(name)
            self.inputs.append(Value(name, t))
            return self.inputs[-1]
        variable = self.program[given] if isinstance(given, str) else given
        if not isinstance(variable, Variable) or variable.program is not self.program:
            raise UsageError(f"the label must be a Variable of the same program, or its name, not {given!r}")
        v = variable.value
        if v.shape != t.shape or v.type.is_float != t.is_float:
            raise UsageError(f"the label '{v.name}' is {v.type}, but this loss needs {t}")
        return v if v.dtype == t.dtype else self.b.Cast(v, to=t.dtype)

    def buffer(self, name: str, array: Any, like: Value) -> Value:
        """A constant array of the loss, kept with the program."""
        return self.program.declare("buffers", name, np.array(array, like.type.numpy))

    def finish(self, value: Value) -> Variable:
        """Names the last value and appends the operators to the program."""
        self.b.operators[:] = [o.renamed({value.name: self.name}) for o in self.b.operators]
        self.program.append(self.b, inputs=self.inputs, outputs=[self.name])
        return self.program[self.name]

    def reduce(self, value: Value) -> Variable:
        """Applies the reduction and finishes."""
        b = self.b
        if self.reduction == "mean":
            value = b.ReduceMean(value, keepdims=0)
        elif self.reduction != "none":
            rows = value.shape[0] if value.ndim else 1
            value = b.ReduceSum(value, keepdims=0)
            if self.reduction == "batchmean":
                value = b.Mul(value, b.constant(1 / max(rows, 1), value))
        return self.finish(value)


def first_float_output(program: Program) -> Variable:
    """The program's first floating-point output.  UsageError if it has none."""
    floats = [v for v in program.outputs if v.value.type.is_float]
    if not floats:
        have = ", ".join(f"{v.name}: {v.value.type}" for v in program.outputs) or "none"
        raise UsageError(f"the program has no floating-point output for a loss (outputs: {have})")
    return floats[0]


def producer(program: Program, v: Value) -> Operator | None:
    """The operator that computes a value, before copies of it; None for declared ones."""
    producers = program.block.producers()
    at = producers.get(v.name)
    while at is not None:
        op = program.operators[at]
        source = op.inputs[0] if op.op.name == "Identity" else None
        if source is None:
            return op
        at = producers.get(source.name)
    return None
