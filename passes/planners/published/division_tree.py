"""The division tree of a graph (Feng & Huang 2021, Optimal Gradient Checkpoint Search, arXiv 1808.00079, section 4).

A piece of the graph has a source and a target that all paths through it start and end in.  It divides, where it can,
at its splitting vertices, which lie on all those paths (a linear piece); else into branches, which have but source
and target in common; else into closed sets, whose inner vertices have edges only among themselves and to two vertices
of the piece.  Kept vertices are what memory is spent on, so that vertices weigh and edges do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass
class Piece:
    """A part of the graph between two vertices, and how it divides.

    `inside`: its vertices but source and target, in order.  `ends`: those of them that are ends of its children; of a
    linear piece they follow each other, and child k lies between `ends[k - 1]` and `ends[k]`.  `weight`: of all that
    is inside.
    """

    source: int
    target: int
    inside: list[int]
    kind: str = "edge"
    ends: list[int] = field(default_factory=list)
    children: list[Piece] = field(default_factory=list)
    weight: float = 0.0


@dataclass(frozen=True)
class Graph:
    """A directed graph whose vertices 0..n-1 are in topological order; vertex 0 is the only source, n-1 the only
    target.  `succs`, `preds` in order."""

    succs: tuple[tuple[int, ...], ...]
    preds: tuple[tuple[int, ...], ...]
    weight: tuple[float, ...]

    @classmethod
    def of(cls, preds: Sequence[Sequence[int]], weight: Sequence[float]) -> Graph:
        """From vertices in topological order; a source and a target that weigh nothing are put around them."""
        n = len(preds)
        before: list[tuple[int, ...]] = [()]
        succs: list[list[int]] = [[] for _ in range(n + 2)]
        for ps in preds:
            before.append(tuple(sorted(p + 1 for p in set(ps))) or (0,))
        before.append(tuple(k + 1 for k in sorted(set(range(n)).difference(*preds))) or (0,))
        for k, ps in enumerate(before):
            for p in ps:
                succs[p].append(k)
        return cls(tuple(map(tuple, succs)), tuple(before), (0.0, *map(float, weight), 0.0))

    def whole(self) -> Piece:
        """All of it as a piece."""
        return Piece(0, len(self.weight) - 1, list(range(1, len(self.weight) - 1)))


def division_tree(graph: Graph) -> Piece:
    """The root of the tree; each piece is divided as far as it can be."""
    root = graph.whole()
    stack = [root]
    while stack:
        piece = stack.pop()
        piece.weight = sum([graph.weight[v] for v in piece.inside])
        if piece.inside:
            _divide(graph, piece)
            stack += piece.children
    return root


def _divide(graph: Graph, piece: Piece) -> None:
    """Finds a piece's kind, ends and children.  An edge from source to target holds nothing and is left out."""
    splitting = splitting_vertices(graph, piece)
    if splitting:
        piece.kind, piece.ends = "linear", splitting
        marks = [piece.source, *splitting, piece.target]
        at = 0
        for a, b in pairwise(marks):
            end = at
            while end < len(piece.inside) and piece.inside[end] != b:
                end += 1
            piece.children.append(Piece(a, b, piece.inside[at:end]))
            at = end + 1
        return
    parts = components(graph, piece.inside)
    if len(parts) > 1:
        piece.kind = "branch"
        piece.children = [Piece(piece.source, piece.target, part) for part in parts]
        return
    piece.kind = "closed"
    piece.children = closed_sets(graph, piece)
    hidden = {v for child in piece.children for v in child.inside}
    piece.ends = [v for v in piece.inside if v not in hidden]


def splitting_vertices(graph: Graph, piece: Piece) -> list[int]:
    """Vertices inside on all paths from source to target: those that no edge passes by in topological order."""
    place = {v: k for k, v in enumerate(piece.inside)}
    last = len(piece.inside)
    reach = max((place[s] for s in graph.succs[piece.source] if s in place), default=-1)
    found = []
    for k, v in enumerate(piece.inside):
        if reach <= k:
            found.append(v)
        reach = max([reach, *[last if s == piece.target else place[s] for s in graph.succs[v]]])
    return found


def components(graph: Graph, inside: Sequence[int]) -> list[list[int]]:
    """Vertices that are connected with each other, whatever way edges point."""
    left = set(inside)
    found = []
    for start in inside:
        if start in left:
            left.discard(start)
            part, stack = [start], [start]
            while stack:
                v = stack.pop()
                for u in (*graph.succs[v], *graph.preds[v]):
                    if u in left:
                        left.discard(u)
                        part.append(u)
                        stack.append(u)
            found.append(sorted(part))
    return found


# -- closed sets -------------------------------------------------------------------------------------------------------


def closed_sets(graph: Graph, piece: Piece) -> list[Piece]:
    """The largest closed sets inside a piece that is neither linear nor branched, disjoint, those with most vertices
    first to be taken.

    All paths to a vertex of a closed set between i and j pass i, and all paths on from it pass j.  So i is among its
    dominators and j among those of the graph turned round; for each vertex the pairs are tried from the outermost on.
    """
    to = _dominators(piece.inside, piece.source, graph.preds)
    on = _dominators(piece.inside[::-1], piece.target, graph.succs)
    found: list[tuple[int, int, list[int]]] = []
    covered: set[int] = set()
    for v in piece.inside:
        if v not in covered:
            best = _largest_closed(graph, piece, v, (to, on))
            if best is not None:
                found.append(best)
                covered.update(best[2])
    found.sort(key=lambda x: (-len(x[2]), x[0], x[1]))
    taken: set[int] = set()
    ends: set[int] = set()
    children = []
    for i, j, part in found:
        if taken.isdisjoint((i, j, *part)) and ends.isdisjoint(part):
            taken.update(part)
            ends.update((i, j))
            children.append(Piece(i, j, part))
    return _joined(sorted(children, key=lambda c: (c.source, c.target, c.inside)))


def _joined(children: list[Piece]) -> list[Piece]:
    """Closed sets with the same ends are one."""
    found: dict[tuple[int, int], Piece] = {}
    for c in children:
        if (c.source, c.target) in found:
            first = found[c.source, c.target]
            first.inside = sorted(first.inside + c.inside)
        else:
            found[c.source, c.target] = c
    return list(found.values())


def _dominators(order: Sequence[int], start: int, preds: Sequence[Sequence[int]]) -> dict[int, int]:
    """Each vertex's immediate dominator (Cooper, Harvey & Kennedy 2001; one pass is enough without cycles)."""
    place = {start: -1} | {v: k for k, v in enumerate(order)}
    found: dict[int, int] = {}
    for v in order:
        d = -2
        for p in preds[v]:
            d = p if d == -2 else d
            while d != p:
                if place[d] > place[p]:
                    d = found[d]
                else:
                    p = found[p]
        found[v] = d
    return found


def _chain(dominators: dict[int, int], v: int, end: int) -> list[int]:
    found = []
    while v != end:
        v = dominators[v]
        found.append(v)
    return found[::-1]


#: dominators on each side that are tried for one vertex, the nearest ones
_NEAREST = 24


def _largest_closed(
    graph: Graph, piece: Piece, v: int, dominators: tuple[dict[int, int], dict[int, int]]
) -> tuple[int, int, list[int]] | None:
    """The outermost closed set around a vertex: its ends and what is inside."""
    befores = _chain(dominators[0], v, piece.source)[-_NEAREST:]
    behinds = _chain(dominators[1], v, piece.target)[-_NEAREST:]
    for _, a, b in sorted((a + b, a, b) for a in range(len(befores)) for b in range(len(behinds))):
        i, j = befores[a], behinds[b]
        part = None if (i, j) == (piece.source, piece.target) else _between(graph, v, i, j)
        if part is not None:
            return i, j, part
    return None


def _between(graph: Graph, v: int, i: int, j: int) -> list[int] | None:
    """The component of v without i and j; None if it reaches before i or behind j."""
    seen = {i, j, v}
    stack, part = [v], [v]
    while stack:
        u = stack.pop()
        for w in (*graph.succs[u], *graph.preds[u]):
            if w in seen:
                continue
            if not i < w < j:  # numbers are topological: no vertex between i and j lies outside them
                return None
            seen.add(w)
            part.append(w)
            stack.append(w)
    return sorted(part)
