"""Regions: operators that share an index and can run in slices along it, found from some of their values."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...language.axes import Cut, Followed, Partial, State, advance
from ...language.factors import OWN, SUM, Factor, Place
from ...language.ir import Block, Operator, Role, Value
from ...ops.linear.products import Gemm, MatMul
from ...ops.shape.reshape import Cast
from .micro import with_own_statistics

FORWARD = (Role.FORWARD, Role.LOSS)


@dataclass(frozen=True)
class Region:
    """Operators of a block (`members`, by position, in order) that run in slices along an index of `size` values.

    `factors`: the index in each of them.  `states`: the values that they write, and the whole values that are read in
    slices, as each slice has them.
    """

    members: tuple[int, ...]
    factors: Mapping[int, Factor]
    states: Mapping[str, State]
    size: int

    def written(self, block: Block) -> dict[str, Value]:
        """The values that its operators write."""
        return {v.name: v for i in self.members for v in block.operators[i].writes()}


class Graph:
    """A block and what is asked of it again and again.

    `own`: whether slices are micro-batches, each with batch statistics of its own.  `always`: whether an operator runs
    in slices also where its partial results take more bytes than what they are made from.
    """

    def __init__(self, block: Block, *, own: bool = False, always: bool = False) -> None:
        self.block, self.operators, self.own, self.always = block, block.operators, own, always
        self.values = block.values()
        self.producers, self.consumers = block.producers(), block.consumers()
        self.persistent = {v.name for v in block.persistent()}
        self.forward = {i: None for i, o in enumerate(self.operators) if o.role in FORWARD}  # in order
        self.backward = [i for i, o in enumerate(self.operators) if o.role is Role.BACKWARD]
        self.repeated = [i for i, o in enumerate(self.operators) if o.role is Role.RECOMPUTE]
        self.trained = {v.name for v in (*block.parameters, *block.buffers)}
        self.outputs = set(block.outputs)
        if not any(o.role is Role.OPTIMIZE for o in block.operators):  # gradients wait for their updates
            backward = (o for o in block.operators if o.role is Role.BACKWARD)
            self.outputs.update(v.name for o in backward for v in o.writes() if v.name not in self.consumers)

    def read_outside(self, name: str, members: Any, *, outputs: bool = True) -> bool:
        """Whether something other than these operators needs a value; `outputs`: the block's outputs count."""
        return (outputs and name in self.outputs) or any(i not in members for i in self.consumers.get(name, ()))


def grown(
    graph: Graph, positions: Sequence[int], starts: Mapping[str, Place], size: int, *, share: float = 0.01
) -> Region:
    """The operators among `positions` (in order) that run in slices where the values of `starts` are cut.

    Whole values that they read in slices, such as the gradient that comes from outside, are cut as well, wherever they
    are read.  An operator that needs all of a cut value is no member: it reads the joined value.  Nor is what is
    computed from inputs alone and summed up, such as how many labels count: later members may need the sum.  That is
    if it makes no more than a `share` of the bytes that the region makes.
    """
    region = _grown(graph, positions, starts, size)
    counts = _counts(graph, region, share)
    if not counts:
        return region
    rest = [i for i in positions if i not in counts]
    # What the sums are made from is whole then; others read it in slices still, and theirs may be larger, as labels
    # compared with all words.
    read = {v.name for i in rest for v in graph.operators[i].reads()}
    names = [v.name for i in sorted(counts) for v in graph.operators[i].writes() if v.name in read]
    places = {n: s.place for n in names if isinstance(s := region.states.get(n), Cut)}
    return _grown(graph, rest, {**starts, **places}, size)


def _grown(graph: Graph, positions: Sequence[int], starts: Mapping[str, Place], size: int) -> Region:
    """`grown`, sums of inputs included."""
    cut = {n: Cut(p, size) for n, p in starts.items()}
    names = {v.name for i in positions for v in graph.operators[i].writes()}
    while True:
        state = Followed(dict(cut), {}, {}, {})
        members: list[int] = []
        more: dict[str, Cut] = {}
        for i in positions:
            o = graph.operators[i]
            advance(state, i, o)
            if not (graph.own and with_own_statistics(state, i, o)) and not _in_slices(state, i, o, graph.always):
                _forget(state, i, o)
                continue
            members.append(i)
            for k, v in enumerate(o.inputs):
                c = state.cuts.get((i, k))
                if c is not None and v is not None and not (v.name in graph.persistent or v.name in names):
                    more.setdefault(v.name, c)
        if not more.keys() - cut.keys():
            return Region(tuple(members), state.factors, state.states, size)
        cut = more | cut


def _counts(graph: Graph, region: Region, share: float) -> set[int]:
    """Members that only serve a sum, or another partial result, of what is computed from inputs alone; small ones."""
    makers: dict[str, int] = {}  # values computed from inputs alone → the member that makes them
    counts: set[int] = set()
    limit = _made_bytes(graph, region.members) * share
    for i in region.members:
        o = graph.operators[i]
        if not all(v.name in makers or not (v.name in graph.trained or v.name in graph.producers) for v in o.reads()):
            continue
        makers.update((v.name, i) for v in o.writes())
        if all(isinstance(s := region.states.get(v.name), Partial) and s.how != OWN for v in o.writes()):
            members = _makers(graph, i, makers)
            if _made_bytes(graph, members) <= limit:
                counts |= members
    return counts


def _makers(graph: Graph, position: int, given: Mapping[str, int]) -> set[int]:
    """The operators that make what an operator needs, as far as `given` names them; itself included."""
    seen = {position}
    stack = [position]
    while stack:
        for v in graph.operators[stack.pop()].reads():
            at = given.get(v.name)
            if at is not None and at not in seen:
                seen.add(at)
                stack.append(at)
    return seen


def _in_slices(state: Followed, i: int, o: Operator, always: bool) -> bool:
    """Whether an operator runs in slices: it has the index, needs nothing whole, changes no state, and saves bytes."""
    if _widens(state, o):  # so that partial gradients in 16-bit floats are added up in float32
        state.needs.pop((i, 0), None)
        state.factors[i] = Factor(1, (None,), (SUM,))
        state.states[next(o.writes()).name] = Partial(SUM)
        return True
    if always and i not in state.factors and _shrinks_sums(state, o):
        state.factors[i] = Factor(1, (None,) * len(o.inputs), (SUM,) * len(o.outputs))
        return True
    f = state.factors.get(i)
    if f is None or o.op.updates or any((i, k) in state.needs for k in range(len(o.inputs))):
        return False
    if any(v is not None and p is None for v, p in zip(o.outputs, f.outputs, strict=False)):
        return False
    partial = sum(v.nbytes for v, p in zip(o.outputs, f.outputs, strict=False) if v is not None and isinstance(p, str))
    if always or isinstance(o.op, (MatMul, Gemm)) or not all(isinstance(p, str) for p in f.outputs if p is not None):
        return True
    # each slice has a partial result of its own beside the sum: as the gradient of an embedding, it can be larger than
    # what it is made from
    return partial < sum(v.nbytes for v, p in zip(o.inputs, f.inputs, strict=True) if v is not None and p is not None)


def _shrinks_sums(state: Followed, o: Operator) -> bool:
    """Whether an operator is linear in sums' partial results, and its own is no larger: it is what slices add up then,
    as of a parameter that is used twice."""
    if not all(state.states.get(v.name) == Partial(SUM) for v in o.writes()):
        return False
    values = {v.name: v for v in o.reads() if v.name in state.states}
    return sum(v.nbytes for v in o.writes()) <= sum(v.nbytes for v in values.values())


def widens(o: Operator) -> bool:
    """Whether an operator casts 16-bit floats to a wider type, in which sums of them are added up."""
    if not isinstance(o.op, Cast):
        return False
    (source,), (target,) = o.reads(), o.writes()
    return source.dtype in ("f16", "bf16") and target.dtype in ("f32", "f64")


def _widens(found: Followed, o: Operator) -> bool:
    """Whether an operator casts a sum's partial result to a wider type."""
    return widens(o) and found.states.get(next(o.reads()).name) == Partial(SUM)


def _forget(state: Followed, i: int, o: Operator) -> None:
    """Takes back what is known of an operator that runs whole."""
    state.factors.pop(i, None)
    for k in range(len(o.inputs)):
        state.needs.pop((i, k), None)
        state.cuts.pop((i, k), None)
    for v in o.writes():
        state.states.pop(v.name, None)


def given_places(graph: Graph, o: Operator, f: Factor) -> dict[str, Place]:
    """Where an operator's inputs have an index; weights and other values that stay are left out."""
    return {
        v.name: p
        for v, p in zip(o.inputs, f.inputs, strict=True)
        if v is not None and p is not None and v.name not in graph.persistent
    }


def contiguous(v: Value, place: Place) -> bool:
    """Whether slices of a value along an index are parts of its bytes, one after the other."""
    return place.outer == 1 and all(d == 1 for d in v.shape[: place.axis])


def hidden(graph: Graph, forward: Region) -> set[str]:
    """The cut values of a region of the forward pass that no other operator of the forward pass reads."""
    members = set(forward.members)

    def seen(name: str) -> bool:
        readers = graph.consumers.get(name, ())
        return name in graph.outputs or any(i in graph.forward and i not in members for i in readers)

    return {n for n in forward.written(graph.block) if isinstance(forward.states.get(n), Cut) and not seen(n)}


# -- the backward pass ------------------------------------------------------------------------------------------------

#: operators before the first and after the last one that must be in a region, of which some may join it
_WINDOW = 16


def backward_of(graph: Graph, forward: Region) -> Region | None:
    """The operators of the backward pass that belong to a region of the forward pass; None if there are none.

    All that read a value from inside it, what stands between them, and operators next to them on both sides as far as
    that leaves fewer bytes to exist whole.
    """
    inside = hidden(graph, forward)
    readers = {i for n in inside for i in graph.consumers.get(n, ()) if graph.operators[i].role is Role.BACKWARD}
    if not readers:
        return None
    names = inside | {v.name for i in forward.members for v in graph.operators[i].reads()}
    backward = graph.backward
    low, high = bisect_left(backward, min(readers)), bisect_left(backward, max(readers)) + 1
    starts = {n: s.place for n in inside if isinstance(s := forward.states[n], Cut)}

    def region(low: int, high: int) -> Region:
        return grown(graph, backward[low:high], starts, forward.size)

    def cheapest(windows: Iterable[tuple[int, int]]) -> tuple[int, int]:
        return min(windows, key=lambda w: (_price(graph, region(*w)), w[1] - w[0]))

    before = _run(graph, backward[max(low - _WINDOW, 0) : low][::-1], names)
    low, high = cheapest((low - n, high) for n in range(before + 1))
    after = _run(graph, backward[high : high + _WINDOW], names)
    low, high = cheapest((low, high + n) for n in range(after + 1))
    return region(low, high)


def _run(graph: Graph, positions: Sequence[int], known: set[str]) -> int:
    """How many of these operators, from the first, read no value of the forward pass but `known` ones."""
    for n, i in enumerate(positions):
        for v in graph.operators[i].reads():
            at = graph.producers.get(v.name)
            if at is not None and graph.operators[at].role in FORWARD and v.name not in known:
                return n
    return len(positions)


def _price(graph: Graph, region: Region) -> float:
    """`_whole_bytes`; infinite for a region that cannot be carried out."""
    possible = region.members and not around(graph.block, set(region.members))[2]
    return _whole_bytes(graph, region) if possible else math.inf


def _whole_bytes(graph: Graph, region: Region) -> int:
    """Bytes of gradients that exist whole at the region's borders: those it makes, and those that only it reads."""
    members, written = set(region.members), region.written(graph.block)
    size = sum(
        v.nbytes for n, v in written.items() if isinstance(region.states.get(n), Cut) and graph.read_outside(n, members)
    )
    values = {v.name: v for i in members for v in graph.operators[i].reads() if v.name not in written}
    return size + sum(
        v.nbytes
        for n, v in values.items()
        if n in region.states
        and n in graph.producers
        and graph.operators[graph.producers[n]].role is Role.BACKWARD
        and not graph.read_outside(n, members)
    )


def possible(graph: Graph, forward: Region) -> bool:
    """Whether a region of the forward pass, and what belongs to it in the backward pass, can run in slices."""
    backward = backward_of(graph, forward)
    if backward is not None and at_once(graph, forward, backward) is not None:
        return True
    return not any(around(graph.block, set(r.members))[2] for r in (forward, backward) if r is not None and r.members)


def at_once(graph: Graph, forward: Region, backward: Region) -> Region | None:
    """Both passes of a region as one; None where the backward pass needs something of all slices first."""
    members = {*forward.members, *backward.members}
    if around(graph.block, members)[2]:
        return None
    states = {**forward.states, **backward.states}
    return Region(tuple(sorted(members)), {**forward.factors, **backward.factors}, states, forward.size)


def _made_bytes(graph: Graph, positions: Iterable[int]) -> int:
    return sum(v.nbytes for i in positions for v in graph.operators[i].writes())


def around(block: Block, members: Collection[int]) -> tuple[list[int], list[int], str]:
    """The other operators between those of a region: those that go before it, and those that go after it.

    The third is the name of a value that stands in the way, as the region needs it and it needs the region; else "".
    """
    names = {v.name for i in members for v in block.operators[i].writes()}
    read = {v.name for i in members for v in block.operators[i].reads()}
    before: list[int] = []
    after: list[int] = []
    for i in range(min(members), max(members) + 1):
        o = block.operators[i]
        if i in members:
            continue
        if not o.op.updates and not any(v.name in names for v in o.reads()):
            before.append(i)
            continue
        after.append(i)
        names.update(v.name for v in o.writes() if not o.op.updates)
        clash = next((v.name for v in o.writes() if v.name in read and not o.op.updates), "")
        if clash:
            return before, after, clash
    return before, after, ""
