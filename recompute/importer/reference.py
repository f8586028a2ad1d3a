"""Import of ONNX nodes that run through ONNX's reference evaluator (see ops/contrib/reference.py)."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ..errors import ModelError, nearest
from ..language.ir import Value
from ..language.op import IMPORTERS, REGISTRY
from ..language.types import TensorType, dtype_from_onnx
from ..ops.reference.evaluator import reference
from ..ops.reference.nodes import admitted, check_attributes
from .fold import infer_outputs
from .schema import has_operator
from .state import ImportState


def emit_reference(importer: ImportState, node: onnx.NodeProto, name: str) -> tuple[Value | None, ...]:
    """The outputs of a node through ONNX's evaluator.

    ModelError if this is not supported for the operator, or if an output's shape depends on data.  `name`: the name of
    the node in errors.
    """
    domain = "" if node.domain == "ai.onnx" else node.domain
    if not admitted(domain, node.op_type):
        raise ModelError(f"{name}: {_unsupported(domain, node.op_type)}")
    check_attributes(node)
    opset = importer.opset_of(domain)
    types = _output_types(importer, node, opset)
    if types is None:
        for n in node.input:
            if n:
                importer.contents(n)
        if domain:
            raise ModelError(
                f"{name}: it runs through ONNX's evaluator, without a gradient, and only where the types and shapes of "
                "its results are known, which they are not: cut the model before it (rc.edit.cut)"
            )
        raise ModelError(
            f"{name}: its output shape is data-dependent; a static program needs the contents of its inputs known at "
            "compile time, and few results"
        )
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [f"x{i}" if n else "" for i, n in enumerate(node.input)]
    copy.output[:] = [f"y{i}" if n else "" for i, n in enumerate(node.output)]
    copy.name = copy.doc_string = ""
    ins = [importer.value(n, "", 0) if n else None for n in node.input]
    outputs = importer.builder.emit(reference(copy, opset, types), *ins, want=len(types))
    results = iter(outputs if isinstance(outputs, tuple) else (outputs,))
    return tuple(next(results) if n else None for n in node.output)


def _unsupported(domain: str, op_type: str) -> str:
    """Why an operator cannot run, and what to do."""
    if domain:
        domains = [name for other, name in IMPORTERS if other == domain]
        hint = nearest(op_type, domains, close=True)
        says = f"the operator {op_type} of the domain '{domain}' is not supported{hint}"
        return (
            f"{says}: export the model with operators of ONNX in its place, or as the file was before it was optimized"
        )
    hint = nearest(op_type, [n for n in REGISTRY if has_operator(n, onnx.defs.onnx_opset_version())], close=True)
    return f"this operator is not supported{hint}: export the model with other operators, or cut it off"


def _output_types(importer: ImportState, node: onnx.NodeProto, opset: int) -> tuple[str, ...] | None:
    """Types of the present outputs, as text; None if one is not a static tensor."""
    types = {n: importer.type_of(n) for n in node.input if n}
    if any(t.dtype == "string" for t in types.values()):
        return None
    if node.op_type == "TreeEnsembleClassifier":
        return _of_classes(node, types)
    data = {n: k.array for n in types if (k := importer.known.get(n)) is not None}
    outputs = infer_outputs(node, types, data, opset)
    texts = []
    for o in node.output:
        if o:
            t = outputs[o].tensor_type if o in outputs else onnx.TypeProto.Tensor()
            dtype = dtype_from_onnx(t.elem_type)
            if dtype is None or not t.HasField("shape") or any(not d.HasField("dim_value") for d in t.shape.dim):
                return None
            texts.append(str(TensorType(dtype, tuple(d.dim_value for d in t.shape.dim))))
    return tuple(texts)


def _of_classes(node: onnx.NodeProto, types: Mapping[str, TensorType]) -> tuple[str, ...] | None:
    """Types of labels [N] and scores [N, classes] of a classifier, which ONNX does not infer.

    None of labels that are strings, and where not all classes have weights: ONNX's evaluator has other scores than
    ONNX Runtime then.
    """
    attributes = {a.name: list(a.ints) for a in node.attribute}
    classes, shape = len(attributes.get("classlabels_int64s", ())), types[node.input[0]].shape
    if not classes or len(shape) != 2 or set(attributes.get("class_ids", ())) != set(range(classes)):
        return None
    outputs = (TensorType("i64", shape[:1]), TensorType("f32", (shape[0], classes)))
    return tuple(str(t) for o, t in zip(node.output, outputs, strict=False) if o)
