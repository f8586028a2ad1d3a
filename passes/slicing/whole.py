"""The whole step in slices of the batch: micro-batches, each with its recomputation, whose gradients are added up.

Recomputation comes first and slices second.  A plan, or checkpoints, say what the step before slicing recomputes; the
recomputed step then runs slice by slice, so that each micro-batch recomputes alike.  What all slices share, such as
weights cast to a lower precision, is computed once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ...language.axes import Cut, Partial
from ...language.builder import Builder
from ...language.factors import OWN
from ...language.ir import Block, Operator, Role, Value
from ..cleanup.eager_updates import EagerUpdates
from .pieces import Pieces, bounds, sum_type
from .region import Graph, Region, around, grown


def whole_backward(graph: Graph, forward: Region) -> Region | None:
    """All operators of the backward pass that run in slices with those of a forward pass; None if there are none.

    Recomputed operators are among them, and what the forward pass computes of their results, such as running
    statistics that are updated late.
    """
    starts = {n: s.place for n, s in forward.states.items() if isinstance(s, Cut)}
    again = {*graph.backward, *graph.repeated, *_of_repeated(graph)}
    region = grown(graph, sorted(again), starts, forward.size)
    return region if region.members else None


def _of_repeated(graph: Graph) -> list[int]:
    """The operators of the forward pass that need results of recomputed ones."""
    names = {v.name for i in graph.repeated for v in graph.operators[i].writes()}
    operators = []
    for i in graph.forward:
        if any(v.name in names for v in graph.operators[i].reads()):
            operators.append(i)
            names.update(v.name for v in graph.operators[i].writes())
    return operators


def reads_sums(graph: Graph, region: Region) -> bool:
    """Whether a slice reads a value whole of which slices have only partial results."""
    names = {n for n in region.written(graph.block) if isinstance(s := region.states.get(n), Partial) and s.how != OWN}
    for i in region.members:
        o, f = graph.operators[i], region.factors[i]
        partial = [v for v in o.reads() if v.name in names]
        linear = f.size == 1 and not any(f.inputs)  # a cast of a partial result
        if partial and not linear:
            return True
    return False


def shared_once(graph: Graph, region: Region) -> Block:
    """The block without recomputation of what is the same in every slice: it is computed once, and read by all."""
    members = set(region.members)
    first: dict[object, Operator] = {}
    names: dict[str, Value] = {}
    kept: list[Operator] = []
    for i, o in enumerate(graph.operators):
        o = o.reading(names)
        key = (o.op, o.inputs)
        same = first[key].outputs if o.role is Role.RECOMPUTE and i not in members and key in first else ()
        pairs = [(v, w) for v, w in zip(o.outputs, same, strict=False) if v is not None]
        if pairs and len(pairs) == len(list(o.writes())) and all(w is not None for _, w in pairs):
            names.update((v.name, w) for v, w in pairs if w is not None)
            continue
        if not o.op.updates:
            first.setdefault(key, o)
        kept.append(o)
    return graph.block if len(kept) == len(graph.operators) else graph.block.with_operators(kept)


@dataclass(frozen=True)
class MicroBatch:
    """A step with one slice in place of all, for planners: sums exist before it, and until all slices are done.

    `step`: the step before slicing; `origins`: for each operator of `block`, the one there that it stands for;
    `members`: those of which each slice has its own, and which a plan may therefore recompute; `pieces`: how often they
    run.  `there`: the values of `block` that the slices before it have left.
    """

    step: Block
    block: Block
    origins: tuple[int, ...]
    members: tuple[int, ...]
    pieces: int
    there: frozenset[str]


def micro_batch(graph: Graph, region: Region, wanted: set[str], pieces: int, mine: int) -> MicroBatch:
    """The step with one slice of a region that holds the forward and the backward pass; `mine`: slices run here."""
    block, b = graph.block, Builder.on(graph.block)
    one = _OneSlice(block, b, region, wanted, alone=mine == 1)
    size = bounds(region.size, pieces)[0][1]
    inside = one.only(size)
    before, after, _ = around(block, set(region.members))
    low, high = region.members[0], region.members[-1]
    first, last = [*range(low), *before], [*after, *range(high + 1, len(block.operators))]
    shared = [
        dataclasses.replace(block.operators[i], role=Role.FORWARD) for i in first
    ]  # the backward pass comes later
    operators = [*shared, *inside, *(block.operators[i] for i in last)]
    origins = [*first, *one.origins, *([last[0] if last else high] * (len(inside) - len(one.origins))), *last]
    result = block.with_operators(operators, constants=(*block.constants, *b.constants))
    if mine <= 2:  # sums of the second slice are used up as soon as they are there
        number = {id(o): i for o, i in zip(operators, origins, strict=True)}
        result = EagerUpdates().run(result)
        origins = [number[id(o)] for o in result.operators]
    times = min(mine, len(bounds(region.size, pieces)))
    return MicroBatch(block, result, tuple(origins), region.members, times, frozenset(one.there))


class _OneSlice(Pieces):
    """Emits one slice after those before it: their sums, and their parts of joined values, are there.

    `origins`: for each operator, the one in whose place it stands; `alone`: there are no sums of others.
    """

    def __init__(
        self, block: Block, builder: Builder, region: Region, wanted: set[str], *, alone: bool = False
    ) -> None:
        super().__init__(block, builder, region, wanted)
        self.alone = alone
        self.origins: list[int] = []
        self.there: list[str] = []
        self.mark = len(builder.operators)

    def emitted(self, i: int) -> None:
        """All operators since the last call stand for operator `i`."""
        self.origins += [i] * (len(self.b.operators) - self.mark - len(self.origins))

    def only(self, size: int) -> list[Operator]:
        """The operators of one slice: the results of the slices before it, the slice, and the joins."""
        self.b.role = Role.FORWARD
        for name, v in self.region.written(self.block).items():
            state = self.states.get(name)
            if name in self.wanted and isinstance(state, Partial):
                if self.alone:
                    continue
                wide = dataclasses.replace(v.type, dtype=sum_type(v, state))
                self.totals[name] = self.filled(dataclasses.replace(v, type=wide))
            elif name in self.wanted and isinstance(state, Cut):
                rest = state.place.resized(v.type, self.region.size - size)
                self.parts[name] = [self.filled(dataclasses.replace(v, type=rest))]
        self.emitted(self.region.members[0])
        self.slice(0, size)
        return self.finished(self.mark)

    def filled(self, v: Value) -> Value:
        """A value of the same size, that is there."""
        value: Value = self.b.Expand(self.b.constant(0, v), shape=v.shape)
        self.there.append(value.name)
        return value
