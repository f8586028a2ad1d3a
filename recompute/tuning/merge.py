"""Adapters merged into the weights they belong to: the model has its own form again."""

from __future__ import annotations

import numpy as np
import onnx

from ..errors import ModelError, UsageError
from ..exporter.function_builder import fill_tensor
from ..exporter.trained import export_trained
from ..importer.tensors import tensor_array
from ..language.program import Program
from .graph import File, Graph, model_of
from .lora import ADAPTERS, Adapter, adapters_of

__all__ = ["merge_adapters", "without_adapters"]


def merge_adapters(model: File | Program) -> onnx.ModelProto:
    """The model with its adapters merged into their weights: W + s·B·A, or DoRA's; it has the nodes of the base again.

    Of a Program the trained model (`rc.export_trained`), of a path or ModelProto the model itself.  Sums are made in
    float64.  Dequantised weights become floating-point ones.  UsageError where the model has no adapters.
    """
    proto = export_trained(model) if isinstance(model, Program) else model_of(model)
    adapters = adapters_of(proto)
    if not adapters:
        raise UsageError("the model has no adapters that rc.lora or rc.load_adapter added: there is nothing to merge")
    graph = Graph(proto)
    arrays = {a.weight: merged(graph, a) for a in adapters}
    without_adapters(graph, adapters)
    for name, array in arrays.items():
        replace_weight(graph, name, array)
    graph.unfreeze(arrays)
    return graph.finish()


def merged(graph: Graph, a: Adapter) -> np.ndarray:
    """The weight that does what a weight and its adapter do."""
    own = graph.constant_matrix(a.weight)
    parts = {what: _contents(graph, name).astype(np.float64) for what, name in a.tensors.items()}
    last, first = own.shape if a.turned else own.shape[::-1]
    wanted = {"A": (a.r, first), "B": (last, a.r), "magnitude": (last,)}
    for what, part in parts.items():
        if part.shape != wanted[what]:
            raise ModelError(
                f"'{a.tensors[what]}' is {list(part.shape)}, but the adapter of '{a.weight}' needs {list(wanted[what])}"
            )
    change = a.factor * (parts["B"] @ parts["A"])  # [out, in]; of a table [width, rows]
    whole = own.astype(np.float64) + (change if a.turned else change.T)
    if a.dora:
        axis = 1 if a.turned else 0
        lengths = np.sqrt((whole**2).sum(axis=axis, keepdims=True))
        whole *= np.expand_dims(parts["magnitude"], axis) / lengths
    return whole.astype(own.dtype)


def _contents(graph: Graph, name: str) -> np.ndarray:
    if name not in graph.tensors:
        raise UsageError(f"the model has no initializer '{name}', which its metadata says belongs to an adapter")
    return tensor_array(graph.tensors[name])


def without_adapters(graph: Graph, adapters: list[Adapter]) -> None:
    """Takes adapters out of a graph: its nodes are those of the base again."""
    sites = [s for a in adapters for s in a.sites]
    added = {name for s in sites for name in s["added"]}
    graph.nodes = [n for n in graph.nodes if added.isdisjoint(n.output)]
    makers = graph.makers()
    for site in sites:
        if (node := makers.get(site["base"])) is not None:
            node.output[0] = site["output"]
            node.input.extend([site["bias"]] if site["bias"] else [])
    graph.drop_unread([name for a in adapters for name in a.tensors.values()])
    graph.say(ADAPTERS, None)
    graph.set_trained(None)


def replace_weight(graph: Graph, name: str, array: np.ndarray) -> None:
    """Gives a weight other contents; one that a node makes becomes an initializer."""
    maker = None if name in graph.tensors else graph.makers().get(name)
    if maker is not None:
        graph.nodes.remove(maker)
        graph.drop_unread(maker.input)
        graph.add_tensor(name, array)
        return
    tensor = graph.tensors[name]
    kept = tensor.doc_string
    tensor.Clear()
    fill_tensor(tensor, name, array)
    tensor.doc_string = kept
