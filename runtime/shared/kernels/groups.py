"""Values as codes of few bits and back, bit-identical to ops/approximation/groups.py.

An item of compression is up to 8,192 elements, which are read twice, the second time from a cache: for the ranges of
their groups, and in blocks of 32, which share random bits.  An item of decompression is eight elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....ops.approximation.groups import BLOCK, LEAST, LONGEST, POINT, CompressGroups, DecompressGroups
from ..families import SharedFamily, family
from ..stack import WORDS, byte, put, stack
from ..texts import Fixed, Work, eight, inline, instructions, kernel, lanes, meet, on_processor, warps, whole_blocks
from .random import one_of, words
from .slopes import joined, spread, store_bytes

if TYPE_CHECKING:
    from ....language.ir import Operator
    from ..llvm import IRBuilder, Word

_LAST, _EIGHT, _POINT = np.uint64(255), np.uint64(8), np.uint64(POINT)
#: bits of a code → the type of eight of them; threads of an item
_WORDS: dict[int, np.dtype] = {8: np.dtype(np.uint64), 4: np.dtype(np.uint32), 2: np.dtype(np.uint16)}
_LANES = LONGEST // BLOCK


def _other(types: Any, x: Any) -> Any:
    """The type of `ordered`."""
    pairs = ((types.float32, types.int32), (types.float64, types.int64))
    return next(b if x == a else a for a, b in pairs if x in (a, b))


@instructions(_other)
def ordered(builder: IRBuilder, x: Word) -> Word:
    """A float as an integer that has its place in the order of floats; and back."""
    from llvmlite import ir

    kinds = {"float": ir.IntType(32), "double": ir.IntType(64), "i32": ir.FloatType(), "i64": ir.DoubleType()}
    to = kinds[str(x.type)]
    bits = x if isinstance(x.type, ir.IntType) else builder.bitcast(x, to)
    width = bits.type.width
    sign = builder.ashr(bits, bits.type(width - 1))
    return builder.bitcast(builder.xor(bits, builder.and_(sign, bits.type((1 << width - 1) - 1))), to)


@instructions(lambda types, *given: types.UniTuple(types.uint64, 4))
def encoded(
    builder: IRBuilder, x: Word, at: Word, low: Word, factor: Word, most: Word, w0: Word, w1: Word, w2: Word, w3: Word
) -> Word:
    """The codes of 32 elements from `at` on, a byte each, as `_codes` computes them."""
    from llvmlite import ir

    i32 = ir.IntType(32)
    lanes, whole, four = ir.VectorType(low.type, BLOCK), ir.VectorType(i32, BLOCK), ir.VectorType(w0.type, 4)

    def every(number: Word) -> Word:
        one = builder.insert_element(ir.Constant(lanes, ir.Undefined), number, i32(0))
        return builder.shuffle_vector(one, one, ir.Constant(whole, [0] * BLOCK))

    def noise(*drawn: Word) -> Word:
        together = ir.Constant(four, ir.Undefined)
        for i, word in enumerate(drawn):
            together = builder.insert_element(together, word, i32(i))
        return builder.zext(builder.bitcast(together, ir.VectorType(ir.IntType(8), BLOCK)), whole)

    values = builder.load(builder.bitcast(builder.gep(builder.extract_value(x, 4), [at]), lanes.as_pointer()))
    values.align = 4
    moved, top = builder.fmul(builder.fsub(values, every(low)), every(factor)), every(most)
    moved = builder.select(builder.fcmp_ordered("<", moved, top), moved, top)
    name = f"llvm.rint.v{BLOCK}{low.type.intrinsic_name}"
    rint = builder.module.declare_intrinsic(name, (), ir.FunctionType(lanes, [lanes]))
    random = builder.or_(builder.shl(noise(w0, w1, w2, w3), ir.Constant(whole, [8] * BLOCK)), noise(w2, w3, w0, w1))
    total = builder.add(builder.fptosi(builder.call(rint, [moved]), whole), random)
    codes = builder.trunc(builder.lshr(total, ir.Constant(whole, [POINT] * BLOCK)), ir.VectorType(ir.IntType(8), BLOCK))
    found, parts = ir.Constant(ir.ArrayType(w0.type, 4), ir.Undefined), builder.bitcast(codes, four)
    for i in range(4):
        found = builder.insert_value(found, builder.extract_element(parts, i32(i)), i)
    return found


@inline(
    c="""DEVICE int flipped(int k) { return k ^ ((k >> 31) & 0x7fffffff); }
DEVICE long long flipped(long long k) { return k ^ ((k >> 63) & 0x7fffffffffffffffll); }
DEVICE int key(float x) { return flipped(__float_as_int(x)); }
DEVICE long long key(double x) { return flipped(__double_as_longlong(x)); }
DEVICE float number(int k) { return __int_as_float(flipped(k)); }
DEVICE double number(long long k) { return __longlong_as_double(flipped(k)); }
template <class X, class F, class C> DEVICE auto extrema(X&& x, F first, C count)
{
    const auto* at = x.p + first.v;
    auto least = key(load(*at)), most = least;
    for (int i = threadIdx.x & 31; i < (int)count.v; i += 32) {
        const auto k = key(load(at[i]));
        least = smaller(least, k);
        most = larger(most, k);
    }
    return many(number(warp_reduce(least, Smaller())), number(warp_reduce(most, Larger())));
}
"""
)
def extrema(x, first, count):
    """The least and the greatest of `count` elements; what is not finite is beyond all others."""
    least = most = ordered(x[first])
    for i in range(1, count):
        k = ordered(x[first + i])
        least = least if least < k else k
        most = most if most > k else k
    return ordered(least), ordered(most)


@inline
def _range(x, ranges, g, group, levels):
    """A group's least element and scale; NaN where an element is not finite."""
    t = ranges.dtype.type
    start = g * group
    low, high = extrema(x, start, min(group, x.size - start))
    spread = high - low
    scale = spread / t(levels)
    scale = scale if scale > t(LEAST) else t(LEAST)
    fine = spread - spread == t(0)
    ranges[g, 0] = low if fine else t(np.nan)
    ranges[g, 1] = scale if fine else t(np.nan)


@inline
def _codes(x, first, count, low, factor, most, upper, lower, bits):
    """The codes of up to eight elements; a byte of `upper` and one of `lower` are an element's random bits."""
    found = np.uint64(0)
    for i in range(count):
        moved = (x[first + i] - low) * factor
        moved = moved if moved < most else most
        at = np.uint64(8 * i)
        noise = ((upper >> at) & _LAST) << _EIGHT | ((lower >> at) & _LAST)
        code = (np.uint64(np.int32(np.rint(moved))) + noise) >> _POINT
        found |= code << np.uint64(bits * i)
    return found


@inline
def _block(x, codes, packed, b, draws, low, factor, most, bits):
    """The codes of 32 elements."""
    for k in range(4):
        at = 4 * b + k
        first, upper, lower = 8 * at, one_of(draws, k), one_of(draws, k ^ 2)
        if whole_blocks() or at < packed.size:
            packed[at] = _codes(eight(x, first), first, 8, low, factor, most, upper, lower, bits)
        else:
            count = max(0, min(8, x.size - first))
            store_bytes(codes, at * bits, _codes(x, first, count, low, factor, most, upper, lower, bits), bits)


@inline
def _scales(ranges, g, levels):
    """What codes of a group are computed with: all that is not less than the last becomes it."""
    t = ranges.dtype.type
    low, scale = ranges[g, 0], ranges[g, 1]
    return low, t(1 << POINT) / scale, t(levels << POINT) if scale == scale else t(0)


@kernel
def compress_groups(x, step, codes, packed, ranges, seed, sizes, bits, begin, end):
    """Codes and ranges.  `packed`: the codes, eight an element, as far as x has them; `sizes`: of a group, and of what
    is before x, in blocks."""
    group, skipped = sizes[0], sizes[1]
    per, levels, time = LONGEST // group, (1 << bits) - 1, step[0]
    for part in range(begin, end):
        g = part * per
        last = min(g + per, ranges.shape[0])
        for i in warps(g, last):
            _range(x, ranges, i, group, levels)
        meet()
        b, stop = g * group // BLOCK, (min(last * group, x.size) + BLOCK - 1) // BLOCK
        if on_processor():
            while b < stop and 4 * b + 4 <= packed.size:
                low, factor, most = _scales(ranges, b * BLOCK // group, levels)
                w0, w1, w2, w3 = words(b + skipped, seed, time)
                found = encoded(x, b * BLOCK, low, factor, most, w0, w1, w2, w3)
                for k in range(4):
                    packed[4 * b + k] = found[k] if bits == 8 else joined(found[k], np.uint64(bits))
                b += 1
        for i in lanes(b, stop):
            low, factor, most = _scales(ranges, i * BLOCK // group, levels)
            _block(x, codes, packed, i, words(i + skipped, seed, time), low, factor, most, bits)


@inline
def _levels(y, first, count, word, low, scale, bits):
    """Up to eight elements from their codes."""
    last = np.uint64((1 << bits) - 1)
    for i in range(count):
        code = np.int32((word >> np.uint64(bits * i)) & last)
        y[first + i] = low + y.dtype.type(code) * scale


@kernel(rows=True)
def decompress_groups(codes, packed, ranges, y, group, bits, row, begin, end):
    """least + code · scale; a row is a group."""
    low, scale = ranges[row, 0], ranges[row, 1]
    done = begin
    if on_processor():
        p, wide, t = stack(), np.uint64(bits), y.dtype.type
        while done < end and row * group + 8 * done + 8 <= y.size:
            first = row * group + 8 * done
            count = min(min(end - done, WORDS), (y.size - first) // 8)
            for k in range(count):
                put(p, k, spread(np.uint64(packed[first // 8 + k]), wide))
            for i in range(8 * count):
                y[first + i] = low + t(byte(p, i)) * scale
            done += count
    for b in range(done, end):
        first = row * group + 8 * b
        at = first // 8
        if whole_blocks() or at < packed.size:
            _levels(eight(y, first), first, 8, np.uint64(packed[at]), low, scale, bits)
        else:
            word = np.uint64(0)
            for j in range(bits):
                if at * bits + j < codes.size:
                    word |= np.uint64(codes[at * bits + j]) << np.uint64(8 * j)
            _levels(y, first, min(8, y.size - first), word, low, scale, bits)


class Groups(SharedFamily):
    """The base of both families."""

    def packed(self, codes: Any, size: int, bits: int) -> Any:
        """The codes as integers of eight elements, as far as there are eight; none where they lie askew."""
        kind = _WORDS[bits]
        whole = size // 8 * bits * (not self.place.device or codes.address % kind.itemsize == 0)
        return codes[:whole].view(kind)


@family("CompressGroups")
class Compressing(Groups):
    """(x, step) → codes, ranges."""

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """Up to 8,192 elements an item."""
        rule = op.of(CompressGroups)
        x, codes, ranges = ins[0].reshape(-1), outs[0], outs[1]
        packed = self.packed(codes, x.size, rule.bits)
        numbers = np.uint64(rule.seed), np.array([rule.group, rule.first // BLOCK]), Fixed(rule.bits)
        items = -(-x.size // (LONGEST // rule.group * rule.group))
        whole = x.size % BLOCK == 0 and packed.size == x.size // 8
        operands = (x, ins[1].reshape(1), codes, packed, ranges, *numbers)
        return [compress_groups(*operands, work=items, lanes=_LANES, whole=whole)]


@family("DecompressGroups")
class Decompressing(Groups):
    """(codes, ranges) → y."""

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """Eight elements an item."""
        rule = op.of(DecompressGroups)
        codes, ranges, y = ins[0], ins[1], outs[0].reshape(-1)
        packed = self.packed(codes, y.size, rule.bits)
        operands = (codes, packed, ranges, y, rule.group, Fixed(rule.bits))
        items, whole = -(-y.size // 8), y.size % 8 == 0 and packed.size == y.size // 8
        return [decompress_groups(*operands, work=items, per=rule.group // 8, whole=whole)]
