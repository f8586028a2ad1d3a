"""The provider "numba": hand-written kernels, in families by operator.

A family stands in a module of this folder whose name begins with `kernels_`, and is put into the table by

    @family("Softmax", "LogSoftmax")
    class SoftmaxRows(Family): ...

Nothing else has to be told.  Every kernel may be handed an output that is the same memory as the input which the
operator's `inplace` trait names, writes all of its outputs, and gives bits that depend on the operator and its types
only: sums run in a fixed order, whatever the number of threads.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...language.kernels import register
from ...language.types import TensorType
from . import jit
from .native import Call

if TYPE_CHECKING:
    from ...language.ir import Operator

#: elements of the largest operand below which NumPy does as well
ENOUGH = 1 << 14
#: parts into which sums over rows are cut, at most, and rows of a part, at least: the same for any number of threads
PARTS, PART_ROWS = 16, 64


class Family:
    """Kernels of some operators that are alike."""

    def accepts(self, op: Operator) -> bool:
        """Whether there is a kernel for this operator and these types, and it pays."""
        raise NotImplementedError

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Types of the workspace."""
        return ()

    def bind(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> Sequence[Call]:
        """The calls, in order; `ins` and `outs` have None where an optional operand is absent."""
        raise NotImplementedError


#: operator → its kernels
FAMILIES: dict[str, Family] = {}


def family(*names: str) -> Callable[[type[Family]], type[Family]]:
    """Puts a family into the table as what runs the operators of these names."""

    def add(cls: type[Family]) -> type[Family]:
        instance = cls()
        FAMILIES.update((name, instance) for name in names)
        return cls

    return add


@functools.cache
def families() -> dict[str, Family]:
    """The whole table."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name.startswith("kernels_"):
            importlib.import_module(f"{__package__}.{module.name}")
    return FAMILIES


class Numba:
    """The provider; see the module's text."""

    name = "numba"

    def accepts(self, op: Operator) -> bool:
        """Whether a family does."""
        found = families().get(op.op.name)
        return found is not None and found.accepts(op)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """As the family says."""
        return families()[op.op.name].scratch(op)

    def bind(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> Sequence[Call]:
        """The family's calls; trailing operands that are absent are None."""
        return families()[op.op.name].bind(op, (*ins, *(None,) * 8), (*outs, *(None,) * 8), scratch)


# -- what families share ----------------------------------------------------------------------------------------------


def floats(op: Operator) -> bool:
    """Whether all floating operands are float32, or all are float64, and the largest has `ENOUGH` elements."""
    values = (*op.reads(), *op.writes())
    kinds = {v.dtype for v in values if v.type.is_float}
    return len(kinds) == 1 and kinds <= {"f32", "f64"} and max(v.size for v in values) >= ENOUGH


def parts(rows: int) -> int:
    """How many parts sums over so many rows are cut into."""
    return max(1, min(PARTS, rows // PART_ROWS))


if not jit.unavailable():
    register(Numba())
