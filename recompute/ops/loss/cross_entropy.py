"""Cross entropy of class labels, on scores, and what losses on class labels share.

Scores are [N, C, d1, ...], labels [N, d1, ...]; class weights [C] are optional.  Rows, that is labels, are taken a
few samples at a time where all of them would take room; inside, a tensor of scores is seen as [N, C, D].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...language.factors import SUM, Factor, factor, needed_whole
from ...language.op import Case, Draw, ImportedNode, Op, OperatorBuilder
from ...language.types import Array, Operands, TensorType, Value
from ..channels_last import channels_last
from ..reduction.softmax import log_softmax
from ..shape.reshape import reshape
from ..tiles import TILE, wide

_REDUCTIONS = ("mean", "sum", "none")


class LabelLoss(Op, abstract=True):
    """The base of the losses and their gradients.

    `reduction`: "mean" (by the sum of the weights of the labels), "sum" or "none"; labels equal to `ignore_index`
    count for nothing.
    """

    reduction: str = "mean"
    ignore_index: int | None = None

    def check(self, scores: TensorType, labels: TensorType, weights: TensorType | None) -> None:
        """TypeRuleError where the inputs do not fit each other."""
        if self.reduction not in _REDUCTIONS:
            raise self.fail(f"reduction must be one of {', '.join(_REDUCTIONS)}, not '{self.reduction}'")
        if scores.ndim < 2 or labels.shape != (scores.shape[0], *scores.shape[2:]):
            raise self.fail("scores must be [N, C, d1, ...] and labels [N, d1, ...]", scores, labels)
        if not scores.is_float:
            raise self.fail("scores must be floats", scores, labels)
        if labels.dtype not in ("i32", "i64"):
            raise self.fail("labels must be i32 or i64", scores, labels)
        if weights is not None and weights != TensorType(scores.dtype, scores.shape[1:2]):
            raise self.fail("weights must be one number a class", scores, labels, weights)

    def label_checks(self, at: int, scores: Sequence[int]) -> tuple:
        """Labels are classes, or ignored; `at`: their position, `scores`: the shape of the scores (see `Op.checks`)."""
        return ((at, ("label", scores[1], self.ignore_index)),)

    def loss_type(self, scores: TensorType, labels: TensorType) -> TensorType:
        """One number, or one a label."""
        return TensorType(scores.dtype, labels.shape if self.reduction == "none" else ())

    def label_factors(
        self, labels: TensorType, weights: Any, inputs: Sequence[str], outputs: Sequence[str]
    ) -> tuple[Factor, ...]:
        """The indices of labels; `inputs` and `outputs` say for each value whether it is like "scores", "labels", or a
        "loss", which may be reduced, or has none of them ("").

        A mean over labels of which some are ignored, or have weights, needs all of them: its count is data.
        """
        single, mean = self.reduction == "none", self.reduction == "mean"

        def at(what: str, axis: int) -> int | None:
            return {"scores": axis + (axis > 0), "labels": axis, "loss": axis if single else None}.get(what)

        factors = tuple(
            factor(
                d,
                [at(v, a) for v in inputs],
                [SUM if (y := at(v, a)) is None else y for v in outputs],
                (0,) if mean else (),
            )
            for a, d in enumerate(labels.shape)
        )
        return needed_whole(factors) if mean and self.weighs(weights) else factors

    def weighs(self, weights: Any) -> bool:
        """Whether labels have different weights."""
        return weights is not None or self.ignore_index is not None

    # -- numerics -------------------------------------------------------------------------------------------------

    def label_types(self, scores: TensorType, weights: TensorType | None) -> tuple[TensorType, ...]:
        """Scratch for each label: its place in the flat scores, whether it counts for nothing, a number, its weight."""
        n, _, inner, _ = _form(scores)
        kind, some = wide(scores.dtype), (n * inner if self.weighs(weights) else 0,)
        all_ = (n * inner,)
        return TensorType("i64", all_), TensorType("bool", some), TensorType(kind, all_), TensorType(kind, some)

    def place(self, shape: Sequence[int], labels: Array, weights: Array | None, temps: Operands) -> None:
        """Writes where the labels are in scores of `shape`, those that are ignored at class 0, and their weights."""
        at, ignored, _, label_weights = temps
        n, classes, *sizes = shape
        at[...] = labels.reshape(-1)
        if self.ignore_index is not None:
            np.equal(at, self.ignore_index, out=ignored)
            np.copyto(at, 0, where=ignored)
        if at.size and not 0 <= (low := int(at.min())) <= int(at.max()) < classes:
            wrong = low if low < 0 else int(at.max())
            raise ValueError(f"label {wrong} is outside the {classes} classes (and is not ignore_index)")
        if weights is not None:
            take_labels(weights, at, label_weights)
        elif label_weights.size:
            label_weights.fill(1)
        if self.ignore_index is not None:
            np.copyto(label_weights, 0, where=ignored)
        inner = math.prod(sizes)
        np.multiply(at, inner, out=at)
        rows = at.reshape(n, inner)
        np.add(rows, np.arange(n)[:, None] * (classes * inner), out=rows)
        np.add(rows, np.arange(inner), out=rows)

    def weigh(self, losses: Array, weights: Array | None, temps: Operands) -> None:
        """The labels' log-probabilities to their losses."""
        _, ignored, _, label_weights = temps
        np.negative(losses, out=losses)
        if self.ignore_index is not None:
            np.copyto(losses, 0, where=ignored)
        if weights is not None:
            np.multiply(losses, label_weights, out=losses)

    def reduce(self, losses: Array, label_weights: Array, out: Array) -> None:
        """One number a label (weighted) to the result."""
        if self.reduction == "none":
            out.reshape(-1)[...] = losses
            return
        total = np.sum(losses)
        if self.reduction == "mean":
            total = total / (np.sum(label_weights) if label_weights.size else losses.size)
        out[...] = total

    # -- in simpler operators -------------------------------------------------------------------------------------

    def label_masks(
        self, b: OperatorBuilder, scores: Value, labels: Value, weights: Value | None
    ) -> tuple[Value, Value | None]:
        """bool [N, C, d1, ...] where the class is the label's, and weights [N, 1, d1, ...] (None: all 1)."""
        n, classes, *inner = scores.shape
        ones = (1,) * len(inner)
        if labels.dtype != "i64":
            labels = b.Cast(labels, to="i64")
        labels = b.Reshape(labels, shape=(n, 1, *inner))
        index = b.CumSum(b.Fill(dtype="i64", shape=(classes, *ones), value=1), axis=0)
        chosen = b.Equal(labels, b.Sub(index, b.constant(1, index)))
        counted = None
        if weights is not None:
            each = b.Where(chosen, b.Reshape(weights, shape=(classes, *ones)), b.constant(0, weights))
            counted = b.ReduceSum(each, axes=(1,))
        if self.ignore_index is not None:
            ignored = b.Equal(labels, b.constant(self.ignore_index, labels))
            one = b.constant(1, scores) if counted is None else counted
            counted = b.Where(ignored, b.constant(0, scores), one)
        return chosen, counted

    def row_scores(self, b: OperatorBuilder, scores: Value, labels: Value) -> tuple[Value, Value]:
        """The logarithms of the sums of exponentials of scores, and the labels' scores, both [N, 1, d1, ...].

        An ignored label's is any score.  No tensor of scores is made: the classes may be divided among ranks.
        """
        y = labels if labels.dtype == "i64" else b.Cast(labels, to="i64")
        y = b.Reshape(y, shape=(labels.shape[0], 1, *labels.shape[1:]))
        if self.ignore_index is not None:
            y = b.Where(b.Equal(y, b.constant(self.ignore_index, y)), b.constant(0, y), y)
        return b.ReduceLogSumExp(scores, axes=(1,), keepdims=1), b.GatherElements(scores, y, axis=1)

    def expanded_loss(self, b: OperatorBuilder, losses: Any, labels: Any, counted: Any) -> Any:
        """The loss from each label's plain one, [N, 1, d1, ...], and its weight (see `label_masks`)."""
        if counted is not None:
            losses = counting(b, counted, losses)
        if self.reduction == "none":
            return reshape(b, losses, labels.shape)
        total = b.ReduceSum(losses, keepdims=0)
        return b.Div(total, self.expanded_count(b, counted, labels, total)) if self.reduction == "mean" else total

    def expanded_count(self, b: OperatorBuilder, label_weights: Any, labels: Any, like: Any) -> Any:
        """The divisor of a mean: the sum of the labels' weights, or their number."""
        if label_weights is None:
            return b.constant(labels.size, like)
        return b.ReduceSum(label_weights, keepdims=0)

    def expanded_scale(self, b: OperatorBuilder, found: Value | None, labels: Value, dloss: Value) -> Value:
        """The gradient of each row's plain loss, [N, 1, d1, ...] or a scalar."""
        if self.reduction == "none":
            dloss = b.Reshape(dloss, shape=(labels.shape[0], 1, *labels.shape[1:]))
        elif self.reduction == "mean":
            count = self.expanded_count(b, found, labels, dloss)
            dloss = b.Div(dloss, count if found is None else divisor(b, count))
        return dloss if found is None else counting(b, found, dloss)

    def scales(self, dloss: Array, temps: Operands) -> None:
        """The gradient of each row's plain loss, into the number of each label; 0 where it counts for nothing."""
        _, nothing, out, label_weights = temps[:4]
        out[...] = dloss.reshape(-1) if self.reduction == "none" else dloss
        if self.reduction == "mean":
            count = np.sum(label_weights) if label_weights.size else out.size
            np.divide(out, count + (count == 0), out=out)  # where no label counts, all gradients are 0
        if label_weights.size:
            np.multiply(out, label_weights, out=out)
            np.equal(label_weights, 0, out=nothing)
            np.copyto(out, 0, where=nothing)


def divisor(b: OperatorBuilder, count: Any) -> Any:
    """The divisor in a mean's gradient: 1 where no label counts, so that the gradient is 0 there."""
    return b.Where(b.Equal(count, b.constant(0, count)), b.constant(1, count), count)


def counting(b: OperatorBuilder, weights: Value, dloss: Value) -> Value:
    """weights · dloss, 0 where a label counts for nothing, whatever dloss is."""
    zero = b.constant(0, weights)
    return b.Where(b.Equal(weights, zero), zero, b.Mul(weights, dloss))


def _form(scores: Any) -> tuple[int, int, int, int]:
    """N, C, D, and how many samples make a tile."""
    n, classes, *inner = scores.shape
    size = math.prod(inner)
    return n, classes, size, max(1, min(n, TILE // max(classes * size, 1)))


def take_labels(flat: Array, at: Array, out: Array) -> None:
    """flat[at] into `out`; positions are known to be valid, and NumPy copies without a buffer only if told so."""
    if flat.dtype != out.dtype:
        out[...] = flat[at]
    else:
        flat.take(at, out=out, mode="clip")


def loss_from_onnx(cls: Any, node: ImportedNode, want: int) -> Any:
    """Class weights become a buffer: they are not trained."""
    op = cls(node.attributes.get("reduction", "mean"), node.attributes.get("ignore_index"))
    weights = node.buffer(2) if node.type(2) is not None else None
    return node.emit(op, node.need(0), node.input(1), weights, want=want)


def loss_samples(cls: Any, draw: Draw, make: Any) -> Iterator[Case]:
    """Reductions, weights, ignored labels, further dimensions, i32 labels, float32, float16."""
    for reduction in _REDUCTIONS:
        for ignore in (None, 1, -100):
            labels = draw.ints("i64[6]", 0, 4)
            labels[2] = labels[2] if ignore is None else ignore
            labels[3] = 2
            for weights in (None, draw("f64[4]", 0.5, 1.5)):
                op = cls(reduction=reduction, ignore_index=ignore)
                yield make(op, draw("f64[6,4]"), labels, weights)
    op = cls(reduction="mean", ignore_index=None)
    yield make(op, draw("f64[2,3,2,2]"), draw.ints("i32[2,2,2]", 0, 3), draw("f64[3]", 0.5, 1.5))
    yield make(op, draw("f32[400,101]"), draw.ints("i64[400]", 0, 101), None)
    yield make(op, draw("f16[4,5]"), draw.ints("i64[4]", 0, 5), draw("f16[5]", 0.5, 1.5))
    yield make(op, draw("f64[2,3,1]"), draw.ints("i64[2,1]", 0, 3), None)


@channels_last(inputs=(0,), outputs=(1,))
class SoftmaxCrossEntropyLoss(LabelLoss, onnx=True):
    """(scores, labels, weights?) → loss, log_prob: -w · log_softmax(scores) at the label, reduced (ONNX 13)."""

    inplace = (0,)
    inplace_output = 1

    def infer(self, scores, labels, weights=None):
        """The loss, and log-probabilities like the scores."""
        self.check(scores, labels, weights)
        return self.loss_type(scores, labels), scores

    def axis_factors(self, ins, outs):
        return self.label_factors(ins[1], (*ins, None)[2], ("scores", "labels"), ("loss", "scores"))

    def scratch(self, ins, outs):
        scores, weights = ins[0], (*ins, None)[2]
        _, classes, inner, step = _form(scores)
        kind = wide(scores.dtype)
        rows = TensorType(kind, (step, classes, inner))
        return (*self.label_types(scores, weights), TensorType(kind, (step, 1, inner)), rows, rows)

    def checks(self, ins, outs):
        return self.label_checks(1, ins[0].shape)

    def compute(self, ins, outs, scratch):
        """Log-probabilities into the second output, or tile by tile into scratch."""
        scores, labels, weights = (*ins, None)[:3]
        *temps, number, e, rows = scratch
        at, _, losses, label_weights = temps
        n, classes, inner, step = _form(scores)
        x = scores.reshape(n, classes, inner)
        kept = outs[1].reshape(x.shape) if len(outs) > 1 and outs[1] is not None else None
        direct = kept if kept is not None and kept.dtype == rows.dtype else None
        self.place(scores.shape, labels, weights, temps)
        for i in range(0, n, step):
            here = slice(i, min(i + step, n))
            k, part = here.stop - i, slice(i * inner, here.stop * inner)
            lp = rows[:k] if direct is None else direct[here]
            log_softmax(x[here], lp, number[:k], e[:k])
            if kept is not None and direct is None:
                kept[here] = lp
            take_labels(lp.reshape(-1), at[part] - i * classes * inner, losses[part])
        self.weigh(losses, weights, temps)
        self.reduce(losses, label_weights, outs[0])

    def expand(self, b, scores, labels, weights=None):
        _, counted = self.label_masks(b, scores, labels, weights)
        losses = b.Sub(*self.row_scores(b, scores, labels))
        return self.expanded_loss(b, losses, labels, counted), b.LogSoftmax(scores, axis=1)

    def gradient(self, b, ins, outs, grads):
        """From the log-probabilities and the labels; the scores are not kept."""
        _, labels, weights = (*ins, None)[:3]
        parts = []
        if grads[0] is not None:
            parts.append(b.SoftmaxCrossEntropyGrad(outs[1], labels, weights, grads[0], **self.options(LabelLoss)))
        if len(grads) > 1 and grads[1] is not None:
            parts.append(b.LogSoftmaxGrad(outs[1], grads[1], axis=1))
        return [b.add_all(parts), *[None] * (len(ins) - 1)]

    @classmethod
    def from_onnx(cls, node):
        """The second output where it is used."""
        return loss_from_onnx(cls, node, 2 if node.wants(1) else 1)

    @classmethod
    def samples(cls, draw):
        def make(op: SoftmaxCrossEntropyLoss, scores: Array, labels: Array, weights: Array | None) -> Case:
            # class weights are given, not learnt: they get no gradient (nor do they in PyTorch)
            return draw.case(op, scores, labels, weights, gradient=weights is None)

        yield from loss_samples(cls, draw, make)
        yield draw.case(cls(), draw("f64[3,4]"), draw.ints("i64[3]", 0, 4), want=1)
        yield draw.case(cls(), draw("f16[3,4]"), draw.ints("i64[3]", 0, 4), want=1)


@channels_last(inputs=(0,), outputs=(0,))
class SoftmaxCrossEntropyGrad(LabelLoss):
    """(log_prob, labels, weights?, dloss) → the scores' gradient: w · (softmax - onehot) · dloss (/ Σ w)."""

    linear = ((3,),)
    inplace = (0,)

    def infer(self, log_prob, labels, weights, dloss):
        self.check(log_prob, labels, weights)
        if dloss != self.loss_type(log_prob, labels):
            raise self.fail("dloss does not have the loss's type", log_prob, labels, weights, dloss)
        return (log_prob,)

    def axis_factors(self, ins, outs):
        return self.label_factors(ins[1], ins[2], ("scores", "labels", "", "loss"), ("scores",))

    def scratch(self, ins, outs):
        return self.label_types(ins[0], ins[2])

    def checks(self, ins, outs):
        return self.label_checks(1, ins[0].shape)

    def compute(self, ins, outs, scratch):
        """exp(l) - 1 at the labels, exp(l) elsewhere, times each row's scale."""
        log_prob, labels, weights, dloss = ins
        at, _, numbers, _ = scratch
        n, classes, inner, _ = _form(log_prob)
        out = outs[0].reshape(n, classes, inner)
        self.place(log_prob.shape, labels, weights, scratch)
        take_labels(log_prob.reshape(-1), at, numbers)
        np.expm1(numbers, out=numbers)
        np.exp(log_prob, out=outs[0])
        outs[0].reshape(-1)[at] = numbers
        self.scales(dloss, scratch)
        np.multiply(out, numbers.reshape(n, 1, inner), out=out, casting="unsafe")

    def expand(self, b, log_prob, labels, weights, dloss):
        """The formula with a mask of the labels."""
        chosen, counted = self.label_masks(b, log_prob, labels, weights)
        p = b.Sub(b.Exp(log_prob), b.Cast(chosen, to=log_prob.dtype))
        return (b.Mul(p, self.expanded_scale(b, counted, labels, dloss)),)

    @classmethod
    def samples(cls, draw):
        def make(op: SoftmaxCrossEntropyGrad, scores: Array, labels: Array, weights: Array | None) -> Case:
            lp = scores - abs(scores).max() - scores.dtype.type(0.1)
            t = op.loss_type(TensorType.of(scores), TensorType.of(labels))
            return draw.case(op, lp, labels, weights, draw(str(t)) + t.numpy.type(1))

        yield from loss_samples(cls, draw, make)
