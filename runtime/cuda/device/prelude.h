// What generated kernels may use, without any header: NVRTC and the emulator's C++ compiler both read it.

#define DEVICE static __device__ __forceinline__

// -- halves: bits in memory, float in registers -----------------------------------------------------------------------

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

DEVICE float widen(float x) { return x; }
DEVICE double widen(double x) { return x; }
DEVICE float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
DEVICE float widen(f16 x)
{
#ifdef EMULATED
    return emulated_half_to_float(x.bits);
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#endif
}
DEVICE bool widen(bool x) { return x; }
DEVICE signed char widen(signed char x) { return x; }
DEVICE short widen(short x) { return x; }
DEVICE int widen(int x) { return x; }
DEVICE long long widen(long long x) { return x; }
DEVICE unsigned char widen(unsigned char x) { return x; }
DEVICE unsigned short widen(unsigned short x) { return x; }
DEVICE unsigned widen(unsigned x) { return x; }
DEVICE unsigned long long widen(unsigned long long x) { return x; }

// to the nearest, ties to even
DEVICE f16 float_to_f16(float x)
{
    f16 y;
#ifdef EMULATED
    y.bits = emulated_float_to_half(x);
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
    return y;
}
DEVICE bf16 float_to_bf16(float x)
{
    bf16 y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    unsigned u = __float_as_uint(x);
    y.bits = x != x ? 0x7fff : (unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
#endif
    return y;
}

// narrow<T>(x): x as an element in memory
template <class T> struct Narrow {
    template <class X> static __device__ __forceinline__ T of(X x) { return (T)x; }
};
template <> struct Narrow<f16> {
    static __device__ __forceinline__ f16 of(float x) { return float_to_f16(x); }
    static __device__ __forceinline__ f16 of(double x) { return float_to_f16((float)x); }
};
template <> struct Narrow<bf16> {
    static __device__ __forceinline__ bf16 of(float x) { return float_to_bf16(x); }
    static __device__ __forceinline__ bf16 of(double x) { return float_to_bf16((float)x); }
};
template <class T, class X> DEVICE T narrow(X x) { return Narrow<T>::of(x); }

// -- vectors of elements, read and written at once --------------------------------------------------------------------

template <class T, int N> struct alignas(sizeof(T) * N) Pack { T of[N]; };

// -- numbers ----------------------------------------------------------------------------------------------------------

template <class T> DEVICE T larger(T a, T b) { return a > b || a != a ? a : b; }    // NaN where one is
template <class T> DEVICE T smaller(T a, T b) { return a < b || a != a ? a : b; }
DEVICE float exp_of(float x) { return expf(x); }
DEVICE double exp_of(double x) { return exp(x); }
DEVICE float log_of(float x) { return logf(x); }
DEVICE double log_of(double x) { return log(x); }
DEVICE float sqrt_of(float x) { return sqrtf(x); }
DEVICE double sqrt_of(double x) { return sqrt(x); }
DEVICE float tanh_of(float x) { return tanhf(x); }
DEVICE double tanh_of(double x) { return tanh(x); }
DEVICE float fma_of(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE double fma_of(double a, double b, double c) { return fma(a, b, c); }
template <class T> DEVICE T infinity();
template <> __device__ __forceinline__ float infinity<float>() { return __uint_as_float(0x7f800000u); }
template <> __device__ __forceinline__ double infinity<double>()
{
    return __longlong_as_double(0x7ff0000000000000ll);
}

// -- sums and extrema over threads; the order is fixed, every thread gets the result ----------------------------------

struct Plus { template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return a + b; } };
struct Larger { template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return larger(a, b); } };
struct Smaller { template <class T> __device__ __forceinline__ T operator()(T a, T b) const { return smaller(a, b); } };

// all 32 threads of a warp must come here
template <class T, class F> DEVICE T warp_reduce(T x, F f)
{
    for (int o = 16; o; o >>= 1)
        x = f(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
}
// all threads of a block (of one dimension, a multiple of 32) must come here
template <class T, class F> __device__ T block_reduce(T x, F f)
{
    __shared__ T parts[32];
    x = warp_reduce(x, f);
    int warps = blockDim.x >> 5;
    if (warps == 1)
        return x;
    __syncthreads();  // the last reduction's parts have been read
    if ((threadIdx.x & 31) == 0)
        parts[threadIdx.x >> 5] = x;
    __syncthreads();
    T total = parts[0];
    for (int i = 1; i < warps; i++)
        total = f(total, parts[i]);
    return total;
}
