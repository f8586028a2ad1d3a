"""Codes of slopes and gradients from them: eight elements at a time, whose codes are whole bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....language.types import Operands
from ...shared.texts import Intrinsic, inline
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, family, floats

if TYPE_CHECKING:
    from ....language.ir import Operator
    from ..device.llvm import BaseContext, Generated, IRBuilder, Kind, Signature, TypingContext, Word


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
def _store(y, to, word, bits):
    """The bytes of eight codes, as far as y goes."""
    word = joined(word, np.uint64(bits))
    for j in range(min(bits, y.size - to)):
        y[to + j] = np.uint8(word & _LAST)
        word >>= _EIGHT


@kernel
def codes(x, bounds, y, bits, even, begin, end):
    """Groups of eight elements, four groups at a time."""
    group = begin
    while group + 4 <= end and group * 8 + 32 <= x.size:
        level = above(x, group * 8, bounds, even)
        for k in range(4):
            _store(y, (group + k) * bits, level[k], bits)
        group += 4
    while group < end:
        first = group * 8
        word = np.uint64(0)
        for i in range(min(8, x.size - first)):
            word |= np.uint64(_code(x[first + i], bounds, even)) << np.uint64(8 * i)
        _store(y, group * bits, word, bits)
        group += 1


@kernel
def scaled(dy, gradient, table, dx, bits, begin, end):
    """Groups of eight elements: dx = dy · table[code]."""
    wide, last = np.uint64(bits), np.uint64((1 << bits) - 1)
    for group in range(begin, end):
        first, at = group * 8, group * bits
        word = np.uint64(0)
        for j in range(min(bits, gradient.size - at)):
            word |= np.uint64(gradient[at + j]) << np.uint64(8 * j)
        if first + 8 <= dy.size:
            for i in range(8):
                dx[first + i] = dy[first + i] * table[np.int64((word >> (wide * np.uint64(i))) & last)]
        else:
            for i in range(dy.size - first):
                dx[first + i] = dy[first + i] * table[np.int64((word >> (wide * np.uint64(i))) & last)]


@family("SlopeCodes", "SlopeGrad")
class Slopes(Family):
    """(x) → codes; (dy, codes) → dx."""

    def accepts(self, op: Operator) -> bool:
        """Large ones of float32 or float64."""
        return floats(op)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        rule: Any = op.op
        x, y = ins[0].reshape(-1), outs[0].reshape(-1)
        work = -(-x.size // 8)
        if rule.name == "SlopeCodes":
            return [codes.call(x, np.array(rule.bounds, x.dtype), y, rule.bits, rule.even, work=work)]
        return [scaled.call(x, ins[1], np.array(rule.table(), x.dtype), y, rule.bits, work=work)]
