"""Kernel families of the CPU, by operator, which the provider "numba" runs.

A family is a class in a module of `runtime/cpu/kernels`; see runtime/shared/families.py.
"""

from __future__ import annotations

from ...language import kernels
from ...language.element import HALVES
from ...language.ir import Operator
from ...language.types import Array, TensorType
from ..shared import families
from .device.jit import call_of
from .device.native import Call

#: elements of the largest operand below which NumPy does as well
ENOUGH = 1 << 14
#: parts into which sums over rows are cut, at most, and rows of a part, at least: the same for any number of threads
PARTS, PART_ROWS = 16, 64


def enough(elements: int | None = None) -> int:
    """Elements of the largest operand (None: `ENOUGH`) from which on a kernel is taken."""
    return kernels.enough(ENOUGH if elements is None else elements)


class Family(families.Family[Array, Array, Call]):
    """Kernels of some operators that are alike; operands are arrays."""


def floats(op: Operator, *, halves: bool = False) -> bool:
    """Whether all floating operands are float32, or all are float64, and the largest has `enough()` elements.

    `halves`: or each is float32 or bfloat16, which kernels widen as they read and round as they write.
    """
    values = (*op.reads(), *op.writes())
    kinds = {v.dtype for v in values if v.type.is_float}
    if not (len(kinds) == 1 and kinds <= {"f32", "f64"}) and not (halves and kinds and kinds <= {"f32", "bf16"}):
        return False
    return max(v.size for v in values) >= enough()


FAMILIES = families.Families(f"{__package__}.kernels", call_of, floats, enough)
family = FAMILIES.add


def computed(x: TensorType) -> TensorType:
    """The type in which kernels compute with elements of this one."""
    return x.with_dtype("f32") if x.dtype in HALVES else x


def parts(rows: int) -> int:
    """How many parts sums over so many rows are cut into."""
    return max(1, min(PARTS, rows // PART_ROWS))
