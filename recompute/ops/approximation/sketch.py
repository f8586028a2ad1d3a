"""Sketch: a few random combinations of the rows of a matrix, in place of all of them.

A weight's gradient is a product over the batch, Xᵀ·dY.  With a random S [B, k] whose E[S Sᵀ] is the identity,
(SᵀX)ᵀ(SᵀdY) has it as its mean, and SᵀX takes k/B of the memory of X (Drineas, Kannan & Mahoney 2006; for linear
layers: Bershatsky et al., arXiv 2201.13195).  variance.py says what it costs.
"""

from __future__ import annotations

import math

import numpy as np

from ...language.factors import Factor, factor
from ...language.op import Cost, Op
from ...language.types import Array, Operands, TensorType, Types, need, present
from ..tiles import TILE, wide
from . import transforms
from .drawn import COLUMNS, choose, signs, tile
from .sketch_export import export_sketch

KINDS = ("gaussian", "rademacher", "rows", "dct", "dft")
#: rows of x, and columns of S, that exist of S at a time
TILE_ROWS, TILE_COLUMNS = 512, 768
#: more rows than that have no number in a word with a number of the stream
_MOST_ROWS = 1 << 31


class Sketch(Op):
    """(x, step) → Sᵀ·x for a random S [B, rows], a function of (kind, rows, seed, step) and of B alone.

    B: the product of x's leading axes.  E[S Sᵀ] is the identity.  Kinds:
    `gaussian`: normal numbers / √rows.  `rademacher`: signs / √rows.
    `rows`: rows of x without replacement, in ascending order, times √(B/rows).
    `dct`, `dft`: random signs, zeros up to P = the next power of two (at least 4), the orthonormal DCT-II or real
    Fourier transform, and `rows` of its P coefficients without replacement times √(P/rows).
    S itself never exists; drawn.py and transforms.py say which numbers it is made of.
    """

    approximates = True

    autocast = "follow"
    random = True
    linear = ((0,),)
    rows: int
    kind: str = "gaussian"
    seed: int = 0

    def infer(self, x, step):
        """[rows, n] of x's type."""
        if not x.is_float:
            raise self.fail("takes floats only", x, step)
        if x.ndim < 2:
            raise self.fail("x needs a batch axis and an axis of features", x, step)
        if self.kind not in KINDS:
            raise self.fail(f"kind must be one of {', '.join(KINDS)}, not '{self.kind}'", x, step)
        batch = math.prod(x.shape[:-1])
        if not 1 <= self.rows <= batch or batch > _MOST_ROWS:
            what = f"rows must be in [1, {batch}], the rows of x, not {self.rows}"
            raise self.fail(what if batch <= _MOST_ROWS else "x has more than 2³¹ rows", x, step)
        if not 0 <= self.seed < 1 << 64:
            raise self.fail(f"the seed must be in [0, 2⁶⁴), not {self.seed}", x, step)
        if step != TensorType("i64", ()):
            raise self.fail("the step counter must be i64[]", x, step)
        return (x.with_shape((self.rows, x.shape[-1])),)

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...]:
        """Features are independent; the batch is needed whole, as each row of y reads all of it."""
        x = need(ins[0])
        return (factor(x.shape[-1], [x.ndim - 1], [1]),)

    def scratch(self, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        """See the three ways of computing."""
        x = need(ins[0])
        n, kind = x.shape[-1], wide(x.dtype)
        batch = math.prod(x.shape[:-1])

        def real(*shape: int) -> TensorType:
            return TensorType(kind, shape)

        if self.kind in COLUMNS:
            high, across = min(batch, TILE_ROWS), min(self.rows, TILE_COLUMNS)
            copied = real(high if kind != x.dtype else 0, n)
            return TensorType("f32", (8 * high,)), real(high, across), copied, real(2, across, n)
        size = batch if self.kind == "rows" else transforms.padded(batch)
        drawn = (TensorType("f32", (2, size)), TensorType("i64", (self.rows,)))
        if self.kind == "rows":
            return (*drawn, real(min(max(1, TILE // max(n, 1)), self.rows) if kind != x.dtype else 0, n))
        width, half = min(n, transforms.WIDTH), size // 2
        return (
            *drawn,
            real(batch),
            real(2, half // 2),
            TensorType("i64", (2, self.rows)),
            real(4, self.rows),
            real(2, half, width),
            real(3, half // 2, width),
            real(2, self.rows, width),
        )

    def compute(self, ins, outs, scratch):
        """One of three: products with tiles of S, rows, a fast transform."""
        x, y = ins[0].reshape(-1, ins[0].shape[-1]) if ins[0].size else ins[0], outs[0]
        if not y.size:
            return
        if self.kind in COLUMNS:
            self._products(x, ins[1], y, scratch)
        elif self.kind == "rows":
            self._taken(x, ins[1], y, scratch)
        else:
            self._transformed(x, ins[1], y, scratch)

    def _products(self, x: Array, step: Array, y: Array, scratch: Operands) -> None:
        """Tile by tile of S, added up for some rows of y at a time."""
        u, drawn, copied, sums = scratch
        scale = 1 / math.sqrt(self.rows)
        for column in range(0, self.rows, TILE_COLUMNS):
            target = y[column : column + TILE_COLUMNS]
            term, total = sums[:, : len(target)]
            total[...] = 0
            for row in range(0, len(x), TILE_ROWS):
                part = x[row : row + TILE_ROWS]
                s = drawn[: len(part), : len(target)]
                tile(self.kind, self.seed, step, (row, column), len(x), u[: 8 * len(part)], s)
                if copied.size:
                    copied[: len(part)] = part
                    part = copied[: len(part)]
                np.matmul(s.T, part, out=term)
                np.add(total, term, out=total)
            np.multiply(total, scale, out=total)
            target[...] = total

    def _taken(self, x: Array, step: Array, y: Array, scratch: Operands) -> None:
        """Rows of x; the half precisions are scaled in float32."""
        keys, chosen, room = scratch
        choose(self.seed, step, keys[0], keys[1], chosen)
        scale = math.sqrt(len(x) / self.rows)
        np.take(x, chosen, axis=0, out=y, mode="clip")
        if not room.size:
            np.multiply(y, scale, out=y)
            return
        for start in range(0, self.rows, len(room)):
            part = y[start : start + len(room)]
            copied = room[: len(part)]
            copied[...] = part
            np.multiply(copied, np.float32(scale), out=copied)
            part[...] = copied

    def _transformed(self, x: Array, step: Array, y: Array, scratch: Operands) -> None:
        keys, chosen, sign, table, places, factors, z, room, taken = scratch
        size = keys.shape[1]
        choose(self.seed, step, keys[0], keys[1], chosen)
        signs(self.seed, step, size, sign)
        transforms.twiddles(table)
        transforms.combinations(self.kind, size, chosen, places, factors, math.sqrt(size / self.rows))
        for start in range(0, y.shape[1], z.shape[2]):
            part = y[:, start : start + z.shape[2]]
            width = part.shape[1]
            here, spare, result = (
                a.reshape(-1)[: a.size // z.shape[2] * width].reshape(*a.shape[:2], width) for a in (z, room, taken)
            )
            transforms.load(self.kind, x[:, start : start + width], sign, here)
            transforms.transform(here, table, spare)
            transforms.combine(here, places, factors, result, part)

    def cost(self, ins: Types, outs: Types) -> Cost:
        """A product, a copy of the rows, or a transform."""
        x, y = present(ins[0], outs[0])
        n, batch = x.shape[-1], math.prod(x.shape[:-1])
        if self.kind in COLUMNS:  # some twenty operations draw a number
            return Cost(2 * batch * self.rows * n + 20 * batch * self.rows, x.nbytes + y.nbytes)
        if self.kind == "rows":
            return Cost(y.size + 20 * batch, 2 * y.nbytes)
        size = transforms.padded(batch)
        flops = int(2.5 * size * math.log2(size)) * n + 8 * y.size + 30 * size
        return Cost(flops, x.nbytes + y.nbytes)

    def gradient(self, b, ins, outs, grads):
        """None: it is put into finished steps, which nothing differentiates."""
        return [None] * len(ins)

    def export(self, g, ins, outs):
        """The ONNX nodes that draw the same S from the same bits; see sketch_export.py."""
        export_sketch(self, g, ins, outs)
        return True

    @classmethod
    def samples(cls, draw):
        """All kinds: one row, all rows, a batch that is no power of two, more than a tile, 16-bit floats, nothing."""
        for kind in KINDS:
            for rows, x in ((3, "f64[8,5]"), (1, "f64[1,1]"), (5, "f64[5,20]"), (7, "f32[2,3,4,3]"), (4, "f16[6,3]")):
                export = not x.startswith("f16")
                yield draw.case(cls(rows, kind, seed=5), draw(x), np.array(3), gradient=False, export=export)
            yield draw.case(cls(300, kind, seed=2**62 + 1), draw("f32[601,37]"), np.array(7), gradient=False)
            yield draw.case(cls(2, kind, seed=1), draw("f32[4,0]"), np.array(7), gradient=False)
