"""Kernel families of the CPU, by operator, which the provider "numba" runs.

A family is a class in a module of `runtime/cpu/kernels`; see runtime/shared/families.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..shared import families
from .device.native import Call

if TYPE_CHECKING:
    from ...language.ir import Operator

#: elements of the largest operand below which NumPy does as well
ENOUGH = 1 << 14
#: parts into which sums over rows are cut, at most, and rows of a part, at least: the same for any number of threads
PARTS, PART_ROWS = 16, 64

FAMILIES = families.Families(f"{__package__}.kernels")
family = FAMILIES.add


class Family(families.Family[Any, Any, Call]):
    """Kernels of some operators that are alike; operands are arrays."""


def floats(op: Operator) -> bool:
    """Whether all floating operands are float32, or all are float64, and the largest has `ENOUGH` elements."""
    values = (*op.reads(), *op.writes())
    kinds = {v.dtype for v in values if v.type.is_float}
    return len(kinds) == 1 and kinds <= {"f32", "f64"} and max(v.size for v in values) >= ENOUGH


def parts(rows: int) -> int:
    """How many parts sums over so many rows are cut into."""
    return max(1, min(PARTS, rows // PART_ROWS))
