"""The planning problem: nodes with costs, values with sizes, and which nodes may be recomputed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from ....errors import UsageError
from ....support.files import regular, replacing

T = TypeVar("T")
#: the first field of a problem's file
FORMAT = "recompute-problem-1"
#: a file larger than this is refused before it is read
_LARGEST_FILE = 1 << 30


@dataclass(frozen=True)
class Node:
    """An operator as planners see it.

    `cost`: seconds, or any other unit that is the same for all.  `reads`, `writes`: numbers of values.  `scratch`:
    bytes that it needs while it runs.  `backward`: whether it belongs to the backward pass or comes after it.
    `repeatable`: whether it may run again.  `overwrites`: values that it reads and whose place its first output of
    their size may take when nothing reads them later.  A value named twice in `reads` is read once.  `loop`: whether a
    generated loop may run it together with other such nodes, so that what passes between them takes no bytes; `remade`:
    values that it reads, which its loop may make again at no cost.  Lower bounds count neither.
    """

    name: str
    cost: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    scratch: int = 0
    backward: bool = False
    repeatable: bool = True
    overwrites: tuple[int, ...] = ()
    loop: bool = False
    remade: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # bounds and local search count what a node reads: twice would be twice the bytes
        if len(set(self.reads)) < len(self.reads):
            object.__setattr__(self, "reads", tuple(dict.fromkeys(self.reads)))


@dataclass(frozen=True)
class RematerialisationProblem:
    """A step: nodes in order of execution, each value written by one of them or there from the start.

    `sizes`, `values`: bytes and names of the values.  `inputs`: values that are there before the first node, and die
    after their last use like any other.  `outputs`: values that live to the end.  `fixed`: bytes that are always
    there and count (parameters, optimizer state).  `shared`: values that may come to lie in another's place (parts of
    a Concat), so that a lower bound must not count them.
    """

    nodes: tuple[Node, ...]
    sizes: tuple[int, ...]
    values: tuple[str, ...]
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    fixed: int = 0
    name: str = "problem"
    shared: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check(self)

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def producer(self) -> list[int]:
        """Number of the node that writes each value; -1 for inputs."""
        found = [-1] * len(self.sizes)
        for i, node in enumerate(self.nodes):
            for v in node.writes:
                found[v] = i
        return found

    @cached_property
    def readers(self) -> list[list[int]]:
        """Numbers of the nodes that read each value, in order."""
        found: list[list[int]] = [[] for _ in self.sizes]
        for i, node in enumerate(self.nodes):
            for v in node.reads:
                found[v].append(i)
        return found

    @cached_property
    def preds(self) -> list[tuple[int, ...]]:
        """Nodes that write what each node reads."""
        return [tuple(dict.fromkeys(p for v in n.reads if (p := self.producer[v]) >= 0)) for n in self.nodes]

    @cached_property
    def succs(self) -> list[tuple[int, ...]]:
        """Nodes that read what each node writes."""
        return [tuple(sorted({r for v in n.writes for r in self.readers[v]})) for n in self.nodes]

    @cached_property
    def forward(self) -> list[int]:
        """Numbers of the nodes of the forward pass."""
        return [i for i, n in enumerate(self.nodes) if not n.backward]

    @cached_property
    def saved(self) -> list[int]:
        """Values of the forward pass that the backward pass reads, in order of production."""
        first = self.producer
        return [
            v
            for i in self.forward
            for v in self.nodes[i].writes
            if any(self.nodes[r].backward for r in self.readers[v]) and first[v] == i
        ]

    @cached_property
    def in_two_passes(self) -> RematerialisationProblem:
        """The same problem, with all nodes after the first backward one in the backward pass: what planners take."""
        first = next((i for i, n in enumerate(self.nodes) if n.backward), len(self))
        if all(n.backward for n in self.nodes[first:]):
            return self
        late = tuple(replace(n, backward=True) for n in self.nodes[first:])
        return replace(self, nodes=self.nodes[:first] + late)

    def remembered(self, key: Any, make: Callable[[], T]) -> T:
        """The result of `make`, computed once for this problem and cached under a key."""
        known = vars(self).setdefault("_remembered", {})
        if key not in known:
            known[key] = make()
        return known[key]

    @property
    def cost(self) -> float:
        """Cost of the step as it is, each node once."""
        return sum(n.cost for n in self.nodes)

    # -- files ----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dictionaries; docs/planning.md describes them."""
        return {
            "format": FORMAT,
            "name": self.name,
            "fixed": self.fixed,
            "values": [{"name": n, "bytes": b} for n, b in zip(self.values, self.sizes, strict=True)],
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "shared": list(self.shared),
            "nodes": [_node_to_dict(n) for n in self.nodes],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the problem as JSON."""
        with replacing(Path(path)) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), separators=(",", ":")) + "\n")


def _node_to_dict(n: Node) -> dict[str, Any]:
    found: dict[str, Any] = {"name": n.name, "cost": n.cost, "reads": list(n.reads), "writes": list(n.writes)}
    if n.scratch:
        found["scratch"] = n.scratch
    if n.backward:
        found["backward"] = True
    if n.repeatable == n.backward:
        found["repeatable"] = n.repeatable
    if n.overwrites:
        found["overwrites"] = list(n.overwrites)
    if n.loop:
        found["loop"] = True
    if n.remade:
        found["remade"] = list(n.remade)
    return found


def load_problem(path: str | os.PathLike[str]) -> RematerialisationProblem:
    """Reads what `save` wrote.  UsageError for anything else, with the field that is wrong."""
    data = read_json(path)
    if data.get("format") != FORMAT:
        raise UsageError(f"{path} is no problem of format '{FORMAT}' (its 'format' is {data.get('format')!r})")
    return problem_from_dict(data, str(path))


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A JSON object from a file.  UsageError where it cannot be read, or is no object."""
    try:
        if os.path.getsize(regular(path)) > _LARGEST_FILE:
            raise UsageError(f"{path} is larger than {_LARGEST_FILE >> 30} GiB: this is no problem or plan of ours")
        data = json.loads(Path(path).read_text())
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{path} is not JSON: {e}") from None
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds a {type(data).__name__}, not a JSON object")
    return data


def problem_from_dict(data: dict[str, Any], where: str = "the problem") -> RematerialisationProblem:
    """The opposite of `RematerialisationProblem.to_dict`.  UsageError with the field that is missing or wrong."""
    values = [_object(v, f"{where}: values[{i}]") for i, v in enumerate(_take(data, "values", list, where))]
    nodes = [_node(n, i, f"{where}: nodes[{i}]") for i, n in enumerate(_take(data, "nodes", list, where))]
    return RematerialisationProblem(
        nodes=tuple(nodes),
        sizes=tuple(_take(v, "bytes", int, f"{where}: values[{i}]") for i, v in enumerate(values)),
        values=tuple(str(_take(v, "name", str, f"{where}: values[{i}]")) for i, v in enumerate(values)),
        inputs=_numbers(data, "inputs", where, ()),
        outputs=_numbers(data, "outputs", where, ()),
        fixed=_take(data, "fixed", int, where, 0),
        name=_take(data, "name", str, where, "problem"),
        shared=_numbers(data, "shared", where, ()),
    )


def _node(found: Any, i: int, where: str) -> Node:
    n = _object(found, where)
    backward = _take(n, "backward", bool, where, False)
    try:
        cost = float(_take(n, "cost", float, where))
    except OverflowError:
        raise UsageError(f"{where}: the field 'cost' is too large") from None
    return Node(
        name=_take(n, "name", str, where, f"node_{i}"),
        cost=cost,
        reads=_numbers(n, "reads", where),
        writes=_numbers(n, "writes", where),
        scratch=_take(n, "scratch", int, where, 0),
        backward=backward,
        repeatable=_take(n, "repeatable", bool, where, not backward),
        overwrites=_numbers(n, "overwrites", where, ()),
        loop=_take(n, "loop", bool, where, False),
        remade=_numbers(n, "remade", where, ()),
    )


_NEEDED: Any = object()
#: all bytes together are below this: sums of them are words with a sign
_MOST_BYTES = 1 << 63
_CALLED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}


def _object(found: Any, where: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise UsageError(f"{where} is of the wrong kind: {found!r}"[:300] + " is no JSON object")
    return found


def _take(data: dict[str, Any], name: str, kind: type, where: str, otherwise: Any = _NEEDED) -> Any:
    """A field of one kind; `otherwise` where it is left out."""
    if name not in data:
        if otherwise is _NEEDED:
            raise UsageError(f"{where} lacks the field '{name}'")
        return otherwise
    value = data[name]
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        shown = json.dumps(value)[:100]
        raise UsageError(f"{where}: the field '{name}' is of the wrong kind: {shown} is not {_CALLED[kind]}")
    return value


def _numbers(data: dict[str, Any], name: str, where: str, otherwise: Any = _NEEDED) -> tuple[int, ...]:
    found = tuple(_take(data, name, list, where, otherwise))
    if not all(isinstance(x, int) and not isinstance(x, bool) for x in found):
        raise UsageError(f"{where}: the field '{name}' is of the wrong kind: whole numbers are expected")
    return found


def _check(p: RematerialisationProblem) -> None:
    """Values are written once, before they are read, and nothing is negative."""
    if len(p.sizes) != len(p.values):
        raise UsageError(f"{p.name}: {len(p.sizes)} sizes for {len(p.values)} values")
    if p.fixed < 0 or any(s < 0 for s in p.sizes):
        raise UsageError(f"{p.name}: bytes must not be negative")
    if p.fixed + sum(p.sizes) + max((n.scratch for n in p.nodes), default=0) >= _MOST_BYTES:
        raise UsageError(f"{p.name}: all values together take 2^63 bytes or more: no machine has so much")
    there = bytearray(len(p.sizes))
    for v in p.inputs:
        _in_range(p, v, "inputs")
        there[v] = 1
    for i, n in enumerate(p.nodes):
        if not 0 <= n.cost < float("inf") or n.scratch < 0:
            raise UsageError(f"{p.name}: node {i} ('{n.name}') has cost {n.cost} and {n.scratch} bytes of scratch")
        for v in n.reads:
            _in_range(p, v, f"node {i} ('{n.name}')")
            if not there[v]:
                raise UsageError(f"{p.name}: node {i} ('{n.name}') reads '{p.values[v]}' before it is written")
        if not {*n.overwrites, *n.remade} <= set(n.reads):
            raise UsageError(f"{p.name}: node {i} ('{n.name}') overwrites or recomputes a value that it does not read")
        for v in n.writes:
            _in_range(p, v, f"node {i} ('{n.name}')")
            if there[v]:
                raise UsageError(f"{p.name}: node {i} ('{n.name}') writes '{p.values[v]}' a second time")
            there[v] = 1
    for v in (*p.outputs, *p.shared):
        _in_range(p, v, "outputs and shared values")
        if not there[v]:
            raise UsageError(f"{p.name}: '{p.values[v]}' is never written")


def _in_range(p: RematerialisationProblem, v: int, where: str) -> None:
    if not 0 <= v < len(p.sizes):
        raise UsageError(f"{p.name}: {where} names value {v}, but there are {len(p.sizes)}")


def checked_sequence(p: RematerialisationProblem, sequence: Sequence[int]) -> None:
    """UsageError where a sequence of node numbers is no execution: each node once in order, reruns only of what may."""
    done = 0
    for i in sequence:
        if i == done:
            done += 1
        elif not 0 <= i < done or not p.nodes[i].repeatable:
            raise UsageError(f"{p.name}: node {i} cannot run after node {done - 1}")
    if done != len(p):
        raise UsageError(f"{p.name}: node {done} never runs")
