"""Looking through ONNX graphs and the graphs inside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import onnx


def names_read(nodes: Any) -> Iterator[str]:
    """Every name that nodes read, inside their subgraphs too."""
    for node in nodes:
        yield from node.input
        for a in node.attribute:
            for graph in graphs_of(a):
                yield from names_read(graph.node)
                yield from (o.name for o in graph.output)


def graphs_of(a: onnx.AttributeProto) -> Sequence[onnx.GraphProto]:
    """The graphs that an attribute holds."""
    if a.type == onnx.AttributeProto.GRAPH:
        return (a.g,)
    return a.graphs if a.type == onnx.AttributeProto.GRAPHS else ()


def first_output(node: onnx.NodeProto) -> str:
    """The name that stands for a node: that of its first output that is there."""
    return next((o for o in node.output if o), node.name or node.op_type)
