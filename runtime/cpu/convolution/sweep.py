"""The loop structure of a convolution: axes, phases, taps, rows, and the padded blocks that it reads.

The result's positions along an axis fall into phases, start + step · q; tap k of position q reads the source at
`stride` · q + its offset.  A convolution has one phase; its input's gradient has one for each residue of the stride.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ....ops.window import Window
from ...shared.convolved import Convolved


@dataclass(frozen=True)
class Phase:
    """Positions start + step · q, q < count, along an axis, and what they read: (tap, offset)."""

    start: int
    step: int
    count: int
    stride: int
    taps: tuple[tuple[int, int], ...]


def axis_phases(w: Window, axis: int, *, backward: bool) -> list[Phase]:
    """The phases of an axis: of the output's positions, or of the input's where `backward`."""
    s, d, b = w.strides[axis], w.dilations[axis], w.begin[axis]
    ks = range(w.kernel[axis])
    if not backward:
        return [Phase(0, 1, w.out[axis], s, tuple((k, k * d - b) for k in ks))]
    return [
        Phase(
            p,
            s,
            -(-(w.inp[axis] - p) // s),
            1,
            tuple((k, (p + b - k * d) // s) for k in ks if (p + b - k * d) % s == 0),
        )
        for p in range(min(s, w.inp[axis]))
    ]


@dataclass(frozen=True)
class Block:
    """Rows of the source, padded, that some rows of the result are made from.

    `copies`: element offset in the source of each padded row, -1: zeros.  `rows` of each phase: (offset in the
    result, offset in the block).
    """

    copies: np.ndarray
    rows: tuple[np.ndarray, ...]


def spread(channels: int) -> int:
    """Elements from pixel to pixel in a copy: no multiple of 1 KiB, so that a cache's sets are used evenly."""
    return channels + 16 if channels % 256 == 0 else channels


class Sweep:
    """The sweep of a product "output" or "input" (as `kind` says; a weight's gradient sweeps as the output)."""

    def __init__(self, c: Convolved, limit: int) -> None:
        """`limit`: bytes of a block."""
        w, g = c.geometry.window, c.geometry
        self.backward = c.kind == "input"
        per_axis = [axis_phases(w, a, backward=self.backward) for a in range(len(w.inp))]
        self.phases: list[tuple[Phase, ...]] = list(itertools.product(*per_axis))
        self.source = w.out if self.backward else w.inp
        self.result = w.inp if self.backward else w.out
        self.source_channels = g.group * (g.mg if self.backward else g.cg)
        self.result_channels = g.group * (g.cg if self.backward else g.mg)
        self.batch = g.batch
        self.before, self.after = [], []
        for phases, size in zip(per_axis, self.source, strict=True):
            offsets = [(p.stride * (p.count - 1) + o, o) for p in phases for _, o in p.taps] or [(0, 0)]
            self.before.append(max(0, -min(o for _, o in offsets)))
            self.after.append(max(0, max(o for o, _ in offsets) - (size - 1)))
        self.padded = any(self.before) or any(self.after)
        self.sizes = [b + s + a for b, s, a in zip(self.before, self.source, self.after, strict=True)]
        self.pitch = spread(self.source_channels) if self.padded and c.kind == "weight" else self.source_channels
        self.limit = limit
        self.kernel = w.kernel

    @functools.cached_property
    def image(self) -> int:
        """Elements of one padded image."""
        return int(np.prod(self.sizes)) * self.pitch

    @functools.cached_property
    def steps(self) -> tuple[int, ...]:
        """Elements from one padded source position to the next, along each axis."""
        sizes_of_axes = [self.pitch]
        for size in reversed(self.sizes[1:]):
            sizes_of_axes.insert(0, sizes_of_axes[0] * size)
        return tuple(sizes_of_axes)

    def cuts(self) -> list[tuple[int, int, int, int]]:
        """(first image, after, first position along the first axis, after) of each block, in q of the phases."""
        whole = max(p[0].count for p in self.phases)
        if not self.padded:
            return [(0, self.batch, 0, whole)]
        if self.image * 4 <= self.limit or len(self.sizes) == 1:
            pieces = -(-self.batch // max(1, self.limit // (self.image * 4)))
            marks = [self.batch * i // pieces for i in range(pieces + 1)]
            return [(a, b, 0, whole) for a, b in itertools.pairwise(marks)]
        pieces = min(whole, -(-self.image * 4 // self.limit))
        marks = [whole * i // pieces for i in range(pieces + 1)]
        return [(n, n + 1, a, b) for n in range(self.batch) for a, b in itertools.pairwise(marks)]

    @functools.cached_property
    def largest_block(self) -> int:
        """Elements of the largest padded block; 0: the source is read as it is."""
        if not self.padded:
            return 0
        return max(len(self.block(cut).copies) for cut in self.cuts()) * self.sizes[-1] * self.pitch

    def block(self, cut: tuple[int, int, int, int]) -> Block:
        """The tables of one block."""
        n0, n1, q0, q1 = cut
        first, last = self._span(q0, q1)
        image = self.steps[0] * (last - first)
        rows = []
        for phase in self.phases:
            p0 = phase[0]
            qs = [range(min(q0, p0.count), min(q1, p0.count)), *(range(p.count) for p in phase[1:-1])]
            if len(phase) == 1:
                qs = []
            lines = [
                self._row(phase, n, n - n0, image, first, q) for n in range(n0, n1) for q in itertools.product(*qs)
            ]
            rows.append(np.array(lines, np.int64).reshape(-1, 2))
        return Block(self._copies(n0, n1, first, last), tuple(rows))

    def _span(self, q0: int, q1: int) -> tuple[int, int]:
        """Padded source rows [first, last) along the first axis that the positions q0 to q1 read."""
        if len(self.sizes) == 1 or not self.padded:
            return 0, self.sizes[0]
        lows, highs = [], []
        for p in {phase[0] for phase in self.phases}:
            n = min(q1, p.count)
            if n > q0 and p.taps:
                lows.append(p.stride * q0 + min(o for _, o in p.taps))
                highs.append(p.stride * (n - 1) + max(o for _, o in p.taps))
        if not lows:
            return 0, 1
        return min(lows) + self.before[0], max(highs) + self.before[0] + 1

    def _row(
        self, phase: Sequence[Phase], n: int, at: int, image: int, first: int, q: Sequence[int]
    ) -> tuple[int, int]:
        """Offsets of a row in the result and in the block: its first pixel, tap offsets of 0."""
        result, source = n, 0
        for p, size, i in zip(phase[:-1], self.result, q, strict=False):
            result = result * size + p.start + p.step * i
        for a, (p, i) in enumerate(zip(phase[:-1], q, strict=False)):
            source += (p.stride * i + self.before[a] - (first if a == 0 else 0)) * self.steps[a]
        last = phase[-1]
        result = (result * self.result[-1] + last.start) * self.result_channels
        return result, at * image + source + self.before[-1] * self.pitch

    def _copies(self, n0: int, n1: int, first: int, last: int) -> np.ndarray:
        """For each padded row of a block: where it comes from."""
        if len(self.sizes) == 1:
            axes: list[np.ndarray] = []
        else:
            ranges = [range(first, last), *(range(s) for s in self.sizes[1:-1])]
            axes = [np.array(r) - b for r, b in zip(ranges, self.before, strict=False)]
        places = np.arange(n0, n1, dtype=np.int64)
        inside = np.ones(len(places), bool)
        for at, size in zip(axes, self.source, strict=False):
            places = (places[:, None] * size + at).reshape(-1)
            inside = (inside[:, None] & (at >= 0) & (at < size)).reshape(-1)
        return np.where(inside, places * self.source[-1] * self.source_channels, -1)

    def taps(self, phase: Sequence[Phase]) -> Iterator[tuple[int, int]]:
        """(number of the tap in the weight, offset in the padded source) of each tap of a phase."""
        for taps in itertools.product(*(p.taps for p in phase)):
            number = offset = 0
            for (k, o), size, step in zip(taps, self.kernel, self.steps, strict=True):
                number, offset = number * size + k, offset + o * step
            yield number, offset
