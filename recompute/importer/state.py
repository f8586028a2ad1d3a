"""The state of an import: declarations, constants, values and limits.

The parts of the importer use it; the importer itself (`load.Importer`) runs nodes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from ..errors import ModelError
from ..language.builder import Builder, Names
from ..language.ir import Operator, Value
from ..language.op import REGISTRY
from ..language.types import TensorType
from .fold import Known
from .graphs import names_read
from .limits import Budget
from .mask_numbering import Numbering
from .mask_selection import Selected
from .model import main_opset
from .trained import TrainRule
from .unrolled import Unrolled

#: metadata of models whose run changes buffers: buffer → the value that it holds afterwards, as JSON
BUFFERS = "recompute.buffers"
#: constants of at most this many elements are part of the program's text, larger ones become buffers
_INLINE = 64


@dataclass(frozen=True)
class Stand:
    """A float that holds the numbers of an integer value, with a gradient; `stored`: made by QuantizeLinear alone."""

    value: Value
    stored: bool


class ImportState(ABC):
    """The imported values so far, and methods to run more nodes.

    `known`: contents known at compile time; `env`: values of the program; `sequences`: names of a
    sequence's tensors; `used`: names that something reads; `selected`: what masks keep of values (masks.py); `stands`:
    floats that hold integers, by the integers' names (whole.py); `casts`: of parameters in float32 to the file's 16
    bits; `in_place`: parameters of 16 bits.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        *,
        training: bool | None,
        seed: int,
        rule: TrainRule,
        budget: Budget | None = None,
        unroll: bool | Sequence[str] = False,
        quantized: dict[str, tuple[Any, ...]] | None = None,
    ) -> None:
        self.graph = model.graph
        self.opset = main_opset(model)
        self.budget = budget or Budget()
        self._opsets = {o.domain: o.version for o in model.opset_import}
        self.training = training
        self.rule = rule
        self.initializers = {t.name: t for t in self.graph.initializer}
        self.known: dict[str, Known] = {name: Known.of_initializer(t) for name, t in self.initializers.items()}
        for name, constant in self.known.items():
            constant.trains = constant.type.is_float and rule.is_parameter(name)
        self.sequences: dict[str, list[str]] = {}
        self.stands: dict[str, Stand] = {}
        self.without_gradient: list[str] = []
        self.nothing: set[str] = set()  # empty optionals
        self.canonical: dict[str, str] = {}  # a known constant's further name → its own
        self.scopes: dict[str, str] = {}  # see onnx_subgraph
        self.held: set[str] = set()
        self.unroll = Unrolled(unroll)
        self.quantized = quantized
        self.used = set(names_read(self.graph.node)) | {o.name for o in self.graph.output}
        written = {o for node in self.graph.node for o in node.output}
        names = Names(written.union(self.known, (i.name for i in self.graph.input)))
        self.builder = Builder(names)
        self.selected, self.numbering = Selected(), Numbering(self.builder)
        self.env: dict[str, Value] = {}
        self.inputs: list[Value] = []
        self.parameters: dict[str, Value] = {}
        self.casts: list[Operator] = []
        self.in_place: list[str] = []
        self.buffers: dict[str, Value] = {}
        self.state: dict[str, Value] = {}
        self.changed: dict[str, str] = {}
        self.data: dict[str, np.ndarray] = {}
        self.aliases: dict[str, str] = {}
        self._seed, self._random = seed, 0
        self._problems: list[str] = []

    # -- implemented by the importer ------------------------------------------------------------------------------

    @abstractmethod
    def run_node(self, node: onnx.NodeProto) -> None:
        """Imports a node; a failure is recorded (see `problems`)."""

    @abstractmethod
    def run_plain(self, node: onnx.NodeProto) -> None:
        """Folds a node, or hands it to its operator; raises what is wrong with it."""

    @abstractmethod
    def run_nodes(self, nodes: Sequence[onnx.NodeProto]) -> None:
        """Imports nodes in order."""

    @abstractmethod
    def expand_node(self, node: onnx.NodeProto) -> None:
        """Runs the body that ONNX defines for a node; without one, ONNX's evaluator may run the node."""

    # -- declarations ---------------------------------------------------------------------------------------------

    def declare_inputs(self, types: Mapping[str, TensorType]) -> None:
        """Declares the graph's inputs with their fixed types."""
        for name, t in types.items():
            self.env[name] = Value(name, t)
            self.inputs.append(self.env[name])

    def declare_changed(self, source: onnx.ModelProto) -> None:
        """Declares the buffers that the model says its run changes (`BUFFERS`): they are no constants."""
        text = next((p.value for p in source.metadata_props if p.key == BUFFERS), "{}")
        try:
            changed = json.loads(text)
        except (ValueError, RecursionError):
            changed = None
        if not isinstance(changed, dict) or not all(isinstance(v, str) for v in changed.values()):
            raise ModelError(f"the model has damaged metadata: {BUFFERS} does not name buffers and values")
        for name, value in changed.items():
            if name not in self.known or self.known[name].trains:
                raise ModelError(f"the model has damaged metadata: {BUFFERS} names '{name}', which is no buffer")
            self.buffer(name)
            del self.known[name]
            self.changed[name] = value

    def step(self) -> Value:
        """Declares the step counter at its first use."""
        if not self.state:
            name = self.builder.names.take("step")
            self.state[name] = Value(name, TensorType("i64", ()))
            self.data[name] = np.zeros((), np.int64)
        return next(iter(self.state.values()))

    def random_seed(self) -> int:
        """A key of 63 bits from the seed and the operator's number (SplitMix64's finaliser)."""
        self._random += 1
        z = (self._seed * 0x9E3779B97F4A7C15 + self._random * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        return (z ^ (z >> 31)) >> 1

    # -- values ---------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether a name is a value, a known constant or a sequence so far."""
        return (
            name in self.env or name in self.known or name in self.sequences
            or name in self.nothing or name in self.selected.lengths
        )  # fmt: skip

    def constant(self, array: np.ndarray) -> Known:
        """A constant made by the importer."""
        self.budget.take(array.nbytes)
        return Known(array, "folded")

    def declare_initializer(self, name: str, t: onnx.TensorProto) -> None:
        """Declares an initializer of a subgraph under a unique name."""
        self.known[name] = Known.of_initializer(t)

    def alias(self, name: str, other: str) -> None:
        """Adds a name for a value, a known constant or a sequence; does nothing for outputs of a failed node."""
        if name == other:
            return
        self.selected.alias(name, other)
        if other in self.env:
            self.env[name] = self.env[other]
            self.aliases[name] = self.env[other].name
        elif other in self.known:
            self.known[name] = self.known[other]
            self.canonical[name] = self.canonical.get(other, other)
        elif other in self.sequences:
            self.sequences[name] = self.sequences[other]
        elif other in self.nothing:
            self.nothing.add(name)

    def stand(self, name: str, value: Value, *, stored: bool = False) -> None:
        """Notes the float that holds the numbers of an integer value."""
        self.stands[name] = Stand(value, stored)

    def problems(self) -> int:
        """The number of nodes that could not be imported so far."""
        return len(self._problems)

    def opset_of(self, domain: str) -> int:
        """The opset version of a domain: that of the model, limited to what the installed onnx supports."""
        ours = domain in ("", "ai.onnx")
        return min(self.opset, onnx.defs.onnx_opset_version()) if ours else self._opsets.get(domain, 1)

    def contents(self, name: str) -> Known | None:
        """The known contents of a value, for operators that need them at compile time."""
        return self.known.get(name)

    def type_of(self, name: str) -> TensorType:
        """The type of a value or known constant."""
        if name in self.selected.lengths:
            return TensorType("i64", self.selected.lengths[name].shape)
        return self.env[name].type if name in self.env else self.known[name].type

    def value(self, name: str, op_type: str, position: int) -> Value:
        """The value called `name`; a known constant is declared as its use requires."""
        name = self.canonical.get(name, name)
        if name in self.env:
            return self.env[name]
        constant = self.known.get(name)
        if constant is None:
            raise ModelError(f"'{name}' is read but never written")
        t = constant.type
        if t.dtype == "string":
            raise ModelError(f"'{name}' contains strings: results computed from them must be known at compile time")
        if self.rule.trains(name, constant, op_type, position):
            self.env[name] = self.parameters[name] = Value(name, t)
            self.data[name] = _read_only(constant.array)
            if t.dtype in ("f16", "bf16"):
                self._in_float32(name, t)
        elif t.size <= _INLINE and constant.origin != "initializer":
            return self.builder.constant(constant.array, t)  # not stored: a later use may be as a weight
        elif t.size <= 1 and t.ndim == 0:
            self.env[name] = self.builder.constant(constant.array, t)
        else:
            return self.buffer(name)
        return self.env[name]

    def _in_float32(self, name: str, t: TensorType) -> None:
        """Keeps a parameter of 16 bits in float32, cast once a step: small updates would be lost in 16 bits.

        Those that are no initializers of the graph itself, or outputs, train in place.
        """
        if name not in self.initializers or name in (o.name for o in self.graph.output):
            self.in_place.append(name)
            return
        master = self.parameters[name] = Value(name, t.with_dtype("f32"))
        self.data[name] = _read_only(self.data[name].astype(np.float32))
        self.env[name] = Value(self.builder.names.take(f"{name}.{t.dtype}"), t)
        cast: Any = REGISTRY["Cast"]
        self.casts.append(Operator(cast(to=t.dtype), (master,), (self.env[name],)))

    def buffer(self, name: str) -> Value:
        """The value called `name`; a known constant becomes a buffer, which an operator may update."""
        name = self.canonical.get(name, name)
        if name not in self.env:
            constant = self.known[name]
            self.env[name] = self.buffers[name] = Value(name, constant.type)
            self.data[name] = _read_only(constant.array)
        return self.env[name]


def _read_only(array: np.ndarray) -> np.ndarray:
    """A read-only view: copies of one tensor share it until a program that trains them is run."""
    view = array.view()
    view.flags.writeable = False
    return view
