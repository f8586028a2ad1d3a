"""Values as codes of few bits and back: a group at a time, random bits and codes in a buffer on the stack.

Bit-identical to ops/approximation/groups.py.  Each loop over elements reads and writes vectors: extrema are those of
integers in the floats' order, and what is packed is moved within words of 16 or 32 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....language.types import Operands
from ....ops.approximation.groups import BLOCK, LEAST, POINT, CompressGroups, DecompressGroups
from ..device.jit import Intrinsic, inline, kernel
from ..device.native import Call
from ..families import Family, family, floats
from .random import signed, words

if TYPE_CHECKING:
    from ....language.ir import Operator
    from ..device.llvm import BaseContext, Generated, IRBuilder, Kind, Signature, TypingContext, Word

#: elements that are in the buffer at a time
_ROOM = 1024


def _room(typing: TypingContext) -> Generated:
    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Word]) -> Word:
        from llvmlite import ir
        from numba.core import cgutils

        found = cgutils.alloca_once(builder, ir.IntType(8), size=2 * _ROOM)
        found.align = 64
        return found

    from numba import types

    return types.voidptr(), generate


def _put(typing: TypingContext, p: Kind, i: Kind, x: Kind) -> Generated:
    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Word]) -> Word:
        at = builder.gep(builder.bitcast(args[0], args[2].type.as_pointer()), [args[1]])
        builder.store(args[2], at)
        return context.get_dummy_value()

    from numba import types

    return types.none(p, i, x), generate


#: room(): the buffer; put(p, i, x): writes x as its element i of x's type
room: Any = Intrinsic(_room)
put: Any = Intrinsic(_put)


def _get(typing: TypingContext, p: Kind, i: Kind) -> Generated:
    from numba import types

    return types.uint8(p, i), lambda context, builder, signature, args: builder.load(builder.gep(args[0], [args[1]]))


#: get(p, i): byte i
get: Any = Intrinsic(_get)


def _flipped(builder: IRBuilder, bits: Word) -> Word:
    """A float's bits as an integer that has the float's place in the order of floats; and back."""
    width = bits.type.width
    sign = builder.ashr(bits, bits.type(width - 1))
    return builder.xor(bits, builder.and_(sign, bits.type((1 << width - 1) - 1)))


def _key(typing: TypingContext, x: Kind) -> Generated:
    from numba import types

    result = types.int32 if x == types.float32 else types.int64

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Word]) -> Word:
        return _flipped(builder, builder.bitcast(args[0], context.get_value_type(result)))

    return result(x), generate


def _number(typing: TypingContext, key: Kind) -> Generated:
    from numba import types

    result = types.float32 if key == types.int32 else types.float64

    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Word]) -> Word:
        return builder.bitcast(_flipped(builder, args[0]), context.get_value_type(result))

    return result(key), generate


#: key(x): an integer in the floats' order; number(key): the float
key: Any = Intrinsic(_key)
number: Any = Intrinsic(_number)


def _encode(typing: TypingContext, p: Kind, i: Kind, x: Kind, low: Kind, factor: Kind, most: Kind) -> Generated:
    def generate(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Word]) -> Word:
        from llvmlite import ir

        noise, i, x, low, factor, most = args
        i8, i32 = ir.IntType(8), ir.IntType(32)
        moved = builder.fmul(builder.fsub(x, low), factor)
        moved = builder.select(builder.fcmp_ordered("<", moved, most), moved, most)
        rint = builder.module.declare_intrinsic("llvm.rint", [x.type], ir.FunctionType(x.type, [x.type]))
        whole = builder.fptosi(builder.call(rint, [moved]), i32)
        upper, lower = (builder.gep(noise, [at]) for at in (i, builder.add(i, i.type(_ROOM))))
        bits = [builder.zext(builder.load(at), i32) for at in (upper, lower)]
        total = builder.add(whole, builder.or_(builder.shl(bits[0], i32(8)), bits[1]))
        builder.store(builder.trunc(builder.lshr(total, i32(POINT)), i8), upper)
        return context.get_dummy_value()

    from numba import types

    return types.none(p, i, x, low, factor, most), generate


#: encode(p, i, x, low, factor, most): random byte i becomes the code of x
encode: Any = Intrinsic(_encode)


def _packing(bits: int) -> Any:
    """packed(p, k): byte k of the packed codes of the buffer."""
    per = 8 // bits

    def make(typing: TypingContext, p: Kind, k: Kind) -> Generated:
        from numba import types

        def generate(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Word]) -> Word:
            from llvmlite import ir

            word = ir.IntType(8 * per)
            x = builder.load(builder.gep(builder.bitcast(args[0], word.as_pointer()), [args[1]]))
            found = x
            for i in range(1, per):
                found = builder.or_(found, builder.lshr(x, word((8 - bits) * i)))
            return builder.trunc(found, ir.IntType(8))

        return types.uint8(p, k), generate

    return make


def _unpacking(bits: int) -> Any:
    """unpacked(p, k, byte): the codes of byte k into the buffer."""
    per = 8 // bits

    def make(typing: TypingContext, p: Kind, k: Kind, byte: Kind) -> Generated:
        from numba import types

        def generate(context: BaseContext, builder: IRBuilder, signature: Signature, args: Sequence[Word]) -> Word:
            from llvmlite import ir

            word = ir.IntType(8 * per)
            x = builder.zext(args[2], word)
            found = x
            for i in range(1, per):
                found = builder.or_(found, builder.shl(x, word((8 - bits) * i)))
            mask = word(sum(((1 << bits) - 1) << 8 * i for i in range(per)))
            at = builder.gep(builder.bitcast(args[0], word.as_pointer()), [args[1]])
            builder.store(builder.and_(found, mask), at)
            return context.get_dummy_value()

        return types.none(p, k, byte), generate

    return make


packed4: Any = Intrinsic(_packing(4))
packed2: Any = Intrinsic(_packing(2))
unpacked4: Any = Intrinsic(_unpacking(4))
unpacked2: Any = Intrinsic(_unpacking(2))


@inline
def _noise(p, block, count, seed, step):
    """Random bytes for `count` elements, from a block of the stream on: upper ones, and lower ones `_ROOM` behind."""
    half = _ROOM // 8
    for b in range((count + BLOCK - 1) // BLOCK):
        w0, w1, w2, w3 = words(block + b, seed, step)
        at = 4 * b
        put(p, at, w0)
        put(p, at + 1, w1)
        put(p, at + 2, w2)
        put(p, at + 3, w3)
        put(p, half + at, w2)
        put(p, half + at + 1, w3)
        put(p, half + at + 2, w0)
        put(p, half + at + 3, w1)


@inline
def _pack(p, count, codes, at, bits):
    """Codes of the buffer, packed, from byte `at` on."""
    if bits == 8:
        for i in range(count):
            codes[at + i] = get(p, i)
        return
    for i in range(count, (count + 3) // 4 * 4):
        put(p, i, np.uint8(0))
    if bits == 4:
        for k in range((count + 1) // 2):
            codes[at + k] = packed4(p, k)
    else:
        for k in range((count + 3) // 4):
            codes[at + k] = packed2(p, k)


@inline
def _extrema(x, first, count):
    """The least and the greatest of `count` elements; what is not finite is beyond all others."""
    least = most = key(x[first])
    for i in range(1, count):
        k = key(x[first + i])
        least = least if least < k else k
        most = most if most > k else k
    return number(least), number(most)


@kernel
def compress(x, step, codes, ranges, seed, skipped, group, bits, begin, end):
    """Group by group: its range, then its codes in pieces that fit the buffer."""
    p = room()
    levels = x.dtype.type((1 << bits) - 1)
    unit, none = x.dtype.type(1 << POINT), x.dtype.type(np.nan)
    for g in range(begin, end):
        start = g * group
        size = min(group, x.size - start)
        low, high = _extrema(x, start, size)
        spread = high - low
        fine = spread - spread == 0
        scale = max(spread / levels, x.dtype.type(LEAST))
        ranges[g, 0] = low if fine else none
        ranges[g, 1] = scale if fine else none
        factor, top = unit / scale, levels * unit
        for first in range(start, start + size, _ROOM):
            count = min(_ROOM, start + size - first)
            if fine:
                _noise(p, skipped + first // BLOCK, count, seed, step[0])
                for i in range(count):
                    encode(p, i, x[first + i], low, factor, top)
            else:
                for i in range(count):
                    put(p, i, np.uint8(0))
            _pack(p, count, codes, first * bits // 8, bits)


@kernel
def decompress(codes, ranges, y, group, bits, begin, end):
    """Group by group, in pieces that fit the buffer."""
    p = room()
    for g in range(begin, end):
        start = g * group
        size = min(group, y.size - start)
        low, scale = ranges[g, 0], ranges[g, 1]
        for first in range(start, start + size, _ROOM):
            count = min(_ROOM, start + size - first)
            at = first * bits // 8
            if bits == 8:
                for i in range(count):
                    put(p, i, codes[at + i])
            elif bits == 4:
                for k in range((count + 1) // 2):
                    unpacked4(p, k, codes[at + k])
            else:
                for k in range((count + 3) // 4):
                    unpacked2(p, k, codes[at + k])
            for i in range(count):
                y[first + i] = low + y.dtype.type(get(p, i)) * scale


@family("CompressGroups")
class Compressing(Family):
    """(x, step) → codes, ranges."""

    def accepts(self, op: Operator) -> bool:
        """float32 or float64."""
        return floats(op)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """One call, split over the threads by groups."""
        rule = op.of(CompressGroups)
        given = ins[0].reshape(-1), ins[1].reshape(1), *outs[:2]
        return [compress.call(*given, signed(rule.seed), rule.first // BLOCK, rule.group, rule.bits, work=len(outs[1]))]


@family("DecompressGroups")
class Decompressing(Family):
    """(codes, ranges) → y."""

    def accepts(self, op: Operator) -> bool:
        """float32 or float64."""
        return floats(op)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """One call, split over the threads by groups."""
        rule = op.of(DecompressGroups)
        return [decompress.call(*ins[:2], outs[0].reshape(-1), rule.group, rule.bits, work=len(ins[1]))]
