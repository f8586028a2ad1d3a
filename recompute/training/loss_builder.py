"""A loss under construction: shared by the losses of `losses.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UsageError, expect
from ..language.ir import Role, Value
from ..language.program import Program, Variable
from ..language.scores import main_outputs, moved, scores_of, steps_of
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
        reductions = (*REDUCTIONS, *extra)
        if reduction not in reductions:
            raise UsageError(f"reduction must be one of {', '.join(reductions)}, not {reduction!r}")
        if not output.value.type.is_float:
            raise UsageError(f"a loss needs a floating-point output, but '{output.name}' is {output.value.type}")
        self.program, self.name, self.reduction = output.program, name, reduction
        if expect("name", name, str, "the name of the loss") in self.program:
            raise UsageError(f"the program already has a value '{name}': give the loss another name (name=...)")
        self.b = self.program.builder(Role.LOSS, name)
        self.output = self.x = output.value
        self.inputs: list[Value] = []

    def take(self, *kinds: str) -> int | None:
        """Replaces an output that is made by one of these operators by what it reads, moved as the output is.

        Returns the axis of its classes; None where nothing is replaced, or it has none.  UsageError where moves have
        torn the classes apart.
        """
        match = scores_of(self.x.name, steps_of(self.program.block))
        if match.kind not in kinds:
            return None
        values = self.program.block.values()
        x = values[match.source]
        axis = None if match.axis is None else match.axis % x.ndim
        if match.among is not None:
            classes = [x, self.b.fill(0.0, x)]
            x = self.b.Concat(*(classes if match.among == 0 else classes[::-1]), axis=axis)
        shape, places = x.shape, self.program.block.producers()
        path = [self.program.operators[places[name]] for name in match.moves]
        for op in path:
            at = moved(op, shape, axis)
            if at is None:
                raise UsageError(
                    f"'{self.x.name}' has the classes of {match.kind} along no single axis, as they are reshaped: take "
                    f"the loss of the scores, '{match.source}'"
                )
            shape, axis = at
        for op in path:
            if op.op.name not in ("Cast", "Identity"):
                x = self.b.emit(op.op, x)
        self.x = x
        return axis

    def wide(self) -> Value:
        """x, cast to f32 if it is f16 or bf16."""
        if self.x.dtype in ("f16", "bf16"):
            self.x = self.b.Cast(self.x, to="f32")
        return self.x

    def label(self, given: Variable | str | None, name: str, t: TensorType) -> Value:
        """The label: the given one, checked and cast to the type, or a new input."""
        if given is None:
            if expect("label_name", name, str, "the name of an input") in self.program:
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
    """The program's main floating-point output, or the first of several.  UsageError if it has none."""
    floats = main_outputs(program) or [v for v in program.outputs if v.value.type.is_float]
    if not floats:
        have = ", ".join(f"{v.name}: {v.value.type}" for v in program.outputs) or "none"
        raise UsageError(f"the program has no floating-point output for a loss (outputs: {have})")
    return floats[0]
