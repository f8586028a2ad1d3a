"""The gradient of the weight of a convolution with 3x3 windows by Winograd's algorithm.

For some tiles at a time, the factors of the source's patches and of the output's gradient are written as panels; then
each of the 16 products is one of matrices, the source's channels by the output's, whose sums over tiles stay in
workspace until the last tile.  The source's channels are taken a block at a time, so that the sums stay in a cache.
What is summed in which order depends on the shapes alone.
"""

from __future__ import annotations

import functools

from ....language.types import Array
from ...shared.convolved import Convolved
from ..code import matrix_products
from ..code.emit import Code, module, thread
from ..code.matrix_products import Meeting, Shape
from ..code.tiles import TERMS, load, machine
from ..code.winograd import PRODUCTS, WINDOW, Places, load_each, of_patch, of_tile, store_each, to_window, vectors
from ..device import native
from ..device.native import Call
from .winograd import tiling, whole

#: bytes of the sums, at most
_SUMS = 1 << 22
#: bytes of the factors of the tiles that are taken at a time, at least and at most; between them no more than the
#: operands have, so that a small network's workspace is not most of its memory
_FACTORS = 1 << 18, 1 << 22
#: channels of the source whose sums become windows in one piece of work
_PIECE = 16


class WinogradWeight:
    """The product "weight" of a convolution that the algorithm suits."""

    def __init__(self, c: Convolved) -> None:
        g = c.geometry
        self.tiling, self.channels, self.width = tiling(c), g.cg, g.mg
        self.pitch = whole(self.width)
        self.operands = c.bytes
        self.block = self._block()
        columns = matrix_products.shape_of(self.block, self.width)
        #: lower panels: the bits do not depend on how many channels are in one
        self.shape = Shape(columns.high, machine().width, columns.columns)
        self.parallel = matrix_products.worth_packing(g.mg, g.rows, self.tiling.count)

    def _block(self) -> int:
        """Channels of the source at a time: whole vectors."""
        width = machine().width
        parts = -(-self.channels // width)
        most = max(1, _SUMS // (4 * PRODUCTS * self.pitch * width))
        return -(-parts // -(-parts // most)) * width

    @functools.cached_property
    def _panels(self) -> tuple[int, int]:
        """Panels of a block of the source's channels, and of the output's."""
        return -(-self.block // self.shape.rows), -(-self.width // self.shape.columns)

    @functools.cached_property
    def chunk(self) -> int:
        """Tiles at a time: as many for all."""
        least, most = _FACTORS
        size = min(max(least, self.operands), most)
        tiles = max(1, size // (4 * PRODUCTS * (self.block + self.pitch)))
        return -(-self.tiling.count // -(-self.tiling.count // tiles))

    @property
    def _apart(self) -> tuple[int, int]:
        """Elements from the factors of a product to those of the next, of the source and of the gradient."""
        (a, b), s = self._panels, self.shape
        return self.chunk * a * s.rows + s.rows, self.chunk * b * s.columns + s.rows

    @property
    def _zeros(self) -> int:
        """Elements of a pixel of zeros."""
        return max(self.block, self.pitch)

    def scratch(self) -> list[int]:
        """Elements of the buffers: sums, factors of the source and of the gradient, zeros for each thread."""
        return [
            PRODUCTS * self.block * self.pitch,
            *(PRODUCTS * n for n in self._apart),
            native.threads() * self._zeros,
        ]

    def calls(self, x: Array, y: Array, w: Array, sums: Array, seen: Array, given: Array, zeros: Array) -> list[Call]:
        """All calls of the gradient, in order."""
        t, s, sequence = self.tiling, self.shape, []
        source, target = x.reshape(-1), w.reshape(-1)
        for first in range(0, self.channels, self.block):
            count = min(self.block, self.channels - first)
            panels = -(-count // s.rows)
            factors = _factors(s, count, self.width)
            for begin in range(0, t.count, self.chunk):
                tiles = min(self.chunk, t.count - begin)
                words = (source[first:], y, seen, given, zeros, *t.words, begin, self.chunk, *self._apart)
                words += (self.channels, self._zeros)
                sequence.append(Call(factors, words, tiles, self.parallel))
                words = (seen, given, sums, tiles, self.chunk, *self._apart, self.pitch, count, panels)
                words += (self._panels[1], self.block, int(begin > 0))
                multiply = _program(s, self.width % s.columns)
                sequence.append(Call(multiply, words, PRODUCTS * panels, self.parallel))
            words = (sums, target[first * WINDOW * WINDOW :], count, self.channels, self.block, self.pitch)
            pieces = -(-count // _PIECE) * -(-self.width // machine().width)
            sequence.append(Call(native.compile_ir(_windows(self.width)), words, pieces, self.parallel))
        return sequence


@functools.cache
def _factors(shape: Shape, channels: int, width: int) -> int:
    """The address of a kernel over tiles of a chunk.  `channels`: of the source's block; `width`: the gradient's.

    (source, gradient, factors of both, zeros for each thread, a tiling's words, the chunk's first tile, its tiles,
    elements from product to product of both factors, the source's channels, elements of a thread's zeros)

    A panel of factors has the channels of one tile together, then those of the next.
    """
    f = Code()
    source, gradient, seen, bias, zeros = (f.word("%args", i, "ptr") for i in range(5))
    places, after = Places(f, 5), 5 + Places.WORDS
    begin, chunk, seen_apart, given_apart, total, size = (f.word("%args", after + i) for i in range(6))
    zeros = f.at(zeros, f.mul(thread(f), size))
    f.zero(zeros, f.mul(size, 4))
    with f.loop("%begin", "%end") as number:
        tile = places.tile(f.add(begin, number))
        patch, pixels = places.patch(tile, source, total, zeros), places.gradient(tile, gradient, width, zeros)
        sides = (
            (of_patch, patch, seen, seen_apart, channels, shape.rows),
            (of_tile, pixels, bias, given_apart, width, shape.columns),
        )
        for factors, square, to, apart, count, wide in sides:
            for v, lanes in vectors(f, count):
                transformed = factors(f, [[load(f, f.at(p, v), lanes) for p in line] for line in square])
                panel = f.div(v, wide)
                at = f.add(f.mul(f.add(f.mul(panel, chunk), number), wide), f.sub(v, f.mul(panel, wide)))
                store_each(f, transformed, f.at(to, at), apart)
    return native.compile_ir(module(f))


@functools.cache
def _program(shape: Shape, narrow: int) -> int:
    """The address of a kernel over products and panels of the source's channels.  `narrow`: channels of the
    gradient's last panel, or 0.

    (factors of the source, of the gradient, sums, tiles, tiles of a chunk, elements from product to product of both
    factors, elements of a row of sums, the source's channels, their panels, the gradient's, rows of a product's sums,
    whether the sums are added to)
    """
    f = Code()
    seen, gradients, sums = (f.word("%args", i, "ptr") for i in range(3))
    tiles, chunk, seen_apart, given_apart, pitch, count, panels, others, rows, more = (
        f.word("%args", i) for i in range(3, 13)
    )
    more = f.let(f"icmp ne i64 {more}, 0")
    with f.loop("%begin", "%end") as item:
        number = f.div(item, panels)
        panel = f.sub(item, f.mul(number, panels))
        first = f.mul(panel, shape.rows)
        there = f.smaller(f.sub(count, first), shape.rows)
        a = f.at(seen, f.add(f.mul(number, seen_apart), f.mul(first, chunk)))
        b = f.at(gradients, f.mul(number, given_apart))
        to = f.at(sums, f.mul(f.add(f.mul(number, rows), first), pitch))
        with f.loop(0, tiles, TERMS) as k:
            terms = f.smaller(f.sub(tiles, k), TERMS)
            again = f.let(f"or i1 {more}, {f.let(f'icmp sgt i64 {k}, 0')}")
            meeting = Meeting(f, shape, (1, shape.rows), narrow, terms, again, pitch, pitch)
            with f.loop(0, others) as j:
                begin = f.mul(j, shape.columns)
                last = f.let(f"icmp eq i64 {f.add(j, 1)}, {others}")
                at = f.at(b, f.add(f.mul(begin, chunk), f.mul(k, shape.columns)))
                target = f.at(to, begin)
                meeting.meet(f.at(a, f.mul(k, shape.rows)), there, at, last, target, target)
    return native.compile_ir(module(*meeting.tiles(), f))


@functools.cache
def _windows(channels: int) -> str:
    """IR over vectors of the output's channels, of which there are `channels`, and pieces of the source's channels:
    (sums, the weight's gradient, the source's channels in the block, and in all, rows of a product's sums, elements of
    such a row)."""
    f = Code()
    size, width = WINDOW * WINDOW, machine().width
    sums, w = (f.word("%args", i, "ptr") for i in range(2))
    count, total, rows, pitch = (f.word("%args", i) for i in range(2, 6))
    pieces = f.div(f.add(count, _PIECE - 1), _PIECE)
    apart = f.mul(rows, pitch)
    with f.loop("%begin", "%end") as item:
        vector = f.div(item, pieces)
        first, begin = f.mul(vector, width), f.mul(f.sub(item, f.mul(vector, pieces)), _PIECE)
        with f.loop(begin, f.smaller(f.add(begin, _PIECE), count)) as c:
            products = load_each(f, f.at(sums, f.add(f.mul(c, pitch), first)), apart)
            taps = [x for row in to_window(f, products) for x in row]
            for i in range(width):
                inside = f.let(f"icmp slt i64 {f.add(first, i)}, {channels}")
                to = f.at(w, f.mul(f.add(f.mul(f.add(first, i), total), c), size))
                with f.when(inside):
                    for t, x in enumerate(taps):
                        one = f.let(f"extractelement {machine().vector} {x}, i64 {i}")
                        f.line(f"store float {one}, ptr {f.at(to, t)}")
    return module(f)
