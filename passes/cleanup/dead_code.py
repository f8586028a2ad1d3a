"""Dead code elimination."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from ...language.ir import Block, Free, Operator, Role
from ..base import Pass


class DeadCode(Pass):
    """Remove operators whose results reach no output, no state and no other rank, and unused optional outputs."""

    def run(self, block: Block) -> Block:
        """Outputs of the block and updates of state are what is wanted."""
        return block.with_operators(prune(block.operators, block.outputs))


def prune(
    operators: Iterable[Operator], wanted: Iterable[str], roles: Collection[Role] = tuple(Role)
) -> list[Operator]:
    """The operators that `wanted` values or state updates need; only those with a role in `roles` are removed."""
    needed = set(wanted)
    kept = []
    for op in reversed(list(operators)):
        if isinstance(op.op, Free):
            raise ValueError("dead code is removed before frees are placed")
        if op.role in roles and not op.op.updates:
            if op.op.communicates:  # with other ranks, which wait for it
                needed.update(v.name for v in op.reads())
                kept.append(op)
                continue
            if not any(v.name in needed for v in op.writes()):
                continue
            op = drop_unused_outputs(op, needed)
        needed.update(v.name for v in op.reads())
        kept.append(op)
    return kept[::-1]


def drop_unused_outputs(op: Operator, needed: Collection[str]) -> Operator:
    """The operator without unused optional outputs."""
    required = op.op.required_outputs
    if len(op.outputs) <= required:
        return op
    outs = [v if i < required or (v is not None and v.name in needed) else None for i, v in enumerate(op.outputs)]
    while outs and outs[-1] is None:
        outs.pop()
    return op if tuple(outs) == op.outputs else dataclasses.replace(op, outputs=tuple(outs))
