"""Cross entropy and negative log-likelihood on class labels, and their gradients: an item is a label.

Scores are seen as [N, C, D] (D: the axes behind the classes).  Losses and weights are kept in float64, one a label, and
added up in a fixed order: on a processor in blocks of fixed length, on a device by the threads of one block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import TensorType, Value
from ..families import SharedFamily, family
from ..mathematics import exp
from ..row_sums import exponentials, largest
from ..texts import Absent, Columns, Fixed, Work, inline, kernel, lanes, meet, report
from ..trouble import LABEL_OUTSIDE, STATUS

_MEAN, _SUM, _NONE = 0, 1, 2
REDUCTIONS = {"mean": _MEAN, "sum": _SUM, "none": _NONE}
#: lanes of sums over all labels
_MOST = 1024


def _lanes(elements: int) -> int:
    """Threads that share a row."""
    return 32 if elements <= 1024 else 256


@inline
def _weight(weights, label, ignored, ignore, classes, status):
    """The weight of a label: 0 if it is ignored, or out of range, which is reported."""
    if ignore and label == ignored:
        return 0.0
    if label < 0 or label >= classes:
        report(status, LABEL_OUTSIDE, label, classes)
        return 0.0
    return float(weights[label]) if weights.size else 1.0


@inline
def _counts(label, ignored, ignore, classes):
    """Whether a label is one of the classes, and is not ignored."""
    return 0 <= label < classes and not (ignore and label == ignored)


@kernel
def cross_entropy(x, labels, weights, lp, losses, label_weights, rule, status, begin, end):
    """Rows x [N, C] to their losses, and to log-probabilities where `lp` has rows; `rule`: see `LabelLosses.rule`."""
    t = x.dtype.type
    for r in range(begin, end):
        a = x[r]
        m = largest(a)
        s = t(math.log(exponentials(a, m)))
        label = labels[r]
        w = _weight(weights, label, rule[1], rule[2], a.size, status)
        label_weights[r] = w
        losses[r] = -w * float((a[label] - m) - s) if _counts(label, rule[1], rule[2], a.size) else 0.0
        if lp.shape[0]:
            b = lp[r]
            meet()  # lp may be in x's memory
            for j in lanes(a.size):
                b[j] = (a[j] - m) - s


@kernel
def likelihood(x, labels, weights, losses, label_weights, rule, status, begin, end):
    """Losses of log-probabilities x [N, C, D], label by label."""
    inner, ignored, ignore = x.shape[2], rule[1], rule[2]
    for r in range(begin, end):
        label = labels[r]
        w = _weight(weights, label, ignored, ignore, x.shape[1], status)
        label_weights[r] = w
        counts = _counts(label, ignored, ignore, x.shape[1])
        losses[r] = -w * float(x[r // inner, label, r % inner]) if counts else 0.0


@inline(
    c="""template <class X> DEVICE double sum_of(X&& x)
{
    double s = 0;
#pragma unroll 1
    for (long long i = threadIdx.x % LANES; i < (long long)x.size().v; i += LANES) s += x.p[i];
    return reduced_(s, Plus());
}
"""
)
def sum_of(x):
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
        for r in lanes(losses.size):
            out[r] = losses[r]
    else:
        s = sum_of(losses)
        out[0] = s / sum_of(label_weights) if reduction == _MEAN else s


@kernel
def label_scales(labels, weights, dloss, scales, classes, rule, status, begin, end):
    """The gradient of each label's plain loss."""
    for r in lanes(labels.size):
        scales[r] = _weight(weights, labels[r], rule[1], rule[2], classes, status)
    meet()
    count = sum_of(scales) if rule[0] == _MEAN else 1.0
    if count == 0.0:  # no label counts
        count = 1.0
    for r in lanes(labels.size):
        if scales[r] != 0.0:  # what counts for nothing has no gradient, whatever follows
            scales[r] *= float(dloss[r if rule[0] == _NONE else 0]) / count


def shares(labels: Any, weights: Any, dloss: Any, scales: Any, classes: int, rule: np.ndarray) -> Work:
    """The work of each label's weight in a loss, times the loss's gradient; `rule`: see `LabelLosses.rule`."""
    return label_scales(labels, weights, dloss, scales, classes, rule, STATUS, work=1, parallel=False, lanes=_MOST)


@inline(
    c="""DEVICE float exp_less_one(float x) { return expm1f(x); }
DEVICE double exp_less_one(double x) { return expm1(x); }
"""
)
def exp_less_one(x):
    """exp(x) - 1, to the last digits."""
    return math.expm1(float(x))


@kernel
def cross_entropy_gradient(lp, labels, scales, dx, begin, end):
    """scale · (exp(lp) - 1 at the label) on rows [N, C]."""
    t = lp.dtype.type
    for r in range(begin, end):
        a, b = lp[r], dx[r]
        k = t(scales[r])
        label = labels[r]
        inside = 0 <= label < a.size
        least = t(exp_less_one(a[label])) if inside else t(0)
        meet()  # dx may be in lp's memory
        for j in lanes(a.size):
            b[j] = exp(a[j]) * k
        meet()
        if inside:
            b[label] = least * k


@kernel
def likelihood_gradient(labels, scales, dx, inner, begin, end):
    """-scale at the label, else 0: samples of [N, C · inner]."""
    for n in range(begin, end):
        for e in lanes(dx.shape[1]):
            dx[n, e] = 0
        meet()
        for d in lanes(inner):
            label = labels[n * inner + d]
            if label >= 0 and label * inner < dx.shape[1]:
                dx[n, label * inner + d] = -scales[n * inner + d]


class LabelLosses(SharedFamily):
    """The base of the four families."""

    def rule(self, op: Operator) -> np.ndarray:
        """Reduction, the label that is ignored, whether there is one."""
        rule: Any = op.op
        ignored = rule.ignore_index
        return np.array([REDUCTIONS[rule.reduction], ignored or 0, ignored is not None], np.int64)

    def scores(self, op: Operator) -> Value:
        """The operand with the most axes."""
        return max((*op.reads(), *op.writes()), key=lambda v: (v.ndim, v.type.is_float))

    def form(self, op: Operator) -> tuple[int, int, int]:
        """N, C, D; where the classes come last, N counts all rows and D is 1."""
        n, classes, *inner = self.scores(op).shape
        if op.op.name.startswith("ChannelsLast"):
            classes = self.scores(op).shape[-1]
            return math.prod(self.scores(op).shape[:-1]), classes, 1
        return n, classes, math.prod(inner)

    def soft(self, op: Operator) -> bool:
        """Whether it is cross entropy."""
        return "Softmax" in op.op.name

    def accepts(self, op: Operator) -> bool:
        """Floats of one type; on a processor some of them, for cross entropy where the classes lie together."""
        if self.place.device:
            return len({v.dtype for v in (*op.reads(), *op.writes()) if v.type.is_float}) == 1
        return super().accepts(op) and self.scores(op).size > 0 and (not self.soft(op) or self.form(op)[2] == 1)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """A loss and a weight for each label."""
        n, _, inner = self.form(op)
        return (TensorType("f64", (2, n * inner)),)

    def rows(self, x: Any, n: int, classes: int, inner: int) -> Any:
        """Scores, a row for each label."""
        return x.reshape(n, classes) if inner == 1 else Columns(x.reshape(n, classes, inner))


@family("SoftmaxCrossEntropyLoss", "ChannelsLastSoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
class Losses(LabelLosses):
    """(scores, labels, weights?) → the loss, log-probabilities."""

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """The labels' losses, then their sum."""
        n, classes, inner = self.form(op)
        rule, (x, labels, weights) = self.rule(op), ins[:3]
        losses, label_weights = scratch[0][0], scratch[0][1]
        rest = (losses, label_weights, rule, STATUS)
        if self.soft(op):
            lp = Absent(2) if outs[1] is None else self.rows(outs[1], n, classes, inner)
            operands = (self.rows(x, n, classes, inner), labels.reshape(-1), weights, lp, *rest)
            first = cross_entropy(*operands, work=n * inner, lanes=_lanes(classes))
        else:
            first = likelihood(x.reshape(n, classes, inner), labels.reshape(-1), weights, *rest, work=n * inner)
        out = outs[0].reshape(-1)
        last = reduced(losses, label_weights, out, Fixed(int(rule[0])), work=1, parallel=False, lanes=_MOST)
        return [first, last]


@family("SoftmaxCrossEntropyGrad", "ChannelsLastSoftmaxCrossEntropyGrad", "NegativeLogLikelihoodGrad")
class LossGradients(LabelLosses):
    """(log_prob, labels, weights?, dloss), and the same without log_prob, → the gradient of the scores."""

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """The labels' scales, then their rows."""
        n, classes, inner = self.form(op)
        soft, dx, scales = self.soft(op), outs[0], scratch[0][0]
        labels, weights, dloss = ins[1:4] if soft else ins[:3]
        labels = labels.reshape(-1)
        first = shares(labels, weights, dloss.reshape(-1), scales, classes, self.rule(op))
        if soft:
            lp, to = (self.rows(a, n, classes, inner) for a in (ins[0], dx))
            return [first, cross_entropy_gradient(lp, labels, scales, to, work=n * inner, lanes=_lanes(classes))]
        to = dx.reshape(n, classes * inner)
        return [first, likelihood_gradient(labels, scales, to, inner, work=n, lanes=_lanes(classes * inner))]
