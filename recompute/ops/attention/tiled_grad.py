"""The gradient of attention in tiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...language.op import Cost
from ...language.types import Array, Operands, TensorType, need
from ..norm.fused import as_type
from ..tiles import wide
from .shared import COLUMNS, ROWS, Tiled, all_scores, full_bias, matrix_at, part_of
from .tiled import TiledAttention


class TiledAttentionGrad(Tiled):
    """(q, k, v, bias?, y, lse, dy, step?) → dq, dk, dv, dbias (optional) of TiledAttention.

    With w = exp(score - lse), m what dropout keeps (1 / (1 - ratio), or 0; all 1 without it) and c the derivative of
    the soft cap: dv = (m · w)ᵀ dy; ds = w · (m · dy vᵀ - Σ dy · y); dq = scale · (c · ds) k; dk = scale · (c · ds)ᵀ q.
    """

    required_outputs = 3
    autocast_inputs = (0, 1, 2, 4, 6)
    linear = ((6,),)
    keyed = (1, 2)
    flat = ((5,), ())

    def infer(self, q, k, v, bias, y, lse, dy, step=None):
        self.check(q, k, v, bias, step)
        if y.shape != (*q.shape[:-1], v.shape[-1]) or dy != y or lse.shape != q.shape[:-1]:
            raise self.fail("y, lse and dy are not those of these inputs", q, k, v, bias, y, lse, dy)
        return (q, k, v) if bias is None else (q, k, v, bias)

    def scratch(self, ins, outs):
        """Two tiles, products, a number a query, and sums in float32 of what shared heads or 16-bit floats add up."""
        q, k, v = ins[:3]
        kind = wide(q.dtype)
        height, width = min(ROWS, q.shape[-2]), min(COLUMNS, k.shape[-2])
        size = max(q.shape[-1], v.shape[-1])
        types = [
            TensorType(kind, (2 + bool(self.cap or self.ratio), height * width)),
            TensorType(kind, (max(height, width) * size,)),
        ]
        types.append(TensorType(kind, (q.shape[-2],)))
        types.append(TensorType(kind, (q.shape[-2], v.shape[-1])))
        if kind != q.dtype:
            types += [TensorType(kind, x.shape) for x in (*ins[:3], ins[6])]
            types += [TensorType(kind, x.shape) for x in ins[:3]]
        return (*types, *self.room(q.shape[-2], k.shape[-2]))

    def compute(self, ins, outs, scratch):
        """For each matrix of queries, all its tiles; gradients are added up in the order of the tiles."""
        q, k, v, bias, y, lse, dy = ins[:7]
        out = self.dropped(q, k.shape[-2], ins[7] if len(ins) > 7 else None)
        scratch, room = (scratch[:-2], scratch[-2:]) if self.ratio else (scratch, scratch)
        dq, dk, dv = outs[:3]
        dbias = outs[3] if len(outs) > 3 else None
        if len(scratch) > 4:
            for wide_one, x in zip(scratch[4:8], (q, k, v, dy), strict=True):
                wide_one[...] = x
            (q, k, v, dy), sums = scratch[4:8], scratch[8:]
        else:
            sums = (dq, dk, dv)
        for x in (*sums, dbias):
            if x is not None:
                x[...] = 0
        bias, dbias = full_bias(bias, q.ndim), full_bias(dbias, q.ndim)
        for index in np.ndindex(*q.shape[:-2]):
            delta, product = scratch[2], scratch[3]
            np.multiply(dy[index], y[index], out=product)
            np.sum(product, axis=1, out=delta)
            parts = [None if x is None else matrix_at(x, index) for x in (q, k, v, bias, dy, *sums, dbias)]
            for rows, columns in self.tiles(q.shape[-2], k.shape[-2]):
                drop = None if out is None else functools.partial(out.drop, keep=out.keep(index, rows, columns, room))
                self._tile(scratch, (rows, columns), parts, lse[index][rows], delta[rows], drop)
        if sums[0] is not dq:
            for target, x in zip((dq, dk, dv), sums, strict=True):
                target[...] = x

    def _tile(
        self, scratch: Operands, at: tuple[slice, slice], parts: Sequence[Any], lse: Array, delta: Array, drop: Any
    ) -> None:
        """Adds what one tile contributes; `drop` applies dropout to a tile."""
        q, k, v, bias, dy, dq, dk, dv, dbias = parts
        rows, columns = at
        height, width = rows.stop - rows.start, columns.stop - columns.start
        w, ds, *more = (a[: height * width].reshape(height, width) for a in scratch[0])
        slope = more[0] if self.cap else None
        self.score(w, q[rows], k[columns], bias, at)
        np.subtract(w, lse[:, None], out=w, where=(lse > -math.inf)[:, None])
        np.exp(w, out=w)

        def add(target: Array, a: Array, b: Array) -> None:
            product = scratch[1][: target.size].reshape(target.shape)
            np.matmul(a, b, out=product)
            np.add(target, product, out=target)

        kept = w
        if drop is not None:
            kept = more[0]
            kept[...] = w
            drop(kept)
        add(dv[columns], kept.T, dy[rows])
        np.matmul(dy[rows], v[columns].T, out=ds)
        if drop is not None:
            drop(ds)
        np.subtract(ds, delta[:, None], out=ds)
        np.multiply(ds, w, out=ds)
        if dbias is not None:
            target = part_of(dbias, rows, columns)
            axes = tuple(i for i in (0, 1) if target.shape[i] == 1 and ds.shape[i] != 1)
            target += ds.sum(axis=axes, keepdims=True) if axes else ds
        if self.cap:
            self.score(w, q[rows], k[columns], None, at, slope)
            np.multiply(ds, need(slope), out=ds)
        np.multiply(ds, self.scale, out=ds)
        add(dq[rows], ds, k[columns])
        add(dk[columns], ds.T, q[rows])

    def expand(self, b, q, k, v, bias, y, lse, dy, step=None):
        kind = wide(q.dtype)
        axis = (*lse.shape, 1)
        statistic = b.Reshape(lse, shape=axis)
        none = b.Equal(statistic, b.constant(-math.inf, statistic))
        scores, slope = all_scores(self, b, q, k, bias)
        w = b.Exp(b.Sub(scores, b.Where(none, b.constant(0.0, statistic), statistic)))
        gy, vv, kk, qq = (as_type(b, x, kind) for x in (dy, v, k, q))
        delta = b.ReduceSum(b.Mul(gy, as_type(b, y, kind)), axes=(-1,))
        ds = b.Mul(w, b.Sub(self.leave_out(b, b.MatMul(gy, vv, transB=1), step), delta))
        scaled = b.Mul(ds if slope is None else b.Mul(ds, slope), b.constant(self.scale, ds))
        dv = b.MatMul(self.leave_out(b, w, step), gy, transA=1)
        dq, dk = b.MatMul(scaled, kk), b.MatMul(scaled, qq, transA=1)
        grads = [as_type(b, b.sum_to(g, x.shape), x.dtype) for g, x in ((dq, q), (dk, k), (dv, v))]
        return (*grads, as_type(b, b.sum_to(ds, bias.shape), bias.dtype)) if bias is not None else tuple(grads)

    def cost(self, ins, outs):
        """Five products over the scores that count."""
        q, k, v = ins[:3]
        count = math.prod(q.shape[:-1]) * k.shape[-2] * self.share(q.shape[-2], k.shape[-2])
        moved = sum(t.nbytes for t in (*ins, *outs) if t is not None)
        return Cost(int(count * (2 * (3 * q.shape[-1] + 2 * v.shape[-1]) + 12 + 2 * self.per_score())), moved)

    @classmethod
    def samples(cls, draw):
        for options, shapes, want in (
            ({"scale": 0.5}, ("2,3,4", "2,5,4", "2,5,2"), None),
            ({"scale": 0.3, "last": 0}, ("5,4", "5,4", "5,3"), None),
            ({"first": -1, "last": 1}, ("4,2", "6,2", "6,2"), None),
            ({"scale": 0.5, "last": 1}, ("2,3,3,2", "2,1,4,2", "2,1,4,2", "3,1,4"), 4),
            ({"scale": 0.5}, ("2,3,2", "1,4,2", "1,4,3", "3,4"), 3),
            ({"scale": 0.9, "cap": 0.8, "last": 1}, ("2,3,4", "2,5,4", "2,5,2", "1,1,5"), 4),
            ({"ratio": 0.4, "seed": 5}, ("2,2,3,4", "2,1,5,4", "2,1,5,2"), None),
            ({"ratio": 0.3, "seed": 7, "cap": 2.0}, ("2,3,4", "2,5,4", "2,5,2", "3,5"), 4),
            ({"ratio": 0.3, "seed": 9, "rows": (3, 5, 7), "at": (1, 0, 2)}, ("2,4,3,2", "2,4,9,2", "2,4,9,2"), None),
        ):
            ins = [draw(f"f64[{s}]") for s in shapes]
            step = [np.array(3)] if options.get("ratio") else []
            ins += [*[None] * (4 - len(ins)), *step]
            op = TiledAttention(**options)
            types = [None if a is None else TensorType.of(a) for a in ins]
            outs = [np.empty(t.shape, t.numpy) for t in op.infer(*types)]
            op.compute(
                ins, outs, [np.empty(t.shape, t.numpy) for t in op.scratch(types, [TensorType.of(o) for o in outs])]
            )
            yield draw.case(
                cls(**options), *ins[:4], *outs, draw(f"f64[{','.join(map(str, outs[0].shape))}]"), *step, want=want
            )
