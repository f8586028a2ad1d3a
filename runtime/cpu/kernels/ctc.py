"""The CTC loss and its gradient: parallel over the samples, each with as many states as its label has.

The recursion is that of recompute/ops/loss/ctc.py.  Rows of states have two more numbers: α two impossible ones before
them, β two after them.
"""

from __future__ import annotations

import numpy as np

from ....language.ir import Operator
from ....language.types import Array, Operands, TensorType, need
from ....ops.loss.ctc import IMPOSSIBLE, NEVER, CTCLoss, CTCLossGrad
from ...shared.texts import inline, report
from ...shared.trouble import LABEL_IS_BLANK, LABEL_OUTSIDE, LENGTH_OUTSIDE
from ..code.mathematics import exp, log
from ..device import native
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, enough, family

#: rows of a sample: two of α or β, what a transition over a state costs, log-probabilities of a step
_SKIP, _HERE, _ROWS = 2, 3, 4


@inline
def _entries(labels, classes, blank, ignored, status):
    """How many entries a label has; -1 for one that cannot be, which is reported."""
    for i in range(labels.size):
        label = labels[i]
        if label == ignored:
            return i
        if label < 0 or label >= classes:
            report(status, LABEL_OUTSIDE, label, classes)
            return -1
        if label == blank:
            report(status, LABEL_IS_BLANK, label, ignored)
            return -1
    return labels.size


@inline
def _steps(lengths, n, steps, status):
    """How many steps of a sample count; -1 for what cannot be, which is reported."""
    if not lengths.size:
        return steps
    length = lengths[n]
    if length < 0 or length > steps:
        report(status, LENGTH_OUTSIDE, length, steps)
        return -1
    return length


@inline
def _costs(labels, entries, skip):
    """0 or NEVER for the transition over the state before each, and two more of them."""
    t = skip.dtype.type
    for i in range(entries):
        skip[2 * i] = t(NEVER)
        skip[2 * i + 1] = t(NEVER) if i and labels[i] == labels[i - 1] else t(0)
    for s in range(2 * entries, 2 * entries + 3):
        skip[s] = t(NEVER)


@inline
def _emission(scores, labels, blank, width, here):
    """Log-probabilities of the states' classes."""
    never = here.dtype.type(NEVER)
    for s in range(width):
        value = scores[labels[s // 2] if s % 2 else blank]
        here[s] = never if value < never else value


@inline
def _joined(stay, step, jump):
    """log(eˢᵗᵃʸ + eˢᵗᵉᵖ + eʲᵘᵐᵖ)."""
    most = stay if stay > step else step
    most = jump if jump > most else most
    return log(exp(jump - most) + exp(stay - most) + exp(step - most)) + most


@inline
def _first(row, width):
    """α before the first step."""
    for s in range(width + 2):
        row[s] = row.dtype.type(NEVER)
    row[1] = row.dtype.type(0)


@inline
def _forward(before, after, skip, here, width):
    """α of the next step."""
    after[0] = after.dtype.type(NEVER)
    after[1] = after.dtype.type(NEVER)
    for s in range(width):
        after[s + 2] = _joined(before[s + 2], before[s + 1], before[s] + skip[s]) + here[s]


@inline
def _total(last, width):
    """log p(label) of α after the last step."""
    a, b = last[width + 1], last[width]
    most = a if a > b else b
    return log(exp(a - most) + exp(b - most)) + most


@kernel
def _losses(x, labels, lengths, out, rows, blank, ignored, zero_infinity, status, begin, end):
    """Samples [begin, end)."""
    t = x.dtype.type
    for n in range(begin, end):
        entries = _entries(labels[n], x.shape[2], blank, ignored, status)
        steps = _steps(lengths, n, x.shape[0], status)
        out[n] = t(0)
        if entries < 0 or steps < 0:
            continue
        skip, here, width = rows[n, _SKIP], rows[n, _HERE], 2 * entries + 1
        _costs(labels[n], entries, skip)
        _first(rows[n, 0], width)
        for i in range(steps):
            _emission(x[i, n], labels[n], blank, width, here)
            _forward(rows[n, i % 2], rows[n, (i + 1) % 2], skip, here, width)
        total = _total(rows[n, steps % 2], width)
        if total < t(IMPOSSIBLE):
            out[n] = t(0) if zero_infinity else t(np.inf)
        else:
            out[n] = -total


@inline
def _last(row, width):
    """β after the last step."""
    for s in range(width + 2):
        row[s] = row.dtype.type(NEVER)
    row[width - 1] = row.dtype.type(0)
    if width > 1:
        row[width - 2] = row.dtype.type(0)


@inline
def _backward(after, before, skip, here, width):
    """β of the step before; `after` becomes that of the step and the states' log-probabilities."""
    for s in range(width):
        after[s] += here[s]
    for s in range(width):
        before[s] = _joined(after[s], after[s + 1], after[s + 2] + skip[s + 2])


@inline
def _shares(alpha, beta, total, scale, here, width):
    """scale · eᵅ⁺ᵝ / p of the states, at most scale."""
    zero = here.dtype.type(0)
    for s in range(width):
        share = (alpha[s + 2] + beta[s]) - total
        here[s] = exp(zero if share > zero else share) * scale


@kernel
def _gradients(x, labels, lengths, dloss, dx, rows, blank, ignored, status, begin, end):
    """Samples [begin, end): α of all steps into the rows behind the others, then β from the last to the first."""
    t = x.dtype.type
    for n in range(begin, end):
        for i in range(x.shape[0]):
            row = dx[i, n]
            for c in range(row.size):
                row[c] = t(0)
        entries = _entries(labels[n], x.shape[2], blank, ignored, status)
        steps = _steps(lengths, n, x.shape[0], status)
        if entries < 0 or steps < 0:
            continue
        skip, here, width = rows[n, _SKIP], rows[n, _HERE], 2 * entries + 1
        _costs(labels[n], entries, skip)
        _first(rows[n, _ROWS], width)
        for i in range(steps):
            _emission(x[i, n], labels[n], blank, width, here)
            _forward(rows[n, _ROWS + i], rows[n, _ROWS + i + 1], skip, here, width)
        total = _total(rows[n, _ROWS + steps], width)
        if total < t(IMPOSSIBLE):
            continue
        _last(rows[n, steps % 2], width)
        _last(rows[n, (steps + 1) % 2], width)
        for i in range(steps - 1, -1, -1):
            if i + 1 < steps:
                _emission(x[i + 1, n], labels[n], blank, width, here)
                _backward(rows[n, i % 2], rows[n, (i + 1) % 2], skip, here, width)
            _shares(rows[n, _ROWS + i + 1], rows[n, (i + 1) % 2], total, -dloss[n], here, width)
            row = dx[i, n]
            for s in range(width):
                row[labels[n, s // 2] if s % 2 else blank] += here[s]


class Samples(Family):
    """The base of both families."""

    def accepts(self, op: Operator) -> bool:
        """Enough states."""
        x, labels = need(op.inputs[0]), need(op.inputs[1])
        return x.shape[0] * labels.shape[0] * (2 * labels.shape[1] + 1) >= enough()

    def rows(self, op: Operator, count: int) -> tuple[TensorType, ...]:
        """Rows of states."""
        x, (n, s) = need(op.inputs[0]), need(op.inputs[1]).shape
        return (TensorType(x.dtype, (n, count, 2 * s + 3)),)


def _given(lengths: Array | None) -> Array:
    return np.empty(0, np.int64) if lengths is None else lengths


@family("CTCLoss")
class Losses(Samples):
    """(log-probabilities, labels, lengths?) → losses."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Buffers for the states of a step."""
        return self.rows(op, _ROWS)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        x, labels, lengths = ins[:3]
        rule = op.of(CTCLoss)
        options = (rule.blank, rule.ignore_index, int(rule.zero_infinity), native.STATUS)
        return [_losses.call(x, labels, _given(lengths), outs[0], *scratch, *options, work=len(labels))]


@family("CTCLossGrad")
class Gradients(Samples):
    """(log-probabilities, labels, lengths?, dloss) → their gradient."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """And α of all steps and before them."""
        return self.rows(op, _ROWS + need(op.inputs[0]).shape[0] + 1)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        x, labels, lengths, dloss = ins[:4]
        rule = op.of(CTCLossGrad)
        options = (rule.blank, rule.ignore_index, native.STATUS)
        return [_gradients.call(x, labels, _given(lengths), dloss, outs[0], *scratch, *options, work=len(labels))]
