"""Code of a step of a recurrent operator and of its gradient: what is done with each element, and small products.

A thread has one of the `size` = rows · n elements of a state.  Addresses may be null: no bias, lengths, state, ...
Rows whose sequence has ended before step t are not `active`: they keep their state, and no gradient flows into their
gates.

A step's product is a launch before this one, or part of it (`fused`): a block then has a square of SIDE rows and SIDE
units, each of its warps a part of the terms, of which a thread adds up 2 rows by 4 units, for all gates; at the end a
thread adds up the warps' sums of one element.
"""

from __future__ import annotations

import functools
from typing import Any

from ..device.kernel import C_TYPES, COMPUTE, Kernel

_HEAD = """    typedef @T T;
    typedef @A A;
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const long long row = i / n;
    const int j = (int)(i - row * n);
    const bool active = !lengths || lengths[row] > t;
"""
#: rows, and units, of a block of a step with its product
SIDE = 16
#: `acc`: the products of a thread's element, by gate.  GATES results a unit; weights [gates, n, terms] (KEPT: forward)
#: or [terms, n]; PACK terms or units are read at a time, which does not change the order of sums; rows and units behind
#: the last are read as the last
_PRODUCT = """
template <int GATES, bool KEPT, int PACK, class T, class A>
DEVICE void multiply(A* acc, const T* x, int apart, int terms, const T* w, int n, int rows)
{
    __shared__ A sums[8][GATES][16][17];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int first = (lane >> 2) * 2, left_unit = (lane & 3) * 4;
    const int row = blockIdx.y * 16 + first, unit = blockIdx.x * 16 + left_unit;
    A sum[GATES][2][4];
#pragma unroll
    for (int g = 0; g < GATES; g++)
        for (int i = 0; i < 8; i++) sum[g][i / 4][i % 4] = 0;
    const int share = (terms + 31) / 32 * 4, end = min(terms, (warp + 1) * share);
    const T* own[2] = {x + (long long)min(row, rows - 1) * apart, x + (long long)min(row + 1, rows - 1) * apart};
#pragma unroll 2
    for (int k = warp * share; k < end; k += PACK) {
        Pack<T, PACK> left[2] = {*(const Pack<T, PACK>*)(own[0] + k), *(const Pack<T, PACK>*)(own[1] + k)};
        if (KEPT) {
#pragma unroll
            for (int g = 0; g < GATES; g++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    const T* line = w + ((long long)g * n + min(unit + j, n - 1)) * terms;
                    const auto right = *(const Pack<T, PACK>*)(line + k);
#pragma unroll
                    for (int p = 0; p < PACK; p++)
                        for (int i = 0; i < 2; i++)
                            sum[g][i][j] = fma_of((A)widen(left[i].of[p]), (A)widen(right.of[p]), sum[g][i][j]);
                }
        } else {
#pragma unroll
            for (int p = 0; p < PACK; p++) {
                const T* line = w + (long long)(k + p) * n;
#pragma unroll
                for (int j = 0; j < 4; j += PACK) {
                    const auto right = *(const Pack<T, PACK>*)(line + min(unit + j, n - PACK));
#pragma unroll
                    for (int o = 0; o < PACK; o++)
                        for (int i = 0; i < 2; i++)
                            sum[0][i][j + o] = fma_of((A)widen(left[i].of[p]), (A)widen(right.of[o]), sum[0][i][j + o]);
                }
            }
        }
    }
#pragma unroll
    for (int g = 0; g < GATES; g++)
        for (int i = 0; i < 8; i++) sums[warp][g][first + i / 4][left_unit + i % 4] = sum[g][i / 4][i % 4];
    __syncthreads();
#pragma unroll
    for (int g = 0; g < GATES; g++) {
        acc[g] = sums[0][g][threadIdx.x / 16][threadIdx.x % 16];
        for (int v = 1; v < 8; v++) acc[g] += sums[v][g][threadIdx.x / 16][threadIdx.x % 16];
    }
}
"""
_FUSED_HEAD = """    typedef @T T;
    typedef @A A;
    A acc[@GATES] = {};
    if (@X) multiply<@GATES, @KEPT, @PACK>(acc, @X, @APART, @TERMS, weights, n, (int)(size / n));
    const long long row = (long long)blockIdx.y * 16 + threadIdx.x / 16;
    const int j = blockIdx.x * 16 + threadIdx.x % 16;
    if (row * n >= size || j >= n) return;
    const long long i = row * n + j;
    const bool active = !lengths || lengths[row] > t;
"""
_SIGMOID = "template <class A> DEVICE A logistic(A x) { return 1 / (1 + exp_of(-x)); }"
#: h is the state where lengths differ, else y is; before: the state before (null: zeros)
_STATE = """    const A s = before ? (A)widen(before[i]) : 0;
    y[i] = narrow<T>(active ? next : 0);
    if (h) h[i] = narrow<T>(active ? next : s);"""

_LSTM = """    T* g = gates + row * 4 * n + j;
    const A c = cell ? (A)widen(cell[i]) : 0;
    A v[4];
    for (int k = 0; k < 4; k++)
        v[k] = widen(g[k * n]) @ADD[k] + (bias ? (A)widen(bias[k * n + j]) + (A)widen(bias[(4 + k) * n + j]) : 0);
    if (peepholes) {
        v[0] += c * widen(peepholes[j]);
        v[2] += c * widen(peepholes[2 * n + j]);
    }
    v[0] = logistic(v[0]);
    v[2] = logistic(v[2]);
    v[3] = tanh_of(v[3]);
    const A made = v[2] * c + v[0] * v[3];
    v[1] = logistic(peepholes ? v[1] + made * widen(peepholes[n + j]) : v[1]);
    for (int k = 0; k < 4; k++) g[k * n] = narrow<T>(v[k]);
    new_cell[i] = narrow<T>(active ? made : c);
    const A next = v[1] * tanh_of(made);
"""
_RNN = """    const A v = widen(gates[i]) @ADD[0] + (bias ? (A)widen(bias[j]) + (A)widen(bias[n + j]) : 0);
    const A next = @F;
"""
#: update, reset, new; `linear`: the reset gate's factor is the product h rᵀ + b, else it has been applied before
_GRU = """    T* g = gates + row * 3 * n + j;
    A v[3], q[3];
    for (int k = 0; k < 3; k++) {
        v[k] = widen(g[k * n]) + (bias ? (A)widen(bias[k * n + j]) : 0);
        q[k] = @Q;
    }
    const A z = linear ? logistic(v[0] + q[0] + (bias ? (A)widen(bias[3 * n + j]) : 0)) : (A)widen(g[0]);
    const A r = linear ? logistic(v[1] + q[1] + (bias ? (A)widen(bias[4 * n + j]) : 0)) : (A)widen(g[n]);
    const A inner = q[2] + (bias ? (A)widen(bias[5 * n + j]) : 0);
    const A made = tanh_of(v[2] + (linear ? r * inner : inner));
    if (kept) {
        T* k = kept + row * (linear ? 4 : 3) * n + j;
        k[0] = narrow<T>(z);
        k[n] = narrow<T>(r);
        k[2 * n] = narrow<T>(made);
        if (linear) k[3 * n] = narrow<T>(inner);
    }
    const A next = ((before ? (A)widen(before[i]) : 0) - made) * z + made;
"""
_GRU_OPEN = """    T* g = gates + row * 3 * n + j;
    const T* q = product + row * 3 * n + j;
    A v[2];
    for (int k = 0; k < 2; k++) {
        v[k] = widen(g[k * n]) + (before ? (A)widen(q[k * n]) : 0);
        if (bias) v[k] += (A)widen(bias[k * n + j]) + (A)widen(bias[(3 + k) * n + j]);
        v[k] = logistic(v[k]);
        g[k * n] = narrow<T>(v[k]);
    }
    if (before) room[i] = narrow<T>(v[1] * widen(before[i]));"""

# -- back: dh (and dc) are gradients of the state behind the step, and become what flows past its products ------------

_BACK = """    const A down = dh[i] @ADD[0];
    @KEEP
    const A e = down + (dy && active ? (A)widen(dy[i]) : 0);
"""
_LSTM_BACK = """    T* g = dg + row * 4 * n + j;
    const T* a = gates + row * 4 * n + j;
    if (!active) {
        for (int k = 0; k < 4; k++) g[k * n] = narrow<T>((A)0);
        return;
    }
    const A gi = widen(a[0]), go = widen(a[n]), gf = widen(a[2 * n]), gg = widen(a[3 * n]);
    const A th = tanh_of((A)widen(cell[i])), old = before ? (A)widen(before[i]) : 0;
    const A o = e * th * go * (1 - go);
    A c = dc[i] + e * go * (1 - th * th);
    if (peepholes) c += o * widen(peepholes[n + j]);
    const A in = c * gg * gi * (1 - gi), f = c * old * gf * (1 - gf);
    g[0] = narrow<T>(in);
    g[n] = narrow<T>(o);
    g[2 * n] = narrow<T>(f);
    g[3 * n] = narrow<T>(c * gi * (1 - gg * gg));
    dc[i] = c * gf + (peepholes ? in * widen(peepholes[j]) + f * widen(peepholes[2 * n + j]) : 0);
    dh[i] = 0;"""
_RNN_BACK = """    const A v = widen(y[i]);
    dg[i] = narrow<T>(active ? (A)(e * (@SLOPE)) : (A)0);
    if (active) dh[i] = 0;"""
#: gradients in the order new, update, reset, and of h rₕᵀ + b: what meets r stands together
_GRU_BACK = """    T* g = dg + row * 4 * n + j;
    const T* a = kept + row * 4 * n + j;
    if (!active) {
        for (int k = 0; k < 4; k++) g[k * n] = narrow<T>((A)0);
        return;
    }
    const A z = widen(a[0]), r = widen(a[n]), made = widen(a[2 * n]), old = before ? (A)widen(before[i]) : 0;
    const A d = e * (1 - z) * (1 - made * made);
    g[0] = narrow<T>(d);
    g[n] = narrow<T>(e * (old - made) * z * (1 - z));
    g[2 * n] = narrow<T>(d * widen(a[3 * n]) * r * (1 - r));
    g[3 * n] = narrow<T>(d * r);
    dh[i] = e * z;"""
#: the older form: gradients in the order new, update, reset; then, when v = dnew · rₕ is known, the rest
_GRU_BACK_NEW = """    T* g = dg + row * 3 * n + j;
    const T* a = kept + row * 3 * n + j;
    if (!active) {
        for (int k = 0; k < 2; k++) g[k * n] = narrow<T>((A)0);
        return;
    }
    const A z = widen(a[0]), made = widen(a[2 * n]), old = before ? (A)widen(before[i]) : 0;
    g[0] = narrow<T>(e * (1 - z) * (1 - made * made));
    g[n] = narrow<T>(e * (old - made) * z * (1 - z));
    dh[i] = e * z;"""
_GRU_BACK_RESET = """    const A r = widen(kept[row * 3 * n + n + j]), old = before ? (A)widen(before[i]) : 0;
    dg[row * 3 * n + 2 * n + j] = narrow<T>(active ? (A)(v[i] * old * r * (1 - r)) : (A)0);
    if (active) dh[i] += v[i] * r;"""

_TEXTS = {
    "lstm": ("T* gates, const T* bias, const T* peepholes, const T* cell, T* new_cell, const T* before, T* y, T* h",
             _LSTM + _STATE),
    "rnn": ("const T* gates, const T* bias, const T* before, T* y, T* h", _RNN + _STATE),
    "gru": ("T* gates, const T* product, const T* bias, T* kept, const T* before, T* y, T* h, int linear",
            _GRU + _STATE),
    "gru_open": ("T* gates, const T* product, const T* bias, const T* before, T* room", _GRU_OPEN),
    "lstm_back": ("const T* gates, const T* peepholes, const T* before, const T* cell, const T* dy, A* dh, A* dc, "
                  "T* dg",
                  _BACK + _LSTM_BACK),
    "rnn_back": ("const T* y, const T* dy, A* dh, T* dg", _BACK + _RNN_BACK),
    "gru_back": ("const T* kept, const T* before, const T* dy, A* dh, T* dg", _BACK + _GRU_BACK),
    "gru_back_new": ("const T* kept, const T* before, const T* dy, A* dh, T* dg", _BACK + _GRU_BACK_NEW),
    "gru_back_reset": ("const T* kept, const T* before, const A* v, A* dh, T* dg", _GRU_BACK_RESET),
}  # fmt: skip
#: results of a unit's products, forward
GATES = {"lstm": 4, "gru": 3, "rnn": 1}
#: the simple network's activations, and their slopes from their results
_ACTIVATIONS = {
    "Tanh": ("tanh_of(v)", "1 - v * v"), "Relu": ("larger(v, (A)0)", "v > 0 ? 1 : 0"),
    "Sigmoid": ("logistic(v)", "v * (1 - v)"), "": ("", ""),
}  # fmt: skip


@functools.cache
def step(name: str, dtype: str, lengths: str, activation: str = "") -> Kernel:
    """One of the texts: its own parameters, then (lengths, t, n, size); `lengths`: their element type."""
    fill = {"@ADD[k]": "", "@ADD[0]": "", "@KEEP": "", "@Q": "before ? (A)widen(product[row * 3 * n + j + k * n]) : 0"}
    return _kernel(name, name, dtype, lengths, activation, (_HEAD, "", "", fill))


@functools.cache
def fused_step(name: str, dtype: str, lengths: str, activation: str, pack: int) -> Kernel:
    """A step with its product: own parameters, (weights), backward (next, apart, terms), then as `step`'s.

    Forward: the product of the state before and weights [gates · n, n].  Backward: that of the gates' gradients of the
    step after, `terms` columns of rows that are `apart` elements apart, and weights [terms, n].  `pack`: 4, or 1 where
    the sizes are no multiples of 4 or operands begin between multiples of 4 elements.
    """
    forward = not name.endswith("_back")
    fill = {"@ADD[k]": "+ acc[k]", "@ADD[0]": "+ acc[0]", "@KEEP": "if (!active) dh[i] = down;", "@Q": "acc[k]"}
    fill |= (
        {"@X": "before", "@APART": "n", "@TERMS": "n"}
        if forward
        else {"@X": "next", "@APART": "apart", "@TERMS": "terms"}
    )
    fill |= {"@GATES": str(GATES[name] if forward else 1), "@KEPT": str(forward).lower(), "@PACK": str(pack)}
    more = "const T* weights, " if forward else "const T* weights, const T* next, int apart, int terms, "
    return _kernel(name, f"{name}_step{pack}", dtype, lengths, activation, (_FUSED_HEAD, _PRODUCT, more, fill))


def _kernel(
    name: str, title: str, dtype: str, lengths: str, activation: str, made: tuple[str, str, str, Any]
) -> Kernel:
    head, before, more, fill = made
    own, body = _TEXTS[name]
    text, parameters = head + body, f"{own}, {more}"
    fill = {**fill, "@T": C_TYPES[dtype], "@A": COMPUTE[dtype]}
    fill |= {"@F": _ACTIVATIONS[activation][0], "@SLOPE": _ACTIVATIONS[activation][1]}
    for mark in sorted(fill, key=len, reverse=True):
        text = text.replace(mark, fill[mark])
    parameters = parameters.replace("T*", f"{C_TYPES[dtype]}*").replace("A*", f"{COMPUTE[dtype]}*")
    parameters += f"const {C_TYPES[lengths]}* lengths, int t, int n, long long size"
    return Kernel(f"{title}{activation.lower()}_{dtype}", parameters, text, before + _SIGMOID)


@functools.cache
def shifting(dtype: str, lengths: str) -> Kernel:
    """z [steps, rows, n] = the state before each step, of y (`apart` elements from one step to the next) and h0.

    `factor`: gates [steps, rows, width], one of which the state is multiplied by (null: none).
    """
    c = C_TYPES[dtype]
    body = f"""    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size * steps) return;
    const int t = (int)(i / size), from = back ? t + 1 : t - 1;
    const long long at = i - t * size, row = at / n;
    const bool first = from < 0 || from >= steps || (back && lengths && h0 && lengths[row] <= from);
    {COMPUTE[dtype]} s = first ? (h0 ? widen(h0[at]) : 0) : widen(y[from * apart + at]);
    if (factor) s *= widen(factor[(t * (size / n) + row) * width + at % n]);
    z[i] = narrow<{c}>(s);"""
    parameters = (f"const {c}* y, const {c}* h0, const {c}* factor, {c}* z, const {C_TYPES[lengths]}* lengths, "
                  "int back, int steps, int n, int width, long long size, long long apart")  # fmt: skip
    return Kernel(f"states_before_{dtype}", parameters, body)


@functools.cache
def column_sums(dtype: str, result: str) -> Kernel:
    """y [parts, columns] = sums over the rows of each part of x, whose rows are `stride` apart; 32 columns a block.

    `factor` [rows, columns]: what the elements are multiplied by first (null: nothing).
    """
    wide = COMPUTE[dtype]
    body = f"""    __shared__ {wide} sums[8][33];
    const int column = blockIdx.x * 32 + (threadIdx.x & 31), lane = threadIdx.x >> 5;
    const long long begin = rows * blockIdx.y / gridDim.y, end = rows * (blockIdx.y + 1) / gridDim.y;
    {wide} sum = 0;
    if (column < columns)
        for (long long r = begin + lane; r < end; r += 8)
            sum += widen(x[r * stride + column]) * (factor ? ({wide})widen(factor[r * columns + column]) : 1);
    sums[lane][threadIdx.x & 31] = sum;
    __syncthreads();
    if (lane == 0 && column < columns) {{
        for (int k = 1; k < 8; k++) sum += sums[k][threadIdx.x];
        y[(long long)blockIdx.y * columns + column] = narrow<{C_TYPES[result]}>(sum);
    }}"""
    parameters = (f"const {C_TYPES[dtype]}* x, const {C_TYPES[dtype]}* factor, {C_TYPES[result]}* y, long long rows, "
                  "int stride, int columns")  # fmt: skip
    return Kernel(f"column_sums_{dtype}", parameters, body)
