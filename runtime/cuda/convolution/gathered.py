"""Convolutions as implicit matrix products: launch parameters, from shapes only.

Three axes always: those that are missing come first, with one element.  A convolution's output, and its input's
gradient, are `Gather`s: result [rows, positions] = packed weights [rows, (tap, channel)] · what lies under each tap.
Where windows step by more than one, the input's positions of one remainder see the same taps: each remainder is a
Gather of its own.  The weight's gradient is a `Weigh`: [rows, (channel, tap)], added up over images and positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ....ops.convolution.numerics import Geometry
from ....ops.window import Window

Three = tuple[int, int, int]
#: blocks that keep a large device busy, and partial results' bytes and terms, at most
ENOUGH, PARTIAL, CHAIN = 528, 32 << 20, 8192


@dataclass(frozen=True)
class Tile:
    """A block's part of a product: `bm` rows by `bn` columns, `bk` terms at a time; `tm` by `tn` a thread."""

    bm: int
    bn: int
    bk: int
    tm: int
    tn: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.bm * self.bn // (self.tm * self.tn)

    def count(self, rows: int, columns: int) -> int:
        """Blocks over a matrix."""
        return -(-rows // self.bm) * -(-columns // self.bn)


#: tiles, each with how well it uses the arithmetic units where it is full
_SINGLE = (
    (Tile(128, 128, 8, 8, 8), 1.0), (Tile(64, 128, 16, 8, 4), 0.85), (Tile(64, 64, 16, 4, 4), 0.7),
    (Tile(32, 256, 8, 8, 4), 0.75), (Tile(16, 256, 8, 4, 4), 0.6),
)  # fmt: skip
_DOUBLE = ((Tile(64, 64, 8, 4, 4), 1.0), (Tile(32, 128, 8, 4, 4), 0.9), (Tile(16, 256, 8, 4, 4), 0.8))
#: for the weight's gradient, where neighbours in memory are terms of one sum
_WEIGH = ((Tile(128, 128, 16, 8, 8), 1.0), (Tile(64, 64, 16, 4, 4), 0.7), (Tile(32, 128, 16, 4, 4), 0.6),
          (Tile(16, 128, 16, 4, 4), 0.5))  # fmt: skip
_WEIGH_DOUBLE = ((Tile(64, 64, 8, 4, 4), 1.0), (Tile(32, 128, 8, 4, 4), 0.9), (Tile(16, 128, 8, 4, 4), 0.7))


def tile(rows: int, columns: int, groups: int, *, double: bool, weigh: bool = False) -> Tile:
    """The tile that computes least in vain; a smaller one where there are few.  The terms of `weigh` can be cut."""
    choices = (_WEIGH_DOUBLE if double else _WEIGH) if weigh else (_DOUBLE if double else _SINGLE)

    def price(choice: tuple[Tile, float]) -> float:
        t, use = choice
        blocks = t.count(rows, columns) * groups
        return (blocks if weigh else max(blocks, ENOUGH / 4)) * t.bm * t.bn / use

    return min(choices, key=price)[0]


def splits(blocks: int, steps: int, size: int, *, least: int, chain: int = 0) -> int:
    """Parts into which the terms of a product are cut, so that there are enough blocks; `steps` of a tile each.

    `size`: bytes of one part's results; `least`: steps of a part; `chain`: steps of a part at most, where it can be.
    """
    wanted = max(-(-ENOUGH // max(blocks, 1)) if blocks < ENOUGH // 2 else 1, -(-steps // chain) if chain else 1)
    return max(min(wanted, steps // least, PARTIAL // max(size, 1)), 1)


@dataclass(frozen=True)
class Gather:
    """result[image, group, row, base + step · q] = Σ over taps t and channels c of w[row, t, c] · source[image,
    group, c, q · scale + origin + t · delta], q < count and t < taps along each axis."""

    dtype: str
    group: int
    rows: int
    channels: int
    source: Three
    target: Three
    count: Three
    base: Three
    step: Three
    taps: Three
    scale: Three
    origin: Three
    delta: Three
    last: bool
    #: of the weights: the first tap along each axis and the next one, in windows of `kernel`
    kernel: Three
    first: Three
    every: Three

    @property
    def positions(self) -> int:
        """Results of one image and row."""
        return math.prod(self.count)

    @property
    def terms(self) -> int:
        """Terms of each sum."""
        return math.prod(self.taps) * self.channels

    @property
    def plain(self) -> bool:
        """Whether the results of one image and row lie behind each other."""
        return self.count == self.target

    def steps(self, t: Tile) -> int:
        """Steps of a tile through all terms."""
        return -(-self.terms // t.bk)

    def packed(self, t: Tile) -> int:
        """Elements of the packed weights, [group, terms, rows], both of whole tiles."""
        return self.group * self.steps(t) * t.bk * -(-self.rows // t.bm) * t.bm


@dataclass(frozen=True)
class Weigh:
    """dw[group, row, c, t] = Σ over images and positions q of dy[image, group, row, q] · x[image, group, c, q · scale +
    origin + t · delta]."""

    dtype: str
    group: int
    rows: int
    channels: int
    source: Three
    count: Three
    taps: Three
    scale: Three
    origin: Three
    delta: Three
    last: bool

    @property
    def columns(self) -> int:
        """Results of one row."""
        return self.channels * math.prod(self.taps)

    @property
    def positions(self) -> int:
        """Terms of one image."""
        return math.prod(self.count)


def three(values: Sequence[int], fill: int) -> Three:
    """One entry for each of three axes."""
    a, b, c = (*(fill,) * (3 - len(values)), *values)
    return a, b, c


def in_three(w: Window) -> Window:
    """Windows over three axes."""
    return Window(three(w.inp, 1), three(w.out, 1), three(w.kernel, 1), three(w.strides, 1), three(w.dilations, 1),
                  three(w.begin, 0))  # fmt: skip


def output(geo: Geometry, dtype: str, *, last: bool) -> Gather:
    """A convolution's output."""
    w = in_three(geo.window)
    origin = three([-b for b in w.begin], 0)
    return Gather(
        dtype, geo.group, geo.mg, geo.cg, source=three(w.inp, 1), target=three(w.out, 1), count=three(w.out, 1),
        base=(0, 0, 0), step=(1, 1, 1), taps=three(w.kernel, 1), scale=three(w.strides, 1), origin=origin,
        delta=three(w.dilations, 1), last=last, kernel=three(w.kernel, 1), first=(0, 0, 0), every=(1, 1, 1),
    )  # fmt: skip


def gradients(geo: Geometry, dtype: str, *, last: bool) -> Iterator[Gather]:
    """The input's gradient, for each remainder of its positions by the strides."""
    w = in_three(geo.window)
    axes = [list(_remainders(w, a)) for a in range(3)]
    for parts in itertools.product(*axes):
        count, base, taps, origin, delta, first, every = (three([p[i] for p in parts], 0) for i in range(7))
        if 0 in count:
            continue
        if 0 in taps:
            taps = (0, 0, 0)
        yield Gather(
            dtype, geo.group, geo.cg, geo.mg, source=three(w.out, 1), target=three(w.inp, 1), count=count, base=base,
            step=three(w.strides, 1), taps=taps, scale=(1, 1, 1), origin=origin, delta=delta, last=last,
            kernel=three(w.kernel, 1), first=first, every=every,
        )  # fmt: skip


def _remainders(w: Window, a: int) -> Iterator[tuple[int, ...]]:
    """(count, base, taps, origin, delta, first tap, step of the taps) of each remainder r along an axis.

    Input i = r + s · q is under tap k of the window at (i + begin - k · d) / s, where that is whole, which is
    q + (r + begin - k · d) / s; the taps of a remainder are s / gcd(s, d) apart.
    """
    s, d = w.strides[a], w.dilations[a]
    every = s // math.gcd(s, d)
    for r in range(min(s, w.inp[a])):
        count = -(-(w.inp[a] - r) // s)
        taps = [k for k in range(w.kernel[a]) if (r + w.begin[a] - k * d) % s == 0]
        first = taps[0] if taps else 0
        yield count, r, len(taps), (r + w.begin[a] - first * d) // s, -(every * d) // s, first, every


def weigh(geo: Geometry, dtype: str, *, last: bool) -> Weigh:
    """The weight's gradient."""
    w = in_three(geo.window)
    return Weigh(
        dtype, geo.group, geo.mg, geo.cg, source=three(w.inp, 1), count=three(w.out, 1), taps=three(w.kernel, 1),
        scale=three(w.strides, 1), origin=three([-b for b in w.begin], 0), delta=three(w.dilations, 1), last=last,
    )  # fmt: skip


def inside(source: int, count: int, taps: int, scale: int, origin: int, delta: int) -> bool:
    """Whether every tap of every window is inside along an axis."""
    ends = [q * scale + origin + t * delta for q in (0, count - 1) for t in (0, taps - 1)]
    return min(ends) >= 0 and max(ends) < source
