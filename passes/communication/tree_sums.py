"""Sums over ranks as moved data and a sum of our own.

    %s = AllReduce(%g) {number=3}          %s = AllToAll(%g) {number=3, channel="dp.parts"}
    ...                                    ...
    %y = CommWait(%s, %g)                  %t = CommWait(%s, %g)
                                           %p = TreeSum(%t) {parts=4}
                                           %a = AllGather(%p) {number=3, channel="dp.whole"}
                                           %y = CommWait(%a, %p)

The same bytes move, the library adds nothing and needs no buffers of its own for it, and all that lies in memory is a
value of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...language.builder import Names
from ...language.ir import Block, Operator, Role, Value
from ...language.op import Op
from ...language.options import option_fields
from ...ops.communication.base import Communication, CommWait
from ...ops.communication.collectives import AllGather, AllReduce, AllToAll, Collective, ReduceScatter
from ...ops.communication.tree_sum import TreeSum
from ...ops.shape.reshape import Reshape
from ..base import Pass

#: bytes up to which every rank gets and adds all, in one communication instead of two
SMALL = 16 << 10


class TreeSums(Pass):
    """Replace AllReduce and ReduceScatter with `order="tree"` by data movement and TreeSum, and collectives of one
    rank by their input.

    What began stays where it began; the sum, and what follows it, stand at the wait.  `Reduce` stays: an engine adds it
    along the tree itself.  Blocks without communication are unchanged.
    """

    def run(self, block: Block) -> Block:
        """The block itself if there is nothing to replace."""
        if not any(isinstance(o.op, Collective) and _changes(o.op) for o in block.operators):
            return block
        writer = _Writer(block)
        for o in block.operators:
            writer.add(o)
        return block.with_operators(writer.operators)


def _changes(op: Op) -> bool:
    if not isinstance(op, Collective):
        return False
    return op.ranks == 1 or (op.order == "tree" and isinstance(op, (AllReduce, ReduceScatter)))


@dataclass(frozen=True)
class _Begun:
    """A collective that is replaced: the operator, and where its data are (what is moved, and to where)."""

    op: Communication
    source: Value
    target: Value | None = None
    whole: bool = False


class _Writer:
    """The operators of the new block."""

    def __init__(self, block: Block) -> None:
        self.operators: list[Operator] = []
        self.names = Names(block.values())
        self.begun: dict[str, _Begun] = {}

    def add(self, o: Operator) -> None:
        """An operator, or what takes its place."""
        if _changes(o.op):
            assert isinstance(o.op, Communication) and o.inputs[0] is not None and o.outputs[0] is not None
            self.begun[o.outputs[0].name] = self.begin(o, o.op, o.inputs[0])
        elif isinstance(o.op, CommWait) and o.inputs[0] is not None and o.inputs[0].name in self.begun:
            assert o.outputs[0] is not None
            self.wait(o.role, self.begun[o.inputs[0].name], o.outputs[0])
        else:
            self.operators.append(o)

    def emit(self, role: Role, op: Op, inputs: Sequence[Value], out: Value | str) -> Value:
        """Adds an operator whose result is a given value, or gets a name."""
        if isinstance(out, str):
            (t,) = op.infer(*(v.type for v in inputs))
            out = Value(self.names.take(out), t)
        self.operators.append(Operator(op, tuple(inputs), (out,), role))
        return out

    def shaped(self, role: Role, x: Value, shape: Sequence[int]) -> Value:
        """x under another shape, which is a view; x itself where it has it."""
        if x.shape == tuple(shape):
            return x
        return self.emit(role, Reshape(tuple(shape)), [x], f"{x.name}.flat")

    def begin(self, o: Operator, op: Communication, x: Value) -> _Begun:
        """Begins to move data where the collective began."""
        if op.ranks == 1:
            return _Begun(op, x)
        name = o.outputs[0].name if o.outputs[0] is not None else op.name
        if not isinstance(op, ReduceScatter) and (x.nbytes <= SMALL or x.type.size % op.ranks):
            source = self.shaped(o.role, x, x.shape or (1,))
            return _Begun(op, source, self.emit(o.role, _moved(AllGather, op, "parts"), [source], name), whole=True)
        divisible = bool(x.shape) and x.shape[0] % op.ranks == 0
        source = self.shaped(o.role, x, x.shape if divisible else (x.type.size,))
        return _Begun(op, source, self.emit(o.role, _moved(AllToAll, op, "parts"), [source], name))

    def wait(self, role: Role, begun: _Begun, result: Value) -> None:
        """The sum where the collective's wait stood, and what brings it to all."""
        op, source, target = begun.op, begun.source, begun.target
        if target is None:
            self.emit(role, Reshape(result.shape), [source], result)
            return
        parts = self.emit(role, CommWait(), [target, source], f"{result.name}.parts")
        if isinstance(op, ReduceScatter) or begun.whole:
            self.last(role, TreeSum(op.ranks), [parts], result)
            return
        part = self.emit(role, TreeSum(op.ranks), [parts], f"{result.name}.part")
        whole = self.emit(role, _moved(AllGather, op, "whole"), [part], f"{result.name}.whole")
        self.last(role, CommWait(), [whole, part], result)

    def last(self, role: Role, op: Op, inputs: Sequence[Value], result: Value) -> None:
        """The operator that makes the result, in its shape."""
        (t,) = op.infer(*(v.type for v in inputs))
        if t == result.type:
            self.emit(role, op, inputs, result)
        else:
            self.emit(role, Reshape(result.shape), [self.emit(role, op, inputs, f"{result.name}.flat")], result)


def _moved(kind: type[Communication], op: Communication, part: str) -> Communication:
    """A collective that moves data on a channel of its own, under the number of the one that it replaces."""
    common: dict[str, Any] = {f.name: getattr(op, f.name) for f in option_fields(Communication)}
    return kind(**{**common, "channel": f"{op.queue}.{part}", "order": "tree"})
