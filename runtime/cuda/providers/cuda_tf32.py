"""The provider "cuda_tf32": convolutions, recurrent operators and heads of float32 that cuBLAS multiplies in TF32, and
attention, whose own kernels do.

For programs that allow it: factors may be rounded to 11 bits, sums stay float32.  What is multiplied otherwise stays
with the provider "cuda".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ....language.ir import Operator
from ....language.kernels import register
from ...shared.convolved import convolved
from ..convolution.columns import ColumnsPlan, ColumnsWeighPlan
from ..convolution.products import PointwisePlan
from ..device.kernel import Buffer, Call, Product
from ..families import Buffers, Family
from ..kernels.attention import Attention, AttentionGradient
from ..kernels.convolution import Convolutions, plan
from ..kernels.linear_loss import HeadGradient, HeadLoss
from ..kernels.recurrent import Backward, Forward
from .cuda import Cuda

_CONVOLUTIONS = Convolutions(tf32=True)
_RECURRENT: dict[str, Family] = {
    **dict.fromkeys(("LSTM", "GRU", "RNN"), Forward()),
    **dict.fromkeys(("LSTMGrad", "GRUGrad", "RNNGrad"), Backward()),
}
_WHOLE: dict[str, Family] = {
    **dict.fromkeys(("TiledAttention", "HeadsLastTiledAttention"), Attention(tf32=True)),
    **dict.fromkeys(("TiledAttentionGrad", "HeadsLastTiledAttentionGrad"), AttentionGradient(tf32=True)),
    "LinearCrossEntropy": HeadLoss(),
    "LinearCrossEntropyGrad": HeadGradient(),
}


def _family(op: Operator) -> Family | None:
    """Who runs an operator whose products may be rounded."""
    if op.op.name in _WHOLE:
        whole = _WHOLE[op.op.name]
        return whole if op.inputs[0].dtype == "f32" and whole.accepts(op) else None  # type: ignore[union-attr]
    if op.op.name in _RECURRENT:
        family = _RECURRENT[op.op.name]
        single = all(v.dtype == "f32" for v in (*op.reads(), *op.writes()) if v.type.is_float)
        return family if single and family.accepts(op) else None
    c = convolved(op, ("f32",))
    if c is None or len(c.geometry.window.out) > 3:
        return None
    by_cublas = isinstance(plan(c, "f32", tf32=True), (PointwisePlan, ColumnsPlan, ColumnsWeighPlan))
    return _CONVOLUTIONS if by_cublas else None


class Rounded(Cuda):
    """The provider; see the module's text."""

    name = "cuda_tf32"

    def find(self, op: Operator) -> Family | None:
        """Who runs it, where its products may be in TF32."""
        return _family(op)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """The family's calls, their products in TF32."""
        calls = super().bind(op, ins, outs, scratch)
        return [dataclasses.replace(c, tf32=True) if isinstance(c, Product) else c for c in calls]


register(Rounded())
