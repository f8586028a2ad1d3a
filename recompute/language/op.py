"""The base of all operators: schema, type rule, gradient, cost, numerics and ONNX form in one class.

A subclass is a frozen dataclass whose fields are the operator's attributes, so equality, printing and parsing come
free.  Defining it registers it under its class name; nothing else has to be told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import TypeRuleError, UsageError, nearest
from .types import TensorType

if TYPE_CHECKING:
    import numpy as np

    from .contexts import FunctionWriter, ImportedNode, OperatorBuilder
    from .element import Expr
    from .layouts import Turned
    from .types import Value

#: operator name → class; filled by `Op.__init_subclass__`
REGISTRY: dict[str, type[Op]] = {}
#: what fills the registry when a name is asked for that is not there; the package root says so
_SOURCES: list[Callable[[], object]] = []


@dataclass(frozen=True)
class Cost:
    """What one application costs: floating-point operations, and bytes read and written."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Op:
    """An operator with its attributes, not yet applied to values.

    The parts a subclass gives:

    * `infer` — types of ALL its outputs from the types of its inputs (None: an absent optional input).
    * `compute` — numerics into preallocated buffers; any temporary of more than a few KiB is declared by `scratch`.
    * `gradient` — emits operators that give the gradients of the inputs; whatever it reads stays alive for it.
    * `expand` — the same mathematics as operators that are simpler.  With it, the gradient, the ONNX function body
      and the reference numerics come free; an operator that fuses others should have it.
    * `samples` — small applications; the registry-wide suite checks types, gradients and numerics on each.
    """

    #: how many outputs always exist; those after them are made only when something uses them
    required_outputs: ClassVar[int] = 1
    #: output i is written into the storage of input `updates[i]`, a parameter, buffer or state
    updates: ClassVar[tuple[int, ...]] = ()
    #: draws from the counter-based generator: takes the step counter as an input and has a `seed` attribute
    random: ClassVar[bool] = False
    #: inputs whose buffer output `inplace_output` may take, in order of preference: the numerics stay right, to the
    #: bit, when both are the same memory (same type, and no other input overlaps it)
    inplace: ClassVar[tuple[int, ...]] = ()
    inplace_output: ClassVar[int] = 0
    #: outputs so much smaller than output 0 (statistics) that recomputation never drops them
    small_outputs: ClassVar[tuple[int, ...]] = ()
    #: the numerics copy or reorder elements only (priced by bytes)
    moves_data: ClassVar[bool] = False
    #: moves a value between the device's memory and the host's (see ops/offload.py): no other operator may read or
    #: write values of the host
    copies: ClassVar[bool] = False
    #: no class of this name is registered (a base for others)
    abstract: ClassVar[bool] = True
    #: what mixed precision does with its float32 inputs (see passes/gradient/precision.py): "low": they become the low
    #: type; "full": they stay, or become again, float32; "follow": low where all activations among them are
    autocast: ClassVar[str] = "full"
    #: the inputs that this is about; None: all.  The others stay, or become again, what they were
    autocast_inputs: ClassVar[tuple[int, ...] | None] = None
    #: inputs that are weights: a float constant there is trained even where a node gives it, not an initializer
    weights: ClassVar[tuple[int, ...]] = ()
    #: why the numerics of some or all types run on the host beside a device, "" where none do: they look at values,
    #: or call what no kernel does
    on_host: ClassVar[str] = ""
    #: name of the equivalent ONNX operator; None: exported through `export` or `expand`
    onnx_name: ClassVar[str | None] = None

    def __init_subclass__(cls, abstract: bool = False, onnx: str | bool | None = None, **kw: Any) -> None:
        """Registers the class; `onnx=True` says that ONNX has this operator under the same name."""
        super().__init_subclass__(**kw)
        cls.abstract = abstract
        if onnx is not None:
            cls.onnx_name = cls.__name__ if onnx is True else (onnx or None)
        if not abstract:
            REGISTRY[cls.__name__] = cls

    @property
    def name(self) -> str:
        """The registered name."""
        return type(self).__name__

    def attributes(self) -> dict[str, Any]:
        """Attributes that differ from their defaults, by name, in the order of declaration."""
        return {
            f.name: getattr(self, f.name)
            for f in _fields(type(self))
            if f.default is dataclasses.MISSING or getattr(self, f.name) != f.default
        }

    # -- what a subclass gives ------------------------------------------------------------------------------------

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        """Types of all outputs, optional ones included.  TypeRuleError where the inputs do not fit."""
        raise NotImplementedError(f"{self.name} has no type rule")

    def compute(
        self,
        xp: Any,
        ins: Sequence[np.ndarray],
        outs: Sequence[np.ndarray],
        scratch: Sequence[np.ndarray],
    ) -> None:
        """Writes every output fully; `outs[i]` is None where output i is absent, `ins[i]` where input i is."""
        raise NotImplementedError(f"{self.name} has no numerics")

    def scratch(self, ins: Sequence[TensorType | None], outs: Sequence[TensorType | None]) -> tuple[TensorType, ...]:
        """Types of the temporary buffers that `compute` is handed."""
        return ()

    def overwrites(self, output: int) -> tuple[int, ...]:
        """Inputs whose buffer this output may take, in order of preference; each is taken by one output at most."""
        return self.inplace if output == self.inplace_output else ()

    def channels_last(self, ins: Sequence[Value | None], outs: Sequence[Value | None], rank: int) -> Turned | None:
        """This operator with its activations channels-last, applied to values of up to `rank` dimensions (3 or more).

        None: there is no such form.  See `layouts`, and `ops/channels_last.py` for operators whose form is another.
        """
        return None

    def views(self, ins: Sequence[TensorType | None], outs: Sequence[TensorType | None]) -> tuple[int | None, ...]:
        """For each output, the byte offset in input 0's buffer at which its elements already lie, in order.

        None (or a shorter tuple): it needs a buffer of its own.  Such an output may be bound to its input's buffer,
        and `compute` is not called where all outputs are.
        """
        return ()

    def joins(self, ins: Sequence[TensorType | None], outs: Sequence[TensorType | None]) -> tuple[int | None, ...]:
        """For each input, the byte offset in output 0's buffer at which its elements will lie, in order.

        Inputs that were written there make `compute` unnecessary.  Empty: the operator joins nothing.
        """
        return ()

    def checks(
        self, ins: Sequence[TensorType | None], outs: Sequence[TensorType | None]
    ) -> tuple[tuple[int, Any], ...]:
        """Inputs whose contents the operator refuses when they are not what it needs: an index outside its axis, say.

        Each entry is (position of the input, what is asked of it, in any hashable form): an operator that asks the same
        of the same value later cannot fail any more.  No state is updated before all of a step's questions are
        answered (see passes/cleanup/commit_updates.py), so that a failed step changes nothing.
        """
        return ()

    def again(
        self, ins: Sequence[Value | None], outs: Sequence[Value | None]
    ) -> tuple[Op, tuple[Value | None, ...]] | None:
        """A cheaper operator that gives output 0 once more, to the bit, from this one's inputs and `small_outputs`.

        Returns it with its inputs.  None: there is none, or those outputs are not among `outs`.
        """
        return None

    def gradient(
        self,
        b: OperatorBuilder,
        ins: Sequence[Value | None],
        outs: Sequence[Value],
        grads: Sequence[Value | None],
    ) -> Sequence[Value | None]:
        """Gradients of the inputs, in order (None: zero or not differentiable).

        `outs` has every output, optional ones too: one that gets used is made.  `grads[i]` is None where nothing
        flows into output i.  Without a rule of its own an operator has the gradient of what it expands into.
        """
        return b.gradient_of_expansion(self, ins, grads)

    def expand(self, b: OperatorBuilder, *inputs: Value | None) -> tuple[Value | None, ...] | None:
        """All outputs from simpler operators, or None where this is a primitive."""
        return None

    def element(self, *inputs: Expr | None) -> Any:
        """What it does to one element of its inputs, which broadcast to the shape of its outputs (see element.py).

        An expression, or a tuple of them, one for each output; None where it is not element-wise.  The generated loops
        and the numerics must agree to within a few units in the last place.
        """
        return None

    def channel_element(self, *inputs: Expr | None) -> Any:
        """The same for its channels-last form: inputs with one element a channel broadcast along the last axis."""
        return None

    def cost(self, ins: Sequence[TensorType | None], outs: Sequence[TensorType | None]) -> Cost:
        """The price of one application."""
        moved = sum(t.nbytes for t in (*ins, *outs) if t is not None)
        flops = 0 if self.moves_data else sum(t.size for t in outs if t is not None)
        return Cost(flops, moved)

    def export(self, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> bool:
        """Writes nodes of plain ONNX into `g`; False: `onnx_name` or `expand` is used instead."""
        return False

    @classmethod
    def from_onnx(cls, node: ImportedNode) -> Any:
        """Emits this operator for an ONNX node of the same name; returns its output value(s)."""
        fields = {f.name for f in _fields(cls)}
        attributes = {k: v for k, v in node.attributes.items() if k in fields}
        return node.emit(cls(**attributes), *node.inputs)

    @classmethod
    def samples(cls, draw: Any) -> Iterator[Any]:
        """Small applications for the registry-wide suite: `yield draw.case(op, *inputs)`."""
        return iter(())

    def need(self, *inputs: TensorType | None, count: int) -> None:
        """TypeRuleError unless there are `count` inputs and none of them is absent."""
        if len(inputs) != count or None in inputs:
            raise self.fail(f"takes {count} inputs, all of them present", *inputs)

    def fail(self, why: str, *inputs: TensorType | None) -> TypeRuleError:
        """The error of a type rule (for `raise self.fail(...)`)."""
        types = ", ".join("-" if t is None else str(t) for t in inputs)
        return TypeRuleError(f"{self.name}({types}): {why}")


_FIELDS: dict[type, tuple[dataclasses.Field, ...]] = {}


def _fields(cls: type[Op]) -> tuple[dataclasses.Field, ...]:
    found = _FIELDS.get(cls)
    if found is None:
        found = _FIELDS[cls] = dataclasses.fields(cls)
    return found


def operators_from(source: Callable[[], object]) -> None:
    """`source` defines operators; it is called when a name is asked for that is not there."""
    _SOURCES.append(source)


def op_class(name: str) -> type[Op]:
    """The class registered under `name`.  UsageError with the nearest names where there is none."""
    if name not in REGISTRY:
        for source in _SOURCES:
            source()
    found = REGISTRY.get(name)
    if found is None:
        raise UsageError(f"unknown operator '{name}'{nearest(name, REGISTRY)}")
    return found


#: (domain, operator) → importer, for ONNX operators that become several operators or have another name here
IMPORTERS: dict[tuple[str, str], Any] = {}


def imports(*op_types: str, domain: str = "") -> Any:
    """Registers a function `ImportedNode → Value(s)` for ONNX operators that have no class of their own name."""

    def register(function: Any) -> Any:
        for op_type in op_types:
            IMPORTERS[(domain, op_type)] = function
            if domain == "":
                IMPORTERS[("ai.onnx", op_type)] = function
        return function

    return register
