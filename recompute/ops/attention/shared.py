"""Shared parts of tiled attention and its gradient: shapes, windows, tiles, the scores of a tile, and their axes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, cast

import numpy as np

from ...language.factors import SUM, Factor, Place, factor
from ...language.op import Op, OperatorBuilder
from ...language.types import Array, TensorType, Types, Value
from ..norm.fused import as_type
from ..tiles import wide
from .dropped import Dropped, check_part, dropped

#: queries and keys of a tile
ROWS, COLUMNS = 256, 256
#: queries that kernels take at a time, for estimates of costs
STRIP = 64


class Tiled(Op, abstract=True):
    """Attention in tiles, or its gradient.

    q: [..., t, d]; k: [..., s, d]; v: [..., s, e]; bias: [..., t, s] or what broadcasts to it.  The leading axes of k,
    v and bias are q's or 1 (heads that share keys and values).  score = cap · tanh(scale · q kᵀ / cap) (+ bias), or
    scale · q kᵀ (+ bias) where cap is 0; query i sees the keys from i + first to i + last (None: all on that side).
    Dropout on the weights leaves out the elements that Dropout(ratio, seed) leaves out of all weights [..., t, s] at
    this step; in a slice, `rows` are [..., t] of the whole, and `at` is where the slice begins in them.
    """

    autocast = "low"
    autocast_inputs: ClassVar[tuple[int, ...]] = (0, 1, 2)
    scale: float = 1.0
    first: int | None = None
    last: int | None = None
    cap: float = 0.0
    ratio: float = 0.0
    seed: int = 0
    rows: tuple[int, ...] = ()
    at: tuple[int, ...] = ()

    @property
    def random(self) -> bool:
        """Whether weights are left out at random."""
        return self.ratio > 0

    def check(
        self, q: TensorType, k: TensorType, v: TensorType, bias: TensorType | None, step: TensorType | None
    ) -> None:
        """TypeRuleError where shapes or types do not fit."""
        types = (q, k, v, bias, step)
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
        if not (math.isfinite(self.cap) and self.cap >= 0):
            raise self.fail(f"the cap must be a finite number of at least 0, not {self.cap}", *types)
        self.check_dropout(q, *types)

    def check_dropout(self, q: TensorType, *types: TensorType | None) -> None:
        """TypeRuleError where the attributes of dropout do not fit; the last of `types` is the step counter's."""
        step = types[-1]
        if not 0 <= self.ratio < 1:
            raise self.fail(f"ratio must be in [0, 1), not {self.ratio}", *types)
        if not 0 <= self.seed < 1 << 64:
            raise self.fail(f"the seed must be in [0, 2⁶⁴), not {self.seed}", *types)
        if (step is None) != (self.ratio == 0) or (step is not None and step != TensorType("i64", ())):
            raise self.fail("the step counter must be i64[], and is there with dropout only", *types)
        if (self.rows or self.at) and (why := check_part(self.rows, self.at, q.shape[:-1])):
            raise self.fail(why, *types)

    # -- tiles --------------------------------------------------------------------------------------------------

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

    def per_score(self) -> int:
        """Operations for each score that a soft cap and dropout add."""
        return (20 if self.cap else 0) + (15 if self.ratio else 0)

    def score(
        self, s: Array, q: Array, k: Array, bias: Any, at: tuple[slice, slice], slope: Array | None = None
    ) -> None:
        """A tile's scores into s; -inf for keys that a query may not see.  `slope`: gets the soft cap's derivative."""
        rows, columns = at
        np.matmul(q, k.T, out=s)
        np.multiply(s, self.scale, out=s)
        if self.cap:
            np.multiply(s, 1 / self.cap, out=s)
            np.tanh(s, out=s)
            if slope is not None:
                np.multiply(s, s, out=slope)
                np.subtract(1.0, slope, out=slope)
            np.multiply(s, self.cap, out=s)
        if bias is not None:
            np.add(s, part_of(bias, rows, columns), out=s)
        height, width = s.shape
        offset = columns.start - rows.start  # key j, query i of the tile: key - query = j - i + offset
        if self.last is not None and width - 1 + offset > self.last:
            for i in range(min(height, max(width - 1 + offset - self.last, 0))):
                s[i, max(i + self.last - offset + 1, 0) :] = -math.inf
        if self.first is not None and offset - (height - 1) < self.first:
            for i in range(max(offset - self.first + 1, 0), height):
                s[i, : max(i + self.first - offset, 0)] = -math.inf

    # -- dropout ------------------------------------------------------------------------------------------------

    def room(self, queries: int, keys: int) -> tuple[TensorType, ...]:
        """The temporaries of dropout: a tile of numbers, and of comparisons."""
        size = min(ROWS, queries) * min(COLUMNS, keys)
        return (TensorType("f32", (size + 8,)), TensorType("bool", (size,))) if self.ratio else ()

    def dropped(self, q: Array, keys: int, step: Array | None) -> Dropped | None:
        """The dropout of attention weights; None without dropout."""
        if not self.ratio:
            return None
        rows = tuple(q.shape[:-1])
        return Dropped(self.ratio, self.seed, step, self.rows or rows, self.at or (0,) * len(rows), keys)

    def leave_out(self, b: OperatorBuilder, w: Value, step: Any) -> Value:
        """All weights after dropout."""
        if step is None:
            return w
        rows = tuple(w.shape[:-1])
        return dropped(b, w, step, self.ratio, self.seed, self.rows or rows, self.at or (0,) * len(rows))

    # -- axes ---------------------------------------------------------------------------------------------------

    def axis_factors(self, ins: Types, outs: Types) -> tuple[Factor, ...]:
        """The leading axes and the queries.

        Outputs and inputs that lack an index of the queries' are sums over it, in the gradient: in the forward
        pass there are none.
        """
        q = cast(TensorType, ins[0])
        return tuple(
            factor(
                q.shape[axis],
                [self._place(q, axis, t, i in (1, 2), i in self.flat[0]) for i, t in enumerate(ins)],
                [
                    None if t is None else _or_sum(self._place(q, axis, t, i in self.keyed, i in self.flat[1]))
                    for i, t in enumerate(outs)
                ],
            )
            for axis in range(q.ndim - 1)
        )

    #: outputs with an axis of keys instead of queries; inputs and outputs with one number a query
    keyed: ClassVar[tuple[int, ...]] = ()
    flat: ClassVar[tuple[tuple[int, ...], tuple[int, ...]]] = ((), ())

    @staticmethod
    def _place(q: TensorType, axis: int, t: TensorType | None, keyed: bool, flat: bool) -> int | None:
        """Where an axis of the queries is in a value."""
        if t is None or (keyed and axis == q.ndim - 2):
            return None
        at = axis - q.ndim + t.ndim + flat
        return at if at >= 0 and t.shape[at] == q.shape[axis] else None

    def sliced(self, factor: Factor, start: int, size: int, outs: Types) -> Op:
        """Windows are moved by the queries before the slice; dropout numbers its weights as in the whole."""
        place, first = factor.outputs[0], cast(TensorType, outs[0])
        if not isinstance(place, Place) or place.axis == first.ndim - 1:
            return self
        changes: dict[str, Any] = {}
        before = start * place.inner
        if place.axis == first.ndim - 2:
            changes = {n: None if (x := getattr(self, n)) is None else x + before for n in ("first", "last")}
        if self.ratio:
            rows = list(first.shape[:-1])
            at = list(self.at or (0,) * len(rows))
            at[place.axis] += before
            rows[place.axis] = place.extent(factor.size)
            changes |= {"rows": self.rows or tuple(rows), "at": tuple(at)}
        if place.outer != 1 and changes:
            raise self.fail("windows and dropout need slices of one run of queries", *outs)
        return replace(cast(Any, self), **changes)


def _or_sum(at: int | None) -> int | str:
    return SUM if at is None else at


# -- parts of arrays --------------------------------------------------------------------------------------------------


def part_of(bias: Array, rows: slice, columns: slice) -> Array:
    """The part of [t or 1, s or 1] for a tile."""
    return bias[rows if bias.shape[0] > 1 else slice(None), columns if bias.shape[1] > 1 else slice(None)]


def matrix_at(x: Array, index: tuple[int, ...]) -> Array:
    """The matrix of x for an index of q's leading axes."""
    lead = x.shape[:-2]
    return x[tuple(i if n > 1 else 0 for i, n in zip(index[len(index) - len(lead) :], lead, strict=True))]


def full_bias(bias: Array | None, ndim: int) -> Array | None:
    """The bias with as many axes as the queries."""
    return None if bias is None else bias.reshape((1,) * (ndim - bias.ndim) + bias.shape)


# -- compositions -----------------------------------------------------------------------------------------------------


def all_scores(op: Tiled, b: OperatorBuilder, q: Value, k: Value, bias: Value) -> tuple[Value | None, Value | None]:
    """All scores, in at least float32, and the derivative of the soft cap there (None without one)."""
    kind = wide(q.dtype)
    scores = b.MatMul(as_type(b, q, kind), as_type(b, k, kind), transB=1)
    scores = b.Mul(scores, b.constant(op.scale, scores))
    slope = None
    if op.cap:
        cap = b.constant(op.cap, scores)
        turned = b.Tanh(b.Div(scores, cap))
        slope = b.Sub(b.constant(1.0, turned), b.Mul(turned, turned))
        scores = b.Mul(turned, cap)
    if bias is not None:
        scores = b.Add(scores, as_type(b, bias, kind))
    shape = scores.type.with_shape((q.shape[-2], k.shape[-2]))
    if op.last is not None:
        scores = b.Add(scores, b.Trilu(b.fill(-math.inf, shape), k=1 + op.last))
    if op.first is not None and op.first > -q.shape[-2]:
        scores = b.Add(scores, b.Trilu(b.fill(-math.inf, shape), k=op.first - 1, upper=0))
    return scores, slope
