"""Regions of a step that are worth running in slices, found along the first axis that their values have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...errors import UsageError
from ...language.axes import Cut, Followed, advance, of_operator
from ...language.builder import Builder
from ...language.factors import Place
from ...language.ir import Block, Operator, Value
from ...language.op import Op
from .open_means import open_means
from .pieces import Pieces, bounds
from .region import FORWARD, Graph, Region, contiguous, given_places, grown, hidden, possible
from .slicing import Slicing, region_of, sliced_groups

#: a region must hide this many bytes, for each byte of its inputs and outputs, to be worth it
_WORTH = 0.5


@dataclass(frozen=True)
class Found:
    """A region that can run in slices: `operators` along an index of `size` values.

    `hidden_bytes`: those of the values inside it that need not exist whole; `waiting_bytes`: of these, what the
    backward pass reads, which is alive between the passes.
    """

    slicing: Slicing
    size: int
    hidden_bytes: int
    waiting_bytes: int
    operators: tuple[Operator, ...]
    graph: Graph = field(repr=False, compare=False)
    region: Region = field(repr=False, compare=False)

    @property
    def possible(self) -> bool:
        """Whether it can be carried out, its backward pass included."""
        if not possible(self.graph, self.region):
            return False
        try:  # its last operator may share the index by an input alone, which the first one does not read
            region_of(self.graph, self.slicing)
        except UsageError:
            return False
        return True

    def extra_seconds(self, pieces: int, seconds: Callable[[Operator], float]) -> float:
        """Extra seconds of `pieces` slices of both passes (`seconds`: of one operator).

        All slices but the first are taken to be like the second.  0 where they would take less, as they do that read
        no more than a part of a table.
        """
        graph, b = self.graph, Builder.on(self.graph.block)
        parts = bounds(self.size, pieces)

        def sliced(p: Pieces) -> float:
            mark, times = len(b.operators), []
            for start, size in parts[:2]:
                begun = len(b.operators)
                p.slice(start, size)
                times.append(sum(map(seconds, b.operators[begun:])))
            ended = len(b.operators) - mark
            joins = sum(map(seconds, p.finished(mark)[ended:]))  # of the parts that there are
            return times[0] + (len(parts) - 1) * times[1] + joins * len(parts) / 2

        groups = sliced_groups(graph, b, self.region, pieces, sliced, str(self.slicing))
        whole = sum(seconds(graph.operators[i]) for r, _ in groups for i in r.members)
        return max(0.0, sum(s for _, s in groups) - whole)

    @cached_property
    def kind(self) -> Hashable:
        """A key, equal for regions of like operators (but for seeds) along one axis, alike in what reads what."""
        number = {v.name: n for n, v in enumerate(v for o in self.operators for v in o.writes())}
        ops = [_seedless(o.op) for o in self.operators]
        return (
            self.size,
            self.slicing.axis,
            tuple(
                (op, o.role, o.types, tuple(v and number.get(v.name) for v in o.inputs))
                for op, o in zip(ops, self.operators, strict=True)
            ),
        )


def _seedless(op: Op) -> Op:
    return dataclasses.replace(op, seed=0) if op.random and hasattr(op, "seed") else op  # type: ignore[call-arg]


def found_regions(block: Block, wide: bool) -> list[Found]:
    """Regions of the forward pass of a step, in order of execution, none of which overlaps another.

    `wide`: as many operators as share the index; otherwise only those from a value that is larger than what it is
    made from to one that is smaller again, as the hidden layer of a transformer's block is.
    """
    return [f for f in region_candidates(block, wide) if f.possible]


def region_candidates(block: Block, wide: bool) -> list[Found]:
    """`found_regions` of which some may not be `possible`: to ask takes longer than to find them."""
    graph = Graph(open_means(block))  # as the pass does
    positions = list(graph.forward)
    place = {i: n for n, i in enumerate(positions)}
    found: list[Found] = []
    at = 0
    while at < len(positions):
        run = _run(graph, positions, at)
        region = None if run is None else _trimmed(graph, run)
        if run is None or region is None:
            at += 1
            continue
        for part in [region] if wide else list(_hidden_layers(graph, region)):
            if (one := _described(graph, part)) is not None:
                found.append(one)
        at = place[run.members[-1]] + 1
    return found


def _run(graph: Graph, positions: Sequence[int], at: int) -> Region | None:
    """The operators from place `at` among `positions` to the one that needs the index whole."""
    start = _start(graph, graph.operators[positions[at]])
    if start is None:
        return None
    starts, size = start
    found = Followed({n: Cut(p, size) for n, p in starts.items()}, {}, {}, {})
    end = at
    for n in range(at, len(positions)):
        i = positions[n]
        o = graph.operators[i]
        advance(found, i, o)
        if o.op.updates or any((i, k) in found.needs for k in range(len(o.inputs))):
            break
        end = n + 1
    if end < at + 2:
        return None
    region = grown(graph, positions[at:end], starts, size)
    return region if len(region.members) > 1 else None


def _start(graph: Graph, o: Operator) -> tuple[dict[str, Place], int] | None:
    """The index that is the first axis of an operator's result, and where its inputs have it: contiguous in all."""
    made = o.outputs[0] if o.outputs else None
    if made is None or o.op.updates:
        return None
    axis = next((a for a, d in enumerate(made.shape) if d > 1), -1)
    for f in of_operator(o) if axis >= 0 else ():
        given = given_places(graph, o, f)
        apart = any(not contiguous(graph.values[n], p) for n, p in given.items())
        if f.outputs[0] == Place(axis) and not f.whole and given and not apart:
            return given, f.size
    return None


def _trimmed(graph: Graph, region: Region) -> Region | None:
    """The region without operators at its end whose results could not be written in place: views, and transposes."""
    while len(region.members) > 1:
        members = set(region.members)
        bad = {i for i in members if any(_apart(graph, region, members, i, v) for v in graph.operators[i].writes())}
        if not bad:
            return region
        starts = {
            n: s.place for n, s in region.states.items() if isinstance(s, Cut) and n not in region.written(graph.block)
        }
        region = grown(graph, [i for i in region.members if i not in bad], starts, region.size)
    return None


def _apart(graph: Graph, region: Region, members: set[int], i: int, v: Value) -> bool:
    """Whether a result is needed whole by the forward pass, but its slices cannot be written in place."""
    outside = any(j not in members and graph.operators[j].role in FORWARD for j in graph.consumers.get(v.name, ()))
    state = region.states.get(v.name)
    if not outside or not isinstance(state, Cut):
        return False
    return not contiguous(v, state.place) or any(o is not None for o in graph.operators[i].views())


def _hidden_layers(graph: Graph, region: Region) -> Iterator[Region]:
    """The parts of a region from an operator whose result is larger than its inputs to one whose result is smaller."""
    starts = {n: s.place for n, s in region.states.items() if isinstance(s, Cut)}
    first: int | None = None
    for n, i in enumerate(region.members):
        o = graph.operators[i]
        cut = [v.nbytes for v in o.reads() if v.name in region.states and v.name not in graph.persistent]
        made = sum(v.nbytes for v in o.writes() if isinstance(region.states.get(v.name), Cut))
        largest = max(cut, default=0)
        if first is None and made > 1.5 * largest > 0:
            first = n
        elif first is not None and largest > 0 and made < 0.75 * largest and largest * 2 > _bytes(graph, region, first):
            part = region.members[first : n + 1]
            own = {v.name for j in part for v in graph.operators[j].writes()}
            given = {v.name for j in part for v in graph.operators[j].reads()} - own
            outer = {m: p for m, p in starts.items() if m in given and m not in graph.persistent}
            smaller = _trimmed(graph, grown(graph, part, outer, region.size))
            if smaller is not None:
                yield smaller
            first = None


def _bytes(graph: Graph, region: Region, n: int) -> int:
    """The bytes that a member makes."""
    return sum(v.nbytes for v in graph.operators[region.members[n]].writes())


def _described(graph: Graph, region: Region) -> Found | None:
    """The region as a slicing of two slices, if it hides enough."""
    own = hidden(graph, region)
    values = region.written(graph.block)
    inside = sum(values[n].nbytes for n in own if not _is_view(graph, n))
    waiting = sum(values[n].nbytes for n in _waiting(graph, region, own) if not _is_view(graph, n))
    members = set(region.members)
    given = {v.name: v for i in members for v in graph.operators[i].reads() if v.name in region.states}
    border = sum(v.nbytes for n, v in given.items() if n not in values)
    border += sum(v.nbytes for n, v in values.items() if n not in own and isinstance(region.states.get(n), Cut))
    if inside < _WORTH * border:
        return None
    first = next(graph.operators[region.members[0]].writes())
    last = next(graph.operators[region.members[-1]].writes())
    state = region.states.get(first.name)
    if not isinstance(state, Cut):
        return None
    slicing = Slicing(first.name, last.name, state.place.axis, 2)
    operators = tuple(graph.operators[i] for i in region.members)
    return Found(slicing, region.size, inside, waiting, operators, graph, region)


def _waiting(graph: Graph, region: Region, names: Collection[str]) -> set[str]:
    """The values of `names` that the backward pass reads, as they are or through views."""
    found: set[str] = set()
    for i in reversed(region.members):
        o = graph.operators[i]
        for n in (v.name for v in o.writes() if v.name in names):
            if n in found or any(graph.operators[k].role not in FORWARD for k in graph.consumers.get(n, ())):
                found.add(n)
                if _is_view(graph, n) and o.inputs[0] is not None and o.inputs[0].name in names:
                    found.add(o.inputs[0].name)
    return found


def _is_view(graph: Graph, name: str) -> bool:
    return any(o is not None for o in graph.operators[graph.producers[name]].views())
