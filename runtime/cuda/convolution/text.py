"""The kernels of convolution.py's products: both factors pass through shared memory, two steps at a time.

While a step's terms are multiplied, those of the next one are on their way; a thread multiplies groups of four rows by
groups of four columns, `fmaf` by `fmaf` in the order of the terms.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence

from ..device.kernel import C_TYPES, COMPUTE, Kernel
from .gathered import Gather, Three, Tile, inside


def constants(**values: int | bool) -> str:
    """A line of CUDA C that declares constants."""
    return "    const int " + ", ".join(f"{k} = {int(v)}" for k, v in values.items()) + ";\n"


def filled(text: str, words: Mapping[str, object]) -> str:
    """A text with @WORDS replaced."""
    return re.sub(r"@([A-Z0-9]+)", lambda m: str(words.get(m[1], m[0])), text)


def strides(size: Three, channels: int, last: bool) -> tuple[int, int, int]:
    """Elements from one image, channel and position to the next."""
    positions = math.prod(size)
    return (positions * channels, 1, channels) if last else (positions * channels, positions, 1)


def linear(size: Three, names: Sequence[str]) -> str:
    """The number of a position: of its coordinates, those of axes with several elements."""
    text = "0"
    for n, name in zip(size, names, strict=True):
        if n > 1:
            text = name if text == "0" else f"({text}) * {n} + {name}"
    return text


def apart(what: str, count: Three, names: Sequence[str], kind: str = "int") -> str:
    """Declares the coordinates of position number `what`."""
    a, b, c = count
    return (
        f"{kind} {names[0]} = {what} / {b * c}, {names[1]} = {what} / {c} % {b}, {names[2]} = {what} % {c};"
        if a > 1
        else f"{kind} {names[0]} = 0, {names[1]} = {what} / {c}, {names[2]} = {what} % {c};"
    )


#: threads of a warp lie `LX` along the columns; a thread's rows (columns) are groups of four, `RS` (`CS`) apart
PLACES = """    const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const int TX = BN / TN, tx = warp % (TX / LX) * LX + lane % LX, ty = warp / (TX / LX) * (32 / LX) + lane / LX;
    const int RS = TM > 4 ? BM / 2 : BM, CS = TN > 4 ? BN / 2 : BN;
    __shared__ Pack<A, 4> as[2][BK][BM / 4 + 1], bs[2][BK][BN / 4 + 1];
"""
MULTIPLY = """        if (step >= first) {
            #pragma unroll
            for (int k = 0; k < BK; k++) {
                Pack<A, 4> a[TM / 4], b[TN / 4];
                #pragma unroll
                for (int i = 0; i < TM / 4; i++) a[i] = as[step & 1][k][(i * RS) / 4 + ty];
                #pragma unroll
                for (int j = 0; j < TN / 4; j++) b[j] = bs[step & 1][k][(j * CS) / 4 + tx];
                #pragma unroll
                for (int i = 0; i < TM; i++)
                    #pragma unroll
                    for (int j = 0; j < TN; j++)
                        sum[i][j] = fma_of(a[i / 4].of[i % 4], b[j / 4].of[j % 4], sum[i][j]);
            }
        }
"""
SUMS = """    A sum[TM][TN];
    #pragma unroll
    for (int i = 0; i < TM; i++)
        #pragma unroll
        for (int j = 0; j < TN; j++) sum[i][j] = 0;
"""


def sum_kind(*sizes: int) -> str:
    """The type of an element count: 64 bits where 32 are not enough."""
    return "long long" if max(sizes) >= 1 << 30 else "int"


# -- a convolution's output, and its input's gradient -----------------------------------------------------------------

_GATHER = """    int at = blockIdx.x;
    const int m0 = at % MT * BM; at /= MT;
    const int group = at % G; at /= G;
    const long long n0 = (long long)at * BN;
    __shared__ long long place[BN], image[BN];  // of each column: its result (-1: there is none), its source
    __shared__ int start[3][BN];
    for (int j = tid; j < BN; j += TH) {
        long long n = n0 + j, i = n / Q;
        int q = (int)(n - i * Q);
        @Q
        place[j] = n < columns ? i * TARGET_IMAGE + (long long)group * M * TARGET_CHANNEL
                   + (long long)(@P) * TARGET_POSITION : -1;
        image[j] = n < columns ? i * SOURCE_IMAGE + (long long)group * C * SOURCE_CHANNEL : 0;
        start[0][j] = n < columns ? @S0 : -(1 << 30);  // outside
        start[1][j] = @S1;
        start[2][j] = @S2;
    }
    __syncthreads();
    const Pack<A, 4>* rows = (const Pack<A, 4>*)w + (long long)group * STEPS * BK * (MP / 4) + m0 / 4;
    const int first = (int)((long long)STEPS * blockIdx.y / gridDim.y);
    const int end = (int)((long long)STEPS * (blockIdx.y + 1) / gridDim.y);
    Pack<A, 4> a[LA];
    A b[LB];
"""
_GATHER_LOOP = """    for (int step = first - 1; step < end; step++) {
        if (step + 1 < end) {
            const int k0 = (step + 1) * BK;
            #pragma unroll
            for (int i = 0; i < LA; i++) {
                int v = tid + i * TH;
                if (v < BK * BM / 4) a[i] = rows[(long long)(k0 + v / (BM / 4)) * (MP / 4) + v % (BM / 4)];
            }
@LOAD
        }
@MULTIPLY
        if (step + 1 < end) {
            const int to = (step + 1) & 1;
            #pragma unroll
            for (int i = 0; i < LA; i++) {
                int v = tid + i * TH;
                if (v < BK * BM / 4) as[to][v / (BM / 4)][v % (BM / 4)] = a[i];
            }
            #pragma unroll
            for (int i = 0; i < LB; i++) ((A*)bs[to][@ROW])[@COLUMN] = b[i];
            __syncthreads();
        }
    }
"""
#: a thread's column and its rows, in neighbouring columns; or, channels last, its row and its columns
ROW, COLUMN = ("tid / BN + i * (TH / BN)", "tid % BN"), ("tid % BK", "tid / BK + i * (TH / BK)")
#: or four neighbouring rows
_FOURS = ("tid % (BK / 4) * 4 + i % 4", "tid / (BK / 4) + i / 4 * (TH / (BK / 4))")


@functools.cache
def gather(g: Gather, t: Tile, *, result: str, bias: bool, pack: bool, fours: bool = False) -> Kernel:
    """A Gather: (packed weights, source, bias, result, columns).

    `result`: its element type; parts of sums go to places of their own, one after the other.  `pack`: four results
    that are neighbours in memory are written at once; `fours`: four channels are read at once.
    """
    wide = COMPUTE[g.dtype]
    head = f"    typedef {C_TYPES[g.dtype]} T;\n    typedef {wide} A;\n    typedef {C_TYPES[result]} O;\n"
    source = strides(g.source, g.group * g.channels, g.last)
    target = strides(g.target, g.group * g.rows, g.last)
    taps, mt = math.prod(g.taps), -(-g.rows // t.bm)
    head += constants(
        BM=t.bm, BN=t.bn, BK=t.bk, TM=t.tm, TN=t.tn, TH=t.threads, LX=4 if g.last and t.bm >= 8 * t.tm else 8, G=g.group
    )
    head += constants(M=g.rows, MT=mt, MP=mt * t.bm, C=g.channels, TAPS=taps, STEPS=g.steps(t), Q=g.positions,
                       LA=-(-t.bk * t.bm // (4 * t.threads)), LB=t.bk * t.bn // t.threads)  # fmt: skip
    head += "    const long long " + ", ".join(
        f"{k}_{n} = {v}"
        for k, vs in (("SOURCE", source), ("TARGET", target))
        for n, v in zip(("IMAGE", "CHANNEL", "POSITION"), vs, strict=True)
    )
    body = head + ";\n" + PLACES + SUMS + _gather_text(g, t, _places(g, fours=fours)) + _results(g.last, bias, pack)
    size = f"long long columns, long long size, const {C_TYPES[g.dtype]}* bias"
    name = f"convolution_{g.dtype}_{t.bm}x{t.bn}"
    return Kernel(
        name, f"const {wide}* w, const {C_TYPES[g.dtype]}* x, {C_TYPES[result]}* y, {size}", body, threads=t.threads,
        beside=beside(t, wide),
    )  # fmt: skip


def beside(t: Tile, wide: str) -> int:
    """Two blocks of the largest tile: 128 registers a thread, of which the compiler would take a few more."""
    return 2 if wide == "float" and t.tm * t.tn == 64 else 0


def _places(g: Gather, *, fours: bool) -> tuple[str, str]:
    """A thread's row and column number i of what is read."""
    return _FOURS if fours else COLUMN if g.last else ROW


def _gather_text(g: Gather, t: Tile, places_of: tuple[str, str]) -> str:
    text = _GATHER.replace("@Q", apart("q", g.count, ("q0", "q1", "q2")))
    places = [f"(q{i} * {g.step[i]} + {g.base[i]})" for i in range(3)]
    text = text.replace("@P", linear(g.target, places))
    for i in range(3):
        text = text.replace(f"@S{i}", f"q{i} * {g.scale[i]} + {g.origin[i]}")
    row, column = places_of
    loop = _GATHER_LOOP.replace("@ROW", row).replace("@COLUMN", column)
    return text + loop.replace("@LOAD", _gather_load(g, t, places_of)).replace("@MULTIPLY", MULTIPLY.rstrip())


def _gather_load(g: Gather, t: Tile, places_of: tuple[str, str]) -> str:
    """Reads what lies under the taps, for the next step."""
    kind = sum_kind(math.prod(g.source) * g.group * g.channels)
    within = [
        f"(unsigned)i{i} < {g.source[i]}u"
        for i in range(3)
        if i == 0 or not inside(g.source[i], g.count[i], max(g.taps[i], 1), g.scale[i], g.origin[i], g.delta[i])
    ]
    at = linear(g.source, ("i0", "i1", "i2"))
    offset = f"({kind})({at}) * SOURCE_POSITION + ({kind})c * SOURCE_CHANNEL"
    row, column = places_of
    place = [
        f"int i{i} = start[{i}][j] + t{i} * {g.delta[i]};" if g.taps[i] > 1 else f"int i{i} = start[{i}][j];"
        for i in range(3)
    ]
    taps: Three = tuple(max(n, 1) for n in g.taps)  # type: ignore[assignment]
    if g.channels % t.bk == 0:  # one tap for all of a step
        common = ["const int t = k0 / C, c0 = k0 % C;", apart("t", taps, ("t0", "t1", "t2"))]
        lines = [f"const int j = {column}, c = c0 + {row};", *place, f"const bool in = {' && '.join(within)};",
               f"const T* from = x + image[j] + {offset};"]  # fmt: skip
        if not g.last:  # and one column for all of a thread's elements
            fixed = [common[0], common[1], *[line.replace(" + i * (TH / BN)", "") for line in lines]]
            read = "b[i] = in ? widen(from[i * (TH / BN) * SOURCE_CHANNEL]) : 0;"
            return _block(fixed, [read])
        if places_of is _FOURS:
            lines += ["Pack<T, 4> e;", "if (in) e = *(const Pack<T, 4>*)from;",
                    "for (int l = 0; l < 4; l++) b[i + l] = in ? widen(e.of[l]) : 0;"]  # fmt: skip
            return _block(common, lines).replace("i++", "i += 4")
        return _block(common, [*lines, "b[i] = in ? widen(*from) : 0;"])
    lines = [f"const int j = {column}, k = k0 + {row}, t = k / C, c = k % C;", apart("t", taps, ("t0", "t1", "t2")),
           *place, f"const bool in = t < TAPS && {' && '.join(within)};",
           f"b[i] = in ? widen(x[image[j] + {offset}]) : 0;"]  # fmt: skip
    return _block([], lines)


def _block(before: Sequence[str], each: Sequence[str]) -> str:
    pad = " " * 12
    lines = [*(pad + line for line in before), f"{pad}#pragma unroll", f"{pad}for (int i = 0; i < LB; i++) {{"]
    return "\n".join([*lines, *(f"{pad}    {line}" for line in each), f"{pad}}}"])


def _results(last: bool, bias: bool, pack: bool) -> str:
    """Writes a thread's sums."""
    add = " + (A)widen(bias[group * M + m])" if bias else ""
    if last:
        return _RESULTS_LAST.replace("@WRITE", _PACKED_LAST if pack else _SINGLE_LAST).replace("@ADD", add)
    return _RESULTS.replace("@WRITE", _PACKED if pack else _SINGLE).replace("@ADD", add)


_RESULTS = """    O* to = y + blockIdx.y * size;
    #pragma unroll
    for (int i = 0; i < TM; i++) {
        const int m = m0 + i / 4 * RS + ty * 4 + i % 4;
        if (m >= M) continue;
        #pragma unroll
        for (int j = 0; j < TN; j += 4) {
            const int n = j / 4 * CS + tx * 4;
@WRITE
        }
    }"""
_PACKED = """            if (place[n] < 0) continue;
            Pack<O, 4> o;
            #pragma unroll
            for (int l = 0; l < 4; l++) o.of[l] = narrow<O>(sum[i][j + l]@ADD);
            *(Pack<O, 4>*)(to + place[n] + m * TARGET_CHANNEL) = o;"""
_SINGLE = """            #pragma unroll
            for (int l = 0; l < 4; l++)
                if (place[n + l] >= 0) to[place[n + l] + m * TARGET_CHANNEL] = narrow<O>(sum[i][j + l]@ADD);"""
_RESULTS_LAST = """    O* to = y + blockIdx.y * size;
    #pragma unroll
    for (int j = 0; j < TN; j++) {
        const long long n = place[j / 4 * CS + tx * 4 + j % 4];
        if (n < 0) continue;
        #pragma unroll
        for (int i = 0; i < TM; i += 4) {
            int m = m0 + i / 4 * RS + ty * 4;
@WRITE
        }
    }"""
_PACKED_LAST = """            if (m >= M) continue;
            Pack<O, 4> o;
            #pragma unroll
            for (int l = 0; l < 4; l++, m++) o.of[l] = narrow<O>(sum[i + l][j]@ADD);
            *(Pack<O, 4>*)(to + n + (m - 4)) = o;"""
_SINGLE_LAST = """            #pragma unroll
            for (int l = 0; l < 4; l++, m++)
                if (m < M) to[n + m] = narrow<O>(sum[i + l][j]@ADD);"""


@functools.cache
def packing(dtype: str, result: str) -> Kernel:
    """Weights as a Gather reads them, [group, (tap, channel), rows], zeros behind the last term and row.

    Of w, `per_group`, `per_row` and `per_channel` elements are from one to the next; taps are `start + t0 · s0 + ...`.
    """
    body = f"""    typedef {COMPUTE[dtype]} A;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    int m = (int)(i % padded);
    long long k = i / padded;
    int group = (int)(k / steps), t = (int)(k % steps) / channels, c = (int)(k % steps) % channels;
    int tap = start + t / (n1 * n2) * s0 + t / n2 % n1 * s1 + t % n2 * s2;
    A v = m < rows && t < taps ? (A)widen(w[group * per_group + m * per_row + c * per_channel + tap]) : 0;
    y[i] = narrow<{C_TYPES[result]}>(v);"""
    parameters = (
        f"const {C_TYPES[dtype]}* w, {C_TYPES[result]}* y, long long size, int padded, int steps, int rows, "
        "int channels, int taps, int n1, int n2, int start, int s0, int s1, int s2, long long per_group, "
        "long long per_row, long long per_channel"
    )
    return Kernel(f"pack_weights_{dtype}", parameters, body)


@functools.cache
def adding(dtype: str, bias: bool) -> Kernel:
    """The sums of `parts` parts in their order, and a bias for each channel, `inner` elements of which lie together."""
    wide = COMPUTE[dtype]
    add = "\n    sum += (A)widen(bias[i / inner % channels]);" if bias else ""
    body = f"""    typedef {wide} A;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    A sum = x[i];
    #pragma unroll 8
    for (int p = 1; p < parts; p++) sum += x[i + p * size];{add}
    y[i] = narrow<{C_TYPES[dtype]}>(sum);"""
    parameters = f"const {wide}* x, {C_TYPES[dtype]}* y, long long size, int parts"
    extra = f", const {C_TYPES[dtype]}* bias, long long inner, long long channels" if bias else ""
    return Kernel(f"add_parts_{dtype}", parameters + extra, body)
