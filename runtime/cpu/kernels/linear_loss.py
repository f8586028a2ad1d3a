"""The head's loss and its gradients: products of matrices, and between them kernels over rows of a tile of logits.

Losses and their weights are kept in float64, one a label.  See recompute/ops/loss/linear_cross_entropy.py for what is
made in which order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import Array, Operands, TensorType, need
from ....ops.loss.linear_cross_entropy import LinearCrossEntropy, LinearLoss
from ....ops.loss.linear_cross_entropy_grad import LinearCrossEntropyGrad
from ....ops.loss.linear_tiles import Sizes, slice_of, slices
from ...shared.kernels.loss import REDUCTIONS, reduced, shares
from ...shared.mathematics import exp, tanh
from ...shared.row_sums import exponentials, largest, total
from ...shared.texts import inline
from ..device.jit import call_of, kernel
from ..device.native import Call
from ..families import Family, family
from ..providers import products
from .recurrent_steps import Products

#: columns of a piece of work of the bias's gradient
_COLUMNS = 256


@inline
def _capped(a, bias, cap, scale):
    """Bias, scale and soft cap (0: none) of a row of logits, in place."""
    t = a.dtype.type
    if bias.size:
        for j in range(a.size):
            a[j] += bias[j]
    if cap != 0.0:
        k, c = t(scale / cap), t(cap)
        for j in range(a.size):
            a[j] = c * tanh(a[j] * k)
    elif scale != 1.0:
        k = t(scale)
        for j in range(a.size):
            a[j] *= k


@inline
def _differentiated(a, most, p, share, label, log_p, even, smoothing, cap, scale):
    """The gradient of a row of logits in its place: p · exp(a - most) - even · share, at the label of its own.

    `log_p`: what is subtracted from the label's logit for the logarithm of its softmax; p includes the share.
    """
    t = a.dtype.type
    inside = 0 <= label < a.size
    at = 0.0
    if inside:
        z = float(a[label]) - log_p
        ratio = float(a[label]) / cap if cap != 0.0 else 0.0
        more = p[1] * math.exp(z) + smoothing - even
        at = (math.expm1(z) + more) * share * (1.0 - ratio * ratio) * scale
    k, e = t(p[0] * scale), t(even * share * scale)
    if cap != 0.0:
        c = t(1.0 / cap)
        for j in range(a.size):
            ratio32 = a[j] * c
            a[j] = (exp(a[j] - most) * k - e) * (t(1) - ratio32 * ratio32)
    else:
        for j in range(a.size):
            a[j] = exp(a[j] - most) * k - e
    if inside:
        a[label] = t(at)


@inline
def _row_loss(lse, label, sum_, words, smoothing, z):
    """A row's plain loss."""
    loss = lse - (1.0 - smoothing) * label + z * lse * lse
    return loss - smoothing / words * sum_ if smoothing != 0.0 else loss


@kernel
def _rows(x, bias, labels, weights, shares, losses, lse, cap, scale, smoothing, z, begin, end):
    """Rows of all logits to losses and log-sum-exps, and to their gradients."""
    t = x.dtype.type
    for r in range(begin, end):
        a = x[r]
        _capped(a, bias, cap, scale)
        m = largest(a)
        s = exponentials(a, m)
        log_sum = float(m) + math.log(s)
        label = labels[r]
        at = float(a[label]) if 0 <= label < a.size else 0.0
        sum_ = total(a) if smoothing != 0.0 else 0.0
        losses[r] = weights[r] * _row_loss(log_sum, at, sum_, a.size, smoothing, z) if weights[r] != 0.0 else 0.0
        if lse.size:
            lse[r] = t(log_sum)
        more = 2.0 * z * log_sum
        p = (shares[r] * (1.0 + more) / s, more)
        _differentiated(a, m, p, shares[r], label, log_sum, smoothing / a.size, smoothing, cap, scale)


@kernel
def _seen(x, bias, labels, stats, first, cap, scale, smoothing, begin, end):
    """Rows of a slice of the logits, from word `first`: the largest, the sum of exponentials, the label's,
    the sum."""
    for r in range(begin, end):
        a = x[r]
        _capped(a, bias, cap, scale)
        m = float(largest(a))
        s = exponentials(a, x.dtype.type(m))
        row = stats[r]
        if first == 0:
            row[0], row[1], row[2], row[3] = m, s, 0.0, 0.0
        elif m > row[0]:
            row[1] = row[1] * math.exp(row[0] - m) + s
            row[0] = m
        else:
            row[1] += s * math.exp(m - row[0])
        at = labels[r] - first
        if 0 <= at < a.size:
            row[2] = float(a[at])
        if smoothing != 0.0:
            row[3] += total(a)


@kernel
def _finished(stats, weights, losses, lse, words, smoothing, z, begin, end):
    """Losses and log-sum-exps of rows whose words were all seen."""
    for r in range(begin, end):
        log_sum = stats[r, 0] + math.log(stats[r, 1])
        losses[r] = 0.0
        if weights[r] != 0.0:
            losses[r] = weights[r] * _row_loss(log_sum, stats[r, 2], stats[r, 3], words, smoothing, z)
        if lse.size:
            lse[r] = log_sum


@kernel
def _tile_gradient(x, bias, labels, shares, lse, first, words, cap, scale, smoothing, z, begin, end):
    """Rows of a slice of the logits to their gradients."""
    for r in range(begin, end):
        a = x[r]
        _capped(a, bias, cap, scale)
        lse_row = float(lse[r])
        more = 2.0 * z * lse_row
        p = (shares[r] * (1.0 + more), more)
        label = labels[r] - first
        _differentiated(a, lse[r], p, shares[r], label, lse_row, smoothing / words, smoothing, cap, scale)


@kernel
def _column_sums(x, y, more, begin, end):
    """y (+)= Σ of the rows of x, for pieces of columns."""
    for piece in range(begin, end):
        low, high = piece * _COLUMNS, min((piece + 1) * _COLUMNS, y.size)
        if more == 0:
            for j in range(low, high):
                y[j] = 0
        for r in range(x.shape[0]):
            for j in range(low, high):
                y[j] += x[r, j]


class LinearLosses(Family):
    """The base of the families of the operator and its gradient."""

    def accepts(self, op: Operator) -> bool:
        """float32 or float64, some of them, where a BLAS is there."""
        x, w, _, labels = op.inputs[:4]
        assert x is not None and w is not None and labels is not None
        return x.dtype in ("f32", "f64") and labels.size > 0 and x.shape[-1] > 0 and products.available(x.dtype)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        return self.calls(op, ins, outs, scratch)

    def calls(self, op: Operator, ins: Any, outs: Any, scratch: Any, *, onednn: bool = False) -> list[Call]:
        """Tile by tile; `onednn`: it multiplies where it is the fastest."""
        raise NotImplementedError

    def multiplied(self, op: Operator, height: int, words: int) -> TensorType:
        """The workspace of the products of a tile."""
        x = need(op.inputs[0])
        width = x.shape[-1]
        sizes = (height, words, width), (height, width, words), (words, width, height)
        return products.room(x.dtype, *sizes)

    def sizes(self, op: Operator, *, held: bool) -> Sizes:
        """Rows, words and tiles."""
        rule = op.of(LinearLoss)
        return Sizes(op.inputs[0], op.inputs[1], op.inputs[3], transposed=bool(rule.transB), held=held)

    def numbers(self, op: Operator) -> tuple[float, ...]:
        """Cap, scale, smoothing, z-loss."""
        rule = op.of(LinearLoss)
        return rule.cap, rule.scale, rule.smoothing, rule.z_loss

    def scaled(self, op: Operator, labels: Array, dloss: Array, out: Array, words: int, reduction: str) -> Call:
        """The call that computes each label's weight in the loss, times a gradient."""
        ignored = op.op.ignore_index  # type: ignore[attr-defined]
        rule = np.array([REDUCTIONS[reduction], ignored or 0, ignored is not None], np.int64)
        return call_of(shares(labels, None, dloss, out, words, rule))

    def logits(self, todo: Products, x: Array, w: Array, block: Array) -> None:
        """block = x wᵀ."""
        todo.product(x, w.T, block)


def _tile(room: Array, rows: slice, width: int) -> Array:
    height = rows.stop - rows.start
    return room[: height * width].reshape(height, width)


def _gradients(
    todo: Products, g: Array, rows: slice, words: slice, x: Array, w: Array, outs: Sequence[Array | None], op: Any
) -> None:
    """A tile's gradient of logits into those of x, w and bias; `outs` are those of all rows, and of the slice."""
    dx, dw, db = outs
    if dx is not None:
        todo.product(g, w[words], dx[rows], dx[rows] if words.start else None)
    if dw is not None:
        a, b = (g.T, x[rows]) if op.transB else (x[rows].T, g)
        todo.product(a, b, dw, dw if rows.start else None)
    if db is not None:
        todo.add(_column_sums.call(g, db, int(rows.start > 0), work=-(-db.size // _COLUMNS)))


@family("LinearCrossEntropy")
class LinearCrossEntropies(LinearLosses):
    """(x, w, bias?, labels) → loss, log-sum-exp, gradients."""

    def held(self, op: Operator) -> bool:
        """Whether gradients are made."""
        return any(v is not None for v in op.outputs[2:])

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Losses, weights and shares; what was seen of a tile's rows; a tile."""
        sizes, held = self.sizes(op, held=self.held(op)), self.held(op)
        words = sizes.words if held else sizes.step
        x = need(op.inputs[0])
        return (
            TensorType("f64", (3, sizes.rows)),
            TensorType("f64", (0 if held else sizes.height, 4)),
            TensorType(x.dtype, (sizes.height * words,)),
            self.multiplied(op, sizes.height, words),
        )

    def calls(
        self, op: Operator, ins: Operands, outs: Operands, scratch: Operands, *, onednn: bool = False
    ) -> list[Call]:
        """Tile by tile of rows."""
        rule = op.of(LinearCrossEntropy)
        held = self.held(op)
        sizes = self.sizes(op, held=held)
        x, w, bias, labels = ins[:4]
        x, labels = x.reshape(sizes.rows, sizes.width), labels.reshape(-1)
        w = w if rule.transB else w.T
        bias = np.empty(0, x.dtype) if bias is None else bias
        loss, lse, *gradients = outs[:5]
        lse = np.empty(0, x.dtype) if lse is None else lse.reshape(-1)
        losses, weights, shares = scratch[0]
        one = np.ones(1 if rule.reduction != "none" else sizes.rows)
        todo = Products(scratch[-1], onednn=onednn)
        todo.add(self.scaled(op, labels, np.ones(1), weights, sizes.words, "sum"))
        todo.add(self.scaled(op, labels, one, shares, sizes.words, rule.reduction))
        per_row = (labels, weights, shares, losses, lse)
        for rows in slices(sizes.rows, sizes.height):
            here = [a[rows] if a.size else a for a in per_row]
            if held:
                self._held(todo, op, (x, w, bias), here, rows, gradients, scratch[2])
            else:
                self._seen(todo, op, (x, w, bias), here, rows, scratch[1:3])
        reduction = REDUCTIONS[rule.reduction]
        todo.add(call_of(reduced(losses, weights, loss.reshape(-1), reduction, work=1, parallel=False)))
        return todo.calls

    def _held(
        self, todo: Products, op: Operator, matrices: Operands, here: Operands, rows: slice, made: Any, room: Array
    ) -> None:
        """All logits of some rows, and what their gradients add."""
        x, w, bias = matrices
        block = _tile(room, rows, w.shape[0])
        self.logits(todo, x[rows], w, block)
        todo.add(_rows.call(block, bias, *here, *self.numbers(op), work=block.shape[0]))
        dx, dw, db = made
        outs = (None if dx is None else dx.reshape(x.shape), dw, db)
        _gradients(todo, block, rows, slice(0, w.shape[0]), x, w, outs, op.op)

    def _seen(
        self, todo: Products, op: Operator, matrices: Operands, here: Operands, rows: slice, room: Operands
    ) -> None:
        """The log-sum-exp of some rows, a slice of the words at a time."""
        (x, w, bias), sizes = matrices, self.sizes(op, held=False)
        labels, weights, _, losses, lse = here
        cap, scale, smoothing, z = self.numbers(op)
        stats = room[0][: labels.size]
        for words in slices(sizes.words, sizes.step):
            block = _tile(room[1], rows, words.stop - words.start)
            self.logits(todo, x[rows], w[words], block)
            part = bias[words] if bias.size else bias
            numbers = (words.start, cap, scale, smoothing)
            todo.add(_seen.call(block, part, labels, stats, *numbers, work=labels.size))
        todo.add(_finished.call(stats, weights, losses, lse, sizes.words, smoothing, z, work=labels.size))


@family("LinearCrossEntropyGrad")
class LinearCrossEntropyGradients(LinearLosses):
    """(x, w, bias?, labels, log-sum-exp, dloss) → dx, dw, dbias."""

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """A number for each row, a tile."""
        sizes = self.sizes(op, held=False)
        x = need(op.inputs[0])
        tile = TensorType(x.dtype, (sizes.height * sizes.step,))
        return TensorType("f64", (sizes.rows,)), tile, self.multiplied(op, sizes.height, sizes.step)

    def calls(
        self, op: Operator, ins: Operands, outs: Operands, scratch: Operands, *, onednn: bool = False
    ) -> list[Call]:
        """Slice by slice of the words."""
        rule = op.of(LinearCrossEntropyGrad)
        sizes = self.sizes(op, held=False)
        x, w, bias, labels, lse, dloss = ins[:6]
        x, labels, lse = x.reshape(sizes.rows, sizes.width), labels.reshape(-1), lse.reshape(-1)
        w = w if rule.transB else w.T
        dx, dw, db = outs[:3]
        dx = None if dx is None else dx.reshape(x.shape)
        shares, room = scratch[:2]
        cap, scale, smoothing, z = self.numbers(op)
        todo = Products(scratch[-1], onednn=onednn)
        todo.add(self.scaled(op, labels, dloss.reshape(-1), shares, sizes.words, rule.reduction))
        for words in slices(sizes.words, sizes.step):
            part = np.empty(0, x.dtype) if bias is None else bias[words]
            gradients = (dx, *slice_of(rule, dw, db, words))
            for rows in slices(sizes.rows, sizes.height):
                block = _tile(room, rows, words.stop - words.start)
                self.logits(todo, x[rows], w[words], block)
                numbers = (words.start, sizes.words, cap, scale, smoothing, z)
                operands = (block, part, labels[rows], shares[rows], lse[rows], *numbers)
                todo.add(_tile_gradient.call(*operands, work=block.shape[0]))
                _gradients(todo, block, rows, words, x, w, gradients, rule)
        return todo.calls
