"""Adapters merged into the weights they belong to: the model has its own form again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import onnx

from ..errors import ModelError, ModelWarning, UsageError, expect
from ..exporter.function_builder import fill_tensor
from ..exporter.trained import export_trained
from ..importer.tensors import tensor_array
from ..language.program import Program
from .few_bits import FewBits, few_bits, rounded, whole
from .graph import File, Graph, model_of
from .integers import integer_weights, product_of
from .integers import rounded as rounded_integers
from .lora import ADAPTERS, Adapter, adapters_of

__all__ = ["merge_adapters", "without_adapters"]


def merge_adapters(model: File | Program, *, tolerance: float = 0.1) -> onnx.ModelProto:
    """The model with its adapters merged into their weights: W + s·B·A, or DoRA's; it has the nodes of the base again.

    Of a Program the trained model (`rc.export_trained`), of a path or ModelProto the model itself.  Sums are made in
    float64.  Weights behind DequantizeLinear become floating-point ones.  Weights in few bits (MatMulNBits) stay so,
    which rounds W + s·B·A: where this is off by more than `tolerance` times s·B·A (both by their Frobenius norm), the
    merged weight would lose what was trained, and the adapter stays beside it; a ModelWarning says which.
    `tolerance=math.inf` merges all.  UsageError where the model has no adapters.
    """
    if not expect("tolerance", tolerance, (int, float), "a number") >= 0:
        raise UsageError(f"tolerance must be at least 0, not {tolerance!r}")
    proto = export_trained(model) if isinstance(model, Program) else model_of(model)
    adapters = adapters_of(proto)
    if not adapters:
        raise UsageError("the model has no adapters that rc.lora or rc.load_adapter added: there is nothing to merge")
    graph = Graph(proto)
    packed, integers, arrays = few_bits(graph), integer_weights(graph), dict[str, np.ndarray]()
    beside: list[tuple[Adapter, float]] = []
    for a in adapters:
        if a.weight in integers:
            tensors, lost = _integers(graph, a)
        elif a.weight not in packed:
            arrays[a.weight] = merged(graph, a, graph.constant_matrix(a.weight))
            continue
        else:
            tensors, lost = _rounded(graph, a, packed[a.weight])
        if lost > tolerance:
            beside.append((a, lost))
        else:
            arrays |= tensors
    kept = [a for a, _ in beside]
    without_adapters(graph, [a for a in adapters if a not in kept], kept)
    for name, array in arrays.items():
        replace_weight(graph, name, array)
    graph.unfreeze(arrays)
    if beside:
        _tell(beside, len(adapters), tolerance)
    return graph.finish()


def _rounded(graph: Graph, a: Adapter, w: FewBits) -> tuple[dict[str, np.ndarray], float]:
    """The tensors of a merged weight in few bits, and how far it is off, as a part of what the adapter adds."""
    weight = whole(graph, w).astype(np.float64)
    wanted = merged(graph, a, weight)
    added = np.linalg.norm(wanted - weight)
    if not added:
        return {}, 0.0
    tensors, held = rounded(graph, w, wanted)
    return tensors, float(np.linalg.norm(held - wanted) / added)


def _integers(graph: Graph, a: Adapter) -> tuple[dict[str, np.ndarray], float]:
    """The merged tensors and the error of a weight of integers, whose scale stays."""
    reading, tensors, lost = graph.reading(), dict[str, np.ndarray](), 0.0
    change = merged(graph, a, np.zeros(tuple(graph.tensors[a.weight].dims)))
    for node in reading(a.weight):
        product = product_of(reading, node)
        if product is None:
            raise UsageError(f"'{a.weight}' is read by {node.op_type} otherwise than when its adapter was added")
        tensors[a.weight], off = rounded_integers(graph, a.weight, product, change)
        lost = max(lost, off)
    return tensors, lost


def _tell(beside: Sequence[tuple[Adapter, float]], count: int, tolerance: float) -> None:
    """Says which adapters stay beside their weights (ModelWarning)."""
    worst, lost = max(beside, key=lambda b: b[1])
    warnings.warn(
        f"{len(beside)} of {count} adapters stay beside their weights, which are in few bits: W + s·B·A in these "
        f"would be off by {lost:.2g} times what '{worst.module}' adds, more than tolerance={tolerance:g}; "
        "tolerance=math.inf merges them all the same",
        ModelWarning,
        stacklevel=3,
    )


def merged(graph: Graph, a: Adapter, weight: np.ndarray) -> np.ndarray:
    """The weight that does what a weight, whose contents are `weight`, and its adapter do."""
    parts = {what: adapter_contents(graph, name).astype(np.float64) for what, name in a.tensors.items()}
    last, first = weight.shape if a.turned else weight.shape[::-1]
    wanted = {"A": (a.r, first), "B": (last, a.r), "magnitude": (last,)}
    for what, part in parts.items():
        if part.shape != wanted[what]:
            raise ModelError(
                f"'{a.tensors[what]}' is {list(part.shape)}, but the adapter of '{a.weight}' needs {list(wanted[what])}"
            )
    change = a.factor * (parts["B"] @ parts["A"])  # [out, in]; of a table [width, rows]
    whole = weight.astype(np.float64) + (change if a.turned else change.T)
    if a.dora:
        axis = 1 if a.turned else 0
        lengths = np.sqrt((whole**2).sum(axis=axis, keepdims=True))
        whole *= np.expand_dims(parts["magnitude"], axis) / lengths
    return whole.astype(weight.dtype)


def adapter_contents(graph: Graph, name: str) -> np.ndarray:
    """A tensor of an adapter.  UsageError where the model lacks it."""
    if name not in graph.tensors:
        raise UsageError(f"the model has no initializer '{name}', which its metadata says belongs to an adapter")
    return tensor_array(graph.tensors[name])


def without_adapters(graph: Graph, adapters: Sequence[Adapter], kept: Sequence[Adapter] = ()) -> None:
    """Takes adapters out of a graph: its nodes are those of the base again.  `kept`: those that stay, and train."""
    sites = [s for a in adapters for s in a.sites]
    added = {name for s in sites for name in s["added"]}
    graph.nodes = [n for n in graph.nodes if added.isdisjoint(n.output)]
    makers, gone = graph.makers(), [name for a in adapters for name in a.tensors.values()]
    for site in sites:
        if (node := makers.get(site["base"])) is not None:
            node.output[0] = site["output"]
            if site["bias"]:
                gone += node.input[2:]
                node.input[2:] = [site["bias"]]
    graph.drop_unread(gone)
    graph.say(ADAPTERS, [asdict(a) for a in kept] or None)
    graph.set_trained([n for a in kept for n in a.tensors.values()] or None)


def replace_weight(graph: Graph, name: str, array: np.ndarray) -> None:
    """Gives a weight other contents; one that a node makes becomes an initializer."""
    maker = None if name in graph.tensors else graph.makers().get(name)
    if maker is not None:
        graph.nodes.remove(maker)
        graph.drop(maker.input)
        graph.add_tensor(name, array)
        return
    tensor = graph.tensors[name]
    kept = tensor.doc_string
    tensor.Clear()
    fill_tensor(tensor, name, array)
    tensor.doc_string = kept
