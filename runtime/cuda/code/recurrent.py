"""Code of a step of a recurrent operator and of its gradient: what is done with each element.

A thread has one of the `size` = rows · n elements of a state.  Addresses may be null: no bias, lengths, state, ...
Rows whose sequence has ended before step t are not `active`: they keep their state, and no gradient flows into their
gates.

The same texts make kernels of one step, behind a product of cuBLAS, and those of all steps (resident.py).  A text has
four parts: what belongs to a hidden unit (before `//@UNIT`), what a thread declares, what it reads that no other thread
writes (behind `//@READ`), and what follows its product (behind `//@MEET`), which `return` ends.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from ..device.kernel import C_TYPES, COMPUTE, Kernel

_HEAD = """    typedef @T T;
    typedef @A A;
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const long long row = i / n;
    const int j = (int)(i - row * n);
    const bool active = !lengths || lengths[row] > t;
"""
LOGISTIC = "template <class A> DEVICE A logistic(A x) { return 1 / (1 + exp_of(-x)); }"
#: h is the state where lengths differ, else y is; before: the state before (null: zeros)
_STATE = """    y[i] = narrow<T>(active ? next : 0);
    if (h) h[i] = narrow<T>(active ? next : before ? (A)widen(before[i]) : 0);"""

_LSTM = """    A b[4] = {};
    for (int k = 0; bias && k < 4; k++) b[k] = (A)widen(bias[k * n + j]) + (A)widen(bias[(4 + k) * n + j]);
//@UNIT
    T* g = gates + row * 4 * n + j;
    A c = 0, v[4] = {};
//@READ
    if (cell) c = widen(cell[i]);
    for (int k = 0; k < 4; k++) v[k] = widen(g[k * n]);
//@MEET
    for (int k = 0; k < 4; k++) v[k] = v[k] @ADD[k] + b[k];
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
_RNN = """    const A b = bias ? (A)widen(bias[j]) + (A)widen(bias[n + j]) : 0;
//@UNIT
    A x = 0;
//@READ
    x = widen(gates[i]);
//@MEET
    const A v = x @ADD[0] + b;
    const A next = @F;
"""
#: update, reset, new; `linear`: the reset gate's factor is the product h rᵀ + b, else it has been applied before
_GRU = """    A b[6] = {};
    for (int k = 0; bias && k < 6; k++) b[k] = widen(bias[k * n + j]);
//@UNIT
    T* g = gates + row * 3 * n + j;
    A x[3] = {}, q[3];
//@READ
    for (int k = 0; k < 3; k++) x[k] = widen(g[k * n]);
//@MEET
    for (int k = 0; k < 3; k++) q[k] = @Q;
    const A z = linear ? logistic(x[0] + b[0] + q[0] + b[3]) : x[0];
    const A r = linear ? logistic(x[1] + b[1] + q[1] + b[4]) : x[1];
    const A inner = q[2] + b[5];
    const A made = tanh_of(x[2] + b[2] + (linear ? r * inner : inner));
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

_BACK = """    A down = 0, flow = 0, old = 0, v[4] = {};
    @OWN
//@READ
    down = dh[i];
    if (dy && active) flow = widen(dy[i]);
"""
_BEHIND = """//@MEET
    down = down @ADD[0];
    @KEEP
    const A e = down + flow;
"""
#: those of the gates; four of each unit are kept
_KEPT = """    for (int k = 0; k < 4; k++) v[k] = widen(kept[row * 4 * n + j + k * n]);
    if (before) old = widen(before[i]);
"""
_NONE = """    T* g = dg + row * 4 * n + j;
    if (!active) {
        for (int k = 0; k < 4; k++) g[k * n] = narrow<T>((A)0);
        return;
    }
"""
_LSTM_BACK = f"""{_BACK.replace("@OWN", "A now = 0, past = 0;")}{_KEPT}    now = widen(cell[i]);
    past = dc[i];
{_BEHIND}{_NONE}    const A gi = v[0], go = v[1], gf = v[2], gg = v[3], th = tanh_of(now);
    const A o = e * th * go * (1 - go);
    A c = past + e * go * (1 - th * th);
    if (peepholes) c += o * widen(peepholes[n + j]);
    const A in = c * gg * gi * (1 - gi), f = c * old * gf * (1 - gf);
    g[0] = narrow<T>(in);
    g[n] = narrow<T>(o);
    g[2 * n] = narrow<T>(f);
    g[3 * n] = narrow<T>(c * gi * (1 - gg * gg));
    dc[i] = c * gf + (peepholes ? in * widen(peepholes[j]) + f * widen(peepholes[2 * n + j]) : 0);
    dh[i] = 0;"""
_RNN_BACK = f"""{_BACK.replace("@OWN", "A x = 0;")}    x = widen(y[i]);
{_BEHIND}    dg[i] = narrow<T>(active ? (A)(e * (@SLOPE)) : (A)0);
    if (active) dh[i] = 0;"""
#: gradients in the order new, update, reset, and of h rₕᵀ + b: what meets r stands together
_GRU_BACK = f"""{_BACK.replace("@OWN", "")}{_KEPT}{_BEHIND}{_NONE}    const A z = v[0], r = v[1], made = v[2];
    const A d = e * (1 - z) * (1 - made * made);
    g[0] = narrow<T>(d);
    g[n] = narrow<T>(e * (old - made) * z * (1 - z));
    g[2 * n] = narrow<T>(d * v[3] * r * (1 - r));
    g[3 * n] = narrow<T>(d * r);
    dh[i] = e * z;"""
#: the older form: gradients in the order new, update, reset; then, when v = dnew · rₕ is known, the rest
_GRU_BACK_NEW = """    const A e = dh[i] + (dy && active ? (A)widen(dy[i]) : 0);
    T* g = dg + row * 3 * n + j;
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

TEXTS = {
    "lstm": ("T* gates, const T* bias, const T* peepholes, const T* cell, T* new_cell, const T* before, T* y, T* h",
             _LSTM + _STATE),
    "rnn": ("const T* gates, const T* bias, const T* before, T* y, T* h", _RNN + _STATE),
    "gru": ("T* gates, const T* product, const T* bias, T* kept, const T* before, T* y, T* h, int linear",
            _GRU + _STATE),
    "gru_open": ("T* gates, const T* product, const T* bias, const T* before, T* room", _GRU_OPEN),
    "lstm_back": ("const T* kept, const T* peepholes, const T* before, const T* cell, const T* dy, A* dh, A* dc, "
                  "T* dg",
                  _LSTM_BACK),
    "rnn_back": ("const T* y, const T* dy, A* dh, T* dg", _RNN_BACK),
    "gru_back": ("const T* kept, const T* before, const T* dy, A* dh, T* dg", _GRU_BACK),
    "gru_back_new": ("const T* kept, const T* before, const T* dy, A* dh, T* dg", _GRU_BACK_NEW),
    "gru_back_reset": ("const T* kept, const T* before, const A* v, A* dh, T* dg", _GRU_BACK_RESET),
}  # fmt: skip
#: the simple network's activations, and their slopes from their results
_ACTIVATIONS = {
    "Tanh": ("tanh_of(v)", "1 - x * x"), "Relu": ("larger(v, (A)0)", "x > 0 ? 1 : 0"),
    "Sigmoid": ("logistic(v)", "x * (1 - x)"), "": ("", ""),
}  # fmt: skip


@functools.cache
def step(name: str, dtype: str, lengths: str, activation: str = "") -> Kernel:
    """One of the texts: its own parameters, then (lengths, t, n, size); `lengths`: their element type."""
    declarations, body = TEXTS[name]
    fill = {"@ADD[k]": "", "@ADD[0]": "", "@KEEP": "", "@Q": "before ? (A)widen(product[row * 3 * n + j + k * n]) : 0"}
    text = filled_in(_HEAD + body, dtype, activation, fill)
    parameters = f"{typed(declarations, dtype)}, const {C_TYPES[lengths]}* lengths, int t, int n, long long size"
    return Kernel(f"{name}{activation.lower()}_{dtype}", parameters, text, LOGISTIC)


def parts(name: str) -> tuple[str, ...]:
    """A text's four parts."""
    unit, _, rest = TEXTS[name][1].rpartition("//@UNIT\n")
    return (unit, *re.split("//@READ\n|//@MEET\n", rest))


def filled_in(text: str, dtype: str, activation: str, fill: Mapping[str, str]) -> str:
    """The text for an element type and an activation, with what stands for its marks."""
    forward, slope = _ACTIVATIONS[activation]
    marks = {**fill, "@T": C_TYPES[dtype], "@A": COMPUTE[dtype], "@F": forward, "@SLOPE": slope}
    for mark in sorted(marks, key=len, reverse=True):
        text = text.replace(mark, marks[mark])
    return text


def typed(parameters: str, dtype: str) -> str:
    """Parameters of T* and A* with their types."""
    return parameters.replace("T*", f"{C_TYPES[dtype]}*").replace("A*", f"{COMPUTE[dtype]}*")


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


@functools.cache
def bias_sums(dtype: str) -> Kernel:
    """y [blocks · n] = the sums over the parts of x [parts, columns].

    Which block of n columns a block of y is the sum of: four bits of `order` for each.
    """
    body = f"""    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const int block = (int)(i / n), column = (int)(order >> 4 * block & 15) * n + (int)(i - (long long)block * n);
    {COMPUTE[dtype]} sum = x[column];
    for (int p = 1; p < parts; p++) sum += x[(long long)p * columns + column];
    y[i] = narrow<{C_TYPES[dtype]}>(sum);"""
    parameters = (f"const {COMPUTE[dtype]}* x, {C_TYPES[dtype]}* y, int columns, int parts, int n, "
                  "unsigned long long order, long long size")  # fmt: skip
    return Kernel(f"bias_sums_{dtype}", parameters, body)
