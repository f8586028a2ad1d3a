"""Transpose: rows that stay whole are copied, all else goes through small tiles that fit the first-level cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .families import ENOUGH, Family, family
from .jit import kernel

if TYPE_CHECKING:
    from ...ir import Operator

#: axes that the kernels count with, but for those of rows and tiles
_AXES = 3
#: rows and columns of a tile
_TILE = 16
#: bytes of an element → what is moved in its place
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def merged(shape: Sequence[int], perm: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same permutation of as few axes as possible: axes of one element go, those that stay neighbours are one."""
    kept = [p for p in perm if shape[p] != 1]
    groups: list[list[int]] = []
    for p in kept:
        between = range(groups[-1][-1] + 1, p) if groups else ()
        if groups and p > groups[-1][-1] and all(shape[i] == 1 for i in between):
            groups[-1].append(p)
        else:
            groups.append([p])
    order = sorted(range(len(groups)), key=lambda i: groups[i][0])
    sizes = tuple(math.prod(shape[p] for p in groups[i]) for i in order)
    return sizes, tuple(order.index(i) for i in range(len(groups)))


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


@kernel
def rows(x, y, p, begin, end):
    """Rows of y, one after the other: `p` has the sizes of three axes and their strides in x, then a row's length."""
    width = p[2, 0]
    for row in range(begin, end):
        i = row // p[0, 2] // p[0, 1]
        j = row // p[0, 2] % p[0, 1]
        k = row % p[0, 2]
        at = i * p[1, 0] + j * p[1, 1] + k * p[1, 2]
        to = row * width
        for c in range(width):
            y[to + c] = x[at + c]


@kernel
def tiles(x, y, p, begin, end):
    """Blocks of `_TILE` rows for each place along three axes.

    `p`: sizes of the three axes, their strides in x and in y; rows (stride 1 in x), their stride in y; columns (stride
    1 in y), their stride in x; blocks of rows.
    """
    high, down, wide, across, blocks = p[3, 0], p[3, 1], p[3, 2], p[4, 0], p[4, 1]
    for piece in range(begin, end):
        outer = piece // blocks
        i = outer // p[0, 2] // p[0, 1]
        j = outer // p[0, 2] % p[0, 1]
        k = outer % p[0, 2]
        at = i * p[1, 0] + j * p[1, 1] + k * p[1, 2]
        to = i * p[2, 0] + j * p[2, 1] + k * p[2, 2]
        first = piece % blocks * _TILE
        stop = min(first + _TILE, high)
        for left in range(0, wide, _TILE):
            right = min(left + _TILE, wide)
            for c in range(left, right):
                for r in range(first, stop):
                    y[to + r * down + c] = x[at + r + c * across]


def plan(shape: Sequence[int], perm: Sequence[int]) -> tuple[Any, np.ndarray, int] | None:
    """(kernel, its numbers, pieces of work); None where there are too many axes, or nothing moves."""
    shape, perm = merged(shape, perm)
    made = [shape[p] for p in perm]
    in_x = [_strides(shape)[p] for p in perm]
    in_y = _strides(made)
    n = len(shape)
    if n < 2:
        return None
    if perm[-1] == n - 1:
        outer = list(range(n - 1))
        if len(outer) > _AXES:
            return None
        sizes, strides = _padded([made[a] for a in outer], 1), _padded([in_x[a] for a in outer], 0)
        return rows, np.array([sizes, strides, [made[-1], 0, 0]], np.int64), math.prod(made[:-1])
    row = perm.index(n - 1)
    outer = [a for a in range(n - 1) if a != row]
    if len(outer) > _AXES:
        return None
    blocks = -(-made[row] // _TILE)
    sizes, from_x, to_y = (_padded([v[a] for a in outer], f) for v, f in ((made, 1), (in_x, 0), (in_y, 0)))
    rest = [[made[row], in_y[row], made[-1]], [in_x[-1], blocks, 0]]
    numbers = [sizes, from_x, to_y, *rest]
    return tiles, np.array(numbers, np.int64), math.prod(made[a] for a in outer) * blocks


def _padded(values: Sequence[int], fill: int) -> list[int]:
    return [fill] * (_AXES - len(values)) + list(values)


@family("Transpose")
class Transposition(Family):
    """Of all element types, with up to five axes that move on their own."""

    def accepts(self, op: Operator) -> bool:
        """Large ones that are no views."""
        x = op.inputs[0]
        if x is None or x.size < ENOUGH or x.type.numpy.itemsize not in _WORDS:
            return False
        return plan(x.shape, op.op.perm) is not None  # type: ignore[attr-defined]

    def bind(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Any]:
        """One call over words of the elements' size."""
        found = plan(ins[0].shape, op.op.perm)  # type: ignore[attr-defined]
        assert found is not None
        run, numbers, work = found
        word = _WORDS[ins[0].dtype.itemsize]
        return [run.call(*(a.reshape(-1).view(word) for a in (ins[0], outs[0])), numbers, work=work)]
