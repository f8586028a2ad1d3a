"""Function bodies that ONNX defines for operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx

from ..language.types import TensorType, dtype_to_onnx


def expand_function(node: onnx.NodeProto, types: Mapping[str, TensorType], opset: int) -> list[onnx.NodeProto] | None:
    """The nodes that replace `node`, with the same output names; None if ONNX defines no body.

    `types`: the types of the node's inputs, for bodies that depend on them; `opset`: the version of its domain.
    """
    domain = "" if node.domain == "ai.onnx" else node.domain
    if not onnx.defs.has(node.op_type, domain):
        return None
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, domain)
    except onnx.defs.SchemaError:  # newer than the model's opset
        return None
    function = _body(schema, node, types, opset)
    return None if function is None else _instantiate(function, node, schema)


def _body(schema: Any, node: onnx.NodeProto, types: Mapping[str, TensorType], opset: int) -> onnx.FunctionProto | None:
    if schema.has_context_dependent_function:
        protos = [_proto(n, types).SerializeToString() for n in node.input]
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
        if not versions:
            return None
        text = schema.get_context_dependent_function_with_opset_version(max(versions), node.SerializeToString(), protos)
        function = onnx.FunctionProto()
        function.ParseFromString(text)
        return function
    if schema.has_function:
        versions = [v for v in schema.function_opset_versions if v <= opset] or list(schema.function_opset_versions)
        function = onnx.FunctionProto()
        text = schema.get_function_with_opset_version(max(versions))
        function.ParseFromString(text if isinstance(text, bytes) else text.SerializeToString())
        return function
    return None


def _proto(name: str, types: Mapping[str, TensorType]) -> onnx.TypeProto:
    """An input's type; a value that is not a tensor is a sequence, of any element type."""
    if not name:
        return onnx.TypeProto()
    if name not in types:
        return onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(1, None))
    return onnx.helper.make_tensor_type_proto(dtype_to_onnx(types[name].dtype), types[name].shape)


def _instantiate(function: onnx.FunctionProto, node: onnx.NodeProto, schema: Any) -> list[onnx.NodeProto]:
    """The body's nodes with its formal names replaced by the node's and attributes filled in."""
    prefix = f"{next((o for o in node.output if o), node.name)}.{node.op_type}"
    names = {"": ""}
    for formals, actuals in ((function.input, node.input), (function.output, node.output)):
        for i, formal in enumerate(formals):
            names[formal] = actuals[i] if i < len(actuals) else ""
    attributes = {a.name: a for a in node.attribute}
    for name, a in schema.attributes.items():
        if name not in attributes and a.default_value.name:
            attributes[name] = a.default_value
    absent = {n for n in function.input if not names[n]}
    for inner in function.node:
        for n in (*inner.input, *inner.output):
            if n and not names.get(n) and n not in absent:
                names[n] = f"{prefix}.{n}"
    return [_copied(inner, names, attributes, f"{prefix}.{inner.name or inner.op_type}") for inner in function.node]


def _copied(
    inner: onnx.NodeProto, names: Mapping[str, str], attributes: Mapping[str, onnx.AttributeProto], called: str
) -> onnx.NodeProto:
    """A node of a body with its names replaced and attributes filled in, also inside its subgraphs."""
    copy = onnx.NodeProto()
    copy.CopyFrom(inner)
    copy.name = called
    copy.input[:] = [names.get(n, n) for n in inner.input]
    copy.output[:] = [names.get(n, n) for n in inner.output]
    del copy.attribute[:]
    for a in inner.attribute:
        filled = _filled(a, attributes)
        if filled is None:
            continue
        copy.attribute.append(filled)
        if filled is a and a.type == onnx.AttributeProto.GRAPH:
            graph = copy.attribute[-1].g
            inner_names = {i.name for i in a.g.input} | {t.name for t in a.g.initializer}
            inner_names |= {o for n in a.g.node for o in n.output}
            outer = {n: to for n, to in names.items() if n not in inner_names}
            del graph.node[:]
            graph.node.extend(_copied(n, outer, attributes, n.name) for n in a.g.node)
            for o in graph.output:
                o.name = outer.get(o.name, o.name)
    return copy


def _filled(a: onnx.AttributeProto, attributes: Mapping[str, onnx.AttributeProto]) -> onnx.AttributeProto | None:
    if not a.ref_attr_name:
        return a
    if a.ref_attr_name not in attributes:
        return None
    copy = onnx.AttributeProto()
    copy.CopyFrom(attributes[a.ref_attr_name])
    copy.name = a.name
    copy.ClearField("ref_attr_name")
    return copy
