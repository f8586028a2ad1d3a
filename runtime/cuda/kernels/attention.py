"""Attention and its gradient: a block for 64 queries (or keys) of a head, scores and weights in registers.

Forward: one launch.  Gradient: Σ y · dy of every query, dq by strips of queries, dk and dv by strips of keys, over all
heads that share them, and the bias's, where it is wanted, by what one of its numbers is added to.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....language.types import FLOATS, TensorType
from ....ops.attention.heads_last import plain_operator
from ....ops.attention.shared import Tiled
from ....ops.tiles import wide
from ..code.attention import AXES, MATRICES, ROWS, Axes, Problem, Tiles, chunk, delta, kernel
from ..device.kernel import Buffer, Call
from ..families import Buffers, Family, family

if TYPE_CHECKING:
    from ....language.ir import Operator

#: columns of a result that a block has in registers, at most; half as many of two results, and of float64
_REGISTERS = 256
#: fields of an operator that these kernels know; the others must be as in attention without them
_KNOWN = frozenset(("scale", "first", "last", "cap", "ratio", "seed", "rows", "at"))


def _known(op: Any) -> bool:
    """Whether all that the operator does is here."""
    return all(n in _KNOWN or not x for n, x in op.attributes().items())


def _full(shape: Sequence[int], ndim: int) -> tuple[int, ...]:
    """With as many axes as q has."""
    return (1,) * (ndim - len(shape)) + tuple(shape)


def _lead(x: Buffer | TensorType, ndim: int) -> tuple[int, ...]:
    """The axes before the matrices, as many as q has."""
    return _full(x.shape, ndim)[:-2]


def _axes(sizes: Sequence[int], steps: Sequence[int]) -> Axes:
    dims = [(n, s) for n, s in zip(sizes, steps, strict=True) if n > 1]
    axes = Axes(len(dims))
    for i, (n, s) in enumerate(dims):
        axes.size[i], axes.step[i] = n, s
    return axes


def _steps(sizes: Sequence[int], unit: int = 1) -> list[int]:
    """From one matrix to the next along each axis; 0 along those of size 1."""
    return [math.prod(sizes[i + 1 :]) * unit if n > 1 else 0 for i, n in enumerate(sizes)]


class _Bound:
    """An operator's buffers, of the plain operator's shapes, and what its launches have in common.

    `heads`: how many matrices lie beside each other, by the operand's name.
    """

    def __init__(self, op: Operator, way: str, ins: Buffers, outs: Buffers) -> None:
        plain, beside = plain_operator(op)
        self.op, self.way, self.heads = plain.of(Tiled), way, dict.fromkeys(MATRICES, 1) | beside
        self.ins, self.outs = (
            [x if x is None or v is None else x.at(0, v.shape) for x, v in itertools.zip_longest(arrays, places)]
            for arrays, places in ((ins, plain.inputs), (outs, plain.outputs))
        )
        q, k, v, self.bias = self.ins[:4]
        assert q is not None and k is not None and v is not None
        self.q, self.k, self.v, self.step = q, k, v, self.ins[len(op.inputs) - 1] if self.op.ratio else None
        self.lead = _lead(q.type, len(q.shape))
        self.t, self.s, self.d, self.e = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
        self.matrices = math.prod(self.lead)
        first, last = self.op.first, self.op.last
        low = -self.t if first is None else max(first, -self.t)
        high = self.s if last is None else min(last, self.s)
        self.window = (min(low, self.s), max(high, -self.t))

    def problem(self, of: Buffer | None = None) -> Problem:
        """Sizes and places; `of`: whose matrices `dims` and `sharing` are told for."""
        biases, row, column = _axes((), ()), 0, 0
        if self.bias is not None:
            full = _full(self.bias.shape, len(self.q.shape))
            row, column = (full[-1] if full[-2] > 1 else 0), int(full[-1] > 1)
            biases = _axes(self.lead, _steps(full[:-2], full[-2] * full[-1]))
        steps = _steps(self.lead)
        shared = (1,) * len(self.lead) if of is None else _lead(of, len(self.q.shape))
        dims = [(n, s) for n, m, s in zip(self.lead, shared, steps, strict=True) if m > 1]
        rest = [(n, s) for n, m, s in zip(self.lead, shared, steps, strict=True) if m == 1]
        parts = [_axes([n for n, _ in x], [s for _, s in x]) for x in (dims, rest)]
        keys = _axes(self.lead, _steps(_lead(self.k, len(self.q.shape))))
        sizes = (self.t, self.s, self.d, self.e, *self.window)
        start, threshold, numbers = self._dropout()
        options = (self.op.scale, self.op.cap, 1 / (1 - self.op.ratio), self.op.seed, start, threshold)
        return Problem(*sizes, *self.heads.values(), row, column, *options, keys, biases, *parts, numbers)

    def _dropout(self) -> tuple[int, int, Axes]:
        """The number of the first weight, the least bits that are kept, and what a matrix's number counts."""
        rows = self.op.rows or self.q.shape[:-1]
        steps = [math.prod(rows[i + 1 :]) * self.s for i in range(len(rows))]
        start = sum(a * n for a, n in zip(self.op.at, steps, strict=True)) if self.op.at else 0
        threshold = math.ceil(float(np.float32(self.op.ratio)) * 2**24)
        return start, threshold, _axes(self.lead, steps[:-1])

    def tiles(self, columns: int, most: int, buffers: Sequence[Buffer]) -> tuple[Tiles, int]:
        """The variant for a result of so many columns, `most` of them in a block's registers; groups of columns."""
        chunks = -(-columns // chunk(self.way))
        groups = -(-chunks // max(most // chunk(self.way), 1))
        width = {"f64": 1, "f32": 4}.get(self.q.dtype, 8)
        even = all(n % width == 0 for n in (self.d, self.e)) and all(b.address % 16 == 0 for b in buffers)
        bias = "" if self.bias is None else self.bias.dtype
        extra = (self.op.cap > 0, self.op.ratio > 0)
        return Tiles(self.way, -(-chunks // groups), width if even else 1, bias, *extra), groups

    def over_strips(self, name: str, tiles: tuple[Tiles, int], strips: int, *args: Any) -> Call:
        """The launch of a block for each strip and group of columns."""
        inputs = (self.q, self.k, self.v, self.bias, self.step)
        return kernel(name, tiles[0]).blocks(strips, tiles[1], args=(*inputs, *args))


def _accepts(op: Operator, way: str) -> bool:
    """Floats of one type but for the bias, none of them empty, and no more than the kernels know."""
    op, _ = plain_operator(op)
    q, k, v, bias = (None if x is None else x.type for x in (*op.inputs, None)[:4])
    assert q is not None and k is not None and v is not None
    if q.dtype != ("f32" if way == "tf32" else q.dtype) or q.dtype not in FLOATS or not _known(op.op):
        return False
    if bias is not None and bias.dtype not in FLOATS:
        return False
    sizes = (*q.shape, *k.shape, *v.shape)
    return len(q.shape) - 2 <= AXES and 0 not in sizes and max(sizes) < 1 << 28 and _blocks(q, k) < 1 << 31


def _blocks(q: TensorType, k: TensorType) -> int:
    """Blocks of a launch, at most: one for each tile of the scores, where the bias has a gradient."""
    rows, columns = (-(-x.shape[-2] // 32) for x in (q, k))
    return math.prod(q.shape[:-2]) * rows * columns


def _way(op: Operator, *, tf32: bool) -> str:
    """How its products are multiplied."""
    dtype = op.inputs[0].dtype  # type: ignore[union-attr]
    return "tf32" if tf32 and dtype == "f32" else dtype


@family("TiledAttention", "HeadsLastTiledAttention")
class Attention(Family):
    """(q, k, v, bias?, step?) → y, lse.  `tf32`: float32 factors may be rounded to TF32."""

    def __init__(self, *, tf32: bool = False) -> None:
        self.tf32 = tf32

    def accepts(self, op: Operator) -> bool:
        return _accepts(op, _way(op, tf32=self.tf32))

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        b = _Bound(op, _way(op, tf32=self.tf32), ins, outs)
        most = _REGISTERS // 2 if b.q.dtype == "f64" else _REGISTERS
        tiles = b.tiles(b.e, most, (b.q, b.k, b.v))
        return [b.over_strips("forward", tiles, b.matrices * -(-b.t // ROWS), *b.outs[:2], b.problem())]


@family("TiledAttentionGrad", "HeadsLastTiledAttentionGrad")
class AttentionGradient(Family):
    """(q, k, v, bias?, y, lse, dy, step?) → dq, dk, dv, dbias?."""

    def __init__(self, *, tf32: bool = False) -> None:
        self.tf32 = tf32

    def accepts(self, op: Operator) -> bool:
        """See `_accepts`; the log-sum-exp as it is computed."""
        lse = op.inputs[5]
        way = _way(op, tf32=self.tf32)
        return _accepts(op, way) and lse is not None and lse.dtype == wide(op.inputs[0].dtype)  # type: ignore[union-attr]

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        q: Any = plain_operator(op)[0].inputs[0]
        return (TensorType(wide(q.dtype), q.shape[:-1]),)

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Three launches, and one for the bias."""
        b = _Bound(op, _way(op, tf32=self.tf32), ins, outs)
        q, k, v, bias, y, lse, dy = b.ins[:7]
        dq, dk, dv, dbias = (*b.outs, None)[:4]
        assert q is not None and k is not None and v is not None and y is not None and dy is not None
        heads = (b.t, b.e, b.heads["y"], b.heads["dy"])
        deltas = delta(q.dtype).blocks(-(-scratch[0].size // 8), args=(y, dy, scratch[0], scratch[0].size, *heads))
        calls: list[Call] = [deltas]
        down, most = (lse, scratch[0], dy), _REGISTERS // 2 if q.dtype == "f64" else _REGISTERS
        used = (q, k, v, dy)
        by_query, by_key = b.tiles(b.d, most, used), b.tiles(max(b.d, b.e), most // 2, used)
        strips = b.matrices * -(-b.t // ROWS)
        calls.append(b.over_strips("by_query", by_query, strips, *down, dq, b.problem()))
        strips = math.prod(k.shape[:-2]) * -(-b.s // ROWS)
        calls.append(b.over_strips("by_key", by_key, strips, *down, dk, dv, b.problem(k)))
        if bias is not None and dbias is not None:
            calls.append(_of_bias(b, b.tiles(1, 64, used)[0], down, bias, dbias))
        return calls


def _of_bias(b: _Bound, tiles: Tiles, down: Sequence[Buffer | None], bias: Buffer, dbias: Buffer) -> Call:
    """A block for each strip and tile of the bias."""
    full = _full(bias.shape, len(b.q.shape))
    strips = -(-b.t // ROWS) if full[-2] > 1 else 1
    count = math.prod(full[:-2]) * strips * (-(-b.s // tiles.columns) if full[-1] > 1 else 1)
    return b.over_strips("by_bias", (tiles, 1), count, *down, dbias, b.problem(bias))
