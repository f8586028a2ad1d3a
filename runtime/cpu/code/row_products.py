"""Products of rows with one packed matrix; the result of a row does not depend on how rows are grouped.

What is done to some rows in all steps of a sequence needs no other rows.  So each thread takes its rows through the
whole sequence, and waits for nobody: the calls of all steps become one (`native.together`).  A row's sums run in
blocks of TERMS terms, one block after the other, whatever rows stand beside it: the bits do not depend on the batch
or on the number of threads.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ....language.types import Array, TensorType
from ..device import native
from ..device.jit import kernel
from ..device.native import Call
from . import packing as transposed
from .emit import Code, module
from .tiles import TERMS, Tile, finish, machine, multiply, new_sums, sizes

#: bytes of the rows that stay in a thread's cache while one panel after the other is multiplied with them
_BLOCK = 1 << 19
#: rows at least that a thread takes at a time, two tiles: the panels are read once for all of them
_LEAST = 8


@kernel
def pack_rows(matrix, packed, begin, end):
    """Rows of a matrix [k, n] in panels [panels, k, width], zeros behind the last column."""
    n, width = matrix.shape[1], packed.shape[2]
    for r in range(begin, end):
        for p in range(packed.shape[0]):
            first = p * width
            there = min(width, n - first)
            for j in range(there):
                packed[p, r, j] = matrix[r, first + j]
            for j in range(there, width):
                packed[p, r, j] = 0


class Packed:
    """B' of products A B' in float32: B [k, n], or Bᵀ [n, k] where `turned`; for `rows` rows of A at a time."""

    def __init__(self, k: int, n: int, rows: int, *, turned: bool) -> None:
        self.k, self.n, self.turned = k, n, turned
        vectors = sizes(rows, n)[1]
        self.width = vectors * machine().width
        self.high = sizes(-(-rows // native.threads()), n, vectors)[0]

    def shape(self) -> tuple[int, int, int]:
        """The shape of the panels."""
        return (-(-self.n // self.width), self.k, self.width)

    def pack(self, matrix: Array, packed: Array) -> Call:
        """Fills the panels."""
        if not self.turned:
            shape = self.shape()
            return pack_rows.call(matrix, packed[: math.prod(shape)].reshape(shape), work=self.k)
        count, _, width = self.shape()
        panels = [(p * width * self.k, p * width * self.k, min(width, self.n - p * width)) for p in range(count)]
        table = transposed.chunks(1, self.k, 0)
        offsets = np.arange(self.k, dtype=np.int64) * width
        return transposed.turned(matrix, packed, panels, table, offsets, self.k)

    def product(self, a: Array, packed: Array, c: Array, more: Array | None = None) -> Call:
        """c = a B' (+ `more`: a row for all, or as many rows, `c` perhaps).  The rows are the work."""
        bias = (0, 0) if more is None else (more, self.n if more.ndim > 1 else 0)
        return Call(_program(self.k, self.n, self.high, self.width), (c, a, packed, *bias), a.shape[0], least=_LEAST)


def room(like: TensorType, *products: tuple[int, int, int]) -> TensorType:
    """The workspace that the largest Packed of these (k, n, rows) needs; float64 has none."""
    counts = [math.prod(Packed(*p, turned=False).shape()) for p in products]
    return like.with_shape((max(counts) if like.dtype == "f32" else 0,))


@functools.cache
def _program(k: int, n: int, high: int, width: int) -> int:
    """The address of a kernel (C, A, panels, what is added or null, step of its rows): `high` rows at a time."""
    heights = sorted({high, *(h for h in (8, 4, 2, 1) if h < high)}, reverse=True)
    rest = n % width
    columns = [c for c in (width if n >= width else 0, rest) if c]
    tiles = {(h, c): Tile(h, c, k, 1, width, n, TERMS) for h in heights for c in columns}
    f = Code()
    c, a, panels, bias = (f.word("%args", i, "ptr") for i in range(4))
    step = f.word("%args", 4)
    some = f.let(f"icmp ne ptr {bias}, null")

    def sweep(start: str, end: str, first: str, columns: int) -> None:
        """A panel's columns of some rows."""
        panel = f.at(panels, f.mul(first, k))
        for h in heights:
            stop = f.add(start, f.mul(f.div(f.sub(end, start), h), h))
            with f.loop(start, stop, h) as r:
                to, rows = f.at(c, f.add(f.mul(r, n), first)), f.at(a, f.mul(r, k))
                begin = f.at(bias, f.add(f.mul(r, step), first))
                with f.loop(0, k, TERMS) as at:
                    terms = f.smaller(f.sub(k, at), TERMS)
                    later = f.let(f"icmp sgt i64 {at}, 0")
                    more = f.let(f"or i1 {later}, {some}")
                    source = f.let(f"select i1 {later}, ptr {to}, ptr {begin}")
                    apart = f.let(f"select i1 {later}, i64 {n}, i64 {step}")
                    operands = f"ptr {to}, ptr {f.at(rows, at)}, ptr {f.at(panel, f.mul(at, width))}, i64 {terms}"
                    f.line(f"call void @tile_{h}_{columns}({operands}, i1 {more}, ptr {source}, i64 {apart})")
            start = stop

    block = max(1, _BLOCK // (4 * k * high)) * high
    with f.loop("%begin", "%end", block) as start:
        end = f.smaller(f.add(start, block), "%end")
        if n >= width:
            with f.loop(0, n - rest, width) as first:
                sweep(start, end, first, width)
        if rest:
            sweep(start, end, str(n - rest), rest)
    return native.compile_ir(module(*(_tile(f"tile_{h}_{c}", t) for (h, c), t in tiles.items()), f))


def _tile(name: str, t: Tile) -> Code:
    """A function (C, A, B, terms, whether something is added, what, the step of its rows)."""
    f = Code(name, "ptr %c, ptr %a, ptr %b, i64 %n, i1 %more, ptr %given, i64 %step", internal=True)
    sums = new_sums(f, t)
    with f.loop(0, "%n") as k:
        multiply(f, t, sums, f.at("%a", k), f.at("%b", f.mul(k, t.bk)), 0)
    finish(f, t, sums, lambda m, j: f.at("%given", f.add(f.mul("%step", m), j * machine().width)))
    return f
