"""Placement of updates after all checks of a step, so that a failed step leaves all state unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ...language.ir import Block, Operator, Role
from ..base import Pass

#: the suffix of a recomputed value's name: NAME@1, and NAME@1#16 of NAME#16 in slices
_COPY = re.compile(r"@\d+(?=(?:#\d+)?$)")


class CommitUpdates(Pass):
    """Move updates of parameters and state behind the last operator that checks input data.

    Otherwise running statistics would be updated before a loss finds an invalid label.  Moved updates keep their order;
    the batch statistics that they read live until then.  The block is unchanged if a checking operator reads updated
    state.
    """

    def run(self, block: Block) -> Block:
        """The block itself where every update is behind the last check already."""
        checking = checking_operators(block)
        if not checking:
            return block
        last = checking[-1]
        late = _late(block.operators[: last + 1])
        if not late or not late.isdisjoint(checking):
            return block
        first = [op for i, op in enumerate(block.operators[: last + 1]) if i not in late]
        moved = [block.operators[i] for i in sorted(late)]
        return block.with_operators([*first, *moved, *block.operators[last + 1 :]])


def _late(operators: Sequence[Operator]) -> set[int]:
    """Indices of the updates and of all that depends on them."""
    late: set[int] = set()
    names: set[str] = set()
    for i, op in enumerate(operators):
        if op.op.updates or any(v.name in names for v in op.reads()):
            late.add(i)
            names.update(v.name for v in op.writes())
    return late


def checking_operators(block: Block) -> list[int]:
    """Indices of the operators that check data that they read, in order.

    A check that an earlier operator has done on the same value (a gradient and its forward operator, a recomputed
    operator and the original) cannot fail.  Contents of constants, parameters and buffers are not checked here: they
    are the same in every step.
    """
    names = {v.name for v in block.persistent()}
    origin: dict[str, str] = {}
    answered: set[tuple] = set()
    checks = []
    for i, op in enumerate(block.operators):
        if op.role is Role.RECOMPUTE:
            origin.update((v.name, _COPY.sub("", v.name)) for v in op.writes())
        asked = {(origin.get(name, name), question) for name, question in _questions(op) if name not in names}
        if not asked <= answered:
            checks.append(i)
            answered |= asked
    return checks


def _questions(op: Operator) -> Iterator[tuple[str, object]]:
    for at, question in op.checks():
        v = op.inputs[at]
        if v is not None:
            yield v.name, question
