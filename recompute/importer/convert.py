"""Preparation of models with onnx's own tools, after checks that they terminate: inlining, opset conversion."""

from __future__ import annotations

import onnx

from ..errors import ModelError
from . import old_forms
from .graphs import first_output
from .inline import check_functions
from .limits import Budget
from .loops import hide_old_scans
from .model import TARGET_OPSET, main_opset
from .ranks import unbounded
from .schema import check_node, describe, has_operator

#: the oldest supported opset
MIN_OPSET = 1
#: initializers larger than this are not passed to the version converter
_SMALL_BYTES = 1024
#: neither are constants of nodes that are larger than this
_LARGE_BYTES = 1 << 16
#: temporary domain of operators that the version converter does not know
_PARKED = "onnx_recompute.parked"


def prepare(model: onnx.ModelProto, budget: Budget | None = None, *, oldest: int = TARGET_OPSET) -> onnx.ModelProto:
    """The model with its functions inlined; weights are shared, not copied.

    Opsets before `oldest` are converted to `TARGET_OPSET`.  LimitError if its inlined functions exceed `budget`.
    """
    opset = main_opset(model)
    if opset < MIN_OPSET:
        raise ModelError(f"the model uses opset {opset}; opsets {MIN_OPSET} and later are supported")
    if not model.functions and opset >= oldest:
        return model
    light, weights, constants = _without_weights(model)
    if light.functions:
        check_functions(light, budget or Budget())
        light = _inlined(light)
    if opset < oldest:
        light = _converted(light, opset)
    _give_back(light, model, weights)
    return _with_constants(light, constants) if constants else light


def _give_back(light: onnx.ModelProto, model: onnx.ModelProto, weights: list[onnx.TensorProto]) -> None:
    """Puts the large weights, which were inputs, into their place again, and what the file says about nodes.

    The version converter drops their metadata, which say what is detached.
    """
    said = {first_output(n): n.metadata_props for n in model.graph.node if n.metadata_props}
    for node in light.graph.node if said else ():
        if not node.metadata_props:
            node.metadata_props.extend(said.get(first_output(node), ()))
    for t in weights:
        light.graph.initializer.append(t)
    names = {t.name for t in weights} - {i.name for i in model.graph.input}
    for i in [i for i in light.graph.input if i.name in names]:
        light.graph.input.remove(i)


def raised(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The model in a later opset; its functions are inlined.  ModelError where onnx's converter cannot do it."""
    light, weights, constants = _without_weights(model)
    light = _converted(_inlined(light) if light.functions else light, main_opset(model), opset)
    light.metadata_props.extend(model.metadata_props)
    light.ir_version = max(light.ir_version, 10)
    _give_back(light, model, weights)
    return _with_constants(light, constants) if constants else light


def _with_constants(model: onnx.ModelProto, constants: list[onnx.NodeProto]) -> onnx.ModelProto:
    """The model with Constant nodes in the place of inputs."""
    names = {n.output[0] for n in constants}
    nodes, inputs = list(model.graph.node), [i for i in model.graph.input if i.name not in names]
    del model.graph.node[:], model.graph.input[:]
    model.graph.node.extend([*constants, *nodes])
    model.graph.input.extend(inputs)
    return model


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    from onnx import inliner

    try:
        return inliner.inline_local_functions(model)
    except Exception as e:
        raise ModelError(f"onnx's inliner cannot inline the model's functions: {_last_line(e)}") from None


def _last_line(e: Exception) -> str:
    return str(e).strip().splitlines()[-1] if str(e).strip() else type(e).__name__


def _converted(model: onnx.ModelProto, opset: int, target: int = TARGET_OPSET) -> onnx.ModelProto:
    from onnx import version_converter

    _check_nodes(model.graph, opset)
    try:
        resized = old_forms.before(model, opset)
        if opset == 8 and target == TARGET_OPSET:
            hide_old_scans(model.graph)
        parked = _park_unknown(model.graph, opset)
        for node in unbounded(model.graph):
            node.domain, parked = _PARKED, True
        if parked:
            model.opset_import.append(onnx.helper.make_opsetid(_PARKED, 1))
        converted = version_converter.convert_version(model, target)
        if parked:
            _park_unknown(converted.graph, None)
            for entry in [o for o in converted.opset_import if o.domain == _PARKED]:
                converted.opset_import.remove(entry)
        old_forms.after(converted, opset, resized)
        return converted
    except Exception as e:
        raise ModelError(
            f"onnx's version converter cannot convert the model from opset {opset} to {target}: {_last_line(e)}"
        ) from None


def _check_nodes(graph: onnx.GraphProto, opset: int) -> None:
    """ModelError for the first node that violates its schema: the converter would crash on some of them.

    Negative dimensions, which mean dynamic ones, are removed for the same reason.
    """
    for v in (*graph.input, *graph.output):
        for d in v.type.tensor_type.shape.dim:
            if d.dim_value < 0:
                d.ClearField("dim_value")
    for node in graph.node:
        try:
            check_node(node, opset)
        except ModelError as e:
            raise ModelError(f"{describe(node)}: {e}") from None
        for a in node.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                _check_nodes(a.g, opset)


def _park_unknown(graph: onnx.GraphProto, opset: int | None) -> bool:
    """Moves operators that ONNX does not have at `opset` to a domain of their own, whether there are any; None: back.

    Optimizers write LayerNormalization and others into files of any opset, and the converter fails on them.
    """
    parked = False
    for node in graph.node:
        if opset is None and node.domain == _PARKED:
            node.domain = ""
        elif opset is not None and node.domain in ("", "ai.onnx") and not has_operator(node.op_type, opset):
            node.domain, parked = _PARKED, True
        for a in node.attribute:
            if a.type == onnx.AttributeProto.GRAPH:
                parked = _park_unknown(a.g, opset) or parked
    return parked


def _without_weights(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[onnx.TensorProto], list[onnx.NodeProto]]:
    """A copy in which large initializers and constants are graph inputs, those initializers, and those constants."""
    light = onnx.ModelProto()
    large = [t for t in model.graph.initializer if t.ByteSize() > _SMALL_BYTES]
    names = {t.name for t in large}
    light.CopyFrom(onnx.ModelProto(ir_version=max(model.ir_version, 4)))
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    graph = light.graph
    graph.name = model.graph.name or "main"
    held = [n for n in model.graph.node if n.op_type == "Constant" and _is_large_constant(n)]
    if held:
        outputs = {n.output[0] for n in held}
        graph.node.extend(n for n in model.graph.node if n.op_type != "Constant" or n.output[0] not in outputs)
    else:
        graph.node.extend(model.graph.node)
    graph.output.extend(model.graph.output)
    graph.input.extend(model.graph.input)
    graph.initializer.extend(t for t in model.graph.initializer if t.name not in names)
    declared = {i.name for i in model.graph.input}
    for name, t in (*((t.name, t) for t in large), *((n.output[0], n.attribute[0].t) for n in held)):
        if name not in declared:
            graph.input.append(onnx.helper.make_tensor_value_info(name, t.data_type, list(t.dims)))
    return light, large, held


def _is_large_constant(node: onnx.NodeProto) -> bool:
    if node.domain not in ("", "ai.onnx") or len(node.output) != 1 or len(node.attribute) != 1:
        return False
    a = node.attribute[0]
    return a.name == "value" and a.type == onnx.AttributeProto.TENSOR and len(a.t.raw_data) > _LARGE_BYTES
