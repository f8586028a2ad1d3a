"""Depthwise convolutions, channels-last in float32: every channel by itself, some vectors of channels at a time.

Sums over a window's taps run in float32, sums over pixels in float32 along a row and in float64 over rows.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np

from ...shared.convolved import Convolved
from ..code import packing as transposed
from ..code.emit import Code, module
from ..code.tiles import fma, load_lanes, machine, store_lanes
from ..device import native
from ..device.native import Call
from .sweep import axis_phases

#: products of floats below which one thread does all
_ALONE = 1 << 19


def suits(c: Convolved) -> bool:
    """Whether each channel is a group."""
    return c.geometry.cg == 1 and c.geometry.mg == 1


def vectors(channels: int) -> int:
    """Vectors of channels that a kernel holds: what leaves fewest lanes empty."""
    count = -(-channels // machine().width)
    return min(range(4, 0, -1), key=lambda v: -(-count // v) * v)


def _reads(c: Convolved) -> list[list[list[tuple[int, int]]]]:
    """For each axis and position of the result: the (tap, source position) inside the source."""
    w = c.geometry.window
    backward = c.kind == "input"
    sizes, results = (w.out, w.inp) if backward else (w.inp, w.out)
    found = []
    for axis, (size, result) in enumerate(zip(sizes, results, strict=True)):
        positions: list[list[tuple[int, int]]] = [[] for _ in range(result)]
        for p in axis_phases(w, axis, backward=backward):
            for q in range(p.count):
                at = [(k, p.stride * q + o) for k, o in p.taps]
                positions[p.start + p.step * q] = [(k, s) for k, s in at if 0 <= s < size]
        found.append(positions)
    return found


def _flat(lists: list[list[tuple[int, int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Where each list starts (and the last one ends), and all pairs."""
    starts = np.cumsum([0, *(len(x) for x in lists)], dtype=np.int64)
    return starts, np.array([p for x in lists for p in x], np.int64).reshape(-1, 2)


class _Depth:
    """What both products share."""

    def __init__(self, c: Convolved) -> None:
        w = c.geometry.window
        self.c, self.channels, self.taps = c, c.geometry.group, w.taps
        self.vectors = vectors(self.channels)
        block = self.vectors * machine().width
        #: elements from one tap's weights, or sums, to the next
        self.pitch = -(-self.channels // block) * block
        self.source = w.out if c.kind == "input" else w.inp
        self.result = w.inp if c.kind == "input" else w.out

    def row_taps(self, axes: list[list[list[tuple[int, int]]]]) -> list[list[tuple[int, int]]]:
        """For each row of the result the rows of the window that reach it: (offset in the source, in the weights)."""
        kernel = self.c.geometry.window.kernel
        width, step = kernel[-1] * self.pitch, self.source[-1] * self.channels
        lists = []
        for n in range(self.c.geometry.batch):
            for place in itertools.product(*axes):
                row = []
                for taps in itertools.product(*place):
                    number, at = 0, n
                    for (k, s), count, size in zip(taps, kernel, self.source, strict=False):
                        number, at = number * count + k, at * size + s
                    row.append((at * step, number * width))
                lists.append(row)
        return lists


class DepthSums(_Depth):
    """The output, or the input's gradient: each pixel from the taps that reach it."""

    def scratch(self) -> list[int]:
        """Elements of the buffers: weights [taps, channels], and the bias behind them."""
        return [(self.taps + 1) * self.pitch]

    def calls(self, source: Any, w: Any, result: Any, bias: Any, packed: Any) -> list[Call]:
        """Weights turned, then all rows."""
        t, width = self.taps, machine().width
        table = transposed.chunks(1, t, 0)
        panels = [(i * t, i, min(width, self.channels - i)) for i in range(0, self.channels, width)]
        offsets = np.arange(t, dtype=np.int64) * self.pitch
        fill = native.compile_ir(transposed.fill_rows())
        operands = (packed[t * self.pitch :], 0 if bias is None else bias, self.channels)
        return [
            transposed.turned(w, packed, panels, table, offsets, t, parallel=False),
            Call(fill, operands, 1, parallel=False),
            self._rows(source, packed, result),
        ]

    def _rows(self, source: Any, packed: Any, result: Any) -> Call:
        *axes, last = _reads(self.c)
        lists = self.row_taps(axes)
        columns = _flat([[(s * self.channels, k * self.pitch) for k, s in at] for at in last])
        words = (source, packed, result, *_flat(lists), *columns, self.result[-1], self.channels, self.pitch, self.taps)
        return Call(native.compile_ir(_sums(self.vectors)), words, len(lists), result.size * self.taps > _ALONE)


@functools.cache
def _sums(count: int) -> str:
    """IR over rows: (source, weights, result, rows' starts and taps, columns' starts and taps, pixels, channels,
    elements from one tap's weights to the next, taps)."""
    width, v = machine().width, machine().vector
    f = Code()
    source, weights, result, rstart, rows, cstart, columns = (f.word("%args", i, "ptr") for i in range(7))
    pixels, channels, pitch, taps = (f.word("%args", i) for i in range(7, 11))
    bias = f.at(weights, f.mul(taps, pitch))
    with f.loop("%begin", "%end") as row, f.loop(0, pixels) as pixel:
        r0, r1 = f.word(rstart, row), f.word(rstart, f.add(row, 1))
        q0, q1 = f.word(cstart, pixel), f.word(cstart, f.add(pixel, 1))
        out = f.at(result, f.mul(f.add(f.mul(row, pixels), pixel), channels))
        with f.loop(0, channels, count * width) as c:
            lanes = _lanes(f, channels, c, count)
            sums = [
                f.variable(v, f.let(f"load {v}, ptr {f.at(bias, f.add(c, j * width))}, align 4")) for j in range(count)
            ]
            with f.loop(r0, r1) as r:
                xs = f.at(source, f.add(f.word(rows, f.mul(r, 2)), c))
                ws = f.at(weights, f.add(f.word(rows, f.add(f.mul(r, 2), 1)), c))
                with f.loop(q0, q1) as q:
                    x, w = f.at(xs, f.word(columns, f.mul(q, 2))), f.at(ws, f.word(columns, f.add(f.mul(q, 2), 1)))
                    for j, s in enumerate(sums):
                        a = load_lanes(f, f.at(x, j * width), lanes[j])
                        b = f.let(f"load {v}, ptr {f.at(w, j * width)}, align 4")
                        f.set(s, v, fma(f, a, b, f.get(s, v)))
            for j, s in enumerate(sums):
                at = f.at(out, f.add(c, j * width))
                store_lanes(f, f.get(s, v), at, lanes[j])
    return module(f)


def _lanes(f: Code, channels: str, first: str, count: int) -> list[str]:
    """For each vector of channels behind `first`: which lanes are channels."""
    left = f.sub(channels, first)
    return [transposed.lanes_below(f, f.add(left, -j * machine().width)) for j in range(count)]


#: parts of the rows whose sums are kept apart until the end, whatever the number of threads is
_PARTS = 8


class DepthWeight(_Depth):
    """The weight's gradient: a task is some rows of the output; their sums are added up in order."""

    def __init__(self, c: Convolved) -> None:
        super().__init__(c)
        self.rows = c.geometry.batch * c.geometry.window.positions // self.result[-1]
        self.parts = min(_PARTS, self.rows)

    def scratch(self) -> list[int]:
        """Elements (float32) of the buffer of float64 sums [parts, taps, channels]."""
        return [2 * self.parts * self.taps * self.pitch]

    def calls(self, x: Any, y: Any, w: Any, sums: Any) -> list[Call]:
        """Sums of each part, then over the parts."""
        window = self.c.geometry.window
        *axes, last = _reads(self.c)
        width = window.kernel[-1]
        spans = []
        for k in range(width):
            inside = [(q, s) for q, at in enumerate(last) for tap, s in at if tap == k]
            first = inside[0] if inside else (0, 0)
            spans.append((first[0] * self.channels, len(inside), first[1] * self.channels))
        parts = np.array([self.rows * i // self.parts for i in range(self.parts + 1)], np.int64)
        steps = (window.strides[-1] * self.channels, window.out[-1] * self.channels)
        arrays = (x, y, sums, parts, *_flat(self.row_taps(axes)), np.array(spans, np.int64))
        words = (*arrays, width, self.channels, *steps, self.taps, self.pitch)
        parallel = y.size * self.taps > _ALONE
        total = (sums, w, self.parts, self.taps, self.pitch)
        return [
            Call(native.compile_ir(_products(self.vectors)), words, self.parts, parallel),
            Call(native.compile_ir(_totals()), total, self.channels, parallel),
        ]


@functools.cache
def _products(count: int) -> str:
    """IR over parts: (x, y, sums, the parts' first rows, rows' starts and taps, spans of a row's taps, how many of
    these, channels, elements from an x to the next, from a row of y to the next, taps, elements of a tap's sums)."""
    v, block = machine().vector, count * machine().width
    f = Code()
    x, y, sums, parts, starts, rows, spans = (f.word("%args", i, "ptr") for i in range(7))
    width, channels, step, line, taps, pitch = (f.word("%args", i) for i in range(7, 13))
    size = f.mul(taps, pitch)
    with f.loop("%begin", "%end") as part:
        own = f.at(sums, f.mul(part, size), "double")
        f.zero(own, f.mul(size, 8))
        with (
            f.loop(f.word(parts, part), f.word(parts, f.add(part, 1))) as row,
            f.loop(f.word(starts, row), f.word(starts, f.add(row, 1))) as r,
            f.loop(0, channels, block) as c,
        ):
            xs = f.at(x, f.add(f.word(rows, f.mul(r, 2)), c))
            ys = f.at(y, f.add(f.mul(row, line), c))
            to = f.at(own, f.add(f.word(rows, f.add(f.mul(r, 2), 1)), c), "double")
            lanes = _lanes(f, channels, c, count)
            with f.loop(0, width) as t:
                first, n, at = (f.word(spans, f.add(f.mul(t, 3), i)) for i in range(3))
                acc = _row_sums(f, f.at(xs, at), f.at(ys, first), (n, step, channels), lanes)
                place = f.at(to, f.mul(t, pitch), "double")
                for j, a in enumerate(acc):
                    _add_wide(f, f.at(place, j * machine().width, "double"), f.get(a, v))
    return module(f)


def _row_sums(f: Code, x: str, y: str, steps: tuple[str, str, str], lanes: list[str]) -> list[str]:
    """Variables that hold Σ x · y over (pixels, elements from an x and from a y to the next), for each vector."""
    width, v = machine().width, machine().vector
    n, next_x, next_y = steps
    acc = [f.variable(v, "zeroinitializer") for _ in lanes]
    with f.loop(0, n) as p:
        xp, yp = f.at(x, f.mul(p, next_x)), f.at(y, f.mul(p, next_y))
        for j, a in enumerate(acc):
            m, d = (load_lanes(f, f.at(o, j * width), lanes[j]) for o in (xp, yp))
            f.set(a, v, fma(f, m, d, f.get(a, v)))
    return acc


def _add_wide(f: Code, place: str, value: str) -> None:
    """Adds a vector of floats to doubles."""
    width = machine().width
    wide = f.let(f"fpext {machine().vector} {value} to <{width} x double>")
    before = f.let(f"load <{width} x double>, ptr {place}, align 8")
    total = f.let(f"fadd <{width} x double> {before}, {wide}")
    f.line(f"store <{width} x double> {total}, ptr {place}, align 8")


@functools.cache
def _totals() -> str:
    """IR over channels: (sums, w, parts, taps, elements of a tap's sums): w[channel, tap] is the sum over parts."""
    f = Code()
    sums, w = (f.word("%args", i, "ptr") for i in range(2))
    parts, taps, pitch = (f.word("%args", i) for i in range(2, 5))
    with f.loop("%begin", "%end") as c, f.loop(0, taps) as t:
        total = f.variable("double", "0.0")
        with f.loop(0, parts) as p:
            value = f.word(sums, f.add(f.mul(f.add(f.mul(p, taps), t), pitch), c), "double")
            f.set(total, "double", f.let(f"fadd double {f.get(total, 'double')}, {value}"))
        single = f.let(f"fptrunc double {f.get(total, 'double')} to float")
        f.line(f"store float {single}, ptr {f.at(w, f.add(f.mul(c, taps), t))}")
    return module(f)
