"""Triangles, diagonals, one-hot, reversed sequences: an item finds its source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import need
from ..families import SharedFamily, family
from ..texts import Divisor, Fixed, Own, Work, inline, kernel, report
from ..trouble import INDEX_OUTSIDE, STATUS


@kernel(rows=True)
def triangle(x, y, height, diagonal, upper, row, begin, end):
    """x on one side of a diagonal of matrices, else zero."""
    first, zero = row % height + diagonal, x.dtype.type(0)
    for c in range(begin, end):
        inside = c >= first if upper else c <= first
        y[row, c] = x[row, c] if inside else zero


@kernel(rows=True)
def diagonal(y, values, at, row, begin, end):
    """The second of two values on a diagonal, else the first."""
    for c in range(begin, end):
        y[row, c] = values[1] if c == row + at else values[0]


@kernel(rows=True)
def one_hot(indices, y, values, each, depth, row, begin, end):
    """The second of two values at the indices [outer, columns], else the first; y [outer · depth, columns]."""
    for c in range(begin, end):
        index, here = int(indices[row // each, c]), row % each
        y[row, c] = values[1] if index == here or index == here - depth else values[0]


@inline
def _turned(at, length, steps, status):
    """Where the element at a place of a sequence comes from; its own place where the length is none, which is
    reported."""
    fits = length >= 0 and length <= steps
    if not fits:
        report(status, INDEX_OUTSIDE, length, steps)
    return length - 1 - at if fits and at < length else int(at)


@kernel(rows=True)
def turned(x, lengths, y, second, sizes, batch, status, row, begin, end):
    """The first elements of each sequence the other way round; x [sizes], batches along its axis number `batch`."""
    i, j = row // second, row % second
    source = int(row)
    if batch == 0:
        source = i * sizes[1] + _turned(j, int(lengths[i]), sizes[1], status)
    else:
        source = _turned(i, int(lengths[j]), sizes[0], status) * sizes[1] + j
    for c in range(begin, end):
        y[row, c] = x[source, c]


@family("Trilu", "Eye", "OneHot", "ReverseSequence")
class Selections(SharedFamily):
    """Elements, or rows of them, as words."""

    def accepts(self, op: Operator) -> bool:
        """All element types; on a processor only where it takes less time than NumPy does."""
        y, enough = need(op.outputs[0]), self.place.enough
        if self.place.device:
            return op.op.name != "OneHot" or self.place.serves(op)
        sequences = op.op.name == "ReverseSequence" and math.prod(y.shape[2:]) >= enough(16)
        return (sequences or op.op.name == "Trilu") and y.size >= enough()

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """Words of the output in order."""
        rule: Any = op.op
        y, words, kind = need(outs[0]), self.place.words, need(op.outputs[0]).type.numpy
        if not y.size:
            return []
        if rule.name == "ReverseSequence":
            a, b = words(math.prod(y.shape[2:]), ins[0], y)
            sizes = np.array(y.shape[:2], np.uint32)
            operands = a, ins[1], Own(b), Divisor(y.shape[1]), sizes, Fixed(rule.batch_axis), STATUS
            return [turned(*operands, work=b.size, per=b.shape[1])]
        per = math.prod(y.shape[rule.axis % y.ndim + 1 :]) if rule.name == "OneHot" else y.shape[-1]
        *before, b = (v.reshape(-1, per) for v in words(1, *ins[: rule.name == "Trilu"], y))
        more = {"work": y.size, "per": per}
        if rule.name == "Trilu":
            beyond = max(y.shape[-2:])  # diagonals further away than that are alike
            k = min(max(rule.k, -beyond), beyond)
            return [triangle(*before, Own(b), Divisor(y.shape[-2]), k, Fixed(int(bool(rule.upper))), **more)]
        if rule.name == "Eye":
            return [diagonal(Own(b), _words(kind, 0, 1), rule.k, **more)]
        values = _words(kind, rule.off, rule.on)
        return [one_hot(ins[0].reshape(-1, per), Own(b), values, Divisor(rule.depth), rule.depth, **more)]


def _words(kind: np.dtype, *values: float) -> np.ndarray:
    """Elements as words."""
    return np.array(values).astype(kind).view(f"u{kind.itemsize}")
