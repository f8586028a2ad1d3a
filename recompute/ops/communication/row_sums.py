"""RowSums: a rank's own sum of the gradients of a table, from the rows that all ranks took of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...language.op import Cost, Op
from ...language.types import Array, Operands, TensorType, Types, need, present
from ..indexing.flat import add_rows
from ..indexing.gather import need_indices
from .base import MAX_RANKS, doublings


class RowSums(Op):
    """(indices, dy of all ranks behind one another) → `size` elements, from `start` on, of the sum of all ranks'
    gradients of a table of `shape` from which each took rows: the bits of `TreeSum` over `GatherGrad` of each of the
    `parts` equal parts along axis 0.

    Zeros follow the table's elements.  Indices outside of the table, which the rank that took them reports, are left
    out or counted from the other end.
    """

    linear = ((1,),)
    shape: tuple[int, ...]
    parts: int
    start: int
    size: int

    @property
    def inner(self) -> int:
        """The elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def first(self) -> int:
        """The table's row in which the result begins."""
        return self.start // max(self.inner, 1)

    @property
    def rows(self) -> int:
        """Rows of the table in which the result can lie; the same number for any start."""
        inner = max(self.inner, 1)
        return (self.size + inner - 2) // inner + 1 if self.start % inner or self.size % inner else self.size // inner

    def infer(self, indices, dy):
        """A part of the table in one dimension, with dy's element type."""
        need_indices(self, indices, indices, dy)
        if dy.dtype not in ("f32", "f64"):
            raise self.fail("dy must be f32 or f64", indices, dy)
        if not self.shape or dy.shape != (*indices.shape, *self.shape[1:]):
            raise self.fail(f"dy is not the gradient of rows of {list(self.shape)}", indices, dy)
        if not 1 <= self.parts <= MAX_RANKS or not indices.shape or indices.shape[0] % self.parts:
            raise self.fail(f"axis 0 cannot be divided into {self.parts} parts", indices, dy)
        if self.start < 0 or self.size < 0:
            raise self.fail("start and size must not be negative", indices, dy)
        if not self.inner:
            raise self.fail("the table's rows have no elements", indices, dy)
        if indices.size and not self.shape[0]:
            raise self.fail("there are no rows to take", indices, dy)
        return (dy.with_shape((self.size,)),)

    def axis_factors(self, ins: Any, outs: Any) -> tuple[Any, ...]:
        return ()

    def scratch(self, ins: Types, outs: Types) -> tuple[TensorType, ...]:
        """Row numbers, and a sum for each level of the tree that waits for its neighbour; one row more takes what lies
        elsewhere."""
        x, y = present(ins[0], outs[0])
        levels = doublings(self.parts) + 1
        return TensorType("i64", (x.size,)), TensorType(y.dtype, (levels, self.rows + 1, self.inner))

    def compute(self, ins: Operands, outs: Operands, scratch: Operands) -> None:
        """Each part's rows, added up in the tree."""
        places, sums = scratch
        places[...] = ins[0].reshape(-1)
        np.mod(places, max(self.shape[0], 1), out=places)
        np.subtract(places, self.first, out=places)
        places[...] = np.where((places < 0) | (places >= self.rows), self.rows, places)
        each = places.size // self.parts
        dy = ins[1].reshape((1, places.size, self.inner))

        def add_up(low: int, high: int, spare: Array) -> None:
            """The sum of parts `low` to `high`, in the first of `spare`."""
            if high - low == 1:
                spare[0].fill(0)
                mine = slice(low * each, high * each)
                add_rows(spare[:1], places[mine], dy[:, mine])
                return
            middle = low + (1 << doublings(high - low) - 1)
            add_up(low, middle, spare)
            add_up(middle, high, spare[1:])
            np.add(spare[0], spare[1], out=spare[0])

        add_up(0, self.parts, sums)
        begin = self.start - self.first * self.inner
        outs[0][...] = sums[0].reshape(-1)[begin : begin + self.size]

    def expand(self, b, indices, dy):
        """A GatherGrad for each part, and a TreeSum."""
        each, n = indices.shape[0] // self.parts, self.shape[0]
        sums = []
        for i in range(self.parts):
            rows = {"starts": (i * each,), "ends": ((i + 1) * each,), "axes": (0,)}
            one = b.GatherGrad(b.Slice(indices, **rows), b.Slice(dy, **rows), shape=self.shape)
            flat = b.Reshape(one, shape=(n * self.inner,))
            more = max(self.start + self.size - flat.size, 0)
            flat = b.Concat(flat, b.fill(0, dy.type.with_shape((more,))), axis=0) if more else flat
            sums.append(b.Slice(flat, starts=(self.start,), ends=(self.start + self.size,), axes=(0,)))
        whole = b.Concat(*sums, axis=0) if len(sums) > 1 else sums[0]
        return (b.TreeSum(whole, parts=self.parts),)

    def cost(self, ins: Types, outs: Types) -> Cost:
        """One addition for each element of dy."""
        dy = need(ins[1])
        return Cost(dy.size, super().cost(ins, outs).bytes)

    @classmethod
    def samples(cls, draw):
        """Whole tables and parts that begin and end inside of rows; zeros behind; one rank, and numbers that are no
        power of two; rows that several take, and negative numbers."""
        for parts in (1, 2, 3, 4, 7):
            indices, dy = draw.ints(f"i64[{2 * parts},3]", -5, 5), draw(f"f64[{2 * parts},3,4]")
            yield draw.case(cls((5, 4), parts, 0, 20), indices, dy)
        for start in (0, 9, 18):
            yield draw.case(cls((6, 4), 2, start, 9), draw.ints("i32[4,2]", 0, 6), draw("f64[4,2,4]"))
        yield draw.case(cls((3,), 2, 2, 2), draw.ints("i64[4]", 0, 3), draw("f64[4]"))
        yield draw.case(cls((64, 48), 3, 1024, 1024), draw.ints("i64[30]", 0, 64), draw("f32[30,48]"))
        yield draw.case(cls((4, 3), 2, 0, 12), draw.ints("i64[0]", 0, 2), draw("f64[0,3]"))
