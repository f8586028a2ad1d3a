"""The providers "cublas" and "cublas_tf32": matrix products by cuBLAS.

A product over broadcast batches is one call where the batches lie evenly (a shared operand has stride 0, rows that
follow each other are one matrix), otherwise a call for each index of the axes that do not.  Gemm's third operand is
written to the result first, which cuBLAS then adds to.

The bits depend on the shapes: cuBLAS promises the same results at every run of one version on one kind of GPU where a
handle has one stream and a workspace of its own (cuBLAS, section "Results Reproducibility"), as device.py gives it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ....language.element import Expr
from ....language.ir import Operator
from ....language.kernels import register
from ....language.types import TensorType
from ....ops.linear.products import Gemm, MatMul
from ....ops.tiles import wide
from ..device.kernel import Buffer, Call, Fill, Product
from ..families import Buffers
from ..kernels.loops import computed

#: element types that cuBLAS multiplies
FLOATS = ("f32", "f64", "f16", "bf16")
#: one axis of a batch: its size, and elements from one matrix to the next in a, b and c
Axis = tuple[int, int, int, int]


@dataclass(frozen=True)
class Matrices:
    """A batch of products of one form: op(a) [m, k] · op(b) [k, n], rows as stored `lda`, `ldb` apart."""

    m: int
    n: int
    k: int
    ta: bool
    tb: bool
    axes: tuple[Axis, ...]

    def __call__(
        self, a: Buffer, b: Buffer, c: Buffer, *, alpha: float = 1.0, beta: float = 0.0, tf32: bool = False
    ) -> list[Call]:
        """c = alpha · op(a) · op(b) + beta · c for all of the batch."""
        axes = list(self.axes)
        inner = axes.pop(max(range(len(axes)), key=lambda i: axes[i][0])) if axes else (1, 0, 0, 0)
        return [
            Product(
                _from(a, at[0]), _from(b, at[1]), _from(c, at[2]), self.m, self.n, self.k, ta=self.ta, tb=self.tb,
                lda=max(self.m if self.ta else self.k, 1), ldb=max(self.k if self.tb else self.n, 1), ldc=self.n,
                alpha=alpha, beta=beta, batch=inner[0], strides=inner[1:], tf32=tf32,
            )
            for at in _offsets(axes)
        ]  # fmt: skip


def _from(x: Buffer, element: int) -> Buffer:
    return x.at(element, (x.size - element,))


def _offsets(axes: Sequence[Axis]) -> Iterator[tuple[int, int, int]]:
    """Where the matrices of each index of some axes begin."""
    for index in itertools.product(*(range(axis[0]) for axis in axes)):
        a, b, c = (sum(i * axis[j] for i, axis in zip(index, axes, strict=True)) for j in (1, 2, 3))
        yield a, b, c


def matrices(a: Sequence[int], b: Sequence[int], *, ta: bool = False, tb: bool = False) -> Matrices:
    """The product of two tensors as `numpy.matmul` has it; the flags swap the last two axes of more than vectors."""
    ta, tb = ta and len(a) > 1, tb and len(b) > 1
    left, right = (1, *a) if len(a) == 1 else tuple(a), (*b, 1) if len(b) == 1 else tuple(b)
    k, m = left[-2:] if ta else left[-2:][::-1]
    n = right[-2] if tb else right[-1]
    batch = np.broadcast_shapes(left[:-2], right[:-2])
    strides = (_strides(left[:-2], batch, m * k), _strides(right[:-2], batch, k * n), _strides(batch, batch, m * n))
    axes: list[Axis] = []
    for size, *step in zip(batch, *strides, strict=True):
        if size == 1:
            continue
        if axes and all(s * size == o for s, o in zip(step, axes[-1][1:], strict=True)):
            size *= axes.pop()[0]
        axes.append((size, step[0], step[1], step[2]))
    if axes and not ta and axes[-1][1] == m * k and axes[-1][2] == 0:
        m *= axes.pop()[0]  # one b for rows that follow each other
    return Matrices(m, n, k, ta, tb, tuple(axes))


def _strides(lead: Sequence[int], batch: Sequence[int], matrix: int) -> list[int]:
    """Elements from one matrix to the next along each axis of a batch to which `lead` broadcasts."""
    steps, step = [], matrix
    for i in range(1, len(batch) + 1):
        size = lead[-i] if i <= len(lead) else 1
        steps.append(step if size != 1 else 0)
        step *= size
    return steps[::-1]


def _scaled(c: Expr, factor: float = 1.0) -> tuple[Expr, ...]:
    return (c if factor == 1 else c * factor,)


class Cublas:
    """MatMul and Gemm of floats.  16-bit floats are multiplied exactly and added in float32.

    `tf32`: of float32 only, with factors that may be rounded to TF32 (11 bits).
    """

    def __init__(self, *, tf32: bool = False) -> None:
        self.tf32, self.name = tf32, "cublas_tf32" if tf32 else "cublas"

    def accepts(self, op: Operator) -> bool:
        """Floats."""
        wanted = ("f32",) if self.tf32 else FLOATS
        return isinstance(op.op, (MatMul, Gemm)) and all(v.dtype in wanted for v in (*op.reads(), *op.writes()))

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """None: the library's workspace is the device's."""
        return ()

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """First the initial contents of the result, then products."""
        a, b, out = ins[0], ins[1], outs[0]
        assert a is not None and b is not None and out is not None and isinstance(op.op, (MatMul, Gemm))
        if not out.size:
            return []
        product = matrices(a.shape, b.shape, ta=bool(op.op.transA), tb=bool(op.op.transB))
        alpha, beta, bias = 1.0, 0.0, None
        if isinstance(op.op, Gemm):
            alpha, bias = op.op.alpha, ins[2] if len(ins) > 2 and op.op.beta else None
            beta = op.op.beta if bias is not None else 0.0
        if not product.k:
            return [Fill(out)] if bias is None else computed(_scaled, wide(out.dtype), [bias], [out], (beta,))
        there = bias is None or bias.address == out.address
        first = [] if there or bias is None else computed(_scaled, wide(out.dtype), [bias], [out])
        return [*first, *product(a, b, out, alpha=alpha, beta=beta, tf32=self.tf32)]


register(Cublas())
register(Cublas(tf32=True))
