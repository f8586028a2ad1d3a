"""The head's loss and its gradient: tiles of logits by cuBLAS, and kernels between the products.

The logits of a tile of rows and words exist at a time; where gradients are made with the loss, those of some rows with
all words (see ops/loss/linear_cross_entropy.py).  16-bit floats are multiplied as they are, added up in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....language.ir import Operator
from ....language.types import FLOATS, TensorType
from ....ops.loss.linear_cross_entropy import LinearCrossEntropy
from ....ops.loss.linear_cross_entropy_grad import LinearCrossEntropyGrad
from ....ops.loss.linear_tiles import held_rows, slices
from ....ops.tiles import wide
from ..code import linear_loss as text
from ..code.rows import by_warp, over_rows
from ..device.kernel import STATUS, Buffer, Call, Product
from ..families import Buffers, Family, family

#: rows and words of a tile: 16 MiB of float32, products that fill a large device
ROWS, WORDS = 1024, 4096


class _Head:
    """An operator's operands as matrices, and its calls so far."""

    def __init__(self, op: Any, x: Buffer, w: Buffer, bias: Buffer | None, labels: Buffer) -> None:
        self.op, self.bias, self.labels = op, bias, labels
        self.width, self.rows = x.shape[-1], labels.size
        self.words = w.shape[1 - op.transB]
        self.x, self.w, self.kind = x, w, wide(x.dtype)
        self.calls: list[Call] = []

    def begin(self, at: Buffer, norm: Buffer, stats: Buffer | None) -> None:
        """Labels, and what a mean divides by."""
        op, self.at, self.norm = self.op, at, norm
        ignored = 0 if op.ignore_index is None else op.ignore_index
        rule = (self.rows, self.words, ignored, int(op.ignore_index is not None), STATUS)
        kernel = text.beginning(self.kind, self.labels.dtype)
        self.calls.append(kernel(self.rows, self.labels, at, stats, *rule))
        mean = int(op.reduction == "mean")
        self.calls.append(text.counting(self.kind).blocks(1, args=(at, norm, self.rows, mean)))

    def logits(self, words: slice) -> text.Logits:
        """The kernels' variant for a slice."""
        op, word = self.op, self.kind if self.bias is None else self.bias.dtype
        warp = by_warp(words.stop - words.start)
        return text.Logits(self.kind, word, warp, self.bias is not None, op.cap > 0, op.scale != 1)

    def part(self, x: Buffer, rows: slice) -> Buffer:
        """Rows of x or of its gradient."""
        return x.at(rows.start * self.width, ((rows.stop - rows.start) * self.width,))

    def of_words(self, w: Buffer, words: slice) -> tuple[Buffer, int]:
        """A slice of w or of its gradient, and the elements from one of its rows to the next."""
        start = words.start * self.width if self.op.transB else words.start
        return w.at(start, (w.size - start,)), self.width if self.op.transB else self.words

    def multiply(self, block: Buffer, rows: slice, words: slice) -> None:
        """A tile's logits."""
        m, n, (w, lead) = rows.stop - rows.start, words.stop - words.start, self.of_words(self.w, words)
        product = Product(self.part(self.x, rows), w, block, m, n, self.width, self.width, lead, n,
                          tb=bool(self.op.transB))  # fmt: skip
        self.calls.append(product)

    def differentiate(self, block: Buffer, out: Buffer, rows: slice, words: slice, lse: Buffer, down: Any) -> None:
        """The gradient of a tile's logits; `down`: the loss's gradient, and whether the logits are complete."""
        op, (dloss, ready) = self.op, down
        m, n, single = rows.stop - rows.start, words.stop - words.start, op.reduction == "none"
        if dloss is not None and single:
            dloss = dloss.at(rows.start, (m,)) if dloss.shape else dloss
        kernel = text.differentiating(self.logits(words), out.dtype, ready=ready)
        arguments = (block, self.bias, self.at.at(rows.start, (m,)), lse.at(rows.start, (m,)), dloss, self.norm, out)
        rule = (m, n, words.start, self.words, int(single), op.scale, op.cap, op.smoothing, op.z_loss)
        self.calls.append(over_rows(kernel, m, (*arguments, *rule), warp=by_warp(n)))

    def spread(self, g: Buffer, rows: slice, words: slice, dx: Any, dw: Any, db: Any, first: tuple[bool, bool]) -> None:
        """Adds to the gradients: dx for all rows, dw with its row's elements, db of the slice (None: not wanted).

        `first`: whether these are the first words, and the first rows.
        """
        m, n, d = rows.stop - rows.start, words.stop - words.start, self.width
        to_x, to_w = (0.0 if yes else 1.0 for yes in first)
        if dx is not None:
            w, lead = self.of_words(self.w, words)
            out = self.part(dx, rows)
            self.calls.append(Product(g, w, out, m, d, n, n, lead, d, tb=not self.op.transB, beta=to_x))
        x = self.part(self.x, rows)
        if dw is not None and self.op.transB:
            self.calls.append(Product(g, x, dw[0], n, d, m, n, d, dw[1], ta=True, beta=to_w))
        elif dw is not None:
            self.calls.append(Product(x, g, dw[0], d, n, m, d, n, dw[1], ta=True, beta=to_w))
        if db is not None:
            self.calls.append(text.column_sums(g.dtype, db.dtype)(n, g, db, m, n, int(first[1])))


def _accepts(op: Operator) -> bool:
    """Floats, nothing empty, and a bias of any float type."""
    x, w, bias, labels = (None if v is None else v.type for v in op.inputs[:4])
    assert x is not None and w is not None and labels is not None
    good = x.dtype in FLOATS and (bias is None or bias.dtype in FLOATS)
    return good and 0 not in (x.size, w.size) and labels.size * max(x.shape[-1], 1) < 1 << 40 and max(w.shape) < 1 << 30


@family("LinearCrossEntropy")
class HeadLoss(Family):
    """(x, w, bias?, labels) → loss, lse?, dx?, dw?, dbias?."""

    def accepts(self, op: Operator) -> bool:
        """See `_accepts`; gradients with the loss in float32 and float64 alone, as the operator makes them."""
        x: Any = op.inputs[0]
        gradient = any(v is not None for v in op.outputs[2:])
        return _accepts(op) and (not gradient or (wide(x.dtype) == x.dtype and self._height(op) > 0))

    def _height(self, op: Operator) -> int:
        """Rows of a tile."""
        rule = op.of(LinearCrossEntropy)
        w, labels = op.inputs[1].type, op.inputs[3].type  # type: ignore[union-attr]
        if any(v is not None for v in op.outputs[2:]):
            return held_rows(labels.size, w.shape[1 - rule.transB])
        return min(ROWS, labels.size)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Six numbers and a label a row, what a mean divides by, logits."""
        rule = op.of(LinearCrossEntropy)
        x, w, labels = (op.inputs[i].type for i in (0, 1, 3))  # type: ignore[union-attr]
        words, kind = w.shape[1 - rule.transB], wide(x.dtype)
        held = any(v is not None for v in op.outputs[2:])
        size = self._height(op) * (words if held else min(WORDS, words))
        rows = labels.size
        return (
            TensorType(kind, (6, rows)),
            TensorType("i64", (rows,)),
            TensorType(kind, (1,)),
            TensorType(kind, (size,)),
        )

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Rows from top to bottom, words from left to right, and again for the gradients."""
        x, w, bias, labels = ins[:4]
        loss, lse, dx, dw, db = outs[:5]
        assert x is not None and w is not None and labels is not None and loss is not None
        head, (stats, at, norm, room) = _Head(op.op, x, w, bias, labels), scratch
        head.begin(at, norm, stats)
        held, n = any(v is not None for v in (dx, dw, db)), head.rows
        log_sums, single = stats.at(4 * n, (n,)), op.op.reduction == "none"  # type: ignore[attr-defined]
        for rows in slices(n, self._height(op)):
            height = rows.stop - rows.start
            blocks = []
            for words in slices(head.words, min(WORDS, head.words)):
                start, width = height * words.start if held else 0, words.stop - words.start
                blocks.append((words, room.at(start, (height * width,))))
                head.multiply(blocks[-1][1], rows, words)
                head.calls.append(_seen(head, blocks[-1][1], rows, words, stats))
            head.calls.append(_finished(head, rows, stats, lse, loss if single else None))
            for words, block in blocks if held else ():
                head.differentiate(block, block, rows, words, log_sums, (None, True))
                part = None if dw is None else head.of_words(dw, words)
                db_part = None if db is None else db.at(words.start, (words.stop - words.start,))
                head.spread(block, rows, words, dx, part, db_part, (words.start == 0, rows.start == 0))
        if not single:
            losses = stats.at(5 * n, (n,))
            head.calls.append(text.adding(head.kind).blocks(1, args=(losses, norm, loss, n)))
        return head.calls


def _seen(head: _Head, block: Buffer, rows: slice, words: slice, stats: Buffer) -> Call:
    """The call that updates the statistics of rows after a slice."""
    m, n = rows.stop - rows.start, words.stop - words.start
    part = stats.at(rows.start, (stats.size - rows.start,))
    args = (
        block,
        head.bias,
        head.at.at(rows.start, (m,)),
        part,
        m,
        head.rows,
        n,
        words.start,
        head.op.scale,
        head.op.cap,
    )
    return over_rows(text.seeing(head.logits(words)), m, args, warp=by_warp(n))


def _finished(head: _Head, rows: slice, stats: Buffer, lse: Buffer | None, losses: Buffer | None) -> Call:
    """Log-sum-exps and losses of rows whose logits were all seen."""
    m, start = rows.stop - rows.start, rows.start
    part = stats.at(start, (stats.size - start,))
    outs = [None if b is None else b.reshape(-1).at(start, (m,)) for b in (lse, losses)]
    rule = (m, head.rows, head.words, head.op.smoothing, head.op.z_loss)
    return text.finishing(head.kind)(m, part, head.at.at(start, (m,)), *outs, *rule)


@family("LinearCrossEntropyGrad")
class HeadGradient(Family):
    """(x, w, bias?, labels, lse, dloss) → dx, dw, dbias?; a slice of the vocabulary after the other."""

    def accepts(self, op: Operator) -> bool:
        return _accepts(op)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """A label a row, what a mean divides by, logits; for 16-bit floats their gradient, and sums in float32."""
        rule = op.of(LinearCrossEntropyGrad)
        x, w, labels = (op.inputs[i].type for i in (0, 1, 3))  # type: ignore[union-attr]
        kind, rows, width = wide(x.dtype), labels.size, x.shape[-1]
        step = min(WORDS, w.shape[1 - rule.transB])
        tile = (min(ROWS, rows) * step,)
        types = (TensorType("i64", (rows,)), TensorType(kind, (1,)), TensorType(kind, tile))
        if kind == x.dtype:
            return types
        sums = ((rows * width,), (step * width,), (step,))
        return (*types, TensorType(x.dtype, tile), *(TensorType(kind, s) for s in sums))

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """For each slice of words all rows, so that its gradients are complete."""
        x, w, bias, labels, lse, dloss = ins[:6]
        dx, dw, db = outs[:3]
        assert x is not None and w is not None and labels is not None and lse is not None
        head, (at, norm, room, *more) = _Head(op.op, x, w, bias, labels), scratch
        head.begin(at, norm, None)
        log_sums = lse.reshape(-1)
        down = dloss.reshape(-1) if dloss is not None and dloss.shape else dloss
        for words in slices(head.words, min(WORDS, head.words)):
            width = words.stop - words.start
            part = None if dw is None else head.of_words(dw, words)
            db_part = None if db is None else db.at(words.start, (width,))
            to_x, to_w, to_b = dx, part, db_part
            if more:
                to_x = None if dx is None else more[1]
                to_w = part and (more[2], head.width if op.op.transB else width)  # type: ignore[attr-defined]
                to_b = None if db is None else more[3].at(0, (width,))
            for rows in slices(head.rows, min(ROWS, head.rows)):
                size = ((rows.stop - rows.start) * width,)
                block = room.at(0, size)
                g = more[0].at(0, size) if more else block
                head.multiply(block, rows, words)
                head.differentiate(block, g, rows, words, log_sums, (down, False))
                head.spread(g, rows, words, to_x, to_w, to_b, (words.start == 0, rows.start == 0))
            if more:
                head.calls += _narrowed(head, words, (to_w, part), (to_b, db_part))
        if more and dx is not None:
            head.calls.append(_narrow(more[1], dx, dx.size, dx.size, dx.size))
        return head.calls


def _narrowed(head: _Head, words: slice, of_w: tuple[Any, Any], of_b: tuple[Any, Any]) -> list[Call]:
    """Complete sums of a slice, as 16-bit floats."""
    calls, width = [], words.stop - words.start
    if of_w[1] is not None:
        run = head.width if head.op.transB else width
        calls.append(_narrow(of_w[0][0], of_w[1][0], width * head.width, run, of_w[1][1]))
    if of_b[1] is not None:
        calls.append(_narrow(of_b[0], of_b[1], width, width, width))
    return calls


def _narrow(x: Buffer, y: Buffer, size: int, run: int, lead: int) -> Call:
    return text.narrowing(x.dtype, y.dtype)(size, x, y, size, run, lead)
