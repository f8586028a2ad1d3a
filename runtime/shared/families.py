"""Kernel families: hand-written kernels for similar operators; all files of a place's folder `kernels` are imported.

    @family("Softmax", "LogSoftmax")
    class SoftmaxRows(Family): ...

puts a family into the table of its place; nothing else has to be registered.  An operator has one family.  One that is
registered for "*" is asked before it, for every operator: element-wise operators have the same bits alone and inside a
Loop.  Families of the folder `kernels` beside this file serve every place: their kernels are `texts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ...language.ir import Operator
from ...language.types import TensorType
from ...support.plug_ins import import_all
from ...support.threads import once
from .texts import Work

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


#: the families that serve every place: the operators' names, and the class
_SHARED: list[tuple[tuple[str, ...], type[SharedFamily]]] = []


class SharedFamily(Family[Any, Any, Any]):
    """Kernels with one text for every place; operands are arrays on a processor and buffers on a device.

    What `works` gives may be calls of the place, too.
    """

    def __init__(self, place: Families) -> None:
        self.place = place

    def accepts(self, op: Operator) -> bool:
        """Types with which the place's kernels compute, and enough elements."""
        return self.place.serves(op)

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> Sequence[Any]:
        """What there is to do, in order; operands as of `bind`."""
        raise NotImplementedError

    def bind(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> Sequence[Any]:
        """The place's calls."""
        works = self.works(op, ins, outs, scratch)
        return [self.place.made(w) if isinstance(w, Work) else w for w in works if not isinstance(w, Work) or w.items]


def family(*names: str) -> Callable[[type], type]:
    """Class decorator: these operators run by an instance for each place."""

    def put(cls: type) -> type:
        _SHARED.append((names, cls))
        return cls

    return put


class Families:
    """The families of a place, by operator; `package` holds their modules.

    `made`: the place's call of a kernel.  `serves`: whether its kernels compute with an operator's types, and pay.
    `enough`: elements from which on a processor's kernel is taken; None for a device.
    """

    def __init__(
        self,
        package: str,
        made: Callable[[Work], Any],
        serves: Callable[[Operator], bool],
        enough: Callable[..., int] | None = None,
    ) -> None:
        self.package, self.made, self.serves = package, made, serves
        self.device, self.enough = enough is None, enough or (lambda elements=0: 0)
        #: computed(formula, dtype, ins, outs): the calls of a generated loop
        self.computed: Callable[..., Sequence[Any]]
        #: filled(y, value), copied(y, x): calls that write all of y, where it is not there
        self.filled: Callable[[Any, float], Sequence[Any]]
        self.copied: Callable[[Any, Any], Sequence[Any]]
        #: words(run, *operands): matrices with rows of `run` elements, as words that are moved in their place
        self.words: Callable[..., Sequence[Any]]
        self._every: list[Any] = []
        self._own: dict[str, Any] = {}
        self._load = once(self._import)

    def add(self, *names: str) -> Callable[[type], type]:
        """Class decorator: an instance runs the operators of these names.  ValueError where one has one already."""

        def put(cls: type) -> type:
            self._put(cls(self) if issubclass(cls, SharedFamily) else cls(), *names)
            return cls

        return put

    def _put(self, instance: Any, *names: str) -> None:
        for name in names:
            if name == EVERY:
                self._every.append(instance)
            elif name in self._own:
                raise ValueError(f"{name} has the kernels of {type(self._own[name]).__name__} already")
            else:
                self._own[name] = instance

    def table(self) -> dict[str, Any]:
        """Operator → its family, without those of "*"; the first call imports the folders."""
        self._load()
        return self._own

    def _import(self) -> None:
        import_all(self.package)
        import_all(f"{__package__}.kernels")
        for names, cls in _SHARED:
            self._put(cls(self), *names)

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
