"""Recurrences, running sums and products, and orders along an axis: lanes of n elements, `inner` apart."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import FLOATS, present
from ....ops.common import normal_axis
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel
from ..families import Buffers, Family, family

#: a thread has a lane, and goes along it from the beginning or (`by` = -1) from the end
_LANE = """    const long long lane = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (lane >= lanes) return;
    long long i = lane / inner * inner * n + lane % inner;
    if (by < 0) i += (n - 1) * inner;
"""
_LANES = "long long lanes, long long n, long long inner, long long by"


@functools.cache
def linear(dtype: str) -> Kernel:
    """s = a · s before + d."""
    c, wide = C_TYPES[dtype], COMPUTE[dtype]
    body = f"""{_LANE}    {wide} s = 0;
    for (long long k = 0; k < n; k++, i += by * inner) {{
        const {wide} d = widen(y[i]), kept = k ? widen(a[i]) * s : 0;
        s = k ? kept + d : d;
        out[i] = narrow<{c}>(s);
        s = widen(narrow<{c}>(s));
    }}
"""
    return Kernel(f"linear_scan_{dtype}", f"const {c}* a, const {c}* y, {c}* out, {_LANES}", body, threads=128)


@functools.cache
def running(name: str, dtype: str) -> Kernel:
    """Sums or products of the elements up to each one, or (`exclusive`) before it; sums of 16-bit floats in float32."""
    c, wide, first, sign = C_TYPES[dtype], COMPUTE[dtype], *(("0", "+") if name == "CumSum" else ("1", "*"))
    after = f"({wide})(s {sign} x)" if name == "CumSum" else f"widen(narrow<{c}>(s {sign} x))"
    body = f"""{_LANE}    {wide} s = {first};
    for (long long k = 0; k < n; k++, i += by * inner) {{
        const {wide} x = widen(a[i]), next = k ? {after} : x;
        out[i] = narrow<{c}>(exclusive ? s : next);
        s = next;
    }}
"""
    return Kernel(f"{name.lower()}_{dtype}", f"const {c}* a, {c}* out, int exclusive, {_LANES}", body, threads=128)


@family("LinearScan", "CumSum", "CumProd")
class Scans(Family):
    """One launch, a thread for each lane."""

    def accepts(self, op: Operator) -> bool:
        return all(v.dtype in (FLOATS if op.op.name == "LinearScan" else C_TYPES) for v in op.reads())

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule: Any = op.op
        x, out = present(ins[0], outs[0])
        if not out.size:
            return []
        axis = normal_axis(rule.axis, len(out.shape), rule)
        n, inner = out.shape[axis], math.prod(out.shape[axis + 1 :])
        sizes = out.size // n, n, inner, -1 if rule.reverse else 1
        if rule.name == "LinearScan":
            return [linear(out.dtype)(sizes[0], x, ins[1], out, *sizes)]
        return [running(rule.name, out.dtype)(sizes[0], x, out, rule.exclusive, *sizes)]


@functools.cache
def top(dtype: str, *, largest: bool) -> Kernel:
    """Each element counts those that come before it in its lane; NaN is the largest number."""
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    before = "b > a || (b != b && a == a)" if largest else "b < a || (a != a && b == b)"
    body = f"""    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    const long long c = i % inner, me = i / inner % n, o = i / inner / n;
    const {a} a = widen(x[i]);
    long long rank = 0;
    for (long long j = 0; j < n && rank < k; j++) {{
        const {a} b = widen(x[(o * n + j) * inner + c]);
        rank += {before} || ((a == b || (a != a && b != b)) && j < me);
    }}
    if (rank >= k) return;
    const long long to = (o * k + rank) * inner + c;
    if (values) values[to] = x[i];
    if (indices) indices[to] = me;
"""
    parameters = (
        f"const {c}* x, {c}* values, long long* indices, long long size, long long n, long long inner, long long k"
    )
    return Kernel(f"top_{'largest' if largest else 'smallest'}_{dtype}", parameters, body)


@family("TopK")
class Tops(Family):
    """One launch, a thread for each element."""

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        rule: Any = op.op
        (x,) = present(ins[0])
        if not x.size or not rule.k:
            return []
        axis = normal_axis(rule.axis, len(x.shape), rule)
        sizes = x.size, x.shape[axis], math.prod(x.shape[axis + 1 :]), rule.k
        return [top(x.dtype, largest=bool(rule.largest))(x.size, x, *outs[:2], *sizes)]
