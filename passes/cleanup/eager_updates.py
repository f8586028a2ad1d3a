"""Placement of optimizer updates as early as possible."""

from __future__ import annotations

from ...language.ir import Block, Operator, Role
from ..base import Pass


class EagerUpdates(Pass):
    """Move optimizer operators up to the point where their inputs are final, so that gradients do not accumulate.

    An update of a parameter stays behind the last other operator that reads it.  The increment of the step counter, and
    operators that need all gradients (clipping by global norm), effectively do not move.  Communication of the
    optimizer's stays behind all other communication, for which other ranks may wait before they take part in it.
    """

    def run(self, block: Block) -> Block:
        """A stable merge: operators other than the optimizer's keep their order."""
        body = [o for o in block.operators if o.role is not Role.OPTIMIZE]
        ready = _ready_after(block, body)
        slots: dict[int, list[Operator]] = {}
        for op in block.operators:
            if op.role is Role.OPTIMIZE:
                slots.setdefault(ready[id(op)], []).append(op)
        merged = list(slots.get(-1, ()))
        for i, op in enumerate(body):
            merged.append(op)
            merged += slots.get(i, ())
        return block.with_operators(merged)


def _ready_after(block: Block, body: list[Operator]) -> dict[int, int]:
    """id of each optimizer operator → index in `body` of the operator behind which it may run."""
    written: dict[str, int] = {}
    last_read: dict[str, int] = {}
    for i, op in enumerate(body):
        written.update((v.name, i) for v in op.writes())
        last_read.update((v.name, i) for v in op.reads())
    communicated = max((i for i, op in enumerate(body) if op.op.communicates), default=-1)
    ready: dict[int, int] = {}
    for op in block.operators:
        if op.role is not Role.OPTIMIZE:
            continue
        at = max((written.get(v.name, -1) for v in op.reads()), default=-1)
        if op.op.communicates:  # in their order, too
            at = communicated = max(at, communicated)
        if op.op.updates:
            at = max([at, *(last_read.get(v.name, -1) for v in op.writes())])
        ready[id(op)] = at
        written.update((v.name, at) for v in op.writes())
        for v in op.reads():
            last_read[v.name] = max(last_read.get(v.name, -1), at)
    return ready
