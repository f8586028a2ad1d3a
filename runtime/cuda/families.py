"""The provider "cuda": kernels of our own, in families by operator.

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

import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...kernels import register
from ...types import TensorType
from .kernel import Buffer, Call

if TYPE_CHECKING:
    from ...ir import Operator

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


@functools.cache
def families() -> dict[str, list[Family]]:
    """The whole table."""
    for module in sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)])):
        if module.startswith("kernels_"):
            importlib.import_module(f"{__package__}.{module}")
    return FAMILIES


def family_of(op: Operator) -> Family | None:
    """Who runs an operator; None: nobody."""
    table = families()
    found = next((f for name in ("*", op.op.name) for f in table.get(name, ()) if f.accepts(op)), None)
    if found is not None:
        return found
    from .traced import TRACED

    return TRACED if TRACED.accepts(op) else None


class Cuda:
    """The provider; see the module's text."""

    name = "cuda"

    def find(self, op: Operator) -> Family | None:
        """Who runs an operator."""
        return family_of(op)

    def accepts(self, op: Operator) -> bool:
        """Whether a family does."""
        return self.find(op) is not None

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """As the family says."""
        found = self.find(op)
        assert found is not None
        return found.scratch(op)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """The family's calls."""
        found = self.find(op)
        assert found is not None
        return found.bind(op, (*ins, *(None,) * 8), (*outs, *(None,) * 8), scratch)


register(Cuda())
