"""The gradient of a convolution's weight as products of matrices: for each tap, what it sees of x, times y's gradient.

The gradient of y is packed into panels, TERMS pixels at a time, or several times as many where it has few channels; of
x a thread gathers the pixels that a tap sees, some channels of them, into a panel of its own, and multiplies it with
all of y's.  No pixel is multiplied that is padding between rows, and terms are as many as a block has, however short an
image's rows are.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ....language.types import Array
from ...shared.convolved import Convolved
from ..code import matrix_products, packing
from ..code.emit import Code, module, thread
from ..code.matrix_products import Meeting, Shape
from ..code.tiles import TERMS, load_lanes, machine
from ..device import native
from ..device.native import Call
from .sweep import Sweep

#: bytes of a padded block: the same for any number of threads, so that the bits are
_BLOCK = 1 << 21
#: bytes of y's panels in one go, at least and at most: several blocks of TERMS, since all threads meet after each;
#: between them no more than a quarter of the operands', so that a small network's scratch is not most of its memory
_PANELS = 1 << 17, 1 << 20


class PackedWeight:
    """The gradient of the weight of a convolution without groups."""

    def __init__(self, c: Convolved) -> None:
        g, w = c.geometry, c.geometry.window
        self.g, self.sweep, self.taps, self.operands = g, Sweep(c, _BLOCK), w.taps, c.bytes
        #: taps that are one run in memory: a window's row of few channels
        self.run = w.kernel[-1] if g.cg < 16 and w.dilations[-1] == 1 else 1
        self.cells = g.cg * self.run
        self.shape = matrix_products.shape_of(self.cells * self.taps // self.run, g.mg)
        self.panels = -(-g.mg // self.shape.columns)
        self.pixels = g.batch * w.positions
        self.parallel = matrix_products.worth_packing(g.mg, g.rows, self.pixels)

    @property
    def _row(self) -> int:
        """Bytes of a pixel in y's panels."""
        return 4 * self.panels * self.shape.columns

    @functools.cached_property
    def _held(self) -> int:
        """Bytes of y's panels: not in steps of blocks, so that memory by batch is straight lines."""
        (least, most), block = _PANELS, TERMS * self._row
        blocks = max(1, least // block)
        return min(self.pixels * self._row, max(blocks * block, min(self.operands // 4, most)))

    @functools.cached_property
    def terms(self) -> int:
        """Pixels of y's panels, at most: all, or some blocks of TERMS."""
        held = self._held // self._row
        return held if held == self.pixels else held // TERMS * TERMS

    @functools.cached_property
    def _taps(self) -> np.ndarray:
        """(offset in the gradient, in the padded source) of the taps that start a run."""
        g, s = self.g, self.sweep
        return np.array([(k * g.cg * g.mg, at) for k, at in s.taps(s.phases[0]) if k % self.run == 0], np.int64)

    def scratch(self) -> list[int]:
        """Elements of the buffers: the gradient as [taps, channels of x, of y], padded block, panels of y's gradient,
        and of x for each thread."""
        packed = self._held // 4 + self.panels * self.shape.columns
        _, private = self._panel_sizes()
        return [self.taps * self.g.cg * self.g.mg, self.sweep.largest_block, packed, native.threads() * private]

    def _panel_sizes(self) -> tuple[int, int]:
        """Elements of a panel of y's gradient, and of x."""
        return (self.terms + 1) * self.shape.columns, (min(TERMS, self.terms) + 1) * self.shape.rows

    def calls(self, x: Array, y: Array, w: Array, sums: Array, block: Any, shared: Array, own: Array) -> list[Call]:
        """All calls of the gradient, in order."""
        s, sequence = self.sweep, []
        pixels = y.reshape(-1, self.g.mg)
        first = 0
        tables: dict[tuple[int, ...], list[np.ndarray]] = {}  # blocks of as many images and the same rows share them
        for cut in s.cuts():
            part, like = s.block(cut), (cut[1] - cut[0], *cut[2:])
            if s.padded:
                words = (x, block, part.copies, s.source[-1], s.source_channels, s.pitch, s.before[-1], s.after[-1])
                sequence.append(Call(native.compile_ir(packing.copy_rows()), words, len(part.copies), self.parallel))
            if like not in tables:
                tables[like] = self._seen(part.rows[0])
            for places in tables[like]:
                chunk = pixels[first : first + len(places)]
                sequence += self._block(block if s.padded else x, places, chunk, sums, shared, own, more=first > 0)
                first += len(places)
        return [*sequence, self._unpacked(sums, w)]

    def _seen(self, rows: np.ndarray) -> list[np.ndarray]:
        """Where in a block the first tap of each pixel of the output lies, in the order of the pixels, as many at
        a time as panels have."""
        last = self.sweep.phases[0][-1]
        columns = np.arange(last.count, dtype=np.int64) * (last.stride * self.sweep.pitch)
        seen = (rows[:, 1, None] + columns).reshape(-1)
        return [seen[k : k + self.terms] for k in range(0, len(seen), self.terms)]

    def _block(
        self, x: Array, places: Array, y: Array, sums: Array, shared: Array, own: Array, *, more: bool
    ) -> list[Call]:
        """The products of some pixels, added to those before them where there are `more`."""
        g, shape, taps = self.g, self.shape, self._taps
        apart, size = self._panel_sizes()
        pack = matrix_products.packed(y.T, shape.columns, shared, apart, parallel=self.parallel)
        each = -(-self.cells // shape.rows)
        words = (sums, x, shared, own, places, taps, each, self.cells, g.mg, len(places), int(more), apart, size)
        return [pack, Call(_program(shape, g.mg % shape.columns), words, len(taps) * each, self.parallel)]

    def _unpacked(self, sums: Array, w: Array) -> Call:
        """The weight's own order."""
        g, size, width = self.g, self.g.cg * self.taps, self.shape.columns
        channel, tap = np.divmod(np.arange(size, dtype=np.int64), self.taps)
        offsets = (tap * g.cg + channel) * g.mg
        panels = [(j * size, j, min(width, g.mg - j)) for j in range(0, g.mg, width)]
        chunks = packing.chunks(1, size, 0)
        return packing.turned(w, sums, panels, chunks, offsets, size, unpack=True, parallel=self.parallel)


@functools.cache
def _program(shape: Shape, narrow: int) -> int:
    """The address of a kernel over taps and panels of x's channels.  `narrow`: columns of y's last panel, or 0.

    (the gradient, x, panels of y's gradient, a panel for each thread, places of pixels, taps, panels of a tap,
    channels of x, of y, pixels, whether the gradient is added to, elements from panel to panel of y's, elements of a
    thread's own)

    Pixels are taken TERMS at a time, whose sums are added one after the other.
    """
    f = Code()
    c, x, shared, panels, places, taps = (f.word("%args", i, "ptr") for i in range(6))
    each, cells, n, pixels, more, apart, size = (f.word("%args", i) for i in range(6, 13))
    panels = f.at(panels, f.mul(thread(f), size))
    full = f.div(n, shape.columns)
    count = f.div(f.add(n, shape.columns - 1), shape.columns)
    more = f.let(f"icmp ne i64 {more}, 0")
    with f.loop("%begin", "%end") as item:
        tap, first = f.mul(f.div(item, each), 2), f.mul(f.rem(item, each), shape.rows)
        there = f.smaller(f.sub(cells, first), shape.rows)
        source = f.at(x, f.add(f.word(taps, f.add(tap, 1)), first))
        to = f.at(c, f.add(f.word(taps, tap), f.mul(first, n)))
        with f.loop(0, pixels, TERMS) as k:
            terms = f.smaller(f.sub(pixels, k), TERMS)
            some = f.at(places, k, "i64")
            f.line(f"call void @gather(ptr {panels}, ptr {source}, ptr {some}, i64 {there}, i64 {terms})")
            again = f.let(f"or i1 {more}, {f.let(f'icmp sgt i64 {k}, 0')}")
            meeting = Meeting(f, shape, (1, shape.rows), narrow, terms, again, n, n)
            packed = f.at(shared, f.mul(k, shape.columns))
            with f.loop(0, count) as j:
                at = f.at(to, f.mul(j, shape.columns))
                last = f.let(f"icmp sge i64 {j}, {full}")
                meeting.meet(panels, there, f.at(packed, f.mul(j, apart)), last, at, at)
    return native.compile_ir(module(_gather(shape.rows), *meeting.tiles(), f))


def _gather(width: int) -> Code:
    """A function (panel, source, offsets, elements that there are, terms): a row of the panel from each offset."""
    f = Code("gather", "ptr noalias %to, ptr %source, ptr %offsets, i64 %there, i64 %terms", internal=True)
    lanes = machine().width
    full = f.let(f"icmp eq i64 %there, {width}")
    with f.when(full), f.loop(0, "%terms") as p:
        f.copy(f.at("%to", f.mul(p, width)), f.at("%source", f.word("%offsets", p)), 4 * width)
    with f.unless(full):
        some = [packing.lanes_below(f, f.sub("%there", k)) for k in range(0, width, lanes)]
        with f.loop(0, "%terms") as p:
            to, source = f.at("%to", f.mul(p, width)), f.at("%source", f.word("%offsets", p))
            for k, there in enumerate(some):
                value = load_lanes(f, f.at(source, k * lanes), there)
                f.line(f"store {machine().vector} {value}, ptr {f.at(to, k * lanes)}, align 4")
    return f
