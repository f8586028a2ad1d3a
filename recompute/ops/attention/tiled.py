"""Attention in tiles: the scores of a few queries with a few keys at a time, and nothing kept but one number a query.

Forward: the online softmax of Milakov & Gimelshein 2018 (arXiv 1805.02867) over tiles, as in Rabe & Staats 2021 (arXiv
2112.05682) and Dao et al. 2022 (arXiv 2205.14135).  Gradient: each tile's weights again from the log-sum-exp of its
queries.  Tiles are taken in a fixed order, so that results are the same bits in every run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...language.op import Cost, Op
from ...language.types import TensorType
from ..norm.fused import as_type
from ..tiles import wide

#: queries and keys of a tile
ROWS, COLUMNS = 256, 256
#: queries that kernels take at a time, for estimates of costs
STRIP = 64


class Tiled(Op, abstract=True):
    """What attention and its gradient share.

    q: [..., t, d]; k: [..., s, d]; v: [..., s, e]; bias: [..., t, s] or what broadcasts to it.  The leading axes of k,
    v and bias are q's or 1 (heads that share keys and values).  score = scale · q kᵀ (+ bias); query i sees the keys
    from i + first to i + last (None: all on that side).
    """

    autocast = "low"
    autocast_inputs: ClassVar[tuple[int, ...]] = (0, 1, 2)
    scale: float
    first: int | None
    last: int | None

    def check(self, q: TensorType, k: TensorType, v: TensorType, bias: TensorType | None) -> None:
        """TypeRuleError where shapes or types do not fit."""
        types = (q, k, v, bias)
        if q.ndim < 2 or not q.is_float or any(x.dtype != q.dtype or x.ndim != q.ndim for x in (k, v)):
            raise self.fail("q, k and v need one float type and as many axes, two at least", *types)
        if k.shape[:-1] != v.shape[:-1] or k.shape[-1] != q.shape[-1]:
            raise self.fail("k needs v's axes but the last, and q's last", *types)
        shapes = [k.shape[:-2]]
        if bias is not None:
            if bias.ndim > q.ndim or not bias.is_float:
                raise self.fail("bias needs floats, and no more axes than q", *types)
            full = (1,) * (q.ndim - bias.ndim) + bias.shape
            shapes.append(full[:-2])
            if full[-2] not in (1, q.shape[-2]) or full[-1] not in (1, k.shape[-2]):
                raise self.fail("bias does not broadcast to the scores", *types)
        if any(n not in (1, m) for s in shapes for n, m in zip(s, q.shape[:-2], strict=True)):
            raise self.fail("leading axes must be q's or 1", *types)

    def columns(self, start: int, stop: int, keys: int) -> tuple[int, int]:
        """The keys that the queries from `start` to `stop` may see; (0, 0) where there are none."""
        low = 0 if self.first is None else max(start + self.first, 0)
        high = keys if self.last is None else min(stop + self.last, keys)
        return (low, high) if low < high else (0, 0)

    def tiles(self, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
        """All tiles with a score that counts: rows, and for each row its columns, from left to right."""
        for r in range(0, queries, ROWS):
            rows = slice(r, min(r + ROWS, queries))
            low, high = self.columns(rows.start, rows.stop, keys)
            for c in range(low - low % COLUMNS, high, COLUMNS):
                yield rows, slice(max(c, low), min(c + COLUMNS, high))

    def share(self, queries: int, keys: int) -> float:
        """The share of all scores that kernels compute: of `STRIP` queries at a time those with the keys they see."""
        area = 0
        for start in range(0, queries, STRIP):
            stop = min(start + STRIP, queries)
            low, high = self.columns(start, stop, keys)
            area += (stop - start) * (high - low)
        return area / max(queries * keys, 1)

    def score(self, xp: Any, s: Any, q: Any, k: Any, bias: Any, rows: slice, columns: slice) -> None:
        """A tile's scores into s; -inf for keys that a query may not see."""
        xp.matmul(q, k.T, out=s)
        xp.multiply(s, self.scale, out=s)
        if bias is not None:
            xp.add(s, part_of(bias, rows, columns), out=s)
        height, width = s.shape
        offset = columns.start - rows.start  # key j, query i of the tile: key - query = j - i + offset
        if self.last is not None and width - 1 + offset > self.last:
            for i in range(min(height, max(width - 1 + offset - self.last, 0))):
                s[i, max(i + self.last - offset + 1, 0) :] = -math.inf
        if self.first is not None and offset - (height - 1) < self.first:
            for i in range(max(offset - self.first + 1, 0), height):
                s[i, : max(i + self.first - offset, 0)] = -math.inf


def part_of(bias: Any, rows: slice, columns: slice) -> Any:
    """The part of [t or 1, s or 1] for a tile."""
    return bias[rows if bias.shape[0] > 1 else slice(None), columns if bias.shape[1] > 1 else slice(None)]


def matrix_at(x: Any, index: tuple[int, ...]) -> Any:
    """The matrix of x for an index of q's leading axes."""
    lead = x.shape[:-2]
    return x[tuple(i if n > 1 else 0 for i, n in zip(index[len(index) - len(lead) :], lead, strict=True))]


def full_bias(bias: Any, ndim: int) -> Any:
    """The bias with as many axes as the queries."""
    return None if bias is None else bias.reshape((1,) * (ndim - bias.ndim) + bias.shape)


@dataclass(frozen=True)
class TiledAttention(Tiled):
    """(q, k, v, bias?) → softmax(scale · q kᵀ + bias) v, and the log-sum-exp of every query's scores.

    Of a query that sees no key the result is 0.
    """

    scale: float = 1.0
    first: int | None = None
    last: int | None = None

    def infer(self, q, k, v, bias=None):
        """[..., t, e], and [..., t] in at least float32."""
        self.check(q, k, v, bias)
        y = q.with_shape((*q.shape[:-1], v.shape[-1]))
        return y, q.with_shape(q.shape[:-1]).with_dtype(wide(q.dtype))

    def scratch(self, ins, outs):
        """A tile of scores, a row of results and of products, four numbers a query; halves also their inputs' tiles."""
        q, k, v = ins[:3]
        kind = wide(q.dtype)
        height, width = min(ROWS, q.shape[-2]), min(COLUMNS, k.shape[-2])
        found = [TensorType(kind, (height * width,)), TensorType(kind, (2, height * v.shape[-1]))]
        found.append(TensorType(kind, (6, height)))
        if kind != q.dtype:
            found.append(TensorType(kind, (height * q.shape[-1],)))
            found.append(TensorType(kind, (width * max(q.shape[-1], v.shape[-1]),)))
        return tuple(found)

    def compute(self, xp, ins, outs, scratch):
        """Row by row of tiles: the largest score so far, the sum of exponentials, and the weighted sum of values."""
        q, k, v = ins[:3]
        bias = full_bias(ins[3] if len(ins) > 3 else None, q.ndim)
        y, lse = outs[0], outs[1] if len(outs) > 1 else None
        for index in np.ndindex(*q.shape[:-2]):
            part = None if bias is None else matrix_at(bias, index)
            work = _Rows(self, xp, scratch, q[index], matrix_at(k, index), matrix_at(v, index), part)
            work.run(y[index], None if lse is None else lse[index])

    def gradient(self, b, ins, outs, grads):
        """One operator, from the result and its log-sum-exp."""
        q, k, v, bias = (*ins, None)[:4]
        if len(grads) > 1 and grads[1] is not None:
            return b.gradient_of_expansion(self, ins, grads)
        options = {"scale": self.scale, "first": self.first, "last": self.last}
        made = b.TiledAttentionGrad(
            q, k, v, bias, outs[0], outs[1], grads[0], want=4 if bias is not None else 3, **options
        )
        return list(made)[: len(ins)]

    def expand(self, b, q, k, v, bias=None):
        """Scores, their log-sum-exp, weights and the product."""
        scores = all_scores(self, b, q, k, bias)
        largest = b.Max(b.ReduceMax(scores, axes=(-1,)), b.constant(float(np.finfo(np.float32).min), scores))
        e = b.Exp(b.Sub(scores, largest))
        total = b.ReduceSum(e, axes=(-1,))
        nothing = b.Equal(total, b.constant(0.0, total))
        safe = b.Where(nothing, b.constant(1.0, total), total)
        y = b.MatMul(as_type(b, b.Div(e, safe), v.dtype), v)
        lse = b.Add(b.Log(total), largest)
        return y, b.Reshape(lse, shape=q.shape[:-1])

    def cost(self, ins, outs):
        """Two products over the scores that count, and about ten operations for each of them."""
        q, k, v = ins[:3]
        count = math.prod(q.shape[:-1]) * k.shape[-2] * self.share(q.shape[-2], k.shape[-2])
        moved = sum(t.nbytes for t in (*ins, *outs) if t is not None)
        return Cost(int(count * (2 * (q.shape[-1] + v.shape[-1]) + 10)), moved)

    @classmethod
    def samples(cls, draw):
        """Windows, biases, shared heads, halves, more than a tile."""

        def case(options, *shapes, dtype="f64", want=None):
            return draw.case(cls(**options), *(draw(f"{dtype}[{s}]") for s in shapes), want=want)

        yield case({"scale": 0.5}, "2,3,4", "2,5,4", "2,5,2")
        yield case({"scale": 0.3, "last": 0}, "5,4", "5,4", "5,3")
        yield case({"first": -1, "last": 1}, "4,2", "6,2", "6,2")
        yield case({"scale": 0.5, "last": 1}, "2,3,3,2", "2,1,4,2", "2,1,4,2", "3,1,4")
        yield case({"scale": 0.5}, "2,3,2", "1,4,2", "1,4,3", "3,4")
        yield case({"scale": 0.2, "last": 0}, "1,300,3", "1,300,3", "1,300,2", dtype="f32", want=1)
        yield case({"scale": 0.5}, "3,4", "5,4", "5,2", dtype="f16")


class _Rows:
    """The forward pass of one matrix of queries."""

    def __init__(self, op: TiledAttention, xp: Any, scratch: Any, q: Any, k: Any, v: Any, bias: Any) -> None:
        self.op, self.xp, self.scratch = op, xp, scratch
        self.q, self.k, self.v, self.bias = q, k, v, bias

    def run(self, y: Any, lse: Any) -> None:
        """Writes all results and log-sum-exps."""
        op, keys = self.op, self.k.shape[0]
        for r in range(0, self.q.shape[0], ROWS):
            rows = slice(r, min(r + ROWS, self.q.shape[0]))
            low, high = op.columns(rows.start, rows.stop, keys)
            starts = range(low - low % COLUMNS, high, COLUMNS)
            tiles = [slice(max(c, low), min(c + COLUMNS, high)) for c in starts]
            self.one(rows, tiles, y[rows], None if lse is None else lse[rows])

    def one(self, rows: slice, tiles: Sequence[slice], y: Any, lse: Any) -> None:
        """One row of tiles."""
        xp, height = self.xp, rows.stop - rows.start
        total, product = (a[: height * y.shape[1]].reshape(height, y.shape[1]) for a in self.scratch[1])
        largest, new, shift, factor, count, part = (a[:height] for a in self.scratch[2])
        total[...], count[...], largest[...] = 0, 0, -math.inf
        q = _widened(xp, self.q[rows], self.scratch, 3)
        for columns in tiles:
            s = self.scratch[0][: height * (columns.stop - columns.start)].reshape(height, -1)
            self.op.score(xp, s, q, _widened(xp, self.k[columns], self.scratch, 4), self.bias, rows, columns)
            xp.max(s, axis=1, out=new)
            xp.maximum(new, largest, out=new)
            shift[...] = new
            shift[new == -math.inf] = 0  # queries that have seen no key yet
            xp.subtract(largest, shift, out=factor)
            xp.exp(factor, out=factor)
            xp.subtract(s, shift[:, None], out=s)
            xp.exp(s, out=s)
            xp.sum(s, axis=1, out=part)
            xp.multiply(count, factor, out=count)
            xp.add(count, part, out=count)
            xp.matmul(s, _widened(xp, self.v[columns], self.scratch, 4), out=product)
            xp.multiply(total, factor[:, None], out=total)
            xp.add(total, product, out=total)
            largest[...] = new
        if lse is not None:
            with np.errstate(divide="ignore"):
                xp.log(count, out=lse)
            xp.add(lse, largest, out=lse, where=count > 0)
        count[count == 0] = 1
        xp.divide(total, count[:, None], out=total)
        y[...] = total


def _widened(xp: Any, x: Any, scratch: Any, slot: int) -> Any:
    """x, in float32 where it is a half."""
    if slot >= len(scratch):
        return x
    found = scratch[slot][: x.size].reshape(x.shape)
    found[...] = x
    return found


def all_scores(op: Tiled, b: Any, q: Any, k: Any, bias: Any) -> Any:
    """All scores, in at least float32."""
    kind = wide(q.dtype)
    scores = b.MatMul(as_type(b, q, kind), as_type(b, k, kind), transB=1)
    scores = b.Mul(scores, b.constant(op.scale, scores))
    if bias is not None:
        scores = b.Add(scores, as_type(b, bias, kind))
    shape = scores.type.with_shape((q.shape[-2], k.shape[-2]))
    if op.last is not None:
        scores = b.Add(scores, b.Trilu(b.fill(-math.inf, shape), k=1 + op.last))
    if op.first is not None and op.first > -q.shape[-2]:
        scores = b.Add(scores, b.Trilu(b.fill(-math.inf, shape), k=op.first - 1, upper=0))
    return scores
