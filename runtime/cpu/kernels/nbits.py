"""Matrices of a few bits an element: dequantised a part at a time, which matrix products then read."""

from __future__ import annotations

from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import Array, Operands, TensorType, need
from ....ops.linear.nbits import TABLES, DequantizeNBits, MatMulNBits, Packed
from ..device.jit import inline, kernel
from ..device.native import Call
from ..families import Family, enough, family
from ..providers import products
from .recurrent_steps import Products

#: forms of zero points: none, packed, floats; a table in their place
_NONE, _PACKED, _FLOAT, _TABLE = range(4)


@inline
def _nibbles(codes, out, column, stop, zero, scale):
    """Elements [column, stop) of a row of 4 bits an element, from an even column; `out` begins at `column`."""
    t = out.dtype.type
    z, s = t(zero), t(scale)
    first, pairs = column // 2, (stop - column) // 2
    for j in range(pairs):
        byte = codes[first + j]
        out[2 * j] = (t(byte & 15) - z) * s
        out[2 * j + 1] = (t(byte >> 4) - z) * s
    if (stop - column) % 2:
        out[2 * pairs] = (t(codes[first + pairs] & 15) - z) * s


@inline
def _looked_up(codes, out, column, table, scale):
    """Elements of a row whose codes stand for the 16 numbers of a table, the first of a byte in its high half."""
    t = out.dtype.type
    s, first = t(scale), column // 2
    for j in range(len(out) // 2):
        byte = codes[first + j]
        out[2 * j] = t(table[byte >> 4]) * s
        out[2 * j + 1] = t(table[byte & 15]) * s


@inline
def _others(codes, out, column, stop, zero, scale, bits):
    """Dequantises a row for other numbers of bits."""
    t = out.dtype.type
    z, s = t(zero), t(scale)
    per, mask = 8 // bits, (1 << bits) - 1
    for k in range(column, stop):
        code = (int(codes[k // per]) >> (bits * (k % per))) & mask
        out[k - column] = (t(code) - z) * s


@kernel
def dequantise(codes, scales, zeros, out, column, bits, size, form, begin, end):
    """out [rows, columns] from codes [rows, bytes], scales [rows, blocks] and zero points (form 3: the table [1, 16]),
    from a column on."""
    stop, per = column + out.shape[1], 8 // bits
    for r in range(begin, end):
        to = out[r]
        for block in range(column // size, (stop + size - 1) // size):
            low, high = max(block * size, column), min((block + 1) * size, stop)
            zero = float(1 << (bits - 1))
            if form == 1:
                zero = float((int(zeros[r, block // per]) >> (bits * (block % per))) & ((1 << bits) - 1))
            elif form == 2:
                zero = float(zeros[r, block])
            part = to[low - column : high - column]
            if form == 3:
                _looked_up(codes[r], part, low, zeros[0], scales[r, block])
            elif bits == 4:
                _nibbles(codes[r], part, low, high, zero, scales[r, block])
            else:
                _others(codes[r], part, low, high, zero, scales[r, block], bits)


def _part(rule: Packed, given: Any, out: Array, row: int, column: int) -> Call:
    """The call that dequantises a part, from a row and a column on, of (codes, scales, zero points) as matrices."""
    codes, scales, zeros = (None if a is None else a[row : row + len(out)] for a in given)
    if rule.table:
        form, zeros = _TABLE, TABLES[rule.table].astype(need(scales).dtype)[None]
    elif zeros is None:
        form, zeros = _NONE, scales
    else:
        form = _PACKED if zeros.dtype == np.uint8 else _FLOAT
    return dequantise.call(codes, scales, zeros, out, column, rule.bits, rule.block_size, form, work=len(out))


def _fits(op: Operator, kind: str, at: int) -> bool:
    """Whether scales, input number `at`, and zero points have a type that kernels compute with."""
    return all(v is None or v.dtype in (kind, "u8") for v in op.inputs[at : at + 2])


@family("DequantizeNBits")
class Dequantised(Family):
    """(codes, scales, zero points?) → W."""

    def accepts(self, op: Operator) -> bool:
        """float32 or float64, enough of them."""
        y = need(op.outputs[0])
        return y.dtype in ("f32", "f64") and y.size >= enough() and _fits(op, y.dtype, 1)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        rule = op.of(DequantizeNBits)
        matrices = [None if a is None else a.reshape(-1, a.shape[-1]) for a in ins[:3]]
        return [_part(rule, matrices, outs[0].reshape(-1, rule.K), 0, 0)]


@family("MatMulNBits")
class Multiplied(Family):
    """(x, codes, scales, zero points?) → x Wᵀ or x W."""

    def accepts(self, op: Operator) -> bool:
        """float32 or float64, some of them, where a BLAS is there."""
        x, y = need(op.inputs[0]), need(op.outputs[0])
        rule = op.of(MatMulNBits)
        large = y.size > 0 and enough() <= rule.N * rule.K
        return x.dtype in ("f32", "f64") and large and _fits(op, x.dtype, 2) and products.available(x.dtype)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """A part of W; the workspace of products."""
        rule, x = op.of(MatMulNBits), need(op.inputs[0])
        sizes = [(c.stop - c.start if not rule.transB else r.stop - r.start, r, c) for r, c in rule.parts()]
        terms = x.shape[-1]
        shapes = [(x.size // terms, width, terms) for width, _, _ in sizes]
        high, across = rule.part_sizes()
        return TensorType(x.dtype, (high * min(across, rule.K),)), products.room(x.dtype, *shapes)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """Part by part."""
        rule = op.of(MatMulNBits)
        x = ins[0].reshape(-1, ins[0].shape[-1])
        out = outs[0].reshape(len(x), -1)
        matrices, todo = rule.matrices(ins[:4]), Products(scratch[1])
        for rows, columns in rule.parts():
            shape = rows.stop - rows.start, min(columns.stop, rule.K) - columns.start
            part = scratch[0][: shape[0] * shape[1]].reshape(shape)
            todo.add(_part(rule, matrices, part, rows.start, columns.start))
            if rule.transB:
                todo.product(x, part.T, out[:, rows])
            else:
                todo.product(x, part, out[:, columns.start : columns.start + shape[1]])
        return todo.calls
