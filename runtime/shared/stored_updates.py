"""The formulas of updates that store in fewer bits than they compute in, for kernels of any machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...language.element import Expr, argument, cast
from ...language.formulas import Elements
from ...language.ir import Operator
from ...language.types import TensorType
from ...ops.optimizer.base import Update

#: operators that may store so
NAMES = ("SGDUpdate", "MomentumUpdate", "AdagradUpdate", "RMSPropUpdate", "AdamUpdate")


def factors(op: Update, types: Sequence[TensorType | None]) -> list[Expr]:
    """The scalars of a step, of the inputs' elements."""
    b: Any = Elements()
    return list(op.values(b, [None if t is None else argument(i, t.dtype) for i, t in enumerate(types)], "f32"))


def expressions(op: Update, types: Sequence[TensorType | None], scalars: Sequence[Expr]) -> tuple[Expr | None, ...]:
    """The update's results from its inputs' elements in float32: the parameter and each state (None: an absent one).

    State of 8 bits is given decoded.  `scalars`: `factors`, or what stands in their place.
    """
    b: Any = Elements()
    arguments = [None if t is None else argument(i, t.dtype) for i, t in enumerate(types)]
    state = [None if (t := types[i]) is None else _state(op, i, t) for i in op.updates[1:]]
    return op.widened(b, arguments, state, scalars)


def _state(op: Update, at: int, t: TensorType) -> Expr:
    return argument(at, "f32") if op.eight_bits else cast(argument(at, t.dtype), "f32")


def rule_of(op: Operator) -> tuple[Update, tuple[TensorType | None, ...]]:
    """The update, and the types of its inputs, None for each that is absent."""
    rule = op.of(Update)
    types = [None if v is None else v.type for v in op.inputs]
    return rule, (*types, *[None] * (rule.unscale_at + 1 - len(types)))
