"""State is written once nothing in the step can fail any more, so that a failed step leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...language.ir import Block, Operator, Role
from ..base import Pass


@dataclass(frozen=True)
class CommitUpdates(Pass):
    """Move updates of parameters and state behind the last operator that may refuse what it was fed.

    Running statistics would otherwise have moved before a loss finds a label that is no class.  What moves keeps its
    order; the batch statistics that it reads live until then.  A block stays as it is where one of the operators that
    may fail reads updated state.
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
    """Indices of the operators that may refuse what they read, in order.

    One that asks what an earlier one has asked of the same value (a gradient what its forward operator has, a
    recomputed operator what the first has) cannot fail any more.  Contents of constants, parameters and buffers are
    not in question: they are the same in every step.
    """
    known = {v.name for v in block.persistent()}
    origin: dict[str, str] = {}
    answered: set[tuple] = set()
    found = []
    for i, op in enumerate(block.operators):
        if op.role is Role.RECOMPUTE:
            origin.update((v.name, v.name.rpartition("@")[0]) for v in op.writes())
        asked = {(origin.get(name, name), question) for name, question in _questions(op) if name not in known}
        if not asked <= answered:
            found.append(i)
            answered |= asked
    return found


def _questions(op: Operator) -> Iterator[tuple[str, object]]:
    for at, question in op.checks():
        v = op.inputs[at]
        if v is not None:
            yield v.name, question
