"""The text of kernels of sketches; see ops/approximation/drawn.py and transforms.py for what they compute."""

from __future__ import annotations

import functools

from ..device.kernel import C_TYPES, COMPUTE, Kernel
from .philox import PHILOX

FLOATS = ("f16", "bf16", "f32", "f64")
_DRAWN = "const unsigned long long* step, unsigned long long seed"
#: counts of the upper 12 bits, then of the lower ones, give the last that is taken and how many equal to it
_CHOOSE = """    __shared__ unsigned bins[4096];
    __shared__ long long before[257], equal[257];
    __shared__ int high, low;
    __shared__ long long less;
    const long long each = (n + blockDim.x - 1) / blockDim.x;
    const long long begin = min(n, each * threadIdx.x), end = min(n, begin + each);
    for (int round = 0; round < 2; round++) {
        for (int b = threadIdx.x; b < 4096; b += blockDim.x)
            bins[b] = 0;
        __syncthreads();
        for (long long i = threadIdx.x; i < n; i += blockDim.x)
            if (!round || keys[i] >> 12 == high)
                atomicAdd(&bins[round ? keys[i] & 4095 : keys[i] >> 12], 1u);
        __syncthreads();
        if (threadIdx.x == 0) {
            long long sum = round ? less : 0;
            int b = 0;
            while (b < 4095 && sum + (long long)bins[b] < wanted)
                sum += bins[b++];
            less = sum;
            if (round) low = b;
            else high = b;
        }
        __syncthreads();
    }
    const int last = high * 4096 + low;
    long long smaller_ = 0, same = 0;
    for (long long i = begin; i < end; i++) {
        smaller_ += keys[i] < last;
        same += keys[i] == last;
    }
    before[threadIdx.x] = smaller_;
    equal[threadIdx.x] = same;
    __syncthreads();
    if (threadIdx.x == 0) {
        long long at = 0, ties = wanted - less;
        for (int t = 0; t < (int)blockDim.x; t++) {
            const long long taken = min(ties, equal[t]), own = before[t];
            before[t] = at;
            equal[t] = taken;
            at += own + taken;
            ties -= taken;
        }
    }
    __syncthreads();
    long long at = before[threadIdx.x], ties = equal[threadIdx.x];
    for (long long i = begin; i < end; i++)
        if (keys[i] < last || (keys[i] == last && ties-- > 0))
            chosen[at++] = i;
"""
_AT = "    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;\n"


@functools.cache
def choose() -> Kernel:
    """The smallest `wanted` of the numbers, ascending by place, by one block; each thread has a part of the places."""
    return Kernel("sketch_choose", "const int* keys, long long* chosen, long long n, long long wanted", _CHOOSE)


@functools.cache
def load(dtype: str) -> Kernel:
    """Signed columns [2, M, width] in the order of the transform, zeros behind the last row."""
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    body = f"""{_AT}    if (i >= size * width) return;
    const long long part = i / (size / 2 * width), at = i - part * (size / 2 * width), m = at / width;
    const long long t = 2 * m + part;
    const long long row = cosines ? (2 * t < size ? 2 * t : 2 * (size - 1 - t) + 1) : t;
    z[i] = row < rows ? widen(x[row * n + start + (at - m * width)]) * signs[row] : ({a})0;
"""
    sizes = "long long rows, long long n, long long start, long long width, long long size, int cosines"
    return Kernel(f"sketch_load_{dtype}", f"const {c}* x, const {a}* signs, {a}* z, {sizes}", body)


@functools.cache
def butterflies(dtype: str) -> Kernel:
    """A step: pairs of complex rows that are `run` apart."""
    c = C_TYPES[dtype]
    body = f"""{_AT}    if (i >= half / 2 * width) return;
    const long long pair = i / width, j = pair % run, first = (pair / run * 2 * run + j) * width + (i - pair * width);
    {c} *re = z + first, *im = z + half * width + first;
    const long long apart = run * width, t = j * (half / 2 / run);
    const {c} co = table[t], si = table[half / 2 + t];
    const {c} a = re[0] - re[apart], b = im[0] - im[apart];
    re[0] = re[0] + re[apart];
    im[0] = im[0] + im[apart];
    re[apart] = fma_of(a, co, b * si);
    im[apart] = fma_of(b, co, -(a * si));
"""
    parameters = f"{c}* z, const {c}* table, long long half, long long run, long long width"
    return Kernel(f"sketch_butterflies_{dtype}", parameters, body)


@functools.cache
def save(dtype: str) -> Kernel:
    """The wanted coefficients of some columns."""
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    body = f"""{_AT}    if (i >= wanted * width) return;
    const long long j = i / width, column = i - j * width;
    const {a} *p = z + places[2 * j] * width + column, *q = z + places[2 * j + 1] * width + column;
    const long long im = half * width;
    const {a} low = fma_of(p[0], factors[4 * j], p[im] * factors[4 * j + 1]);
    const {a} high = fma_of(q[0], factors[4 * j + 2], q[im] * factors[4 * j + 3]);
    y[j * n + start + column] = narrow<{c}>(low + high);
"""
    sizes = "long long wanted, long long n, long long start, long long width, long long half"
    return Kernel(
        f"sketch_save_{dtype}", f"const {a}* z, const long long* places, const {a}* factors, {c}* y, {sizes}", body
    )


@functools.cache
def normal(dtype: str) -> Kernel:
    """A block's numbers as columns of a row of a tile of S, without the scale."""
    c, end = C_TYPES[dtype], "f" if dtype == "f32" else ""
    body = f"""{_AT}    const long long panels = (columns + 7) / 8;
    if (i >= panels * high) return;
    const long long r = i / panels, p = i - r * panels;
    unsigned u[8];
    philox((panel + p) * rows + row + r, seed, *step, u);
    for (int k = 0; k < 8 && p * 8 + k < columns; k++) {{
        const {c} unit = ({c})5.9604644775390625e-8, a = ({c})u[k & ~1] * unit;
        const {c} angle = ({c})u[k | 1] * unit * ({c})6.283185307179586;
        const {c} radius = sqrt_of(({c})-2 * log_of(({c})1 - a));
        s[r * columns + p * 8 + k] = radius * (k & 1 ? sin{end}(angle) : cos{end}(angle));
    }}
"""
    sizes = "long long panel, long long row, long long rows, long long high, long long columns"
    return Kernel(f"sketch_normal_{dtype}", f"{_DRAWN}, {c}* s, {sizes}", body, PHILOX)
