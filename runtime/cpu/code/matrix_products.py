"""Matrix products in float32: both factors packed into panels, register tiles between them.

C [m, n] = A [m, k] B [k, n] (+ what is added), for matrices of which one side lies together.  Sums run in blocks of
TERMS terms.  For each block the factor with the shorter side is packed by all threads; then they take the panels of
the longer side, a few at a time: these are packed by the thread that multiplies them, into its cache.  An
element is a sum of blocks in order, whatever stands beside it and whoever computes it: the bits depend on neither
the number of threads nor m and n.  The layout of panels is that of Goto and van de Geijn, "Anatomy of High-Performance
Matrix Multiplication", ACM TOMS 34 (3), 2008.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ....language.types import Array
from ..device import native
from ..device.native import Call
from .emit import Code, module, thread
from .packing import transposed
from .tiles import TERMS, Tile, machine, multiply, new_sums, prefetched, store_tile

#: rows or columns of the shorter side that are packed at a time: 2 MiB
_SHARED = 2048
#: panels of the longer side that a thread takes at a time, at most, so that the shorter side's are read less often, and
#: parts that each thread has at least
_GROUP, _PARTS = 6, 8
#: floating-point operations below which one thread does all, and packing is not worth its workspace
_ALONE = 1 << 20


@dataclass(frozen=True)
class Shape:
    """Rows of a register tile, whose columns are a panel's of B; rows of a panel of A, columns of one of B."""

    high: int
    rows: int
    columns: int


def shape_of(m: int, n: int) -> Shape:
    """The shape of tiles for [m, n]: lower panels where there would be too few for the threads; three vectors, or two
    where there are few columns, of which a tile of one vector, slow, would be left."""
    width = machine().width
    vectors = 2 if -(-n // width) in (1, 2, 4) else 3
    high = 1 << (machine().sums // vectors).bit_length() - 1
    rows = width if m < 8 * width * native.threads() else 2 * width
    return Shape(high, rows, vectors * width)


def worth_packing(m: int, n: int, k: int) -> bool:
    """Whether a product is so large that it is worth several threads and the workspace of panels."""
    return 2 * m * n * k >= _ALONE


def room(m: int, n: int, k: int) -> int:
    """Elements of workspace for a product, no fewer than for smaller ones: the shorter side's panels, one a thread."""
    width = machine().width
    shared = min(m, n, _SHARED) + 3 * width
    # narrower panels are those of so few rows that a group is one of them (see shape_of)
    panels = native.threads() * _group(max(m, n), 2 * width) * 3 * width
    return (min(k, TERMS) + 1) * (shared + panels)


def needed(m: int, n: int, k: int) -> int:
    """Elements of workspace for one product; smaller ones, whose panels may be wider, can need more (see `room`)."""
    shape = shape_of(m, n)
    private, shared = (shape.rows, shape.columns) if m >= n else (shape.columns, shape.rows)
    most = _SHARED // shared * shared
    panels = -(-min(m, n, most) // shared)
    return (min(k, TERMS) + 1) * (native.threads() * _group(max(m, n), private) * private + panels * shared)


def _group(size: int, width: int) -> int:
    """How many panels of a side a thread takes at a time."""
    return max(1, min(_GROUP, -(-size // width) // (_PARTS * native.threads())))


def calls(a: Array, b: Array, c: Array, workspace: Array, more: Array | None = None) -> list[Call]:
    """c = a b (+ `more`: a row for all rows, or as many rows as c has; c itself, say).

    `workspace`: as many elements as `needed` says, or more.
    """
    (m, n), k = c.shape, a.shape[1]
    shape = shape_of(m, n)
    by_rows = m >= n
    sides = _side(a, shape.rows), _side(b.T, shape.columns)
    long, short = sides if by_rows else sides[::-1]
    terms, group = min(k, TERMS), _group(long.size, long.width)
    apart, private = (terms + 1) * short.width, (terms + 1) * long.width
    each = group * private
    shared, panels = workspace[native.threads() * each :], workspace[: native.threads() * each]
    # whole panels at a time
    most = _SHARED // short.width * short.width
    parallel = worth_packing(m, n, k)
    calls_made = []
    step = 0 if more is None or more.ndim < 2 else more.strides[0] // 4
    for k0 in range(0, k, TERMS):
        count = min(TERMS, k - k0)
        for s0 in range(0, short.size, most):
            size = min(most, short.size - s0)
            calls_made.append(short.packed(s0, k0, size, count, shared, apart, parallel=parallel))
            row, column = (0, s0) if by_rows else (s0, 0)
            target = c[row:, column:]
            added, apart_added = (target, c.strides[0] // 4) if k0 else (0, step)
            if more is not None and not k0:
                added = more[row:, column:] if more.ndim > 1 else more[column:]
            sizes = (m, size) if by_rows else (size, n)
            words = (target, long.part(0, k0), shared, panels, *sizes, c.strides[0] // 4, count)
            words += (added, apart_added, apart, private, long.steps[1], long.steps[0], group, long.ahead(count, group))
            kernel = _program(shape, sizes[1] % shape.columns, by_rows, long.turned)
            calls_made.append(Call(kernel, words, -(-long.size // (group * long.width)), parallel))
    return calls_made


def packed(matrix: Array, width: int, to: Array, apart: int, *, parallel: bool = True) -> Call:
    """The call that packs a matrix [side, terms] of float32, of which one side lies together, into panels of `width`,
    `apart` elements from each other."""
    size, terms = matrix.shape
    return _side(matrix, width).packed(0, 0, size, terms, to, apart, parallel=parallel)


def _side(matrix: Array, width: int) -> _Side:
    steps = tuple(s // 4 for s in matrix.strides)
    turned = steps[0] != 1 and matrix.shape[0] > 1 if matrix.shape[1] == 1 or steps[1] == 1 else False
    return _Side(matrix, steps, width, turned)


@dataclass(frozen=True)
class _Side:
    """A factor as [side, terms], its steps in elements, the width of its panels; `turned`: a row's terms lie together,
    where a panel has the rows' elements for each term together."""

    matrix: Any
    steps: tuple[int, ...]
    width: int
    turned: bool

    @property
    def size(self) -> int:
        """Rows of A, or columns of B."""
        return self.matrix.shape[0]

    def part(self, first: int, term: int) -> Array:
        """From an element on."""
        return self.matrix[first:, term:]

    def ahead(self, terms: int, panels: int) -> int:
        """Elements from what is packed to what will be: the next panels, unless these are few and more terms follow."""
        few = self.size < 2 * panels * self.width * native.threads() * _PARTS
        return terms * self.steps[1] if few and self.matrix.shape[1] > terms else panels * self.width * self.steps[0]

    def packed(self, first: int, term: int, size: int, terms: int, to: Array, apart: int, *, parallel: bool) -> Call:
        """The call that packs panels, `apart` elements from each other."""
        words = (self.part(first, term), to, *self.steps, size, terms, apart, self.ahead(terms, 1))
        work = -(-size // self.width) if self.turned else terms
        return Call(native.compile_ir(_panels(self.width, self.turned)), words, work, parallel)


# -- packing -----------------------------------------------------------------------------------------------------------


def _pack(width: int, turned: bool) -> Code:
    """A function that fills one panel: (panel, source, step from term to term, or from row to row where `turned`, rows
    that there are, terms, elements ahead).

    It prefetches what is so far ahead in the source.  Rows behind the last get any numbers.
    """
    arguments = "ptr noalias %to, ptr %source, i64 %step, i64 %rows, i64 %terms, i64 %ahead"
    f = Code(f"pack_{int(turned)}", arguments, internal=True)
    if turned:
        _pack_turned(f, width)
        return f
    full = f.let(f"icmp eq i64 %rows, {width}")
    with f.when(full), f.loop(0, "%terms") as p:
        source = f.at("%source", f.mul(p, "%step"))
        f.copy(f.at("%to", f.mul(p, width)), source, 4 * width)
        prefetched(f, f.at(source, "%ahead"))
        if 4 * width > 64:
            prefetched(f, f.at(f.at(source, "%ahead"), width - 1))
    with f.unless(full), f.loop(0, "%terms") as p:
        f.copy(f.at("%to", f.mul(p, width)), f.at("%source", f.mul(p, "%step")), f.mul("%rows", 4))
    return f


def _pack_turned(f: Code, width: int) -> None:
    """Packs from rows: squares of a vector's width are transposed."""
    w, vector = machine().width, machine().vector
    whole = f.mul(f.div("%terms", w), w)
    with f.loop(0, "%rows", w) as j:
        last = f.add("%rows", -1)
        rows = [f.at("%source", f.mul(f.smaller(f.add(j, i), last), "%step")) for i in range(w)]
        to = f.at("%to", j)
        with f.loop(0, whole, w) as p:
            for r in rows:
                prefetched(f, f.at(f.at(r, p), "%ahead"))
            square = [f.let(f"load {vector}, ptr {f.at(r, p)}, align 4") for r in rows]
            for e, x in enumerate(transposed(f, square)):
                f.line(f"store {vector} {x}, ptr {f.at(to, f.mul(f.add(p, e), width))}, align 4")
        with f.loop(whole, "%terms") as p:
            line = f.at(to, f.mul(p, width))
            for i, r in enumerate(rows):
                f.line(f"store float {f.word(r, p, 'float')}, ptr {f.at(line, i)}, align 4")


@functools.cache
def _panels(width: int, turned: bool) -> str:
    """IR of a kernel that packs panels: (source, panels, step of a side, of terms, size, terms, elements apart, ahead).

    Its work are panels where rows are turned, else terms: a row of the source is read from its begin to its end.
    """
    f = Code()
    source, to = (f.word("%args", i, "ptr") for i in range(2))
    side, term, size, terms, apart = (f.word("%args", i) for i in range(2, 7))
    if turned:
        with f.loop("%begin", "%end") as j:
            first = f.mul(j, width)
            rows = f.smaller(f.sub(size, first), width)
            operands = f"ptr {f.at(to, f.mul(j, apart))}, ptr {f.at(source, f.mul(first, side))}, i64 {side}"
            f.line(f"call void @pack_1({operands}, i64 {rows}, i64 {terms}, i64 {f.word('%args', 7)})")
        return module(_pack(width, True), f)
    full = f.div(size, width)
    rest = f.sub(size, f.mul(full, width))
    with f.loop("%begin", "%end") as p:
        row, line = f.at(source, f.mul(p, term)), f.at(to, f.mul(p, width))
        with f.loop(0, full) as j:
            f.copy(f.at(line, f.mul(j, apart)), f.at(row, f.mul(j, width)), 4 * width)
        f.copy(f.at(line, f.mul(full, apart)), f.at(row, f.mul(full, width)), f.mul(rest, 4))
    return module(f)


# -- multiplying -------------------------------------------------------------------------------------------------------


@functools.cache
def _program(shape: Shape, narrow: int, by_rows: bool, turned: bool) -> int:
    """The address of a kernel over groups of panels of the longer side.  `narrow`: columns of B's last panel, or 0;
    `by_rows`: the longer side is A's; `turned`: see `_Side`.

    (C, the longer side's factor, panels of the shorter one, a group for each thread, m, n, step of C's rows, terms,
    what is added or null, step of its rows, elements from panel to panel of the shorter side, and of the longer one,
    step of the longer side's terms, and of itself, panels of a group, elements ahead)
    """
    return native.compile_ir(_Multiplying(shape, narrow, by_rows, turned).text())


class _Multiplying:
    """The code of that kernel."""

    def __init__(self, shape: Shape, narrow: int, by_rows: bool, turned: bool) -> None:
        self.shape, self.by_rows, self.turned = shape, by_rows, turned
        f = self.f = Code()
        self.c, self.source, self.shared, private = (f.word("%args", i, "ptr") for i in range(4))
        self.m, self.n, self.step, terms = (f.word("%args", i) for i in range(4, 8))
        self.added = f.word("%args", 8, "ptr")
        self.added_step, self.apart, self.own_apart, self.term, self.side = (f.word("%args", i) for i in range(9, 14))
        self.group, self.ahead = (f.word("%args", i) for i in range(14, 16))
        more = f.let(f"icmp ne ptr {self.added}, null")
        self.panels = f.at(private, f.mul(thread(f), self.own_apart, self.group))
        self.meeting = Meeting(f, shape, (1, shape.rows), narrow, terms, more, self.step, self.added_step)

    def text(self) -> str:
        """IR of the kernel and of what it calls."""
        f, s = self.f, self.shape
        width, length = (s.rows, self.m) if self.by_rows else (s.columns, self.n)
        other, across = (s.columns, self.n) if self.by_rows else (s.rows, self.m)
        count, others = (f.div(f.add(size, w - 1), w) for size, w in ((length, width), (across, other)))
        with f.loop("%begin", "%end") as item:
            low = f.mul(item, self.group)
            high = f.smaller(f.add(low, self.group), count)
            with f.loop(low, high) as i:
                self._pack(i, low, width, length)
            with f.loop(0, others) as j, f.loop(low, high) as i:
                private = f.at(self.panels, f.mul(f.sub(i, low), self.own_apart))
                panel = f.at(self.shared, f.mul(j, self.apart))
                if self.by_rows:
                    self._meet(private, i, panel, j)
                else:
                    self._meet(panel, j, private, i)
        return module(_pack(width, self.turned), *self.meeting.tiles(), f)

    def _pack(self, i: str, low: str, width: int, length: str) -> None:
        """Panel i of the longer side, of a group that begins with `low`."""
        f = self.f
        first = f.mul(i, width)
        there = f.smaller(f.sub(length, first), width)
        to, source = f.at(self.panels, f.mul(f.sub(i, low), self.own_apart)), f.at(self.source, f.mul(first, self.side))
        step = self.side if self.turned else self.term
        operands = f"ptr {to}, ptr {source}, i64 {step}, i64 {there}, i64 {self.meeting.terms}, i64 {self.ahead}"
        f.line(f"call void @pack_{int(self.turned)}({operands})")

    def _meet(self, a: str, i: str, b: str, j: str) -> None:
        """Panel i of A, at `a`, and panel j of B, at `b`."""
        f, s = self.f, self.shape
        row, column = f.mul(i, s.rows), f.mul(j, s.columns)
        places = (self.c, self.step), (self.added, self.added_step)
        to, sources = (f.at(p, f.add(f.mul(row, step), column)) for p, step in places)
        last = f.let(f"icmp slt i64 {f.sub(self.n, column)}, {s.columns}")
        self.meeting.meet(a, f.smaller(f.sub(self.m, row), s.rows), b, last, to, sources)


@dataclass(frozen=True)
class Meeting:
    """Code that multiplies a panel of A with one of B.

    `steps`: elements from a panel's row, and from its term, to the next, in A; `narrow`: columns of B's last panel,
    where it has fewer, or 0; `terms`; `more`: whether something is added (i1); `step`: elements from row to row of C;
    `added_step`: of what is added.
    """

    f: Code
    shape: Shape
    steps: tuple[int, int]
    narrow: int
    terms: str
    more: str
    step: str
    added_step: str

    def meet(self, a: str, rows: str, b: str, last: str, to: str, given: str) -> None:
        """The tiles of C at `to`: of so many rows of the panel at `a`, and of the panel at `b`, `last` (i1) or not.

        What is added lies at `given`.
        """
        if self.narrow:
            with self.f.when(last):
                self._tiles(a, rows, b, self.narrow, to, given)
            with self.f.unless(last):
                self._tiles(a, rows, b, self.shape.columns, to, given)
        else:
            self._tiles(a, rows, b, self.shape.columns, to, given)

    def _heights(self) -> list[int]:
        """Rows of tiles, the largest first, that any number is a sum of."""
        return [1 << i for i in reversed(range(self.shape.high.bit_length()))]

    def _tiles(self, a: str, rows: str, b: str, wide: int, to: str, given: str) -> None:
        f = self.f
        start = "0"
        for h in self._heights():
            stop = f.add(start, f.mul(f.div(f.sub(rows, start), h), h))
            with f.loop(start, stop, h) as t:
                c, added = f.at(to, f.mul(t, self.step)), f.at(given, f.mul(t, self.added_step))
                row = f.at(a, f.mul(t, self.steps[0]))
                operands = f"ptr {c}, ptr {row}, ptr {b}, i64 {self.terms}, i1 {self.more}, ptr {added}"
                f.line(f"call void @tile_{h}_{wide}({operands}, i64 {self.added_step}, i64 {self.step})")
            start = stop

    def tiles(self) -> list[Code]:
        """The functions that `meet` calls."""
        s, widths = self.shape, sorted({self.shape.columns, self.narrow} - {0})
        tiles_of_all = (Tile(h, c, *self.steps, s.columns, 0, 1) for h in self._heights() for c in widths)
        return [_tile(f"tile_{t.rows}_{t.columns}", t) for t in tiles_of_all]


def _tile(name: str, t: Tile) -> Code:
    """A function (C, A, B, terms, whether something is added, what, the step of its rows, of C's rows)."""
    arguments = "ptr %c, ptr %a, ptr %b, i64 %n, i1 %more, ptr %given, i64 %step, i64 %rows"
    f = Code(name, arguments, internal=True)
    sums = new_sums(f, t)
    for m in range(t.rows):
        for at in (0, t.columns - 1):
            prefetched(f, f.at("%c", f.add(f.mul("%rows", m), at)), write=True)
    unroll = 4
    whole = f.mul(f.div("%n", unroll), unroll)
    with f.loop(0, whole, unroll) as k:
        a, b = f.at("%a", f.mul(k, t.ak)), f.at("%b", f.mul(k, t.bk))
        for u in range(unroll):
            multiply(f, t, sums, a, b, u)
    with f.loop(whole, "%n") as k:
        multiply(f, t, sums, f.at("%a", f.mul(k, t.ak)), f.at("%b", f.mul(k, t.bk)), 0)
    width = machine().width
    store_tile(
        f,
        t,
        sums,
        lambda m, j: f.at("%given", f.add(f.mul("%step", m), j * width)),
        lambda m, j: f.at("%c", f.add(f.mul("%rows", m), j * width)),
    )
    return f
