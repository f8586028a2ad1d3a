"""Verification of one rank's communication: each is awaited before its result is used, and has a name of its own.

What ranks do together is verified on the programs of all of them (communication/verify_ranks.py).
"""

from __future__ import annotations

from typing import Any

from .ir import Operator, Value
from .text import show_name


class Communications:
    """Follows the operators of a block in order; `step` and `left` return a description of a fault, or "".

    A communication writes its target, which only one later wait may read; the wait also names the source, which nothing
    updates in between.
    """

    def __init__(self) -> None:
        #: target of a communication without a wait so far → (its source, the operator's position)
        self.flying: dict[str, tuple[str | None, int]] = {}
        self.targets: set[str] = set()
        self.numbers: set[tuple[str, int]] = set()
        self.axes: dict[str, tuple[str, int]] = {}

    def unfit(self, v: Value) -> bool:
        """Whether only a wait may read a value."""
        return v.name in self.targets

    def step(self, at: int, op: Operator) -> str:
        """The fault of an operator whose types are correct; "" if there is none."""
        kind = op.op.communicates
        if not kind:
            return self._other(op)
        if kind == "wait":
            return self._wait(op)
        return self._name(op.op) or self._begin(at, op)

    def _other(self, op: Operator) -> str:
        for v in op.reads():
            if v.name in self.targets:
                return f"{show_name(v.name)} is read while other ranks write it: read the result of its CommWait"
        if op.op.updates and self.flying:
            sources = {source for source, _ in self.flying.values()}
            for v in op.writes():
                if v.name in sources:
                    return f"{show_name(v.name)} is updated while it is sent: let the CommWait come before"
        return ""

    def _name(self, op: Any) -> str:
        if (op.queue, op.number) in self.numbers:
            return f"channel '{op.queue}' has number {op.number} already: each communication has a number of its own"
        self.numbers.add((op.queue, op.number))
        axis = self.axes.setdefault(op.queue, (op.axis, op.ranks))
        if axis != (op.axis, op.ranks):
            return (
                f"channel '{op.queue}' is between {axis[1]} ranks of axis '{axis[0]}', and this {op.name} between "
                f"{op.ranks} of '{op.axis}': give it another channel"
            )
        return ""

    def _begin(self, at: int, op: Operator) -> str:
        if why := self._other(op):
            return why
        target = next(op.writes())
        self.flying[target.name] = next((v.name for v in op.reads()), None), at
        self.targets.add(target.name)
        return ""

    def _wait(self, op: Operator) -> str:
        target, source = op.inputs[0], op.inputs[1] if len(op.inputs) > 1 else None
        assert target is not None
        if target.name not in self.flying:
            again = "was awaited already" if target.name in self.targets else "is not what a communication writes"
            return f"{show_name(target.name)} {again}: a CommWait takes the result of one communication"
        begun, _ = self.flying.pop(target.name)
        if begun != (None if source is None else source.name):
            reads = "reads nothing" if begun is None else f"reads {show_name(begun)}"
            shown = "nothing" if source is None else show_name(source.name)
            return f"the communication that writes {show_name(target.name)} {reads}, but its wait names {shown}"
        return ""

    def left(self) -> tuple[int, str]:
        """(position, description) of a communication without a wait; (-1, "") if there is none."""
        for target, (_, at) in self.flying.items():
            return at, f"no CommWait follows the communication that writes {show_name(target)}"
        return -1, ""
