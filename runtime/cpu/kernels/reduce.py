"""Sums, means, norms and extremes over axes.

A tensor is seen as [a, k, b], reduced over the outer two or over the middle: (a, b) → k, or k → (a, b).  Sums over
columns run in blocks of 64 rows in the element type, which are added in float64, in parts whose number depends on the
shape alone.
"""

from __future__ import annotations

import math
from typing import Any

from ....language.ir import Operator
from ....language.types import Operands, TensorType, need
from ....ops.common import normal_axes
from ...shared.mathematics import larger
from ...shared.row_sums import dot, largest, total
from ...shared.texts import inline
from ..device.jit import kernel
from ..device.native import Call
from ..families import PARTS, Family, enough, family, floats, parts

_BLOCK = 64
#: columns that a thread sums at a time
_COLUMNS = 1 << 11
#: elements of a part of one long sum
_PART = 1 << 14
#: as many sums of parts are not worth waking a thread
_ALONE = 1 << 12
_SUM, _MEAN, _SQUARES, _NORM = 0, 1, 2, 3
_KINDS = {"ReduceSum": _SUM, "ReduceMean": _MEAN, "ReduceSumSquare": _SQUARES, "ReduceL2": _NORM,
          "ChannelsLastGlobalAveragePool": _MEAN}  # fmt: skip


@inline
def _result(s, count, kind):
    """The operator's result from a sum over `count` elements."""
    return s / count if kind == _MEAN else (math.sqrt(s) if kind == _NORM else s)


@inline
def _piece(item, width):
    """Row and columns [first, last) that are one item of the work on rows of `width` columns."""
    count = (width + _COLUMNS - 1) // _COLUMNS
    first = item % count * _COLUMNS
    return item // count, first, min(first + _COLUMNS, width)


def pieces(width: int) -> int:
    """Items of work that a row of `width` columns is cut into."""
    return -(-width // _COLUMNS)


@inline
def _add(v, to, first, last, kind):
    """Adds columns of a row to those of another: the elements, or their squares."""
    if kind >= _SQUARES:
        for j in range(first, last):
            to[j] += v[j] * v[j]
    else:
        for j in range(first, last):
            to[j] += v[j]


@kernel
def row_parts(x, sums, kind, begin, end):
    """Sums of the parts of rows: x [a, k, b], sums [k, parts]: of all a and a part of b."""
    n, count = x.shape[2], sums.shape[1]
    for item in range(begin, end):
        r, part = item // count, item % count
        s = 0.0
        for i in range(x.shape[0]):
            v = x[i, r][n * part // count : n * (part + 1) // count]
            s += dot(v, v) if kind >= _SQUARES else total(v)
        sums[r, part] = s


@kernel
def add_row_parts(sums, y, count, kind, begin, end):
    """The parts' sums in order, and what the operator makes of them."""
    for r in range(begin, end):
        s = 0.0
        for part in range(sums.shape[1]):
            s += sums[r, part]
        y[r] = _result(s, count, kind)


@kernel
def column_parts(x, block, sums, kind, begin, end):
    """Sums over parts of the rows of x [a, k, b] → sums [a, parts, b], some columns at a time."""
    n, count = x.shape[1], sums.shape[1]
    for item in range(begin, end):
        row, first, last = _piece(item, x.shape[2])
        i, part = row // count, row % count
        p, q = block[i, part], sums[i, part]
        for j in range(first, last):
            q[j] = 0
        low, high = n * part // count, n * (part + 1) // count
        for start in range(low, high, _BLOCK):
            for j in range(first, last):
                p[j] = 0
            for r in range(start, min(start + _BLOCK, high)):
                _add(x[i, r], p, first, last, kind)
            for j in range(first, last):
                q[j] += p[j]


@kernel
def add_column_parts(sums, y, count, kind, begin, end):
    """The parts' sums in order: [a, parts, b] → y [a · b]."""
    width = sums.shape[2]
    for item in range(begin, end):
        i, j = item // width, item % width
        s = 0.0
        for part in range(sums.shape[1]):
            s += sums[i, part, j]
        y[item] = _result(s, count, kind)


@kernel
def short_columns(x, y, kind, begin, end):
    """Sums over the middle axis of x [a, k, b], k at most `_BLOCK`, → y [a, b], some columns at a time."""
    for item in range(begin, end):
        i, first, last = _piece(item, x.shape[2])
        out = y[i]
        for j in range(first, last):
            out[j] = 0
        for r in range(x.shape[1]):
            _add(x[i, r], out, first, last, kind)
        if kind == _MEAN:
            count = x.dtype.type(x.shape[1])
            for j in range(first, last):
                out[j] /= count
        if kind == _NORM:
            for j in range(first, last):
                out[j] = math.sqrt(out[j])


@kernel
def row_extremes(x, y, smallest, begin, end):
    """The largest of each row of x [a, k, b] over a and b, or the smallest."""
    for r in range(begin, end):
        m = x.dtype.type(0)
        for i in range(x.shape[0]):
            v = x[i, r]
            if smallest:
                extreme = -v[0]
                for j in range(v.size):
                    extreme = larger(extreme, -v[j])
            else:
                extreme = largest(v)
            m = extreme if i == 0 else larger(m, extreme)
        y[r] = -m if smallest else m


@kernel
def column_extremes(x, y, smallest, begin, end):
    """Over the middle axis of x [a, k, b] → y [a, b], some columns at a time."""
    for item in range(begin, end):
        i, first, last = _piece(item, x.shape[2])
        out = y[i]
        for j in range(first, last):
            out[j] = x[i, 0, j]
        for r in range(1, x.shape[1]):
            v = x[i, r]
            if smallest:
                for j in range(first, last):
                    out[j] = -larger(-out[j], -v[j])
            else:
                for j in range(first, last):
                    out[j] = larger(out[j], v[j])


def form(op: Operator) -> tuple[bool, tuple[int, int, int]] | None:
    """Whether the middle axis is reduced, and x as [a, k, b]; None where the axes are in more groups than that."""
    rule: Any = op.op
    shape = op.inputs[0].shape  # type: ignore[union-attr]
    pools = op.op.name == "ChannelsLastGlobalAveragePool"
    axes = range(1, len(shape) - 1) if pools else normal_axes(rule.axes, len(shape), rule)
    groups: list[tuple[bool, int]] = []
    for i, n in enumerate(shape):
        if n == 1:
            continue
        if groups and groups[-1][0] == (i in axes):
            groups[-1] = (groups[-1][0], groups[-1][1] * n)
        else:
            groups.append((i in axes, n))
    reduced, sizes = [g[0] for g in groups], [g[1] for g in groups]
    if reduced in ([], [False]):  # over axes of one element
        return True, (1, 1, math.prod(sizes))
    if reduced == [True]:
        return False, (1, 1, sizes[0])
    if reduced == [False, True]:
        return False, (1, sizes[0], sizes[1])
    if reduced == [True, False]:
        return True, (1, sizes[0], sizes[1])
    if reduced == [False, True, False]:
        return True, (sizes[0], sizes[1], sizes[2])
    return (False, (sizes[0], sizes[1], sizes[2])) if reduced == [True, False, True] else None


def _form(op: Operator) -> tuple[bool, tuple[int, int, int]]:
    result = need(form(op))
    return result


class Reductions(Family):
    """The base of sums and extremes."""

    def accepts(self, op: Operator) -> bool:
        """Floats; columns enough to fill vectors."""
        x: Any = op.inputs[0]
        plan = form(op) if x.size else None
        return floats(op) and plan is not None and (not plan[0] or plan[1][2] >= enough(16))


@family(*_KINDS)
class Sums(Reductions):
    """Sums, means, sums of squares and their roots."""

    def parts(self, op: Operator) -> tuple[bool, tuple[int, int, int], int]:
        """The form, and how many parts the sums have."""
        columns, (a, k, b) = _form(op)
        if columns:
            return columns, (a, k, b), parts(k)
        return columns, (a, k, b), max(1, min(PARTS, a * b // _PART)) if k < PARTS else 1

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """The parts' sums; for columns those of a block as well."""
        columns, (a, k, b), count = self.parts(op)
        if not columns:
            return (TensorType("f64", (k, count)),)
        if k <= _BLOCK:
            return ()
        sums = TensorType("f64", (a, count, b))
        return sums, sums.with_dtype(op.inputs[0].dtype)  # type: ignore[union-attr]

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """The parts, then their sums."""
        columns, (a, k, b), count = self.parts(op)
        kind, x, y, sums = _KINDS[op.op.name], ins[0].reshape(a, k, b), outs[0].reshape(-1), (*scratch, None)[0]
        if not columns:
            first = row_parts.call(x, sums, kind, work=k * count)
            return [first, add_row_parts.call(sums, y, a * b, kind, work=k, parallel=k > _ALONE)]
        if sums is None:
            return [short_columns.call(x, y.reshape(a, b), kind, work=a * pieces(b))]
        first = column_parts.call(x, scratch[1], sums, kind, work=a * count * pieces(b))
        return [first, add_column_parts.call(sums, y, k, kind, work=a * b, parallel=a * b > _ALONE)]


@family("ReduceMax", "ReduceMin")
class Extremes(Reductions):
    """NaN where there is one, as on NumPy."""

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        columns, (a, k, b) = _form(op)
        x, smallest = ins[0].reshape(a, k, b), int(op.op.name == "ReduceMin")
        if not columns:
            return [row_extremes.call(x, outs[0].reshape(-1), smallest, work=k)]
        return [column_extremes.call(x, outs[0].reshape(a, b), smallest, work=a * pieces(b))]
