"""The bodies that ONNX itself gives for operators which are functions of simpler ones."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import onnx

from .types import TensorType, dtype_to_onnx

_COUNTER = itertools.count()


def expand_function(node: onnx.NodeProto, types: Mapping[str, TensorType], opset: int) -> list[onnx.NodeProto] | None:
    """The nodes that stand for `node`, its outputs under the same names; None where ONNX gives no body.

    `types`: the types of the node's inputs, for bodies that depend on them.
    """
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type):
        return None
    try:
        schema = onnx.defs.get_schema(node.op_type, min(opset, onnx.defs.onnx_opset_version()))
    except onnx.defs.SchemaError:  # newer than the model's opset
        return None
    function = _body(schema, node, types, opset)
    if function is None:
        return None
    return _instantiate(function, node, schema)


def _body(schema: Any, node: onnx.NodeProto, types: Mapping[str, TensorType], opset: int) -> onnx.FunctionProto | None:
    if schema.has_context_dependent_function:
        protos = []
        for n in node.input:
            if not n:
                protos.append(onnx.TypeProto().SerializeToString())
                continue
            t = types[n]
            protos.append(onnx.helper.make_tensor_type_proto(dtype_to_onnx(t.dtype), t.shape).SerializeToString())
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


def _instantiate(function: onnx.FunctionProto, node: onnx.NodeProto, schema: Any) -> list[onnx.NodeProto]:
    """The body's nodes with its formal names replaced by the node's and attributes filled in."""
    prefix = f"{next((o for o in node.output if o), node.op_type)}.{next(_COUNTER)}"
    names = {"": ""}
    for formals, actuals in ((function.input, node.input), (function.output, node.output)):
        for i, formal in enumerate(formals):
            names[formal] = actuals[i] if i < len(actuals) else ""
    given = {a.name: a for a in node.attribute}
    for name, a in schema.attributes.items():
        if name not in given and a.default_value.name:
            given[name] = a.default_value
    body = []
    for inner in function.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(inner)
        copy.name = f"{prefix}.{inner.name or inner.op_type}"
        copy.input[:] = [names.get(n, f"{prefix}.{n}") for n in inner.input]
        copy.output[:] = [names.get(n) or f"{prefix}.{n}" for n in inner.output]
        del copy.attribute[:]
        for a in inner.attribute:
            filled = _filled(a, given)
            if filled is not None:
                copy.attribute.append(filled)
        body.append(copy)
    return body


def _filled(a: onnx.AttributeProto, given: Mapping[str, onnx.AttributeProto]) -> onnx.AttributeProto | None:
    if not a.ref_attr_name:
        return a
    if a.ref_attr_name not in given:
        return None
    copy = onnx.AttributeProto()
    copy.CopyFrom(given[a.ref_attr_name])
    copy.name = a.name
    copy.ClearField("ref_attr_name")
    return copy
