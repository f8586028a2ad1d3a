"""Softmax and log-softmax along any axis, and their gradients: a warp or a block for each row."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....language.types import need
from ....ops.common import normal_axis
from ..code.rows import by_warp, head, kind, over_rows
from ..device.kernel import C_TYPES, Buffer, Call, Kernel
from ..families import Buffers, Family, family

if TYPE_CHECKING:
    from ....language.ir import Operator

# element j of a row is at base + j · step; `first`, `by`: the row's threads; R: their reduction
_BODIES = {
    "Softmax": """
    A m = -infinity<A>();
    for (int j = first; j < n; j += by) m = larger(m, widen(x[base + j * step]));
    m = R(m, Larger());
    A s = 0;
    for (int j = first; j < n; j += by) s += exp_of(widen(x[base + j * step]) - m);
    s = 1 / R(s, Plus());
    for (int j = first; j < n; j += by) out[base + j * step] = narrow<T>(exp_of(widen(x[base + j * step]) - m) * s);
""",
    "LogSoftmax": """
    A m = -infinity<A>();
    for (int j = first; j < n; j += by) m = larger(m, widen(x[base + j * step]));
    m = R(m, Larger());
    A s = 0;
    for (int j = first; j < n; j += by) s += exp_of(widen(x[base + j * step]) - m);
    s = log_of(R(s, Plus()));
    for (int j = first; j < n; j += by) out[base + j * step] = narrow<T>((widen(x[base + j * step]) - m) - s);
""",
    "SoftmaxGrad": """
    A s = 0;
    for (int j = first; j < n; j += by) s += widen(x[base + j * step]) * widen(dy[base + j * step]);
    s = R(s, Plus());
    for (int j = first; j < n; j += by)
        out[base + j * step] = narrow<T>(widen(x[base + j * step]) * (widen(dy[base + j * step]) - s));
""",
    "LogSoftmaxGrad": """
    A s = 0;
    for (int j = first; j < n; j += by) s += widen(dy[base + j * step]);
    s = R(s, Plus());
    for (int j = first; j < n; j += by)
        out[base + j * step] = narrow<T>(widen(dy[base + j * step]) - exp_of(widen(x[base + j * step])) * s);
""",
}


@functools.cache
def kernel(name: str, dtype: str, *, warp: bool) -> Kernel:
    """The kernel over `rows` rows of `n` elements, `step` apart; neighbouring rows are neighbours within a step."""
    c = C_TYPES[dtype]
    dy = f"const {c}* dy, " if name.endswith("Grad") else ""
    body = head(dtype, "base = row / step * step * n + row % step", warp=warp)
    body += _BODIES[name].replace("R(", f"{kind(warp)}_reduce(")
    return Kernel(f"{name}_{dtype}_{kind(warp)}",
                  f"const {c}* x, {dy}{c}* out, long long rows, int n, long long step", body)  # fmt: skip


@family(*_BODIES)
class SoftmaxRows(Family):
    """Along any axis."""

    def accepts(self, op: Operator) -> bool:
        return all(v.dtype in ("f16", "bf16", "f32", "f64") for v in (*op.reads(), *op.writes()))

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Row by row."""
        out = need(outs[0])
        attributes = op.op.attributes()
        axis = normal_axis(attributes.get("axis", -1), len(out.shape), op.op)
        n, step = out.shape[axis], math.prod(out.shape[axis + 1 :])
        rows = out.size // max(n, 1)
        if not out.size:
            return []
        warp = by_warp(n)
        given = [b for b in ins if b is not None]
        k = kernel(op.op.name, out.dtype, warp=warp)
        return [over_rows(k, rows, (*given, out, rows, n, step), warp=warp)]
