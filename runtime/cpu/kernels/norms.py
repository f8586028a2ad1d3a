"""Norms over whole tensors: the norm of all gradients, and the updates that scale a step by norms (LAMB, LARS).

Sums are in parts of elements whose number follows from the sizes alone, so that bits do not depend on threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import Operands, TensorType, need
from ....ops.optimizer.base import Update
from ...shared.row_sums import ANY_ORDER, dot, in_blocks
from ...shared.texts import inline
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, enough, family

#: elements of a part, which is a piece of work
PART = 1 << 14


@inline(fastmath=ANY_ORDER)
def _squares(x, begin, end):
    """Σ x², each widened before: float32 would overflow where a gradient explodes."""
    s = 0.0
    for j in range(begin, end):
        v = np.float64(x[j])
        s += v * v
    return s


@kernel
def square_parts(x, sums, first, begin, end):
    """sums[first + p] ← Σ x² of part p of the elements."""
    for p in range(begin, end):
        sums[first + p] = _squares(x, p * PART, min((p + 1) * PART, x.size))


@kernel
def root_of_sum(sums, y, begin, end):
    """y ← √ of all parts' sums, added in order."""
    s = 0.0
    for p in range(sums.size):
        s += sums[p]
    y[0] = math.sqrt(s)


def _count(x: TensorType) -> int:
    return -(-x.size // PART)


@family("GlobalNorm")
class GlobalNorms(Family):
    """√Σ x² over all inputs."""

    def accepts(self, op: Operator) -> bool:
        """Floats that numba reads."""
        inputs = [need(v) for v in op.inputs]
        return max(v.size for v in inputs) >= enough() and all(v.dtype in ("f32", "f64", "bf16") for v in inputs)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """A sum for each part of each input."""
        return (TensorType("f64", (sum(_count(need(v).type) for v in op.inputs),)),)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """A call for each input, and one for the root."""
        calls, first = [], 0
        for v, x in zip(op.inputs, ins, strict=False):
            count = _count(need(v).type)
            if count:
                calls.append(square_parts.call(x.reshape(-1), scratch[0], first, work=count))
            first += count
        return [*calls, root_of_sum.call(scratch[0], outs[0].reshape(1), work=1, parallel=False)]


@kernel
def lamb_numbers(rate, step, unscale, numbers, beta1, beta2, epsilon, begin, end):
    """numbers ← the learning rate, what multiplies m / (√v + numbers[2]), that, what multiplies the gradient, betas."""
    t = np.float64(step[0]) + 1.0
    root = math.sqrt(1.0 - beta2**t)
    numbers[0] = rate[0]
    numbers[1] = root / (1.0 - beta1**t)
    numbers[2] = root * epsilon
    numbers[3] = unscale[0] if unscale.size else 1.0
    numbers[4], numbers[5] = beta1, beta2


@inline(fastmath=ANY_ORDER)
def _lamb_squares(w, m, v, scale, epsilon, decay, begin, end):
    """Σ r² of elements, r being the direction of their step."""
    s = w.dtype.type(0)
    for j in range(begin, end):
        r = m[j] / (np.sqrt(v[j]) + epsilon) * scale + w[j] * decay
        s += r * r
    return s


@kernel
def lamb_moments(w, g, m, v, numbers, sums, decay, begin, end):
    """New moments, and the sums of w² and of r² for each part of the elements; nothing where the step is skipped."""
    one = w.dtype.type
    by, keep, new = one(numbers[3]), one(numbers[4]), one(1.0 - numbers[4])
    keep2, new2 = one(numbers[5]), one(1.0 - numbers[5])
    if numbers[3] == 0:
        return
    for p in range(begin, end):
        low, high = p * PART, min((p + 1) * PART, w.size)
        for j in range(low, high):
            x = one(g[j]) * by
            m[j] = m[j] * keep + x * new
            v[j] = v[j] * keep2 + x * x * new2
        sums[p, 0] = dot(w[low:high], w[low:high])
        given = (w[low:high], m[low:high], v[low:high], one(numbers[1]), one(numbers[2]), one(decay))
        sums[p, 1] = in_blocks(_lamb_squares, high - low, given)


@kernel
def lamb_step(w, m, v, numbers, sums, decay, begin, end):
    """w ← w - rate · trust · r."""
    one = w.dtype.type
    if numbers[3] == 0:
        return
    ww, rr = 0.0, 0.0
    for p in range(sums.shape[0]):
        ww += sums[p, 0]
        rr += sums[p, 1]
    trust = math.sqrt(ww / rr) if ww > 0 and rr > 0 else 1.0
    by, scale, epsilon, less = one(numbers[0]) * one(trust), one(numbers[1]), one(numbers[2]), one(decay)
    for p in range(begin, end):
        for j in range(p * PART, min((p + 1) * PART, w.size)):
            w[j] -= (m[j] / (np.sqrt(v[j]) + epsilon) * scale + w[j] * less) * by


@kernel
def lars_sums(w, g, unscale, sums, begin, end):
    """The sums of w² and of the gradient's squares for each part of the elements."""
    by = w.dtype.type(unscale[0]) if unscale.size else w.dtype.type(1)
    for p in range(begin, end):
        low, high = p * PART, min((p + 1) * PART, w.size)
        sums[p, 0] = dot(w[low:high], w[low:high])
        sums[p, 1] = _squares(g, low, high) * by * by


@kernel
def lars_numbers(rate, unscale, sums, numbers, coefficient, decay, epsilon, begin, end):
    """numbers ← the learning rate of this parameter, and what multiplies the gradient."""
    ww, gg = 0.0, 0.0
    for p in range(sums.shape[0]):
        ww += sums[p, 0]
        gg += sums[p, 1]
    nw, ng = math.sqrt(ww), math.sqrt(gg)
    trust = coefficient * nw / (ng + decay * nw + epsilon) if nw > 0 and ng > 0 else 1.0
    numbers[0] = rate[0] * trust
    numbers[1] = unscale[0] if unscale.size else 1.0


@kernel
def lars_step(w, g, v, numbers, momentum, decay, begin, end):
    """v ← momentum · v + local · (g + decay · w), w ← w - v; nothing where the step is skipped."""
    one = w.dtype.type
    if numbers[1] == 0:
        return
    local, by, keep, less = one(numbers[0]), one(numbers[1]), one(momentum), one(decay)
    for p in range(begin, end):
        for j in range(p * PART, min((p + 1) * PART, w.size)):
            v[j] = v[j] * keep + (w[j] * less + one(g[j]) * by) * local
            w[j] -= v[j]


@family("LambUpdate", "LarsUpdate")
class TrustUpdates(Family):
    """(w, g, state, ...) → w, state: two walks over the elements, between which the norms are known."""

    def accepts(self, op: Operator) -> bool:
        """Parameters of float32 or float64; gradients may be bfloat16."""
        w, g = need(op.inputs[0]), need(op.inputs[1])
        same = w.dtype in ("f32", "f64") and g.dtype in (w.dtype, "bf16")
        return same and w.size >= enough() and not op.of(Update).stores

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """The sums of parts, and the numbers of the step."""
        return TensorType("f64", (_count(need(op.inputs[0]).type), 2)), TensorType("f64", (6,))

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """The numbers of the step, the sums, the step."""
        rule: Any = op.op
        given = rule.unscale(ins)
        unscale = np.empty(0, np.float32) if given is None else given.reshape(1)
        w, g, rate = ins[0].reshape(-1), ins[1].reshape(-1), ins[rule.rate_at].reshape(1)
        sums, numbers = scratch[:2]
        work = len(sums)
        if not work:
            return []
        if rule.name == "LarsUpdate":
            more = (rule.coefficient, rule.weight_decay, rule.epsilon)
            return [
                lars_sums.call(w, g, unscale, sums, work=work),
                lars_numbers.call(rate, unscale, sums, numbers, *more, work=1, parallel=False),
                lars_step.call(w, g, ins[2].reshape(-1), numbers, rule.momentum, rule.weight_decay, work=work),
            ]
        m, v = ins[2].reshape(-1), ins[3].reshape(-1)
        given = (rate, ins[rule.step_at].reshape(1), unscale, numbers, rule.beta1, rule.beta2, rule.epsilon)
        return [
            lamb_numbers.call(*given, work=1, parallel=False),
            lamb_moments.call(w, g, m, v, numbers, sums, rule.weight_decay, work=work),
            lamb_step.call(w, m, v, numbers, sums, rule.weight_decay, work=work),
        ]
