"""Kernel families for CUDA devices, by operator, which the provider "cuda" runs.

A family is a class in a module of `runtime/cuda/kernels`; see runtime/shared/families.py.  No kernel uses atomic
additions.  What no family takes runs as its expansion (expanded.py), and what has none on the host.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import ClassVar

from ...language.ir import Operator
from ..shared import families
from .code.python_kernels import call_of
from .code.strided import WORDS
from .device.kernel import C_TYPES, Buffer, Call

#: operands as `bind` is given them: None where an optional one is absent, with None behind the last one
Buffers = Sequence["Buffer | None"]

FAMILIES = families.Families(
    f"{__package__}.kernels",
    call_of,
    lambda op: all(v.dtype in C_TYPES for v in (*op.reads(), *op.writes())),
)
family = FAMILIES.add


class Family(families.Family["Buffer | None", Buffer, Call]):
    """Kernels of some operators that are alike; operands are buffers on the device.

    `takes`: element types of operands, where that is all that it asks.
    """

    takes: ClassVar[Container[str]] = C_TYPES

    def accepts(self, op: Operator) -> bool:
        """Whether there is a kernel for this operator and these types; depends on those only."""
        return all(v.dtype in self.takes for v in (*op.reads(), *op.writes()))


class Moving(Family):
    """A family that moves elements of every type whose size is a word's."""

    def accepts(self, op: Operator) -> bool:
        return all(v.type.numpy.itemsize in WORDS for v in (*op.reads(), *op.writes()))
