"""Small values travel together: one message instead of many.

Large ones travel alone, from where they are to where they are needed, without a copy.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from ...language.builder import Builder
from ...language.ir import Block, Operator, Role
from ...ops.communication.base import Communication, communicated
from ...ops.communication.collectives import AllGather, AllReduce, ReduceScatter
from ..base import Pass


class Buckets(Pass):
    """Join collectives of small values of one type that follow one another on a channel.

    `member`: bytes up to which a value counts as small; `bucket`: bytes after which a bucket is full.
    """

    member: int = 64 << 10
    bucket: int = 256 << 10

    def run(self, block: Block) -> Block:
        """The block itself where there is nothing to join."""
        if not any(isinstance(o.op, Communication) for o in block.operators):
            return block
        joining = _Joining(block, self.member, self.bucket)
        for o in block.operators:
            joining.add(o)
        joining.flush()
        return block.with_operators(joining.found)


@dataclass
class _Bucket:
    """Pairs of a begin and its wait."""

    begins: list[Operator] = field(default_factory=list)
    waits: list[Operator] = field(default_factory=list)
    nbytes: int = 0


class _Joining:
    def __init__(self, block: Block, member: int, bucket: int) -> None:
        self.b, self.member, self.bucket = Builder.on(block), member, bucket
        self.found: list[Operator] = []
        self.held: dict[str, Operator] = {}
        self.open: dict[Hashable, _Bucket] = {}
        #: values that do not exist, or must not change, until their bucket is sent
        self.touched: set[str] = set()
        #: updates of what is sent, and what they read
        self.later: list[Operator] = []
        self.guarded: set[str] = set()

    def add(self, o: Operator) -> None:
        """The next operator: what is small waits for others like it."""
        if isinstance(o.op, (AllReduce, AllGather, ReduceScatter)) and o.op.ranks > 1:
            (x,), (y,) = o.reads(), o.writes()
            if max(x.nbytes, y.nbytes) <= self.member and x.name not in self.touched:
                self.held[y.name] = o
                return
        target = o.inputs[0] if o.op.communicates == "wait" else None
        if target is not None and target.name in self.held:
            self.join(self.held.pop(target.name), o)
            return
        reads, writes = {v.name for v in o.reads()}, {v.name for v in o.writes()}
        if not reads.isdisjoint(self.touched) or not writes.isdisjoint(self.touched | self.guarded):
            if o.role is Role.OPTIMIZE:  # updates wait for the bucket
                self.later.append(o)
                self.touched |= writes
                self.guarded |= reads
                return
            self.flush()
        self.found.append(o)

    def join(self, begin: Operator, wait: Operator) -> None:
        """Adds a communication and its wait to the bucket of its kind."""
        assert isinstance(begin.op, Communication)
        (x,) = begin.reads()
        kind = (type(begin.op), begin.op.axis, begin.op.queue, begin.op.order, x.dtype, begin.role)
        bucket = self.open.setdefault(kind, _Bucket())
        bucket.begins.append(begin)
        bucket.waits.append(wait)
        bucket.nbytes += x.nbytes
        self.touched.update((x.name, *(v.name for v in wait.writes())))
        if bucket.nbytes >= self.bucket:
            self.flush()

    def flush(self) -> None:
        """Sends all buckets."""
        for bucket in self.open.values():
            self.found += self.sent(bucket)
        self.found += self.later
        self.open, self.touched, self.later, self.guarded = {}, set(), [], set()
        # a begin whose wait is still to come keeps its place
        self.found += self.held.values()
        self.held = {}

    def sent(self, bucket: _Bucket) -> list[Operator]:
        """The operators of one bucket."""
        if len(bucket.begins) == 1:
            return [*bucket.begins, *bucket.waits]
        b, first = self.b, bucket.begins[0]
        assert isinstance(first.op, Communication)
        b.operators, b.role, ranks = [], first.role, first.op.ranks
        values = [next(o.reads()) for o in bucket.begins]
        rows = ranks if isinstance(first.op, ReduceScatter) else 1
        flat = [b.Reshape(v, shape=(rows, v.size // rows)) for v in values]
        joined = b.Concat(*flat, axis=1)
        sent = b.Reshape(joined, shape=(joined.size,))
        got = communicated(b, first.op, sent)
        parts = ranks if isinstance(first.op, AllGather) else 1
        table = b.Reshape(got, shape=(parts, got.size // parts))
        low = 0
        names: dict[str, str] = {}
        for v, wait in zip(flat, bucket.waits, strict=True):
            (y,) = wait.writes()
            each = v.size // rows
            part = b.Slice(table, starts=(low,), ends=(low + each,), axes=(1,))
            names[b.Reshape(part, shape=y.shape).name] = y.name
            low += each
        return [o.renamed(names) for o in b.operators]
