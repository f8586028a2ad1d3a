"""Families of kernels of our own, by operator (see `own_kernels`, the provider "cuda").

A family stands in a module of this folder whose name begins with `kernels_`, and is put into the table by

    @family("Softmax", "LogSoftmax")
    class SoftmaxRows(Family): ...

Nothing else has to be told.  Every kernel may be handed an output that is the same memory as the input which the
operator's `overwrites` names, writes all of its outputs, and gives bits that depend on the operator and its types only:
no atomic additions, sums in a fixed order.  Where several families of a name exist, the first that accepts runs it, one
of "*" before all others (element-wise operators have the same bits alone and in a Loop); what no family takes, `traced`
does (its own numerics, recorded), and what that cannot, the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...language.types import TensorType
from .kernel import Buffer, Call

if TYPE_CHECKING:
    from ...language.ir import Operator

#: operands as `bind` is handed them: None where an optional one is absent, with None behind the last one
Buffers = Sequence["Buffer | None"]


class Family:
    """Kernels of some operators that are alike."""

    def accepts(self, op: Operator) -> bool:
        """Whether there is a kernel for this operator and these types; depends on those only."""
        raise NotImplementedError

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Types of the workspace."""
        return ()

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """The calls, in order."""
        raise NotImplementedError


#: operator → its kernels, in the order of their modules' names
FAMILIES: dict[str, list[Family]] = {}


def family(*names: str) -> Callable[[type[Family]], type[Family]]:
    """Puts a family into the table as what runs the operators of these names."""

    def add(cls: type[Family]) -> type[Family]:
        instance = cls()
        for name in names:
            FAMILIES.setdefault(name, []).append(instance)
        return cls

    return add
