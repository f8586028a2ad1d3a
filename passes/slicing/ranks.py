"""Data parallelism: the slices of a whole step, shared among the ranks of an axis of the mesh.

A step over the global batch is cut into micro-batches, as gradient merge does (whole.py), and each rank runs its own
share of them, one after the other.  Its inputs hold the rows of this share alone.  What slices give in part, such as
gradients and the loss, is added up on the rank and then among ranks, as one fixed binary tree over all micro-batches:
so the sum has the same bits for every number of ranks.  (A tree over k micro-batches holds up to log2 k + 1 sums; where
that is too much memory, a rank adds to one running total, and the last bits depend on the number of ranks.)  What is
needed whole of values that are cut is gathered.
Dropout draws what the whole batch draws at the slice's place, and running statistics are updated with the batch
statistics of all micro-batches, in their order, on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...errors import UsageError
from ...language.axes import Cut, Partial
from ...language.builder import Builder
from ...language.factors import LOGSUMEXP, MAX, MIN, OWN, PROD, SUM, Place
from ...language.ir import Block, Operator, Role, Value
from ...ops.communication.base import Communication, communicated
from ...ops.communication.collectives import AllGather, AllReduce, ReduceScatter
from ...ops.communication.shard import Shard
from ...ops.indexing.gather import GatherGrad
from .pieces import Pieces, bounds, sum_type
from .region import Graph, Region

#: how partial results of ranks are combined that are no sums
REDUCE = {MAX: "ReduceMax", MIN: "ReduceMin", PROD: "ReduceProd", LOGSUMEXP: "ReduceLogSumExp"}
#: bytes of a table from which its gradient may be sent as rows
TABLE = 1 << 20


@dataclass(frozen=True)
class Share:
    """The part of all slices that a rank runs: the `rank`-th of `ranks` along the mesh's axis `axis`.

    `order`: how sums over ranks are added, "tree" or "library" (see ops/communication/base.py).  `running`: a rank adds
    its slices to one total, one after the other, in place of the tree; `scattered`: it does so with its shard of each
    slice's sum over ranks (ZeRO 2), so that no whole gradient outlives its slice.
    """

    axis: str
    ranks: int
    rank: int
    order: str = "tree"
    running: bool = False
    scattered: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 0 <= self.rank < self.ranks:
            raise UsageError(f"there is no rank {self.rank} among {self.ranks} ranks of axis '{self.axis}'")

    def __str__(self) -> str:
        order = f"/{self.order}" if self.order != "tree" else ""
        running = "/scattered" if self.scattered else "/running" if self.running else ""
        return f"{self.axis}={self.rank}/{self.ranks}{order}{running}"

    def bounds(self, size: int, pieces: int) -> list[tuple[int, int]]:
        """Start and size of the rank's slices.  UsageError where they are not equal for all ranks."""
        if self.ranks == 1:
            return bounds(size, pieces)
        if size % pieces or pieces % self.ranks:
            raise UsageError(
                f"a batch of {size} samples cannot be cut into {pieces} equal micro-batches, the same number for each "
                f"of {self.ranks} ranks: give a number of micro-batches that divides the batch and is a multiple of "
                "the ranks"
            )
        each = pieces // self.ranks
        return bounds(size, pieces)[self.rank * each : (self.rank + 1) * each]


class RankPieces(Pieces):
    """Emits a rank's share of the slices of a region, and the communication that makes results whole.

    `local`: the inputs of which the rank has only its own rows.
    """

    def __init__(self, graph: Graph, b: Builder, region: Region, wanted: Collection[str], share: Share) -> None:
        super().__init__(graph.block, b, region, wanted)
        self.graph, self.share = graph, share
        self.local = {v.name: v for v in self.block.inputs if isinstance(region.states.get(v.name), Cut)}
        self.start, self.size, self.scatters = 0, 0, False
        #: sums of slices that are complete so far: (height in the tree, value)
        self.heaps: dict[str, list[tuple[int, Value]]] = {}
        #: statistics of each slice, of which running ones are updated: by operator and input
        self.statistics: dict[tuple[int, int], list[Value]] = {}
        #: the results of `Shard` operators that are communicated in place of whole sums, by name
        self.shards: dict[str, Value] = {}

    def emit(self, pieces: int) -> list[Operator]:
        """The rank's slices, one after the other, then the joins and sums."""
        mark, local = len(self.b.operators), self.share.bounds(self.region.size, pieces)
        self.start, self.size = local[0][0], sum(size for _, size in local)
        self.scatters = self.share.scattered and len(local) > 1
        self.local = {n: dataclasses.replace(v, type=self.place(n).resized(v.type, self.size))
                      for n, v in self.local.items()}  # fmt: skip
        self.in_order(local)
        for name, heap in self.heaps.items():
            self.b.role, total = self.roles[name], heap[-1][1]
            for _, before in heap[-2::-1]:
                total = self.b.Add(before, total)
            self.totals[name] = total
        parts = self.finished(mark)
        return self.named(parts) if len(local) == 1 else parts

    def in_order(self, own: Sequence[tuple[int, int]]) -> None:
        """The rank's slices, one after the other."""
        for start, size in own:
            self.slice(start, size)

    def named(self, operators: list[Operator]) -> list[Operator]:
        """The operators of a rank's only slice under the names of the whole step, as far as they are free."""
        used = {v.name for o in operators for v in o.writes()}
        suffix = f"#{self.start}"
        names = {
            f"{name}{suffix}": name
            for name in self.region.written(self.block)
            if name not in used and f"{name}{suffix}" in used
        }
        return [o.renamed(names) for o in operators]

    def place(self, name: str) -> Place:
        """Where the index is in a cut value."""
        state = self.region.states[name]
        assert isinstance(state, Cut)
        return state.place

    def cut(self, v: Value, place: Place, made: dict[object, Value], start: int, size: int) -> Value:
        """The slice of a value; of an input, from the rows that the rank has."""
        local = self.local.get(v.name)
        if local is None:
            return super().cut(v, place, made, start, size)
        assert place.outer == 1
        return local if size == self.size else super().cut(local, place, made, start - self.start, size)

    def keep(self, v: Value, part: Value) -> None:
        """Sums go up the tree as far as they can, two neighbours as soon as both are there; or shards are added up."""
        state = self.states[v.name]
        reader = self.shard_of(v) if self.scatters else None
        if not isinstance(state, Partial) or state.how != SUM or (self.share.running and reader is None):
            super().keep(v, part)
            return
        part = self.b.Cast(part, to=sum_type(v, state)) if part.dtype != sum_type(v, state) else part
        if reader is not None:
            total, output = self.scattered(reader, part), next(reader.writes())
            before = self.totals.get(output.name)
            self.totals[output.name] = total if before is None else self.b.Add(before, total)
            self.shards[output.name] = output
            return
        heap, height = self.heaps.setdefault(v.name, []), 0
        while heap and heap[-1][0] == height:
            part, height = self.b.Add(heap.pop()[1], part), height + 1
        heap.append((height, part))

    def update(self, i: int, given: tuple[Value | None, ...]) -> None:
        """Remembers the statistics of a slice: they are exchanged when all slices have run."""
        for k, (v, mine) in enumerate(zip(self.block.operators[i].inputs, given, strict=True)):
            if v is not None and mine is not None and self.states.get(v.name) == Partial(OWN):
                self.statistics.setdefault((i, k), []).append(mine)

    # -- what ranks exchange ------------------------------------------------------------------------------------------

    def finished(self, mark: int) -> list[Operator]:
        """The operators since `mark`, joins, sums over ranks, and updates of running statistics.

        Cut values that are only fetched stay cut: a rank fetches its own rows.
        """
        for name, parts in self.parts.items():
            self.b.role = self.roles[name]
            fetched = not self.graph.read_outside(name, set(self.region.members), outputs=False)
            self.totals[name] = self.gathered(parts, self.place(name), own=fetched)
        self.parts = {}
        for name, v in self.region.written(self.block).items():
            if name in self.totals and isinstance(state := self.states.get(name), Partial):
                self.b.role = self.roles[name]
                self.over_ranks(v, self.totals.pop(name), state.how)
        for name, shard in self.shards.items():
            if self.totals[name].dtype != shard.dtype:
                self.b.role = Role.BACKWARD
                self.totals[name] = self.b.Cast(self.totals[name], to=shard.dtype)
        if self.statistics:
            self.update_all()
        return super().finished(mark)

    def over_ranks(self, v: Value, local: Value, how: str) -> None:
        """The result of all ranks from those of each: a sum, or the shard of one where nothing else is wanted."""
        if how != SUM:
            many = self.b.Reshape(local, shape=(1, *local.shape))
            self.totals[v.name] = getattr(self.b, REDUCE[how])(
                self.communicated(AllGather, many), axes=(0,), keepdims=0
            )
            return
        if (reader := self.shard_of(v)) is not None:
            output = next(reader.writes())
            self.totals[output.name] = self.scattered(reader, local)
            self.shards[output.name] = output
        elif (taken := self.taken_rows(local)) is not None:
            self.totals[v.name] = self.b.Reshape(self.row_sums(taken, 0, v.size), shape=v.shape)
        else:
            self.totals[v.name] = self.communicated(AllReduce, local)

    def shard_of(self, v: Value) -> Operator | None:
        """The operator that takes a rank's shard of a sum, where nothing else reads it."""
        readers = [self.block.operators[i] for i in self.graph.consumers.get(v.name, ())]
        rule = readers[0].op if len(readers) == 1 and v.name not in self.graph.outputs else None
        return readers[0] if isinstance(rule, Shard) and rule.ranks == self.share.ranks else None

    def scattered(self, reader: Operator, local: Value) -> Value:
        """This rank's shard of the sum of all ranks' values, in the type in which they are added up."""
        output, rule = next(reader.writes()), reader.of(Shard)
        if (taken := self.taken_rows(local)) is not None:
            return self.row_sums(taken, self.share.rank * output.size, output.size)
        return self.communicated(ReduceScatter, rule.padded(self.b, local))

    def taken_rows(self, local: Value) -> Operator | None:
        """The operator that makes a rank's gradient of a table, where sending the rows that it took of it takes at most
        half as much memory and traffic as sending the table; it is removed, as nothing else reads it."""
        if self.share.ranks == 1 or self.share.order != "tree" or local.nbytes < TABLE:
            return None
        gather = next((o for o in reversed(self.b.operators) if any(w.name == local.name for w in o.writes())), None)
        if gather is None or not isinstance(gather.op, GatherGrad) or local.dtype not in ("f32", "f64"):
            return None
        small = 2 * self.share.ranks * sum(x.nbytes for x in gather.reads()) <= local.nbytes
        alone = all(x.name != local.name for o in self.b.operators for x in o.reads())
        if not (small and alone and gather.op.axis % local.ndim == 0 and all(x.ndim for x in gather.reads())):
            return None
        self.b.operators.remove(gather)
        return gather

    def row_sums(self, taken: Operator, start: int, size: int) -> Value:
        """`size` elements, from `start` on, of the sum of all ranks' gradients of a table, from the rows of each."""
        indices, dy = (self.communicated(AllGather, x) for x in taken.reads())
        shape = taken.op.shape  # type: ignore[attr-defined]
        return self.b.RowSums(indices, dy, shape=shape, parts=self.share.ranks, start=start, size=size)

    def gathered(self, parts: list[Value], place: Place, *, own: bool = False) -> Value:
        """A whole value from its slices on all ranks; `own`: from this rank's alone."""
        b = self.b
        seen, axis = self.opened(parts, place)
        joined = seen[0] if len(seen) == 1 else b.Concat(*seen, axis=axis)
        if self.share.ranks > 1 and not own:
            front = (axis, *(a for a in range(joined.ndim) if a != axis))
            moved = b.Transpose(joined, perm=front) if axis else joined
            moved = self.communicated(AllGather, moved)
            joined = b.Transpose(moved, perm=tuple(front.index(a) for a in range(joined.ndim))) if axis else moved
        if place.outer == 1:
            return joined
        return b.Reshape(joined, shape=place.resized(parts[0].type, self.size if own else self.region.size).shape)

    def update_all(self) -> None:
        """Updates running statistics with those of all micro-batches, one after the other, alike on all ranks."""
        b = self.b
        b.role = Role.FORWARD
        rows: dict[str, list[tuple[tuple[int, int], int]]] = {}
        for key, values in self.statistics.items():
            rows.setdefault(values[0].dtype, []).append((key, values[0].size))
        whole: dict[tuple[int, int], list[Value]] = {}
        for keys in rows.values():
            each = len(self.statistics[keys[0][0]])
            if self.share.ranks == 1:
                whole.update((key, self.statistics[key]) for key, _ in keys)
                continue
            lines = [b.Concat(*(b.Reshape(self.statistics[key][k], shape=(size,)) for key, size in keys), axis=0)
                     for k in range(each)]  # fmt: skip
            line = b.Reshape(b.Concat(*lines, axis=0), shape=(each, sum(size for _, size in keys)))
            table = self.communicated(AllGather, line)
            low = 0
            for key, size in keys:
                like = self.statistics[key][0]
                cells = [
                    b.Slice(table, starts=(k, low), ends=(k + 1, low + size), axes=(0, 1))
                    for k in range(each * self.share.ranks)
                ]
                whole[key] = [b.Reshape(c, shape=like.shape) for c in cells]
                low += size
        for i in dict.fromkeys(i for i, _ in self.statistics):
            o = self.block.operators[i]
            for k in range(len(next(values for (j, _), values in whole.items() if j == i))):
                inputs = tuple(whole[i, n][k] if (i, n) in whole else v for n, v in enumerate(o.inputs))
                b.operators.append(dataclasses.replace(o, inputs=inputs))

    def communicated(self, kind: type[Communication], x: Value) -> Value:
        """The result of a collective operator among the ranks; x itself where there is one."""
        axis, order = self.share.axis, self.share.order if kind.sums else "tree"
        return communicated(self.b, kind(axis, self.share.ranks, self.numbers.take(axis), order=order), x)

    def with_rows(self, block: Block) -> Block:
        """The block that has the slices, with the rank's rows as inputs.

        Operators outside of slices that need all rows of an input read them gathered.  Shards are there already.
        """
        local = self.local if self.share.ranks > 1 else {}
        names: dict[str, Value] = {}
        b = self.b
        b.role = Role.FORWARD
        mark = len(b.operators)
        for v in block.inputs:
            if v.name in local and any(r == v for o in block.operators for r in o.reads()):
                names[v.name] = self.gathered([local[v.name]], self.place(v.name))
        operators = b.operators[mark:]
        del b.operators[mark:]
        rest = [
            o.reading({v.name: names[v.name] for v in o.reads() if v.name in names and v != local[v.name]})
            for o in block.operators
            if not (isinstance(o.op, Shard) and o.outputs[0] is not None and o.outputs[0].name in self.shards)
        ]
        inputs = tuple(local.get(v.name, v) for v in block.inputs)
        return dataclasses.replace(block, inputs=inputs, operators=(*operators, *rest))
