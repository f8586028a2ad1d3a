"""Cross entropy and negative log-likelihood on class labels, and their gradients: parallel over the labels.

Scores are seen as [N, C, D] (D: the axes behind the classes).  Losses and weights are kept in float64, one a label,
and added up in blocks of fixed length in the labels' order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import Array, Operands, TensorType, Value
from ...shared.mathematics import exp
from ...shared.row_sums import exponentials, largest
from ...shared.texts import inline, report
from ...shared.trouble import LABEL_OUTSIDE
from ..device import native
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, family, floats

_MEAN, _SUM, _NONE = 0, 1, 2
REDUCTIONS = {"mean": _MEAN, "sum": _SUM, "none": _NONE}


@inline
def _weight(weights, label, ignored, ignore, classes, status):
    """The weight of a label: 0 if it is ignored, or out of range, which is reported."""
    if ignore and label == ignored:
        return 0.0
    if label < 0 or label >= classes:
        report(status, LABEL_OUTSIDE, label, classes)
        return 0.0
    return float(weights[label]) if weights.size else 1.0


@kernel
def _cross_entropy(x, labels, weights, lp, losses, label_weights, ignored, ignore, status, begin, end):
    """Rows x [N, C] to their losses, and to log-probabilities where `lp` has rows."""
    for r in range(begin, end):
        a = x[r]
        m = largest(a)
        s = x.dtype.type(math.log(exponentials(a, m)))
        label = labels[r]
        w = _weight(weights, label, ignored, ignore, a.size, status)
        label_weights[r] = w
        losses[r] = 0.0
        if 0 <= label < a.size and not (ignore and label == ignored):
            losses[r] = -w * float((a[label] - m) - s)
        if lp.shape[0]:
            b = lp[r]
            for j in range(a.size):
                b[j] = (a[j] - m) - s


@kernel
def likelihood(x, labels, weights, losses, label_weights, ignored, ignore, status, begin, end):
    """Losses of log-probabilities x [N, C, D], label by label."""
    inner = x.shape[2]
    for r in range(begin, end):
        label = labels[r]
        w = _weight(weights, label, ignored, ignore, x.shape[1], status)
        label_weights[r] = w
        losses[r] = 0.0
        if 0 <= label < x.shape[1] and not (ignore and label == ignored):
            losses[r] = -w * float(x[r // inner, label, r % inner])


@inline
def _sum(x):
    """In blocks of 64, in order."""
    s = 0.0
    for start in range(0, x.size, 64):
        t = 0.0
        for i in range(start, min(start + 64, x.size)):
            t += x[i]
        s += t
    return s


@kernel
def reduced(losses, label_weights, out, reduction, begin, end):
    """One number a label to the result."""
    if reduction == _NONE:
        for r in range(losses.size):
            out[r] = losses[r]
    else:
        s = _sum(losses)
        out[0] = s / _sum(label_weights) if reduction == _MEAN else s


@kernel
def _label_scales(labels, weights, dloss, scales, classes, reduction, ignored, ignore, status, begin, end):
    """The gradient of each label's plain loss."""
    for r in range(labels.size):
        scales[r] = _weight(weights, labels[r], ignored, ignore, classes, status)
    count = _sum(scales) if reduction == _MEAN else 1.0
    if count == 0.0:  # no label counts
        count = 1.0
    for r in range(labels.size):
        if scales[r] != 0.0:  # what counts for nothing has no gradient, whatever follows
            scales[r] *= float(dloss[r if reduction == _NONE else 0]) / count


def shares(labels: Array, weights: Array, dloss: Array, scales: Array, classes: int, options: tuple[int, ...]) -> Call:
    """The call for each label's weight in a loss, times the loss's gradient; `options`: see `LabelLosses.options`."""
    return _label_scales.call(labels, weights, dloss, scales, classes, *options, native.STATUS, work=1, parallel=False)


@kernel
def cross_entropy_gradient(lp, labels, scales, dx, begin, end):
    """scale · (exp(lp) - 1 at the label) on rows [N, C]."""
    for r in range(begin, end):
        a, b = lp[r], dx[r]
        k = lp.dtype.type(scales[r])
        label = labels[r]
        inside = 0 <= label < a.size
        at = math.expm1(float(a[label])) if inside else 0.0
        for j in range(a.size):
            b[j] = exp(a[j]) * k
        if inside:
            b[label] = lp.dtype.type(at) * k


@kernel
def likelihood_gradient(labels, scales, dx, begin, end):
    """-scale at the label, else 0: samples [begin, end) of [N, C, D]."""
    inner = dx.shape[2]
    for n in range(begin, end):
        for c in range(dx.shape[1]):
            for d in range(inner):
                dx[n, c, d] = 0
        for d in range(inner):
            label = labels[n * inner + d]
            if 0 <= label < dx.shape[1]:
                dx[n, label, d] = -scales[n * inner + d]


class LabelLosses(Family):
    """The base of the four families."""

    def options(self, op: Operator) -> tuple[int, int, int]:
        """Reduction, the label that is ignored, whether there is one."""
        rule: Any = op.op
        ignored = rule.ignore_index
        return REDUCTIONS[rule.reduction], 0 if ignored is None else ignored, int(ignored is not None)

    def scores(self, op: Operator) -> Value:
        """The operand with the most axes."""
        return max((*op.reads(), *op.writes()), key=lambda v: v.ndim)

    def form(self, op: Operator) -> tuple[int, int, int]:
        """N, C, D; where the classes come last, N counts all rows and D is 1."""
        n, classes, *inner = self.scores(op).shape
        if op.op.name.startswith("ChannelsLast"):
            classes = self.scores(op).shape[-1]
            return self.scores(op).size // max(classes, 1), classes, 1
        return n, classes, math.prod(inner)

    def soft(self, op: Operator) -> bool:
        """Whether it is cross entropy."""
        return "Softmax" in op.op.name

    def accepts(self, op: Operator) -> bool:
        """Floats of one type, some of them; for cross entropy, where the classes lie together."""
        return floats(op) and self.scores(op).size > 0 and (not self.soft(op) or self.form(op)[2] == 1)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        n, _, inner = self.form(op)
        return (TensorType("f64", (2, n * inner)),)


def _flat(weights: Array | None, like: np.ndarray) -> np.ndarray:
    return np.empty(0, like.dtype) if weights is None else weights


@family("SoftmaxCrossEntropyLoss", "ChannelsLastSoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
class Losses(LabelLosses):
    """(scores, labels, weights?) → the loss, log-probabilities."""

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """The labels' losses, then their sum."""
        n, classes, inner = self.form(op)
        reduction, *ignore = self.options(op)
        x, labels, weights = ins[:3]
        labels, weights = labels.reshape(-1), _flat(weights, x)
        losses, label_weights = scratch[0]
        rest = (losses, label_weights, *ignore, native.STATUS)
        if self.soft(op):
            lp = np.empty((0, classes), x.dtype) if outs[1] is None else outs[1].reshape(n, classes)
            first = _cross_entropy.call(x.reshape(n, classes), labels, weights, lp, *rest, work=n)
        else:
            first = likelihood.call(x.reshape(n, classes, inner), labels, weights, *rest, work=n * inner)
        return [first, reduced.call(losses, label_weights, outs[0].reshape(-1), reduction, work=1, parallel=False)]


@family("SoftmaxCrossEntropyGrad", "ChannelsLastSoftmaxCrossEntropyGrad", "NegativeLogLikelihoodGrad")
class LossGradients(LabelLosses):
    """(log_prob, labels, weights?, dloss), and the same without log_prob, → the gradient of the scores."""

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """The labels' scales, then their rows."""
        n, classes, inner = self.form(op)
        reduction, *ignore = self.options(op)
        soft = self.soft(op)
        labels, weights, dloss = ins[1:4] if soft else ins[:3]
        labels, dx, scales = labels.reshape(-1), outs[0], scratch[0][0]
        first = shares(labels, _flat(weights, dx), dloss.reshape(-1), scales, classes, (reduction, *ignore))
        if soft:
            lp = ins[0].reshape(n, classes)
            return [first, cross_entropy_gradient.call(lp, labels, scales, dx.reshape(n, classes), work=n)]
        return [first, likelihood_gradient.call(labels, scales, dx.reshape(n, classes, inner), work=n)]
