"""The graph builder that every network of the zoo is written with.

The rule the whole zoo keeps: a float32 initializer is a parameter, or a running statistic of a
BatchNormalization. Every other float constant (dropout ratio, attention scale, mask) is a `Constant` node,
and an int64 initializer is a shape, an axis or a table of indices. A reader needs no list of what to train.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..errors import UsageError, expect
from ..language.draws import generator, normal
from ..support.room import need_room

OPSET = 20
IR_VERSION = 9
BATCH = "N"
STATISTICS = (".running_mean", ".running_var")

Dim = int | str
Size = int | tuple[int, int]


@dataclass(frozen=True)
class InputSpec:
    """One input (or the label) of a network, with the range that sensible synthetic data is drawn from.

    Attributes:
        name: the value's name in the graph.
        dtype: a numpy type name, "float32" or "int64".
        shape: the dimensions; the symbol "N" stands for the batch.
        low, high: data is uniform in [low, high). An int64 input with low 1 and high 2 is all ones.
        integral: whether the data is whole numbers (always so for int64; a float32 label may be so too).
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    low: float = -1.0
    high: float = 1.0
    integral: bool = False

    def sample(self, generator: np.random.Generator, *, batch: int) -> np.ndarray:
        """Synthetic data: an array of this dtype and shape with `batch` for "N"."""
        shape = [batch if dim == BATCH else int(dim) for dim in self.shape]
        if self.integral:
            return generator.integers(int(self.low), int(self.high), shape).astype(self.dtype)
        return generator.uniform(self.low, self.high, shape).astype(self.dtype)


def integers(name: str, shape: tuple[Dim, ...], *, low: int = 0, high: int) -> InputSpec:
    """An int64 input with values in [low, high)."""
    return InputSpec(name, "int64", shape, low, high, True)


@dataclass(frozen=True)
class Init:
    """How a parameter starts: "uniform" in [-scale, scale), "normal", or "constant" (all `scale`)."""

    kind: str
    scale: float

    def draw(self, shape: tuple[int, ...], *, seed: int, name: str) -> np.ndarray:
        """A float32 array of `shape`; it depends on the seed and the parameter's name only."""
        if self.kind == "constant":
            return np.full(shape, self.scale, np.float32)
        g = generator(seed, name)
        if self.kind == "normal":
            return normal(g, shape, np.float32) * np.float32(self.scale)
        # Doubling and subtracting are exact in float32, so that a uniform draw has the same bits everywhere.
        return (g.random(shape, np.float32) * np.float32(2) - np.float32(1)) * np.float32(self.scale)


ZEROS = Init("constant", 0.0)
ONES = Init("constant", 1.0)


def he_uniform(fan_in: int) -> Init:
    """He et al. 2015 (arXiv 1502.01852), eq. 10, as a uniform law: for a layer that a ReLU follows."""
    return Init("uniform", math.sqrt(6.0 / fan_in))


def glorot_uniform(fan_in: int, fan_out: int) -> Init:
    """Glorot and Bengio 2010, eq. 16: for a linear layer."""
    return Init("uniform", math.sqrt(6.0 / (fan_in + fan_out)))


def pair(size: Size) -> list[int]:
    """(height, width) of a window; a number stands for both."""
    return [size, size] if isinstance(size, int) else list(size)


def scaled(channels: int, width: int, base: int) -> int:
    """`channels` of a network whose first layer has `base`, when that has `width` instead; at least 1."""
    return max(1, (channels * width + base // 2) // base)


def _window(kernel: Size, stride: Size, padding: Size) -> dict[str, list[int]]:
    return {"kernel_shape": pair(kernel), "strides": pair(stride), "pads": pair(padding) * 2}


class Net:
    """Collects the nodes, parameters, inputs and outputs of one network.

    A method that adds a node takes the name of the value it makes, names the node the same and returns it.

    Attributes:
        batch: the first dimension of the inputs, an int or a symbol.
    """

    def __init__(self, *, batch: Dim, weights: bool, seed: int) -> None:
        self.batch = batch
        self._weights = weights
        self._seed = seed
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._names: set[str] = set()
        self._constants: dict[str, bytes] = {}

    def _define(self, name: str) -> None:
        if name in self._names:
            raise UsageError(f"value {name!r} is defined twice in this network; names must be unique")
        self._names.add(name)

    def input(self, spec: InputSpec) -> str:
        """Adds a graph input; the symbol "N" in its shape becomes the batch of this network."""
        self._define(spec.name)
        elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(spec.dtype))
        self._inputs.append(helper.make_tensor_value_info(spec.name, elem_type, self._concrete(spec.shape)))
        return spec.name

    def output(self, name: str, shape: tuple[Dim, ...]) -> None:
        """Makes the float32 value `name` a graph output; "N" in `shape` becomes the batch."""
        info = helper.make_tensor_value_info(name, TensorProto.FLOAT, self._concrete(shape))
        self._outputs.append(info)

    def _concrete(self, shape: tuple[Dim, ...]) -> list[Dim]:
        return [self.batch if dim == BATCH else dim for dim in shape]

    def parameter(self, name: str, shape: tuple[int, ...], init: Init) -> str:
        """Adds a float32 parameter: an initializer, or a ConstantOfShape node when built without weights."""
        self._define(name)
        if self._weights:
            value = init.draw(shape, seed=self._seed, name=name)
            need_room(2 * value.nbytes)  # as bytes, and in the tensor
            self._initializers.append(numpy_helper.from_array(value, name))
            return name
        fill = helper.make_tensor("value", TensorProto.FLOAT, [1], [init.scale])
        shape_name = self.constant(f"{name}.shape", shape)
        node = helper.make_node("ConstantOfShape", [shape_name], [name], name=name, value=fill)
        self._nodes.append(node)
        return name

    def shared(self, name: str, shape: tuple[int, ...], init: Init) -> str:
        """The parameter of this name, added by the first call: for layers that are used in several places."""
        return name if name in self._names else self.parameter(name, shape, init)

    def constant_once(self, name: str, make: Callable[[], np.ndarray]) -> str:
        """The constant of this name; only the first call computes it.  For large ones that every layer reads."""
        return name if name in self._constants else self.constant(name, make())

    def constant(self, name: str, value: float | Sequence[int] | np.ndarray) -> str:
        """Adds a constant that is not trained: float32 as a Constant node, int64 as an initializer.

        Asking again for the same name and value returns the one that is there.
        """
        array = np.asarray(value)
        array = array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
        tensor = numpy_helper.from_array(array, name)
        if name in self._constants and self._constants[name] == tensor.SerializeToString():
            return name
        self._define(name)
        self._constants[name] = tensor.SerializeToString()
        if tensor.data_type == TensorProto.INT64:
            self._initializers.append(tensor)
        else:
            self._nodes.append(helper.make_node("Constant", [], [name], name=name, value=tensor))
        return name

    def add(self, op: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Adds a node with one output."""
        return self.add_many(op, inputs, [name], name=name, **attributes)[0]

    def add_many(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], *, name: str, **attributes: Any
    ) -> list[str]:
        """Adds a node with several outputs ("" for one that is not wanted) and returns their names."""
        for output in filter(None, outputs):
            self._define(output)
        self._nodes.append(helper.make_node(op, inputs, outputs, name=name, **attributes))
        return list(outputs)

    def gemm(self, x: str, name: str, *, sizes: tuple[int, int], init: Init, params: str | None = None) -> str:
        """x [N, in] to [N, out], `sizes` being (in, out), with `<params>.weight` [out, in] and bias [out]."""
        params = params or name
        weight = self.parameter(f"{params}.weight", sizes[::-1], init)
        bias = self.parameter(f"{params}.bias", sizes[1:], ZEROS)
        return self.add("Gemm", [x, weight, bias], name, transB=1)

    def dense(self, x: str, name: str, *, sizes: tuple[int, int], init: Init, params: str | None = None) -> str:
        """x [..., in] to [..., out] by MatMul and Add, with `<params>.weight` [in, out] and bias [out]."""
        params = params or name
        weight = self.parameter(f"{params}.weight", sizes, init)
        bias = self.parameter(f"{params}.bias", sizes[1:], ZEROS)
        product = self.add("MatMul", [x, weight], f"{name}.matmul")
        return self.add("Add", [product, bias], name)

    def conv(
        self,
        x: str,
        name: str,
        *,
        channels: tuple[int, int],
        kernel: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        params: str | None = None,
    ) -> str:
        """A 2-D convolution, x [N, in, H, W], `channels` being (in, out), weight [out, in / groups, *kernel]."""
        params = params or name
        weight_shape = (channels[1], channels[0] // groups, *pair(kernel))
        inputs = [x, self.parameter(f"{params}.weight", weight_shape, he_uniform(math.prod(weight_shape[1:])))]
        if bias:
            inputs.append(self.parameter(f"{params}.bias", channels[1:], ZEROS))
        more: dict[str, Any] = {} if groups == 1 else {"group": groups}
        if dilation != 1:
            more["dilations"] = [dilation, dilation]
        return self.add("Conv", inputs, name, **_window(kernel, stride, padding), **more)

    def conv_transpose(
        self,
        x: str,
        name: str,
        *,
        channels: tuple[int, int],
        kernel: int,
        stride: int,
        bias: bool = True,
        params: str | None = None,
    ) -> str:
        """x [N, in, H, W] to [N, out, stride·H, stride·W] (kernel - stride must be even), weight [in, out, k, k]."""
        params = params or name
        fan_in = channels[0] * max(1, kernel // stride) ** 2
        inputs = [x, self.parameter(f"{params}.weight", (*channels, kernel, kernel), glorot_uniform(fan_in, fan_in))]
        if bias:
            inputs.append(self.parameter(f"{params}.bias", channels[1:], ZEROS))
        return self.add("ConvTranspose", inputs, name, **_window(kernel, stride, (kernel - stride) // 2))

    def batch_norm(
        self, x: str, name: str, *, channels: int, init: Init = ONES, epsilon: float = 1e-5, params: str | None = None
    ) -> str:
        """BatchNormalization over axis 1 in its inference form; `init` is how the weight (scale) starts."""
        params = params or name
        starts = {"weight": init, "bias": ZEROS, "running_mean": ZEROS, "running_var": ONES}
        inputs = [self.parameter(f"{params}.{key}", (channels,), init) for key, init in starts.items()]
        return self.add("BatchNormalization", [x, *inputs], name, epsilon=epsilon, momentum=0.9)

    def layer_norm(self, x: str, name: str, *, size: int, epsilon: float, params: str | None = None) -> str:
        """LayerNormalization over the last axis, x [..., size], with weight and bias [size]."""
        params = params or name
        scale = self.parameter(f"{params}.weight", (size,), ONES)
        bias = self.parameter(f"{params}.bias", (size,), ZEROS)
        return self.add("LayerNormalization", [x, scale, bias], name, axis=-1, epsilon=epsilon)

    def attention(
        self, parts: Sequence[str], mask: str | None, name: str, *, size: int, hidden: int, dropout: float
    ) -> str:
        """softmax(query·key / √size + mask)·value, heads merged: [N, seq, hidden].

        `parts`: query [N, heads, seq, size], key [N, heads, size, seq], value as query.
        """
        query, key, value = parts
        scale = self.constant("attention.scale", 1.0 / math.sqrt(size))
        y = self.add("MatMul", [query, key], f"{name}.product")
        y = self.add("Mul", [y, scale], f"{name}.scaled")
        if mask is not None:
            y = self.add("Add", [y, mask], f"{name}.scores")
        y = self.add("Softmax", [y], f"{name}.probs", axis=-1)
        y = self.dropout(y, f"{name}.probs.dropout", ratio=dropout)
        y = self.add("MatMul", [y, value], f"{name}.context")
        y = self.add("Transpose", [y], f"{name}.context.rows", perm=[0, 2, 1, 3])
        return self.add("Reshape", [y, self.constant("merged.shape", [0, 0, hidden])], f"{name}.merged")

    def dropout(self, x: str, name: str, *, ratio: float) -> str:
        """Dropout in its inference form; no node at all, and `x` back, when the ratio is 0."""
        if ratio == 0:
            return x
        return self.add("Dropout", [x, self.constant("dropout.ratio", float(ratio))], name)

    def max_pool(
        self, x: str, name: str, *, kernel: int, stride: int, padding: int = 0, ceil_mode: bool = False
    ) -> str:
        """A square 2-D MaxPool; with `ceil_mode` a window that hangs over the edge counts."""
        more = {"ceil_mode": 1} if ceil_mode else {}
        return self.add("MaxPool", [x], name, **_window(kernel, stride, padding), **more)

    def average_pool(
        self, x: str, name: str, *, kernel: Size, stride: Size, padding: int = 0, include_pad: bool = False
    ) -> str:
        """A 2-D AveragePool; `include_pad`: the padding counts as zeros."""
        more = {"count_include_pad": 1} if include_pad else {}
        return self.add("AveragePool", [x], name, **_window(kernel, stride, padding), **more)

    def concat(self, values: Sequence[str], name: str) -> str:
        """Values [N, C_i, ...] side by side along the channels."""
        return self.add("Concat", values, name, axis=1)

    def classifier(self, x: str, *, sizes: tuple[int, int], params: str, dropout: float = 0.0) -> None:
        """The head of most image networks: x [N, in, H, W], averaged, to the output "logits" [N, out]."""
        x = self.add("GlobalAveragePool", [x], "pool")
        x = self.add("Flatten", [x], "flat", axis=1)
        x = self.dropout(x, "dropout", ratio=dropout)
        self.gemm(x, "logits", sizes=sizes, init=glorot_uniform(*sizes), params=params)
        self.output("logits", (BATCH, sizes[1]))

    def model(self, name: str, *, description: str) -> onnx.ModelProto:
        """The finished model: opset 20, IR version 9."""
        need_room(2 * sum(tensor.ByteSize() for tensor in self._initializers))  # in the graph, and in the model
        graph = helper.make_graph(
            self._nodes, name, self._inputs, self._outputs, self._initializers, doc_string=description
        )
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="onnx-recompute"
        )


def parameters(model: onnx.ModelProto) -> dict[str, tuple[int, ...]]:
    """The trainable parameters of a network of this zoo, with or without weights, as name to shape."""
    expect("model", model, onnx.ModelProto, "an ONNX model")
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    shapes = {name: tuple(tensor.dims) for name, tensor in tensors.items() if tensor.data_type == TensorProto.FLOAT}
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape":
            sizes = numpy_helper.to_array(tensors[node.input[0]])
            shapes[node.output[0]] = tuple(int(size) for size in sizes)
    return {name: shape for name, shape in shapes.items() if not name.endswith(STATISTICS)}
