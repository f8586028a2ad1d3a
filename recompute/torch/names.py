"""Names and marks of exported models, as `rc.load` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import onnx

from ..importer.origin import FROM_TORCH, READ, SIGNATURE, source_operator
from .call import tensors_of

if TYPE_CHECKING:
    from torch.nn import Module

#: PyTorch's operators for batch normalisation that trains, from which BatchNormalization nodes come
_TRAINING_NORMS = (
    "aten._native_batch_norm_legit_functional",
    "aten._native_batch_norm_legit.",
    "aten.native_batch_norm",
)


def without_prefix(proto: onnx.ModelProto, prefix: str) -> None:
    """Names of tensors as in the module itself."""
    for said in proto.graph.metadata_props:
        if said.key == SIGNATURE:
            said.value = said.value.replace(f"target='{prefix}", "target='")
    names = [t.name for t in proto.graph.initializer if t.name.startswith(prefix)]
    rename(proto, {n: n.removeprefix(prefix) for n in names})


def rename(proto: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Gives initializers other names."""
    if not names:
        return
    for t in proto.graph.initializer:
        t.name = names.get(t.name, t.name)
    for v in proto.graph.value_info:
        v.name = names.get(v.name, v.name)
    for node in proto.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = names.get(name, name)


def mark_training(proto: onnx.ModelProto) -> None:
    """Says at each batch normalisation whether it trains, and that the model is PyTorch's (see FROM_TORCH)."""
    proto.metadata_props.add(key=FROM_TORCH, value="1")
    _name_dimensions(proto)
    for k, node in enumerate(proto.graph.node):
        read = [p for p in node.metadata_props if p.key in READ]  # the rest is long, and has paths of this machine
        del node.metadata_props[:]
        node.metadata_props.extend(read)
        if node.op_type == "BatchNormalization" and source_operator(node).startswith(_TRAINING_NORMS):
            kept = [a for a in node.attribute if a.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("training_mode", 1)])
            for what in ("mean", "var")[len(node.output) - 1 :]:
                node.output.append(f"batch_norm_{k}_running_{what}")


def _name_dimensions(proto: onnx.ModelProto) -> None:
    """Calls the dynamic first dimension "batch"; dimensions that turned out to be fixed are numbers."""
    first = next((d.dim_param for i in proto.graph.input for d in i.type.tensor_type.shape.dim[:1] if d.dim_param), "")
    for v in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for d in v.type.tensor_type.shape.dim:
            if d.dim_param.isdecimal():
                d.dim_value = int(d.dim_param)
            elif d.dim_param and d.dim_param == first:
                d.dim_param = "batch"


def initializers(module: Module, proto: onnx.ModelProto) -> dict[str, str]:
    """The module's name of each parameter and buffer → the initializer's; tied ones have one initializer."""
    there = {t.name for t in proto.graph.initializer}
    by_id: dict[int, str] = {}
    tensors = tensors_of(module)
    for name, tensor in tensors.items():
        if name in there:
            by_id.setdefault(id(tensor), name)
    return {name: by_id[id(tensor)] for name, tensor in tensors.items() if id(tensor) in by_id}
