"""Kernel providers: alternatives to an operator's own numerics (`Op.compute`).

`Operator.kernel` names the kernel provider of an operator; "" is the operator's own `compute`.  The lowering chooses it
(see runtime/cpu), the text form shows it, and it is the same for a recomputed clone, so that results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from ..errors import UsageError, nearest
from .contexts import AppliedOperator
from .types import TensorType


class Provider(Protocol):
    """Kernels of one kind.  `op`: an operator applied, `ir.Operator`."""

    @property
    def name(self) -> str:
        """The name in `Operator.kernel`."""

    def accepts(self, op: Any) -> bool:
        """Whether it can run this operator; depends on the operator and its types only."""

    def scratch(self, op: Any) -> tuple[TensorType, ...]:
        """The temporary buffers that its kernel is handed."""

    def bind(self, op: Any, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> Sequence[Any]:
        """Native calls over these buffers (None: an absent operand), or functions without arguments, in order."""


@runtime_checkable
class Yielding(Protocol):
    """A provider that knows of others' faster kernels."""

    def yields_to(self, op: Any) -> str:
        """The provider whose kernel is faster here for an operator that this one accepts; "": none is."""


#: name → provider
PROVIDERS: dict[str, Provider] = {}
#: what registers providers, in the order in which they are asked for a name that is not there; the package root says so
_SOURCES: list[Callable[[], object]] = []

#: operators of which NumPy moves each element, or rounds it once: the same bits on every machine
EXACT = {
    "Abs", "Add", "And", "BitCast", "Ceil", "Compress", "Concat", "ConstantOfShape", "DepthToSpace", "Div", "Equal",
    "Expand", "EyeLike", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual",
    "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Mul", "Neg", "Not", "OneHot", "Or", "Pad", "Reciprocal",
    "Reshape", "Round", "Shape", "Sign", "Size", "Slice", "SpaceToDepth", "Split", "Sqrt", "Squeeze", "Sub", "Tile",
    "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
}  # fmt: skip

#: how many answers of `accepting` are remembered
_ANSWERS = 1 << 16
_answers: dict[Any, str] = {}


#: whether kernels run all operators, and whether their bits are those of every machine
_everything: list[bool] = []
_portable: list[bool] = []
_by_numpy: list[str] = []


def kernels_run_everything(*, portable: bool = False) -> None:
    """From here on, kernels run all operators of this process: a library has no operators' own numerics, and NumPy's
    bits differ between machines.  `portable`: kernels' do not."""
    _everything[:], _portable[:] = [True], [True] * portable
    _answers.clear()


def bits_are_portable() -> bool:
    """Whether nothing that is computed here may depend on the machine (runtime/cpu/device/portable.py)."""
    return bool(_portable)


def numpy_computed(what: str) -> None:
    """NumPy has computed something of a model here, with this machine's bits; `what`, in a few words."""
    _by_numpy[:] = _by_numpy or [what]


def by_numpy() -> str:
    """Names of what NumPy computed first with this machine's bits, joined; "" if nothing."""
    return "".join(_by_numpy)


def enough(elements: int) -> int:
    """Elements of its operands from which on an operator has a kernel: below, its own numerics do as well, if they
    are there."""
    return 1 if _everything else elements


def accepting(names: tuple[str, ...], op: AppliedOperator) -> str:
    """The first of these providers that accepts an operator, or the one that it yields to; "" where none does.

    A provider's answer depends on the operator and its types, so that it is asked once for all that are alike.
    """
    key = (names, op.op, *(v and v.type for v in op.inputs), None, *(v and v.type for v in op.outputs))
    chosen = _answers.get(key)
    if chosen is None:
        if len(_answers) >= _ANSWERS:
            _answers.clear()
        chosen = _answers[key] = _chosen(names, op)
    return chosen


def _chosen(names: tuple[str, ...], op: AppliedOperator) -> str:
    first = next((n for n in names if provider(n).accepts(op)), "")
    chosen = provider(first) if first else None
    other = chosen.yields_to(op) if isinstance(chosen, Yielding) else ""
    return other if other in names and provider(other).accepts(op) else first


def with_variants(names: tuple[str, ...], products: str) -> tuple[str, ...]:
    """Providers, each behind its variant for blocks whose products may be rounded, where there is one."""
    if not products:
        return names
    return tuple(n for name in names for n in (f"{name}_{products}", name) if n == name or n in PROVIDERS)


def register(provider: Provider) -> None:
    """Makes a provider known by its name."""
    PROVIDERS[provider.name] = provider
    _answers.clear()


def providers_from(source: Callable[[], object]) -> None:
    """`source` registers the providers that can run here; it is called when a name is asked for that is not there."""
    _SOURCES.append(source)


def provider(name: str) -> Provider:
    """The provider of that name.  UsageError where this machine has none."""
    for source in _SOURCES:
        if name not in PROVIDERS:
            source()
    if name not in PROVIDERS:
        raise UsageError(
            f"the program was lowered for kernels of '{name}'{nearest(name, PROVIDERS)}, which are not here: install "
            "the extra that brings them, or compile the program again on this machine"
        )
    return PROVIDERS[name]


def fits(op: AppliedOperator) -> bool:
    """Whether the kernel that an operator names can run it here, in the workspace that it has.

    A program in a file may come from another machine, or from a run with another number of threads.
    """
    try:
        chosen = provider(op.kernel)
        there = tuple(v.type for v in op.scratch)
        return accepting((op.kernel,), op) == op.kernel and tuple(chosen.scratch(op)) == there
    except UsageError:
        return False
