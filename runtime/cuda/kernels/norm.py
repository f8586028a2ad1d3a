"""The gradient of layer, RMS, group and instance normalisation: a warp or a block for each normalised row.

A tensor is seen as [a, g, s, p], as in ops/norm_kernels.py: a row is one of a · g, its s · p elements lie together, and
element j is scaled by scale[group, j / p].  The gradients of scale and bias are sums over `a` and p (channel_sums.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ....language.types import TensorType
from ....ops.norm.fused import NormGrad
from ..code.channel_sums import Channels, over_chunks, products, whole_sums
from ..code.rows import by_warp, head, kind, over_rows
from ..device.kernel import C_TYPES, COMPUTE, Buffer, Call, Kernel
from ..families import Buffers, Family, family

if TYPE_CHECKING:
    from ....language.ir import Operator

_FLOATS = ("f16", "bf16", "f32", "f64")
#: where a row begins, and its group's scales
_BASE = "base = row * n, group = row % groups * size"


@functools.cache
def gradient(dtype: str, scale: str, *, centre: bool, warp: bool) -> Kernel:
    """inverse · (dy · scale - mean of that - x̂ · mean of (dy · scale · x̂))."""
    reduce = f"{kind(warp)}_reduce"
    m = "mean[row]" if centre else "0"
    body = (
        head(dtype, _BASE, warp=warp)
        + f"""    const A m = {m}, k = inverse[row];
    A s = 0, q = 0;
    for (int j = first; j < n; j += by) {{
        const A g = widen(dy[base + j]) * (A)widen(scale[group + j / run]);
        s += g;
        q = fma_of(g, (widen(x[base + j]) - m) * k, q);
    }}
    s = {f"{reduce}(s, Plus()) / n" if centre else "0"};
    q = {reduce}(q, Plus()) / n;
    for (int j = first; j < n; j += by) {{
        const A g = widen(dy[base + j]) * (A)widen(scale[group + j / run]);
        const A normal = (widen(x[base + j]) - m) * k;
        const A along = normal * q;
        dx[base + j] = narrow<T>((g - s - along) * k);
    }}
"""
    )
    c, a = C_TYPES[dtype], COMPUTE[dtype]
    name = f"norm_gradient_{dtype}_{scale}_{kind(warp)}{'' if centre else '_rms'}"
    return Kernel(
        name,
        f"const {c}* x, const {C_TYPES[scale]}* scale, const {a}* mean, const {a}* inverse, const {c}* dy, {c}* dx, "
        "long long rows, int n, int groups, int size, int run",
        body,
    )


@family("NormGrad")
class NormalizationGradients(Family):
    """(x, scale, mean?, inverse, dy) → dx, dscale, dbias."""

    def form(self, op: Operator) -> Channels:
        """What the sums for scale and bias go over: `a` images of g · s channels and p positions."""
        rule = op.of(NormGrad)
        a, g, s, p = rule.view
        return Channels(a, g * s, p, p == 1)

    def accepts(self, op: Operator) -> bool:
        """Floats, statistics as they are computed, fewer than 2³¹ elements a row."""
        rule = op.of(NormGrad)
        x, _, mean, inverse = op.inputs[:4]
        assert x is not None and inverse is not None
        wide = "f64" if x.dtype == "f64" else "f32"
        good = all(v.dtype in _FLOATS for v in (*op.reads(), *op.writes()))
        good = good and all(v is None or v.dtype == wide for v in (mean, inverse))
        return good and self.form(op).fits and rule.view[2] * rule.view[3] < 1 << 31

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        x: Any = op.inputs[0]
        return (self.form(op).partial(x.dtype),)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """The sums, then dx, which may take x's place."""
        rule = op.of(NormGrad)
        a, g, s, p = rule.view
        form = self.form(op)
        x, scale, mean, inverse, dy = ins[:5]
        dx, dscale, dbias = outs[:3]
        assert x is not None and scale is not None and dscale is not None
        calls: list[Call] = []
        if form.chunks:
            k = products(x.dtype, "" if mean is None else mean.dtype, last=form.last, grouped=True, scaled=True)
            calls.append(over_chunks(k, form, (x, dy, mean, inverse, scratch[0], g, s)))
        total = whole_sums(x.dtype, dscale.dtype)
        args = (scratch[0], None, dscale, dbias, None, form.c, form.chunks)
        calls.append(total.blocks(form.c, args=args, block=(128,)))
        if x.size:
            warp = by_warp(s * p)
            last = gradient(x.dtype, scale.dtype, centre=mean is not None, warp=warp)
            given = (x, scale, mean, inverse, dy, dx, a * g, s * p, g, s, max(p, 1))
            calls.append(over_rows(last, a * g, given, warp=warp))
        return calls
