"""The output of a convolution with 3x3 windows, or the gradient of its input, by Winograd's algorithm.

The windows' factors are made first, those of a block of the result's channels at a time.  Then each thread takes some
tiles: it makes their patches' factors in workspace of its own, multiplies them with the windows', one panel of channels
after the other, and makes results of the products.  A product is a sum over channels in blocks of TERMS, whatever tiles
are beside it: the bits depend on neither the number of threads nor the size of a block.
"""

from __future__ import annotations

import functools
from typing import Any

from ....language.types import Array
from ...shared.convolved import Convolved
from ..code import matrix_products
from ..code.emit import Code, module, thread
from ..code.matrix_products import Meeting, Shape
from ..code.tiles import TERMS, load, machine, store
from ..code.winograd import (
    PRODUCTS,
    WINDOW,
    Places,
    Tiling,
    load_each,
    of_patch,
    of_window,
    plus,
    store_each,
    to_tile,
    vectors,
)
from ..device import native
from ..device.native import Call

#: bytes of windows' factors that are made at a time
_FACTORS = 1 << 23
#: tiles that a thread takes at a time, at most; bytes of their patches' factors
_GROUP, _PATCHES = 64, 1 << 21
#: elements between what would otherwise lie in the same sets of a cache
_APART = 16
#: tiles, and channels of either side, from which on transformations cost less than they save
ENOUGH, SMALLEST = 128, 16


def suits(c: Convolved) -> bool:
    """Whether the algorithm computes it, and faster than as many multiplications as the definition has."""
    g, w = c.geometry, c.geometry.window
    plain = w.kernel == (WINDOW, WINDOW) and {*w.strides, *w.dilations} == {1} and g.group == 1
    return plain and min(g.cg, g.mg) >= SMALLEST and tiling(c).count >= ENOUGH


def tiling(c: Convolved) -> Tiling:
    """The tiling of the output, or of the input where its gradient is computed."""
    g, w = c.geometry, c.geometry.window
    if c.kind == "input":
        return Tiling(g.batch, w.out, w.inp, tuple(WINDOW - 1 - b for b in w.begin))
    return Tiling(g.batch, w.inp, w.out, w.begin)


def whole(count: int) -> int:
    """Elements of as many vectors as hold `count`."""
    return -(-count // machine().width) * machine().width


class Winograd:
    """The product "output" or "input" of a convolution that the algorithm suits."""

    def __init__(self, c: Convolved) -> None:
        g = c.geometry
        self.kind, self.tiling = c.kind, tiling(c)
        self.depth, self.width = (g.mg, g.cg) if c.kind == "input" else (g.cg, g.mg)
        self.shape = matrix_products.shape_of(self.tiling.count, self.width)
        self.pitch = whole(self.depth) + _APART
        self.parallel = matrix_products.worth_packing(g.mg, g.rows, self.tiling.count)

    @functools.cached_property
    def block(self) -> int:
        """Channels of the result whose windows' factors are made at a time: whole panels."""
        columns = self.shape.columns
        panels = -(-self.width // columns)
        most = max(1, _FACTORS // (4 * PRODUCTS * self.depth * columns))
        blocks = -(-panels // most)
        return -(-panels // blocks) * columns

    @functools.cached_property
    def group(self) -> int:
        """Tiles that a thread takes at a time: as many for all, where they are few."""
        count, threads = self.tiling.count, native.threads()
        most = min(_GROUP, max(self.shape.high, _PATCHES // (4 * PRODUCTS * self.pitch)))
        groups = -(-count // most)
        return -(-count // (-(-groups // threads) * threads))

    @property
    def _steps(self) -> tuple[int, int]:
        """Elements from a tile's factor, and from its product, to the next one."""
        return self.group * self.pitch + _APART, self.group * self.shape.columns + _APART

    def _own(self) -> int:
        """Elements of a thread's workspace: zeros, patches' factors, products."""
        return self.pitch + PRODUCTS * sum(self._steps)

    def scratch(self) -> list[int]:
        """Elements of the buffers: windows' factors, and the threads' own."""
        return [PRODUCTS * self.depth * self.block, native.threads() * self._own()]

    def calls(
        self, source: Array, w: Array, result: Array, bias: Array | None, factors: Array, own: Array
    ) -> list[Call]:
        """All calls of the convolution, in order."""
        windows, flat, sequence = w.reshape(-1), result.reshape(-1), []
        size = WINDOW * WINDOW
        column, term = (size, self.width * size) if self.kind == "input" else (self.depth * size, size)
        for first in range(0, self.width, self.block):
            count = min(self.block, self.width - first)
            panels = -(-count // self.shape.columns)
            make = native.compile_ir(_windows(self.shape.columns, self.kind == "input"))
            words: tuple[Any, ...] = (windows[first * column :], factors, count, self.depth, column, term)
            sequence.append(Call(make, words, panels * self.depth, self.parallel))
            kernel = _program(self.shape, count % self.shape.columns, self.depth, self.pitch, bias is not None)
            initial = 0 if bias is None else bias[first:]
            words = (source, factors, flat[first:], initial, own, *self.tiling.words, self.tiling.count, self.group)
            words += (*self._steps, self._own(), self.width, panels)
            sequence.append(Call(kernel, words, -(-self.tiling.count // self.group), self.parallel))
        return sequence


@functools.cache
def _windows(columns: int, turned: bool) -> str:
    """IR over panels and terms: (weight, factors, channels of the result, of the source, steps of both in the weight).

    Factors are [panel, product, term, channel]; channels behind the last one get any numbers.  `turned`: windows are
    read from their end.
    """
    f = Code()
    width, size = machine().width, WINDOW * WINDOW
    w, to = (f.word("%args", i, "ptr") for i in range(2))
    count, depth, column, term = (f.word("%args", i) for i in range(2, 6))
    last = f.add(count, -1)
    with f.loop("%begin", "%end") as item:
        panel = f.div(item, depth)
        k = f.sub(item, f.mul(panel, depth))
        first = f.mul(panel, columns)
        source = f.at(w, f.mul(k, term))
        out = f.at(to, f.mul(f.add(f.mul(panel, PRODUCTS, depth), k), columns))
        with f.loop(0, columns, width) as v:
            channels = [f.smaller(f.add(first, v, i), last) for i in range(width)]
            windows = [f.at(source, f.mul(c, column)) for c in channels]
            taps = []
            for t in range(size):
                tap = "poison"
                for i, window in enumerate(windows):
                    one = f.word(window, size - 1 - t if turned else t, "float")
                    tap = f.let(f"insertelement {machine().vector} {tap}, float {one}, i64 {i}")
                taps.append(tap)
            square = [taps[i : i + WINDOW] for i in range(0, size, WINDOW)]
            store_each(f, of_window(f, square), f.at(out, v), f.mul(depth, columns))
    return module(f)


@functools.cache
def _program(shape: Shape, narrow: int, depth: int, pitch: int, bias: bool) -> int:
    """The address of a kernel over groups of tiles.  `narrow`: channels of the last panel, or 0; `depth`: channels of
    the source; `pitch`: elements of a tile's factors for one product.

    (source, windows' factors, result, bias, the threads' own, a tiling's words, tiles, tiles of a group, elements from
    a factor and from a product to the next, elements of a thread's own, channels of the result, panels)
    """
    f = Code()
    source, windows, result, initial, work = (f.word("%args", i, "ptr") for i in range(5))
    places, after = Places(f, 5), 5 + Places.WORDS
    tiles, group, apart, out_apart, size, channels, panels = (f.word("%args", after + i) for i in range(7))
    work = f.at(work, f.mul(thread(f), size))
    patches = f.at(work, pitch)
    products = f.at(patches, f.mul(apart, PRODUCTS))
    f.zero(work, 4 * pitch)
    with f.loop("%begin", "%end") as item:
        first = f.mul(item, group)
        there = f.smaller(f.sub(tiles, first), group)
        with f.loop(0, there) as t:
            patch = places.patch(places.tile(f.add(first, t)), source, depth, work)
            to = f.at(patches, f.mul(t, pitch))
            for v, lanes in vectors(f, depth):
                transformed = of_patch(f, [[load(f, f.at(p, v), lanes) for p in line] for line in patch])
                store_each(f, transformed, f.at(to, v), apart)
        with f.loop(0, panels) as j:
            last = f.let(f"icmp eq i64 {f.add(j, 1)}, {panels}")
            with f.loop(0, PRODUCTS) as number, f.loop(0, depth, TERMS) as k:
                terms = f.smaller(f.sub(depth, k), TERMS)
                more = f.let(f"icmp sgt i64 {k}, 0")
                meeting = Meeting(f, shape, (pitch, 1), narrow, terms, more, str(shape.columns), str(shape.columns))
                factor = f.add(f.mul(f.add(f.mul(j, PRODUCTS), number), depth), k)
                a, b = f.at(patches, f.add(f.mul(number, apart), k)), f.at(windows, f.mul(factor, shape.columns))
                to = f.at(products, f.mul(number, out_apart))
                meeting.meet(a, there, b, last, to, to)
            begin = f.mul(j, shape.columns)
            target, added = f.at(result, begin), f.at(initial, begin) if bias else ""
            with f.loop(0, there) as t:
                at = f.at(products, f.mul(t, shape.columns))
                written = list(places.written(places.tile(f.add(first, t)), target, channels))
                if narrow:
                    with f.when(last):
                        _write(f, narrow, at, out_apart, added, written)
                    with f.unless(last):
                        _write(f, shape.columns, at, out_apart, added, written)
                else:
                    _write(f, shape.columns, at, out_apart, added, written)
    return native.compile_ir(module(*meeting.tiles(), f))


def _write(
    f: Code, columns: int, products: str, apart: str, bias: str, written: list[tuple[int, int, str, str]]
) -> None:
    """Some channels of a tile's results.  `bias`: what is added, or ""; `written`: see `Places.written`."""
    for v, lanes in vectors(f, columns):
        results = to_tile(f, load_each(f, f.at(products, v), apart))
        added = load(f, f.at(bias, v), lanes) if bias else ""
        for i, j, inside, to in written:
            value = plus(f, results[i][j], added) if bias else results[i][j]
            with f.when(inside):
                store(f, value, f.at(to, v), lanes)
