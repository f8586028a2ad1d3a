"""Matrices of a few bits an element, dequantised a part at a time; an item is a block of a row, with one scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import FLOATS, need
from ....ops.linear.nbits import TABLES, DequantizeNBits, MatMulNBits, Packed
from ..families import SharedFamily, family
from ..texts import Absent, Fixed, Work, inline, kernel, lanes

#: forms of zero points: none, packed, floats; a table in their place
_NONE, _PACKED, _FLOAT, _TABLE = range(4)


@inline
def _nibbles(codes, out, column, stop, at, zero, scale):
    """Elements [column, stop) of a row of 4 bits an element, from an even column; the first is out[at]."""
    t = out.dtype.type
    z, s = t(zero), t(scale)
    first, pairs = column // 2, (stop - column) // 2
    for j in lanes(pairs):
        byte = codes[first + j]
        out[at + 2 * j] = (t(byte & 15) - z) * s
        out[at + 2 * j + 1] = (t(byte >> 4) - z) * s
    if (stop - column) % 2:
        out[at + 2 * pairs] = (t(codes[first + pairs] & 15) - z) * s


@inline
def _looked_up(codes, out, column, stop, at, table, scale):
    """Elements of a row whose codes stand for the 16 numbers of a table, the first of a byte in its high half."""
    t = out.dtype.type
    s, first = t(scale), column // 2
    for j in lanes((stop - column) // 2):
        byte = codes[first + j]
        out[at + 2 * j] = t(table[byte >> 4]) * s
        out[at + 2 * j + 1] = t(table[byte & 15]) * s


@inline
def _others(codes, out, column, stop, at, zero, scale, bits):
    """Elements of a row for other numbers of bits."""
    t = out.dtype.type
    z, s = t(zero), t(scale)
    mask = (1 << bits) - 1
    for k in lanes(column, stop):
        code = (int(codes[(k * bits) >> 3]) >> ((k * bits) & 7)) & mask
        out[at + (k - column)] = (t(code) - z) * s


@kernel(rows=True)
def dequantise(codes, scales, zeros, out, column, size, code, row, begin, end):
    """out [rows, columns] from codes [rows, bytes], scales [rows, blocks] and zero points (or the table [1, 16]), from
    a column on; `code`: four times the bits, and the form."""
    bits, form = code // 4, code % 4
    first, last, per = column // size, column + out.shape[1], 8 // bits
    for b in range(begin, end):
        block = first + b
        low, high = max(block * size, column), min((block + 1) * size, last)
        zero, scale = float(1 << (bits - 1)), scales[row, block]
        if form == _PACKED:
            zero = float((int(zeros[row, block // per]) >> (bits * (block % per))) & ((1 << bits) - 1))
        elif form == _FLOAT:
            zero = float(zeros[row, block])
        if form == _TABLE:
            _looked_up(codes[row], out[row], low, high, low - column, zeros[0], scale)
        elif bits == 4:
            _nibbles(codes[row], out[row], low, high, low - column, zero, scale)
        else:
            _others(codes[row], out[row], low, high, low - column, zero, scale, bits)


def part_of(rule: Packed, sources: Sequence[Any], out: Any, row: int, column: int) -> Work:
    """The work of dequantising a part, from a row and a column on, of (codes, scales, zero points) as matrices."""
    rows, width = out.shape
    codes, scales, zeros = (None if a is None else a[row : row + rows] for a in sources)
    form = _NONE if zeros is None else _PACKED if zeros.dtype in ("u8", np.uint8) else _FLOAT
    if rule.table:
        form, zeros = _TABLE, TABLES[rule.table][None]
    blocks = -(-(column + width) // rule.block_size) - column // rule.block_size
    more = {"work": rows * blocks, "per": blocks, "lanes": min(rule.block_size, width) * rule.bits // 8}
    zeros = Absent(2) if zeros is None else zeros
    return dequantise(codes, scales, zeros, out, column, rule.block_size, Fixed(4 * rule.bits + form), **more)


class FewBits(SharedFamily):
    """The base of both families."""

    def fits(self, op: Operator, at: int) -> bool:
        """Whether kernels compute with the types of scales, input number `at`, zero points, and the output."""
        values, kind = (*op.inputs[at : at + 2], *op.outputs), need(op.outputs[0]).dtype
        kinds = FLOATS if self.place.device else {"f32", "f64"} & {kind}
        return all(v is None or v.dtype in (*kinds, "u8") for v in values)


@family("DequantizeNBits")
class Dequantised(FewBits):
    """(codes, scales, zero points?) → W."""

    def accepts(self, op: Operator) -> bool:
        """Floats, enough of them."""
        return need(op.outputs[0]).size >= self.place.enough() and self.fits(op, 1)

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """The whole matrix at once."""
        rule = op.of(DequantizeNBits)
        matrices = [None if a is None else a.reshape(-1, a.shape[-1]) for a in ins[:3]]
        return [part_of(rule, matrices, outs[0].reshape(-1, rule.K), 0, 0)]


class Multiplied(FewBits):
    """(x, codes, scales, zero points?) → x Wᵀ or x W: the places multiply."""

    #: elements of a part of W
    part: int

    def dequantised(self, op: Operator, ins: Sequence[Any], room: Any) -> Iterator[tuple[Work, slice, slice, Any]]:
        """(the work that writes it, rows, columns, where it is) of each part of W."""
        rule = op.of(MatMulNBits)
        widths = (rule.row_bytes, rule.blocks, rule.zeros_in(None if ins[3] is None else need(op.inputs[3]).type))
        matrices = [None if a is None else a.reshape(-1, n) for a, n in zip(ins[1:4], widths, strict=True)]
        for rows, columns in rule.parts(self.part):
            columns = slice(columns.start, min(columns.stop, rule.K))
            shape = rows.stop - rows.start, columns.stop - columns.start
            part = room[: shape[0] * shape[1]].reshape(shape)
            yield part_of(rule, matrices, part, rows.start, columns.start), rows, columns, part
