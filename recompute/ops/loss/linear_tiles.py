"""Numerics of the head's loss and of its gradient, on logits of a tile: some rows with a slice of the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ...language.types import Array, Operands, TensorType
from .cross_entropy import take_labels

#: rows and words of a tile: 4 MiB of float32, in products large enough for a BLAS
ROWS, WORDS = 1024, 1024
#: where gradients are made with the loss, logits of some rows are held: of at least so many rows (products with fewer
#: lose more speed than logits computed twice), usually, as many as have so many logits, and at most so many (64 MiB)
LEAST, USUAL, SMALL, HELD = 128, 256, 1 << 18, 1 << 24


def held_rows(rows: int, words: int) -> int:
    """Rows whose logits are held, whole, until their gradients are made; 0 where those would be too few."""
    most = HELD // max(words, 1)
    if most < min(LEAST, rows):
        return 0
    wanted = min(most, max(USUAL, SMALL // max(words, 1)))
    return rows if wanted >= rows else wanted - wanted % 16 or wanted


def slices(size: int, step: int) -> Iterator[slice]:
    """[0, size) in steps."""
    return (slice(i, min(i + step, size)) for i in range(0, size, step))


class Sizes:
    """Sizes of a head: rows, words, width; of a tile; and the types of its workspace."""

    def __init__(self, x: Any, w: Any, labels: Any, *, transposed: bool, held: bool) -> None:
        self.rows, self.width = labels.size, x.shape[-1]
        self.words = w.shape[0] if transposed else w.shape[1]
        self.height = held_rows(self.rows, self.words) if held else min(ROWS, self.rows)
        self.step = min(WORDS, self.words)
        self.halves = x.dtype in ("f16", "bf16") if isinstance(x.dtype, str) else x.dtype.itemsize == 2

    def types(self, kind: str, *, held: bool, gradient: bool) -> tuple[TensorType, ...]:
        """Workspace that computes in `kind`: numbers of rows, labels, which are ignored; the same of a tile's rows;
        logits, what stands beside them, a product; for 16-bit floats the tile's x and w, and the gradients' sums."""
        n, h, s, d = self.rows, self.height, self.step, self.width
        room = [
            TensorType(kind, (2, n)),
            TensorType("i64", (n,)),
            TensorType("bool", (n,)),
            TensorType(kind, (6, h)),
            TensorType("i64", (2, h)),
            TensorType("bool", (2, h)),
            TensorType(kind, (h * (self.words if held else s),)),
            TensorType(kind, (h * s,)),
            TensorType(kind, (max(h, s) * d if gradient else 0,)),
            TensorType(kind, (h * d if self.halves else 0,)),
            TensorType(kind, (s * d if self.halves else 0,)),
        ]
        if gradient and self.halves:
            words = self.words if held else s
            room += [TensorType(kind, shape) for shape in ((n, d), (words * d,), (words,))]
        return tuple(room)


class Tiles:
    """One application: operands as matrices, and what is done to a tile.

    `op`: the operator, for its options.  Labels are checked, and ignored ones become 0, when it is made.
    """

    def __init__(self, op: Any, operands: Operands, sizes: Sizes, scratch: Operands) -> None:
        x, w, bias, labels = operands
        self.op, self.sizes, self.bias = op, sizes, bias
        self.x = x.reshape(sizes.rows, sizes.width)
        self.w = w if op.transB else w.T  # [words, width]
        (self.weights, self.losses), self.labels, self.ignored = scratch[:3]
        self.stats, self.places, self.inside, self.room, self.beside, self.spare, *self.copies = scratch[3:]
        self._take(labels.reshape(-1))

    def _take(self, labels: Array) -> None:
        """Labels as i64, those that are ignored as 0, and 1 or 0 for each."""
        words = self.sizes.words
        self.labels[...] = labels
        self.weights[...] = 1
        if self.op.ignore_index is not None:
            np.equal(self.labels, self.op.ignore_index, out=self.ignored)
            np.copyto(self.labels, 0, where=self.ignored)
            np.copyto(self.weights, 0, where=self.ignored)
        if labels.size:
            low, high = int(self.labels.min()), int(self.labels.max())
            if low < 0 or high >= words:
                wrong = low if low < 0 else high
                raise ValueError(f"label {wrong} is outside the {words} classes (and is not ignore_index)")

    def rows_of(self, a: Array, rows: slice) -> Array:
        """The first numbers of a row of the tile's."""
        return a[: rows.stop - rows.start]

    def _widened(self, x: Array, slot: int) -> Array:
        """x, in float32 where it is a half."""
        if not self.sizes.halves:
            return x
        array = self.copies[slot][: x.size].reshape(x.shape)
        array[...] = x
        return array

    def block(self, rows: slice, words: slice, *, held: bool) -> Array:
        """Where a tile's logits are: one after the other where they are held."""
        height, width = rows.stop - rows.start, words.stop - words.start
        start = height * words.start if held else 0
        return self.room[start : start + height * width].reshape(height, width)

    def logits(self, block: Array, rows: slice, words: slice) -> None:
        """A tile's logits, scaled and capped."""
        op = self.op
        np.matmul(self._widened(self.x[rows], 0), self._widened(self.w[words], 1).T, out=block)
        if self.bias is not None:
            np.add(block, self.bias[words], out=block)
        if op.cap:
            np.multiply(block, op.scale / op.cap, out=block)
            np.tanh(block, out=block)
            np.multiply(block, op.cap, out=block)
        elif op.scale != 1:
            np.multiply(block, op.scale, out=block)

    def chosen(self, rows: slice, words: slice) -> tuple[Array, Array]:
        """Where in a tile the labels are (any place for those outside), and which lie inside."""
        width = words.stop - words.start
        (at, first), (inside, below) = ([self.rows_of(a, rows) for a in pair] for pair in (self.places, self.inside))
        at[...] = 1
        np.cumsum(at, out=first)
        np.subtract(first, 1, out=first)
        np.multiply(first, width, out=first)
        np.subtract(self.labels[rows], words.start, out=at)
        np.greater_equal(at, 0, out=inside)
        np.less(at, width, out=below)
        np.logical_and(inside, below, out=inside)
        np.maximum(at, 0, out=at)
        np.minimum(at, width - 1, out=at)
        np.add(at, first, out=at)
        return at, inside

    def begin(self, rows: slice) -> None:
        """No logits of these rows were seen: the largest, the sum of exponentials, the label's, the sum."""
        largest, count, label, total, *_ = (self.rows_of(a, rows) for a in self.stats)
        largest[...], count[...], label[...], total[...] = -math.inf, 0, 0, 0

    def see(self, block: Array, rows: slice, words: slice) -> None:
        """Adds a slice of the vocabulary to what is known of its rows: the online log-sum-exp."""
        op = self.op
        largest, count, label, total, new, number = (self.rows_of(a, rows) for a in self.stats)
        e = self.beside[: block.size].reshape(block.shape)
        at, inside = self.chosen(rows, words)
        take_labels(block.reshape(-1), at, number)
        np.copyto(label, number, where=inside)
        if op.smoothing:
            np.sum(block, axis=1, out=number)
            np.add(total, number, out=total)
        np.max(block, axis=1, out=new)
        np.maximum(new, largest, out=new)
        np.subtract(largest, new, out=number)
        np.exp(number, out=number)
        np.multiply(count, number, out=count)
        np.subtract(block, new[:, None], out=e)
        np.exp(e, out=e)
        np.sum(e, axis=1, out=number)
        np.add(count, number, out=count)
        largest[...] = new

    def finish(self, rows: slice, lse: Array | None) -> Array:
        """The rows' losses; their log-sum-exps, into `lse` where it is given, are returned."""
        op = self.op
        largest, count, label, total, new, number = (self.rows_of(a, rows) for a in self.stats)
        sums = new if lse is None else lse[rows]
        np.log(count, out=sums)
        np.add(sums, largest, out=sums)
        losses = self.losses[rows]
        np.multiply(label, 1 - op.smoothing, out=number)
        np.subtract(sums, number, out=losses)
        if op.smoothing:
            np.multiply(total, op.smoothing / self.sizes.words, out=number)
            np.subtract(losses, number, out=losses)
        if op.z_loss:
            np.multiply(sums, sums, out=number)
            np.multiply(number, op.z_loss, out=number)
            np.add(losses, number, out=losses)
        if op.ignore_index is not None:
            np.copyto(losses, 0, where=self.ignored[rows])
        return sums

    def share(self, dloss: Array | None, rows: slice, out: Array) -> None:
        """Writes the factors of these rows' losses in the result, times the result's gradient (None: 1)."""
        op = self.op
        out[...] = 1 if dloss is None else dloss.reshape(-1)[rows] if op.reduction == "none" else dloss
        if op.reduction == "mean":
            count = np.sum(self.weights)
            np.divide(out, count + (count == 0), out=out)  # where no label counts, all gradients are 0
        np.multiply(out, self.weights[rows], out=out)
        if op.ignore_index is not None:
            np.copyto(out, 0, where=self.ignored[rows])

    def reduce(self, out: Array) -> None:
        """The rows' losses to the result."""
        if self.op.reduction == "none":
            out.reshape(-1)[...] = self.losses
            return
        total = np.sum(self.losses)
        out[...] = total / np.sum(self.weights) if self.op.reduction == "mean" else total

    def differentiate(self, block: Array, rows: slice, words: slice, lse: Array, share: Array) -> None:
        """The gradient of a tile's logits in their place: share · (softmax · (1 + 2 z lse) - even - onehot)."""
        op = self.op
        factor, number = (self.rows_of(a, rows) for a in self.stats[:2])
        slope = self.beside[: block.size].reshape(block.shape)
        if op.cap:
            np.divide(block, op.cap, out=slope)
            np.multiply(slope, slope, out=slope)
            np.subtract(1, slope, out=slope)
        at, inside = self.chosen(rows, words)
        np.subtract(block, lse[:, None], out=block)
        np.exp(block, out=block)
        factor[...] = 1
        if op.z_loss:
            np.multiply(lse, 2 * op.z_loss, out=factor)
            np.add(factor, 1, out=factor)
        np.multiply(block, factor[:, None], out=block)
        if op.smoothing:
            np.subtract(block, op.smoothing / self.sizes.words, out=block)
        flat = block.reshape(-1)
        take_labels(flat, at, number)
        np.subtract(number, 1 - op.smoothing, out=number, where=inside)
        flat[at] = number
        np.multiply(block, share[:, None], out=block)
        if op.cap:
            np.multiply(block, slope, out=block)
        if op.scale != 1:
            np.multiply(block, op.scale, out=block)

    def add(self, target: Array, a: Array, b: Array, *, first: bool) -> None:
        """target = a b, or target += a b unless it is the first."""
        if first:
            np.matmul(a, b, out=target)
            return
        product = self.spare[: target.size].reshape(target.shape)
        np.matmul(a, b, out=product)
        np.add(target, product, out=target)

    def spread(self, block: Array, rows: slice, words: slice, sums: Sequence[Array | None]) -> None:
        """A tile's gradient of logits to those of all x, and of the slice's w and bias (None: not wanted)."""
        dx, dw, dbias = sums
        x = self.x[rows] if dw is None else self._widened(self.x[rows], 0)
        if dx is not None:
            self.add(dx[rows], block, self._widened(self.w[words], 1), first=words.start == 0)
        if dw is not None:
            a, b = (block.T, x) if self.op.transB else (x.T, block)
            self.add(dw, a, b, first=rows.start == 0)
        if dbias is not None:
            if rows.start == 0:
                np.sum(block, axis=0, out=dbias)
            else:
                np.add(dbias, np.sum(block, axis=0), out=dbias)

    def sums(self, outs: Sequence[Array | None]) -> list[Array | None]:
        """Where gradients are added up: their own memory, or for 16-bit floats float32."""
        if not self.sizes.halves:
            return list(outs)
        rooms = zip(self.copies[2:], outs, strict=True)
        return [None if out is None else room.reshape(-1)[: out.size].reshape(out.shape) for room, out in rooms]


def slice_of(op: Any, dw: Array | None, dbias: Array | None, words: slice) -> tuple[Array | None, Array | None]:
    """The gradients of a slice of the vocabulary."""
    part = None if dw is None else dw[words] if op.transB else dw[:, words]
    return part, None if dbias is None else dbias[words]
