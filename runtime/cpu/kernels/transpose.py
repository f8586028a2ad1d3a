"""Transpose: contiguous rows are copied, others are transposed in small tiles that fit the first-level cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....language.types import Operands
from ....ops.indexing.scatter import strides
from ...shared.boxes import merged
from ...shared.texts import Intrinsic, inline
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, enough, family
from .copy import AXES, WORDS, copying, padded, words

if TYPE_CHECKING:
    from ....language.ir import Operator
    from ...shared.llvm import BaseContext, Generated, IRBuilder, Kind, Signature, TypingContext, Word

#: rows and columns of a tile
_TILE = 16
#: rows and columns of what is turned in registers
_SQUARE = 16


@inline
def _place(piece, p):
    """Offsets in x and y, and the rows [first, stop) from there, of a piece of work; `p` as in `tiles`."""
    outer, block = piece // p[4, 1], piece % p[4, 1]
    i = outer // p[0, 2] // p[0, 1]
    j = outer // p[0, 2] % p[0, 1]
    k = outer % p[0, 2]
    at = i * p[1, 0] + j * p[1, 1] + k * p[1, 2]
    to = i * p[2, 0] + j * p[2, 1] + k * p[2, 2]
    return at, to, block * _TILE, min((block + 1) * _TILE, p[3, 0])


@kernel
def tiles(x, y, p, begin, end):
    """Blocks of `_TILE` rows for each place along three axes.

    `p`: sizes of the three axes, their strides in x and in y; rows (stride 1 in x), their stride in y; columns (stride
    1 in y), their stride in x; blocks of rows.
    """
    down, wide, across = p[3, 1], p[3, 2], p[4, 0]
    for piece in range(begin, end):
        at, to, first, stop = _place(piece, p)
        for left in range(0, wide, _TILE):
            right = min(left + _TILE, wide)
            for c in range(left, right):
                for r in range(first, stop):
                    y[to + r * down + c] = x[at + r + c * across]


def _turn(typing: TypingContext, x: Kind, at: Kind, across: Kind, y: Kind, to: Kind, down: Kind) -> Generated:
    """Rows at + i · across of x become columns of the rows to + i · down of y, by four rounds of swapped blocks."""
    from llvmlite import ir

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Word]) -> Word:
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
    """`tiles` for words of 32 bits: blocks transposed in registers, and single elements at the edges."""
    down, wide, across = p[3, 1], p[3, 2], p[4, 0]
    for piece in range(begin, end):
        at, to, first, stop = _place(piece, p)
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


def _numbers(shape: Sequence[int], perm: Sequence[int]) -> tuple[np.ndarray, int]:
    """`p` of `tiles` for a permutation that moves the last axis, and how many pieces of work there are."""
    last = len(shape) - 1
    lengths = [shape[i] for i in perm]
    in_x, in_y = [strides(shape)[i] for i in perm], strides(lengths)
    row = perm.index(last)
    outer = [a for a in range(last) if a != row]
    blocks = -(-lengths[row] // _TILE)
    sizes, from_x, to_y = (padded([v[a] for a in outer], f) for v, f in ((lengths, 1), (in_x, 0), (in_y, 0)))
    rest = [[lengths[row], in_y[row], lengths[-1]], [in_x[-1], blocks, 0]]
    return np.array([sizes, from_x, to_y, *rest], np.int64), math.prod(sizes) * blocks


def _rows_stay(perm: Sequence[int]) -> bool:
    """Whether the last axis does not move: then rows are copied as they are."""
    return perm[-1] == len(perm) - 1


@family("Transpose")
class Transposition(Family):
    """Transposes of all element types, with up to five axes that move by themselves."""

    def accepts(self, op: Operator) -> bool:
        """Large ones that are no views."""
        x = op.inputs[0]
        if x is None or x.size < enough() or x.type.numpy.itemsize not in WORDS:
            return False
        shape, perm = merged(x.shape, op.op.perm)  # type: ignore[attr-defined]
        return 1 < len(shape) <= AXES + (1 if _rows_stay(perm) else 2)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """One call over words of the elements' size."""
        shape, perm = merged(ins[0].shape, op.op.perm)  # type: ignore[attr-defined]
        x, y = words(ins[0]), words(outs[0])
        if _rows_stay(perm):
            sizes, in_x = ([v[i] for i in perm] for v in (shape, strides(shape)))
            return [copying(x, y, (sizes, in_x, strides(sizes), 0, 0))]
        numbers, work = _numbers(shape, perm)
        run = squares if x.dtype == np.uint32 else tiles
        return [run.call(x, y, numbers, work=work)]
