"""The forward pass in a pipeline, without a backward pass: the operators of a rank's own stages, with messages.

A `Border` operator takes a value from one stage to another (borders.py); here it becomes a message, or nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from ...language.builder import Builder
from ...language.ir import Block, Operator, Value
from ...ops.communication.base import Numbers
from ...ops.communication.border import Border
from ...ops.communication.messages import Recv, Send
from ..base import Pass
from .borders import homes
from .schedules import Pipe


class OwnForward(Pass):
    """Keep the operators of a rank's own stages of the pipeline `pipe`, in a forward pass with `Border` operators."""

    pipe: Pipe

    def run(self, block: Block) -> Block:
        return own_forward(block, self.pipe)


def own_forward(block: Block, pipe: Pipe) -> Block:
    """A rank's part of a forward pass that was cut into stages, for the whole batch: no micro-batches.

    All ranks are fed all inputs.  Outputs are those of the rank's own stages, and of operators that belong to no stage
    (they depend on inputs alone, or on parameters alone).
    """
    home, stages = homes(block), set(pipe.own())
    b, numbers = Builder.on(block), Numbers(block.operators)
    arrivals: dict[str, Value] = {}  # a border's output → the value here: received, or of another stage of this rank
    stageless: set[int] = set()  # operators that belong to no stage
    for i, o in enumerate(block.operators):
        b.role = o.role
        if isinstance(o.op, Border):
            _cross(b, o, pipe, numbers, arrivals)
        elif home.get(i) in stages or i not in home:
            if i not in home:
                stageless.add(len(b.operators))
            b.operators.append(o.reading({v.name: arrivals[v.name] for v in o.reads() if v.name in arrivals}))
    operators = _needed(b.operators, stageless, block.outputs)
    names = {v.name for o in operators for v in o.writes()} | {v.name for v in block.declared()}
    read = {v.name for o in operators for v in o.reads()}.union(block.outputs)

    def kept(values: Iterable[Value]) -> tuple[Value, ...]:
        return tuple(v for v in values if v.name in read)

    return dataclasses.replace(
        block, operators=tuple(operators), outputs=tuple(n for n in block.outputs if n in names),
        parameters=kept(block.parameters), buffers=kept(block.buffers), state=kept(block.state),
        constants=tuple(c for c in (*block.constants, *b.constants) if c.value.name in read), addresses={},
    )  # fmt: skip


def _cross(b: Builder, o: Operator, pipe: Pipe, numbers: Numbers, arrivals: dict[str, Value]) -> None:
    """Emits what a rank does at a border: it sends, receives, or has the value already.

    All ranks meet the borders in the same order and wait for each message before they go on: there is no deadlock.
    """
    op, (x,), (y,) = o.of(Border), o.reads(), o.writes()
    source, target = op.source % pipe.ranks, op.target % pipe.ranks
    channel = f"{pipe.axis}.{op.source}.{op.target}"
    if source == target == pipe.rank:
        arrivals[y.name] = arrivals.get(x.name, x)
    elif source == pipe.rank:
        x = arrivals.get(x.name, x)
        b.CommWait(b.emit(Send(pipe.axis, pipe.ranks, numbers.take(channel), channel, peer=target), x), x)
    elif target == pipe.rank:
        number = numbers.take(channel)
        received = b.emit(Recv(pipe.axis, pipe.ranks, number, channel, peer=source, shape=y.shape, dtype=y.dtype))
        arrivals[y.name] = b.CommWait(received)


def _needed(operators: Sequence[Operator], stageless: set[int], outputs: Iterable[str]) -> list[Operator]:
    """The operators, except stageless ones whose results this rank does not read, such as gathers of other stages'
    parameters."""
    read, kept = set(outputs), []
    for i, o in reversed(list(enumerate(operators))):
        if i in stageless and not any(v.name in read for v in o.writes()):
            continue
        kept.append(o)
        read.update(v.name for v in o.reads())
    return kept[::-1]
