"""Values as codes of few bits and back, bit-identical to ops/approximation/groups.py.

A block of threads has 8,192 elements, which it reads twice, the second time from its cache: warps find the range of a
group each, then each thread encodes the 32 elements that share a block of the random stream.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from ....language.ir import Operator
from ....ops.approximation.groups import BLOCK, LEAST, LONGEST, POINT, CompressGroups, DecompressGroups
from ..code.parts import aligned
from ..code.philox import PHILOX_WORDS
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel
from ..families import Buffers, Family, family

_THREADS = LONGEST // BLOCK
#: elements that a thread decodes
_LANES = 4

_KEYS = {
    "float": """
DEVICE int key(float x) { const int b = __float_as_int(x); return b ^ ((b >> 31) & 0x7fffffff); }
DEVICE float number(int k) { return __int_as_float(k ^ ((k >> 31) & 0x7fffffff)); }
DEVICE float nearest(float x) { return rintf(x); }
DEVICE float nan_of(float) { return __int_as_float(0x7fc00000); }
""",
    "double": """
DEVICE long long key(double x)
{
    const long long b = __double_as_longlong(x);
    return b ^ ((b >> 63) & 0x7fffffffffffffffll);
}
DEVICE double number(long long k) { return __longlong_as_double(k ^ ((k >> 63) & 0x7fffffffffffffffll)); }
DEVICE double nearest(double x) { return rint(x); }
DEVICE double nan_of(double) { return __longlong_as_double(0x7ff8000000000000ll); }
""",
}

_COMPRESS = """    __shared__ A lows[PER_MOST], factors[PER_MOST];
    const int lane = threadIdx.x & 31, per = LONGEST / group;
    for (int i = threadIdx.x >> 5; i < per; i += THREADS / 32) {
        const long long g = (long long)blockIdx.x * per + i, start = g * group;
        if (start >= n) break;
        const int size = n - start < group ? (int)(n - start) : group;
        auto least = key(widen(x[start])), most = least;
        for (int j = lane; j < size; j += 32) {
            const auto k = key(widen(x[start + j]));
            least = smaller(least, k);
            most = larger(most, k);
        }
        const A low = number(warp_reduce(least, Smaller())), high = number(warp_reduce(most, Larger()));
        const A spread = high - low;
        const bool fine = spread - spread == 0;
        const A part = spread / (A)LEVELS, scale = part > (A)LEAST ? part : (A)LEAST;
        if (!lane) {
            ranges[2 * g] = fine ? low : nan_of(low);
            ranges[2 * g + 1] = fine ? scale : nan_of(low);
            lows[i] = low;
            factors[i] = fine ? (A)UNIT / scale : (A)0;
        }
    }
    __syncthreads();
    const int i = threadIdx.x * BLOCK / group;
    const long long first = (long long)blockIdx.x * per * group + threadIdx.x * BLOCK;
    if (i >= per || first >= n) return;
    const int size = n - first < BLOCK ? (int)(n - first) : BLOCK;
    const A low = lows[i], factor = factors[i];
    unsigned packed[BITS] = {};
    if (factor != 0) {
        unsigned long long words[4];
        philox_words(first / BLOCK + skipped, seed, *step, words);
        #pragma unroll
        for (int j = 0; j < BLOCK; j++) {
            if (j >= size) break;
            A moved = (widen(x[first + j]) - low) * factor;
            moved = moved < (A)LEVELS * (A)UNIT ? moved : (A)LEVELS * (A)UNIT;
            const unsigned upper = (unsigned)(words[j / 8] >> j % 8 * 8) & 255;
            const unsigned lower = (unsigned)(words[j / 8 ^ 2] >> j % 8 * 8) & 255;
            const unsigned code = ((unsigned)(int)nearest(moved) + (upper << 8 | lower)) >> POINT;
            packed[j * BITS / 32] |= code << j * BITS % 32;
        }
    }
    unsigned char* at = codes + first * BITS / 8;
    if (size == BLOCK && whole) {
        for (int j = 0; j < BITS; j++) ((unsigned*)at)[j] = packed[j];
        return;
    }
    for (int j = 0; j < (size * BITS + 7) / 8; j++) at[j] = (unsigned char)(packed[j / 4] >> j % 4 * 8);
"""

_DECOMPRESS = """    const long long e = ((long long)blockIdx.x * blockDim.x + threadIdx.x) * LANES;
    if (e >= n) return;
    const A low = ranges[e / group * 2], scale = ranges[e / group * 2 + 1];
    const int size = n - e < LANES ? (int)(n - e) : LANES;
    unsigned bits = 0;
    for (int j = 0; j < (size * BITS + 7) / 8; j++) bits |= (unsigned)codes[e * BITS / 8 + j] << 8 * j;
    Pack<T, LANES> found;
    for (int j = 0; j < LANES; j++) {
        const A moved = (A)(bits >> j * BITS & LEVELS) * scale;
        found.of[j] = narrow<T>(low + moved);
    }
    if (whole && size == LANES)
        *(Pack<T, LANES>*)(y + e) = found;
    else
        for (int j = 0; j < size; j++) y[e + j] = found.of[j];
"""


def _written(text: str, dtype: str, bits: int) -> str:
    """The text with its types and numbers."""
    names = {
        "A": f"typedef {COMPUTE[dtype]} A;", "T": f"typedef {C_TYPES[dtype]} T;",
        "numbers": f"enum {{ BITS = {bits}, LEVELS = {(1 << bits) - 1}, BLOCK = {BLOCK}, POINT = {POINT}, "
        f"THREADS = {_THREADS}, LONGEST = {LONGEST}, PER_MOST = {LONGEST // BLOCK}, UNIT = {1 << POINT}, "
        f"LANES = {_LANES} }};",
    }  # fmt: skip
    return "".join(f"    {n}\n" for n in names.values()) + text.replace("LEAST", f"{LEAST!r}")


@functools.cache
def compress(dtype: str, bits: int) -> Kernel:
    """Ranges and codes; `whole`: codes may be written as words."""
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    parameters = (
        f"const {c}* x, const unsigned long long* step, unsigned long long seed, unsigned char* codes, {a}* ranges, "
        "long long n, int group, long long skipped, bool whole"
    )
    before = PHILOX_WORDS + _KEYS[a]
    return Kernel(f"compress_{dtype}_{bits}", parameters, _written(_COMPRESS, dtype, bits), before, threads=_THREADS)


@functools.cache
def decompress(dtype: str, bits: int) -> Kernel:
    """Elements; `whole`: they may be written as vectors."""
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    parameters = f"const unsigned char* codes, const {a}* ranges, {c}* y, long long n, int group, bool whole"
    return Kernel(f"decompress_{dtype}_{bits}", parameters, _written(_DECOMPRESS, dtype, bits))


@family("CompressGroups")
class Compressing(Family):
    """(x, step) → codes, ranges."""

    def accepts(self, op: Operator) -> bool:
        return True

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule = op.of(CompressGroups)
        x, step, codes, ranges = ins[0], ins[1], outs[0], outs[1]
        assert x is not None and codes is not None and ranges is not None
        if not x.size:
            return []
        each = LONGEST // rule.group * rule.group
        seed, whole = int(np.array(rule.seed, np.uint64)), codes.address % 4 == 0
        arguments = (x, step, seed, codes, ranges, x.size, rule.group, rule.first // BLOCK, whole)
        return [compress(x.dtype, rule.bits).blocks(-(-x.size // each), args=arguments)]


@family("DecompressGroups")
class Decompressing(Family):
    """(codes, ranges) → y."""

    def accepts(self, op: Operator) -> bool:
        return True

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule = op.of(DecompressGroups)
        codes, ranges, y = ins[0], ins[1], outs[0]
        assert y is not None
        if not y.size:
            return []
        k = decompress(y.dtype, rule.bits)
        return [k(-(-y.size // _LANES), codes, ranges, y, y.size, rule.group, aligned([y.address]))]
