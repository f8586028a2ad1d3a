"""Defaults of functions' attributes, and the size of a model after inlining, before onnx's inliner copies functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import onnx

from ..errors import ModelError
from .graphs import graphs_of
from .limits import NODE, Budget

#: deepest nesting of function calls
MAX_DEPTH = 200
#: units of onnx's type inference for a node: the inliner runs it on the model for each call of another opset
_INFERRED = 2_000

_Key = tuple[str, str, str]


@dataclass
class _Size:
    """The size of a function (or graph) after inlining: see `_add`.  `references`: attributes given by its caller."""

    nodes: int = 0
    bytes: int = 0
    references: int = 0
    converted: int = 0
    depth: int = 0
    calls: list[tuple[_Key, int, int]] = field(default_factory=list)  # callee, bytes and references of its attributes


def with_defaults(model: onnx.ModelProto, budget: Budget) -> onnx.ModelProto:
    """The model, or a copy whose calls of functions say every attribute: onnx's inliner forgets the defaults."""
    defaults = {_key(f.domain, f.name, f): f.attribute_proto for f in model.functions if f.attribute_proto}
    if not defaults:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    todo = [copy.graph.node, *(f.node for f in copy.functions)]
    while todo:
        for node in todo.pop():
            names = {a.name for a in node.attribute}
            more = [a for a in defaults.get(_key(node.domain, node.op_type, node), ()) if a.name not in names]
            budget.take(sum(a.ByteSize() for a in more))
            node.attribute.extend(more)
            todo += [g.node for a in node.attribute for g in graphs_of(a)]
    return copy


def check_functions(model: onnx.ModelProto, budget: Budget) -> None:
    """Charges the nodes and bytes that inlining a model's functions produces.

    ModelError if functions call themselves or are nested too deeply, LimitError if they become too large.
    """
    functions = {_key(f.domain, f.name, f): f for f in model.functions}
    sizes: dict[_Key, _Size] = {}
    versions = {(o.domain or "ai.onnx"): o.version for o in model.opset_import}
    for key in functions:
        _measure(key, functions, sizes, versions)
    main = _own(model.graph.node, functions, 0)  # its own bytes are in the file
    written = sum(s.nodes for s in (_own(f.node, functions, 0) for f in functions.values())) + main.nodes
    _add(main, sizes)
    extra = max(0, main.nodes - written)
    what = f"the model's functions, written out where they are called, become {main.nodes:,} nodes"
    budget.spend(extra * NODE + main.converted * written * _INFERRED, what)
    budget.take(main.bytes)


def _key(domain: str, name: str, proto: onnx.FunctionProto | onnx.NodeProto) -> _Key:
    return ("" if domain == "ai.onnx" else domain, name, getattr(proto, "overload", ""))


def _measure(
    start: _Key, functions: dict[_Key, onnx.FunctionProto], sizes: dict[_Key, _Size], versions: dict[str, int]
) -> None:
    """Computes the sizes of a function and of those that it calls, callees first."""
    todo = [start]
    waiting: dict[_Key, _Size] = {}
    while todo:
        key = todo[-1]
        if key in sizes:
            todo.pop()
            continue
        if key in waiting:
            size = waiting.pop(key)
            _add(size, sizes)
            if size.depth > MAX_DEPTH:
                raise ModelError(f"function '{key[1]}' is nested {MAX_DEPTH} calls deep or more")
            sizes[key] = size
            todo.pop()
            continue
        f = functions[key]
        waiting[key] = size = _own(f.node, functions, f.ByteSize())
        size.converted = any(versions.get(o.domain or "ai.onnx", o.version) != o.version for o in f.opset_import)
        for callee, *_ in size.calls:
            if callee in waiting:
                raise ModelError(f"function '{callee[1]}' calls itself, directly or through others")
            todo.append(callee)


def _own(nodes: Iterable[onnx.NodeProto], functions: dict[_Key, onnx.FunctionProto], nbytes: int) -> _Size:
    """The nodes that are not calls, and the calls."""
    size = _Size(bytes=nbytes)
    todo = [nodes]
    while todo:
        for node in todo.pop():
            key = _key(node.domain, node.op_type, node)
            if key in functions:
                attributes = [a for a in node.attribute if not a.ref_attr_name]
                refs = len(node.attribute) - len(attributes)
                size.calls.append((key, sum(a.ByteSize() for a in attributes), refs))
                continue
            size.nodes += 1
            for a in node.attribute:
                size.references += bool(a.ref_attr_name)
                todo += [g.node for g in graphs_of(a)]
    return size


def _add(size: _Size, sizes: dict[_Key, _Size]) -> None:
    """Adds the size of a called function to that of its caller."""
    for callee, nbytes, refs in size.calls:
        inner = sizes[callee]
        size.nodes += inner.nodes
        size.bytes += inner.bytes + inner.references * nbytes
        size.references += inner.references if refs else 0
        size.converted += inner.converted
        size.depth = max(size.depth, inner.depth + 1)
