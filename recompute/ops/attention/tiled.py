"""Attention in tiles: the scores of a few queries with a few keys at a time, and nothing kept but one number a query.

Forward: the online softmax of Milakov & Gimelshein 2018 (arXiv 1805.02867) over tiles, as in Rabe & Staats 2021 (arXiv
2112.05682) and Dao et al. 2022 (arXiv 2205.14135).  Gradient: each tile's weights again from the log-sum-exp of its
queries.  Tiles are taken in a fixed order, so that results are the same bits in every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...language.op import Cost
from ...language.types import Array, Operands, TensorType
from ..norm.fused import as_type
from ..tiles import wide
from .shared import COLUMNS, ROWS, Tiled, all_scores, full_bias, matrix_at


class TiledAttention(Tiled):
    """(q, k, v, bias?, step?) → softmax(scale · q kᵀ + bias) v, and the log-sum-exp of every query's scores.

    Of a query that sees no key the result is 0.  See `Tiled` for the attributes.
    """

    flat = ((), (1,))

    def infer(self, q, k, v, bias=None, step=None):
        """[..., t, e], and [..., t] in at least float32."""
        self.check(q, k, v, bias, step)
        y = q.with_shape((*q.shape[:-1], v.shape[-1]))
        return y, q.with_shape(q.shape[:-1]).with_dtype(wide(q.dtype))

    def scratch(self, ins, outs):
        """A tile of scores, a row of results and of products, four numbers a query; halves also their inputs' tiles."""
        q, k, v = ins[:3]
        kind = wide(q.dtype)
        height, width = min(ROWS, q.shape[-2]), min(COLUMNS, k.shape[-2])
        types = [TensorType(kind, (height * width,)), TensorType(kind, (2, height * v.shape[-1]))]
        types.append(TensorType(kind, (6, height)))
        if kind != q.dtype:
            types.append(TensorType(kind, (height * q.shape[-1],)))
            types.append(TensorType(kind, (width * max(q.shape[-1], v.shape[-1]),)))
        return (*types, *self.room(q.shape[-2], k.shape[-2]))

    def compute(self, ins, outs, scratch):
        """Row by row of tiles: the largest score so far, the sum of exponentials, and the weighted sum of values."""
        q, k, v = ins[:3]
        bias = full_bias(ins[3] if len(ins) > 3 else None, q.ndim)
        y, lse = outs[0], outs[1] if len(outs) > 1 else None
        out = self.dropped(q, k.shape[-2], ins[4] if len(ins) > 4 else None)
        for index in np.ndindex(*q.shape[:-2]):
            part = None if bias is None else matrix_at(bias, index)
            work = _Rows(self, scratch, q[index], matrix_at(k, index), matrix_at(v, index), part, (out, index))
            work.run(y[index], None if lse is None else lse[index])

    def gradient(self, b, ins, outs, grads):
        """One operator, from the result and its log-sum-exp."""
        q, k, v, bias, step = (*ins, None, None)[:5]
        if len(grads) > 1 and grads[1] is not None:
            return b.gradient_of_expansion(self, ins, grads)
        values = [q, k, v, bias, outs[0], outs[1], grads[0], *([] if step is None else [step])]
        gradients = b.TiledAttentionGrad(*values, want=4 if bias is not None else 3, **self.options())
        return [*gradients, None, None][: len(ins)]

    def inference(self, b, ins, running):
        if not self.ratio:
            return None
        kept = replace(self, ratio=0.0, seed=0, rows=(), at=())
        results = b.emit(kept, *(ins[:4] if ins[3] is not None else ins[:3]), want=len(running))
        return results if isinstance(results, tuple) else (results,)

    def expand(self, b, q, k, v, bias=None, step=None):
        """Scores, their log-sum-exp, weights and the product."""
        scores, _ = all_scores(self, b, q, k, bias)
        largest = b.Max(b.ReduceMax(scores, axes=(-1,)), b.constant(float(np.finfo(np.float32).min), scores))
        e = b.Exp(b.Sub(scores, largest))
        total = b.ReduceSum(e, axes=(-1,))
        nothing = b.Equal(total, b.constant(0.0, total))
        safe = b.Where(nothing, b.constant(1.0, total), total)
        y = b.MatMul(self.leave_out(b, as_type(b, b.Div(e, safe), v.dtype), step), v)
        lse = b.Where(nothing, b.constant(-math.inf, total), b.Add(b.Log(safe), largest))
        return y, b.Reshape(lse, shape=q.shape[:-1])

    def cost(self, ins, outs):
        """Two products over the scores that count, and about ten operations for each of them."""
        q, k, v = ins[:3]
        count = math.prod(q.shape[:-1]) * k.shape[-2] * self.share(q.shape[-2], k.shape[-2])
        moved = sum(t.nbytes for t in (*ins, *outs) if t is not None)
        return Cost(int(count * (2 * (q.shape[-1] + v.shape[-1]) + 10 + self.per_score())), moved)

    @classmethod
    def samples(cls, draw):
        """Windows, biases, shared heads, 16-bit floats, more than a tile, soft caps, dropout."""

        def case(options, *shapes, dtype="f64", want=None):
            arrays = [draw(f"{dtype}[{s}]") for s in shapes]
            step = [*[None] * (4 - len(arrays)), np.array(3)] if options.get("ratio") else []
            return draw.case(cls(**options), *arrays, *step, want=want)

        yield case({"scale": 0.5}, "2,3,4", "2,5,4", "2,5,2")
        yield case({"scale": 0.3, "last": 0}, "5,4", "5,4", "5,3")
        yield case({"first": -1, "last": 1}, "4,2", "6,2", "6,2")
        yield case({"scale": 0.5, "last": 1}, "2,3,3,2", "2,1,4,2", "2,1,4,2", "3,1,4")
        yield case({"scale": 0.5}, "2,3,2", "1,4,2", "1,4,3", "3,4")
        yield case({"scale": 0.2, "last": 0}, "1,300,3", "1,300,3", "1,300,2", dtype="f32", want=1)
        yield case({"scale": 0.5}, "3,4", "5,4", "5,2", dtype="f16")
        yield case({"scale": 0.9, "cap": 0.7, "last": 1}, "2,3,4", "2,5,4", "2,5,2", "2,3,5")
        yield case({"scale": 0.5, "ratio": 0.4, "seed": 5}, "2,2,3,4", "2,1,5,4", "2,1,5,2")
        yield case({"ratio": 0.3, "seed": 7, "cap": 2.0, "last": 0}, "2,3,4", "2,5,4", "2,5,2", "3,5")
        yield case({"ratio": 0.3, "seed": 9, "rows": (3, 5, 7), "at": (1, 0, 2)}, "2,4,3,2", "2,4,9,2", "2,4,9,2")
        yield case({"ratio": 0.5, "seed": 2**62 + 1}, "2,300,3", "2,299,3", "2,299,2", dtype="f32", want=1)


class _Rows:
    """The forward pass of one matrix of queries."""

    def __init__(
        self,
        op: TiledAttention,
        scratch: Operands,
        q: Array,
        k: Array,
        v: Array,
        bias: Array | None,
        dropped: tuple[Any, Any],
    ) -> None:
        self.op = op
        self.scratch, self.room = (scratch[:-2], scratch[-2:]) if op.ratio else (scratch, scratch)
        self.q, self.k, self.v, self.bias = q, k, v, bias
        self.dropped, self.index = dropped

    def run(self, y: Array, lse: Array | None) -> None:
        """Writes all results and log-sum-exps."""
        op, keys = self.op, self.k.shape[0]
        for r in range(0, self.q.shape[0], ROWS):
            rows = slice(r, min(r + ROWS, self.q.shape[0]))
            low, high = op.columns(rows.start, rows.stop, keys)
            starts = range(low - low % COLUMNS, high, COLUMNS)
            tiles = [slice(max(c, low), min(c + COLUMNS, high)) for c in starts]
            self.one(rows, tiles, y[rows], None if lse is None else lse[rows])

    def one(self, rows: slice, tiles: Sequence[slice], y: Array, lse: Array | None) -> None:
        """Writes y and lse of one row of tiles."""
        height = rows.stop - rows.start
        total, product = (a[: height * y.shape[1]].reshape(height, y.shape[1]) for a in self.scratch[1])
        largest, new, shift, factor, count, part = (a[:height] for a in self.scratch[2])
        total[...], count[...], largest[...] = 0, 0, -math.inf
        q = _widened(self.q[rows], self.scratch, 3)
        for columns in tiles:
            s = self.scratch[0][: height * (columns.stop - columns.start)].reshape(height, -1)
            self.op.score(s, q, _widened(self.k[columns], self.scratch, 4), self.bias, (rows, columns))
            np.max(s, axis=1, out=new)
            np.maximum(new, largest, out=new)
            shift[...] = new
            shift[new == -math.inf] = 0  # queries that have seen no key yet
            np.subtract(largest, shift, out=factor)
            np.exp(factor, out=factor)
            np.subtract(s, shift[:, None], out=s)
            np.exp(s, out=s)
            np.sum(s, axis=1, out=part)
            np.multiply(count, factor, out=count)
            np.add(count, part, out=count)
            if self.dropped is not None:
                self.dropped.drop(s, self.dropped.keep(self.index, rows, columns, self.room))
            np.matmul(s, _widened(self.v[columns], self.scratch, 4), out=product)
            np.multiply(total, factor[:, None], out=total)
            np.add(total, product, out=total)
            largest[...] = new
        if lse is not None:
            with np.errstate(divide="ignore"):
                np.log(count, out=lse)
            np.add(lse, largest, out=lse, where=count > 0)
        count[count == 0] = 1
        np.divide(total, count[:, None], out=total)
        y[...] = total


def _widened(x: Array, scratch: Operands, slot: int) -> Array:
    """x, in float32 where it is a half."""
    if slot >= len(scratch):
        return x
    array = scratch[slot][: x.size].reshape(x.shape)
    array[...] = x
    return array
