"""Building blocks of attention's kernels: products of small matrices, block transposes, exp2.

A panel is a few vectors of queries.  Its tiles have a row for each key and a lane for each query, so that the largest
score, the sum and the weights of a query are operations between vectors; of the products only the panel's own rows are
packed, keys and values are read where they lie.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..code import emit
from ..code.packing import both, lanes_below, transposed
from ..code.tiles import Tile, finish, load_lanes, machine, multiply, new_sums, store_lanes
from ..loops import expressions

#: (2ᶠ - 1) / f on |f| ≤ ½, from the highest power; the error of 2ᶠ is 9.2e-8 (fitted by reweighted least squares)
_POWER = (0.001326472876860042, 0.00967151318311527, 0.05550733744478903, 0.24022242077091216, 0.693146977595113)
#: 1.5 · 2²³ + 127: adding it rounds to an integer, whose last bits are the exponent of a power of two
_WHOLE = 12583039.0
#: keys of a tile, at most
KEYS = 128


@functools.cache
def vectors() -> int:
    """Vectors of a panel, at most."""
    return 4 if machine().sums >= 24 else 2


def lanes() -> int:
    """Queries of a panel, at most: the elements from row to row of a tile."""
    return vectors() * machine().width


def whole(n: int) -> int:
    """Up to the next multiple of a vector."""
    width = machine().width
    return -(-n // width) * width


class Code(expressions.Code):
    """A function over vectors of float32."""

    def __init__(self, name: str = "kernel", arguments: str = "ptr %args, i64 %begin, i64 %end") -> None:
        super().__init__(machine().width)
        emit.Code.__init__(self, name, arguments, internal=name != "kernel")

    def load(self, at: str) -> str:
        """A vector."""
        return self.let(f"load {machine().vector}, ptr {at}, align 4")

    def store(self, value: str, at: str) -> None:
        """Writes a vector."""
        self.line(f"store {machine().vector} {value}, ptr {at}, align 4")

    def splat(self, value: str) -> str:
        """A float in all lanes."""
        return self.spread(value, "float", machine().width)

    def run(self, function: str, *given: tuple[str, str | int]) -> None:
        """A call of a function of this module: (type, value)."""
        self.line(f"call void @{function}({', '.join(f'{t} {v}' for t, v in given)})")

    def larger(self, a: int | str, b: int | str) -> str:
        """The larger number."""
        return self.intrinsic("smax.i64", "i64", ("i64", a), ("i64", b))

    def most(self, a: str, b: str) -> str:
        """The larger of each lane; b where one is NaN."""
        return self.select(self.op("fcmp ogt", "float", a, b), "float", a, b)

    def power(self, x: str) -> str:
        """2ˣ for x < 128, 0 for x < -126; NaN stays."""
        below = self.op("fcmp olt", "float", x, self.f32(-126))
        t = self.select(below, "float", self.f32(-126), x)
        rounded = self.op("fadd", "float", t, self.f32(_WHOLE))
        part = self.op("fsub", "float", t, self.op("fsub", "float", rounded, self.f32(_WHOLE)))
        p = self.single(part).horner((*_POWER, 1)).name
        bits = self.op("shl", "i32", self.convert("bitcast", rounded, "float", "i32"), self.i32(23))
        result = self.op("fmul", "float", p, self.convert("bitcast", bits, "i32", "float"))
        return self.select(below, "float", self.f32(0), result)

    def sum(self, x: str) -> str:
        """The sum of a vector's lanes: its halves are added, then their halves, and so on."""
        w, v = machine().width, machine().vector
        size = w // 2
        while size:
            order = ", ".join(f"i32 {(i + size) % w}" for i in range(w))
            other = self.let(f"shufflevector {v} {x}, {v} {x}, <{w} x i32> <{order}>")
            x = self.op("fadd", "float", x, other)
            size //= 2
        return self.let(f"extractelement {v} {x}, i64 0")

    def turn_in(
        self, source: str, apart: int | str, there: str, length: int | str, take: Callable[[str, str, str], None]
    ) -> None:
        """Rows of a matrix as lanes: `take(first lane, column, vector)` for each column; 0 in lanes of absent rows.

        Columns go up to the next whole vector, as zeros; there are `there` rows, `apart` elements from each other.
        """
        w = machine().width
        with self.loop(0, there, w) as first:
            rows = self._rows(source, apart, first, there)
            with self.loop(0, length, w) as column:
                some = lanes_below(self, self.sub(length, column))
                square = [load_lanes(self, self.at(row, column), both(self, some, exists)) for row, exists in rows]
                for i, x in enumerate(transposed(self, square)):
                    take(first, self.add(column, i), x)

    def turn_out(
        self,
        tile: str,
        target: str,
        apart: int | str,
        there: str,
        length: int | str,
        change: Callable[[str, str, str], str],
        more: str = "false",
    ) -> None:
        """The opposite: vectors of a tile, up to the next whole number of them, become rows of a matrix.

        `change(first lane, column, vector)` is what is written; it is added to what is there where `more`.
        """
        w, bits = machine().width, f"<{machine().width} x i1>"
        with self.loop(0, there, w) as first:
            rows = self._rows(target, apart, first, there)
            with self.loop(0, length, w) as column:
                some = lanes_below(self, self.sub(length, column))
                at = [self.at(tile, self.add(self.mul(self.add(column, i), lanes()), first)) for i in range(w)]
                square = [change(first, self.add(column, i), self.load(a)) for i, a in enumerate(at)]
                for (row, exists), x in zip(rows, transposed(self, square), strict=True):
                    to, mask = self.at(row, column), both(self, some, exists)
                    bits_masked = self.let(f"select i1 {more}, {bits} {mask}, {bits} zeroinitializer")
                    store_lanes(self, self.op("fadd", "float", load_lanes(self, to, bits_masked), x), to, mask)

    def _rows(self, start: str, apart: int | str, first: str, there: str) -> list[tuple[str, str]]:
        """A vector's number of rows from the row `first` on: where they are, and whether there are that many."""
        left = self.sub(there, first)
        return [
            (self.at(start, self.mul(self.add(first, i), apart)), self.let(f"icmp sgt i64 {left}, {i}"))
            for i in range(machine().width)
        ]


def product(name: str, columns: int, steps: tuple[int, int, int, int]) -> list[Code]:
    """Functions for C[m, j] (+)= Σ_k A[m · am + k · ak] · B[k · bk + j]; the last one is `name`.

    (C, A, B, rows, terms, whether C is added to); `columns` of C, steps: am, ak, bk and the elements between C's rows.
    """
    am, ak, bk, ck = steps
    width = machine().width
    f = Code(name, "ptr %c, ptr %a, ptr %b, i64 %rows, i64 %terms, i1 %more")
    codes: dict[tuple[int, int], Code] = {}
    for first in range(0, columns, vectors() * width):
        wide = min(columns - first, vectors() * width)
        high = _rows(-(-wide // width))
        start = "0"
        for h in [high, *(h for h in (8, 4, 2, 1) if h < high)]:
            if (h, wide) not in codes:
                codes[h, wide] = _register_tile(f"{name}_{h}_{wide}", Tile(h, wide, am, ak, bk, ck, 1))
            stop = f.add(start, f.mul(f.div(f.sub("%rows", start), h), h))
            with f.loop(start, stop, h) as r:
                to, rows = f.at("%c", f.add(f.mul(r, ck), first)), f.at("%a", f.mul(r, am))
                arguments = (("ptr", to), ("ptr", rows), ("ptr", f.at("%b", first)), ("i64", "%terms"), ("i1", "%more"))
                f.run(f"{name}_{h}_{wide}", *arguments)
            start = stop
    return [*codes.values(), f]


def _rows(vectors: int) -> int:
    """Rows of a register tile: its sums, a row of B and an element of A fill the registers (and 14 rows are enough)."""
    return min((machine().sums + 3) // vectors - 1, 14)


def _register_tile(name: str, t: Tile) -> Code:
    f = Code(name, "ptr %c, ptr %a, ptr %b, i64 %n, i1 %more")
    sums = new_sums(f, t)
    with f.loop(0, "%n") as k:
        multiply(f, t, sums, f.at("%a", f.mul(k, t.ak)), f.at("%b", f.mul(k, t.bk)), 0)
    finish(f, t, sums, lambda m, j: f.at("%c", m * t.c + j * machine().width))
    return f
