"""The CTC loss and its gradient: an item is a sample, with as many lanes as its label has states.

The recursion is that of recompute/ops/loss/ctc.py.  Rows of states have two more numbers: α two impossible ones before
them, β two after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import TensorType, need
from ....ops.loss.ctc import IMPOSSIBLE, NEVER, CTCLoss, CTCLossGrad
from ..families import SharedFamily, family
from ..mathematics import exp, log
from ..texts import Work, inline, kernel, lanes, meet, on_processor, report
from ..trouble import LABEL_IS_BLANK, LABEL_OUTSIDE, LENGTH_OUTSIDE, STATUS

#: rows of a sample: two of α or β, what a transition over a state costs, log-probabilities of a step
_SKIP, _HERE, _ROWS = 2, 3, 4
#: steps whose α is kept: the last two, by the lowest bit, or all
_TWO, _ALL = 1, (1 << 32) - 1


@inline
def _entries(labels, classes, blank, ignored, status):
    """How many entries a label has; -1 for one that cannot be, which is reported."""
    for i in range(labels.size):
        label = labels[i]
        if label == ignored:
            return np.int64(i)
        if label < 0 or label >= classes:
            report(status, LABEL_OUTSIDE, label, classes)
            return np.int64(-1)
        if label == blank:
            report(status, LABEL_IS_BLANK, label, ignored)
            return np.int64(-1)
    return np.int64(labels.size)


@inline
def _steps(lengths, n, steps, status):
    """How many steps of a sample count; -1 for what cannot be, which is reported."""
    if not lengths.size:
        return np.int64(steps)
    length = np.int64(lengths[n])
    if length < 0 or length > steps:
        report(status, LENGTH_OUTSIDE, length, steps)
        return np.int64(-1)
    return length


@inline
def _costs(labels, entries, skip):
    """0 or NEVER for the transition over the state before each, and two more of them."""
    t = skip.dtype.type
    for i in lanes(entries):
        skip[2 * i] = t(NEVER)
        skip[2 * i + 1] = t(NEVER) if i > 0 and labels[i] == labels[max(0, i - 1)] else t(0)
    for s in lanes(2 * entries, 2 * entries + 3):
        skip[s] = t(NEVER)


@inline
def _emission(scores, labels, blank, width, here):
    """Log-probabilities of the states' classes."""
    never = here.dtype.type(NEVER)
    for s in lanes(width):
        value = scores[labels[s // 2] if s % 2 else blank]
        here[s] = never if value < never else value


@inline
def _joined(stay, step, jump):
    """log(eˢᵗᵃʸ + eˢᵗᵉᵖ + eʲᵘᵐᵖ)."""
    most = stay if stay > step else step
    most = jump if jump > most else most
    return log(exp(jump - most) + exp(stay - most) + exp(step - most)) + most


@inline
def _total(last, width):
    """log p(label) of α after the last step."""
    a, b = last[width + 1], last[width]
    most = a if a > b else b
    return log(exp(a - most) + exp(b - most)) + most


@inline
def _row(row, count, first, last):
    """0 from one place of a row to another, else NEVER."""
    t = row.dtype.type
    for s in lanes(count):
        row[s] = t(0) if first <= s <= last else t(NEVER)


@inline
def _alpha(x, n, labels, blank, width, steps, rows, kept):
    """α of all steps, in rows[_ROWS + (step & kept)]; the log-probability of the label."""
    t = rows.dtype.type
    skip, here = rows[_SKIP], rows[_HERE]
    _row(rows[_ROWS], width + 2, 1, 1)
    meet()
    for i in range(steps):
        _emission(x[i, n], labels, blank, width, here)
        before, after = rows[_ROWS + (i & kept)], rows[_ROWS + ((i + 1) & kept)]
        for s in lanes(2):
            after[s] = t(NEVER)
        for s in lanes(width):
            after[s + 2] = _joined(before[s + 2], before[s + 1], before[s] + skip[s]) + here[s]
        meet()
    return _total(rows[_ROWS + (steps & kept)], width)


@inline
def _backward(after, before, skip, here, width):
    """β of the step before; `after` becomes that of the step and the states' log-probabilities."""
    for s in lanes(width):
        after[s] += here[s]
    meet()
    for s in lanes(width):
        before[s] = _joined(after[s], after[s + 1], after[s + 2] + skip[s + 2])


@inline
def _shares(alpha, beta, total, scale, to, width):
    """scale · eᵅ⁺ᵝ / p of the states, at most scale, in the places of their α."""
    zero = alpha.dtype.type(0)
    for s in lanes(width):
        share = (alpha[s + 2] + beta[s]) - total
        to[s + 2] = exp(zero if share > zero else share) * scale


@inline
def _add(shares, labels, blank, width, row):
    """Adds a step's shares of the states to their classes, in order."""
    for s in range(width):
        row[labels[s // 2] if s % 2 else blank] += shares[s + 2]


@kernel
def ctc_loss(x, labels, lengths, out, rows, rule, status, begin, end):
    """Losses of samples; `rule`: the blank, the label that is ignored, whether an infinite loss is 0."""
    t = x.dtype.type
    blank = rule[0]
    for n in range(begin, end):
        entries = _entries(labels[n], x.shape[2], blank, rule[1], status)
        steps = _steps(lengths, n, x.shape[0], status)
        out[n] = t(0)
        if entries < 0 or steps < 0:
            continue
        _costs(labels[n], entries, rows[n, _SKIP])
        total = _alpha(x, n, labels[n], blank, 2 * entries + 1, steps, rows[n], _TWO)
        none = t(0) if rule[2] else t(np.inf)
        out[n] = none if total < t(IMPOSSIBLE) else -total


@kernel
def ctc_gradient(x, labels, lengths, dloss, dx, rows, rule, status, begin, end):
    """Gradients of samples: α of all steps, then β from the last to the first, whose shares of a step replace its α."""
    t = x.dtype.type
    blank = rule[0]
    for n in range(begin, end):
        for i in range(x.shape[0]):
            row = dx[i, n]
            for c in lanes(row.size):
                row[c] = t(0)
        entries = _entries(labels[n], x.shape[2], blank, rule[1], status)
        steps = _steps(lengths, n, x.shape[0], status)
        if entries < 0 or steps < 0:
            continue
        skip, here, width = rows[n, _SKIP], rows[n, _HERE], 2 * entries + 1
        _costs(labels[n], entries, skip)
        total = _alpha(x, n, labels[n], blank, width, steps, rows[n], _ALL)
        if total < t(IMPOSSIBLE):
            continue
        _row(rows[n, 0], width + 2, width - 2, width - 1)
        _row(rows[n, 1], width + 2, width - 2, width - 1)
        meet()  # all have read the last α
        scale = -dloss[n]
        for i in range(steps - 1, -1, -1):
            after, before, alpha = rows[n, i % 2], rows[n, (i + 1) % 2], rows[n, _ROWS + i + 1]
            if i + 1 < steps:
                _emission(x[i + 1, n], labels[n], blank, width, here)
                _backward(after, before, skip, here, width)
            _shares(alpha, before, total, scale, here if on_processor() else alpha, width)
            meet()
            if on_processor():
                _add(here, labels[n], blank, width, dx[i, n])
        for i in lanes(0 if on_processor() else steps):
            _add(rows[n, _ROWS + i + 1], labels[n], blank, width, dx[i, n])


class Samples(SharedFamily):
    """The base of both families."""

    def accepts(self, op: Operator) -> bool:
        """Enough states."""
        x, labels = need(op.inputs[0]), need(op.inputs[1])
        return x.shape[0] * labels.shape[0] * (2 * labels.shape[1] + 1) >= self.place.enough()

    def rows(self, op: Operator, count: int) -> tuple[TensorType, ...]:
        """Rows of states."""
        x, (n, s) = need(op.inputs[0]), need(op.inputs[1]).shape
        return (TensorType(x.dtype, (n, _ROWS + count, 2 * s + 3)),)


@family("CTCLoss")
class Losses(Samples):
    """(log-probabilities, labels, lengths?) → losses."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """α of two steps, and buffers for a step."""
        return self.rows(op, 2)

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """A sample an item."""
        rule = op.of(CTCLoss)
        numbers = np.array([rule.blank, rule.ignore_index, rule.zero_infinity], np.int64)
        return [ctc_loss(*ins[:3], outs[0], *scratch, numbers, STATUS, **_shared(ins[1]))]


@family("CTCLossGrad")
class Gradients(Samples):
    """(log-probabilities, labels, lengths?, dloss) → their gradient."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """α of all steps and before them, and buffers for a step."""
        return self.rows(op, need(op.inputs[0]).shape[0] + 1)

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """A sample an item."""
        rule = op.of(CTCLossGrad)
        numbers = np.array([rule.blank, rule.ignore_index], np.int64)
        return [ctc_gradient(*ins[:4], outs[0], *scratch, numbers, STATUS, **_shared(ins[1]))]


def _shared(labels: Any) -> dict[str, int]:
    """How many items, and the steps of each that lanes divide."""
    return {"work": labels.shape[0], "lanes": max(32, 2 * labels.shape[1] + 1)}
