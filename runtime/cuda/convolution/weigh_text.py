"""The kernels of convolution's gradient with respect to its weight; see text.py."""

from __future__ import annotations

import functools
import math

from ..device.kernel import C_TYPES, COMPUTE, Kernel
from .gathered import Three, Tile, Weigh, inside
from .text import COLUMN, MULTIPLY, PLACES, ROW, SUMS, apart, beside, constants, linear, strides, sum_kind

_WEIGH_START = """    int at = blockIdx.x;
    const int m0 = at % MT * BM; at /= MT;
    const int n0 = at % NT * BN;
    const int group = at / NT;
    __shared__ I offset[BN];  // of each column: from where a window starts, in elements and along each axis
    __shared__ int ahead[3][BN];
    for (int j = tid; j < BN; j += TH) {
        int n = n0 + j, c = @C, t = @T;
        @TAP
        offset[j] = (I)c * X_CHANNEL + (I)(@D) * X_POSITION;
        ahead[0][j] = n < N ? t0 * @D0 : -(1 << 30);  // outside
        ahead[1][j] = t1 * @D1;
        ahead[2][j] = t2 * @D2;
    }
    __syncthreads();
    const K steps = (terms + BK - 1) / BK;
    const K first = (K)((long long)steps * blockIdx.y / gridDim.y);
    const K end = (K)((long long)steps * (blockIdx.y + 1) / gridDim.y);
    A a[LA], b[LB];
"""


_WEIGH_LOOP = """    for (K step = first - 1; step < end; step++) {
        if (step + 1 < end) {
            const K k0 = (step + 1) * BK;
@LOAD
        }
@MULTIPLY
        if (step + 1 < end) {
            const int to = (step + 1) & 1;
            #pragma unroll
            for (int i = 0; i < LA; i++) ((A*)as[to][@AROW])[@ACOLUMN] = a[i];
            #pragma unroll
            for (int i = 0; i < LB; i++) ((A*)bs[to][@BROW])[@BCOLUMN] = b[i];
            __syncthreads();
        }
    }
    O* to = dw + ((long long)blockIdx.y * G + group) * M * N;
    #pragma unroll
    for (int i = 0; i < TM; i++) {
        const int m = m0 + i / 4 * RS + ty * 4 + i % 4;
        if (m >= M) continue;
        #pragma unroll
        for (int j = 0; j < TN; j++) {
            const int n = n0 + j / 4 * CS + tx * 4 + j % 4;
            if (n < N) to[(long long)m * N + @N] = narrow<O>(sum[i][j]);
        }
    }"""


@functools.cache
def weigh(g: Weigh, t: Tile, *, result: str, kind: str) -> Kernel:
    """A Weigh: (x, dy, dw, terms); `result`: the element type of dw, or of its parts; `kind`: what counts terms."""
    wide, taps = COMPUTE[g.dtype], math.prod(g.taps)
    x = strides(g.source, g.group * g.channels, g.last)
    y = strides(g.count, g.group * g.rows, g.last)
    index = sum_kind(x[0], y[0])
    head = f"    typedef {C_TYPES[g.dtype]} T;\n    typedef {wide} A;\n    typedef {C_TYPES[result]} O;\n"
    head += f"    typedef {kind} K;\n    typedef {index} I;\n"
    head += constants(BM=t.bm, BN=t.bn, BK=t.bk, TM=t.tm, TN=t.tn, TH=t.threads, LX=8, G=g.group, M=g.rows,
                       N=g.columns, MT=-(-g.rows // t.bm), NT=-(-g.columns // t.bn), C=g.channels, TAPS=taps,
                       Q=g.positions, LA=t.bk * t.bm // t.threads, LB=t.bk * t.bn // t.threads)  # fmt: skip
    head += "    const long long " + ", ".join(
        f"{k}_{n} = {v}"
        for k, vs in (("X", x), ("Y", y))
        for n, v in zip(("IMAGE", "CHANNEL", "POSITION"), vs, strict=True)
    )
    text = _WEIGH_START + _WEIGH_LOOP.replace("@LOAD", _weigh_load(g)).replace("@MULTIPLY", MULTIPLY.rstrip())
    taps_of: Three = tuple(max(n, 1) for n in g.taps)  # type: ignore[assignment]
    ahead = linear(g.source, [f"t{i} * {g.delta[i]}" for i in range(3)])
    rows = ROW if g.last else COLUMN
    for word, value in {
        "@C": "n % C" if g.last else "n / TAPS", "@TAP": apart("t", taps_of, ("t0", "t1", "t2")),
        "@T": "n / C" if g.last else "n % TAPS", "@N": "(n % C * TAPS + n / C)" if g.last else "n",
        "@D0": str(g.delta[0]), "@D1": str(g.delta[1]), "@D2": str(g.delta[2]), "@D": ahead,
        "@AROW": rows[0].replace("BN", "BM"), "@ACOLUMN": rows[1].replace("BN", "BM"),
        "@BROW": rows[0], "@BCOLUMN": rows[1],
    }.items():  # fmt: skip
        text = text.replace(word, value)
    parameters = f"const {C_TYPES[g.dtype]}* x, const {C_TYPES[g.dtype]}* dy, {C_TYPES[result]}* dw, {kind} terms"
    return Kernel(f"weight_gradient_{g.dtype}_{t.bm}x{t.bn}", parameters, head + ";\n" + PLACES + SUMS + text,
                  threads=t.threads, beside=beside(t, wide))  # fmt: skip


def _weigh_load(g: Weigh) -> str:
    """Reads the next step's terms: a thread has one term of several rows and columns, or, channels last, one row and
    one column of several terms."""
    pad = " " * 12
    at = linear(g.source, ("s0", "s1", "s2"))
    term = [
        "const bool there = k < terms;", "const K n = k / Q;", "const int q = (int)(k - n * Q);",
        apart("q", g.count, ("q0", "q1", "q2")),
        *(f"const int s{i} = q{i} * {g.scale[i]} + {g.origin[i]};" for i in range(3)),
        f"const T* from = x + n * X_IMAGE + (long long)group * C * X_CHANNEL + (I)({at}) * X_POSITION;",
        "const T* dyk = dy + n * Y_IMAGE + (long long)group * M * Y_CHANNEL + (I)q * Y_POSITION;",
    ]  # fmt: skip
    within = [
        f"(unsigned)(s{i} + ahead[{i}][j]) < {g.source[i]}u"
        for i in range(3)
        if i == 0 or not inside(g.source[i], g.count[i], max(g.taps[i], 1), g.scale[i], g.origin[i], g.delta[i])
    ]
    read = f"b[i] = there && {' && '.join(within)} ? widen(from[offset[j]]) : 0;"
    other = "a[i] = there && m < M ? widen(dyk[(I)m * Y_CHANNEL]) : 0;"
    if not g.last:
        lines = [
            "const K k = k0 + tid % BK;", *term, "#pragma unroll", "for (int i = 0; i < LA; i++) {",
            "    const int m = m0 + tid / BK + i * (TH / BK);", f"    {other}", "}", "#pragma unroll",
            "for (int i = 0; i < LB; i++) {", "    const int j = tid / BK + i * (TH / BK);", f"    {read}", "}",
        ]  # fmt: skip
    else:
        lines = [
            "#pragma unroll", "for (int i = 0; i < LA; i++) {", "    const K k = k0 + tid / BM + i * (TH / BM);",
            *(f"    {line}" for line in (term[0], term[1], term[2], term[-1])), "    const int m = m0 + tid % BM;",
            f"    {other}", "}", "#pragma unroll", "for (int i = 0; i < LB; i++) {",
            "    const K k = k0 + tid / BN + i * (TH / BN);", *(f"    {line}" for line in term[:-1]),
            "    const int j = tid % BN;", f"    {read}", "}",
        ]  # fmt: skip
    return "\n".join(pad + line for line in lines)
