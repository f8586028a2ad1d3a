"""Values as codes of few bits and back: a group at a time, random bits and codes in a buffer on the stack.

Bit-identical to ops/approximation/groups.py.  Each loop over elements reads and writes vectors: extrema are those of
integers in the floats' order, and what is packed is moved within words of 16 or 32 bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ....language.types import Operands
from ....ops.approximation.groups import BLOCK, LEAST, POINT, CompressGroups, DecompressGroups
from ...shared.kernels.random import words
from ...shared.texts import inline, instructions
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, family, floats

if TYPE_CHECKING:
    from ....language.ir import Operator
    from ...shared.llvm import IRBuilder, Word

#: elements that are in the buffer at a time
_ROOM = 1024


@instructions(lambda types: types.voidptr)
def room(builder: IRBuilder) -> Word:
    """The buffer."""
    from llvmlite import ir
    from numba.core import cgutils

    pointer = cgutils.alloca_once(builder, ir.IntType(8), size=2 * _ROOM)
    pointer.align = 64
    return pointer


@instructions(lambda types, *given: types.none)
def put(builder: IRBuilder, p: Word, i: Word, x: Word) -> None:
    """Writes x as element i of x's type."""
    builder.store(x, builder.gep(builder.bitcast(p, x.type.as_pointer()), [i]))


@instructions(lambda types, *given: types.uint8)
def get(builder: IRBuilder, p: Word, i: Word) -> Word:
    """Byte i."""
    return builder.load(builder.gep(p, [i]))


def _flipped(builder: IRBuilder, bits: Word) -> Word:
    """A float's bits as an integer that has the float's place in the order of floats; and back."""
    width = bits.type.width
    sign = builder.ashr(bits, bits.type(width - 1))
    return builder.xor(bits, builder.and_(sign, bits.type((1 << width - 1) - 1)))


@instructions(lambda types, x: types.int32 if x == types.float32 else types.int64)
def key(builder: IRBuilder, x: Word) -> Word:
    """An integer in the floats' order."""
    from llvmlite import ir

    return _flipped(builder, builder.bitcast(x, ir.IntType(32 if x.type == ir.FloatType() else 64)))


@instructions(lambda types, key: types.float32 if key == types.int32 else types.float64)
def number(builder: IRBuilder, key: Word) -> Word:
    """The float of a key."""
    from llvmlite import ir

    return builder.bitcast(_flipped(builder, key), ir.FloatType() if key.type.width == 32 else ir.DoubleType())


@instructions(lambda types, *given: types.none)
def encode(builder: IRBuilder, p: Word, i: Word, x: Word, low: Word, factor: Word, most: Word) -> None:
    """Random byte i becomes the code of x."""
    from llvmlite import ir

    i8, i32 = ir.IntType(8), ir.IntType(32)
    moved = builder.fmul(builder.fsub(x, low), factor)
    moved = builder.select(builder.fcmp_ordered("<", moved, most), moved, most)
    rint = builder.module.declare_intrinsic("llvm.rint", [x.type], ir.FunctionType(x.type, [x.type]))
    whole = builder.fptosi(builder.call(rint, [moved]), i32)
    upper, lower = (builder.gep(p, [at]) for at in (i, builder.add(i, i.type(_ROOM))))
    bits = [builder.zext(builder.load(at), i32) for at in (upper, lower)]
    total = builder.add(whole, builder.or_(builder.shl(bits[0], i32(8)), bits[1]))
    builder.store(builder.trunc(builder.lshr(total, i32(POINT)), i8), upper)


def _packing(bits: int) -> Any:
    """packed(p, k): byte k of the packed codes of the buffer."""

    @instructions(lambda types, *given: types.uint8)
    def packed(builder: IRBuilder, p: Word, k: Word) -> Word:
        from llvmlite import ir

        word = ir.IntType(64 // bits)
        x = value = builder.load(builder.gep(builder.bitcast(p, word.as_pointer()), [k]))
        for i in range(1, 8 // bits):
            value = builder.or_(value, builder.lshr(x, word((8 - bits) * i)))
        return builder.trunc(value, ir.IntType(8))

    return packed


def _unpacking(bits: int) -> Any:
    """unpacked(p, k, byte): the codes of byte k into the buffer."""

    @instructions(lambda types, *given: types.none)
    def unpacked(builder: IRBuilder, p: Word, k: Word, byte: Word) -> None:
        from llvmlite import ir

        word = ir.IntType(64 // bits)
        x = found = builder.zext(byte, word)
        for i in range(1, 8 // bits):
            found = builder.or_(found, builder.shl(x, word((8 - bits) * i)))
        mask = word(sum(((1 << bits) - 1) << 8 * i for i in range(8 // bits)))
        builder.store(builder.and_(found, mask), builder.gep(builder.bitcast(p, word.as_pointer()), [k]))

    return unpacked


packed4, packed2, unpacked4, unpacked2 = _packing(4), _packing(2), _unpacking(4), _unpacking(2)


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
        arguments = ins[0].reshape(-1), ins[1].reshape(1), *outs[:2]
        return [
            compress.call(
                *arguments, np.uint64(rule.seed), rule.first // BLOCK, rule.group, rule.bits, work=len(outs[1])
            )
        ]


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
