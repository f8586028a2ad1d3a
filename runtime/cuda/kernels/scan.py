"""Recurrences along an axis: a thread for each lane, with coalesced reads."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....language.types import FLOATS, present
from ....ops.common import normal_axis
from ....ops.reduction.running import LinearScan as LinearScanOp
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel
from ..families import Buffers, Family, family

if TYPE_CHECKING:
    from ....language.ir import Operator


@functools.cache
def linear(dtype: str) -> Kernel:
    """s = a · s before + d, from the beginning or (`by` = -1) from the end; lane = outer · inner + its place."""
    c, wide = C_TYPES[dtype], COMPUTE[dtype]
    body = f"""    const long long lane = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (lane >= lanes) return;
    long long i = lane / inner * inner * n + lane % inner;
    if (by < 0) i += (n - 1) * inner;
    {wide} s = 0;
    for (long long k = 0; k < n; k++, i += by * inner) {{
        const {wide} d = widen(y[i]), kept = k ? widen(a[i]) * s : 0;
        s = k ? kept + d : d;
        out[i] = narrow<{c}>(s);
        s = widen(narrow<{c}>(s));
    }}
"""
    return Kernel(f"linear_scan_{dtype}",
                  f"const {c}* a, const {c}* y, {c}* out, long long lanes, long long n, long long inner, long long by",
                  body, threads=128)  # fmt: skip


@family("LinearScan")
class LinearScan(Family):
    """One launch."""

    def accepts(self, op: Operator) -> bool:
        return all(v.dtype in FLOATS for v in op.reads())

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Lane by lane."""
        a, d, out = present(ins[0], ins[1], outs[0])
        if not out.size:
            return []
        o = op.of(LinearScanOp)
        axis = normal_axis(o.axis, len(out.shape), o)
        n, inner = out.shape[axis], math.prod(out.shape[axis + 1 :])
        lanes = out.size // n
        return [linear(out.dtype)(lanes, a, d, out, lanes, n, inner, -1 if o.reverse else 1)]
