"""Dropout that exporters wrote out: a mask from uniform random numbers becomes a Dropout node again.

A mask that is 1 with probability p, `Cast(Less(uniform, p))` or `Floor(Add(uniform, p))`, is p times the dropout of
ones.  PyTorch's exporters write stochastic depth and dropout in place so; as Dropout they can be turned off.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from .graphs import names_read
from .model import main_opset

_DRAWS = frozenset(["RandomUniform", "RandomUniformLike"])


def with_dropout(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with Dropout nodes for such masks; itself if there are none."""
    if main_opset(model) < 15 or not any(n.op_type in _DRAWS for n in model.graph.node):  # 15: CastLike
        return model
    masks = _masks(model.graph)
    if not masks:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    for node in model.graph.node:
        if node.output and node.output[0] in masks:
            _write(copy.graph, *masks[node.output[0]])
        else:
            copy.graph.node.add().CopyFrom(node)
    return copy


def _masks(graph: onnx.GraphProto) -> dict[str, tuple[onnx.NodeProto, onnx.NodeProto, float]]:
    """Masks by name: the node that makes it, the one that draws its numbers, and the probability of 1."""
    makers = {o: n for n in graph.node for o in n.output if o}
    uses = Counter((*names_read(graph.node), *(o.name for o in graph.output)))
    uses.subtract(n.input[1] for n in graph.node if n.op_type == "CastLike")  # which reads the type only
    tensors = {t.name: t for t in graph.initializer}
    masks = {}
    for node in graph.node:
        before = makers.get(node.input[0]) if node.input else None
        kinds = (node.op_type, before.op_type if before is not None else "")
        if before is None or kinds not in (("Floor", "Add"), ("Cast", "Less"), ("CastLike", "Less")):
            continue
        draw, p = makers.get(before.input[0]), _number(before.input[1], makers, tensors)
        if before.op_type == "Add" and (draw is None or draw.op_type not in _DRAWS):
            draw, p = makers.get(before.input[1]), _number(before.input[0], makers, tensors)
        if draw is None or not _is_uniform(draw) or p is None or not 0 < p < 1:
            continue
        if uses[before.output[0]] == uses[draw.output[0]] == 1:
            masks[node.output[0]] = node, draw, p
    return masks


def _is_uniform(node: onnx.NodeProto) -> bool:
    """Whether a node draws numbers between 0 and 1."""
    limits = {a.name: a.f for a in node.attribute if a.name in ("low", "high")}
    return node.op_type in _DRAWS and limits.get("low", 0.0) == 0.0 and limits.get("high", 1.0) == 1.0


def _write(graph: onnx.GraphProto, node: onnx.NodeProto, draw: onnx.NodeProto, p: float) -> None:
    """Writes a mask as p times the dropout of ones, in the element type that it had."""
    name = node.output[0]
    attributes = {a.name: a for a in draw.attribute}
    kind, like = int(attributes["dtype"].i) if "dtype" in attributes else 0, ""
    if node.op_type == "Cast":
        kind = next(int(a.i) for a in node.attribute if a.name == "to")
    elif node.op_type == "CastLike":
        kind, like = 0, node.input[1]
    elif not kind:
        kind, like = (1, "") if draw.op_type == "RandomUniform" else (0, draw.input[0])

    def put(op_type: str, ins: list[str], what: str, **attributes: Any) -> str:
        output = f"{name}.{what}" if what else name
        graph.node.append(helper.make_node(op_type, ins, [output], **attributes))
        return output

    def constant(value: Any, what: str) -> str:
        return put("Constant", [], what, value=numpy_helper.from_array(np.array(value)))

    if draw.op_type == "RandomUniform":
        shape = constant(np.array(attributes["shape"].ints, np.int64), "shape")
    else:
        shape = put("Shape", [draw.input[0]], "shape")
    one = put("ConstantOfShape", [shape], "one", value=numpy_helper.from_array(np.ones(1, np.float32)))
    ones = put("Cast", [one], "ones", to=kind) if kind else put("CastLike", [one, like], "ones")
    ratio, on = constant(np.float32(1 - p), "ratio"), constant(True, "on")
    kept = put("Dropout", [ones, ratio, on], "kept")
    put("Mul", [kept, put("CastLike", [constant(np.float32(p), "p32"), ones], "p")], "")


def _number(name: str, makers: dict[str, onnx.NodeProto], tensors: dict[str, onnx.TensorProto]) -> float | None:
    """The single number that a constant holds, also behind a cast."""
    node = makers.get(name)
    while node is not None and node.op_type in ("Cast", "CastLike"):
        name = node.input[0]
        node = makers.get(name)
    if name in tensors:
        array = numpy_helper.to_array(tensors[name])
    elif node is not None and node.op_type == "Constant" and node.attribute[0].name == "value":
        array = numpy_helper.to_array(node.attribute[0].t)
    elif node is not None and node.op_type == "Constant" and node.attribute[0].name == "value_float":
        array = np.array(node.attribute[0].f)
    else:
        return None
    return float(array.reshape(())) if array.size == 1 else None
