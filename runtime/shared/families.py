"""Kernel families: hand-written kernels for similar operators; all files of a place's folder `kernels` are imported.

    @family("Softmax", "LogSoftmax")
    class SoftmaxRows(Family): ...

puts a family into the table of its place; nothing else has to be registered.  An operator has one family.  One that is
registered for "*" is asked before it, for every operator: element-wise operators have the same bits alone and inside a
Loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ...language.ir import Operator
from ...language.types import TensorType
from ...support.plug_ins import import_all

#: an operand of a kernel (None where it is absent), its workspace, and what launches or calls it
Operand = TypeVar("Operand")
Scratch = TypeVar("Scratch")
Call = TypeVar("Call")
#: families that are registered for this name are asked for every operator
EVERY = "*"


class Family(Generic[Operand, Scratch, Call]):
    """Kernels of some operators that are alike.

    Every kernel may be given an output in the same memory as the input that the operator's `overwrites` names, writes
    all of its outputs, and gives bits that depend on the operator and its types only: sums run in a fixed order.
    """

    def accepts(self, op: Operator) -> bool:
        """Whether there is a kernel for this operator and these types; depends on those only."""
        raise NotImplementedError

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Types of the workspace."""
        return ()

    def bind(
        self, op: Operator, ins: Sequence[Operand], outs: Sequence[Operand], scratch: Sequence[Scratch]
    ) -> Sequence[Call]:
        """The calls, in order; `ins` and `outs` have None where an optional operand is absent."""
        raise NotImplementedError


class Families:
    """The families of a place, by operator; `package` holds their modules."""

    def __init__(self, package: str) -> None:
        self.package = package
        self._every: list[Any] = []
        self._own: dict[str, Any] = {}
        self._loaded = False

    def add(self, *names: str) -> Callable[[type], type]:
        """Class decorator: an instance runs the operators of these names.  ValueError where one has one already."""

        def put(cls: type) -> type:
            instance = cls()
            for name in names:
                if name == EVERY:
                    self._every.append(instance)
                elif name in self._own:
                    raise ValueError(f"{name} has the kernels of {type(self._own[name]).__name__} already")
                else:
                    self._own[name] = instance
            return cls

        return put

    def table(self) -> dict[str, Any]:
        """Operator → its family, without those of "*"; the first call imports the folder."""
        if not self._loaded:
            import_all(self.package)
            self._loaded = True
        return self._own

    def find(self, op: Operator) -> Any:
        """The family that runs an operator; None where there is none."""
        families = self.table().get(op.op.name)
        return next((f for f in (*self._every, *([families] if families else ())) if f.accepts(op)), None)


class FamilyProvider:
    """A kernel provider that runs families (see recompute/language/kernels.py)."""

    name: str

    def find(self, op: Operator) -> Any:
        """The family that runs an operator; None where there is none."""
        raise NotImplementedError

    def accepts(self, op: Operator) -> bool:
        """Whether a family does."""
        return self.find(op) is not None

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """The family's workspace."""
        return self.find(op).scratch(op)

    def bind(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> Sequence[Any]:
        """The family's calls; absent operands at the end are None."""
        return self.find(op).bind(op, (*ins, *(None,) * 8), (*outs, *(None,) * 8), scratch)
