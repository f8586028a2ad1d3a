"""Import of planning problems in node/link JSON, as networkx, and the authors of Checkmate and Moccasin, write it."""

from __future__ import annotations

import graphlib
import heapq
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....errors import UsageError
from .problem import FORMAT, Node, RematerialisationProblem, problem_from_dict, read_json

#: names of a node's fields, ours first
_BYTES = ("cost_ram", "out_cost", "bytes")
_COST = ("cost_cpu", "duration", "cost")
#: pairs of names that the ends of a link may have
_ENDS = (("source", "target"), ("0", "1"))


def read_problem(path: str | os.PathLike[str], *, repeat_backward: bool = False) -> RematerialisationProblem:
    """A problem from a JSON file of either kind that we know, told by its content: ours, or a graph of nodes and links.

    In node/link JSON (networkx's) each node is an operator with one output of `cost_ram` (or `out_cost`) bytes, that
    takes `cost_cpu` (or `duration`); `backward` says to which pass it belongs, where that is known.  Links are
    {"source": id, "target": id}, or {"0": id, "1": id}.  The order of execution is the graph's `order` where it has
    one, else that of the nodes in the file as far as the links allow it.

    `repeat_backward` is for graphs, not for our own files, which say of each node whether it may run again: backward
    nodes may only with it (Checkmate's model lets them); all others may.  In both papers' models every node must run
    at least once and nothing is held to the end: a value that nothing reads is freed as soon as it is written, so that
    the problem has neither inputs nor outputs.
    """
    data = read_json(path)
    if data.get("format") == FORMAT:
        return problem_from_dict(data, str(path))
    return _from_node_link(data, path, repeat_backward)


@dataclass
class _Graph:
    """Vertices by identity, in the file's order, and edges between them."""

    where: str
    name: str
    vertices: dict[Any, dict[str, Any]] = field(default_factory=dict)
    edges: list[tuple[Any, Any]] = field(default_factory=list)
    order: list[Any] | None = None

    def problem(self, repeat_backward: bool) -> RematerialisationProblem:
        """One value a vertex, numbered like its node."""
        order = self.sorted()
        number = {key: i for i, key in enumerate(order)}
        reads: list[dict[int, None]] = [{} for _ in order]
        for a, b in self.edges:
            reads[number[b]][number[a]] = None
        names = _unique([str(self.vertices[key].get("name", key)) for key in order])
        nodes = []
        for i, key in enumerate(order):
            found, what = self.vertices[key], f"{self.where}: node {key!r}"
            backward = _truth(found.get("backward", False), what)
            nodes.append(
                Node(
                    name=names[i],
                    cost=_number(_first(found, _COST, 1.0), what, "the cost"),
                    reads=tuple(sorted(reads[i])),
                    writes=(i,),
                    scratch=_bytes(found.get("scratch", 0), what),
                    backward=backward,
                    repeatable=repeat_backward or not backward,
                )
            )
        sizes = tuple(_bytes(_first(self.vertices[k], _BYTES, 0), f"{self.where}: node {k!r}") for k in order)
        return RematerialisationProblem(tuple(nodes), sizes, tuple(names), name=self.name)

    def sorted(self) -> list[Any]:
        """The vertices in order of execution.  UsageError for a cycle, or an `order` that is none."""
        if self.order is None:
            return self.topological()
        position = {key: i for i, key in enumerate(self.order)}
        if len(position) != len(self.order) or position.keys() != self.vertices.keys():
            raise UsageError(f"{self.where}: 'order' does not name each node once")
        for a, b in self.edges:
            if position[a] >= position[b]:
                raise UsageError(f"{self.where}: 'order' has node {b!r} before node {a!r}, whose output it reads")
        return self.order

    def topological(self) -> list[Any]:
        """An order in which each next node is the first of the file that can come next.  UsageError for a cycle."""
        keys = list(self.vertices)
        place = {key: i for i, key in enumerate(keys)}
        sorter: graphlib.TopologicalSorter[int] = graphlib.TopologicalSorter(dict.fromkeys(range(len(keys)), ()))
        for a, b in self.edges:
            sorter.add(place[b], place[a])
        try:
            sorter.prepare()
        except graphlib.CycleError as e:
            raise UsageError(f"{self.where}: node {keys[e.args[1][0]]!r} lies on a cycle") from None
        found, ready = [], sorted(sorter.get_ready())  # sorted: a heap
        while ready:
            found.append(keys[ready[0]])
            sorter.done(heapq.heappop(ready))
            for i in sorter.get_ready():
                heapq.heappush(ready, i)
        return found


def _from_node_link(data: dict[str, Any], path: str | os.PathLike[str], repeat: bool) -> RematerialisationProblem:
    links = data.get("links", data.get("edges"))
    nodes = data.get("nodes")
    if not isinstance(nodes, list) or not isinstance(links, list):
        raise UsageError(f"{path} is neither a problem of format '{FORMAT}' nor a graph with 'nodes' and 'links'")
    if data.get("directed") is False:
        raise UsageError(f"{path}: the graph is not directed")
    about = data.get("graph") if isinstance(data.get("graph"), dict) else {}
    assert isinstance(about, dict)
    graph = _Graph(str(path), str(about.get("name", Path(path).stem)))
    for i, n in enumerate(nodes):
        key = n.get("id", n.get("name")) if isinstance(n, dict) else None
        if not isinstance(key, (int, str)):
            raise UsageError(f"{path}: nodes[{i}] has no 'id' that is a number or a string")
        if key in graph.vertices:
            raise UsageError(f"{path}: two nodes have the id {key!r}")
        if not any(k in n for k in _BYTES):
            raise UsageError(f"{path}: node {key!r} has none of {', '.join(_BYTES)}")
        graph.vertices[key] = n
    graph.edges = list(_links(graph, links))
    order = about.get("order")
    if order is not None and not (isinstance(order, list) and all(isinstance(k, (int, str)) for k in order)):
        raise UsageError(f"{path}: graph.order is not a list of node ids")
    graph.order = order
    return graph.problem(repeat)


def _links(graph: _Graph, links: list[Any]) -> Iterator[tuple[Any, Any]]:
    for i, link in enumerate(links):
        ends = next(((link[a], link[b]) for a, b in _ENDS if isinstance(link, dict) and a in link and b in link), None)
        if ends is None:
            raise UsageError(f"{graph.where}: links[{i}] lacks 'source' and 'target'")
        for key in ends:
            if not isinstance(key, (int, str)) or key not in graph.vertices:
                raise UsageError(f"{graph.where}: links[{i}] names {key!r}, which is no node")
        yield ends


def _first(found: dict[str, Any], keys: tuple[str, ...], otherwise: Any) -> Any:
    return next((found[k] for k in keys if k in found), otherwise)


def _number(x: Any, what: str, name: str) -> float:
    try:
        if not isinstance(x, bool) and math.isfinite(number := float(x)) and number >= 0:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise UsageError(f"{what}: {name} must be a number that is not negative, not {x!r}")


def _bytes(x: Any, what: str) -> int:
    """Whole bytes, rounded up where a file has fractions."""
    return x if isinstance(x, int) and not isinstance(x, bool) and x >= 0 else math.ceil(_number(x, what, "bytes"))


def _truth(x: Any, what: str) -> bool:
    if x in ("true", "false"):  # a graph from Graphviz has texts only
        return bool(x == "true")
    if not isinstance(x, (bool, int)):
        raise UsageError(f"{what}: 'backward' must be true or false, not {x!r}")
    return bool(x)


def _unique(names: list[str]) -> list[str]:
    """The names, later ones of the same name with a number behind."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found
