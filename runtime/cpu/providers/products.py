"""Matrix products in float32 by our own kernels, and which kernels multiply which matrices.

What is fastest follows from the table of processors (runtime/cpu/processors): our kernels (see
runtime/cpu/code/matrix_products.py) are taken where they were measured.
"""

from __future__ import annotations

from ....language.ir import Operator
from ....language.kernels import register
from ....language.types import Array, Operands, TensorType, need
from ....ops.linear.products import Gemm
from .. import processors
from ..code import matrix_products
from ..device import native
from ..device.native import Call
from ..primitives.plans import library
from . import blas

#: rows, columns and terms of a product, and whether its factors lie transposed
Shape = tuple[int, int, int, bool, bool]


def fastest(shape: Shape, *, onednn: bool = False) -> str:
    """The provider that multiplies matrices of float32 fastest here.  `onednn`: whether oneDNN is asked, too."""
    among = [*(["onednn"] if onednn else []), *([] if blas.unavailable() else ["blas"]), "products"]
    return processors.multiplier(shape, among)


def available(dtype: str) -> bool:
    """Whether `calls` can multiply matrices of this element type."""
    return dtype == "f32" or not blas.unavailable()


def room(dtype: str, *sizes: tuple[int, int, int]) -> TensorType:
    """The workspace of products of which these (rows, columns, terms) are the largest; none where all are others'."""
    alone = blas.unavailable()  # then ours multiply everything
    ours = [s for s in sizes if alone or (processors.multiplies() and matrix_products.worth_packing(*s))]
    return TensorType("f32", (max((matrix_products.room(*s) for s in ours), default=0) if dtype == "f32" else 0,))


def calls(
    a: Array, b: Array, c: Array, workspace: Array | None, more: Array | None = None, *, onednn: bool = False
) -> list[Call]:
    """c = a b (+ `more`: a row for all rows, or as many as c has; c itself, say), for matrices of which one side lies
    together: parts of others, or transposed.

    By the kernels that are fastest.  `workspace`: what `room` says, or None for nothing.
    """
    (m, n), k = c.shape, a.shape[1]
    by = "blas"
    if c.dtype.name == "float32":
        by = fastest((m, n, k, blas.turned(a), blas.turned(b)), onednn=onednn)
    if by == "products" and workspace is not None and workspace.size:
        return matrix_products.calls(a, b, c, workspace, more)
    return blas.strided(a, b, c, more=more, by=sgemm() if by == "onednn" else None)


def sgemm() -> blas.Routine:
    """oneDNN's product of matrices."""
    return blas.Routine(library().sgemm, status=True)


class ProductsProvider:
    """MatMul and Gemm."""

    name = "products"

    def accepts(self, op: Operator) -> bool:
        """One product, not scaled, with a bias for each column or element or none; where no BLAS is, a batch, too."""
        product = blas.product(op)
        if product is None or op.outputs[0] is None or op.outputs[0].dtype != "f32":
            return False
        if len(product.a) > 1 and not blas.unavailable():
            return False
        return not isinstance(op.op, Gemm) or (op.op.alpha == 1.0 and _bias(op) is not None)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Panels."""
        p = _product(op)
        return (TensorType("f32", (matrix_products.needed(p.m, p.n, p.k),)),)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """Two calls for each block of terms of each product."""
        p = _product(op)
        more = None
        if isinstance(op.op, Gemm) and (shape := _bias(op)):
            more = ins[2].reshape(shape)
        sequence: list[Call] = []
        for i, c in enumerate(outs[0].reshape(-1, p.m, p.n)):
            a = _matrix(ins[0], p.a[i], (p.k, p.m) if p.ta else (p.m, p.k))
            b = _matrix(ins[1], p.b[i], (p.n, p.k) if p.tb else (p.k, p.n))
            sequence += matrix_products.calls(a.T if p.ta else a, b.T if p.tb else b, c, scratch[0], more)
        return sequence


def _matrix(x: Array, at: int, shape: tuple[int, int]) -> Array:
    """The one that begins at an element."""
    return x.reshape(-1)[at : at + shape[0] * shape[1]].reshape(shape)


def _product(op: Operator) -> blas.Product:
    product = need(blas.product(op))
    return product


def _bias(op: Operator) -> tuple[int, ...] | None:
    """The shape that a Gemm's bias is read in: a row, or as many as there are; () where there is none, None for
    others."""
    bias, rule = op.inputs[2] if len(op.inputs) > 2 else None, op.op
    assert isinstance(rule, Gemm)
    out = op.outputs[0]
    if bias is None or rule.beta == 0.0:
        return ()
    assert out is not None
    if rule.beta != 1.0:
        return None
    rows, columns = out.shape
    return {(columns,): (columns,), (1, columns): (columns,), (rows, columns): (rows, columns)}.get(bias.shape)


if not native.unavailable():
    register(ProductsProvider())
