"""Roles of a graph's constants: which hold weights, which scale integers, which only bound values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import onnx

from ..language.op import REGISTRY
from .origin import FLOATS

#: inputs of operators on quantised tensors that are scales
_SCALES = {
    "DequantizeLinear": (1,), "QuantizeLinear": (1,), "QLinearMatMul": (1, 4, 6), "QLinearConv": (1, 4, 6),
    "QLinearAdd": (1, 4, 6), "QLinearMul": (1, 4, 6), "QLinearSigmoid": (1, 3), "QLinearLeakyRelu": (1, 3),
    "QLinearSoftmax": (1, 3), "QLinearGlobalAveragePool": (1, 3), "QGemm": (1, 4, 7), "QAttention": (3, 4),
    "DynamicQuantizeMatMul": (2,), "MatMulIntegerToFloat": (2, 3), "MatMulNBits": (2, 3), "MatMulBnb4": (2,),
    "GatherBlockQuantized": (2, 3), "QLinearConcat": tuple(range(0, 96, 3)),
    "DynamicQuantizeLSTM": (8, 10),
}  # fmt: skip
#: inputs of them that are integers which stand for a weight
_CODES = {
    "DequantizeLinear": (0,), "MatMulInteger": (0, 1), "ConvInteger": (0, 1), "QLinearMatMul": (0, 3),
    "QLinearConv": (0, 3, 8), "QLinearAdd": (0, 3), "QLinearMul": (0, 3), "QGemm": (0, 3, 6), "QAttention": (1,),
    "DynamicQuantizeMatMul": (1,), "MatMulIntegerToFloat": (0, 1), "MatMulNBits": (1, 3), "MatMulBnb4": (1,),
    "GatherBlockQuantized": (0, 3), "DynamicQuantizeLSTM": (1, 2),
}  # fmt: skip
#: operators behind which a value is the same numbers in another form
_FORMS = frozenset(["Cast", "Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze", "Flatten", "Expand"])
#: operators whose constant operands bound, raise or compare what they are given, and are no weights
_BOUNDS = frozenset(
    ["Max", "Min", "Clip", "Pow", "Mod", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Pad", "Range"]
)
#: operators that read weights besides those that `Op.weights` lists
_READ_WEIGHTS = frozenset(
    ["Add", "Sub", "Mul", "Div", "Concat", "Einsum", "Gather", "Where", "Slice", "Split", "Tile", *_FORMS]
)
#: names that Paddle gives to parameters
_PADDLE = re.compile(r"\.[wb]_\d+$")
_PRODUCTS = frozenset(["MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"])


@dataclass(frozen=True)
class Roles:
    """Names by what the graph does with them.

    `constants`: tensors that are nodes; `held`: the weights among them, where the file has no others; `scales`: of
    integers, with `measured` those of values that are quantised in the graph; `codes`: integers that stand for weights;
    `bounds`: see _BOUNDS; `biases`: what is added to a product; `statistics`: of batch normalisations.
    """

    constants: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    scales: set[str] = field(default_factory=set)
    measured: set[str] = field(default_factory=set)
    codes: set[str] = field(default_factory=set)
    bounds: set[str] = field(default_factory=set)
    biases: set[str] = field(default_factory=set)
    statistics: set[str] = field(default_factory=set)


def roles_of(graph: onnx.GraphProto) -> Roles:
    """The roles of a graph's constants."""
    nodes = [n for n in graph.node if n.output]
    readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
    makers: dict[str, onnx.NodeProto] = {}
    for n in nodes:
        makers.update((o, n) for o in n.output)
        for i, name in enumerate(n.input):
            readers.setdefault(name, []).append((n, i))
    roles = Roles()
    for name, reads in readers.items():
        if all(n.op_type in _BOUNDS for n, _ in reads):
            roles.bounds.add(name)
        for n, i in reads:
            others = (makers[o] for o in n.input if o != name and o in makers)
            if n.op_type == "Add" and any(other.op_type in _PRODUCTS for other in others):
                roles.biases.add(name)
            if n.op_type == "BatchNormalization" and i in (3, 4):
                roles.statistics.add(name)
            if i in _CODES.get(n.op_type, ()):
                roles.codes.add(name)
    roles.scales.update(_scales(nodes))
    for codes, scale in _cast_weights(graph, readers):
        roles.codes.add(codes)
        roles.scales.add(scale)
    roles.constants.update(n.output[0] for n in nodes if n.op_type == "Constant" and _shape(n))
    constants = {n.output[0] for n in nodes if n.op_type == "Constant"}.union(t.name for t in graph.initializer)
    for n in nodes:
        if n.op_type in ("QuantizeLinear", "DequantizeLinear") and constants.isdisjoint(n.input[:1]):
            roles.measured.update(n.input[1:2])
    roles.held.update(_held(graph, nodes, readers, roles.biases))
    return roles


def at_weight(op_type: str, position: int) -> bool:
    """Whether an operator takes a weight at a position."""
    return op_type in REGISTRY and position in REGISTRY[op_type].weights


def _cast_weights(
    graph: onnx.GraphProto, readers: dict[str, list[tuple[onnx.NodeProto, int]]]
) -> Iterator[tuple[str, str]]:
    """8-bit integers and the scale of weights that are written as Cast, (Sub,) Mul."""
    held = {t.name for t in graph.initializer if t.data_type in FLOATS}
    for t in graph.initializer:
        if t.data_type not in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8) or len(t.dims) < 2:
            continue
        values = [n.output[0] for n, _ in readers.get(t.name, ()) if n.op_type == "Cast"]
        values += [n.output[0] for v in values for n, i in readers.get(v, ()) if n.op_type == "Sub" and not i]
        for n in (n for v in values for n, _ in readers.get(v, ()) if n.op_type == "Mul"):
            yield from ((t.name, other) for other in n.input if other in held)


def _scales(nodes: list[onnx.NodeProto]) -> set[str]:
    """Names of scales of integers: inputs of operators that take scales, and factors of integer products."""
    scales: set[str] = set()
    products: set[str] = set()  # of integers, not scaled yet
    dynamic: set[str] = set()  # scales that DynamicQuantizeLinear measures
    for n in nodes:
        scales.update(n.input[i] for i in _SCALES.get(n.op_type, ()) if i < len(n.input))
        if n.op_type in ("MatMulInteger", "ConvInteger"):
            products.update(n.output)
        elif n.op_type == "DynamicQuantizeLinear":
            dynamic.update(n.output[1:2])
        elif n.op_type in _FORMS or n.op_type == "Add":
            for group in (products, dynamic):
                if any(i in group for i in n.input):
                    group.update(n.output)
        elif n.op_type in ("Mul", "Div") and any(i in products for i in n.input):
            others = [i for i in n.input if i not in products]
            scales.update(others)
            if all(i in dynamic for i in others):
                products.update(n.output)
    for n in reversed(nodes):
        if (n.op_type in _FORMS or n.op_type in ("Mul", "Div")) and any(o in scales for o in n.output):
            scales.update(n.input)
    return scales


def _held(
    graph: onnx.GraphProto,
    nodes: list[onnx.NodeProto],
    readers: dict[str, list[tuple[onnx.NodeProto, int]]],
    biases: set[str],
) -> Iterator[str]:
    """Constant nodes that hold weights, where no initializer does: Paddle's files are so."""
    weighs: set[str] = set()
    for n in reversed(nodes):
        moves = n.op_type in _FORMS and any(o in weighs for o in n.output)
        weighs.update(name for i, name in enumerate(n.input) if at_weight(n.op_type, i) or (moves and i == 0))
    if any(t.data_type in FLOATS and t.dims and t.name in weighs for t in graph.initializer):
        return
    constants = [n for n in nodes if n.op_type == "Constant"]
    shapes = {
        n.output[0]: _shape(n) for n in constants if not n.attribute or n.attribute[0].t.data_type in (0, *FLOATS)
    }
    if not any(len(s) > 1 and name in weighs for name, s in shapes.items()):
        return
    for name, shape in shapes.items():
        reads = readers.get(name, [])
        kept = all(at_weight(n.op_type, i) or n.op_type in _READ_WEIGHTS or "Norm" in n.op_type for n, i in reads)
        if reads and kept and shape and (math.prod(shape) > 1 or name in biases or _PADDLE.search(name)):
            yield name


def _shape(node: onnx.NodeProto) -> tuple[int, ...]:
    """The shape of a Constant node's numbers."""
    a = node.attribute[0] if node.attribute else onnx.AttributeProto()
    return tuple(a.t.dims) if a.name == "value" else (len(a.floats),) if a.name == "value_floats" else ()
