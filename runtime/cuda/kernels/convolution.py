"""Convolutions, transposed convolutions and their gradients, in both layouts, by kernels of this package and cuBLAS.

Each way to compute one is a plan made from shapes and types: what it needs as workspace and what it launches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

from ....language.ir import Operator
from ....language.types import TensorType, need
from ....ops.channels_last import FORMS
from ....ops.convolution.conv import Conv, ConvGradInput, ConvGradWeight
from ....ops.convolution.transposed import ConvTranspose
from ...shared.convolved import Convolved, convolved, operands
from ..convolution.columns import by_columns
from ..convolution.depthwise import depthwise
from ..convolution.products import pointwise
from ..convolution.tiles import GatherPlan, WeighPlan
from ..device.kernel import Buffer, Call, Fill
from ..families import Buffers, Family, family

_OPERATORS = (Conv, ConvGradInput, ConvGradWeight, ConvTranspose)
FLOATS = ("f32", "f64", "f16", "bf16")


class Plan(Protocol):
    """How one convolution is computed."""

    @property
    def scratch(self) -> tuple[TensorType, ...]:
        """Types of the workspace."""

    def bind(self, x: Buffer, w: Buffer, y: Buffer, bias: Buffer | None, scratch: Sequence[Buffer]) -> list[Call]:
        """The calls; which of x, w and y is written is the convolution's kind."""


@functools.lru_cache(maxsize=4096)
def plan(c: Convolved, dtype: str, *, tf32: bool = False) -> Plan:
    """The way to compute a convolution that is not empty; `tf32`: float32 factors may be rounded to TF32."""
    tf32 = tf32 and dtype == "f32"
    if chosen := depthwise(c, dtype) or pointwise(c, dtype) or by_columns(c, dtype, tf32=tf32):
        return chosen
    return WeighPlan(c, dtype) if c.kind == "weight" else GatherPlan(c, dtype)


def _known(op: Operator) -> Convolved | None:
    """The convolution that an operator computes, if it has three axes at most."""
    convolution = convolved(op, FLOATS, empty=True)
    return convolution if convolution is not None and len(convolution.geometry.window.out) <= 3 else None


def _empty(c: Convolved) -> bool:
    return 0 in (*c.x, *c.w, *c.y)


def _planned(op: Operator, *, tf32: bool) -> Plan | None:
    """None where there is nothing to multiply."""
    convolution = need(_known(op))
    return None if _empty(convolution) else plan(convolution, next(iter(op.writes())).dtype, tf32=tf32)


@family(*(name for op in _OPERATORS for name in (op.__name__, FORMS[op].__name__)))
class Convolutions(Family):
    """All kinds, both layouts.  `tf32`: in the way that suits float32 products with factors rounded to TF32."""

    def __init__(self, *, tf32: bool = False) -> None:
        self.tf32 = tf32

    def accepts(self, op: Operator) -> bool:
        """Floats; empty ones without a bias, or without a result."""
        convolution = _known(op)
        return convolution is not None and (not _empty(convolution) or not convolution.bias or not op.outputs[0].size)  # type: ignore[union-attr]

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        chosen = _planned(op, tf32=self.tf32)
        return () if chosen is None else chosen.scratch

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        chosen = _planned(op, tf32=self.tf32)
        if chosen is None:
            assert outs[0] is not None
            return [Fill(outs[0])] if outs[0].size else []
        x, w, y, bias = operands(op, ins, outs)
        return chosen.bind(x, w, y, bias, scratch)
