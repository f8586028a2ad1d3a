"""The head of a language model as one operator: the product with the vocabulary's matrix and cross entropy, in slices.

The logits [rows, words] never exist.  Where only the loss is wanted, they are made for a tile of rows and words at a
time, and each row keeps its largest logit and its sum of exponentials (the online softmax of Milakov & Gimelshein 2018,
arXiv 1805.02867).

Gradients can be made in two ways.  (1) With the loss, as in Liger Kernel (Hsu et al. 2024, arXiv 2410.10989): the
logits of some rows, at least 128, are held until their log-sum-exp is known, then turned into their gradient and
multiplied into those of x and w.  These are three products, as many as without this operator, and no pass over all
logits: it takes less time.  The gradients are those of a result whose own gradient is 1, and are multiplied by it
afterwards; they live from the loss to the backward pass, which begins there.  (2) From the log-sum-exp, as in Cut Cross
Entropy (Wijmans et al. 2024, arXiv 2411.09009): `LinearCrossEntropyGrad` computes the logits again, a tile at a time,
four products in all, and a few MiB of workspace for any vocabulary.  The first is taken for one number as the loss, in
float32 and float64, where 128 rows of logits take at most 64 MiB (131,072 words in float32); halves, whose small
gradients loss scaling must reach, and larger vocabularies take the second.

On a 2-core processor products with 256 rows take 4 % longer for a row than with 1,024, with 128 rows 15 %, with 64
rows 50 %; a fourth product takes 33 %.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np

from ...language.builder import Builder
from ...language.factors import SUM, factor, needed_whole
from ...language.op import Cost, Draw, Op, OperatorBuilder
from ...language.types import TensorType, Value
from ..norm.fused import as_type
from ..shape.reshape import Fill, reshape
from ..tiles import wide
from .cross_entropy import SoftmaxCrossEntropyLoss, counting, divisor
from .linear_tiles import Sizes, Tiles, held_rows, slice_of, slices


class LinearLoss(Op, abstract=True):
    """The base of the operator and its gradient.

    x: [..., d]; w: [words, d], or [d, words] without `transB`; bias: [words] (optional); labels: x's axes but the last.
    logits = cap · tanh(scale · (x wᵀ + bias) / cap), or scale · (...) without a cap (0).  A row's loss is
    log Σ exp(logits) - (1 - smoothing) · its label's logit - smoothing · the mean logit + z_loss · (log Σ exp)² (the
    last is PaLM's, arXiv 2204.02311).  `reduction`: "mean" over the labels that count, "sum" or "none"; labels equal
    to `ignore_index` count for nothing.
    """

    autocast = "low"
    autocast_inputs: ClassVar[tuple[int, ...] | None] = (0, 1, 2)
    reduction: str = "mean"
    ignore_index: int | None = None
    transB: int = 1
    smoothing: float = 0.0
    cap: float = 0.0
    z_loss: float = 0.0
    scale: float = 1.0

    def options(self) -> dict[str, Any]:
        """The attributes, which the gradient shares."""
        names = ("reduction", "ignore_index", "transB", "smoothing", "cap", "z_loss", "scale")
        return {n: getattr(self, n) for n in names}

    def check(self, x: TensorType, w: TensorType, bias: TensorType | None, labels: TensorType) -> None:
        """TypeRuleError where options, shapes or types do not fit."""
        types = (x, w, bias, labels)
        if self.reduction not in ("mean", "sum", "none"):
            raise self.fail(f"reduction must be mean, sum or none, not '{self.reduction}'", *types)
        if not 0 <= self.smoothing <= 1:
            raise self.fail(f"smoothing must be from 0 to 1, not {self.smoothing}", *types)
        numbers = (self.cap, self.z_loss, self.scale)
        if not all(map(math.isfinite, numbers)) or self.cap < 0 or self.z_loss < 0:
            raise self.fail("cap, z_loss and scale must be finite, cap and z_loss not negative", *types)
        if x.ndim < 1 or w.ndim != 2 or not x.is_float or w.dtype != x.dtype or x.shape[-1] != w.shape[self.transB]:
            raise self.fail("x and w need one float type, and w a side that is x's last axis", *types)
        words = w.shape[1 - self.transB]
        if bias is not None and bias != TensorType(x.dtype, (words,)):
            raise self.fail("bias must be one number a word", *types)
        if labels.dtype not in ("i32", "i64") or labels.shape != x.shape[:-1] or not words:
            raise self.fail("labels must be i32 or i64, of x's axes but the last, and there must be words", *types)

    def loss_type(self, x: TensorType, labels: TensorType) -> TensorType:
        """In at least float32: one number, or one a label."""
        return TensorType(wide(x.dtype), labels.shape if self.reduction == "none" else ())

    def label_checks(self, labels: int, w: TensorType) -> tuple:
        """Labels are words, or ignored (see `Op.checks`)."""
        return ((labels, ("label", w.shape[1 - self.transB], self.ignore_index)),)

    def row_factors(self, labels: TensorType, inputs: tuple, outputs: tuple, shares: tuple[int, ...]) -> Any:
        """The indices of rows; `inputs` and `outputs`: which values have them (other outputs are partial sums);
        `shares`: outputs that a mean divides by the number of labels.

        A mean over labels of which some are ignored needs all of them: its count is data.
        """
        mean = self.reduction == "mean"
        factors = tuple(
            factor(d, [a if has else None for has in inputs], [a if has else SUM for has in outputs], mean * shares)
            for a, d in enumerate(labels.shape)
        )
        return needed_whole(factors) if mean and self.ignore_index is not None else factors


class LinearCrossEntropy(LinearLoss):
    """(x, w, bias?, labels) → loss, log-sum-exp of each row, and gradients of x, w and bias for a loss with gradient 1.

    See the module's text.
    """

    small_outputs = (1, 2, 3, 4)  # none of them is made again by itself

    def infer(self, x, w, bias, labels):
        """The loss, a number for each row, and types like the inputs'."""
        self.check(x, w, bias, labels)
        loss = self.loss_type(x, labels)
        types = (loss, TensorType(loss.dtype, labels.shape))
        return (*types, x, w) if bias is None else (*types, x, w, bias)

    def axis_factors(self, ins, outs):
        count, single = len(outs), self.reduction == "none"
        of_outputs = (single, True, True, False, False)[:count]
        return self.row_factors(ins[3], (True, False, False, True), of_outputs, (0, 2, 3, 4)[: count - 1])

    def checks(self, ins, outs):
        return self.label_checks(3, ins[1])

    def with_gradients(self, x: TensorType, w: TensorType, labels: TensorType) -> bool:
        """Whether gradients are made with the loss."""
        words = w.shape[1 - self.transB]
        fits = held_rows(labels.size, words) > 0
        return fits and wide(x.dtype) == x.dtype and self.reduction != "none"

    def sizes(self, ins: Any, outs: Any) -> tuple[Sizes, bool]:
        """The sizes, from types or arrays, and whether gradients are computed."""
        held = any(v is not None for v in outs[2:])
        result = Sizes(ins[0], ins[1], ins[3], transposed=bool(self.transB), held=held)
        return result, held

    def scratch(self, ins, outs):
        """A tile's logits and what is computed from them."""
        sizes, held = self.sizes(ins, outs)
        return sizes.types(wide(ins[0].dtype), held=held, gradient=held)

    def compute(self, ins, outs, scratch):
        """Rows from top to bottom, words from left to right."""
        (sizes, held), (dx, dw, db) = self.sizes(ins, outs), (*outs[2:], None, None, None)[:3]
        tiles = Tiles(self, ins, sizes, scratch)
        lse = None if len(outs) < 2 or outs[1] is None else outs[1].reshape(-1)
        outs_made = (None if dx is None else dx.reshape(tiles.x.shape), dw, db)
        sums = tiles.sums(outs_made) if held else outs_made
        for rows in slices(sizes.rows, sizes.height):
            tiles.begin(rows)
            for words in slices(sizes.words, sizes.step):
                block = tiles.block(rows, words, held=held)
                tiles.logits(block, rows, words)
                tiles.see(block, rows, words)
            statistic = tiles.finish(rows, lse)
            if not held:
                continue
            share = tiles.rows_of(tiles.stats[5], rows)
            tiles.share(None, rows, share)
            for words in slices(sizes.words, sizes.step):
                block = tiles.block(rows, words, held=True)
                tiles.differentiate(block, rows, words, statistic, share)
                tiles.spread(block, rows, words, (sums[0], *slice_of(self, sums[1], sums[2], words)))
        for out, total in zip(outs_made, sums, strict=True):
            if total is not out:
                out[...] = total
        tiles.reduce(outs[0])

    def gradient(self, b, ins, outs, grads):
        """Those that were made with the loss, times its gradient; or an operator that computes the logits again."""
        x, w, bias, labels = ins
        if any(g is not None for g in grads[1:]):
            return b.gradient_of_expansion(self, ins, grads)
        if not self.with_gradients(x.type, w.type, labels.type):
            want = 2 if bias is None else 3
            results = b.LinearCrossEntropyGrad(x, w, bias, labels, outs[1], grads[0], want=want, **self.options())
            return [*results, *[None] * (4 - len(results))]
        one = _is_one(b, grads[0])
        gradients = [b.Identity(g) if one else b.Mul(g, grads[0]) for g in outs[2:]]
        return [*gradients, *[None] * (4 - len(gradients))]

    def expand(self, b, x, w, bias, labels):
        """All logits, their log-sum-exp, and the formulas."""
        t, lse, label, chosen, counted = whole(self, b, x, w, bias, labels)
        losses = b.Sub(lse, b.Mul(label, b.constant(1 - self.smoothing, label)) if self.smoothing else label)
        if self.smoothing:
            mean = b.ReduceMean(t, axes=(1,))
            losses = b.Sub(losses, b.Mul(mean, b.constant(self.smoothing, mean)))
        if self.z_loss:
            losses = b.Add(losses, b.Mul(b.Mul(lse, lse), b.constant(self.z_loss, lse)))
        plain = SoftmaxCrossEntropyLoss(self.reduction, self.ignore_index)
        loss = plain.expanded_loss(b, losses, labels, counted)
        results = (loss, b.Reshape(lse, shape=labels.shape))
        ins, outputs, one = (x, w, bias, labels), (t, lse, chosen, counted), b.fill(1.0, loss)
        if self.reduction != "mean":
            return (*results, *expanded_gradients(self, b, ins, outputs, one))
        sums = expanded_gradients(dataclasses.replace(self, reduction="sum"), b, ins, outputs, one)
        count = count_of(b, counted, labels, loss)
        by = count if counted is None else divisor(b, count)
        return (*results, *(b.Div(g, as_type(b, by, g.dtype)) for g in sums))

    def cost(self, ins, outs):
        """One product, or three with gradients, and about ten operations for each logit."""
        x, w = ins[:2]
        count = ins[3].size * w.shape[1 - self.transB]
        products = 1 + sum(v is not None for v in outs[2:4])
        moved = sum(t.nbytes for t in (*ins, *outs) if t is not None)
        return Cost(count * (2 * products * x.shape[-1] + 10), moved)

    @classmethod
    def samples(cls, draw):
        """All options, both layouts, halves, a vector, several axes; alone, with log-sum-exps, with gradients."""
        for op, ins in head_samples(cls, draw):
            yield draw.case(op, *ins, want=1, export=str(ins[0].dtype) != "bfloat16")
        for op, ins in list(head_samples(cls, draw))[:-2:3]:
            yield draw.case(op, *ins, want=2)
            yield draw.case(op, *ins, gradient=False)
        x, w, y = draw("f32[300,3]"), draw("f32[1100,3]"), draw.ints("i64[300]", 0, 1100)
        yield draw.case(cls(), x, w, None, y, want=2)


def head_samples(cls: Any, draw: Draw) -> Any:
    """Samples of a head, as operators and inputs: all reductions, with and without bias."""
    y = draw.ints("i64[5]", 0, 7)
    y[1] = 3
    bias = draw("f64[7]")
    for reduction in ("mean", "sum", "none"):
        yield cls(reduction), (draw("f64[5,4]"), draw("f64[7,4]"), None, y)
        yield cls(reduction, ignore_index=3, smoothing=0.1), (draw("f64[5,4]"), draw("f64[7,4]"), bias, y)
    yield cls(cap=0.7, scale=1.5, transB=0), (draw("f64[5,4]"), draw("f64[4,7]"), bias, y)
    yield cls("sum", z_loss=0.02, scale=0.5), (draw("f64[5,4]"), draw("f64[7,4]"), None, y)
    every = cls("mean", 3, 0, 0.2, 0.9, 0.03, 1.3)
    yield every, (draw("f64[5,4]"), draw("f64[4,7]"), bias, y)
    labels = draw.ints("i32[2,3]", 0, 6)
    yield cls(transB=0), (draw("f64[2,3,4]"), draw("f64[4,6]"), None, labels)
    yield cls("sum"), (draw("f64[4]"), draw("f64[6,4]"), None, np.array(2))
    yield cls(cap=2.0), (draw("f16[6,4]"), draw("f16[9,4]"), draw("f16[9]"), draw.ints("i64[6]", 0, 9))
    yield cls(transB=0, z_loss=0.1), (draw("bf16[6,4]"), draw("bf16[4,9]"), None, draw.ints("i64[6]", 0, 9))


def _is_one(b: Builder, dloss: Value) -> bool:
    """Whether a gradient is the 1 with which differentiation begins."""
    ops = (o.op for o in b.operators if dloss in o.outputs)
    return any(isinstance(op, Fill) and op.value == 1 for op in ops)


# -- in simpler operators ---------------------------------------------------------------------------------------------


def whole(op: LinearLoss, b: OperatorBuilder, x: Any, w: Any, bias: Any, labels: Any) -> tuple[Any, ...]:
    """All logits [rows, words], their log-sum-exp and the label's [rows, 1], where that is, and 1 or 0 for each row
    (None: 1)."""
    rows, kind = labels.size, wide(x.dtype)
    flat = reshape(b, as_type(b, x, kind), (rows, x.shape[-1]))
    t = b.MatMul(flat, as_type(b, w, kind), transB=op.transB)
    if bias is not None:
        t = b.Add(t, as_type(b, bias, kind))
    if op.cap:
        t = b.Mul(b.Tanh(b.Mul(t, b.constant(op.scale / op.cap, t))), b.constant(op.cap, t))
    elif op.scale != 1:
        t = b.Mul(t, b.constant(op.scale, t))
    plain, rows_labels = SoftmaxCrossEntropyLoss("sum", op.ignore_index), reshape(b, labels, (rows,))
    return (t, *plain.row_scores(b, t, rows_labels), *plain.label_masks(b, t, rows_labels, None))


def count_of(b: OperatorBuilder, counted: Any, labels: Any, like: Any) -> Any:
    """The divisor of a mean: the number of labels that count."""
    return b.constant(labels.size, like) if counted is None else b.ReduceSum(counted, keepdims=0)


def expanded_gradients(op: LinearLoss, b: OperatorBuilder, ins: Any, made: Any, dloss: Any) -> list[Any]:
    """The gradients of x, w and, where there is one, bias."""
    (x, w, bias, labels), (t, lse, chosen, counted) = ins, made
    kind = t.dtype
    if op.reduction == "none":
        dloss = b.Reshape(dloss, shape=(labels.size, 1))
    elif op.reduction == "mean":
        count = count_of(b, counted, labels, dloss)
        dloss = b.Div(dloss, count if counted is None else divisor(b, count))
    share = dloss if counted is None else counting(b, counted, dloss)
    p = b.Exp(b.Sub(t, lse))
    if op.z_loss:
        p = b.Mul(p, b.Add(b.Mul(lse, b.constant(2 * op.z_loss, lse)), b.constant(1, lse)))
    if op.smoothing:
        p = b.Sub(p, b.constant(op.smoothing / t.shape[1], p))
    label = as_type(b, chosen, kind)
    g = b.Mul(b.Sub(p, b.Mul(label, b.constant(1 - op.smoothing, p)) if op.smoothing else label), share)
    if op.cap:
        ratio = b.Mul(t, b.constant(1 / op.cap, t))
        g = b.Mul(g, b.Sub(b.constant(1, t), b.Mul(ratio, ratio)))
    if op.scale != 1:
        g = b.Mul(g, b.constant(op.scale, g))
    wide_w, flat = as_type(b, w, kind), reshape(b, as_type(b, x, kind), (labels.size, x.shape[-1]))
    dx = reshape(b, b.MatMul(g, wide_w, transB=1 - op.transB), x.shape)
    dw = b.MatMul(g, flat, transA=1) if op.transB else b.MatMul(flat, g, transA=1)
    grads = [as_type(b, dx, x.dtype), as_type(b, dw, w.dtype)]
    if bias is not None:
        grads.append(as_type(b, b.ReduceSum(g, axes=(0,), keepdims=0), bias.dtype))
    return grads
