"""Bounds of ranks, to keep nodes from onnx's shape inference, which allocates as many dimensions as a shape has.

This module computes upper bounds of the lengths of shapes and the ranks of values, without evaluating nodes; a node
whose result could have more than MAX_RANK dimensions by these bounds is hidden from onnx.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

import numpy as np
import onnx

from ..errors import ModelError
from .graphs import graphs_of

#: most dimensions of a value that is passed to onnx
MAX_RANK = 128
#: (operator, input) that is a shape
_SHAPES = {"Expand": 1, "Reshape": 1, "ConstantOfShape": 0, "Resize": 3, "MaxUnpool": 2, "CenterCropPad": 1,
           "AffineGrid": 1, "Col2Im": 1}  # fmt: skip
#: operators whose result has more dimensions than any of their inputs
_GROWING = {"Gather", "GatherND", "Unsqueeze", "OneHot", "RandomNormal", "RandomUniform", "ConcatFromSequence",
            "Einsum"}  # fmt: skip
#: operators with no more elements than their first input
_SAME = {"Slice", "Compress", "Cast", "Neg", "Abs", "Floor", "Ceil", "Identity", "Squeeze", "Unsqueeze", "Reshape",
         "Transpose", "Flatten", "Not", "Sqrt", "ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin", "CumSum", "Split",
         "ArgMax", "ArgMin", "Clip", "Relu", "Round"}  # fmt: skip
_TOGETHER = {"Add", "Sub", "Mul", "Div", "Mod", "Min", "Max", "Equal", "Less", "Greater", "And", "Or", "Where", "Pow"}


@dataclass
class _Bounds:
    """Upper bounds by name; absent ones are unknown.

    `lengths`: elements; `products`: of the contents' absolute values (of a shape: elements of what has it).
    """

    ranks: MutableMapping[str, int] = field(default_factory=dict)
    lengths: MutableMapping[str, int] = field(default_factory=dict)
    products: MutableMapping[str, int] = field(default_factory=dict)

    def inside(self) -> _Bounds:
        """The bounds for a subgraph, which sees the outer names."""
        return _Bounds(ChainMap({}, self.ranks), ChainMap({}, self.lengths), ChainMap({}, self.products))


def unbounded(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes that must be hidden from onnx's shape inference, also inside subgraphs.

    ModelError if the model itself declares a value of more than MAX_RANK dimensions.
    """
    if not _grows(graph):
        return []
    nodes: list[onnx.NodeProto] = []
    _visit(graph, _Bounds(), nodes)
    return nodes


def _grows(graph: onnx.GraphProto) -> bool:
    """Whether a node could add dimensions: most networks have no such node."""
    for v in (*graph.input, *graph.output, *graph.value_info):
        if len(v.type.tensor_type.shape.dim) > 64:
            return True
    if any(len(t.dims) > 64 for t in graph.initializer):
        return True
    for node in graph.node:
        if node.op_type in _SHAPES or node.op_type in _GROWING:
            return True
        if node.attribute and any(_grows(g) for a in node.attribute for g in graphs_of(a)):
            return True
    return False


def _visit(graph: onnx.GraphProto, bounds: _Bounds, found: list[onnx.NodeProto]) -> int:
    """Bounds all values of a graph; returns the highest rank."""
    highest = 0
    for t in graph.initializer:
        _tensor(t.name, t, bounds)
    declared = {v.name: v for v in (*graph.output, *graph.value_info)}
    for v in graph.input:
        _declared(v, bounds)
    for v in declared.values():
        highest = max(highest, _checked(v))
    for node in graph.node:
        rank = _node(node, bounds, found)
        for o in node.output:
            if rank is not None:
                bounds.ranks[o] = rank
            if o in declared:
                _declared(declared[o], bounds)
        highest = max(highest, rank or 0)
    return highest


def _checked(v: onnx.ValueInfoProto) -> int:
    rank = len(v.type.tensor_type.shape.dim)
    if rank > MAX_RANK:
        raise ModelError(f"'{v.name}' is declared with {rank:,} dimensions; the limit is {MAX_RANK}")
    return rank


def _declared(v: onnx.ValueInfoProto, bounds: _Bounds) -> None:
    """Merges the declared type of a value, which onnx trusts."""
    rank = _checked(v)
    dims = [d.dim_value for d in v.type.tensor_type.shape.dim]
    bounds.ranks[v.name] = max(rank, bounds.ranks.get(v.name, 0))
    if v.type.tensor_type.HasField("shape"):
        bounds.lengths[v.name] = max(math.prod(dims), bounds.lengths.get(v.name, 0))


def _tensor(name: str, t: onnx.TensorProto, bounds: _Bounds) -> None:
    if len(t.dims) > MAX_RANK:
        raise ModelError(f"tensor '{name}' has {len(t.dims):,} dimensions; the limit is {MAX_RANK}")
    bounds.ranks[name], bounds.lengths[name] = len(t.dims), math.prod(t.dims)
    if bounds.lengths[name] <= 64 and t.data_type == onnx.TensorProto.INT64 and not t.external_data:
        values = np.frombuffer(t.raw_data, np.int64).tolist() if t.raw_data else t.int64_data
        bounds.products[name] = math.prod(max(1, abs(v)) for v in values)


def _node(node: onnx.NodeProto, bounds: _Bounds, nodes: list[onnx.NodeProto]) -> int | None:
    """Bounds the results of a node; returns their rank, None if onnx does not infer it."""
    ranks = [bounds.ranks.get(n, 0) for n in node.input]
    rank: int | None = max(ranks, default=0)
    inner = 0
    for a in node.attribute:
        for graph in graphs_of(a):
            inside = bounds.inside()
            for v in graph.input:
                inside.ranks[v.name] = rank or 0
            inner = max(inner, 1 + _visit(graph, inside, nodes))
    rank = max(rank or 0, inner, 8)
    if node.op_type == "Constant":
        return _constant(node, bounds)
    position = _SHAPES.get(node.op_type)
    if position is not None and position < len(node.input) and node.input[position]:
        length = bounds.lengths.get(node.input[position])
        rank = None if length is None or length > MAX_RANK else max(ranks[0], length)
    elif node.op_type in _GROWING:
        rank = _grown(node, ranks, bounds)
    if rank is None or rank > MAX_RANK:
        nodes.append(node)
        return None
    length = _length(node, bounds, ranks)
    for o in node.output:
        if length is not None:
            bounds.lengths[o] = length
        if node.op_type == "Shape":
            bounds.products[o] = bounds.lengths.get(node.input[0], -1)
        elif node.op_type in ("Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape") and node.input:
            bounds.products[o] = bounds.products.get(node.input[0], -1)
        if bounds.products.get(o, 0) < 0:
            del bounds.products[o]
    return _exact(node, ranks, rank)


def _exact(node: onnx.NodeProto, ranks: list[int], rank: int) -> int:
    """A sharper bound for the operators of shape arithmetic."""
    if node.op_type in ("Shape", "NonZero"):
        return 2
    if node.op_type in _SHAPES or node.op_type in _GROWING:
        return rank
    return max(ranks, default=0) if node.op_type in _SAME or node.op_type in _TOGETHER else rank


def _constant(node: onnx.NodeProto, bounds: _Bounds) -> int:
    for a in node.attribute:
        if a.type == onnx.AttributeProto.TENSOR:
            _tensor(node.output[0], a.t, bounds)
            return len(a.t.dims)
        bounds.lengths[node.output[0]] = max(1, len(a.ints) + len(a.floats) + len(a.strings))
        if a.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.INT):
            values = a.ints if a.type == onnx.AttributeProto.INTS else [a.i]
            bounds.products[node.output[0]] = math.prod(max(1, abs(v)) for v in values[:64])
    return 1


def _grown(node: onnx.NodeProto, ranks: list[int], bounds: _Bounds) -> int | None:
    """The rank of an operator that adds dimensions."""
    if node.op_type == "Gather":
        return max(sum(ranks) - 1, 0)
    if node.op_type == "Unsqueeze":
        axes = next((len(a.ints) for a in node.attribute if a.name == "axes"), None)
        if axes is None and len(node.input) > 1:
            axes = bounds.lengths.get(node.input[1])
        return None if axes is None else ranks[0] + axes
    named = sum(len(a.ints) + len(a.s) for a in node.attribute if a.name in ("shape", "equation"))
    return sum(ranks) + named + 1


def _length(node: onnx.NodeProto, bounds: _Bounds, ranks: list[int]) -> int | None:
    """A bound for the elements of a node's results; None if there is none."""
    op = node.op_type
    lengths = [bounds.lengths.get(n) for n in node.input if n]
    if op == "Shape":
        return ranks[0]
    if op == "Size":
        return 1
    if not lengths:
        return None
    if op in _SAME:
        return lengths[0]
    product = bounds.products.get(node.input[-1]) if op in ("ConstantOfShape", "Expand", "Tile") else None
    if op == "ConstantOfShape":
        return product
    sizes = [n for n in lengths if n is not None]
    if len(sizes) < len(lengths):
        return None
    if product is not None:
        return sizes[0] * product
    rule = _LENGTHS.get(op) or (_together if op in _TOGETHER else None)
    return rule(sizes, ranks) if rule is not None else None


def _together(lengths: list[int], ranks: list[int]) -> int:
    return max(lengths) if max(ranks) <= 1 else math.prod(max(n, 1) for n in lengths)


_LENGTHS: dict[str, Callable[[list[int], list[int]], int]] = {
    "Concat": lambda lengths, ranks: sum(lengths),
    "Gather": lambda lengths, ranks: lengths[1] if ranks[0] <= 1 else lengths[0] * lengths[1],
}
