"""Gather and scatter operators and their gradients; sums in the order of the indices, as in NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import Array, Operands, present
from ...shared.texts import inline, report
from ...shared.trouble import INDEX_OUTSIDE
from ..device import native
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, enough, family, floats
from .copy import WORDS, copying, filling, words

#: columns of a piece of work of sums: each goes through all indices
_COLUMNS = 32


@inline
def _place(index, size, status):
    """An index that counts from the end where it is negative; -1 for one out of range, which is reported."""
    position = index + size if index < 0 else index
    if position < 0 or position >= size:
        report(status, INDEX_OUTSIDE, index, size)
        return -1
    return position


@kernel
def gather(x, indices, y, status, begin, end):
    """Rows of x [outer, n, inner] to y [outer, k, inner]; those whose index is out of range are left as they are."""
    k, inner = y.shape[1], y.shape[2]
    o, i = begin // k, begin % k
    for _ in range(begin, end):
        at = _place(indices[i], x.shape[1], status)
        if at >= 0:
            a, b = x[o, at], y[o, i]
            for c in range(inner):
                b[c] = a[c]
        i += 1
        if i == k:
            o, i = o + 1, 0


@kernel
def gather_gradient(indices, dy, dx, status, begin, end):
    """Adds the rows of dy [outer, k, inner] to those of dx [outer, n, inner]: pieces of `_COLUMNS` of outer · inner."""
    inner = dx.shape[2]
    low, high = begin * _COLUMNS, min(end * _COLUMNS, dx.shape[0] * inner)
    for o in range(low // inner, (high + inner - 1) // inner):
        first, last = max(low - o * inner, 0), min(high - o * inner, inner)
        for i in range(indices.size):
            at = _place(indices[i], dx.shape[1], status)
            if at >= 0:
                a, b = dy[o, i], dx[o, at]
                for c in range(first, last):
                    b[c] += a[c]


@kernel
def gather_elements(x, indices, y, status, begin, end):
    """y[r, j, c] = x[r, indices[r, j, c], c]: rows of [outer, k, inner]; x has the same outer and inner sizes."""
    k, inner = y.shape[1], y.shape[2]
    for item in range(begin, end):
        o, i = item // k, item % k
        for c in range(inner):
            at = _place(indices[o, i, c], x.shape[1], status)
            if at >= 0:
                y[o, i, c] = x[o, at, c]


@kernel
def gather_elements_gradient(indices, dy, dx, status, begin, end):
    """Adds dy at its places: outer rows [begin, end)."""
    for o in range(begin, end):
        for i in range(dy.shape[1]):
            for c in range(dy.shape[2]):
                at = _place(indices[o, i, c], dx.shape[1], status)
                if at >= 0:
                    dx[o, at, c] += dy[o, i, c]


def _split(shape: Sequence[int], axis: int) -> tuple[int, int, int]:
    """Sizes before, along and behind an axis."""
    axis %= len(shape)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


@family("Gather")
class Gathers(Family):
    """(x, indices) → rows of x, of all element types."""

    def accepts(self, op: Operator) -> bool:
        """Many elements, in rows of some length (NumPy takes single ones as fast)."""
        x, y = present(op.inputs[0], op.outputs[0])
        return y.size >= enough() and x.type.numpy.itemsize in WORDS and _split(x.shape, _axis(op))[2] >= enough(16)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        x, indices, y = ins[0], ins[1].reshape(-1), outs[0]
        outer, n, inner = _split(x.shape, _axis(op))
        a, b = words(x).reshape(outer, n, inner), words(y).reshape(outer, -1, inner)
        return [gather.call(a, indices, b, native.STATUS, work=outer * indices.size)]


def _axis(op: Operator) -> int:
    rule: Any = op.op
    return rule.axis


@family("GatherGrad")
class GatherGradients(Family):
    """(indices, dy) → the sums of the rows of dy."""

    def accepts(self, op: Operator) -> bool:
        y: Any = op.outputs[0]
        outer, _, inner = _split(y.shape, _axis(op))
        return floats(op) and outer * inner >= 32

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """Zeros, then every thread adds up its own columns."""
        return [filling(outs[0], 0), *self.adding(op, ins[0], ins[1], outs[0])]

    def adding(self, op: Operator, indices: Array, dy: Array, dx: Array) -> list[Call]:
        """dx += the rows of dy."""
        outer, n, inner = _split(dx.shape, _axis(op))
        operands = (indices.reshape(-1), dy.reshape(outer, -1, inner), dx.reshape(outer, n, inner), native.STATUS)
        return [gather_gradient.call(*operands, work=-(-outer * inner // _COLUMNS))] if dy.size else []


@family("AddRows")
class RowsAdded(GatherGradients):
    """(x, indices, dy) → x and the rows of dy."""

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """A copy, unless it is there, then every thread adds up its own columns."""
        x, y = ins[0], outs[0]
        there = x.ctypes.data == y.ctypes.data
        calls = [] if there else [copying(words(x), words(y), ((y.size,), (1,), (1,), 0, 0))]
        return [*calls, *self.adding(op, ins[1], ins[2], y)]


@family("GatherElements", "GatherElementsGrad")
class ElementGathers(Family):
    """Where indices and data have the same sizes but for the axis."""

    def accepts(self, op: Operator) -> bool:
        """Many elements; for gradients, rows to share out."""
        forward = op.op.name == "GatherElements"
        data: Any = op.inputs[0] if forward else op.outputs[0]
        indices: Any = op.inputs[1 if forward else 0]
        outer, _, inner = _split(data.shape, _axis(op))
        if indices.size < enough() or data.type.numpy.itemsize not in WORDS:
            return False
        alike = _split(indices.shape, _axis(op))[::2] == (outer, inner)
        return alike and (forward or floats(op))

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """Element by element."""
        if op.op.name == "GatherElements":
            x, indices, y = ins[0], ins[1], outs[0]
            a = words(x).reshape(_split(x.shape, _axis(op)))
            form = _split(indices.shape, _axis(op))
            operands = (a, indices.reshape(form), words(y).reshape(form), native.STATUS)
            return [gather_elements.call(*operands, work=form[0] * form[1])]
        indices, dy, dx = ins[0], ins[1], outs[0]
        form = _split(indices.shape, _axis(op))
        operands = (indices.reshape(form), dy.reshape(form), dx.reshape(_split(dx.shape, _axis(op))), native.STATUS)
        return [filling(dx, 0), gather_elements_gradient.call(*operands, work=form[0])]
