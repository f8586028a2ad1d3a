"""Provider "widened": an operator on 16-bit floats runs another provider's float32 kernel between conversions.

It takes what no kernel reads and writes in 16 bits itself: the operands are widened into the operator's workspace, the
float32 kernel runs, and its results are rounded once.
"""

from __future__ import annotations

from typing import Any

from ....errors import RecomputeError
from ....language.element import HALVES
from ....language.ir import Operator
from ....language.kernels import PROVIDERS, accepting, provider, register
from ....language.types import Operands, TensorType, Value, need
from ....ops.communication.tree_sum import TreeSum
from .. import PREFERRED
from ..device import native
from ..device.native import Call
from .loops import converted


def _others() -> tuple[str, ...]:
    """Whose float32 kernels may run, the most preferred first."""
    return tuple(n for n in PREFERRED if n in PROVIDERS and n != Widened.name)


def wide(op: Operator) -> Operator | None:
    """The operator on float32 in place of 16-bit floats; None where it has none, or would be another operator."""
    values = [*op.reads(), *op.writes()]
    if not any(v.dtype in HALVES for v in values) or op.op.updates or op.op.communicates or op.op.copies:
        return None
    if isinstance(op.op, TreeSum):
        return None  # each of its sums is rounded
    inputs, outputs = ([None if v is None else _widened(v) for v in vs] for vs in (op.inputs, op.outputs))
    try:
        types = op.op.infer(*(None if v is None else v.type for v in inputs))
    except RecomputeError:
        return None
    if any(v is not None and v.type != t for v, t in zip(outputs, types, strict=False)):
        return None  # its element type is an attribute: a conversion, say
    return type(op)(op.op, tuple(inputs), tuple(outputs), op.role)


def _widened(v: Value) -> Value:
    return Value(v.name, v.type.with_dtype("f32")) if v.dtype in HALVES else v


def _converted(op: Operator) -> list[Value]:
    """Operands that are converted, one place after the other."""
    return [v for v in (*op.inputs, *op.outputs) if v is not None and v.dtype in HALVES]


class Widened:
    """The provider; see the module's text."""

    name = "widened"

    def accepts(self, op: Operator) -> bool:
        """Where a float32 kernel does, and the processor converts."""
        if native.unavailable():
            return False
        if any(v.dtype == "f16" for v in _converted(op)) and not native.takes_float16():
            return False
        operator = wide(op)
        return operator is not None and bool(accepting(_others(), operator))

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """The float32 operands, then the kernel's workspace."""
        operator = _wide(op)
        return (*(v.type.with_dtype("f32") for v in _converted(op)), *_kernel(operator).scratch(operator))

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """Conversions, the kernel's calls, conversions."""
        operator, room = _wide(op), iter(scratch)
        before: list[Call] = []
        after: list[Call] = []
        inputs = []
        for arrays, values, reads in ((ins, op.inputs, True), (outs, op.outputs, False)):
            taken = []
            for a, v in zip(arrays, values, strict=False):
                if v is None or v.dtype not in HALVES:
                    taken.append(a)
                    continue
                taken.append(next(room))
                (before if reads else after).append(converted(a, taken[-1]) if reads else converted(taken[-1], a))
            inputs.append(taken)
        return [*before, *_kernel(operator).bind(operator, *inputs, list(room)), *after]


def _wide(op: Operator) -> Operator:
    operator = need(wide(op))
    return operator


def _kernel(op: Operator) -> Any:
    return provider(accepting(_others(), op))


if not native.unavailable():
    register(Widened())
