"""The gradient of layer, RMS, group and instance normalisation.

A tensor is seen as [a, g, s, p]: normalised over (s, p) for each (a, g), with a scale for each of the g · s channels
(ops/norm/fused.py; in group normalisation: images, groups, channels of a group, positions).  The gradients of scale and
bias are sums over a and p (channel_sums.py); dx is computed by the generated row kernel (rows.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import FLOATS, TensorType
from ....ops.norm.fused import NormGrad
from ..code.channel_sums import Channels, products, whole_sums
from ..device.kernel import Buffer, Call
from ..families import Buffers, Family, family
from .rows import along_rows, launch


@family("NormGrad")
class NormalizationGradients(Family):
    """(x, scale, mean?, inverse, dy) → dx, dscale, dbias."""

    def form(self, op: Operator) -> Channels:
        """The form of x for the sums of dscale and dbias: `a` images of g · s channels and p positions."""
        rule = op.of(NormGrad)
        a, g, s, p = rule.view
        return Channels(a, g * s, p, p == 1)

    def accepts(self, op: Operator) -> bool:
        """Whether operands are floats, mean and inverse have the type in which statistics are computed (float64 for
        float64, else float32), rows have fewer than 2³¹ elements, and the channels fit a grid."""
        x, _, mean, inverse = op.inputs[:4]
        assert x is not None and inverse is not None
        wide = "f64" if x.dtype == "f64" else "f32"
        good = all(v.dtype in FLOATS for v in (*op.reads(), *op.writes()))
        good = good and all(v is None or v.dtype == wide for v in (mean, inverse))
        return good and self.form(op).fits and (not x.size or along_rows(op))

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        x: Any = op.inputs[0]
        return (self.form(op).partial(x.dtype),)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """First the sums, which read x; then dx, which may be written over x."""
        rule = op.of(NormGrad)
        _, g, s, _ = rule.view
        form = self.form(op)
        x, scale, mean, inverse, dy = ins[:5]
        dx, dscale, dbias = outs[:3]
        assert x is not None and scale is not None and dscale is not None and dy is not None
        calls: list[Call] = []
        if form.chunks:
            calls.append(products(form, x, dy, mean, inverse, scratch[0], (g, s)))
        total = whole_sums(x.dtype, dscale.dtype)
        args = (scratch[0], None, dscale, dbias, None, form.c, form.chunks, 1)
        calls.append(total.blocks(form.c, args=args, block=(128,)))
        return [*calls, launch(op, ins, (dx,))] if x.size else calls
