"""The gradient of attention in tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...language.op import Cost
from ...language.types import TensorType
from ..norm.fused import as_type
from ..tiles import wide
from .tiled import COLUMNS, ROWS, Tiled, TiledAttention, all_scores, full_bias, matrix_at, part_of


@dataclass(frozen=True)
class TiledAttentionGrad(Tiled):
    """(q, k, v, bias?, y, lse, dy) → dq, dk, dv, dbias (optional) of TiledAttention.

    With w = exp(score - lse): dv = wᵀ dy; ds = w · (dy vᵀ - Σ dy · y); dq = scale · ds k; dk = scale · dsᵀ q.
    """

    scale: float = 1.0
    first: int | None = None
    last: int | None = None
    required_outputs = 3
    autocast_inputs = (0, 1, 2, 4, 6)

    def infer(self, q, k, v, bias, y, lse, dy):
        """Like the inputs."""
        self.check(q, k, v, bias)
        if y.shape != (*q.shape[:-1], v.shape[-1]) or dy != y or lse.shape != q.shape[:-1]:
            raise self.fail("y, lse and dy are not those of these inputs", q, k, v, bias, y, lse, dy)
        return (q, k, v) if bias is None else (q, k, v, bias)

    def scratch(self, ins, outs):
        """Two tiles, products, a number a query, and sums in float32 of what shared heads or halves add up."""
        q, k, v = ins[:3]
        kind = wide(q.dtype)
        height, width = min(ROWS, q.shape[-2]), min(COLUMNS, k.shape[-2])
        size = max(q.shape[-1], v.shape[-1])
        found = [TensorType(kind, (2, height * width)), TensorType(kind, (max(height, width) * size,))]
        found.append(TensorType(kind, (q.shape[-2],)))
        found.append(TensorType(kind, (q.shape[-2], v.shape[-1])))
        if kind != q.dtype:
            found += [TensorType(kind, x.shape) for x in (*ins[:3], ins[6])]
            found += [TensorType(kind, x.shape) for x in ins[:3]]
        return tuple(found)

    def compute(self, xp, ins, outs, scratch):
        """For each matrix of queries, all its tiles; gradients are added up in the order of the tiles."""
        q, k, v, bias, y, lse, dy = ins
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
            xp.multiply(dy[index], y[index], out=product)
            xp.sum(product, axis=1, out=delta)
            parts = [None if x is None else matrix_at(x, index) for x in (q, k, v, bias, dy, *sums, dbias)]
            for rows, columns in self.tiles(q.shape[-2], k.shape[-2]):
                self._tile(xp, scratch, (rows, columns), parts, lse[index][rows], delta[rows])
        if sums[0] is not dq:
            for out, x in zip((dq, dk, dv), sums, strict=True):
                out[...] = x

    def _tile(self, xp: Any, scratch: Any, at: tuple[slice, slice], parts: Any, lse: Any, delta: Any) -> None:
        """Adds what one tile contributes."""
        q, k, v, bias, dy, dq, dk, dv, dbias = parts
        rows, columns = at
        height, width = rows.stop - rows.start, columns.stop - columns.start
        w, ds = (a[: height * width].reshape(height, width) for a in scratch[0])
        self.score(xp, w, q[rows], k[columns], bias, rows, columns)
        xp.subtract(w, lse[:, None], out=w, where=(lse > -math.inf)[:, None])
        xp.exp(w, out=w)

        def add(target: Any, a: Any, b: Any) -> None:
            product = scratch[1][: target.size].reshape(target.shape)
            xp.matmul(a, b, out=product)
            xp.add(target, product, out=target)

        add(dv[columns], w.T, dy[rows])
        xp.matmul(dy[rows], v[columns].T, out=ds)
        xp.subtract(ds, delta[:, None], out=ds)
        xp.multiply(ds, w, out=ds)
        if dbias is not None:
            target = part_of(dbias, rows, columns)
            axes = tuple(i for i in (0, 1) if target.shape[i] == 1 and ds.shape[i] != 1)
            target += ds.sum(axis=axes, keepdims=True) if axes else ds
        xp.multiply(ds, self.scale, out=ds)
        add(dq[rows], ds, k[columns])
        add(dk[columns], ds.T, q[rows])

    def expand(self, b, q, k, v, bias, y, lse, dy):
        """The formulas over all scores."""
        kind = wide(q.dtype)
        axis = (*lse.shape, 1)
        known = b.Reshape(lse, shape=axis)
        none = b.Equal(known, b.constant(-math.inf, known))
        w = b.Exp(b.Sub(all_scores(self, b, q, k, bias), b.Where(none, b.constant(0.0, known), known)))
        gy, vv, kk, qq = (as_type(b, x, kind) for x in (dy, v, k, q))
        delta = b.ReduceSum(b.Mul(gy, as_type(b, y, kind)), axes=(-1,))
        ds = b.Mul(w, b.Sub(b.MatMul(gy, vv, transB=1), delta))
        scaled = b.Mul(ds, b.constant(self.scale, ds))
        dq, dk, dv = b.MatMul(scaled, kk), b.MatMul(scaled, qq, transA=1), b.MatMul(w, gy, transA=1)
        found = [as_type(b, b.sum_to(g, x.shape), x.dtype) for g, x in ((dq, q), (dk, k), (dv, v))]
        return (*found, as_type(b, b.sum_to(ds, bias.shape), bias.dtype)) if bias is not None else tuple(found)

    def cost(self, ins, outs):
        """Five products over the scores that count."""
        q, k, v = ins[:3]
        count = math.prod(q.shape[:-1]) * k.shape[-2] * self.share(q.shape[-2], k.shape[-2])
        moved = sum(t.nbytes for t in (*ins, *outs) if t is not None)
        return Cost(int(count * (2 * (3 * q.shape[-1] + 2 * v.shape[-1]) + 12)), moved)

    @classmethod
    def samples(cls, draw):
        """As the forward operator's, from consistent results."""
        for options, shapes, want in (
            ({"scale": 0.5}, ("2,3,4", "2,5,4", "2,5,2"), None),
            ({"scale": 0.3, "last": 0}, ("5,4", "5,4", "5,3"), None),
            ({"first": -1, "last": 1}, ("4,2", "6,2", "6,2"), None),
            ({"scale": 0.5, "last": 1}, ("2,3,3,2", "2,1,4,2", "2,1,4,2", "3,1,4"), 4),
            ({"scale": 0.5}, ("2,3,2", "1,4,2", "1,4,3", "3,4"), 3),
        ):
            ins = [draw(f"f64[{s}]") for s in shapes]
            op = TiledAttention(**options)
            types = [TensorType.of(a) for a in ins]
            outs = [np.empty(t.shape, t.numpy) for t in op.infer(*types)]
            op.compute(
                np, ins, outs, [np.empty(t.shape, t.numpy) for t in op.scratch(types, [TensorType.of(o) for o in outs])]
            )
            yield draw.case(
                cls(**options), *(*ins, None)[:4], *outs, draw(f"f64[{','.join(map(str, outs[0].shape))}]"), want=want
            )
