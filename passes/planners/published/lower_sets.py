"""Lower sets of a problem's forward graph: enumeration, boundaries, and costs of steps between them.

The terms are those of Kusumoto et al. 2019 (arXiv 1905.11722).  A lower set has with each node all that the node
depends on; its boundary are the nodes that something outside reads.  Sets of nodes are Python integers, bit k for
`graph.nodes[k]`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ....errors import UsageError
from ..core.problem import RematerialisationProblem

#: pairs of lower sets that are worked out once and kept, at 28 bytes each
_PAIRS_KEPT = 4_000_000


@dataclass(frozen=True)
class ForwardGraph:
    """The forward nodes that the backward pass depends on, in order.

    Nodes that neither the backward pass nor another of these reads (running statistics, metrics) never run again
    and would double the number of lower sets each, so that they are left out.  `preds`, `succs`: positions in
    `nodes`.  `memory`: bytes that a node writes; `time`: its cost; `stays`: whether it may not run again.
    """

    nodes: tuple[int, ...]
    preds: tuple[tuple[int, ...], ...]
    succs: tuple[tuple[int, ...], ...]
    memory: np.ndarray
    time: np.ndarray
    stays: np.ndarray

    def __len__(self) -> int:
        return len(self.nodes)

    @cached_property
    def full(self) -> int:
        """All nodes."""
        return (1 << len(self)) - 1

    @cached_property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """From where and to where each edge goes."""
        pairs = [(p, k) for k, ps in enumerate(self.preds) for p in ps]
        found = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    @cached_property
    def total_memory(self) -> int:
        """Bytes of all nodes."""
        return int(self.memory.sum())


def forward_graph(problem: RematerialisationProblem) -> ForwardGraph:
    """The graph whose lower sets a plan is made of."""
    nodes = _needed(problem)
    at = {i: k for k, i in enumerate(nodes)}
    preds = tuple(tuple(at[p] for p in problem.preds[i]) for i in nodes)
    succs: list[list[int]] = [[] for _ in nodes]
    for k, ps in enumerate(preds):
        for p in ps:
            succs[p].append(k)
    return ForwardGraph(
        nodes=tuple(nodes),
        preds=preds,
        succs=tuple(map(tuple, succs)),
        memory=np.array([sum(problem.sizes[v] for v in problem.nodes[i].writes) for i in nodes], dtype=np.float64),
        time=np.array([problem.nodes[i].cost for i in nodes], dtype=np.float64),
        stays=np.array([not problem.nodes[i].repeatable for i in nodes], dtype=bool),
    )


def _needed(problem: RematerialisationProblem) -> list[int]:
    """Forward nodes that backward nodes read, and what those depend on."""
    needed = bytearray(len(problem))
    for i in range(len(problem) - 1, -1, -1):
        if problem.nodes[i].backward or needed[i]:
            for p in problem.preds[i]:
                needed[p] = not problem.nodes[p].backward
    return [i for i in range(len(problem)) if needed[i]]


# -- which there are ---------------------------------------------------------------------------------------------------


def all_lower_sets(graph: ForwardGraph, limit: int) -> list[int]:
    """Every lower set, the empty one and all nodes included, smaller ones first.  UsageError beyond `limit`.

    Each is reached just once: its nodes in order of execution, so that what remains of a set without its last node
    is a lower set too.
    """
    found = [0]
    sources = sum(1 << k for k, ps in enumerate(graph.preds) if not ps)
    wanted = [sum(1 << p for p in ps) for ps in graph.preds]
    stack = [(0, sources)]  # a lower set, and the nodes behind its last one that may come next
    while stack:
        base, open_nodes = stack.pop()
        while open_nodes:
            bit = open_nodes & -open_nodes
            open_nodes ^= bit
            larger = base | bit
            found.append(larger)
            if len(found) > limit:
                raise UsageError(
                    f"the forward graph has more than {limit:,} lower sets: raise the option 'limit', or use "
                    "'kusumoto', which looks only at nodes with all that they depend on"
                )
            more = open_nodes
            for s in graph.succs[bit.bit_length() - 1]:
                if wanted[s] & larger == wanted[s]:
                    more |= 1 << s
            if more:
                stack.append((larger, more))
    return sorted(found, key=lambda x: (x.bit_count(), x))


def principal_lower_sets(graph: ForwardGraph) -> list[int]:
    """The empty set, all nodes, and the sets {a node and all that it depends on}, smaller ones first."""
    closed: list[int] = []
    for k, ps in enumerate(graph.preds):
        mask = 1 << k
        for p in ps:
            mask |= closed[p]
        closed.append(mask)
    return sorted({0, graph.full, *closed}, key=lambda x: (x.bit_count(), x))


def thinned(graph: ForwardGraph, found: list[int], most: int) -> list[int]:
    """At most `most` lower sets besides the first and the last; the smaller ones come first.

    Bytes are divided into `most` equal ranges, and of the sets whose bytes lie in the same one, that with the fewest
    bytes in its boundary is taken (of equal ones the smallest).
    """
    if len(found) <= most + 2:
        return found
    held, edge = _bytes_of(graph, found)
    place = np.minimum((held * (most / max(graph.total_memory, 1))).astype(np.int64), most - 1)
    best: dict[int, int] = {}
    for k in range(1, len(found) - 1):
        b = int(place[k])
        if b not in best or edge[k] < edge[best[b]]:
            best[b] = k
    return [0, *(found[k] for k in sorted(best.values())), graph.full]


def _bytes_of(graph: ForwardGraph, sets: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of each set and of its boundary."""
    held, edge = np.zeros(len(sets)), np.zeros(len(sets))
    step = max(1, 4_000_000 // max(len(graph.edges[0]), 1))
    for start in range(0, len(sets), step):
        member = members(graph, sets[start : start + step])
        held[start : start + step] = member @ graph.memory
        for row, boundary in enumerate(boundaries(graph, member)):
            edge[start + row] = graph.memory[boundary].sum()
    return held, edge


def members(graph: ForwardGraph, sets: Sequence[int]) -> np.ndarray:
    """A row of booleans for each set."""
    size = (len(graph) + 7) // 8
    packed = np.frombuffer(b"".join(s.to_bytes(size, "little") for s in sets), dtype=np.uint8).reshape(len(sets), size)
    return np.unpackbits(packed, axis=1, count=len(graph), bitorder="little").astype(bool)


def boundaries(graph: ForwardGraph, member: np.ndarray) -> Iterator[np.ndarray]:
    """Nodes of each set that a node outside reads."""
    tail, head = graph.edges
    for row in member:
        yield np.unique(tail[row[tail] & ~row[head]])


# -- steps between them ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """All steps that end in one lower set: from which (`source`), what peak each has beyond the bytes that are
    kept before it, and how many bytes and how much time of kept nodes it adds."""

    source: np.ndarray
    peak: np.ndarray
    kept: np.ndarray
    time: np.ndarray


@dataclass(frozen=True)
class FineStep:
    """A way from lower set number `source` to another one through `inner` sets that are no states of their own."""

    source: int
    peak: float
    kept: float
    time: float
    inner: tuple[int, ...]


class Lattice:
    """Lower sets, smaller ones first, and the steps from each to those that contain it.

    With V' = L' - L, W = {v in V' that a node outside L' reads or that may not run again}, and d+ / d- for what
    reads / is read: a step keeps W and has the peak 2 M(V') + M(d+(L') - L') + M(d-(d+(L') - L') - L').

    `among`: all lower sets, where `sets` are but some of them.  Then each can be reached from the largest one within
    it also by way of those in between, so that a large graph, too, can be kept as finely as a small one.
    """

    def __init__(self, graph: ForwardGraph, sets: list[int], among: Sequence[int] = ()) -> None:
        self.graph, self.sets = graph, sets
        self.among = among if len(among) > len(sets) else ()
        self._fine: dict[int, FineStep | None] = {}
        member = members(graph, sets)
        self.memory, self.time = member @ graph.memory, member @ graph.time
        self.stay_memory = member @ np.where(graph.stays, graph.memory, 0.0)
        self.stay_time = member @ np.where(graph.stays, graph.time, 0.0)
        self.boundary = list(boundaries(graph, member))
        self.beyond = np.array([self._beyond(row) for row in member])
        self.columns = np.ascontiguousarray(member.T)
        words = -(-member.shape[1] // 64) * 8
        packed = np.zeros((len(sets), words), dtype=np.uint8)
        bits = np.packbits(member, axis=1)
        packed[:, : bits.shape[1]] = bits
        self.packed = packed.view(np.uint64)
        self._kept: dict[int, Steps] = {}
        self._pairs = 0

    def __len__(self) -> int:
        return len(self.sets)

    def _beyond(self, row: np.ndarray) -> float:
        """M(d+(L) - L) + M(d-(d+(L) - L) - L)."""
        graph = self.graph
        tail, head = graph.edges
        next_ones = np.zeros(len(graph), dtype=bool)
        next_ones[head[row[tail] & ~row[head]]] = True
        read = np.zeros(len(graph), dtype=bool)
        read[tail[next_ones[head] & ~row[tail]]] = True
        return float(graph.memory[next_ones].sum() + graph.memory[read].sum())

    def steps(self, target: int) -> Steps:
        """Steps to lower set number `target`."""
        found = self._kept.get(target)
        if found is None:
            found = self._steps(target)
            self._pairs += len(found.source)
            if self._pairs <= _PAIRS_KEPT:
                self._kept[target] = found
        return found

    def _steps(self, target: int) -> Steps:
        graph = self.graph
        outside = (self.packed[:target] & ~self.packed[target]).any(axis=1)
        source = np.flatnonzero(~outside)
        edge = self.boundary[target]
        edge = edge[~graph.stays[edge]]
        new = ~self.columns[np.ix_(edge, source)]
        return Steps(
            source=source.astype(np.int32),
            peak=2 * (self.memory[target] - self.memory[source]) + self.beyond[target],
            kept=graph.memory[edge] @ new + self.stay_memory[target] - self.stay_memory[source],
            time=graph.time[edge] @ new + self.stay_time[target] - self.stay_time[source],
        )

    def fine(self, target: int) -> FineStep | None:
        """The step to lower set number `target` through all in between; None where there are none."""
        if target not in self._fine:
            self._fine[target] = self._fine_step(target) if self.among else None
        return self._fine[target]

    def _fine_step(self, target: int) -> FineStep | None:
        last = self.sets[target]
        source = next(k for k in range(target - 1, -1, -1) if self.sets[k] & ~last == 0)
        way = [self.sets[source]]
        start = bisect_right(self.among, way[0].bit_count(), key=int.bit_count)
        for k in range(start, len(self.among)):
            s = self.among[k]
            if s.bit_count() >= last.bit_count():
                break
            if s & ~last == 0 and way[-1] & ~s == 0:
                way.append(s)
        if len(way) == 1:
            return None
        small = Lattice(self.graph, [*way, last])
        peak = kept = time = 0.0
        for k in range(1, len(small)):
            s_k = small.steps(k)
            peak = max(peak, kept + float(s_k.peak[-1]))
            kept += float(s_k.kept[-1])
            time += float(s_k.time[-1])
        return FineStep(source, peak, kept, time, tuple(way[1:]))


def kept_nodes(graph: ForwardGraph, sets: Sequence[int]) -> set[int]:
    """Positions of the nodes that a chain of lower sets keeps."""
    found = {int(k) for k in np.flatnonzero(graph.stays)}
    for start in range(0, len(sets), 256):
        for boundary in boundaries(graph, members(graph, sets[start : start + 256])):
            found.update(map(int, boundary))
    return found
