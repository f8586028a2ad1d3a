"""The provider "cuda_tf32": float32 operators whose matrix products are computed in TF32.

By cuBLAS: convolutions, recurrent operators and output heads with their loss (LinearCrossEntropy); by kernels of this
project: attention.  For programs with precision "tf32": operands may be rounded to TF32 (11 significant bits), sums
stay float32.  MatMul and Gemm belong to "cublas_tf32" (cublas.py); convolutions by other methods stay with "cuda".
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
#: families that take TF32 for every product of the operator
_BY_NAME: dict[str, Family] = {
    **dict.fromkeys(("TiledAttention", "HeadsLastTiledAttention"), Attention(tf32=True)),
    **dict.fromkeys(("TiledAttentionGrad", "HeadsLastTiledAttentionGrad"), AttentionGradient(tf32=True)),
    "LinearCrossEntropy": HeadLoss(),
    "LinearCrossEntropyGrad": HeadGradient(),
}


def _family(op: Operator) -> Family | None:
    """The family that runs an operator in TF32; None: left to other providers."""
    if op.op.name in _BY_NAME:
        named = _BY_NAME[op.op.name]
        return named if op.inputs[0].dtype == "f32" and named.accepts(op) else None  # type: ignore[union-attr]
    if op.op.name in _RECURRENT:
        family = _RECURRENT[op.op.name]
        single = all(v.dtype == "f32" for v in (*op.reads(), *op.writes()) if v.type.is_float)
        return family if single and family.accepts(op) else None
    c = convolved(op, ("f32",))
    if c is None or len(c.geometry.window.out) > 3:
        return None
    by_cublas = isinstance(plan(c, "f32", tf32=True), (PointwisePlan, ColumnsPlan, ColumnsWeighPlan))
    return _CONVOLUTIONS if by_cublas else None


class CudaTf32(Cuda):
    """The provider "cuda" with matrix products in TF32."""

    name = "cuda_tf32"

    def find(self, op: Operator) -> Family | None:
        """The family that runs the operator in TF32; None: left to other providers."""
        return _family(op)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """The family's calls, their products in TF32."""
        calls = super().bind(op, ins, outs, scratch)
        return [dataclasses.replace(c, tf32=True) if isinstance(c, Product) else c for c in calls]


register(CudaTf32())
