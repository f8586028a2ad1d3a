"""ONNX graphs in inference mode: what trains in them is turned off, and what is not wanted is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import onnx
from onnx import helper

from ..errors import UsageError, nearest
from ..importer.graphs import graphs_of, names_read
from ..ops.shape.custom_gradient import DOMAIN

_STANDARD = ("", "ai.onnx")


def differs_in_training(nodes: Iterable[onnx.NodeProto]) -> bool:
    """Whether a node among these, or in their subgraphs, may compute something else in training."""
    return any(
        (n.op_type in ("BatchNormalization", "Dropout") and n.domain in _STANDARD)
        or any(differs_in_training(g.node) for g in _subgraphs(n))
        for n in nodes
    )


def in_inference(graph: onnx.GraphProto) -> None:
    """Turns a graph, and its subgraphs, to inference: batch normalisation by the running statistics, no dropout."""
    _turn(graph, {})


def _turn(graph: onnx.GraphProto, outside: dict[str, str]) -> None:
    """`outside`: name → the name to read in its place, from the graphs around."""
    outputs = {o.name for o in graph.output}
    read = set(names_read(graph.node)) | outputs
    renamed = dict(outside)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        node.input[:] = [renamed.get(i, i) for i in node.input]
        for sub in _subgraphs(node):
            _turn(sub, renamed)
        if node.op_type == "Dropout" and node.domain in _STANDARD:
            nodes += _without_dropout(node, read, outputs, renamed)
        elif node.op_type == "BatchNormalization" and node.domain in _STANDARD:
            nodes += _normalized(node, read)
        elif node.domain == DOMAIN and node.op_type == "CustomGradient":  # its values come first
            nodes += [helper.make_node("Identity", [i], [o]) for i, o in zip(node.input, node.output, strict=False)]
        else:
            nodes.append(node)
    kept = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]
    del graph.node[:]
    graph.node.extend(kept)


def _without_dropout(
    node: onnx.NodeProto, read: set[str], outputs: set[str], renamed: dict[str, str]
) -> list[onnx.NodeProto]:
    """Nothing, where readers can read the input; else an Identity, or the node itself for its mask."""
    x, y = node.input[0], node.output[0]
    if len(node.output) > 1 and node.output[1] in read:
        del node.input[1:]
        kept = [a for a in node.attribute if a.name == "seed"]
        del node.attribute[:]
        node.attribute.extend(kept)
        return [node]
    if y in outputs:
        return [helper.make_node("Identity", [x], [y], name=node.name)]
    renamed[y] = x
    return []


def _normalized(node: onnx.NodeProto, read: set[str]) -> list[onnx.NodeProto]:
    """The normalisation with one output; readers of its statistics read the running ones."""
    kept = [a for a in node.attribute if a.name != "training_mode"]
    copies = [
        helper.make_node("Identity", [node.input[3 + (i - 1) % 2]], [o])
        for i, o in enumerate(node.output)
        if i and o and o in read
    ]
    normal = onnx.NodeProto()
    normal.CopyFrom(node)
    del normal.attribute[:], normal.output[1:]
    normal.attribute.extend(kept)
    return [normal, *copies]


def restricted(graph: onnx.GraphProto, wanted: Sequence[str]) -> None:
    """Leaves only the `wanted` outputs, and what they need; inputs that nothing reads any more go too.

    Inner values may be wanted.  UsageError for a name that the graph does not have.
    """
    infos = {v.name: v for v in (*graph.value_info, *graph.output, *graph.input)}
    written = {o for n in graph.node for o in n.output} | {v.name for v in (*graph.input, *graph.initializer)}
    for name in wanted:
        if name not in written:
            raise UsageError(f"the model has no value '{name}' for an output{nearest(name, written)}")
    before = set(names_read(graph.node))
    needed = set(wanted)
    nodes = []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            needed.update(names_read([node]))
            nodes.append(node)
    if len(nodes) < len(graph.node):
        kept = [onnx.NodeProto.FromString(n.SerializeToString()) for n in reversed(nodes)]
        del graph.node[:]
        graph.node.extend(kept)
        _drop(graph.input, before - needed)
        _drop(graph.initializer, before - needed)
    outputs = [infos.get(n) or onnx.ValueInfoProto(name=n) for n in wanted]
    copies = [onnx.ValueInfoProto.FromString(v.SerializeToString()) for v in outputs]
    del graph.output[:]
    graph.output.extend(copies)


def _drop(values: object, names: set[str]) -> None:
    """Removes the named entries of a repeated field."""
    for at in reversed([i for i, v in enumerate(values) if v.name in names]):  # type: ignore[var-annotated, arg-type]
        del values[at]  # type: ignore[attr-defined]


def _subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    return (g for a in node.attribute for g in graphs_of(a))
