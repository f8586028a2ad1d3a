"""Softmax and log-softmax along any axis, and their gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ....language.types import Operands
from ..code.mathematics import exp
from ..code.row_sums import dot, exponentials, largest, total
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, family, floats

if TYPE_CHECKING:
    from ....language.ir import Operator


@kernel
def softmax(x, y, begin, end):
    """Rows of x [rows, n]."""
    for r in range(begin, end):
        a, b = x[r], y[r]
        m = largest(a)
        for j in range(a.size):
            b[j] = exp(a[j] - m)
        scale = x.dtype.type(1.0 / total(b))
        for j in range(a.size):
            b[j] *= scale


@kernel
def softmax_gradient(y, dy, dx, begin, end):
    """y · (dy - Σ y · dy)."""
    for r in range(begin, end):
        a, g, b = y[r], dy[r], dx[r]
        s = y.dtype.type(dot(a, g))
        for j in range(a.size):
            b[j] = a[j] * (g[j] - s)


@kernel
def log_softmax(x, y, begin, end):
    """x - m - ln Σ exp(x - m)."""
    for r in range(begin, end):
        a, b = x[r], y[r]
        m = largest(a)
        s = x.dtype.type(math.log(exponentials(a, m)))
        for j in range(a.size):
            b[j] = (a[j] - m) - s


@kernel
def log_softmax_gradient(y, dy, dx, begin, end):
    """dy - exp(y) · Σ dy."""
    for r in range(begin, end):
        a, g, b = y[r], dy[r], dx[r]
        s = y.dtype.type(total(g))
        for j in range(a.size):
            b[j] = g[j] - exp(a[j]) * s


_KERNELS = {
    "Softmax": softmax,
    "SoftmaxGrad": softmax_gradient,
    "LogSoftmax": log_softmax,
    "LogSoftmaxGrad": log_softmax_gradient,
}


@family(*_KERNELS)
class SoftmaxRows(Family):
    """Along the last axis (or one behind which there are only axes of one element)."""

    def accepts(self, op: Operator) -> bool:
        """Floats, and rows that lie together."""
        return floats(op) and len(_form(op)) == 2 and _form(op)[1] > 1

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        form = _form(op)
        given = [a.reshape(form) for a in (*ins, outs[0]) if a is not None]
        return [_KERNELS[op.op.name].call(*given, work=form[0])]


def _form(op: Operator) -> tuple[int, ...]:
    alike: Any = op.op
    return alike.form(op.inputs[0])
