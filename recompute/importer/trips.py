"""The number of nodes of an unrolled loop with its nested loops, from known trip counts, before it is unrolled.

This is a lower bound: an unknown trip count counts as one, and loop-invariant nodes count once (`Subgraph.hoist`).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping
from dataclasses import dataclass

import onnx

from .graphs import graphs_of
from .state import ImportState
from .subgraph import Subgraph, depends


@dataclass
class Scope:
    """Known integers, booleans and shapes inside a subgraph, by name; None: hidden by the subgraph's own name."""

    numbers: MutableMapping[str, int | None]
    shapes: MutableMapping[str, tuple[int, ...] | None]
    importer: ImportState

    @staticmethod
    def of(importer: ImportState, body: Subgraph, shapes: dict[str, tuple[int, ...]]) -> Scope:
        """The scope of a loop's body."""
        scope = Scope({}, dict(shapes), importer)
        scope.hide(body.graph)
        scope.shapes.update(shapes)
        for inner, outer in body.names.items():
            scope.shapes[inner] = scope.shape(outer)
            scope.numbers[inner] = scope.number(outer)
        return scope

    def inside(self, graph: onnx.GraphProto) -> Scope:
        """The scope of a nested graph."""
        scope = Scope(ChainMap({}, self.numbers), ChainMap({}, self.shapes), self.importer)
        scope.hide(graph)
        return scope

    def hide(self, graph: onnx.GraphProto) -> None:
        """Adds the definitions of a graph: constants are known, others are not."""
        for v in graph.input:
            self.numbers[v.name] = self.shapes[v.name] = None
        for t in graph.initializer:
            self._hold(t.name, t)
        for n in graph.node:
            for o in n.output:
                self.numbers[o] = self.shapes[o] = None
            for a in n.attribute if n.op_type == "Constant" else ():
                if a.type == onnx.AttributeProto.TENSOR:
                    self._hold(n.output[0], a.t)
                elif a.name == "value_int" or (a.name == "value_ints" and len(a.ints) == 1):
                    self.numbers[n.output[0]] = a.i if a.name == "value_int" else a.ints[0]

    def _hold(self, name: str, t: onnx.TensorProto) -> None:
        self.shapes[name], self.numbers[name] = tuple(t.dims), None
        if all(d == 1 for d in t.dims) and t.data_type in (onnx.TensorProto.INT64, onnx.TensorProto.BOOL):
            try:
                self.numbers[name] = int(onnx.numpy_helper.to_array(t).reshape(()))
            except Exception:  # an error is raised where it is read
                return

    def number(self, name: str) -> int | None:
        """The value of a single integer or boolean; None if it is not known."""
        if name in self.numbers:
            return self.numbers[name]
        constant = self.importer.known.get(name)
        if constant is None or constant.array.size != 1 or constant.array.dtype.kind not in "iub":
            return None
        return int(constant.array.reshape(()))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a value; None if it is not known."""
        if name in self.shapes:
            return self.shapes[name]
        constant = self.importer.env.get(name) or self.importer.known.get(name)
        return None if constant is None else constant.type.shape


def written_nodes(node: onnx.NodeProto, scope: Scope) -> int:
    """Lower bound of the nodes that a node becomes."""
    graphs = {a.name: g for a in node.attribute for g in graphs_of(a)}
    if node.domain not in ("", "ai.onnx"):
        return 1
    if node.op_type == "If" and len(graphs) == 2:
        return min(sum(written_nodes(n, scope.inside(g)) for n in g.node) for g in graphs.values())
    if node.op_type not in ("Loop", "Scan") or "body" not in graphs:
        return 1
    body = graphs["body"]
    inside = scope.inside(body)
    if node.op_type == "Loop" and len(body.input) > 1:
        inside.numbers[body.input[1].name] = 1  # its condition is true whenever the body runs
    count = _trips_of_loop if node.op_type == "Loop" else _steps_of_scan
    trips = count(node, body, scope, inside)
    varying = {v.name for i, v in enumerate(body.input) if node.op_type == "Scan" or i != 1}
    once = each = 0
    for n in body.node:
        if n.op_type == "Constant":
            continue
        if depends(n, varying):
            varying.update(n.output)
            each += written_nodes(n, inside)
        else:
            once += written_nodes(n, inside)
    return once * (trips > 0) + each * trips


def _trips_of_loop(node: onnx.NodeProto, body: onnx.GraphProto, scope: Scope, inside: Scope) -> int:
    """The trip count of a Loop that nothing can end early, else one, or none."""
    if len(node.input) > 1 and node.input[1]:
        goes_on = scope.number(node.input[1])
        if not goes_on:
            return 0
    limit = scope.number(node.input[0]) if node.input and node.input[0] else None
    if limit is None or limit < 1:
        return 0
    if len(body.input) < 2 or not body.output:
        return 1
    condition = body.output[0].name
    sources = {n.output[0]: n.input[0] for n in body.node if n.op_type == "Identity" and n.input and n.output}
    for _ in range(len(sources)):
        condition = sources.get(condition, condition)
    always = condition == body.input[1].name or bool(inside.number(condition))
    return limit if always else 1


def _steps_of_scan(node: onnx.NodeProto, body: onnx.GraphProto, scope: Scope, inside: Scope) -> int:
    """The steps of a Scan, one if not known; also sets the shapes of its body's inputs."""
    options = {a.name: a for a in node.attribute}
    m = options["num_scan_inputs"].i if "num_scan_inputs" in options else 0
    n = len(node.input) - m
    if m < 1 or n < 0 or len(body.input) != len(node.input):
        return 1
    given = list(options["scan_input_axes"].ints) if "scan_input_axes" in options else []
    axes = given if len(given) == m else [0] * m
    steps = 1
    for i, (v, name) in enumerate(zip(body.input, node.input, strict=True)):
        shape = scope.shape(name)
        if shape is None or i < n:
            inside.shapes[v.name] = shape
            continue
        axis = axes[i - n]
        if not -len(shape) <= axis < len(shape):
            return 1
        steps = shape[axis]
        inside.shapes[v.name] = tuple(d for k, d in enumerate(shape) if k != axis % len(shape))
    return steps
