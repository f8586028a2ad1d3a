"""Gathers' gradients, sums of rows and scatters that reduce; sums in the order of the indices, which are sorted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import FLOATS, TensorType, need, present
from ....ops.communication.base import doublings
from ....ops.communication.row_sums import RowSums
from ...shared.families import SharedFamily
from ...shared.kernels.index import HOW, MOST, NOWHERE, Form, form_of, how, numbered, together
from ...shared.texts import Divisor, Fixed, Own, inline, kernel
from ..code.python_kernels import words
from ..code.sorting import sort, sort_scratch, sums, sums_scratch
from ..code.strided import copy
from ..device.kernel import C_TYPES, Buffer, Fill
from ..families import Buffers, family
from .loops import added, computed


@kernel
def part_numbers(indices, rows, size, first, here, begin, end):
    """The rows of a part of a table that indices name; what lies elsewhere is of no row."""
    for i in range(begin, end):
        row = indices[i] % size - first
        rows[i] = row if row >= 0 and row < here else NOWHERE


@inline(
    c="""template <class X, class I, class N> DEVICE void keep_last(X&& x, I at, N number)
{
    atomicMax(&x.p[at.v], (int)number.v);
}
"""
)
def keep_last(x, at, number):
    """The largest number at a place."""
    x[at] = number


@kernel
def last_of_each(rows, last, begin, end):
    """The last of the updates of each row."""
    for i in range(begin, end):
        if rows[i] >= 0:
            keep_last(last, rows[i], i)


@kernel(rows=True)
def put(x, updates, last, y, row, begin, end):
    """Rows of the updates where there are any, else those of x."""
    at = last[row]
    if at < 0:
        for c in range(begin, end):
            y[row, c] = x[row, c]
    else:
        for c in range(begin, end):
            y[row, c] = updates[at, c]


@family("GatherGrad", "GatherNDGrad", "GatherElementsGrad")
class GatherGradients(SharedFamily):
    """(indices, dy) → sums of the rows of dy."""

    def accepts(self, op: Operator) -> bool:
        """Floats; numbers of rows and indices have 30 bits."""
        return need(op.outputs[0]).dtype in FLOATS and form_of(op).fits

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Buffers of the sort and of the sums."""
        form = form_of(op)
        return *sort_scratch(form.count), *sums_scratch(form.count, form.columns, need(op.outputs[0]).dtype)

    def works(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Any]:
        """Zeros; numbers, sorted; sums."""
        indices, dy, dx = present(ins[0], ins[1], outs[0])
        if not dx.size or not dy.size:
            return [Fill(dx)] * bool(dx.size)
        form = form_of(op)
        more, keys, order = sort(scratch[:5], form.size)
        added_up = sums(keys, order, dy, dx, scratch[5], (form.outer, form.size, form.inner))
        return [Fill(dx), numbered(op, indices, scratch[0]), *more, *added_up]


@kernel
def reduced(keys, order, updates, y, code, columns, inner, begin, end):
    """Each element of y [outer, size, inner] with the updates [outer, count, inner] of its row, in the order of their
    numbers: by the thread of the first of them."""
    for i in range(begin, end):
        at, column = i // columns, i % columns
        o, c, key = column // inner, column % inner, keys[at]
        if key >= 0 and (at == 0 or keys[at - 1] != key):
            a = y[o, key, c]
            while at < keys.size and keys[at] == key:
                a = together(a, updates[o, order[at], c], code)
                at += 1
            y[o, key, c] = a


def reduce_rows(how: str, updates: Buffer, y: Buffer, form: Form, scratch: Sequence[Buffer]) -> list[Any]:
    """Calls that add (or so) updates to rows of y, whose numbers scratch[0] has."""
    calls, keys, order = sort(scratch, form.size)
    shaped = (v.reshape(form.outer, -1, form.inner) for v in (updates, y))
    sizes = Fixed(HOW[how]), Divisor(form.columns), Divisor(form.inner)
    return [*calls, reduced(keys, order, *shaped, *sizes, work=form.count * form.columns)]


@family("RowSums")
class RowsOfRanks(SharedFamily):
    """(indices, dy) → a part of the sum of all ranks' gradients of a table: rank by rank, in the tree of `TreeSum`."""

    def accepts(self, op: Operator) -> bool:
        return max(op.of(RowSums).rows, need(op.inputs[0]).size) < MOST

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """The buffers of sorting, and a sum for each level of the tree."""
        rule, n = op.of(RowSums), need(op.inputs[0]).size // op.of(RowSums).parts
        levels = TensorType(need(op.outputs[0]).dtype, (doublings(rule.parts) + 1, rule.rows * rule.inner))
        return (*sort_scratch(n), levels)

    def works(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Any]:
        rule, (indices, dy, y) = op.of(RowSums), present(ins[0], ins[1], outs[0])
        *spare, levels = scratch
        n, each = indices.size // rule.parts, levels.shape[1]
        calls: list[Any] = []

        def add_up(low: int, high: int, level: int) -> None:
            """The sum of parts `low` to `high`, in that level's."""
            sums = levels.at(level * each, [each])
            if high - low > 1:
                middle = low + (1 << doublings(high - low) - 1)
                add_up(low, middle, level)
                add_up(middle, high, level + 1)
                calls.extend(computed(added, y.dtype, [sums, levels.at((level + 1) * each, [each])], [sums]))
                return
            calls.append(Fill(sums))
            if n and rule.rows:
                mine = indices.reshape(-1).at(low * n, [n])
                calls.append(part_numbers(mine, spare[0], rule.shape[0], rule.first, rule.rows, work=n))
                part = dy.reshape(-1).at(low * n * rule.inner, [n * rule.inner])
                calls.extend(reduce_rows("add", part, sums, Form(1, rule.rows, rule.inner, n), spare))

        if y.size:
            add_up(0, rule.parts, 0)
            calls += copy(y, levels.at(rule.start - rule.first * rule.inner, [y.size]))
        return calls


@family("ScatterND", "ScatterElements", "AddRows")
class Scatters(SharedFamily):
    """(x, indices, updates) → x with rows or elements replaced, or reduced."""

    def accepts(self, op: Operator) -> bool:
        """All element types, those with arithmetic for reductions; numbers of rows and indices have 30 bits."""
        return form_of(op).fits and (how(op) == "none" or need(op.outputs[0]).dtype in {*C_TYPES} - {"bool"})

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Row numbers, and the last update of each row; or what sorting takes."""
        form = form_of(op)
        if how(op) == "none":
            return TensorType("i32", (form.count,)), TensorType("i32", (form.size,))
        return sort_scratch(form.count)

    def works(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Any]:
        """Numbers; then who writes where."""
        x, indices, updates, y = present(*ins[:3], outs[0])
        form, (rows, last, *_) = form_of(op), scratch
        if not updates.size or not y.size:
            return copy(y, x)
        first = numbered(op, indices, rows)
        if how(op) != "none":
            return [*copy(y, x), first, *reduce_rows(how(op), updates, y, form, scratch)]
        a, b, c = words(form.inner, x, updates, y)
        chosen = last_of_each(rows, last, work=form.count)
        return [first, Fill(last, 0xFF), chosen, put(a, b, last, Own(c), work=c.size, per=c.shape[1])]
