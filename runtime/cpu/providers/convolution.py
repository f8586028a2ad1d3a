"""Channels-last convolutions in float32 without a library: register tiles over packed weights and padded blocks.

A product runs as calls in a row: the weights are packed into panels; then, block after block, the rows of the source
are copied with their padding and multiplied.  What is summed in which order depends on the shapes and the number of
threads.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.kernels import register
from ....language.types import Array, Operands, TensorType, need
from ...shared.convolved import Convolved, convolved, operands
from .. import processors
from ..code import packing as transposed
from ..code.tiles import TERMS, Tile, machine, sizes
from ..convolution import winograd
from ..convolution.depthwise import DepthSums, DepthWeight, suits
from ..convolution.program import program
from ..convolution.sweep import Block, Phase, Sweep, spread
from ..convolution.weight import PackedWeight
from ..convolution.winograd import Winograd
from ..convolution.winograd_weight import WinogradWeight
from ..device import native
from ..device.native import Call
from . import products

#: bytes of a padded block for each thread
_BLOCK = 1 << 20
#: bytes of one from which a weight's gradient is summed: the same for any number of threads, so that the bits are
_SUMMED_BLOCK = 1 << 21
#: bytes of the source that stay in a thread's cache while one panel after the other is multiplied with them
_SPAN = 1 << 20
#: floating-point operations below which one thread does all
_ALONE = 1 << 20


def _pieces(length: int) -> int:
    """Into how many equal parts a sum is cut so that each has at most TERMS terms."""
    return next(p for p in range(1, length + 1) if length % p == 0 and length // p <= TERMS)


def _spans(total: int, parts: int) -> list[tuple[int, int]]:
    marks = [total * i // parts for i in range(parts + 1)]
    return [(a, b) for a, b in itertools.pairwise(marks) if b > a]


class _Common:
    """The base of the products: the sweep, panels of the result's channels, and taps that are one run in memory.

    `vectors`: those of a panel's row; each product chooses its own.
    """

    vectors: int

    def __init__(self, c: Convolved) -> None:
        g, w = c.geometry, c.geometry.window
        self.c, self.g = c, g
        self.sweep = Sweep(c, _SUMMED_BLOCK if c.kind == "weight" else _BLOCK * native.threads())
        self.taps = w.taps
        #: channels of a group in the source and in the product's other operand
        self.depth, self.width = (g.mg, g.cg) if c.kind == "input" else (g.cg, g.mg)
        #: a window's row is one run in memory: few channels become more
        self.run = w.kernel[-1] if c.kind != "input" and g.group == 1 and g.cg < 16 and w.dilations[-1] == 1 else 1

    @functools.cached_property
    def panel(self) -> int:
        """Columns of a panel."""
        return self.vectors * machine().width

    @functools.cached_property
    def panels(self) -> int:
        """Panels of a group."""
        return -(-self.width // self.panel)

    @functools.cached_property
    def narrow(self) -> int:
        """Columns of the last panel where those before it have more, else 0."""
        return self.width % self.panel if self.panels > 1 else 0

    @functools.cached_property
    def parallel(self) -> bool:
        """Whether several threads are worth it."""
        return 2 * self.g.multiplications >= _ALONE

    def tap_offsets(self, phase: Sequence[Phase]) -> list[tuple[int, int]]:
        """(number, offset in the block) of the taps that start a run."""
        return [(k, at) for k, at in self.sweep.taps(phase) if k % self.run == 0]

    def copies(self, source: Array, target: Array | None, block: Block) -> list[Call]:
        """The calls that fill a padded block."""
        s = self.sweep
        if not s.padded:
            return []
        words = (s.source[-1], s.source_channels, s.pitch, s.before[-1], s.after[-1])
        kernel = native.compile_ir(transposed.copy_rows())
        return [Call(kernel, (source, target, block.copies, *words), len(block.copies), self.parallel)]

    def turned(self, w: Array, packed: Array, table: Array, offsets: Array, apart: int, *, unpack: bool) -> Call:
        """The call that packs the weights into panels, or unpacks their gradient: see `transposed.turn`."""
        g, t = self.g, self.taps
        panels = [
            (
                i * g.mg * g.cg * t + p * self.panel * apart,
                (i * self.panels + p) * t * self.depth * self.panel,
                min(self.panel, self.width - p * self.panel),
            )
            for i in range(g.group)
            for p in range(self.panels)
        ]
        return transposed.turned(w, packed, panels, table, offsets, apart, unpack=unpack, parallel=self.parallel)


class _Sums(_Common):
    """The convolution's output, or the gradient of its input: pixels of a row times packed weights."""

    def __init__(self, c: Convolved) -> None:
        super().__init__(c)
        cells = max(p[-1].count for p in self.sweep.phases)
        self.vectors = sizes(cells, self.width)[1]
        #: the weights of a 1x1 window's input gradient are rows of panels already
        self.packed = not (c.kind == "input" and self.taps == 1)
        self.covered = all(all(p.taps for p in phase) for phase in self.sweep.phases)

    def scratch(self) -> list[int]:
        """Elements of the buffers: packed weights, padded block."""
        packed = self.g.group * self.panels * self.taps * self.depth * self.panel if self.packed else 0
        return [packed, self.sweep.largest_block]

    def calls(self, source: Array, w: Array, result: Array, bias: Array | None, packed: Any, block: Any) -> list[Call]:
        """All calls of the operator, in order."""
        sequence = [self._pack(w, packed)] if self.packed else []
        fill = bias is not None or not self.covered
        if fill:
            rows = result.size // result.shape[-1]
            kernel = native.compile_ir(transposed.fill_rows())
            operands_ = (result, 0 if bias is None else bias, result.shape[-1])
            sequence.append(Call(kernel, operands_, rows, self.parallel))
        for cut in self.sweep.cuts():
            part = self.sweep.block(cut)
            sequence += self.copies(source, block, part)
            for phase, rows in zip(self.sweep.phases, part.rows, strict=True):
                if len(rows) and all(p.taps for p in phase):
                    a = block if self.sweep.padded else source
                    sequence.append(self._product(phase, rows, a, packed if self.packed else w, result, add=fill))
        return sequence

    def _pack(self, w: Array, packed: Array) -> Call:
        g, t = self.g, self.taps
        backward = self.c.kind == "input"
        runs, length, step = (self.depth, t, g.cg * t) if backward else (1, self.depth * t, 0)
        table = transposed.chunks(runs, length, step)
        k, tap = np.divmod(np.arange(self.depth * t, dtype=np.int64), t)
        offsets = (tap * self.depth + k) * self.panel
        return self.turned(w, packed, table, offsets, t if backward else g.cg * t, unpack=False)

    def _product(self, phase: Any, rows: Array, a: Array, b: Array, result: Array, *, add: bool) -> Call:
        s, g = self.sweep, self.g
        depth = self.depth * self.run
        pieces = _pieces(depth)
        bk = self.panel if self.packed else g.cg
        taps = [
            (at + i * (depth // pieces), (k * self.depth + i * (depth // pieces)) * bk)
            for k, at in self.tap_offsets(phase)
            for i in range(pieces)
        ]
        offsets = np.array(taps, np.int64).T.copy()
        cells, high = phase[-1].count, sizes(phase[-1].count, self.width, self.vectors)[0]
        tile = Tile(
            high,
            min(self.panel, self.width),
            phase[-1].stride * s.pitch,
            1,
            bk,
            phase[-1].step * s.result_channels,
            depth // pieces,
        )
        kernel = program(tile, cells, self.narrow)
        tasks = self._tasks(len(rows), a.nbytes + len(rows) * cells * s.result_channels * 4, a.nbytes < b.nbytes)
        words = (result, a, b, tasks, rows, offsets[0], offsets[1], len(taps))
        return Call(kernel, (*words, max(1, TERMS // tile.depth), add), len(tasks), self.parallel)

    def _tasks(self, rows: int, nbytes: int, by_panel: bool) -> np.ndarray:
        """Panels times spans of rows, of which the source takes `nbytes`; what is larger is cut among the threads."""
        g, threads = self.g, native.threads()
        size = self.taps * self.depth * self.panel
        parts = threads * max(1, -(-nbytes // (threads * _SPAN)))
        if by_panel:
            parts = threads if (g.group * self.panels) % threads else 1
        spans = _spans(rows, parts)
        table = [
            (
                i * self.width + p * self.panel,
                i * self.depth,
                (i * self.panels + p) * size if self.packed else i * g.mg * g.cg + p * self.panel,
                *span,
                int(self.narrow > 0 and p == self.panels - 1),
                j,
            )
            for j, span in enumerate(spans)
            for i in range(g.group)
            for p in range(self.panels)
        ]
        if by_panel:
            table.sort(key=lambda t: (t[2], t[6]))
        return np.array(table, np.int64)[:, :6].copy()


class _Weight(_Common):
    """The gradient of the weight where there are groups: input channels times output channels, summed over pixels."""

    def __init__(self, c: Convolved) -> None:
        super().__init__(c)
        self.cells = self.g.cg * self.run
        self.high, self.vectors = sizes(self.cells, self.width)
        #: elements from pixel to pixel of y, in a copy where that differs from its channels
        self.pitch = spread(self.sweep.result_channels) if self.sweep.padded else self.sweep.result_channels

    def scratch(self) -> list[int]:
        """Elements of the buffers: the gradient in panels, padded block, y's."""
        s = self.sweep
        copied = 0
        if self.pitch != s.result_channels:
            copied = max(len(s.block(cut).rows[0]) for cut in s.cuts()) * s.result[-1] * self.pitch
        return [self.g.group * self.panels * self.taps * self.g.cg * self.panel, self.sweep.largest_block, copied]

    def _at(self, channel: int | np.ndarray, tap: int | np.ndarray) -> Any:
        """Where a panel keeps a channel's sums for a tap: as the weight does, unless a run of taps is one tile."""
        g = self.g
        return (channel * self.taps + tap if self.run == 1 else tap * g.cg + channel) * self.panel

    def calls(self, x: Array, y: Array, w: Array, sums: Array, block: Any, copied: Any) -> list[Call]:
        """All calls of the operator, in order."""
        s = self.sweep
        sequence = []
        for i, cut in enumerate(s.cuts()):
            part = s.block(cut)
            sequence += self.copies(x, block, part)
            rows, b = part.rows[0], y
            if copied is not None and len(rows):
                b, offsets = copied, rows[:, 0].copy()
                words = (y, copied, offsets, s.result[-1], s.result_channels, self.pitch, 0, 0)
                sequence.append(Call(native.compile_ir(transposed.copy_rows()), words, len(rows), self.parallel))
                rows[:, 0] = np.arange(len(rows)) * s.result[-1] * self.pitch
            if len(rows):
                sequence.append(self._product(rows, block if s.padded else x, b, sums, add=i > 0))
        return [*sequence, self._unpack(sums, w)]

    def _product(self, rows: Array, x: Array, y: Array, sums: Array, *, add: bool) -> Call:
        s, g = self.sweep, self.g
        phase = s.phases[0]
        last = phase[-1]
        pieces = _pieces(last.count)
        depth = last.count // pieces
        step, m = last.stride * s.pitch, self.pitch
        at = np.arange(pieces, dtype=np.int64) * depth
        oa = (rows[:, 1, None] + at * step).reshape(-1)
        ob = (rows[:, 0, None] + at * m).reshape(-1)
        taps = np.array([(self._at(0, k), o) for k, o in self.tap_offsets(phase)], np.int64)
        row = self.panel * (self.taps if self.run == 1 else 1)
        tile = Tile(self.high, min(self.panel, g.mg), 1, step, m, row, depth)
        kernel = program(tile, self.cells, self.narrow)
        tasks = self._tasks(len(taps))
        words = (sums, x, y, tasks, taps, oa, ob, len(oa), max(1, TERMS // depth), add)
        return Call(kernel, words, len(tasks), self.parallel)

    def _tasks(self, taps: int) -> np.ndarray:
        """Panels times spans of taps, as many spans as the threads need."""
        g, threads = self.g, native.threads()
        panels = g.group * self.panels
        parts = 1 if panels % threads == 0 else min(taps, threads // math.gcd(panels, threads) * 2)
        rows = [
            (
                (i * self.panels + p) * self.taps * g.cg * self.panel,
                i * g.cg,
                i * g.mg + p * self.panel,
                *span,
                int(self.narrow > 0 and p == self.panels - 1),
            )
            for i in range(g.group)
            for p in range(self.panels)
            for span in _spans(taps, parts)
        ]
        return np.array(rows, np.int64)

    def _unpack(self, sums: Array, w: Array) -> Call:
        size = self.g.cg * self.taps
        k, tap = np.divmod(np.arange(size, dtype=np.int64), self.taps)
        return self.turned(w, sums, transposed.chunks(1, size, 0), self._at(k, tap), size, unpack=True)


class PixelProducts:
    """A 1x1 convolution without strides and groups: a product of matrices, pixels by channels."""

    def __init__(self, c: Convolved) -> None:
        self.kind, self.g = c.kind, c.geometry
        self.pixels = self.g.batch * self.g.window.positions

    @staticmethod
    def suits(c: Convolved) -> bool:
        """Whether it is one that others do not multiply faster."""
        g = c.geometry
        if not g.pointwise or g.group > 1:
            return False
        shape = PixelProducts(c).shape()
        by = products.fastest(shape)
        if c.kind == "weight":
            # pixels in the same sets of the cache: BLAS packs them
            aliased = any(n % 128 == 0 for n in (g.cg, g.mg))
            return aliased if by == "blas" else not processors.deep(*shape[:3])
        return by == "products"

    def shape(self) -> products.Shape:
        """The shape of the product's tiles."""
        g, n = self.g, self.pixels
        if self.kind == "weight":
            return g.mg, g.cg, n, True, False
        return (n, g.mg, g.cg, False, True) if self.kind == "output" else (n, g.cg, g.mg, False, False)

    def scratch(self) -> list[int]:
        """Elements of the product's workspace."""
        return [products.room("f32", self.shape()[:3]).size]

    def calls(self, x: Array, w: Array, y: Array, bias: Any, room: Any) -> list[Call]:
        """The product."""
        g = self.g
        x, y, w = x.reshape(self.pixels, g.cg), y.reshape(self.pixels, g.mg), w.reshape(g.mg, g.cg)
        if self.kind == "weight":
            return products.calls(y.T, x, w, room)
        return products.calls(x, w.T, y, room, bias) if self.kind == "output" else products.calls(y, w, x, room, bias)


_Plan = _Sums | _Weight | PackedWeight | PixelProducts | DepthSums | DepthWeight | Winograd | WinogradWeight


@functools.lru_cache(maxsize=1024)
def _plan(c: Convolved) -> _Plan:
    """The kernels of a product."""
    if suits(c):
        return DepthWeight(c) if c.kind == "weight" else DepthSums(c)
    if PixelProducts.suits(c):
        return PixelProducts(c)
    if winograd.suits(c):
        return WinogradWeight(c) if c.kind == "weight" else Winograd(c)
    if c.kind != "weight":
        return _Sums(c)
    return _Weight(c) if c.geometry.group > 1 else PackedWeight(c)


def unavailable() -> str:
    """Why this provider cannot run; "" where it can."""
    return native.unavailable()


class ConvolutionProvider:
    """The channels-last forms of Conv, its gradients and ConvTranspose, float32."""

    name = "convolution"

    def accepts(self, op: Operator) -> bool:
        """Any convolution with channels last, if the kernels are available."""
        if unavailable():
            return False
        c = convolved(op)
        return c is not None and c.last

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Packed weights and a padded block, where they are needed."""
        return tuple(TensorType("f32", (n,)) for n in _planned(op)[1].scratch() if n)

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """The calls of a product."""
        c, plan = _planned(op)
        x, w, y, bias = operands(op, ins, outs)
        rooms = iter(scratch)
        buffers: list[Any] = [next(rooms) if n else None for n in plan.scratch()]
        if isinstance(plan, PixelProducts):
            return plan.calls(x, w, y, bias, *buffers)
        if isinstance(plan, (_Weight, PackedWeight, DepthWeight, WinogradWeight)):
            return plan.calls(x, y, w, *buffers)
        source, result = (y, x) if c.kind == "input" else (x, y)
        return plan.calls(source, w, result, bias, *buffers)


def _planned(op: Operator) -> tuple[Convolved, _Plan]:
    """The convolution that an accepted operator computes, and its kernels."""
    c = need(convolved(op))
    return c, _plan(c)


if not unavailable():
    register(ConvolutionProvider())
