"""Liveness: each buffer is freed right after its last use."""

from __future__ import annotations

import dataclasses

from ...language.builder import Names
from ...language.ir import Block, Free, Operator, Value
from ..base import Pass


class Liveness(Pass):
    """Declare each operator's scratch buffers, and insert a free after the last use of each value.

    Outputs of the block, parameters, buffers, state and constants are never freed.
    """

    gives = ("frees",)

    def run(self, block: Block) -> Block:
        """Frees of an earlier run are replaced."""
        operators = [with_scratch(o, None) for o in block.operators if not isinstance(o.op, Free)]
        names = Names(block.with_operators(operators).values())
        last = _last_use(block, operators)
        keep = {v.name for v in block.persistent()}.union(block.outputs)
        result: list[Operator] = []
        unread = [v for v in block.inputs if v.name not in last and v.name not in keep]
        if unread:
            result.append(Operator(Free(), tuple(unread), ()))
        for i, op in enumerate(operators):
            result.append(with_scratch(op, names))
            touched = {v.name: v for v in (*op.inputs, *op.outputs) if v is not None and last[v.name] == i}
            dead = tuple(v for v in touched.values() if v.name not in keep)
            if dead:
                result.append(Operator(Free(), dead, ()))
        return block.with_operators(result, addresses={})


def _last_use(block: Block, operators: list[Operator]) -> dict[str, int]:
    last: dict[str, int] = {}
    for i, op in enumerate(operators):
        for v in (*op.inputs, *op.outputs):
            if v is not None:
                last[v.name] = i
    return last


def with_scratch(op: Operator, names: Names | None) -> Operator:
    """The operator with its scratch buffers named (None: without any)."""
    types = () if names is None else op.workspace()
    if not types and not op.scratch:
        return op
    base = next(op.writes()).name
    scratch = tuple(Value(names.take(f"{base}#{i}"), t) for i, t in enumerate(types)) if names else ()
    return dataclasses.replace(op, scratch=scratch)
