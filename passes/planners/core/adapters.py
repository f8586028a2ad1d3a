"""Import of planning problems: node/link JSON (networkx; Checkmate's and Moccasin's files) and Graphviz dot."""

from __future__ import annotations

import graphlib
import heapq
import itertools
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....errors import UsageError
from ....support.files import regular
from .problem import FORMAT, Node, RematerialisationProblem, problem_from_dict, read_json

#: what the fields of a node may be called, ours first
_BYTES = ("cost_ram", "out_cost", "bytes")
_COST = ("cost_cpu", "duration", "cost")
#: pairs of names that the ends of a link may have
_ENDS = (("source", "target"), ("0", "1"))
#: a dot file larger than this is refused before it is read
_LARGEST_DOT = 1 << 28


def read_problem(path: str | os.PathLike[str], *, repeat_backward: bool = False) -> RematerialisationProblem:
    """A problem from a file of any kind that we know, told by its content: ours, node/link JSON, or Graphviz dot.

    In node/link JSON (networkx's) each node is an operator with one output of `cost_ram` (or `out_cost`) bytes, that
    takes `cost_cpu` (or `duration`); `backward` says to which pass it belongs, where that is known.  Links are
    {"source": id, "target": id}, or {"0": id, "1": id}.  The order of execution is the graph's `order` where it has
    one, else that of the nodes in the file as far as the links allow it.

    `repeat_backward` is for graphs, not for our own files, which say of each node whether it may run again: backward
    nodes may only with it (Checkmate's model lets them); all others may.  In both papers' models every node must run
    at least once and nothing is held to the end: a value that nothing reads is freed as soon as it is written, so that
    the problem has neither inputs nor outputs.
    """
    try:
        with open(regular(path), "rb") as f:
            start = f.read(4096).lstrip()
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror or e}") from None
    if start[:1] not in (b"{", b"["):
        return problem_from_dot(path, repeat_backward=repeat_backward)
    data = read_json(path)
    if data.get("format") == FORMAT:
        return problem_from_dict(data, str(path))
    return _from_node_link(data, path, repeat_backward)


def problem_from_dot(path: str | os.PathLike[str], *, repeat_backward: bool = False) -> RematerialisationProblem:
    """A problem from a Graphviz file of a small subset of the language.

    `digraph name { a [bytes=64, cost=1.5]; a -> b -> c; d [backward=true] }`: nodes with the attributes `bytes`
    (default 0), `cost` (default 1), `backward` and `scratch`, others are ignored; `node [...]` sets defaults from
    there on; edges, chains of edges; comments, `graph [...]`, `edge [...]` and `key=value` are skipped.  Subgraphs,
    ports and undirected edges are refused.  The order is that in which nodes are first named, as far as edges allow.
    """
    try:
        if os.path.getsize(regular(path)) > _LARGEST_DOT:
            raise UsageError(f"{path} is larger than {_LARGEST_DOT >> 20} MiB")
        text = Path(path).read_text()
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is neither JSON nor text") from None
    return _Dot(text, path).read().problem(repeat_backward)


@dataclass
class _Graph:
    """What all forms have in common: vertices by identity, in the file's order, and edges between them."""

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
                    cost=_cost(_first(found, _COST, 1.0), what),
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
        """Of the nodes that could come next always the first of the file.  UsageError for a cycle."""
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


_TOKEN = re.compile(
    r"(?P<skip>\s+|//[^\n]*|/\*.*?\*/|\#[^\n]*)"
    r'|(?P<id>[A-Za-z_\u0080-\uffff][\w\u0080-\uffff]*|-?(?:\.\d+|\d+(?:\.\d*)?)|"(?:[^"\\]|\\.)*")'
    r"|(?P<sign>->|--|[\[\]{}=;,:])",
    re.DOTALL,
)


class _Dot:
    """Reads the subset of the dot language that `problem_from_dot` describes; errors name the line."""

    def __init__(self, text: str, path: str | os.PathLike[str]) -> None:
        self.text, self.path = text, str(path)
        self.line = 1
        self.tokens = self.split()
        self.next = ""
        self.quoted = False
        self.defaults: dict[str, Any] = {}

    def wrong(self, what: str) -> UsageError:
        return UsageError(f"{self.path}, line {self.line}: {what}")

    def split(self) -> Iterator[tuple[str, bool]]:
        at = 0
        while at < len(self.text):
            m = _TOKEN.match(self.text, at)
            if m is None:
                raise self.wrong(f"{self.text[at : at + 20]!r} is neither a graph in dot nor JSON")
            if m.lastgroup == "id" and m[0][0] == '"':
                yield re.sub(r'\\(["\\])', r"\1", m[0][1:-1]), True
            elif m.lastgroup != "skip":
                yield m[0], False
            self.line += m[0].count("\n")
            at = m.end()

    def step(self) -> str:
        """The token at hand; moves on to the next ('' at the end)."""
        now = self.next
        self.next, self.quoted = next(self.tokens, ("", False))
        return now

    def takes(self, sign: str) -> bool:
        if self.next == sign and not self.quoted:
            self.step()
            return True
        return False

    def need(self, sign: str) -> None:
        if not self.takes(sign):
            raise self.wrong(f"'{sign}' is expected, not '{self.next or 'the end'}'")

    def identity(self) -> str:
        if not self.quoted and (
            not self.next or not re.match(r"[\w.\-\u0080-\uffff]", self.next) or self.next in ("--", "->")
        ):
            raise self.wrong(f"a name is expected, not '{self.next or 'the end'}'")
        return self.step()

    def read(self) -> _Graph:
        self.step()
        while self.next.lower() == "strict":
            self.step()
        if self.next.lower() != "digraph":
            raise self.wrong(f"'digraph' is expected, not '{self.next or 'the end'}'")
        self.step()
        graph = _Graph(self.path, Path(self.path).stem)
        if self.next != "{":
            graph.name = self.identity()
        self.need("{")
        while not self.takes("}"):
            if not self.takes(";"):
                self.statement(graph)
        if self.next:
            raise self.wrong(f"'{self.next}' after the graph's end")
        return graph

    def statement(self, graph: _Graph) -> None:
        plain = not self.quoted
        if plain and (self.next == "{" or self.next.lower() == "subgraph"):
            raise self.wrong("subgraphs are not read here")
        first = self.identity()
        if self.takes("="):
            self.identity()
        elif plain and first.lower() in ("graph", "edge"):
            self.attributes()
        elif plain and first.lower() == "node":
            self.defaults.update(self.attributes())
        else:
            self.nodes(graph, first)

    def nodes(self, graph: _Graph, first: str) -> None:
        chain = [first]
        while self.takes("->"):
            chain.append(self.identity())
        if not self.quoted and self.next in (":", "--"):
            raise self.wrong("ports and undirected edges are not read here")
        for key in chain:
            graph.vertices.setdefault(key, dict(self.defaults))
        found = self.attributes()
        if len(chain) == 1:
            graph.vertices[first].update(found)
        graph.edges += itertools.pairwise(chain)

    def attributes(self) -> dict[str, str]:
        found: dict[str, str] = {}
        while self.takes("["):
            while not self.takes("]"):
                key = self.identity()
                found[key] = self.identity() if self.takes("=") else "true"
                if not self.takes(","):
                    self.takes(";")
        return found


def _first(found: dict[str, Any], keys: tuple[str, ...], otherwise: Any) -> Any:
    return next((found[k] for k in keys if k in found), otherwise)


def _number(x: Any, what: str, name: str) -> float:
    try:
        if not isinstance(x, bool) and math.isfinite(number := float(x)) and number >= 0:
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise UsageError(f"{what}: {name} must be a number that is not negative, not {x!r}")


def _cost(x: Any, what: str) -> float:
    return _number(x, what, "the cost")


def _bytes(x: Any, what: str) -> int:
    """Whole bytes, rounded up where a file has fractions."""
    return x if isinstance(x, int) and not isinstance(x, bool) and x >= 0 else math.ceil(_number(x, what, "bytes"))


def _truth(x: Any, what: str) -> bool:
    if isinstance(x, str) and x.lower() in ("true", "false", "yes", "no", "1", "0"):
        return x.lower() in ("true", "yes", "1")
    if not isinstance(x, (bool, int)):
        raise UsageError(f"{what}: 'backward' must be true or false, not {x!r}")
    return bool(x)


def _unique(names: list[str]) -> list[str]:
    """The names, later ones of the same name with a number behind."""
    seen: dict[str, int] = {}
    found = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found
