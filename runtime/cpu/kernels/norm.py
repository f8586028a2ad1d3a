"""The gradient of layer, RMS, group and instance normalisation.

A tensor is seen as [a, g, s, p], as in ops/norm_kernels.py: normalised over (s, p), scaled by vectors over (g, s).  The
gradients of scale and bias are summed over `a`: blocks of 64 rows in the element type, these in float64, in parts whose
number depends on the shape alone, added up in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ....language.types import Operands, TensorType
from ....ops.norm.fused import NormGrad
from ..code.row_sums import against, against3, dot, total
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, computed, family, floats, parts

if TYPE_CHECKING:
    from ....language.ir import Operator

_BLOCK = 64


@kernel
def _layer_gradient(x, scale, mean, inverse, dy, dx, block, sums, centre, begin, end):
    """dx on rows x [rows, g, s], and for each part of the rows the sums [2, g·s] of dy · x̂ and dy."""
    rows, g, n = x.shape
    for part in range(begin, end):
        p, q = block[part, 0], block[part, 1]
        sums[part] = 0
        first, last = rows * part // sums.shape[0], rows * (part + 1) // sums.shape[0]
        for start in range(first, last, _BLOCK):
            p[:] = 0
            q[:] = 0
            for r in range(start, min(start + _BLOCK, last)):
                for i in range(g):
                    a, d, b, w = x[r, i], dy[r, i], dx[r, i], scale[i]
                    m = x.dtype.type(0)
                    if centre:
                        m = mean[r, i]
                    k = inverse[r, i]
                    pi, qi = p[i * n : (i + 1) * n], q[i * n : (i + 1) * n]
                    for j in range(n):
                        pi[j] += d[j] * ((a[j] - m) * k)
                    for j in range(n):
                        qi[j] += d[j]
                    s1 = x.dtype.type(0)
                    if centre:
                        s1 = x.dtype.type(dot(d, w) / n)
                    s2 = x.dtype.type(against3(d, w, a, m) * (k * k) / n)
                    for j in range(n):
                        b[j] = k * (d[j] * w[j] - s1 - (a[j] - m) * s2)
            total64 = sums[part, 0]
            for j in range(g * n):
                total64[j] += p[j]
            total64 = sums[part, 1]
            for j in range(g * n):
                total64[j] += q[j]


@kernel
def channels_gradient(x, scale, mean, inverse, dy, dx, sums, centre, begin, end):
    """The same on x [rows, g, s, p], scale [g, s]."""
    rows, g, s, n = x.shape
    for part in range(begin, end):
        sums[part] = 0
        for r in range(rows * part // sums.shape[0], rows * (part + 1) // sums.shape[0]):
            for i in range(g):
                m = x.dtype.type(0)
                if centre:
                    m = mean[r, i]
                k = inverse[r, i]
                s1, s2 = 0.0, 0.0
                for c in range(s):
                    plain = total(dy[r, i, c])
                    product = against(dy[r, i, c], x[r, i, c], m) * k
                    sums[part, 0, i * s + c] += product
                    sums[part, 1, i * s + c] += plain
                    s1 += plain * scale[i, c]
                    s2 += product * scale[i, c]
                t1 = x.dtype.type(0)
                if centre:
                    t1 = x.dtype.type(s1 / (s * n))
                t2 = x.dtype.type(s2 * k / (s * n))
                for c in range(s):
                    a, d, b = x[r, i, c], dy[r, i, c], dx[r, i, c]
                    w = scale[i, c]
                    for j in range(n):
                        b[j] = k * (d[j] * w - t1 - (a[j] - m) * t2)


@kernel
def add_parts(sums, first, second, begin, end):
    """Column sums over the parts [parts, 2, n], in their order."""
    for j in range(begin, end):
        s, t = 0.0, 0.0
        for part in range(sums.shape[0]):
            s += sums[part, 0, j]
            t += sums[part, 1, j]
        first[j], second[j] = s, t


@family("NormGrad")
class NormalizationGradients(Family):
    """(x, scale, mean?, inverse, dy) → dx, dscale, dbias."""

    def accepts(self, op: Operator) -> bool:
        """Floats of one type, and groups of several elements."""
        rule = op.of(NormGrad)
        return floats(op, halves=True) and rule.view[2] * rule.view[3] > 1

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """For each part the sums, and those of a block of rows."""
        rule = op.of(NormGrad)
        x: Any = op.inputs[0]
        a, g, s, p = rule.view
        sums = TensorType("f64", (parts(a), 2, g * s))
        return (sums,) if p > 1 else (sums, sums.with_dtype(computed(x.type).dtype))

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """dx with the parts' sums, then their sums."""
        rule = op.of(NormGrad)
        a, g, s, p = rule.view
        x, scale, mean, inverse, dy = ins[:5]
        shape = (a, g, s) if p == 1 else (a, g, s, p)
        centre = int(mean is not None)
        inverse = inverse.reshape(a, g)
        mean = inverse if mean is None else mean.reshape(a, g)
        given = (x.reshape(shape), scale.reshape(g, s), mean, inverse, dy.reshape(shape), outs[0].reshape(shape))
        sums = scratch[0]
        run = _layer_gradient if p == 1 else channels_gradient
        first = run.call(*given, *reversed(scratch), centre, work=len(sums))
        vectors = [np.ndarray.reshape(v, -1) for v in outs[1:3]]
        return [first, add_parts.call(sums, *vectors, work=g * s)]
