"""Products of a warp, from shared memory to registers: c [16, 8n] += a [16, length] · b.

The lanes have their elements of c as tensor cores hand them out, whoever multiplies: lane 4g + u has rows g and g + 8,
columns 8j + 2u and 8j + 2u + 1 in c[j].  `times_rows`: b is stored as [8n, length]; `times_columns`: as [length, 8n].
A warp multiplies by tensor cores (mma.sync, compute capability 8.0 and newer) or by fused multiply-adds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """How elements of `dtype` are multiplied: stored in shared memory as `stored`, added up in `added` (C types).

    `step`: terms at a time.
    """

    dtype: str
    stored: str
    added: str
    tensor: bool
    step: int


#: 16-bit floats by tensor cores; float32 only where it may be rounded to TF32
WAYS: dict[str, Way] = {
    "f64": Way("f64", "double", "double", False, 4),
    "f32": Way("f32", "float", "float", False, 4),
    "tf32": Way("f32", "float", "float", True, 8),
    "f16": Way("f16", "f16", "float", True, 16),
    "bf16": Way("bf16", "bf16", "float", True, 16),
}

_BY_FMA = """
template <int COUNT> DEVICE void times_rows(A (*c)[4], const S* a, int la, const S* b, int lb, int length)
{
    const int g = (threadIdx.x & 31) >> 2, u = threadIdx.x & 3;
    for (int k = 0; k < length; k += 4) {
        const Pack<S, 4> a0 = *(const Pack<S, 4>*)(a + g * la + k), a1 = *(const Pack<S, 4>*)(a + (g + 8) * la + k);
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            const Pack<S, 4> b0 = *(const Pack<S, 4>*)(b + (8 * j + 2 * u) * lb + k);
            const Pack<S, 4> b1 = *(const Pack<S, 4>*)(b + (8 * j + 2 * u + 1) * lb + k);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                c[j][0] = fma_of(widen(a0.of[i]), widen(b0.of[i]), c[j][0]);
                c[j][1] = fma_of(widen(a0.of[i]), widen(b1.of[i]), c[j][1]);
                c[j][2] = fma_of(widen(a1.of[i]), widen(b0.of[i]), c[j][2]);
                c[j][3] = fma_of(widen(a1.of[i]), widen(b1.of[i]), c[j][3]);
            }
        }
    }
}
template <int COUNT> DEVICE void times_columns(A (*c)[4], const S* a, int la, const S* b, int lb, int length, int count)
{
    const int g = (threadIdx.x & 31) >> 2, u = threadIdx.x & 3;
    for (int k = 0; k < length; k += 4) {
        const Pack<S, 4> a0 = *(const Pack<S, 4>*)(a + g * la + k), a1 = *(const Pack<S, 4>*)(a + (g + 8) * la + k);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const A x = widen(a0.of[i]), y = widen(a1.of[i]);
#pragma unroll
            for (int j = 0; j < COUNT; j++) {
                if (j < count) {
                    const Pack<S, 2> z = *(const Pack<S, 2>*)(b + (k + i) * lb + 8 * j + 2 * u);
                    c[j][0] = fma_of(x, widen(z.of[0]), c[j][0]);
                    c[j][1] = fma_of(x, widen(z.of[1]), c[j][1]);
                    c[j][2] = fma_of(y, widen(z.of[0]), c[j][2]);
                    c[j][3] = fma_of(y, widen(z.of[1]), c[j][3]);
                }
            }
        }
    }
}
"""

# c (16 x 8) += a (16 x 8) · b (8 x 8) of float32 whose last 13 bits do not count
_MMA_TF32 = """
DEVICE void multiply(float* c, const unsigned* a, const unsigned* b)
{
#ifdef EMULATED
    struct Given { unsigned a[4], b[2]; };
    const Given* lanes = emulator::gathered(Given{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
    const int g = (threadIdx.x & 31) >> 2, u = threadIdx.x & 3;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 8; k++)
            c[i] = fmaf(__uint_as_float(lanes[4 * g + k % 4].a[i / 2 + k / 4 * 2] & 0xffffe000u),
                        __uint_as_float(lanes[4 * (2 * u + i % 2) + k % 4].b[k / 4] & 0xffffe000u), c[i]);
#else
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
DEVICE void left(unsigned* a, const float* from, int la, int k)
{
    const int g = (threadIdx.x & 31) >> 2, u = threadIdx.x & 3;
    for (int i = 0; i < 4; i++) a[i] = __float_as_uint(from[(g + i % 2 * 8) * la + k + u + i / 2 * 4]);
}
DEVICE void of_rows(unsigned* b, const float* from, int lb, int k)
{
    const int g = (threadIdx.x & 31) >> 2, u = threadIdx.x & 3;
    for (int i = 0; i < 2; i++) b[i] = __float_as_uint(from[g * lb + k + u + i * 4]);
}
DEVICE void of_columns(unsigned* b, const float* from, int lb, int k)
{
    const int g = (threadIdx.x & 31) >> 2, u = threadIdx.x & 3;
    for (int i = 0; i < 2; i++) b[i] = __float_as_uint(from[(k + u + i * 4) * lb + g]);
}
"""

# c (16 x 8) += a (16 x 16) · b (16 x 8) of 16-bit floats, two to a word
_MMA_HALF = """
DEVICE void multiply(float* c, const unsigned* a, const unsigned* b)
{
#ifdef EMULATED
    struct Given { unsigned a[4], b[2]; };
    const Given* lanes = emulator::gathered(Given{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
    const int g = (threadIdx.x & 31) >> 2, u = threadIdx.x & 3;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 16; k++) {
            const S x = {(unsigned short)(lanes[4 * g + k % 8 / 2].a[i / 2 + k / 8 * 2] >> k % 2 * 16)};
            const S y = {(unsigned short)(lanes[4 * (2 * u + i % 2) + k % 8 / 2].b[k / 8] >> k % 2 * 16)};
            c[i] = fmaf(widen(x), widen(y), c[i]);
        }
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.PTX.PTX.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
DEVICE void left(unsigned* a, const S* from, int la, int k)
{
    const int g = (threadIdx.x & 31) >> 2, u = threadIdx.x & 3;
    for (int i = 0; i < 4; i++) a[i] = *(const unsigned*)(from + (g + i % 2 * 8) * la + k + 2 * u + i / 2 * 8);
}
DEVICE void of_rows(unsigned* b, const S* from, int lb, int k)
{
    const int g = (threadIdx.x & 31) >> 2, u = threadIdx.x & 3;
    for (int i = 0; i < 2; i++) b[i] = *(const unsigned*)(from + g * lb + k + 2 * u + i * 8);
}
// neighbours in a word are from neighbouring rows: the first sixteen lanes name rows, which come back transposed
DEVICE void of_columns(unsigned* b, const S* from, int lb, int k)
{
    const S* row = from + (k + (threadIdx.x & 15)) * lb;
#ifdef EMULATED
    const S* const* rows = emulator::gathered(row);
    const int g = (threadIdx.x & 31) >> 2, u = threadIdx.x & 3;
    for (int i = 0; i < 2; i++) b[i] = rows[8 * i + 2 * u][g].bits | (unsigned)rows[8 * i + 2 * u + 1][g].bits << 16;
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(b[0]), "=r"(b[1]) : "r"((unsigned)__cvta_generic_to_shared(row)) : "memory");
#endif
}
"""

_BY_TENSOR_CORES = """
template <int COUNT> DEVICE void times_rows(A (*c)[4], const S* a, int la, const S* b, int lb, int length)
{
    for (int k = 0; k < length; k += STEP) {
        unsigned x[4], y[2];
        left(x, a, la, k);
#pragma unroll
        for (int j = 0; j < COUNT; j++) {
            of_rows(y, b + 8 * j * lb, lb, k);
            multiply(c[j], x, y);
        }
    }
}
template <int COUNT> DEVICE void times_columns(A (*c)[4], const S* a, int la, const S* b, int lb, int length, int count)
{
    for (int k = 0; k < length; k += STEP) {
        unsigned x[4], y[2];
        left(x, a, la, k);
#pragma unroll
        for (int j = 0; j < COUNT; j++)
            if (j < count) {
                of_columns(y, b + 8 * j, lb, k);
                multiply(c[j], x, y);
            }
    }
}
"""

# an element on its way to shared memory: of TF32, the nearest, ties away from zero
_PUT = {
    False: "DEVICE S put(A x) { return narrow<S>(x); }\n",
    True: """DEVICE S put(float x)
{
#if __CUDA_ARCH__ >= 800
    unsigned y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return __uint_as_float(y);
#else
    const unsigned y = __float_as_uint(x);
    return (y & 0x7f800000u) == 0x7f800000u ? x : __uint_as_float((y + 0x1000u) & 0xffffe000u);
#endif
}
""",
}


@functools.cache
def warp_products(name: str) -> str:
    """`put`, `times_rows` and `times_columns` for a way, with the types S (stored), A (added) and STEP."""
    way = WAYS[name]
    head = f"typedef {way.stored} S;\ntypedef {way.added} A;\nenum {{ STEP = {way.step} }};\n"
    head += _PUT[name == "tf32"]
    if not way.tensor:
        return head + _BY_FMA
    one = _MMA_TF32 if name == "tf32" else _MMA_HALF.replace("PTX", way.dtype)
    kernel_text = f"#if defined(EMULATED) || __CUDA_ARCH__ >= 800\n{one}{_BY_TENSOR_CORES}#else\n{_BY_FMA}#endif\n"
    return head + kernel_text
