"""Repair of exported parameters: those that an exporter merged are separated, copies of tied ones are tied again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from ..errors import UsageError, nearest
from ..support.patterns import Patterns
from .graphs import graphs_of, names_read
from .origin import FLOATS, described, module_path, origin_of
from .tensors import tensor_array


def repaired(
    model: onnx.ModelProto, tie: Mapping[str, str] | None, untie: bool | str | Sequence[str] | None
) -> onnx.ModelProto:
    """The model with parameters separated (`untie`), then tied (`tie`), as `rc.load` describes; itself for neither.

    UsageError for names that fit nothing, or for tensors that are not equal.
    """
    if not tie and not untie:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if untie:
        _separate(copy, None if untie is True else Patterns(untie))
    for name, other in (tie or {}).items():
        _tie(copy.graph, name, other)
    return copy


def _separate(model: onnx.ModelProto, wanted: Patterns | None) -> None:
    """Gives every reader of a floating-point initializer its own copy; one through Identity keeps its name.

    Another copy gets the name of the module's parameter where the file says it, else NAME@OUTPUT of its reader.
    `wanted`: which; None: those whose elements are all equal, as fresh biases and scales are: exporters merge these,
    while tied weights differ from element to element.
    """
    graph = model.graph
    tensors = {t.name: t for t in graph.initializer if t.data_type in FLOATS and t.dims}
    if wanted is not None and (useless := wanted.useless(tensors)) is not None:
        raise UsageError(f"untie: no floating-point initializer is called '{useless}'{nearest(useless, tensors)}")
    if wanted is None:
        tensors = {n: t for n, t in tensors.items() if (a := tensor_array(t)).size and (a == a.flat[0]).all()}
    origin = origin_of(model)
    missing = set(origin.missing)
    taken = {*names_read(graph.node), *(t.name for t in graph.initializer)}
    seen: set[str] = set()
    for node in list(graph.node):
        for i, name in enumerate(node.input):
            if name not in tensors or (wanted is not None and not wanted.fit(name)):
                continue
            copied = node.op_type == "Identity" and bool(node.output)
            if name not in seen and not copied:
                seen.add(name)
                continue
            weight = node.output[0] if copied else _own_name(name, node, missing)
            if weight not in taken or copied:
                taken.add(weight)
                graph.initializer.add().CopyFrom(tensors[name])
                graph.initializer[-1].name = weight
                if name in origin.kinds:
                    graph.value_info.append(described(weight, origin.kinds[name]))
            if copied:
                graph.node.remove(node)
            else:
                node.input[i] = weight


def _own_name(name: str, node: onnx.NodeProto, missing: set[str]) -> str:
    """The name of a reader's own copy."""
    last = name.rpartition(".")[2]
    for path in reversed(module_path(node)):
        if f"{path}.{last}" in missing:
            return f"{path}.{last}"
    return f"{name}@{node.output[0]}"


def _tie(graph: onnx.GraphProto, name: str, other: str) -> None:
    """Replaces an initializer by another of the same contents, or by its transpose."""
    tensors = {t.name: t for t in graph.initializer}
    for n in (name, other):
        if n not in tensors:
            raise UsageError(f"tie: no initializer is called '{n}'{nearest(n, tensors)}")
    a, b = tensor_array(tensors[name]), tensor_array(tensors[other])
    if a.shape == b.shape and np.array_equal(a, b):
        source = other
    elif a.ndim == 2 and a.shape == b.shape[::-1] and np.array_equal(a, b.T):
        source = f"{other}.transposed"
        if source not in {o for n in graph.node for o in n.output}:
            graph.node.insert(0, onnx.helper.make_node("Transpose", [other], [source], perm=[1, 0]))
    else:
        raise UsageError(f"tie: '{name}' {list(a.shape)} is neither equal to '{other}' {list(b.shape)} nor its "
                         "transpose: tied parameters have the same contents")  # fmt: skip
    graph.initializer.remove(tensors[name])
    _replace(graph, name, source)


def _replace(graph: onnx.GraphProto, name: str, other: str) -> None:
    """Readers of `name` read `other`, those in subgraphs too."""
    for node in graph.node:
        node.input[:] = [other if i == name else i for i in node.input]
        for a in node.attribute:
            for sub in graphs_of(a):
                _replace(sub, name, other)
    for i in [i for i in graph.input if i.name == name]:
        graph.input.remove(i)
