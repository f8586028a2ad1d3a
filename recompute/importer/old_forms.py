"""What onnx's version converter leaves as it was, or gets wrong: done before and after it, in subgraphs too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx

from .graphs import all_graphs, names_read, rename_reads

_RESIZING = ("Upsample", "Resize")
_make = onnx.helper.make_node


def before(model: onnx.ModelProto, opset: int) -> list[list[str]]:
    """Prepares a model of `opset` for the converter; gives the outputs of nodes that resize, of each graph."""
    if opset < 7:
        _align(model)
    for graph in _inner_first(model) if opset < 14 else ():
        _drop_unread_statistics(graph)
        if opset < 13:
            _flatten_hardmax(graph)
            _part_softmax(graph)
    return [[n.output[0] for n in g.node if n.op_type in _RESIZING and n.output] for g in _inner_first(model)]


def after(model: onnx.ModelProto, opset: int, resized: Sequence[Sequence[str]]) -> None:
    """Completes what the converter made of a model of `opset`; `resized`: what `before` gave."""
    for graph, outputs in zip(_inner_first(model), resized, strict=True) if opset < 11 else ():
        _resize_from_the_corner(graph, outputs)
        _bounds_like_operand(graph)
        if opset < 7:
            _slopes_by_channel(graph)


def _inner_first(model: onnx.ModelProto) -> Sequence[onnx.GraphProto]:
    """All graphs, in an order in which those inside stay where they are while the nodes around them are replaced."""
    return list(all_graphs(model))[::-1]


def _replace(graph: onnx.GraphProto, nodes: Iterable[onnx.NodeProto]) -> None:
    found = list(nodes)
    del graph.node[:]
    graph.node.extend(found)


def _align(model: onnx.ModelProto) -> None:
    """Up to opset 6 `axis` said where an operand stands in the other one; the converter takes it for the first axis."""
    if not any(a.name == "axis" for n in model.graph.node if _broadcasts(n) for a in n.attribute):
        return
    inferred = onnx.shape_inference.infer_shapes(model).graph
    known = [*inferred.value_info, *inferred.input, *inferred.output]
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in known if v.type.tensor_type.HasField("shape")}
    ranks |= {t.name: len(t.dims) for t in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        axis = next((a for a in node.attribute if a.name == "axis" and _broadcasts(node)), None)
        if axis is not None and all(n in ranks for n in node.input):
            first, second = (ranks[n] for n in node.input)
            behind = range(second, first - axis.i % max(first, 1))
            node.attribute.remove(axis)
            if behind:
                aligned = f"{node.output[0]}.aligned"
                nodes.append(_make("Unsqueeze", [node.input[1]], [aligned], axes=list(behind)))
                node.input[1] = aligned
        nodes.append(node)
    _replace(model.graph, nodes)


def _broadcasts(node: onnx.NodeProto) -> bool:
    return len(node.input) == 2 and any(a.name == "broadcast" and a.i == 1 for a in node.attribute)


def _drop_unread_statistics(graph: onnx.GraphProto) -> None:
    """Drops unused outputs of BatchNormalization: before opset 14 it had five, the converter accepts three."""
    read = {*names_read(graph.node), *(o.name for o in graph.output)}
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            while len(node.output) > 1 and node.output[-1] not in read:
                del node.output[-1]


def _flatten_hardmax(graph: onnx.GraphProto) -> None:
    """Up to opset 12 Hardmax flattened to two dimensions before `axis`; the converter sees to Softmax only."""
    nodes = []
    for node in graph.node:
        if node.op_type == "Hardmax" and node.domain in ("", "ai.onnx"):
            axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
            x, y = node.input[0], node.output[0]
            nodes.append(_make("Shape", [x], [f"{y}.shape"]))
            nodes.append(_make("Flatten", [x], [f"{y}.flat"], axis=axis))
            nodes.append(_make("Hardmax", [f"{y}.flat"], [f"{y}.hard"], name=node.name, axis=1))
            nodes.append(_make("Reshape", [f"{y}.hard", f"{y}.shape"], [y]))
        else:
            nodes.append(node)
    _replace(graph, nodes)


def _part_softmax(graph: onnx.GraphProto) -> None:
    """Lets subgraphs read a copy of a Softmax: where it replaces one that they read the converter fails."""
    inside = {n for node in graph.node for n in list(names_read([node]))[len(node.input) :]}
    nodes = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type in ("Softmax", "LogSoftmax") and node.output[0] in inside:
            nodes.append(_make("Identity", [f"{node.output[0]}.rows"], [node.output[0]]))
            node.output[0] += ".rows"
    _replace(graph, nodes)


def _resize_from_the_corner(graph: onnx.GraphProto, outputs: Sequence[str]) -> None:
    """Nodes resized from the corner up to opset 10, which the converter forgets, as it does an Upsample's output.

    `outputs`: their names in the file, in order; all such nodes of the converted graph are theirs.
    """
    renamed = {}
    for node, name in zip((n for n in graph.node if n.op_type == "Resize" and n.output), outputs, strict=True):
        kept = [a for a in node.attribute if a.name not in ("coordinate_transformation_mode", "nearest_mode")]
        del node.attribute[:]
        node.attribute.extend(kept)
        node.attribute.append(onnx.helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
        node.attribute.append(onnx.helper.make_attribute("nearest_mode", "floor"))
        renamed[node.output[0]] = name
    for node in graph.node:
        node.output[:] = [renamed.get(o, o) for o in node.output]
        rename_reads(node, renamed)


def _bounds_like_operand(graph: onnx.GraphProto) -> None:
    """Up to opset 10 a Clip's bounds were attributes; the converter makes them float32, whatever they bound."""
    nodes = []
    for node in graph.node:
        for i, bound in enumerate(node.input[1:] if node.op_type == "Clip" else (), 1):
            if bound:
                node.input[i] = f"{node.output[0]}.bound{i}"
                nodes.append(_make("CastLike", [bound, node.input[0]], [node.input[i]]))
        nodes.append(node)
    _replace(graph, nodes)


def _slopes_by_channel(graph: onnx.GraphProto) -> None:
    """Up to opset 6 a PRelu's slopes were one for each channel; the converter leaves them to broadcast to the right."""
    nodes = []
    for node in graph.node:
        if node.op_type == "PRelu":
            x, slope = node.input
            y = node.output[0]
            nodes.append(_make("Shape", [x], [f"{y}.spatial"], start=2))
            nodes.append(_make("Shape", [f"{y}.spatial"], [f"{y}.axes"]))
            one = onnx.numpy_helper.from_array(np.ones(1, np.int64))
            nodes.append(_make("ConstantOfShape", [f"{y}.axes"], [f"{y}.ones"], value=one))
            nodes.append(_make("Shape", [slope], [f"{y}.slopes"]))
            nodes.append(_make("Concat", [f"{y}.slopes", f"{y}.ones"], [f"{y}.shape"], axis=0))
            nodes.append(_make("Reshape", [slope, f"{y}.shape"], [f"{y}.slope"]))
            node.input[1] = f"{y}.slope"
        nodes.append(node)
    _replace(graph, nodes)
