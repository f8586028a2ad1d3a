"""Gather and scatter operators: rows that indices name, of one element or more, moved as words.

An index that is out of range is reported and skipped: nothing is taken, added or put.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import need, present
from ....ops.indexing.scatter import strides
from ..boxes import grid
from ..families import SharedFamily, family
from ..texts import Divisor, Fixed, Own, Work, inline, kernel, report
from ..trouble import INDEX_OUTSIDE, STATUS

#: rows and indices are fewer than
MOST = 1 << 30
#: the number of no row: out of range of every axis, from its end too, and sorted behind the others
NOWHERE = 0x80FFFFFF - (1 << 32)

#: forms of indices: one batch of one number each; some of some numbers; some with the same numbers
_PLAIN, _MANY, _ALIKE = range(3)
#: what is done with updates → its number; "none" keeps the last
HOW = {"add": 0, "mul": 1, "max": 2, "min": 3, "none": 4}


@inline
def place(index, size, status):
    """An index that counts from the end where it is negative; -1 for one out of range, which is reported."""
    position = index + size if index < 0 else index
    if position < 0 or position >= size:
        report(status, INDEX_OUTSIDE, index, size)
        return -1
    return position


@inline
def _named(indices, i, batch, sizes, status):
    """The row that the i-th indices name, in row-major order of `sizes` behind the batch; -1 for none."""
    row = int(batch)
    for d in range(sizes.size):
        at = place(indices[i * sizes.size + d], sizes[d], status)
        if at < 0:
            return -1
        row = row * sizes[d] + at
    return row


@kernel(rows=True)
def gather(x, indices, y, sizes, form, each, status, row, begin, end):
    """Rows of x that indices name, `each` in a batch."""
    at = -1
    if form == _PLAIN:
        at = place(indices[row], sizes[0], status)
    else:
        batch = row // each
        at = _named(indices, row - batch * indices.size if form == _ALIKE else row, batch, sizes, status)
    if at >= 0:
        for c in range(begin, end):
            y[row, c] = x[at, c]


@inline
def _element(indices, row, c, first, form, status):
    """The number of the element that an index names, -1 for none.  `form`: the axis' size, how far elements are apart
    along it, and along the rows."""
    at = place(indices[row, c], form[0], status)
    return first + at * form[1] + c * form[2] if at >= 0 else -1


@inline
def _lying(row, sizes, steps):
    """Where a row of indices begins; sizes of axes but the first, and how far neighbours are apart; last first."""
    first, rest = 0, row
    for d in range(sizes.size):
        first += rest % sizes[d] * steps[d]
        rest = rest // sizes[d]
    return first + rest * steps[sizes.size]


@kernel(rows=True)
def gather_elements(x, indices, y, sizes, steps, form, status, row, begin, end):
    """Elements that rows of indices name along one axis."""
    first = _lying(row, sizes, steps)
    for c in range(begin, end):
        at = _element(indices, row, c, first, form, status)
        if at >= 0:
            y[row, c] = x[at]


@kernel(rows=True)
def element_numbers(indices, rows, sizes, steps, form, status, row, begin, end):
    """The numbers of these elements."""
    first = _lying(row, sizes, steps)
    for c in range(begin, end):
        at = _element(indices, row, c, first, form, status)
        rows[row, c] = at if at >= 0 else NOWHERE


@kernel
def row_numbers(indices, rows, sizes, each, status, begin, end):
    """The rows that indices [count, depth] name, `each` in a batch."""
    for i in range(begin, end):
        row = _named(indices, i, i // each, sizes, status)
        rows[i] = row if row >= 0 else NOWHERE


@inline
def together(a, b, code):
    """An element with an update, by the number of what is done with both (see `HOW`); NaN where one is."""
    if code == 0:
        return a + b
    if code == 1:
        return a * b
    if code == 2:
        return a if a > b or a != a else b
    return a if code == 3 and (a < b or a != a) else b


@dataclass(frozen=True)
class Form:
    """Sizes outside of the rows, the number of rows, a row's elements, and how many are named."""

    outer: int
    size: int
    inner: int
    count: int

    @property
    def columns(self) -> int:
        """Elements that are beside each other in rows of the same number."""
        return self.outer * self.inner

    @property
    def fits(self) -> bool:
        """Whether the numbers of rows and indices have 30 bits."""
        return max(self.size, self.count) < MOST


def shapes(op: Operator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Those of an operator's indices, and of the tensor whose rows they name."""
    gradient = op.op.name.endswith("Grad")
    return need(op.inputs[not gradient]).shape, need(op.outputs[0] if gradient else op.inputs[0]).shape


def form_of(op: Operator) -> Form:
    """How an operator's indices name rows."""
    rule: Any = op.op
    indices, shape = shapes(op)
    if rule.name.endswith(("Elements", "ElementsGrad")):
        return Form(1, math.prod(shape), 1, math.prod(indices))
    if rule.name.endswith(("ND", "NDGrad")):
        front = getattr(rule, "batch_dims", 0) + indices[-1]
        return Form(1, math.prod(shape[:front]), math.prod(shape[front:]), math.prod(indices[:-1]))
    return Form(*split(shape, rule.axis), math.prod(indices))


def how(op: Operator) -> str:
    """What a scatter or a gradient does with updates."""
    reduction: str = op.op.options().get("reduction", "add")
    return reduction


def split(shape: Sequence[int], axis: int) -> tuple[int, int, int]:
    """Sizes before, along and behind an axis."""
    axis %= len(shape)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def lying(op: Operator) -> tuple[tuple[Any, ...], int]:
    """Operands that say where elements lie that indices name, and how many indices are in a row."""
    rule: Any = op.op
    indices, shape = shapes(op)
    axis, steps = rule.axis % len(shape), strides(shape)
    apart = [0 if d == axis else s for d, s in enumerate(steps)]
    *outer, (per, by, _) = grid((indices, apart, strides(indices), 0, 0))
    tables = [n for n, _, _ in outer[:0:-1]], [s for _, s, _ in outer[::-1]] or [0], (shape[axis], steps[axis], by)
    return (*(np.array(t, np.uint32) for t in tables), STATUS), per


def named(op: Operator) -> tuple[np.ndarray, int, int]:
    """The sizes that an operator's indices are within, how many are of a batch, and the indices' form."""
    rule: Any = op.op
    indices, shape = shapes(op)
    if not rule.name.endswith(("ND", "NDGrad")):
        return np.array([shape[rule.axis % len(shape)]], np.uint32), max(math.prod(indices), 1), _ALIKE
    batch, depth = getattr(rule, "batch_dims", 0), indices[-1]
    return np.array(shape[batch : batch + depth], np.uint32), max(math.prod(indices[batch:-1]), 1), _MANY


def numbered(op: Operator, indices: Any, rows: Any) -> Work:
    """The work that makes the numbers of rows (or elements) from an operator's indices."""
    if op.op.name.endswith(("Elements", "ElementsGrad")):
        operands, per = lying(op)
        flat = (v.reshape(-1, per) for v in (indices, rows))
        return element_numbers(*flat, *operands, work=rows.size, per=per)
    sizes, each, _ = named(op)
    return row_numbers(indices.reshape(-1), rows, sizes, Divisor(each), STATUS, work=rows.size)


@family("Gather", "GatherND", "GatherElements")
class Gathers(SharedFamily):
    """(x, indices) → rows, or elements."""

    def accepts(self, op: Operator) -> bool:
        """All element types; on a processor many elements (NumPy takes short rows as fast along an axis)."""
        form, enough = form_of(op), self.place.enough
        if self.place.device or not form.fits:
            return form.fits
        return (op.op.name != "Gather" or form.inner >= enough(16)) and need(op.outputs[0]).size >= enough()

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """Words of the output in order."""
        (x, indices), y = present(*ins[:2]), need(outs[0])
        if not y.size:
            return []
        if op.op.name == "GatherElements":
            operands, per = lying(op)
            a, b = self.place.words(1, x, y)
            to = Own(b.reshape(-1, per))
            return [gather_elements(a.reshape(-1), indices.reshape(-1, per), to, *operands, work=y.size, per=per)]
        sizes, each, form = named(op)
        a, b = self.place.words(form_of(op).inner, x, y)
        kind = Fixed(_PLAIN if sizes.size == 1 and b.shape[0] == each else form)
        operands = a, indices.reshape(-1), Own(b), sizes, kind, Divisor(each), STATUS
        return [gather(*operands, work=b.size, per=b.shape[1])]
