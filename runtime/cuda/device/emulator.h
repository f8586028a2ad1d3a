// CUDA C on the processor: what NVRTC has built in, for kernels that run a block at a time, one thread after another.
// Threads that wait for each other are fibers with stacks of their own; the next one runs where the last one waits.
// Blocks of a resident kernel run at the same time, up to BLOCKS of them: each has shared memory of its own (SHARED).

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define EMULATED 1
#define __global__ static
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __shared__ static
#define __constant__ static const
#define __grid_constant__

extern "C" {
float expf(float), logf(float), tanhf(float), powf(float, float), erff(float), expm1f(float), log1pf(float), sinf(float),
    cosf(float), floorf(float), ceilf(float), rintf(float), truncf(float), fmodf(float, float), fabsf(float), sqrtf(float),
    fmaf(float, float, float), copysignf(float, float), tanf(float), asinf(float), acosf(float), atanf(float), sinhf(float),
    coshf(float), asinhf(float), acoshf(float), atanhf(float), fmaxf(float, float), fminf(float, float), log2f(float),
    exp2f(float), roundf(float), cbrtf(float), atan2f(float, float), lgammaf(float), tgammaf(float), hypotf(float, float);
double exp(double), log(double), tanh(double), pow(double, double), erf(double), expm1(double), log1p(double), sin(double),
    cos(double), floor(double), ceil(double), rint(double), trunc(double), fmod(double, double), fabs(double), sqrt(double),
    fma(double, double, double), copysign(double, double), tan(double), asin(double), acos(double), atan(double),
    sinh(double), cosh(double), asinh(double), acosh(double), atanh(double), fmax(double, double), fmin(double, double),
    log2(double), exp2(double), round(double), cbrt(double), atan2(double, double), lgamma(double), tgamma(double),
    hypot(double, double);
}

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct uint2 { unsigned x, y; };
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static const int warpSize = 32;

static inline unsigned __float_as_uint(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
static inline float __uint_as_float(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
static inline int __float_as_int(float x) { int u; memcpy(&u, &x, 4); return u; }
static inline float __int_as_float(int u) { float x; memcpy(&x, &u, 4); return x; }
static inline long long __double_as_longlong(double x) { long long u; memcpy(&u, &x, 8); return u; }
static inline double __longlong_as_double(long long u) { double x; memcpy(&x, &u, 8); return x; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int min(int a, int b) { return a < b ? a : b; }
static inline int max(int a, int b) { return a > b ? a : b; }
static inline long long min(long long a, long long b) { return a < b ? a : b; }
static inline long long max(long long a, long long b) { return a > b ? a : b; }
static inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
static inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
static inline float emulated_half_to_float(unsigned short h) { _Float16 x; memcpy(&x, &h, 2); return (float)x; }
static inline unsigned short emulated_float_to_half(float f)
{
    _Float16 x = (_Float16)f;
    unsigned short h;
    memcpy(&h, &x, 2);
    return h;
}
template <class T> static inline T __ldg(const T* p) { return *p; }
static bool counted;  // since a thread went on
template <class T> static inline T atomicAdd(T* p, T x) { T old = *p; *p = old + x; counted = true; return old; }
template <class T> static inline T atomicMax(T* p, T x) { T old = *p; if (x > old) *p = x; return old; }
template <class T> static inline T atomicMin(T* p, T x) { T old = *p; if (x < old) *p = x; return old; }
template <class T> static inline T atomicExch(T* p, T x) { T old = *p; *p = x; return old; }
template <class T> static inline T atomicCAS(T* p, T expected, T x)
{
    T old = *p;
    if (old == expected)
        *p = x;
    return old;
}
static inline unsigned atomicOr(unsigned* p, unsigned x) { unsigned old = *p; *p = old | x; return old; }
static inline int atomicOr(int* p, int x) { int old = *p; *p = old | x; return old; }

namespace emulator {

// AT_COUNT: until another thread has counted
enum State { READY, AT_BLOCK, AT_WARP, AT_COUNT, DONE };
struct Fiber {
    jmp_buf place;
    State state;
    uint3 index, block;
    int phase;
};
static const int BLOCKS = 160, MOST = BLOCKS * 256, STACK = 1 << 16;
static Fiber fibers[MOST];
static char* stacks;
static int stacked;
static unsigned long long slots[2][MOST];
static int current, count, all;  // fiber; threads of a block (of several: a multiple of 32); fibers
static jmp_buf scheduler;
static void (*body)(void**);
static void** arguments;

static void wait(State s)
{
    fibers[current].state = s;
    if (!_setjmp(fibers[current].place))
        _longjmp(scheduler, 1);
}
static ucontext_t maker;
static void start()
{
    if (_setjmp(fibers[current].place) == 0)
        setcontext(&maker);  // it is made; it runs when it is called for
    body(arguments);
    fibers[current].state = DONE;
    _longjmp(scheduler, 1);
}
static bool released(int from, int to, State s)
{
    for (int i = from; i < to; i++)
        if (fibers[i].state != s && fibers[i].state != DONE)
            return false;
    return true;
}
static bool release(int from, int to, State s)
{
    bool any = false;
    for (int i = from; i < to; i++)
        if (fibers[i].state == s) {
            fibers[i].state = READY;
            any = true;
        }
    return any;
}

static uint3 block_at(size_t b)
{
    return {(unsigned)(b % gridDim.x), (unsigned)(b / gridDim.x % gridDim.y), (unsigned)(b / gridDim.x / gridDim.y)};
}

// a block goes on until it waits for others; forwards, until it has counted for them, too, when what it has not written
// yet is missed: whether any of its threads went on
static bool ahead(int first, bool backwards)
{
    static volatile int i;
    static volatile bool any, moved;
    any = false;
    do {
        moved = false;
        for (i = 0; i < count; i++) {
            int at = first + (backwards ? count - 1 - i : i);
            if (fibers[at].state != READY)
                continue;
            current = at;
            threadIdx = fibers[at].index;
            blockIdx = fibers[at].block;
            counted = false;
            if (!_setjmp(scheduler))
                _longjmp(fibers[at].place, 1);
            moved |= fibers[current].state != AT_COUNT;
            if (counted && all > count && !backwards)
                return true;
        }
        for (int w = first; w < first + count; w += 32) {
            int end = w + 32 < first + count ? w + 32 : first + count;
            if (released(w, end, AT_WARP))
                moved |= release(w, end, AT_WARP);
        }
        if (released(first, first + count, AT_BLOCK))
            moved |= release(first, first + count, AT_BLOCK);
        any |= moved;
    } while (moved);
    return any;
}

// blocks of threads that meet, from `first` on; false where some wait for others that never come
static bool meeting_blocks(size_t first, int blocks, bool backwards)
{
    static volatile int i;
    all = blocks * count;
    if (all > stacked) {
        free(stacks);
        stacks = (char*)malloc((size_t)all * STACK);
        stacked = all;
    }
    for (i = 0; i < all; i++) {
        static ucontext_t made;
        Fiber& f = fibers[i];
        f.state = READY;
        f.phase = 0;
        unsigned t = i % count;
        f.index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
        f.block = block_at(first + i / count);
        getcontext(&made);
        made.uc_stack.ss_sp = stacks + (size_t)i * STACK;
        made.uc_stack.ss_size = STACK;
        made.uc_link = 0;
        makecontext(&made, start, 0);
        current = i;
        swapcontext(&maker, &made);
    }
    for (;;) {
        bool moved = false, left = false;
        for (int b = 0; b < blocks; b++)
            moved |= ahead((backwards ? blocks - 1 - b : b) * count, backwards);
        release(0, all, AT_COUNT);  // they look again
        for (int j = 0; j < all; j++)
            left |= fibers[j].state != DONE;
        if (!left)
            return true;
        if (!moved)
            return false;
    }
}

// 0, or 1 where threads wait for others that never come; `meets`: 1 where threads of a block wait for each other, 2 where
// blocks do; `backwards`: the last thread and block first
static int run(void (*kernel)(void**), void** args, const unsigned* grid, const unsigned* block, int meets, int backwards)
{
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    count = block[0] * block[1] * block[2];
    body = kernel;
    arguments = args;
    size_t blocks = (size_t)grid[0] * grid[1] * grid[2];
    if (meets == 2 && blocks * count <= MOST)
        return !meeting_blocks(0, blocks, backwards);
    for (size_t n = 0; n < blocks; n++) {
        size_t b = backwards ? blocks - 1 - n : n;
        blockIdx = block_at(b);
        if (meets) {
            if (!meeting_blocks(b, 1, backwards))
                return 1;
            continue;
        }
        for (int k = 0; k < count; k++) {
            unsigned t = backwards ? count - 1 - k : k;
            threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
            kernel(args);
        }
    }
    return 0;
}

template <class T> static inline T shuffled(T x, int from)
{
    static_assert(sizeof(T) <= 8, "at most eight bytes");
    Fiber& f = fibers[current];
    int phase = f.phase++ & 1;
    memcpy(&slots[phase][current], &x, sizeof(T));
    wait(AT_WARP);
    int warp = current & ~31;
    T y;
    memcpy(&y, &slots[phase][from < 32 && from >= 0 ? warp + from : current], sizeof(T));
    return y;
}

// what each thread of a warp gives, for all of them to read before they meet again
template <class T> static inline const T* gathered(const T& own)
{
    static T given[2][MOST];
    int phase = fibers[current].phase++ & 1;
    given[phase][current] = own;
    wait(AT_WARP);
    return given[phase] + (current & ~31);
}

}  // namespace emulator

static inline void __syncthreads() { emulator::wait(emulator::AT_BLOCK); }
static inline void __syncwarp(unsigned = ~0u) { emulator::wait(emulator::AT_WARP); }
static inline void __threadfence() {}
static inline void await_count(const unsigned* p, unsigned n)
{
    while (*p < n)
        emulator::wait(emulator::AT_COUNT);
}
#define SHARED(type, name, size)                                                                                       \
    static type name##_of[emulator::BLOCKS][size];                                                                     \
    type* const name = name##_of[emulator::current / emulator::count]
template <class T> static inline T __shfl_xor_sync(unsigned, T x, int o, int = 32)
{
    return emulator::shuffled(x, (emulator::current & 31) ^ o);
}
template <class T> static inline T __shfl_down_sync(unsigned, T x, int o, int = 32)
{
    return emulator::shuffled(x, (emulator::current & 31) + o);
}
template <class T> static inline T __shfl_up_sync(unsigned, T x, int o, int = 32)
{
    return emulator::shuffled(x, (emulator::current & 31) - o);
}
template <class T> static inline T __shfl_sync(unsigned, T x, int from, int = 32)
{
    return emulator::shuffled(x, from & 31);
}
static inline unsigned __ballot_sync(unsigned, int p)
{
    unsigned found = 0;
    for (int i = 0; i < 32; i++)
        found |= (unsigned)(emulator::shuffled(p != 0, i) ? 1 : 0) << i;
    return found;
}
