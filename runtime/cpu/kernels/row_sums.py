"""RowSums: the entries of each row in a list, and a stack of the sums that wait for their neighbour in the tree."""

from __future__ import annotations

from ....language.ir import Operator
from ....language.types import Operands, TensorType
from ....ops.communication.base import doublings
from ....ops.communication.row_sums import RowSums as RowSumsOp
from ...shared.texts import inline
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, family, floats
from .copy import filling


@kernel
def list_rows(indices, table, first, heads, following, begin, end):
    """For each row from `first` on, the first entry that took it, and for each entry the following one; -1: none."""
    for row in range(heads.size):
        heads[row] = -1
    for k in range(indices.size):
        i = indices.size - 1 - k
        row = (indices[i] + table if indices[i] < 0 else indices[i]) - first
        if row >= 0 and row < heads.size:
            following[i] = heads[row]
            heads[row] = i


@inline
def _join(stack, low, begin, end):
    """The sum of two neighbours."""
    a, b = stack[low], stack[low + 1]
    for c in range(begin, end):
        a[c] = a[c] + b[c]


@inline
def _height(a, b):
    """The height of the smallest branch of the tree that holds two parts."""
    height, apart = 0, a ^ b
    while apart:
        height, apart = height + 1, apart >> 1
    return height


@kernel
def sum_rows(heads, following, dy, y, stack, skipped, each, begin, end):
    """y, which holds zeros, from the entries of each row: columns [begin, end).  Row r begins at element
    r · columns - skipped.  A part that has no entry would add zeros: it is left out of the tree.

    `waiting`: a bit for each sum on the stack but the first: the height at which it meets the one below it.
    """
    columns = dy.shape[1]
    for row in range(heads.size):
        i = heads[row]
        if i < 0:
            continue
        depth, owner, waiting = -1, -1, 0
        while i >= 0:
            if i // each != owner:
                if owner >= 0:
                    meets = 1 << _height(owner, i // each)
                    while waiting & (meets - 1):
                        depth -= 1
                        waiting &= waiting - 1
                        _join(stack, depth, begin, end)
                    waiting |= meets
                owner, depth = i // each, depth + 1
                top = stack[depth]
                for c in range(begin, end):
                    top[c] = 0
            top, x = stack[depth], dy[i]
            for c in range(begin, end):
                top[c] = top[c] + x[c]
            i = following[i]
        while depth:
            depth -= 1
            _join(stack, depth, begin, end)
        at, top = row * columns - skipped, stack[0]
        for c in range(max(begin, -at), min(end, y.size - at)):
            y[at + c] = top[c]


@family("RowSums")
class RowSums(Family):
    """The numerics' sums, of the rows that were taken alone."""

    def accepts(self, op: Operator) -> bool:
        return floats(op) and op.op.inner >= 32  # type: ignore[attr-defined]

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """The lists, and a row for each level of the tree."""
        rule = op.of(RowSumsOp)
        stack = TensorType(next(op.writes()).dtype, (doublings(rule.parts) + 1, rule.inner))
        return TensorType("i64", (rule.rows,)), TensorType("i64", (next(op.reads()).size,)), stack

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """Zeros; the lists; every thread adds up its own columns."""
        rule = op.of(RowSumsOp)
        indices, y = ins[0].reshape(-1), outs[0]
        calls = [filling(y, 0)]
        if not indices.size or not y.size:
            return calls
        heads, following, stack = scratch
        dy = ins[1].reshape(-1, rule.inner)
        calls.append(list_rows.call(indices, rule.shape[0], rule.first, heads, following, work=1))
        operands = (heads, following, dy, y, stack, rule.start - rule.first * rule.inner)
        return [*calls, sum_rows.call(*operands, indices.size // rule.parts, work=rule.inner)]
