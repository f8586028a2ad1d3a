"""Whole-tensor reductions (norms, finiteness), and the updates that need them (LAMB, LARS).

A block looks at a span of elements; one block puts the spans' answers together, in order.  Sums of squares are f64.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ....language.element import Expr, equal, where
from ....language.ir import Operator
from ....language.types import FLOATS, TensorType, need, present
from ....ops.optimizer.base import work_dtype
from ....ops.optimizer.norm_updates import LambUpdate, LarsUpdate, SquareSums
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel
from ..families import Buffers, Family, family
from .loops import computed

#: elements of a block
SPAN = 8192
_SPAN = f"""\
    const long long stop = min(((long long)blockIdx.x + 1) * {SPAN}, n);
    for (long long i = (long long)blockIdx.x * {SPAN} + threadIdx.x; i < stop; i += blockDim.x) {{
"""
_SUM_PARTS = """\
DEVICE double sum_of(const double* parts, long long count)
{
    double a = 0;
    for (long long i = threadIdx.x; i < count; i += blockDim.x)
        a += parts[i];
    return block_reduce(a, Plus());
}
"""


@functools.cache
def squares(dtype: str) -> Kernel:
    """parts[block] = Σ (x · factor)² of its span; without a factor it is 1."""
    body = f"""    double a = 0;
    const double by = factor ? (double)*factor : 1;
{_SPAN}        const double v = (double)widen(x[i]) * by;
        a += v * v;
    }}
    a = block_reduce(a, Plus());
    if (threadIdx.x == 0)
        parts[blockIdx.x] = a;
"""
    parameters = f"const {C_TYPES[dtype]}* x, const float* factor, double* parts, long long n"
    return Kernel(f"squares_{dtype}", parameters, body)


@functools.cache
def total(out: str, function: str = "") -> Kernel:
    """Σ parts, or a function of it."""
    body = f"""    const double a = sum_of(parts, count);
    if (threadIdx.x == 0)
        *out = narrow<{C_TYPES[out]}>({function}(a));
"""
    parameters = f"const double* parts, {C_TYPES[out]}* out, long long count"
    return Kernel(f"total_{function}_{out}", parameters, body, _SUM_PARTS, 512)


def spans(size: int) -> int:
    """Blocks for that many elements."""
    return -(-size // SPAN)


@family("GlobalNorm")
class GlobalNorm(Family):
    """A launch for each input, and one that adds up."""

    takes = FLOATS

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        return (TensorType("f64", (sum(spans(v.type.size) for v in op.reads()),)),)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Input by input."""
        (parts,), (out, *_) = scratch, outs
        assert out is not None
        calls: list[Call] = []
        done = 0
        for x in ins:
            if x is not None and x.size:
                count = spans(x.size)
                calls.append(squares(x.dtype).blocks(count, args=(x, None, parts.at(done, (count,)), x.size)))
                done += count
        return [*calls, total(out.dtype, "sqrt").blocks(1, args=(parts, out, done))]


@family("SquareSums")
class SquaresOfParts(Family):
    """For each part a launch for each input, and one that adds up."""

    takes = FLOATS

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        parts = op.of(SquareSums).parts
        return (TensorType("f64", (sum(spans(-(-v.type.size // parts)) for v in op.reads()),)),)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        out, calls = need(outs[0]), list[Call]()
        for i in range(out.size):
            done = 0
            for x in (x.reshape(-1) for x in ins if x is not None):
                each = -(-x.size // out.size)
                size = min(each, x.size - min(i * each, x.size))
                if size:
                    sums = scratch[0].at(done, (spans(size),))
                    calls.append(squares(x.dtype).blocks(sums.size, args=(x.at(i * each, [size]), None, sums, size)))
                    done += sums.size
            calls.append(total("f64").blocks(1, args=(scratch[0], out.at(i, [1]), done)))
        return calls


@functools.cache
def infinite(dtype: str) -> Kernel:
    """parts[block] = whether an element of its span is infinite or NaN."""
    body = f"""    int a = 0;
{_SPAN}        const {COMPUTE[dtype]} v = widen(x[i]), zero = v - v;
        a |= zero != 0;
    }}
    a = block_reduce(a, Larger());
    if (threadIdx.x == 0)
        parts[blockIdx.x] = a;
"""
    return Kernel(f"infinite_{dtype}", f"const {C_TYPES[dtype]}* x, int* parts, long long n", body)


@functools.cache
def inverse() -> Kernel:
    """1 / scale, or 0 where a part says so."""
    body = """    int a = 0;
    for (long long i = threadIdx.x; i < count; i += blockDim.x)
        a |= parts[i];
    a = block_reduce(a, Larger());
    if (threadIdx.x == 0)
        *out = a ? 0.0f : 1.0f / *scale;
"""
    return Kernel("inverse_if_finite", "const int* parts, const float* scale, float* out, long long count", body)


@family("InverseIfFinite")
class InverseIfFinite(Family):
    """A launch for each gradient, and one that decides."""

    takes = FLOATS

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        return (TensorType("i32", (sum(spans(v.type.size) for v in (*op.reads(),)[1:]),)),)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Gradient by gradient."""
        (parts,), scale, out = scratch, ins[0], outs[0]
        calls: list[Call] = []
        done = 0
        for x in ins[1:]:
            if x is not None and x.size:
                count = spans(x.size)
                calls.append(infinite(x.dtype).blocks(count, args=(x, parts.at(done, (count,)), x.size)))
                done += count
        return [*calls, inverse().blocks(1, args=(parts, scale, out, done))]


# -- LAMB -------------------------------------------------------------------------------------------------------------

_UNSCALE = """\
    if (unscale && *unscale == 0) return;  // skipped: all keep their bits
    const A by_scale = unscale ? (A)*unscale : (A)1;
"""
_NUMBERS = """\
    __shared__ A numbers[2];
    if (threadIdx.x == 0) {
        const double t = (double)*step + 1.0, up = sqrt(1.0 - pow(beta2, t));
        numbers[0] = (A)(up / (1.0 - pow(beta1, t)));
        numbers[1] = (A)(up * epsilon);
    }
    __syncthreads();
    const A scale = numbers[0], small = numbers[1], decay = (A)weight_decay;
"""
_DIRECTION = "        const A below = sqrt_of(b) + small, u = a / below * scale, e = x * decay, r = u + e;\n"


def _lamb_parameters(w: str, g: str, work: str) -> str:
    a = COMPUTE[work]
    return (
        f"{C_TYPES[w]}* w, const {C_TYPES[g]}* g, {a}* m, {a}* v, const long long* step, double beta1, double beta2, "
        "double epsilon, double weight_decay, const float* unscale, long long n"
    )


@functools.cache
def lamb_moments(w: str, g: str, work: str) -> Kernel:
    """m and v, and of each span Σ w² and Σ r²."""
    body = f"""    typedef {COMPUTE[work]} A;
{_UNSCALE}{_NUMBERS}    const A keep1 = (A)beta1, keep2 = (A)beta2, new1 = (A)(1.0 - beta1), new2 = (A)(1.0 - beta2);
    double ww = 0, rr = 0;
{_SPAN}        const A x = (A)widen(w[i]), y = (A)widen(g[i]) * by_scale, y2 = y * y;
        const A a1 = m[i] * keep1, a2 = y * new1, a = a1 + a2;
        const A b1 = v[i] * keep2, b2 = y2 * new2, b = b1 + b2;
        m[i] = a;
        v[i] = b;
{_DIRECTION}        ww += (double)x * (double)x;
        rr += (double)r * (double)r;
    }}
    ww = block_reduce(ww, Plus());
    rr = block_reduce(rr, Plus());
    if (threadIdx.x == 0) {{
        parts[blockIdx.x] = ww;
        parts[gridDim.x + blockIdx.x] = rr;
    }}
"""
    return Kernel(f"lamb_moments_{w}_{g}", f"{_lamb_parameters(w, g, work)}, double* parts", body)


@functools.cache
def lamb_step(w: str, g: str, work: str) -> Kernel:
    """w - lr · trust · r."""
    body = f"""    typedef {COMPUTE[work]} A;
{_UNSCALE}{_NUMBERS}    const A by = *local;
{_SPAN}        const A x = (A)widen(w[i]), a = m[i], b = v[i];
{_DIRECTION}        const A down = r * by;
        w[i] = narrow<{C_TYPES[w]}>(x - down);
    }}
"""
    return Kernel(f"lamb_step_{w}_{g}", f"{_lamb_parameters(w, g, work)}, const {COMPUTE[work]}* local", body)


@functools.cache
def lamb_trust(rate: str, work: str) -> Kernel:
    """lr · ‖w‖ / ‖r‖, or lr where a norm is 0."""
    body = f"""    typedef {COMPUTE[work]} A;
    const double ww = sum_of(parts, count), rr = sum_of(parts + count, count);
    if (threadIdx.x == 0)
        *local = (A)(double)widen(*rate) * (A)(ww > 0 && rr > 0 ? sqrt(ww / rr) : 1.0);
"""
    parameters = f"const double* parts, const {C_TYPES[rate]}* rate, {COMPUTE[work]}* local, long long count"
    return Kernel(f"lamb_trust_{rate}_{work}", parameters, body, _SUM_PARTS, 512)


class Trust(Family):
    """The base of LAMB and LARS: two sums for each span, and the step's length."""

    def accepts(self, op: Operator) -> bool:
        return all(v.dtype in FLOATS or v.dtype == "i64" for v in op.reads())

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Sums of two tensors' spans, and a number."""
        w = need(op.inputs[0])
        return TensorType("f64", (2 * spans(w.type.size),)), TensorType(work_dtype(w.type), ())


@family("LambUpdate")
class Lamb(Trust):
    """Moments and norms, the ratio, the step."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Three launches."""
        w, g, m, v, rate, step, unscale = ins[:7]
        parts, local = scratch
        assert w is not None and g is not None and rate is not None
        if not w.size:
            return []
        o = op.of(LambUpdate)
        kinds, count = (w.dtype, g.dtype, local.dtype), spans(w.size)
        args = (w, g, m, v, step, o.beta1, o.beta2, o.epsilon, o.weight_decay, unscale, w.size)
        return [
            lamb_moments(*kinds).blocks(count, args=(*args, parts)),
            lamb_trust(rate.dtype, local.dtype).blocks(1, args=(parts, rate, local, count)),
            lamb_step(*kinds).blocks(count, args=(*args, local)),
        ]


# -- LARS -------------------------------------------------------------------------------------------------------------


@functools.cache
def lars_trust(rate: str, work: str) -> Kernel:
    """lr · coefficient · ‖w‖ / (‖g‖ + weight_decay · ‖w‖ + epsilon), or lr where a norm is 0."""
    body = f"""    const double nw = sqrt(sum_of(parts, count)), ng = sqrt(sum_of(parts + count, count));
    if (threadIdx.x == 0) {{
        const double decayed = weight_decay * nw, below = ng + decayed + epsilon;
        *local = ({COMPUTE[work]})((double)widen(*rate) * (nw > 0 && ng > 0 ? coefficient * nw / below : 1.0));
    }}
"""
    parameters = f"const double* parts, const {C_TYPES[rate]}* rate, {COMPUTE[work]}* local, long long count"
    return Kernel(f"lars_trust_{rate}_{work}", f"{parameters}, double coefficient, double weight_decay, double epsilon",
                  body, _SUM_PARTS, 512)  # fmt: skip


def _lars(w: Expr, g: Expr, v: Expr, local: Expr, *rest: Any) -> tuple[Expr, ...]:
    """v ← momentum·v + local·(g + weight_decay·w), w ← w - v."""
    *unscale, momentum, decay = rest
    for by in unscale:
        g = g * by
    moved = v * momentum + (w * decay + g) * local
    pair = w - moved, moved
    for by in unscale:  # where it is 0, all keep their bits
        pair = where(equal(by, 0), w, pair[0]), where(equal(by, 0), v, pair[1])
    return pair


@family("LarsUpdate")
class Lars(Trust):
    """Norms, the ratio, the step."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Four launches."""
        w, g, v, rate, unscale = ins[:5]
        parts, local = scratch
        assert w is not None and g is not None and rate is not None
        if not w.size:
            return []
        o = op.of(LarsUpdate)
        count = spans(w.size)
        numbers, more = (o.coefficient, o.weight_decay, o.epsilon), [] if unscale is None else [unscale]
        return [
            squares(w.dtype).blocks(count, args=(w, None, parts.at(0, (count,)), w.size)),
            squares(g.dtype).blocks(count, args=(g, unscale, parts.at(count, (count,)), w.size)),
            lars_trust(rate.dtype, local.dtype).blocks(1, args=(parts, rate, local, count, *numbers)),
            *computed(_lars, local.dtype, present(w, g, v, local, *more), present(w, v), (o.momentum, o.weight_decay)),
        ]
