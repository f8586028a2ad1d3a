"""The ONNX node that is passed to `Op.from_onnx`."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from ..errors import ModelError
from ..language.ir import Value
from ..language.op import Op
from ..language.types import TensorType
from .body import Body
from .graphs import first_output
from .inputs import unknown
from .origin import source_operator
from .schema import describe
from .state import ImportState


class NodeContext:
    """One ONNX node, as `Op.from_onnx` sees it."""

    def __init__(self, importer: ImportState, node: onnx.NodeProto, attributes: dict[str, Any]) -> None:
        self._importer = importer
        self._node = node
        self.attributes = attributes
        self.op_type = node.op_type
        self.opset = importer.opset
        self.builder = importer.builder
        self.outputs = tuple(node.output)
        self.quantized = importer.quantized

    @property
    def training(self) -> bool:
        """Whether this node trains: as the program's mode says, or (mode "file") as the node itself says."""
        if self._importer.training is not None:
            return self._importer.training
        if self.op_type == "Dropout":
            return self.type(2) is not None and bool(self.need_constant(2, "training_mode").reshape(())[()])
        return bool(self.attributes.get("training_mode", 0))

    @property
    def unbiased(self) -> bool:
        """Whether running variances divide by n - 1, as PyTorch's do."""
        return self._importer.rule.origin.from_torch

    @property
    def source(self) -> str:
        """The PyTorch operator that the node was exported from; "" where the file does not say it."""
        return source_operator(self._node)

    @property
    def inputs(self) -> list[Value | None]:
        """Input values; None where an optional one is absent.  Constants become values when asked for here."""
        return [self.input(i) for i in range(len(self._node.input))]

    def name(self, i: int) -> str:
        """The name of input `i`, "" where it is absent."""
        return self._node.input[i] if i < len(self._node.input) else ""

    def named(self, name: str) -> Value:
        """A value of the model by its name."""
        return self._importer.value(name, "", 0)

    def input(self, i: int) -> Value | None:
        """Input number `i`, None where it is absent."""
        if not self.name(i):
            return None
        return self._importer.value(self._node.input[i], self.op_type, i)

    def need(self, i: int) -> Value:
        """Input number `i`; a ModelError where it is absent."""
        if (value := self.input(i)) is None:
            raise self.fail(f"its input {i} is absent")
        return value

    def need_type(self, i: int) -> TensorType:
        """The type of input `i`; a ModelError where it is absent."""
        if (t := self.type(i)) is None:
            raise self.fail(f"its input {i} is absent")
        return t

    def type(self, i: int) -> TensorType | None:
        """The type of input `i` without making a constant a value."""
        return None if not self.name(i) else self._importer.type_of(self._node.input[i])

    def constant(self, i: int) -> np.ndarray | None:
        """The contents of input `i` where they are known at compile time, else None."""
        if not self.name(i):
            return None
        contents = self._importer.contents(self._node.input[i])
        return None if contents is None else contents.array

    def whole(self, i: int, *, stored: bool = True) -> Value | None:
        """The float that holds the integers of input `i` and has a gradient; None if there is none.

        `stored`: also where QuantizeLinear alone has made them.
        """
        stand = self._importer.stands.get(self.name(i))
        if stand is not None and stand.stored and not stored:
            self._importer.without_gradient.append(describe(self._node))
            return None
        return None if stand is None else stand.value

    def numbers(self, to: str) -> Value:
        """Input 0 for a cast to an element type: for a float the one that holds its integers, if there is one."""
        x, held = self.inputs[0], self.whole(0)
        assert x is not None
        if held is not None and x.dtype != to:
            if TensorType(to, ()).is_float:
                return held
            if to in ("i32", "i64"):
                self.stand(held)
        return x

    def stand(self, x: Value, *, stored: bool = False) -> None:
        """Notes that the float x holds the numbers of the node's first output, which are integers."""
        self._importer.stand(self.outputs[0], x, stored=stored)

    def origin(self, i: int) -> str | None:
        """Where the contents of input `i` come from (see `Known.origin`), None where they are not known."""
        constant = self._importer.known.get(self.name(i))
        return None if constant is None else constant.origin

    def need_constant(self, i: int, what: str) -> np.ndarray:
        """`constant(i)`, or a ModelError that states that `what` must be known."""
        constant = self.constant(i)
        if constant is None:
            absent = "is absent; a static program needs it known at compile time"
            reason = absent if self.type(i) is None else unknown(self._importer, self.name(i))
            raise self.fail(f"its {what} (input {i}) {reason}")
        return constant

    def wants(self, i: int) -> bool:
        """Whether output `i` is used."""
        return i < len(self.outputs) and bool(self.outputs[i]) and self.outputs[i] in self._importer.used

    def emit(self, op: Op, *inputs: Value | None, want: int | None = None) -> Any:
        """Applies an operator; trailing absent inputs are dropped."""
        operands = list(inputs)
        while operands and operands[-1] is None:
            operands.pop()
        return self.builder.emit(op, *operands, want=want)

    def buffer(self, i: int) -> Value:
        """Input `i` as a buffer (contents that are kept but not trained), or as the value it is."""
        return self._importer.buffer(self._node.input[i])

    def frozen(self, i: int) -> Value:
        """Input `i` as a buffer that nothing updates: a Reshape of an initializer's, where it has the same elements."""
        constant = self._importer.known.get(self.name(i))
        if constant is None or constant.origin != "folded":
            return self.buffer(i)
        for name in self._importer.initializers:
            other = self._importer.known.get(name)
            if other is not None and _same_elements(constant.array, other.array):
                return self.builder.Reshape(self._importer.buffer(name), shape=constant.type.shape)
        return self.buffer(i)

    def kept(self, v: Value) -> bool:
        """Whether `v` is a buffer, or what an earlier node has made of one by updating it."""
        return v.name in self._importer.buffers

    def step(self) -> Value:
        """The step counter (i64[]), state of the program."""
        return self._importer.step()

    def random_seed(self) -> int:
        """The key of the next random operator: its own, and repeatable for the seed of `load`."""
        return self._importer.random_seed()

    def body(self) -> Body:
        """For importers that write plain ONNX nodes (and return `body.results(...)`)."""
        return Body(self._importer, self._node)

    @property
    def base(self) -> str:
        """The name that stands for the node: its first output's."""
        return first_output(self._node)

    def unrolled(self, steps: int) -> bool:
        """Whether this recurrent node is unrolled over time."""
        return self._importer.unroll.chooses(self._importer.budget, self._node, steps)

    def fail(self, why: str) -> ModelError:
        """The error about this node (for `raise node.fail(...)`)."""
        return ModelError(f"{describe(self._node)}: {why}")


def _same_elements(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are the same memory, from the first element to the last, in their order."""
    alike = a.dtype == b.dtype and a.size == b.size > 0 and a.flags.c_contiguous and b.flags.c_contiguous
    return alike and a.ctypes.data == b.ctypes.data
