"""Versions of state that the forward pass updates, so that a gradient reads the version that its operator read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...language.op import op_class


class Versions:
    """A block's operators, with a unique name for the output of every update.

    `operators` are for `reverse`; `restore` restores the names.  State keeps its name up to its first update.
    """

    def __init__(self, b: Builder, block: Block) -> None:
        self.b = b
        #: name of a version → the state that it is of
        self.state: dict[str, Value] = {}
        #: name of a version → index of the operator that overwrites it
        self.overwritten: dict[str, int] = {}
        #: state → its name after the last update
        self.last: dict[str, str] = {}
        self.operators = list(block.operators)
        if any(op.op.updates for op in block.operators):
            self.operators = [self._renamed(i, op) for i, op in enumerate(block.operators)]

    def _renamed(self, i: int, op: Operator) -> Operator:
        inputs = tuple(v if v is None else Value(self.last.get(v.name, v.name), v.type) for v in op.inputs)
        outputs = op.outputs
        if op.op.updates:
            outputs = tuple(v if v is None else self._next(v, i) for v in outputs)
        same = inputs == op.inputs and outputs is op.outputs
        return op if same else dataclasses.replace(op, inputs=inputs, outputs=outputs)

    def _next(self, v: Value, at: int) -> Value:
        old = self.last.get(v.name, v.name)
        new = self.b.names.take(f"{v.name}.updated")
        self.state[old] = self.state[new] = v
        self.overwritten[old] = at
        self.last[v.name] = new
        return v.renamed(new)

    def of(self, names: set[str]) -> set[str]:
        """The names with those of all their versions."""
        return names.union(n for n, v in self.state.items() if v.name in names)

    def restore(
        self, forward: Sequence[Operator], backward: Sequence[Operator]
    ) -> tuple[list[Operator], list[Operator], dict[int, list[Operator]]]:
        """Both lists with the state's own names, and copies of old contents, by the operator they come before.

        A copy is made where a backward operator reads what a forward one overwrites.
        """
        if not self.state:
            return list(forward), list(backward), {}
        names = {n: v.name for n, v in self.state.items()}
        read = {v.name for op in backward for v in op.reads()}
        copies: dict[int, list[Operator]] = {}
        kept = dict(names)
        for n, at in self.overwritten.items():
            if n in read:
                v = self.state[n]
                copy = v.renamed(self.b.names.take(f"{v.name}.before"))
                kept[n] = copy.name
                copies.setdefault(at, []).append(Operator(op_class("Identity")(), (v,), (copy,), Role.FORWARD))
        return [op.renamed(names) for op in forward], [op.renamed(kept) for op in backward], copies
