"""Transpose: rows that stay whole are copied, all else goes through small tiles that fit the first-level cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .families import ENOUGH, Family, family
from .jit import Intrinsic, kernel
from .kernels_copy import copying, words

if TYPE_CHECKING:
    from ...ir import Operator

#: axes that the kernels count with, but for those of rows and tiles
_AXES = 3
#: rows and columns of a tile
_TILE = 16
#: rows and columns of what is turned in registers
_SQUARE = 16
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


def _turn(typing: Any, x: Any, at: Any, across: Any, y: Any, to: Any, down: Any) -> Any:
    """Rows at + i · across of x become columns of the rows to + i · down of y, by four rounds of swapped blocks."""
    from llvmlite import ir

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.VectorType(ir.IntType(32), _SQUARE)

        def place(array: Any, kind: Any, first: Any, step: Any, i: int) -> Any:
            data = context.make_array(kind)(context, builder, array).data
            offset = builder.add(first, builder.mul(step, ir.IntType(64)(i)))
            return builder.bitcast(builder.gep(data, [offset]), vector.as_pointer())

        rows = [builder.load(place(args[0], x, args[1], args[2], i), align=4) for i in range(_SQUARE)]
        step = 1
        while step < _SQUARE:
            first = [j if not j & step else _SQUARE + (j ^ step) for j in range(_SQUARE)]
            second = [j ^ step if not j & step else _SQUARE + j for j in range(_SQUARE)]
            masks = [ir.Constant(ir.VectorType(ir.IntType(32), _SQUARE), m) for m in (first, second)]
            for i in range(_SQUARE):
                if not i & step:
                    pair = rows[i], rows[i + step]
                    rows[i], rows[i + step] = (builder.shuffle_vector(*pair, m) for m in masks)
            step *= 2
        for i, row in enumerate(rows):
            builder.store(row, place(args[3], y, args[4], args[5], i), align=4)
        return context.get_dummy_value()

    from numba import types

    return types.none(x, at, across, y, to, down), generate


#: turn(x, at, across, y, to, down): a square of 32-bit words
turn: Any = Intrinsic(_turn)


@kernel
def squares(x, y, p, begin, end):
    """As `tiles`, for words of 32 bits: squares turned in registers, what is left at the edges one by one."""
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
        full, whole = first + (stop - first) // _SQUARE * _SQUARE, wide // _SQUARE * _SQUARE
        for c in range(0, whole, _SQUARE):
            for r in range(first, full, _SQUARE):
                turn(x, at + r + c * across, across, y, to + r * down + c, down)
        for r in range(full, stop):
            for c in range(whole):
                y[to + r * down + c] = x[at + r + c * across]
        for r in range(first, stop):
            for c in range(whole, wide):
                y[to + r * down + c] = x[at + r + c * across]


def plan(shape: Sequence[int], perm: Sequence[int]) -> tuple[Any, Any, int] | None:
    """(kernel, its numbers, pieces of work), or (None, a box for `copying`, 0) where rows stay whole.

    None where there are too many axes, or nothing moves.
    """
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
        return None, (made, in_x, in_y, 0, 0), 0
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
        if run is None:
            return [copying(words(ins[0]), words(outs[0]), numbers)]
        word = _WORDS[ins[0].dtype.itemsize]
        run = squares if run is tiles and word is np.uint32 else run
        return [run.call(*(a.reshape(-1).view(word) for a in (ins[0], outs[0])), numbers, work=work)]
