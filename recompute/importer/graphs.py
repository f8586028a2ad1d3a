"""Traversal of ONNX graphs and their subgraphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx


def names_read(nodes: Any) -> Iterator[str]:
    """Every name that nodes read, also inside their subgraphs."""
    for node in nodes:
        yield from node.input
        for a in node.attribute:
            for graph in graphs_of(a):
                yield from names_read(graph.node)
                yield from (o.name for o in graph.output)


def needed(nodes: Sequence[onnx.NodeProto], wanted: set[str]) -> list[onnx.NodeProto]:
    """The nodes that some values need, which are added to `wanted`, in their order."""
    result = []
    for node in reversed(nodes):
        if any(o in wanted for o in node.output):
            wanted.update(names_read([node]))
            result.append(node)
    return result[::-1]


def graphs_of(a: onnx.AttributeProto) -> Sequence[onnx.GraphProto]:
    """The graphs in an attribute."""
    if a.type == onnx.AttributeProto.GRAPH:
        return (a.g,)
    return a.graphs if a.type == onnx.AttributeProto.GRAPHS else ()


def all_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The main graph and all that are nested in it or in functions, each before those inside of it."""
    yield model.graph
    todo = [model.graph.node, *(f.node for f in model.functions)]
    while todo:
        for node in todo.pop():
            for a in node.attribute:
                yield from graphs_of(a)
                todo += [g.node for g in graphs_of(a)]


def rename_reads(node: onnx.NodeProto, names: Mapping[str, str], hidden: frozenset[str] = frozenset()) -> None:
    """Replaces the names that a node reads; names defined inside its subgraphs (`hidden`) are not replaced."""
    for i, n in enumerate(node.input):
        if n in names and n not in hidden:
            node.input[i] = names[n]
    for a in node.attribute:
        for graph in graphs_of(a):
            hidden_here = hidden.union((v.name for v in graph.input), (t.name for t in graph.initializer))
            for inner in graph.node:
                rename_reads(inner, names, hidden_here)
                if any(o in names for o in inner.output):
                    hidden_here = hidden_here.union(inner.output)
            for v in graph.output:
                if v.name not in hidden_here:
                    v.name = names.get(v.name, v.name)


def first_output(node: onnx.NodeProto) -> str:
    """The name of a node in this package: that of its first present output."""
    return next((o for o in node.output if o), node.name or node.op_type)


def without_fields(message: Any, *fields: str) -> Any:
    """A copy of a protobuf message without the named fields."""
    copy = type(message)()
    for field, value in message.ListFields():
        if field.name in fields:
            continue
        if field.is_repeated:
            getattr(copy, field.name).extend(value)
        elif field.message_type is not None:
            getattr(copy, field.name).CopyFrom(value)
        else:
            setattr(copy, field.name, value)
    return copy
