"""The forward pass in a pipeline, without a backward pass: the operators of a rank's own stages, with messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...language.builder import Builder
from ...language.ir import Block, Operator, Value
from ...ops.communication.base import Numbers
from ...ops.communication.border import Border
from ...ops.communication.messages import Recv, Send
from ..base import Pass
from .borders import homes
from .schedules import Pipe


@dataclass(frozen=True)
class OwnForward(Pass):
    """Keep the operators of a rank's own stages of the pipeline `pipe`, in a forward pass with borders."""

    pipe: Pipe

    def run(self, block: Block) -> Block:
        return own_forward(block, self.pipe)


def own_forward(block: Block, pipe: Pipe) -> Block:
    """What a rank of a pipeline runs of a forward pass with borders, for the whole batch at once.

    All ranks are fed all inputs.  Outputs are those that the rank's own stages make, and what belongs to no stage.
    """
    home, stages = homes(block), set(pipe.own())
    b, numbers = Builder.on(block), Numbers(block.operators)
    there: dict[str, Value] = {}  # what other stages have sent, or other stages of this rank have made
    free: set[int] = set()  # operators of no stage
    for i, o in enumerate(block.operators):
        b.role = o.role
        if isinstance(o.op, Border):
            _cross(b, o, pipe, numbers, there)
        elif home.get(i) in stages or i not in home:
            if i not in home:
                free.add(len(b.operators))
            b.operators.append(o.reading({v.name: there[v.name] for v in o.reads() if v.name in there}))
    operators = _needed(b.operators, free, block.outputs)
    names = {v.name for o in operators for v in o.writes()} | {v.name for v in block.declared()}
    read = {v.name for o in operators for v in o.reads()}.union(block.outputs)

    def kept(values: Iterable[Value]) -> tuple[Value, ...]:
        return tuple(v for v in values if v.name in read)

    return dataclasses.replace(
        block, operators=tuple(operators), outputs=tuple(n for n in block.outputs if n in names),
        parameters=kept(block.parameters), buffers=kept(block.buffers), state=kept(block.state),
        constants=tuple(c for c in (*block.constants, *b.constants) if c.value.name in read), addresses={},
    )  # fmt: skip


def _cross(b: Builder, o: Operator, pipe: Pipe, numbers: Numbers, there: dict[str, Value]) -> None:
    """What a rank does at a border: it sends, receives, or has the value already.

    Borders come in one order on all ranks, and each is crossed at once: so no rank waits for ever.
    """
    op, (x,), (y,) = o.of(Border), o.reads(), o.writes()
    source, target = op.source % pipe.ranks, op.target % pipe.ranks
    channel = f"{pipe.axis}.{op.source}.{op.target}"
    if source == target == pipe.rank:
        there[y.name] = there.get(x.name, x)
    elif source == pipe.rank:
        x = there.get(x.name, x)
        b.CommWait(b.emit(Send(pipe.axis, pipe.ranks, numbers.take(channel), channel, peer=target), x), x)
    elif target == pipe.rank:
        number = numbers.take(channel)
        received = b.emit(Recv(pipe.axis, pipe.ranks, number, channel, peer=source, shape=y.shape, dtype=y.dtype))
        there[y.name] = b.CommWait(received)


def _needed(operators: Sequence[Operator], free: set[int], outputs: Iterable[str]) -> list[Operator]:
    """The operators without those of no stage that nothing here reads, such as other stages' gathered parameters."""
    read, kept = set(outputs), []
    for i, o in reversed(list(enumerate(operators))):
        if i in free and not any(v.name in read for v in o.writes()):
            continue
        kept.append(o)
        read.update(v.name for v in o.reads())
    return kept[::-1]
