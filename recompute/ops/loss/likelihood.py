"""Negative log-likelihood of class labels, on log-probabilities."""

from __future__ import annotations

from dataclasses import field

import numpy as np

from ...language.samples import Case
from ...language.types import Array, TensorType
from .cross_entropy import LabelLoss, SoftmaxCrossEntropyLoss, loss_from_onnx, loss_samples, take_labels


class NegativeLogLikelihoodLoss(LabelLoss, onnx=True):
    """(log_prob, labels, weights?) → -w · log_prob at the label, reduced."""

    def infer(self, log_prob, labels, weights=None):
        self.check(log_prob, labels, weights)
        return (self.loss_type(log_prob, labels),)

    def axis_factors(self, ins, outs):
        return self.label_factors(ins[1], (*ins, None)[2], ("scores", "labels"), ("loss",))

    def scratch(self, ins, outs):
        return self.label_types(ins[0], (*ins, None)[2])

    def checks(self, ins, outs):
        return self.label_checks(1, ins[0].shape)

    def compute(self, ins, outs, scratch):
        log_prob, labels, weights = (*ins, None)[:3]
        at, _, losses, label_weights = scratch
        self.place(log_prob.shape, labels, weights, scratch)
        take_labels(log_prob.reshape(-1), at, losses)
        self.weigh(losses, weights, scratch)
        self.reduce(losses, label_weights, outs[0])

    def expand(self, b, log_prob, labels, weights=None):
        """The label's share by a mask."""
        chosen, counted = self.label_masks(b, log_prob, labels, weights)
        losses = b.Neg(b.ReduceSum(b.Where(chosen, log_prob, b.constant(0, log_prob)), axes=(1,)))
        return (self.expanded_loss(b, losses, labels, counted),)

    def gradient(self, b, ins, outs, grads):
        """The gradient of log_prob, which depends on labels, weights and dloss only."""
        log_prob, labels, weights = (*ins, None)[:3]
        op = b.NegativeLogLikelihoodGrad(labels, weights, grads[0], shape=log_prob.shape, **self.options(LabelLoss))
        return [op, *[None] * (len(ins) - 1)]

    @classmethod
    def from_onnx(cls, node):
        return loss_from_onnx(cls, node, 1)

    @classmethod
    def samples(cls, draw):
        def make(op: NegativeLogLikelihoodLoss, scores: Array, labels: Array, weights: Array | None) -> Case:
            return draw.case(op, scores, labels, weights, gradient=weights is None)

        yield from loss_samples(cls, draw, make)


class NegativeLogLikelihoodGrad(LabelLoss):
    """(labels, weights?, dloss) → the gradient of log-probabilities of `shape`: -w · dloss (/ Σ w) at the labels."""

    linear = ((2,),)
    shape: tuple[int, ...] = field(kw_only=True)

    def infer(self, labels, weights, dloss):
        x = TensorType(dloss.dtype, self.shape)
        self.check(x, labels, weights)
        if dloss != self.loss_type(x, labels):
            raise self.fail("dloss does not have the loss's type", labels, weights, dloss)
        return (x,)

    def axis_factors(self, ins, outs):
        return self.label_factors(ins[0], ins[1], ("labels", "", "loss"), ("scores",))

    def scratch(self, ins, outs):
        """Numbers of labels; a tile's numbers."""
        return self.label_types(TensorType(ins[2].dtype, self.shape), ins[1])

    def checks(self, ins, outs):
        return self.label_checks(0, self.shape)

    def compute(self, ins, outs, scratch):
        """0, then the labels' numbers."""
        labels, weights, dloss = ins
        at, _, numbers, _ = scratch
        outs[0].fill(0)
        self.place(self.shape, labels, weights, scratch)
        self.scales(dloss, scratch)
        np.negative(numbers, out=numbers)
        outs[0].reshape(-1)[at] = numbers

    def expand(self, b, labels, weights, dloss):
        """A choice by a mask of the labels."""
        like = b.fill(0.0, TensorType(dloss.dtype, self.shape))
        chosen, counted = self.label_masks(b, like, labels, weights)
        return (b.Where(chosen, b.Neg(self.expanded_scale(b, counted, labels, dloss)), like),)

    @classmethod
    def samples(cls, draw):

        def make(op: SoftmaxCrossEntropyLoss, scores: Array, labels: Array, weights: Array | None) -> Case:
            t = op.loss_type(TensorType.of(scores), TensorType.of(labels))
            grad = cls(shape=scores.shape, **op.options(LabelLoss))
            return draw.case(grad, labels, weights, draw(str(t)) + t.numpy.type(1))

        yield from loss_samples(SoftmaxCrossEntropyLoss, draw, make)
