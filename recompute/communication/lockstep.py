"""The lock-step interpreter: the programs of all ranks in one process, on the operators' own numerics.

Each rank runs until it waits for a communication that others have not begun; then the next one does.  When all members
have begun it, their arrays are exchanged at once.  What ranks compute does not depend on the order in which they
advance, and sums are added in the fixed tree: so results are the bits that any other engine must give that runs the
same programs with `order="tree"`.  It is for tests and for small programs: nothing is planned, and every value of every
rank exists for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import JobError, UsageError
from ..language.ir import Block, Free, Operator
from ..language.types import TensorType, Value
from ..ops.communication.base import Communication
from ..ops.communication.messages import Message
from .matching import Begun, Matcher, Places, run_together
from .mesh import Mesh
from .verify_ranks import verify_ranks

Arrays = Mapping[str, np.ndarray]


class LockStep:
    """All ranks of a mesh.  `blocks[rank]` is a rank's program (one block: that of all), `data[rank]` its parameters,
    buffers and state (one mapping: each gets a copy).

    The programs are verified together first.  `state[rank]` holds what steps update.
    """

    def __init__(self, blocks: Block | Sequence[Block], mesh: Mesh, data: Arrays | Sequence[Arrays] = ()) -> None:
        self.mesh = mesh
        self.blocks = [blocks] * mesh.ranks if isinstance(blocks, Block) else list(blocks)
        verify_ranks(self.blocks, mesh)
        contents = [data] * mesh.ranks if isinstance(data, Mapping) else (list(data) or [{}] * mesh.ranks)
        if len(contents) != mesh.ranks:
            raise UsageError(f"the mesh {mesh} has {mesh.ranks} ranks, but there are data of {len(contents)}")
        pairs = enumerate(zip(self.blocks, contents, strict=True))
        self.state = [_checked(rank, _kept(block), arrays, "kept value") for rank, (block, arrays) in pairs]

    def run(
        self, feeds: Arrays | Sequence[Arrays] = (), fetch: Sequence[str] | None = None
    ) -> list[dict[str, np.ndarray]]:
        """One step on every rank: the values named `fetch` (None: the outputs of its block) of each.

        `feeds[rank]`: a rank's inputs (one mapping: those of all).
        """
        inputs = [feeds] * self.mesh.ranks if isinstance(feeds, Mapping) else (list(feeds) or [{}] * self.mesh.ranks)
        if len(inputs) != self.mesh.ranks:
            raise UsageError(f"the mesh {self.mesh} has {self.mesh.ranks} ranks, but there are {len(inputs)} feeds")
        matcher = Matcher(Places(self.mesh.group, self.mesh.coordinate, lambda rank: rank), _exchange)
        ranks = []
        for r, (block, feed, state) in enumerate(zip(self.blocks, inputs, self.state, strict=True)):
            names = block.outputs if fetch is None else tuple(fetch)
            ranks.append(_Rank(r, block, _checked(r, block.inputs, feed, "input"), state, names))
        run_together(matcher, {r.number: r.steps(matcher) for r in ranks})
        return [r.fetched() for r in ranks]


class _Rank:
    """One rank's step: its values by name."""

    def __init__(self, number: int, block: Block, feed: Arrays, state: dict[str, np.ndarray], names: Sequence[str]):
        self.number, self.block, self.names = number, block, names
        constants = {c.value.name: c.numpy() for c in block.constants}
        self.values: dict[str, np.ndarray] = {**feed, **state, **constants}
        self.kept: dict[str, np.ndarray] = {}
        self.begun: dict[str, Begun] = {}

    def steps(self, matcher: Matcher) -> Iterator[Begun]:
        """Runs the program; yields the communications that it waits for."""
        for at, o in enumerate(self.block.operators):
            if isinstance(o.op, Free):
                for v in o.reads():
                    buffer = self.values.pop(v.name)
                    if v.name in self.names:
                        self.kept[v.name] = buffer
                continue
            if o.op.communicates == "wait":
                yield self.begun.pop(next(o.reads()).name)
            self._apply(at, o, matcher)

    def _apply(self, at: int, o: Operator, matcher: Matcher) -> None:
        ins: list[Any] = [None if v is None else self.values[v.name] for v in o.inputs]
        types = o.op.infer(*(None if v is None else v.type for v in o.inputs))
        outs: list[Any] = [None] * max(len(types), len(o.outputs))
        for i, v in enumerate(o.outputs):
            if v is not None:
                outs[i] = self.values[v.name] if o.op.updates else poisoned(v.type)
                self.values[v.name] = outs[i]
        if isinstance(o.op, Communication):
            target = next(o.writes())
            source = next((str(v.type) for v in o.reads()), "")
            arrays = (ins[0] if ins else None, outs[0])
            self.begun[target.name] = Begun(self.number, o.op, at, (source, str(target.type)), arrays)
            matcher.begin(self.begun[target.name])
            return
        present = [v.type if v is not None else None for v in o.outputs] + [None] * (len(types) - len(o.outputs))
        scratch = [poisoned(t) for t in o.op.scratch([None if v is None else v.type for v in o.inputs], present)]
        try:
            with np.errstate(all="ignore"):
                o.op.compute(ins, outs, scratch)
        except Exception as e:
            name = next((v.name for v in o.writes()), "")
            raise JobError(f"rank {self.number}: {o.op.name}, which makes '{name}' (operator {at}): {e}") from e

    def fetched(self) -> dict[str, np.ndarray]:
        """The values that were asked for.  UsageError for a name that the program does not have."""
        values = {**self.values, **self.kept}
        for name in self.names:
            if name not in values:
                raise UsageError(f"rank {self.number}: its program has no value '{name}' to fetch")
        return {name: values[name].copy() for name in self.names}


def poisoned(t: TensorType) -> np.ndarray:
    """An array of bytes 0xFF: NaN for floats, so that what is read before it is written shows."""
    return np.frombuffer(bytearray(b"\xff" * t.nbytes), np.uint8).view(t.numpy).reshape(t.shape)


def _exchange(members: list[Begun]) -> None:
    """Runs a communication of which all members have begun their part."""
    if isinstance(members[0].op, Message):  # the sender is first
        sent, received = members[0].payload, members[1].payload
        members[0].op.together([sent[0]], [sent[1], received[1]])
    else:
        members[0].op.together([m.payload[0] for m in members], [m.payload[1] for m in members])


def _kept(block: Block) -> tuple[Value, ...]:
    return (*block.parameters, *block.buffers, *block.state)


def _checked(rank: int, wanted: Sequence[Value], feed: Arrays, what: str) -> dict[str, np.ndarray]:
    """Copies of the arrays of declared values.  UsageError for one that is missing or of another type."""
    arrays = {}
    for v in wanted:
        if v.name not in feed:
            raise UsageError(f"rank {rank}: no array is given for {what} '{v.name}'")
        array = np.asarray(feed[v.name])
        if TensorType.of(array) != v.type:
            raise UsageError(f"rank {rank}: {what} '{v.name}' is {v.type}, but its array is {TensorType.of(array)}")
        arrays[v.name] = np.array(array, order="C")
    return arrays
