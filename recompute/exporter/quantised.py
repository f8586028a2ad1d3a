"""8-bit models: what training rounded, as integers between QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from ..errors import ModelError
from ..importer.convert import raised
from ..importer.graphs import names_read
from ..importer.model import main_opset
from ..importer.tensors import tensor_array
from ..language.builder import Names
from ..language.ir import Block, Operator, Value
from ..language.program import Program
from ..training.quantisation import must_have_ranges, running_ends
from ..training.state import contents
from .compiled import listed
from .function_builder import OPSET, tensor_of
from .integers import Integers, Scale, folded, quantized_bias

#: the first opset whose DequantizeLinear has an axis
_FIRST = 13
#: nodes that only move values, or choose among them: their results have the scale of what they read
_MOVES = frozenset(["MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity"])


def unquantised(block: Block) -> Block:
    """The block in floats: nothing is rounded any more."""
    exact = {y.name: op.inputs[0] for op in block.operators if op.op.name == "FakeQuantize" for y in op.writes()}
    if not exact:
        return block
    kept = [op for op in block.operators if op.op.name != "FakeQuantize"]
    return block.with_operators([op.reading({n: v for n, v in exact.items() if v is not None}) for op in kept])


def range_buffers(block: Block) -> set[str]:
    """The buffers that hold ranges of activations, by name."""
    return {v.name for op in block.operators for v in running_ends(op)}


def quantised(model: onnx.ModelProto, program: Program) -> onnx.ModelProto:
    """The float model of a program in inference mode, changed to the 8-bit model that the program was trained for.

    The model itself where the program rounds nothing.  ModelError where the model lacks what is rounded.
    """
    block = program.forward_block
    if not any(op.op.name == "FakeQuantize" for op in block.operators):
        return model
    must_have_ranges(program)
    if main_opset(model) < _FIRST:
        model = raised(model, OPSET)
    _Graph(model.graph, program).run()
    return model


@dataclass
class _Weight:
    """A weight that is rounded, its integers, and the results of what reads them."""

    name: str
    integers: Integers
    readers: set[str]


class _Graph:
    """Inserts QuantizeLinear and DequantizeLinear nodes into a graph."""

    def __init__(self, graph: onnx.GraphProto, program: Program) -> None:
        self.graph, self.program = graph, program
        self.block = program.forward_block
        self.makers = {v.name: op for op in self.block.operators for v in op.writes() if not op.op.updates}
        self.tensors = {t.name: t for t in graph.initializer}
        self.nodes = list(graph.node)
        self.made = {o: n for n in self.nodes for o in n.output}
        self.outputs = {o.name for o in graph.output}
        self.names = Names({*self.made, *self.tensors, *(i.name for i in graph.input)})
        #: results of DequantizeLinear → their scales
        self.scales: dict[str, Scale] = {}
        #: new nodes: those that come first, and those behind a result
        self.first: list[onnx.NodeProto] = []
        self.behind: dict[str, list[onnx.NodeProto]] = {}
        #: results of normalisations that became a part of weights
        self.gone: set[str] = set()

    def run(self) -> None:
        held = {v.name for v in (*self.block.parameters, *self.block.buffers)}
        rounding = [op for op in self.block.operators if op.op.name == "FakeQuantize"]
        activations = [op for op in rounding if _first(op).name not in held]
        weights = [self.weight(op) for op in rounding if _first(op).name in held]
        self.check(activations, weights)
        for op in activations:
            self.activation(op)
        for w in weights:
            self.place(w)
        self.write()

    def check(self, activations: list[Operator], weights: list[_Weight]) -> None:
        """ModelError unless the graph has all the names."""
        names = {*self.made, *(i.name for i in self.graph.input)}
        missing = {_first(op).name for op in activations} - names
        missing |= {r for w in weights for r in w.readers if r not in self.made or w.name not in self.made[r].input}
        if missing:
            raise ModelError(
                listed("the model has these values under other names, or not at all (see `skip`)", sorted(missing))
            )

    def known(self, v: Value) -> np.ndarray:
        """A scale, a zero point or an end of a range, computed as `evaluate` does."""
        op = self.makers.get(v.name)
        if op is None:
            return contents(self.program, v)
        if op.op.name == "MovingRange":
            return self.known(_first(op))
        ins = [self.known(r) for r in op.reads()]
        out = np.empty(v.shape, v.type.numpy)
        temporary = op.op.scratch([r.type for r in op.reads()], [v.type])
        op.op.compute(ins, [out], [np.empty(t.shape, t.numpy) for t in temporary])
        return out

    # -- activations ----------------------------------------------------------------------------------------------

    def activation(self, op: Operator) -> None:
        """Everything that reads an activation reads it from integers."""
        x, scale, zero = op.reads()
        if x.dtype != "f32":
            raise ModelError(f"'{x.name}' is {x.type}: 8-bit models compute in float32")
        kind = np.uint8 if op.op.low >= 0 else np.int8  # type: ignore[attr-defined]
        nodes, result = self.pair(x.name, Scale(self.known(scale), self.known(zero).astype(kind)))
        self.read_instead(x.name, result)
        if x.name in self.made:
            self.behind[x.name] = nodes
        else:
            self.first += nodes

    def pair(self, x: str, scale: Scale) -> tuple[list[onnx.NodeProto], str]:
        """QuantizeLinear and DequantizeLinear of a value, and the result."""
        q, y = (self.names.take(f"{x}_{what}") for what in ("quantized", "dequantized"))
        scale_and_zero = [self.tensor(f"{x}_scale", scale.scale), self.tensor(f"{x}_zero_point", scale.zero)]
        self.scales[y] = scale
        return [_node("QuantizeLinear", [x, *scale_and_zero], q), _node("DequantizeLinear", [q, *scale_and_zero], y)], y

    def tensor(self, wish: str, array: np.ndarray) -> str:
        """A new initializer."""
        name = self.names.take(wish)
        self.graph.initializer.append(tensor_of(name, array))
        return name

    def input_scale(self, node: onnx.NodeProto) -> Scale | None:
        """The scale of what a layer reads, directly or moved: what moved is rounded again, which changes nothing."""
        moved, x = [], node.input[0]
        while x not in self.scales and x in self.made and self.made[x].op_type in _MOVES:
            moved.append(x)
            x = self.made[x].input[0]
        scale = self.scales.get(x)
        for v in moved if scale is not None else ():
            assert scale is not None
            self.behind[v], result = self.pair(v, scale)
            self.read_instead(v, result)
        return scale

    def read_instead(self, x: str, result: str) -> None:
        """Everything that reads x reads `result`."""
        for node in self.nodes:
            node.input[:] = [result if i == x else i for i in node.input]

    # -- weights --------------------------------------------------------------------------------------------------

    def weight(self, op: Operator) -> _Weight:
        """A weight as training rounds it."""
        w, s, _ = op.reads()
        quantized = next(op.writes()).name
        readers = {next(o.writes()).name for o in self.block.operators if any(r.name == quantized for r in o.reads())}
        scale, levels = self.known(s), op.op.high  # type: ignore[attr-defined]
        axis = next((i for i, n in enumerate(scale.shape) if n > 1), 0) if scale.size > 1 else _only(scale, w)
        return _Weight(w.name, Integers.of(contents(self.program, w), scale, axis, levels), readers)

    def place(self, w: _Weight) -> None:
        """Each layer reads the weight from integers, and its bias; a normalisation behind it becomes part of them."""
        shared = ""
        for name in sorted(w.readers):
            node = self.made[name]
            at = list(node.input).index(w.name)
            turned = node.op_type == "Transpose"
            scales = [
                self.input_scale(n) for n in ([n for n in self.nodes if name in n.input[1:2]] if turned else [node])
            ]
            x = None if turned else scales[0]
            bias = self.bias(node, w.integers)
            if node.op_type == "Conv" and (norm := self.norm(node)) is not None:
                integers, bias = self.folded(w.integers, bias, norm)
                self.replace(node, norm)
            elif x is not None and bias is not None:
                integers = w.integers
            else:
                shared = shared or self.integers(w.name, w.integers)
                node.input[at] = shared
                continue
            if x is not None and bias is not None:
                integers, whole, scale = quantized_bias(integers, bias, x)
                tensors = [self.tensor(f"{name}_bias_quantized", whole), self.tensor(f"{name}_bias_scale", scale)]
                read = self.names.take(f"{name}_bias_dequantized")
                self.first.append(_node("DequantizeLinear", tensors, read, axis=0))
            else:
                read = self.tensor(f"{name}_bias_folded", bias)
            node.input[:] = [*node.input[:2], read]
            node.input[at] = self.integers(w.name, integers)

    def integers(self, name: str, w: Integers) -> str:
        """The result of DequantizeLinear on an int8 weight."""
        arrays = ("quantized", w.values), ("scale", w.scale), ("zero_point", np.zeros(w.scale.shape, np.int8))
        tensors = [self.tensor(f"{name}_{what}", a) for what, a in arrays]
        result = self.names.take(f"{name}_dequantized")
        self.first.append(_node("DequantizeLinear", tensors, result, axis=w.axis))
        return result

    def bias(self, node: onnx.NodeProto, w: Integers) -> np.ndarray | None:
        """A layer's bias, one number for each output channel; None if it has none, or another."""
        factors = {a.name: a.f for a in node.attribute if a.name in ("alpha", "beta")}
        name = node.input[2] if len(node.input) > 2 and node.op_type in ("Conv", "Gemm") else ""
        if name not in self.tensors or any(f != 1 for f in factors.values()):
            return None
        array = tensor_array(self.tensors[name])
        return array if array.shape == w.scale.shape else None

    # -- normalisations -------------------------------------------------------------------------------------------

    def norm(self, conv: onnx.NodeProto) -> onnx.NodeProto | None:
        """The batch normalisation that alone reads what a convolution makes, if its numbers are in the model."""
        y = conv.output[0]
        readers = [n for n in self.nodes if y in names_read([n])]
        if y in self.outputs or len(readers) != 1 or readers[0].op_type != "BatchNormalization":
            return None
        norm = readers[0]
        has_bias = len(conv.input) > 2 and conv.input[2]
        plain = norm.input[0] == y and all(i in self.tensors for i in norm.input[1:])
        return norm if plain and (not has_bias or conv.input[2] in self.tensors) else None

    def folded(self, w: Integers, bias: np.ndarray | None, norm: onnx.NodeProto) -> tuple[Integers, np.ndarray]:
        """Weight and bias with a normalisation's factor and summand."""
        gamma, beta, mean, var = (tensor_array(self.tensors[i]).astype(np.float64) for i in norm.input[1:])
        epsilon = next((a.f for a in norm.attribute if a.name == "epsilon"), 1e-5)
        factor = gamma / np.sqrt(var + epsilon)
        bias = ((0.0 if bias is None else bias) - mean) * factor + beta
        return folded(w, factor), bias.astype(np.float32)

    def replace(self, conv: onnx.NodeProto, norm: onnx.NodeProto) -> None:
        """The convolution makes what its normalisation made."""
        self.gone.add(norm.output[0])
        conv.output[0] = norm.output[0]

    # -- the result -----------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Nodes in order; initializers that nothing reads any more go."""
        order = list(self.first)
        for node in self.nodes:
            if node.op_type == "BatchNormalization" and node.output[0] in self.gone:
                continue
            order.append(node)
            order += [n for o in node.output for n in self.behind.get(o, ())]
        nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in order]
        del self.graph.node[:]
        self.graph.node.extend(nodes)
        read = {*names_read(nodes), *self.outputs}
        inputs = {i.name for i in self.graph.input}
        for at in reversed([i for i, t in enumerate(self.graph.initializer) if t.name not in read]):
            del self.graph.initializer[at]
        unread = {n for n in self.tensors if n not in read} & inputs
        for at in reversed([i for i, v in enumerate(self.graph.input) if v.name in unread]):
            del self.graph.input[at]


def _first(op: Operator) -> Value:
    """The first input, which is there."""
    v = op.inputs[0]
    assert v is not None
    return v


def _only(scale: np.ndarray, w: Value) -> int:
    """The axis of the one scale of a weight with one output channel."""
    return next((i for i in range(w.ndim) if w.shape[i] == 1), 0)


def _node(op_type: str, ins: list[str], out: str, **attributes: int) -> onnx.NodeProto:
    node = helper.make_node(op_type, ins, [out], name=out)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    return node
