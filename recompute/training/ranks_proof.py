"""`prove_ranks`: whether the programs of all ranks of a mesh compute what one process does for the whole batch.

The ranks run in lock step (communication/matching.py), and all of them and the whole step share one table of
expressions: what is sent is the expression that the receiver reads, what is gathered lies behind one another, and sums
over ranks are sums.  A rank's rows of the batch, and its parts of parameters, are slices of the whole ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from ..boundary import as_program
from ..communication.matching import Begun, Matcher, Places, run_together
from ..communication.mesh import Mesh, as_mesh
from ..errors import UsageError, VerifyError, expect
from ..language.builder import Builder
from ..language.ir import Free
from ..language.program import Program
from ..language.types import TensorType, Value, need
from ..language.verify import verify
from ..ops.communication.base import Communication
from ..ops.communication.collectives import AllGather, AllReduce, AllToAll, Broadcast, Reduce, ReduceScatter
from ..ops.communication.messages import Message
from ..ops.communication.shard import Shard
from ..ops.shape.slice import Slice
from ..proof import rows, rules  # noqa: F401  register them
from ..proof.numbers import Expansion, Numbers, cut_at
from ..proof.prove import Proof, final
from ..proof.views import View
from .parts import Part, parts_of


def prove_ranks(whole: Program, ranks: Sequence[Program], mesh: Mesh | str, *, partly: bool = False) -> Proof:
    """Proves that the training steps of all ranks of a mesh compute what `whole`, one process's, does.

    Compared are each rank's outputs, and its parameters, buffers and state, which may be parts, after the step, by the
    names `NAME@RANK`.  Each rank is fed its rows of the batch.  Sums may be added in another order.  VerifyError for
    the first that is not proved, unless `partly`, and for ranks that would wait for ever; UsageError for another number
    of programs than the mesh has ranks.
    """
    mesh, numbers, block = as_mesh(mesh), Numbers(), verify(as_program(whole).block)
    ranks = [as_program(p) for p in expect("ranks", ranks, (list, tuple), "a list of the programs of all ranks")]
    if len(ranks) != mesh.ranks:
        raise UsageError(f"the mesh {mesh} has {mesh.ranks} ranks, not {len(ranks)}")
    env = final(numbers, block)[0]
    after = {(v.name, v.dtype): env[v.name] for v in block.values().values()}
    held = (*block.parameters, *block.buffers, *block.state)
    before = {(v.name, v.dtype): numbers.declared("state", v) for v in held}
    before |= {(v.name, v.dtype): numbers.declared("input", v) for v in block.inputs}
    matcher = Matcher(Places(mesh.group, mesh.coordinate, lambda r: r), functools.partial(_exchange, numbers))
    runs = [_Rank(numbers, r, p, mesh, before) for r, p in enumerate(ranks)]
    run_together(matcher, {r.number: r.steps(matcher) for r in runs})
    proved: list[str] = []
    unproved: dict[str, str] = {}
    for run in runs:
        for v in run.compared():
            of = after.get((v.name, v.dtype))
            wanted = run.part(v, of) if of else None
            if wanted is not None and run.has(v, wanted):
                proved.append(f"{v.name}@{run.number}")
            else:
                unproved[f"{v.name}@{run.number}"] = f"it is {run.env[v.name]}, not {wanted}"
    proof = Proof(tuple(proved), unproved, len(numbers.nodes))
    if unproved and not partly:
        raise VerifyError(f"program '{block.name}' of {mesh}: {str(proof).replace(chr(10), ';', 1)}")
    return proof


class _Rank:
    """One rank's step: the expressions of its values by name."""

    def __init__(
        self, numbers: Numbers, number: int, program: Program, mesh: Mesh, before: dict[tuple[str, str], View]
    ) -> None:
        self.numbers, self.number, self.block, self.mesh = numbers, number, verify(program.block), mesh
        self.parts = parts_of(program)
        self.env = {c.value.name: numbers.constant(c) for c in self.block.constants}
        block = self.block
        for v in (*block.inputs, *block.parameters, *block.buffers, *block.state):
            of = before.get((v.name, v.dtype))
            part = self.part(v, of) if of else None
            kind = "input" if v in block.inputs else "state"
            self.env[v.name] = numbers.declared(kind, v.renamed(f"{v.name}@{number}")) if part is None else part

    def part(self, v: Value, whole: View) -> View | None:
        """This rank's part of a whole value; None where it is no such part."""
        if v.name in self.parts:
            shard = self.of(self.parts[v.name], whole)
            return shard if shard is not None and shard.shape == v.shape else None
        if v.shape == whole.shape:
            return whole
        axis = next((i for i, (a, b) in enumerate(zip(v.shape, whole.shape, strict=False)) if a != b), 0)
        along = "dp" if axis == 0 else "cp"
        size = v.shape[axis] if v.shape else 0
        if along not in dict(self.mesh.axes) or not size or whole.shape[axis] != size * self.mesh.size(along):
            return None
        return whole.sliced(axis, size * self.mesh.coordinate(self.number, along), size)

    def of(self, part: Part, whole: View) -> View | None:
        """A part of a parameter or of its state."""
        view: View | None = whole
        for how, cut in part.cuts:
            view = view and cut_at(view, cut.place, self.mesh.coordinate(self.number, how.axis), 1, how.ranks)
        if view is None or not part.padded:
            return view
        ranks, t = self.mesh.size(part.along), TensorType(part.whole.dtype, view.shape)
        op = Shard(ranks, self.mesh.coordinate(self.number, part.along), part.padded * ranks)
        return self.numbers.apply(op, [view], (t,), (t.with_shape((part.padded,)),))[0]

    def has(self, v: Value, wanted: View) -> bool:
        """Whether a value is this after the step; of zeros that follow a part, that they are 0 again."""
        x, part = self.env[v.name], self.parts.get(v.name)
        if x.bare() == wanted.bare() or part is None or part.count >= part.padded:
            return x.bare() == wanted.bare()

        def cut(y: View, start: int, end: int) -> View:
            types = (v.type,), (v.type.with_shape((end - start,)),)
            return need(self.numbers.apply(Slice((start,), (end,), (0,)), [y], *types)[0]).bare()

        first = not part.count or cut(x, 0, part.count) == cut(wanted, 0, part.count)
        return first and rows.vanishes(self.numbers, cut(x, part.count, part.padded).base)

    def compared(self) -> list[Value]:
        """Outputs, and what persists."""
        values = self.block.values()
        held = (*self.block.parameters, *self.block.buffers, *self.block.state)
        return list(dict.fromkeys([*(values[n] for n in self.block.outputs), *held]))

    def steps(self, matcher: Matcher) -> Iterator[Begun]:
        """Numbers the program; yields the communications that it waits for."""
        begun: dict[str, Begun] = {}
        for at, o in enumerate(self.block.operators):
            if isinstance(o.op, Communication):
                (target,) = o.writes()
                source = list(o.reads())
                types = (str(source[0].type) if source else "", str(target.type))
                payload = (self.env, self.env[source[0].name] if source else None, target)
                begun[target.name] = one = Begun(self.number, o.op, at, types, payload)
                matcher.begin(one)
                continue
            if isinstance(o.op, Free):
                continue
            if o.op.communicates == "wait":
                yield begun[next(o.reads()).name]
            self.numbers.run(o, self.env)


def _exchange(numbers: Numbers, members: list[Begun]) -> None:
    """Gives the members of a communication its results, when all have begun it."""
    op, ins = members[0].op, [m.payload[1] for m in members if m.payload[1] is not None]
    if isinstance(op, Message):  # the sender is first
        sent = members[0].payload[2]
        results: Sequence[View | None] = [numbers.filled(sent.type, 0), ins[0]]
    else:
        dtype = members[0].types[0].partition("[")[0]
        results = numbers.through(_together(op, TensorType(dtype, ins[0].shape)), ins)
    for member, view in zip(members, results, strict=True):
        env, _, target = member.payload
        env[target.name] = view


@functools.lru_cache(maxsize=1 << 10)
def _together(op: Communication, t: TensorType) -> Expansion:
    """A collective as a composition of the members' values."""
    b, n = Builder(), op.ranks
    xs = [Value(b.names.take(f"x{i}"), t) for i in range(n)]
    values: list[Any]
    if isinstance(op, (AllReduce, ReduceScatter, Reduce)):
        total = b.add_all(xs)
        rows = t.shape[0] // n if isinstance(op, ReduceScatter) else 0
        if isinstance(op, ReduceScatter):
            values = [b.Slice(total, starts=(i * rows,), ends=((i + 1) * rows,), axes=(0,)) for i in range(n)]
        else:
            values = [total if not isinstance(op, Reduce) or i == op.root else b.fill(0, t) for i in range(n)]
    elif isinstance(op, AllGather):
        values = [b.Concat(*xs, axis=0)] * n
    elif isinstance(op, AllToAll):
        rows = t.shape[0] // n
        parts = [[b.Slice(x, starts=(i * rows,), ends=((i + 1) * rows,), axes=(0,)) for i in range(n)] for x in xs]
        values = [b.Concat(*(p[i] for p in parts), axis=0) for i in range(n)]
    elif isinstance(op, Broadcast):
        values = [xs[op.root]] * n
    else:
        raise VerifyError(f"no rule says what {op.name} computes")
    return Expansion(tuple(b.operators), tuple(b.constants), tuple(values))
