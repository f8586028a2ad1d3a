"""Depthwise convolutions, channels-last in float32: every channel by itself, some vectors of channels at a time.

Sums over a window's taps run in float32, sums over pixels in float32 along a row and in float64 over rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....language.types import Array
from ....ops.window import Window
from ...shared.convolved import Convolved
from ..code import packing as transposed
from ..code.emit import Code, module
from ..code.tiles import fma, load_lanes, machine, store_lanes
from ..device import native
from ..device.native import Call

#: products of floats below which one thread does all
_ALONE = 1 << 19


def suits(c: Convolved) -> bool:
    """Whether each channel is a group."""
    return c.geometry.cg == 1 and c.geometry.mg == 1


def vectors(channels: int) -> int:
    """Vectors of channels that a kernel holds: what leaves fewest lanes empty."""
    count = -(-channels // machine().width)
    return min(range(4, 0, -1), key=lambda v: -(-count // v) * v)


@dataclass(frozen=True)
class Reach:
    """The reads of the result's positions along an axis, inside the source.

    `first` [positions, 2]: the first tap and its source position; `count` [positions]: taps; `steps`: from one tap and
    source position to the next.
    """

    first: np.ndarray
    count: np.ndarray
    steps: tuple[int, int]

    def words(self, units: tuple[int, int]) -> tuple[Any, ...]:
        """Words of a kernel: (offset of the first tap's weights, of its source, taps), and the steps of both offsets.

        `units`: elements from one tap's weights, and from one source position, to the next.
        """
        table = np.concatenate([self.first * units, self.count[:, None]], axis=1)
        return np.ascontiguousarray(table, np.int64), self.steps[0] * units[0], self.steps[1] * units[1]


#: an axis of one position and one tap
_ONE = Reach(np.zeros((1, 2), np.int64), np.ones(1, np.int64), (0, 0))


def reach(w: Window, axis: int, *, backward: bool) -> Reach:
    """The reach of the output's positions along an axis, or of the input's where `backward`.

    Forward, output o reads source o·s - b + k·d with tap k; backward, input p reads source (p + b - k·d) / s with the
    taps k that divide.
    """
    s, d, b, kernel = w.strides[axis], w.dilations[axis], w.begin[axis], w.kernel[axis]
    if not backward:
        origin, step = np.arange(w.out[axis], dtype=np.int64) * s - b, 1
        low, high = -origin, w.inp[axis] - 1 - origin  # bounds of k·d
    else:
        origin, step = np.arange(w.inp[axis], dtype=np.int64) + b, s // math.gcd(s, d)
        low, high = origin - (w.out[axis] - 1) * s, origin
    k, last = -(-np.maximum(low, 0) // d), np.minimum(high // d, kernel - 1)
    if backward:
        residues = np.full(s, -1, np.int64)
        residues[np.arange(step) * d % s] = np.arange(step)
        residue = residues[origin % s]
        k = np.where(residue < 0, last + 1, k + (residue - k) % step)
    source = (origin - k * d) // s if backward else origin + k * d
    count = np.maximum((last - k) // step + 1, 0)
    return Reach(np.stack([k, source], axis=1), count, (step, -step * d // s if backward else d))


def combined(reaches: list[Reach], kernel: Sequence[int], source: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """For each position of several axes the taps that reach it, the last axis fastest.

    Where each position's pairs start (and the last one's end), and the pairs (tap, source position), as flat numbers.
    """
    starts, pairs = np.array([0, 1], np.int64), np.zeros((1, 2), np.int64)
    for axis, taps, size in zip(reaches, kernel, source, strict=True):
        counts = np.multiply.outer(np.diff(starts), axis.count).reshape(-1)
        before = np.cumsum([0, *counts], dtype=np.int64)
        owner = np.repeat(np.arange(counts.size), counts)
        outer, inner = np.divmod(owner, len(axis.count))
        major, minor = np.divmod(np.arange(owner.size) - before[owner], axis.count[inner])
        here = axis.first[inner] + minor[:, None] * np.array(axis.steps)
        pairs = pairs[starts[outer] + major] * (taps, size) + here
        starts = before
    return starts, pairs


class _Depth:
    """The base of both products."""

    def __init__(self, c: Convolved) -> None:
        w = c.geometry.window
        self.c, self.channels, self.taps = c, c.geometry.group, w.taps
        self.vectors = vectors(self.channels)
        block = self.vectors * machine().width
        #: elements from one tap's weights, or sums, to the next
        self.pitch = -(-self.channels // block) * block
        self.source = w.out if c.kind == "input" else w.inp
        self.result = w.inp if c.kind == "input" else w.out

    def rows(self, *, backward: bool) -> tuple[Any, ...]:
        """Words of a kernel: for each row of the result the rows of the window that reach it (see `_row`)."""
        w = self.c.geometry.window
        *outer, line = [reach(w, a, backward=backward) for a in range(len(w.kernel) - 1)] or [_ONE]
        step = self.source[-1] * self.channels
        units = (w.kernel[-1] * self.pitch, step)
        starts, pairs = combined(outer, w.kernel[:-2], self.source[:-2])
        plane = (w.kernel[-2] * units[0], self.source[-2] * step) if len(w.kernel) > 1 else (0, 0)
        heights = (len(starts) - 1, len(line.count), math.prod(self.source[:-1]) * step)
        return starts, pairs * plane, *line.words(units), *heights


class DepthSums(_Depth):
    """The output, or the input's gradient: each pixel from the taps that reach it."""

    def scratch(self) -> list[int]:
        """Elements of the buffers: weights [taps, channels], and the bias behind them."""
        return [(self.taps + 1) * self.pitch]

    def calls(self, source: Array, w: Array, result: Array, bias: Array | None, packed: Array) -> list[Call]:
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

    def _rows(self, source: Array, packed: Array, result: Array) -> Call:
        backward = self.c.kind == "input"
        last = reach(self.c.geometry.window, len(self.result) - 1, backward=backward)
        columns, rows = last.words((self.pitch, self.channels)), math.prod(self.result[:-1])
        sizes = (self.result[-1], self.channels, self.pitch, self.taps)
        words = (source, packed, result, *self.rows(backward=backward), *columns, *sizes)
        total = self.c.geometry.batch * rows
        return Call(native.compile_ir(_sums(self.vectors)), words, total, result.size * self.taps > _ALONE)


def _triple(f: Code, table: str, index: str) -> tuple[str, str, str]:
    first, second, third = (f.word(table, f.add(f.mul(index, 3), i)) for i in range(3))
    return first, second, third


@dataclass(frozen=True)
class _Row:
    """A row of the result inside a kernel: names of the numbers that its rows of the window follow from."""

    pairs: str
    begin: str
    end: str
    line: tuple[str, str, str]
    next_w: str
    next_x: str
    sample: str

    @contextmanager
    def taps(self, f: Code) -> Iterator[tuple[str, str]]:
        """Loops over the window's rows: (offset in the weights, in the source)."""
        first_w, first_x, inside = self.line
        with f.loop(self.begin, self.end) as r:
            plane_w, plane_x = (f.word(self.pairs, f.add(f.mul(r, 2), i)) for i in range(2))
            at_w, at_x = f.add(plane_w, first_w), f.add(self.sample, plane_x, first_x)
            with f.loop(0, inside) as u:
                yield f.add(at_w, f.mul(u, self.next_w)), f.add(at_x, f.mul(u, self.next_x))


def _row(f: Code, at: int, row: str) -> _Row:
    """Row `row` by the words from `at` on: planes' starts and taps, the lines' reach, planes of a sample, lines of a
    plane, elements of a sample."""
    starts, pairs, lines = (f.word("%args", at + i, "ptr") for i in range(3))
    next_w, next_x, planes, height, size = (f.word("%args", at + i) for i in range(3, 8))
    sample, line = f.div(row, f.mul(planes, height)), f.rem(row, height)
    plane = f.rem(f.div(row, height), planes)
    begin, end = f.word(starts, plane), f.word(starts, f.add(plane, 1))
    return _Row(pairs, begin, end, _triple(f, lines, line), next_w, next_x, f.mul(sample, size))


@functools.cache
def _sums(count: int) -> str:
    """IR over rows: (source, weights, result, `_row`'s words, the columns' reach, pixels, channels, elements from one
    tap's weights to the next, taps)."""
    width, v = machine().width, machine().vector
    f = Code()
    source, weights, result = (f.word("%args", i, "ptr") for i in range(3))
    columns = f.word("%args", 11, "ptr")
    next_w, next_x, pixels, channels, pitch, taps = (f.word("%args", i) for i in range(12, 18))
    bias = f.at(weights, f.mul(taps, pitch))
    with f.loop("%begin", "%end") as row:
        here = _row(f, 3, row)
        with f.loop(0, pixels) as pixel:
            first_w, first_x, inside = _triple(f, columns, pixel)
            out = f.at(result, f.mul(f.add(f.mul(row, pixels), pixel), channels))
            with f.loop(0, channels, count * width) as c:
                lanes = _lanes(f, channels, c, count)
                sums = [
                    f.variable(v, f.let(f"load {v}, ptr {f.at(bias, f.add(c, j * width))}, align 4"))
                    for j in range(count)
                ]
                with here.taps(f) as (at_w, at_x):
                    ws, xs = f.at(weights, f.add(at_w, first_w, c)), f.at(source, f.add(at_x, first_x, c))
                    with f.loop(0, inside) as q:
                        x, w = f.at(xs, f.mul(q, next_x)), f.at(ws, f.mul(q, next_w))
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
        self.lines = c.geometry.batch * c.geometry.window.positions // self.result[-1]
        self.parts = min(_PARTS, self.lines)

    def scratch(self) -> list[int]:
        """Elements (float32) of the buffer of float64 sums [parts, taps, channels]."""
        return [2 * self.parts * self.taps * self.pitch]

    def calls(self, x: Array, y: Array, w: Array, sums: Array) -> list[Call]:
        """Sums of each part, then over the parts."""
        window = self.c.geometry.window
        width = window.kernel[-1]
        parts = np.array([self.lines * i // self.parts for i in range(self.parts + 1)], np.int64)
        steps = (window.strides[-1] * self.channels, window.out[-1] * self.channels)
        words = (x, y, sums, parts, *self.rows(backward=False), self._spans(), width, self.channels, *steps)
        words = (*words, self.taps, self.pitch)
        parallel = y.size * self.taps > _ALONE
        total = (sums, w, self.parts, self.taps, self.pitch)
        return [
            Call(native.compile_ir(_products(self.vectors)), words, self.parts, parallel),
            Call(native.compile_ir(_totals()), total, self.channels, parallel),
        ]

    def _spans(self) -> np.ndarray:
        """For each tap of a row: the first output pixel that it reaches, how many, and the source of the first."""
        w = self.c.geometry.window
        spans = (w.span(-1, k) for k in range(w.kernel[-1]))
        return np.array([(lo * self.channels, hi - lo, first * self.channels) for lo, hi, first in spans], np.int64)


@functools.cache
def _products(count: int) -> str:
    """IR over parts: (x, y, sums, the parts' first rows, `_row`'s words, spans of a row's taps, how many of these,
    channels, elements from an x to the next, from a row of y to the next, taps, elements of a tap's sums)."""
    v, block = machine().vector, count * machine().width
    f = Code()
    x, y, sums, parts = (f.word("%args", i, "ptr") for i in range(4))
    spans = f.word("%args", 12, "ptr")
    width, channels, step, line, taps, pitch = (f.word("%args", i) for i in range(13, 19))
    size = f.mul(taps, pitch)
    with f.loop("%begin", "%end") as part:
        part_sums = f.at(sums, f.mul(part, size), "double")
        f.zero(part_sums, f.mul(size, 8))
        with (
            f.loop(f.word(parts, part), f.word(parts, f.add(part, 1))) as row,
            _row(f, 4, row).taps(f) as (at_w, at_x),
            f.loop(0, channels, block) as c,
        ):
            xs, ys = f.at(x, f.add(at_x, c)), f.at(y, f.add(f.mul(row, line), c))
            to = f.at(part_sums, f.add(at_w, c), "double")
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
