"""Functions of C's mathematics, where a library of a step has no NumPy, whose vectors are faster."""

from __future__ import annotations

import math

from ....language.ir import Operator
from ....language.types import Operands, need
from ...shared.texts import inline
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, enough, family

#: their operators, in the order of `_result`
NAMES = ("Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh")
#: elements of a piece of work
_PART = 1 << 12


@inline
def _circular(which, x):
    """Sine, cosine and tangent, and their inverses."""
    if which == 0:
        return math.sin(x)
    if which == 1:
        return math.cos(x)
    if which == 2:
        return math.tan(x)
    if which == 3:
        return math.asin(x)
    return math.acos(x) if which == 4 else math.atan(x)


@inline
def _hyperbolic(which, x):
    """The hyperbolic functions, by number."""
    if which == 6:
        return math.sinh(x)
    if which == 7:
        return math.cosh(x)
    if which == 8:
        return math.asinh(x)
    return math.acosh(x) if which == 9 else math.atanh(x)


@kernel
def applied(x, y, which, begin, end):
    """y ← a function of x, by its number in `NAMES`."""
    for i in range(begin * _PART, min(end * _PART, x.size)):
        y[i] = _circular(which, x[i]) if which < 6 else _hyperbolic(which, x[i])


@family(*NAMES)
class Functions(Family):
    """One call of C's library for each element."""

    def accepts(self, op: Operator) -> bool:
        """For libraries."""
        x = need(op.inputs[0])
        return enough() <= 1 <= x.size and x.dtype in ("f32", "f64")

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """One call."""
        x, y = ins[0].reshape(-1), outs[0].reshape(-1)
        return [applied.call(x, y, NAMES.index(op.op.name), work=-(-x.size // _PART))]
