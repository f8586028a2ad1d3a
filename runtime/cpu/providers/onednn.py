"""Convolutions and matrix products by oneDNN, if its library is installed.

A convolution's activations stay as they are, its weights get what layout the library likes.  A matrix product in
float32 is cut into tiles as BLAS's are (runtime/cpu/providers/blas.py), each of them one call in one thread; so are the
products of a head's loss, whose other kernels are numba's (runtime/cpu/kernels/linear_loss.py).  Products and
convolutions of 16-bit types are the library's where the processor multiplies them.
"""

from __future__ import annotations

from typing import Any

from ....language.ir import Operator
from ....language.kernels import register
from ....language.types import Operands, TensorType
from ....ops.linear.products import Gemm, MatMul
from ....ops.loss.linear_cross_entropy import LinearLoss
from ...shared.convolved import convolved, operands
from .. import processors
from ..device import jit, native
from ..device.native import Call
from ..families import FAMILIES
from ..primitives import convolutions, products
from ..primitives.plans import Plan, unavailable
from .blas import Product, product, product_calls
from .products import fastest, sgemm

#: a workspace of more than so many times the operands' bytes is not worth a faster gradient of a weight: it would be
#: the peak of steps with a budget (a patch embedding of ViT: 3.0 MB for 1.6 MB of operands, and 5.5 MB with two
#: threads; our kernels: .9 MB).  Of 199 gradients of ten networks it concerns two
_LARGE = 1


class OneDnnProvider:
    """Conv, its gradients and ConvTranspose in both layouts, MatMul and Gemm, heads' losses; float32 and bfloat16."""

    name = "onednn"

    def accepts(self, op: Operator) -> bool:
        """Whether the library has fast code for an operator: its reference implementations are slower than ours."""
        if multiplied(op) is not None:
            return not unavailable()
        if isinstance(op.op, LinearLoss):
            return op.inputs[0] is not None and op.inputs[0].dtype == "f32" and _family(op) is not None
        return _plan(op) is not None

    def yields_to(self, op: Operator) -> str:
        """Our own kernels, or OpenBLAS, where they are faster on processors like this one or take far fewer bytes."""
        if (p := multiplied(op)) is not None:
            return fastest((p.m, p.n, p.k, p.ta, p.tb), onednn=True) if len(p.a) == 1 else ""
        c = convolved(op)
        if c is None or not c.last:
            return ""
        plan = _plan(op) if c.kind == "weight" else None
        if plan is not None:
            operands_bytes = sum(v.nbytes for v in (*op.reads(), *op.writes()))
            if sum(t.nbytes for t in plan.scratch()) > _LARGE * operands_bytes:
                return "convolution"
        waiting = plan is not None and plan.waits
        return "convolution" if processors.ours_are_faster(processors.convolution_class(c), waiting=waiting) else ""

    def reason(self) -> str:
        """Why it accepts nothing; "" where it does."""
        return unavailable()

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Packed weights and scratchpad."""
        if isinstance(op.op, LinearLoss):
            return _family(op).scratch(op)
        plan = _plan(op)
        return () if plan is None else plan.scratch()

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """One call for each primitive; the library's threads are those of the step."""
        if isinstance(op.op, LinearLoss):
            padded = (*ins, None, None), (*outs, *[None] * 4)
            return _family(op).calls(op, *padded, scratch, onednn=True)
        plan = _plan(op)
        if plan is None:
            return product_calls(op, ins, outs, sgemm())
        if isinstance(op.op, (MatMul, Gemm)):
            arrays = {"a": ins[0], "b": ins[1], "bias": ins[2] if len(ins) > 2 else None, "y": outs[0]}
        else:
            arrays = dict(zip(("x", "w", "y", "bias"), operands(op, ins, outs), strict=True))
        return plan.calls(arrays, scratch)


def multiplied(op: Operator) -> Product | None:
    """The product of a MatMul or Gemm in float32; None for others."""
    dtype = op.outputs[0].dtype if op.outputs and op.outputs[0] is not None else ""
    return product(op) if isinstance(op.op, (MatMul, Gemm)) and dtype == "f32" else None


def _family(op: Operator) -> Any:
    """The kernels between the products of a head's loss; None where they cannot run."""
    return None if jit.unavailable() else FAMILIES.find(op)


def _plan(op: Operator) -> Plan | None:
    """The primitives of a convolution, or of a product in 16 bits; None where there are none, or no good ones."""
    if unavailable():
        return None
    dtype = next((v.dtype for v in op.writes()), "")
    if dtype not in ("f32", "bf16", "f16") or (dtype == "bf16" and not native.converts_bfloat16()):
        return None
    if dtype != "f32" and (factors := products.factors(op)) is not None:
        plan = products.plan(factors)
    else:
        c = convolved(op, (dtype,))
        plan = "no convolution" if c is None else convolutions.plan(c, dtype)
    return plan if isinstance(plan, Plan) and plan.good else None


if not unavailable():
    register(OneDnnProvider())
