"""Protocols of the objects that are passed to operators, so that the language does not import its users.

`Op` is written against these; the classes that fulfil them stand above it: `builder.Builder`,
`importer.node.NodeContext`, `exporter.function_builder.FunctionBuilder`, `ir.Operator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from .types import TensorType, Value, Values

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from numpy.typing import DTypeLike


class OperatorBuilder(Protocol):
    """The builder with which `Op.gradient` and `Op.expand` emit operators (see `builder.Builder`).

    `b.Relu(x)`, `b.Gemm(x, w, transB=1)`: any registered operator is a method.
    """

    #: prefix of all generated names
    prefix: str

    def emit(self, op: Any, *inputs: Value | None, name: str | None = None, want: int | None = None) -> Any:
        """Applies an operator: its output value, or a tuple of them; `want`: how many."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """`(*inputs, want=None, **attributes)` applies the operator of that name."""

    def constant(self, value: object, like: Value | TensorType | str) -> Value:
        """A declared constant of `like`'s element type."""

    def fill(self, value: float, like: Value | TensorType) -> Value:
        """A value of `like`'s type, every element `value`."""

    def sum_to(self, x: Value, shape: Sequence[int]) -> Value:
        """Undoes NumPy broadcasting."""

    def add_all(self, values: Sequence[Value]) -> Value:
        """The sum of one or more values of one type, from left to right."""

    def gradient_of_expansion(self, op: Any, ins: Values, grads: Values) -> Values:
        """Gradients of the inputs of `op` by differentiating its expansion.  TypeRuleError if it has none."""


class NodeWriter(Protocol):
    """The builder with which importers write the standard ONNX nodes that replace a node (see `importer.body.Body`).

    `y = g.Add(g.ins[0], "k")` returns the name of the result; "" is an absent value.  `ins`: the node's inputs.
    """

    ins: list[str]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """`(*inputs, outputs=1, domain="", **attributes)` writes a node: its output's name, or a list of them."""

    def constant(self, value: object, dtype: DTypeLike = ...) -> str:
        """A constant's name; integers without `dtype`."""

    def weight(self, attribute: str, value: object, dtype: DTypeLike) -> str:
        """An attribute's contents as a weight of the file, which may train; its name."""

    def arange(self, n: int, dtype: DTypeLike = ...) -> str:
        """0, 1, ..., n - 1, with a dimension before them."""

    def shared(self, name: str, make: Callable[[], str]) -> str:
        """A value that nodes compute once for the whole model, under a fixed name."""

    def results(self, *names: str | None) -> list[onnx.NodeProto]:
        """The nodes, with these results as the replaced node's outputs."""


#: the import of a node: its value, its values, or nodes in its place; None: the importer does not know this form
Imported: TypeAlias = "Value | tuple[Value | None, ...] | list[onnx.NodeProto] | None"


class ImportedNode(Protocol):
    """One ONNX node, as `Op.from_onnx` sees it (see `importer.node.NodeContext`).

    `outputs`: names of its outputs; `quantized`: operators whose gradients ignore their rounding.
    """

    attributes: dict[str, Any]
    op_type: str
    opset: int
    builder: Any
    outputs: tuple[str, ...]
    quantized: dict[str, tuple[Any, ...]] | None

    @property
    def training(self) -> bool:
        """Whether this node trains."""

    @property
    def unbiased(self) -> bool:
        """Whether running variances divide by n - 1, as PyTorch's do; ONNX's divide by n."""

    @property
    def source(self) -> str:
        """The PyTorch operator that the node was exported from; "" where the file does not say it."""

    @property
    def inputs(self) -> list[Value | None]:
        """Input values; None where an optional one is absent."""

    @property
    def base(self) -> str:
        """The name that stands for the node: its first output's."""

    def name(self, i: int) -> str:
        """The name of input `i`, "" where it is absent."""

    def named(self, name: str) -> Value:
        """A value of the model by its name."""

    def input(self, i: int) -> Value | None:
        """Input `i`, None where it is absent; a constant becomes a value."""

    def need(self, i: int) -> Value:
        """Input `i`; a ModelError where it is absent."""

    def need_type(self, i: int) -> TensorType:
        """The type of input `i`; a ModelError where it is absent."""

    def type(self, i: int) -> TensorType | None:
        """The type of input `i` without making a constant a value."""

    def constant(self, i: int) -> np.ndarray | None:
        """The contents of input `i` where they are known at compile time, else None."""

    def whole(self, i: int, *, stored: bool = True) -> Value | None:
        """The float that holds the integers of input `i` and has a gradient; None if there is none."""

    def numbers(self, to: str) -> Value:
        """Input 0 for a cast to an element type: for a float the one that holds its integers, if there is one."""

    def stand(self, x: Value, *, stored: bool = False) -> None:
        """Notes that the float x holds the numbers of the node's first output, which are integers."""

    def origin(self, i: int) -> str | None:
        """Where the contents of input `i` come from, None where they are not known."""

    def need_constant(self, i: int, what: str) -> np.ndarray:
        """`constant(i)`, or a ModelError that states that `what` must be known."""

    def wants(self, i: int) -> bool:
        """Whether output `i` is used."""

    def emit(self, op: Any, *inputs: Value | None, want: int | None = None) -> Any:
        """Applies an operator; trailing absent inputs are dropped."""

    def buffer(self, i: int) -> Value:
        """Input `i` as a buffer: kept, but not trained."""

    def frozen(self, i: int) -> Value:
        """Input i as a value that nothing updates: with another shape only, it shares an initializer's buffer."""

    def step(self) -> Value:
        """The step counter (i64[]), state of the program."""

    def random_seed(self) -> int:
        """The key of the next random operator."""

    def body(self) -> NodeWriter:
        """For importers that write plain ONNX nodes."""

    def unrolled(self, steps: int) -> bool:
        """Whether this recurrent node is to be written step by step."""

    def fail(self, why: str) -> Exception:
        """The ModelError about this node."""


#: an importer of one kind of nodes
Importing = Callable[[ImportedNode], Imported]


class FunctionWriter(Protocol):
    """The builder with which `Op.export` writes standard ONNX nodes (see `exporter.function_builder.FunctionBuilder`).

    Values are given by name; "" is an absent value.
    """

    def node(self, op_type: str, ins: Sequence[str], outs: Sequence[str], **attributes: Any) -> None:
        """A node of ONNX's default domain."""

    def call(self, op_type: str, *ins: str, **attributes: Any) -> str:
        """A node with one output; returns its name."""

    def fresh(self, hint: str) -> str:
        """An unused name."""

    def array(self, array: np.ndarray) -> str:
        """The name of a constant."""

    def ints(self, values: Sequence[int]) -> str:
        """The name of an int64 constant vector."""

    def scalar(self, value: object, like: str) -> str:
        """The name of a constant without dimensions, of `like`'s element type."""

    def zero(self, like: str) -> str:
        """0 of `like`'s element type."""

    def cast_like(self, name: str, like: str) -> str:
        """`name` cast to `like`'s element type."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The dimensions of a value."""

    def type(self, name: str) -> TensorType:
        """The type of a value."""

    def expand(self, op: Any, ins: Sequence[str], outs: Sequence[str]) -> None:
        """Writes the expansion of an operator."""


class AppliedOperator(Protocol):
    """An operator with its inputs and outputs, as kernel providers see it (see `ir.Operator`)."""

    @property
    def op(self) -> Any:
        """The operator with its attributes."""

    @property
    def inputs(self) -> tuple[Value | None, ...]:
        """None where an optional one is absent."""

    @property
    def outputs(self) -> tuple[Value | None, ...]:
        """None where an optional one is absent."""

    @property
    def scratch(self) -> tuple[Value, ...]:
        """Temporary buffers."""

    @property
    def kernel(self) -> str:
        """Its kernel provider; "": its own numerics."""
