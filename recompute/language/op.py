"""The base class of operators: schema, type rule, gradient, cost, numerics and ONNX form in one class.

A subclass is a frozen dataclass (see options.py) whose fields are the operator's attributes, so equality, printing and
parsing come free.  Defining it registers it under its class name; no decorator or other registration is needed.
What its methods take is imported from here as well.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import TypeRuleError, UsageError, nearest
from .contexts import FunctionWriter, Imported, ImportedNode, Importing, OperatorBuilder
from .element import Expr, Formula
from .exact import Exact, exact
from .factors import Factor
from .layouts import Turned
from .options import option_fields
from .samples import Case, Draw
from .types import Operands, TensorType, Types, Value, Values

#: operator name → class; filled by `Op.__init_subclass__`
REGISTRY: dict[str, type[Op]] = {}
#: function that fills the registry when a name is looked up that is not in it; set by the package root
_SOURCES: list[Callable[[], object]] = []


@dataclass(frozen=True)
class Cost:
    """The cost of one application: floating-point operations, and bytes read and written."""

    flops: int
    bytes: int


class Op(Exact):
    """An operator with its attributes, not yet applied to values.

    A subclass defines:

    * `infer` — types of ALL its outputs from the types of its inputs (None: an absent optional input).
    * `compute` — numerics into preallocated buffers; any temporary of more than a few KiB is declared by `scratch`.
    * `gradient` — emits operators that compute the gradients of the inputs; values that they read are kept alive.
    * `expand` — a composition of simpler operators.  The gradient, the ONNX function body and the reference numerics
      follow from it; an operator that fuses others should have it.
    * `samples` — small applications; the tests check types, gradients and numerics on each.
    """

    #: how many outputs always exist; the others are computed only if something reads them
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
    #: its result stands for another value, of which it keeps less (see ops/approximation); a user has permitted it
    approximates: ClassVar[bool] = False
    #: moves a value between device and host memory (see ops/memory/offload.py): no other operator may read or
    #: write host values
    copies: ClassVar[bool] = False
    #: takes part in the communication between ranks (see ops/communication/base.py): "begin" or "wait".  Other ranks
    #: rely on it: it is neither removed nor repeated, and keeps its place among its kind
    communicates: ClassVar[str] = ""
    #: takes a value from one stage of a pipeline to another (see ops/communication/border.py)
    crosses_stages: ClassVar[bool] = False
    #: the class is not registered (a base class)
    abstract: ClassVar[bool] = True
    #: treatment of float32 inputs in mixed precision (see passes/gradient/precision.py): "low": cast to the low type;
    #: "full": float32; "follow": the low type if all activations among them have it
    autocast: ClassVar[str] = "full"
    #: the inputs that `autocast` applies to; None: all.  The others keep their original types
    autocast_inputs: ClassVar[tuple[int, ...] | None] = None
    #: inputs that are weights: a float constant there is trained even if it is a node and not an initializer
    weights: ClassVar[tuple[int, ...]] = ()
    #: why the numerics (of some types) must run on the host and not on a device: they depend on values, or call code
    #: without a kernel; "": they need not
    on_host: ClassVar[str] = ""
    #: groups of floating-point inputs in which the result is linear: for sums in all present inputs of a group, the
    #: others being the same, the outputs are the sums of the outputs, up to rounding
    linear: ClassVar[tuple[tuple[int, ...], ...]] = ()
    #: name of the equivalent ONNX operator; None: exported through `export` or `expand`
    onnx_name: ClassVar[str | None] = None

    def __init_subclass__(cls, abstract: bool = False, onnx: str | bool | None = None, **kw: object) -> None:
        """Registers the class; `onnx=True` says that ONNX has this operator under the same name."""
        super().__init_subclass__(**kw)
        if "compute" in vars(cls) and "xp" in inspect.signature(cls.compute).parameters:
            raise UsageError(f"{cls.__name__}.compute: 'xp' has gone: write compute(self, ins, outs, scratch)")
        cls.abstract = abstract
        if onnx is not None:
            cls.onnx_name = cls.__name__ if onnx is True else (onnx or None)
        if not abstract:
            REGISTRY[cls.__name__] = cls

    @property
    def name(self) -> str:
        """The registered name."""
        return type(self).__name__

    @property
    def once(self) -> bool:
        """Whether it must not run again: it changes state, or other ranks or stages take part in it."""
        return bool(self.updates or self.communicates or self.crosses_stages)

    def attributes(self) -> dict[str, Any]:
        """Attributes that differ from their defaults, by name, in the order of declaration."""
        return {
            f.name: getattr(self, f.name)
            for f in option_fields(type(self))
            if f.default is dataclasses.MISSING or exact(getattr(self, f.name)) != exact(f.default)
        }

    def options(self, of: type[Op] | None = None) -> dict[str, Any]:
        """All attributes by name; `of`: those that this base class declares."""
        return {f.name: getattr(self, f.name) for f in option_fields(of or type(self))}

    # -- defined by subclasses ------------------------------------------------------------------------------------

    def infer(self, *inputs: TensorType | None) -> tuple[TensorType, ...]:
        """Types of all outputs, optional ones included.  TypeRuleError for inputs that do not fit."""
        raise NotImplementedError(f"{self.name} has no type rule")

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        """Writes every output completely, with NumPy; None in `ins` and `outs` stands for an absent one."""
        raise NotImplementedError(f"{self.name} has no numerics")

    def scratch(self, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        """Types of the temporary buffers that `compute` gets."""
        return ()

    def overwrites(self, output: int) -> tuple[int, ...]:
        """Inputs over which this output may be written, in order of preference; each by one output at most."""
        return self.inplace if output == self.inplace_output else ()

    def channels_last(self, ins: Values, outs: Values, rank: int) -> Turned | None:
        """The channels-last form of this operator for values of up to `rank` dimensions (3 or more).

        None: there is none.  See `layouts`, and `ops/channels_last.py` for operators with a separate class for it.
        """
        return None

    def views(self, ins: Types, outs: Types) -> tuple[int | None, ...]:
        """For each output, the byte offset in input 0's buffer at which its elements are, in order.

        None (or a shorter tuple): it needs its own buffer.  Other outputs may be bound to the input's buffer, and
        `compute` is not called if all are.
        """
        return ()

    def joins(self, ins: Types, outs: Types) -> tuple[int | None, ...]:
        """For each input, the byte offset in output 0's buffer at which its elements will lie, in order.

        Inputs that were written there make `compute` unnecessary.  Empty: the operator joins nothing.
        """
        return ()

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...] | None:
        """The indices along which the operator can run in slices (see factors.py); what none names is needed whole.

        `outs` has every output, None where an optional one is absent.  None: those of its expansion.
        """
        return None

    def own_slice(self, ins: Types, outs: Types) -> Factor | None:
        """The index of the batch along which the operator runs in slices if each takes statistics of its own.

        None: the operator takes none over the batch.
        """
        return None

    def sliced(self, factor: Factor, start: int, size: int, outs: Types) -> Op:
        """The operator of the slice [start, start + size) of a factor's index; `outs` are the types of its outputs.

        By default only the field that the factor counts changes, and a field `shape` with as many dimensions as output
        0 has, which is then the shape of the slice.
        """
        changes: dict[str, Any] = {}
        if factor.counts:
            changes[factor.counts] = getattr(self, factor.counts) * size // factor.size
        shape = getattr(self, "shape", None)
        if shape is not None and outs[0] is not None and len(shape) == outs[0].ndim:
            changes["shape"] = outs[0].shape
        return dataclasses.replace(self, **changes) if changes else self

    def checks(self, ins: Types, outs: Types) -> tuple[tuple[int, Any], ...]:
        """Inputs whose contents the operator checks, such as an index that must be within its axis.

        Each entry is (position of the input, the condition, in any hashable form): a later operator with the same
        condition on the same value cannot fail.  No state is updated before all checks of a step are done (see
        passes/cleanup/commit_updates.py), so that a failed step changes nothing.
        """
        return ()

    def again(self, ins: Values, outs: Values) -> tuple[Op, tuple[Value | None, ...]] | None:
        """A cheaper operator that recomputes output 0, bit-identically, from this one's inputs and `small_outputs`.

        Returns it with its inputs.  None if there is none, or if those outputs are absent in `outs`.
        """
        return None

    def inference(self, b: OperatorBuilder, ins: Values, running: Values) -> tuple[Value | None, ...] | None:
        """Emits what the operator computes in inference mode, and returns all its outputs; None: the same as in
        training.

        `running`: for each output the running statistic that follows it, if there is one.
        """
        return None

    def gradient(self, b: OperatorBuilder, ins: Values, outs: Sequence[Value], grads: Values) -> Values:
        """Gradients of the inputs, in order (None: zero or not differentiable).

        `outs` has every output, also optional ones: one that is used will be computed.  `grads[i]` is None if no
        gradient flows into output i.  By default, the gradient is that of the expansion.
        """
        return b.gradient_of_expansion(self, ins, grads)

    def expand(self, b: OperatorBuilder, *inputs: Value | None) -> tuple[Value | None, ...] | None:
        """All outputs as a composition of simpler operators; None for a primitive operator."""
        return None

    def element(self, *inputs: Expr | None) -> Formula:
        """Its formula for one element of its inputs, which broadcast to the shape of its outputs (see element.py).

        An expression, or a tuple with one for each output; None if the operator is not element-wise.  The generated
        loops and the numerics must agree to within a few units in the last place.
        """
        return None

    def row_formula(self, b: OperatorBuilder, *inputs: Value | None) -> tuple[Value | None, ...] | None:
        """Its formula over rows, written like `expand`, from which kernels are generated (see rows.py).

        None if it has none; `row_formula = expand` where that is one.
        """
        return None

    def channel_element(self, *inputs: Expr | None) -> Formula:
        """`element` for the channels-last form: inputs with one element per channel broadcast along the last axis."""
        return None

    def cost(self, ins: Types, outs: Types) -> Cost:
        """The cost of one application."""
        moved = sum(t.nbytes for t in (*ins, *outs) if t is not None)
        flops = 0 if self.moves_data else sum(t.size for t in outs if t is not None)
        return Cost(flops, moved)

    def export(self, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> bool:
        """Writes standard ONNX nodes into `g`; False: `onnx_name` or `expand` is used instead."""
        return False

    @classmethod
    def from_onnx(cls, node: ImportedNode) -> Imported:
        """Emits this operator for an ONNX node of the same name; returns its output value(s)."""
        fields = {f.name for f in option_fields(cls)}
        attributes = {k: v for k, v in node.attributes.items() if k in fields}
        return node.emit(cls(**attributes), *node.inputs)

    @classmethod
    def samples(cls, draw: Draw) -> Iterator[Case[Op]]:
        """Small applications for the tests: `yield draw.case(op, *inputs)`."""
        return iter(())

    def need(self, *inputs: TensorType | None, count: int) -> None:
        """TypeRuleError unless there are `count` inputs, none of them absent."""
        if len(inputs) != count or None in inputs:
            raise self.fail(f"takes {count} inputs, all of them present", *inputs)

    def fail(self, why: str, *inputs: TensorType | None) -> TypeRuleError:
        """The error of a type rule (for `raise self.fail(...)`)."""
        types = ", ".join("-" if t is None else str(t) for t in inputs)
        return TypeRuleError(f"{self.name}({types}): {why}")


def operators_from(source: Callable[[], object]) -> None:
    """Sets the function that defines operators when an unknown name is looked up."""
    _SOURCES.append(source)


def op_class(name: str) -> type[Op]:
    """The class registered under `name`.  UsageError with the nearest names if there is none."""
    if name not in REGISTRY:
        for source in _SOURCES:
            source()
    cls = REGISTRY.get(name)
    if cls is None:
        raise UsageError(f"unknown operator '{name}'{nearest(name, REGISTRY)}")
    return cls


#: (domain, operator) → importer, for ONNX operators that become several operators or have another name here
IMPORTERS: dict[tuple[str, str], Importing] = {}


def imports(*op_types: str, domain: str = "") -> Callable[[Importing], Importing]:
    """Registers a function `ImportedNode → Value(s)` for ONNX operators that have no class of their own name."""

    def register(function: Importing) -> Importing:
        for op_type in op_types:
            IMPORTERS[(domain, op_type)] = function
            if domain == "":
                IMPORTERS[("ai.onnx", op_type)] = function
        return function

    return register
