"""Codes of slopes and gradients from them: an item is eight elements, whose codes are whole bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....language.types import need
from ..families import SharedFamily, family
from ..texts import Fixed, Intrinsic, Work, eight, inline, kernel, on_processor, whole_blocks

if TYPE_CHECKING:
    from ....language.ir import Operator
    from ..llvm import BaseContext, Generated, IRBuilder, Kind, Signature, TypingContext, Word


#: elements that are compared with a bound at a time
_LANES = 32


def _above(typing: TypingContext, x: Kind, at: Kind, bounds: Kind, even: Kind) -> Generated:
    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Word]) -> Word:
        from llvmlite import ir
        from numba.core import cgutils

        array, limits = (context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 2))
        scalar = array.data.type.pointee
        lanes, width = ir.VectorType(scalar, _LANES), 64 if isinstance(scalar, ir.DoubleType) else 32
        counts = ir.VectorType(ir.IntType(width), _LANES)
        first = builder.bitcast(builder.gep(array.data, [args[1]]), lanes.as_pointer())
        values = builder.load(first)
        values.align = width // 8
        # |x| by its bits where codes are even in x
        kept = [ir.Constant(counts, [mask] * _LANES) for mask in ((1 << width - 1) - 1, -1)]
        signs = builder.select(builder.icmp_signed("!=", args[3], args[3].type(0)), *kept)
        values = builder.bitcast(builder.and_(builder.bitcast(values, counts), signs), lanes)
        counts_at = cgutils.alloca_once_value(builder, ir.Constant(counts, [0] * _LANES))
        with cgutils.for_range(builder, limits.nitems) as loop:
            bound = builder.load(builder.gep(limits.data, [loop.index]))
            one = builder.insert_element(ir.Constant(lanes, ir.Undefined), bound, ir.IntType(32)(0))
            every = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES))
            beyond = builder.zext(builder.fcmp_ordered(">", values, every), counts)
            builder.store(builder.add(builder.load(counts_at), beyond), counts_at)
        bytes_ = builder.trunc(builder.load(counts_at), ir.VectorType(ir.IntType(8), _LANES))
        words = builder.bitcast(bytes_, ir.VectorType(ir.IntType(64), _LANES // 8))
        parts = [builder.extract_element(words, ir.IntType(32)(i)) for i in range(_LANES // 8)]
        return context.make_tuple(builder, signature.return_type, parts)

    from numba.core import types

    return types.UniTuple(types.uint64, _LANES // 8)(x, at, bounds, even), generate


#: above(x, at, bounds, even): for 32 elements from `at` on the number of bounds below each, a byte each, in four words
above: Any = Intrinsic(_above)

_U = np.uint64
_BYTES, _PAIRS, _FOURS = _U(0x00FF00FF00FF00FF), _U(0x0000FFFF0000FFFF), _U(0x00000000FFFFFFFF)
_EIGHT, _SIXTEEN, _THIRTY_TWO, _LAST = _U(8), _U(16), _U(32), _U(255)


@inline
def joined(word, bits):
    """Eight bytes below 2^bits as one number of 8 · bits bits."""
    word = (word & _BYTES) | ((word >> _EIGHT) & _BYTES) << bits
    word = (word & _PAIRS) | ((word >> _SIXTEEN) & _PAIRS) << (bits + bits)
    return (word & _FOURS) | (word >> _THIRTY_TWO) << (bits + bits + bits + bits)


@inline
def spread(word, bits):
    """What `joined` undoes."""
    last = (_U(1) << bits) - _U(1)
    four = (_U(1) << (bits + bits + bits + bits)) - _U(1)
    two, one = (last | last << bits) * _U(0x0000000100000001), last * _U(0x0001000100010001)
    word = (word & four) | (word >> (bits + bits + bits + bits)) << _THIRTY_TWO
    word = (word & two) | ((word >> (bits + bits)) & two) << _SIXTEEN
    return (word & one) | ((word >> bits) & one) << _EIGHT


@inline
def _code(v, bounds, even):
    """The number of bounds below one element."""
    if even != 0:
        v = abs(v)
    code = 0
    for k in range(bounds.size):
        if v > bounds[k]:
            code += 1
    return code


@inline
def store_bytes(y, to, word, bits):
    """The bytes of eight codes, as far as y goes."""
    for j in range(bits):
        if to + j < y.size:
            y[to + j] = np.uint8(word & _LAST)
            word >>= _EIGHT


@kernel
def slope_codes(x, bounds, y, bits, even, begin, end):
    """The number of bounds that each element is above; a processor counts for four items at a time."""
    first = begin
    if on_processor():
        while first + 4 <= end and first * 8 + 32 <= x.size:
            level = above(x, first * 8, bounds, even)
            for k in range(4):
                store_bytes(y, (first + k) * bits, joined(level[k], np.uint64(bits)), bits)
            first += 4
    for group in range(first, end):
        word = np.uint64(0)
        for i in range(8):
            if group * 8 + i < x.size:
                word |= np.uint64(_code(x[group * 8 + i], bounds, even)) << np.uint64(bits * i)
        store_bytes(y, group * bits, word, bits)


@inline
def _scale(dy, dx, table, word, first, count, bits):
    """Some elements times what their codes stand for."""
    wide, last = np.uint64(bits), np.uint64((1 << bits) - 1)
    for i in range(count):
        dx[first + i] = dy[first + i] * table[np.int64((word >> (wide * np.uint64(i))) & last)]


@kernel
def slope_grad(dy, codes, table, dx, bits, begin, end):
    """dx = dy · table[code]."""
    for group in range(begin, end):
        first, at = group * 8, group * bits
        word = np.uint64(0)
        for j in range(bits):
            if at + j < codes.size:
                word |= np.uint64(codes[at + j]) << np.uint64(8 * j)
        if whole_blocks() or first + 8 <= dy.size:
            _scale(eight(dy, first), eight(dx, first), table, word, first, 8, bits)
        else:
            _scale(dy, dx, table, word, first, dy.size - first, bits)


@family("SlopeCodes", "SlopeGrad")
class Slopes(SharedFamily):
    """(x) → codes; (dy, codes) → dx."""

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """Eight elements an item."""
        rule: Any = op.op
        x, y, bits = ins[0].reshape(-1), outs[0].reshape(-1), Fixed(rule.bits)
        kind = np.float64 if need(op.inputs[0]).dtype == "f64" else np.float32
        if rule.name == "SlopeCodes":
            return [slope_codes(x, np.array(rule.bounds, kind), y, bits, Fixed(int(rule.even)), work=-(-x.size // 8))]
        table = np.array(rule.table(), kind)
        return [slope_grad(x, ins[1].reshape(-1), table, y, bits, work=-(-x.size // 8), whole=x.size % 8 == 0)]
