"""Copies of boxes of elements: concatenation, slicing, padding, tiling.

Every one of them is: for each place of a grid, element (or run of elements) at an offset of the input to an offset of
the output, with strides of any sign, or 0.  The grid is reduced to as few axes as possible first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import Operands
from ...shared.boxes import Box, boxes, grid
from ..device.jit import kernel
from ..device.native import Call
from ..families import FAMILIES, Family, enough, family

#: axes of a grid apart from that of the runs
AXES = 3
#: elements of a run that one thread takes at a time
_RUN = 1 << 13
#: bytes of an element → what is moved in its place
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@kernel
def copy(x, y, p, begin, end):
    """Places times pieces of runs.

    `p`: sizes of three axes, their strides in x, in y, then the run's length and strides; offsets in x and y, pieces of
    a run; places along the third axis that are taken together, and how many such groups there are.
    """
    run, sx, sy, pieces, group, groups = p[3, 0], p[3, 1], p[3, 2], p[4, 2], p[5, 0], p[5, 1]
    for item in range(begin, end):
        first = item % pieces * _RUN
        last = min(first + _RUN, run)
        place = item // pieces
        low = place % groups * group
        place = place // groups
        i, j = place // p[0, 1], place % p[0, 1]
        at = p[4, 0] + i * p[1, 0] + j * p[1, 1]
        to = p[4, 1] + i * p[2, 0] + j * p[2, 1]
        for k in range(low, min(low + group, p[0, 2])):
            a, b = at + k * p[1, 2], to + k * p[2, 2]
            if sx == 1 and sy == 1:
                for c in range(first, last):
                    y[b + c] = x[a + c]
            elif sx == 0 and sy == 1:
                v = x[a]
                for c in range(first, last):
                    y[b + c] = v
            else:
                for c in range(first, last):
                    y[b + c * sy] = x[a + c * sx]


@kernel
def fill(y, value, begin, end):
    """The bits of `value` everywhere: pieces of `_RUN` elements."""
    for j in range(begin * _RUN, min(end * _RUN, y.size)):
        y[j] = value[0]


def padded(values: Sequence[int], fill: int) -> list[int]:
    """Numbers of the axes of a grid, with `fill` for those that it lacks."""
    return [fill] * (AXES - len(values)) + list(values)


def copying(x: np.ndarray, y: np.ndarray, box: Box) -> Call:
    """The call that copies a box from x to y, vectors of words."""
    *outer, (run, sx, sy) = grid(box)
    sizes, in_x, in_y = (padded([a[i] for a in outer], n) for i, n in enumerate((1, 0, 0)))
    pieces = -(-run // _RUN)
    group = max(1, _RUN // run)
    groups = -(-sizes[2] // group)
    rest = [[run, sx, sy], [box[3], box[4], pieces], [group, groups, 0]]
    numbers = np.array([sizes, in_x, in_y, *rest], np.int64)
    return copy.call(x, y, numbers, work=sizes[0] * sizes[1] * groups * pieces)


def words(a: np.ndarray) -> np.ndarray:
    """An array's elements as words."""
    return a.reshape(-1).view(WORDS[a.dtype.itemsize])


def filling(y: np.ndarray, value: float) -> Call:
    """The call that fills y with one value."""
    to = words(y)
    return fill.call(to, words(np.array([y.dtype.type(value)])), work=-(-to.size // _RUN))


def copied(y: np.ndarray, x: np.ndarray) -> list[Call]:
    """The call that copies all of x to y, where it is not there."""
    there = not y.size or x.ctypes.data == y.ctypes.data
    return [] if there else [copying(words(x), words(y), ((y.size,), (1,), (1,), 0, 0))]


FAMILIES.copied, FAMILIES.filled = copied, lambda y, value: [filling(y, value)]
FAMILIES.words = lambda run, *operands: [words(a).reshape(-1, run) for a in operands]


@family("Concat", "Split", "Slice", "SliceGrad", "Pad", "Expand", "Tile", "Identity", "Reshape", "Fill")
class Copies(Family):
    """Copies of all element types."""

    def accepts(self, op: Operator) -> bool:
        """Large ones of few axes that move by themselves; where they are views, nothing runs anyway."""
        values = [*op.reads(), *op.writes()]
        if max(v.size for v in values) < enough() or any(v.type.numpy.itemsize not in WORDS for v in values):
            return False
        if op.op.name == "Pad" and op.op.mode != "constant":  # type: ignore[attr-defined]
            return False
        return all(len(grid(box)) <= AXES + 1 for _, _, box in boxes(op))

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """One call for each box; before it, one that fills what no box covers."""
        rule: Any = op.op
        calls = []
        if rule.name in ("SliceGrad", "Pad", "Fill"):
            value = 0 if rule.name == "SliceGrad" else rule.value
            calls.append(filling(outs[0], value))
        for i, o, box in boxes(op):
            if math.prod(box[0]):
                calls.append(copying(words(ins[i]), words(outs[o]), box))
        return calls
