"""Loss scaling and the check of a loss: whether numbers are finite, by the bits of their exponents.

What NumPy does as well for one number has a kernel for libraries of steps, where there is no NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import Operands, TensorType, need
from ....ops.loss.scale import LEAST, MOST
from ...shared.texts import report
from ...shared.trouble import NOT_FINITE
from ..device import native
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, enough, family

#: element type → the unsigned integers of its size, the bits of an exponent that is not finite's, and of the rest
_BITS = {
    "f16": (np.uint16, 0x7C00, 0x03FF),
    "bf16": (np.uint16, 0x7F80, 0x007F),
    "f32": (np.uint32, 0x7F800000, 0x007FFFFF),
    "f64": (np.uint64, 0x7FF0000000000000, 0x000FFFFFFFFFFFFF),
}
#: elements of a piece of work
PART = 1 << 14


@kernel
def not_finite(bits, exponent, bad, first, begin, end):
    """bad[first + p] ← whether part p of the elements has one that is not finite."""
    e = bits.dtype.type(exponent)
    for p in range(begin, end):
        count = 0
        for i in range(p * PART, min((p + 1) * PART, bits.size)):
            count += (bits[i] & e) == e
        bad[first + p] = 1 if count else 0


@kernel
def inverse_if_none(scale, bad, y, begin, end):
    """y ← 1 / scale, or 0 where one part is bad; nothing but the first piece of work."""
    count = 0
    for p in range(bad.size):
        count += bad[p]
    y[0] = y.dtype.type(0) if count else y.dtype.type(1) / scale[0]


@kernel
def next_scale(scale, good, unscale, growth, backoff, interval, least, most, begin, end):
    """The loss scale and the count of good steps in a row, in place."""
    one = scale.dtype.type
    count, skipped = good[0] + 1, unscale[0] == 0
    grown = count >= interval
    after = scale[0] * (one(backoff) if skipped else (one(growth) if grown else one(1)))
    scale[0] = min(max(after, one(least)), one(most))
    good[0] = 0 if skipped or grown else count


@kernel
def checked(bits, exponent, rest, y, status, begin, end):
    """y ← one number, given by its bits; reported where it is not finite."""
    b = bits[0]
    e, r = bits.dtype.type(exponent), bits.dtype.type(rest)
    if b & e == e:
        report(status, NOT_FINITE, 0 if b & r else (2 if b > e else 1), 0)
    y[0] = b


def _count(x: TensorType) -> int:
    return -(-x.size // PART)


@family("InverseIfFinite")
class Inverses(Family):
    """(scale, gradients...) → 1 / scale, or 0."""

    def accepts(self, op: Operator) -> bool:
        """Gradients of any float that has a type of bits here."""
        gradients = [need(v) for v in op.inputs[1:]]
        return max(g.size for g in gradients) >= enough() and all(g.dtype in _BITS for g in gradients)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """A byte for each part of each gradient."""
        return (TensorType("u8", (sum(_count(need(v).type) for v in op.inputs[1:]),)),)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """A call for each gradient, and one for the result."""
        calls, first = [], 0
        for v, g in zip(op.inputs[1:], ins[1:], strict=False):
            kind, exponent, _ = _BITS[need(v).dtype]
            count = _count(need(v).type)
            if count:
                calls.append(not_finite.call(g.reshape(-1).view(kind), exponent, scratch[0], first, work=count))
            first += count
        rest = (ins[0].reshape(1), scratch[0], outs[0].reshape(1))
        return [*calls, inverse_if_none.call(*rest, work=1, parallel=False)]


@family("LossScaleUpdate")
class Scales(Family):
    """(scale, good, unscale) → both."""

    def accepts(self, op: Operator) -> bool:
        """For libraries: these are three numbers."""
        return enough() <= 1

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """One call."""
        rule: Any = op.op
        given = (*(x.reshape(1) for x in ins[:3]), rule.growth, rule.backoff, rule.interval, LEAST, MOST)
        return [next_scale.call(*given, work=1, parallel=False)]


@family("CheckFinite")
class Checks(Family):
    """x → x, or the step's end."""

    def accepts(self, op: Operator) -> bool:
        """For libraries: this is one number."""
        return enough() <= 1 and need(op.inputs[0]).dtype in _BITS

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> Sequence[Call]:
        """One call."""
        kind, exponent, rest = _BITS[need(op.inputs[0]).dtype]
        x, y = (a.reshape(1).view(kind) for a in (ins[0], outs[0]))
        return [checked.call(x, exponent, rest, y, native.STATUS, work=1, parallel=False)]
