"""Numerics of convolution: im2col in blocks and one BLAS product a block.

A block is some rows of one image, or several small images, so that its columns stay in the cache and the scratch
stays small whatever the batch.  1x1 convolutions need no columns; depthwise ones are sums over the taps of the
kernel.  All functions write preallocated buffers only.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...language.types import Array, Operands
from ..window import BLOCK, Tap, Window

#: columns of a product below which BLAS is less than fast
_COLUMNS = 256
#: bytes of the columns of one block
_COLUMN_BYTES = 2 * BLOCK


@dataclass(frozen=True)
class Geometry:
    """A convolution: `group` groups of `cg` input channels and `mg` output channels over windows."""

    batch: int
    group: int
    cg: int
    mg: int
    window: Window

    @functools.cached_property
    def pointwise(self) -> bool:
        """Whether every output position sees just the input position of the same index."""
        w = self.window
        return w.taps == 1 and w.inp == w.out and not any(w.begin) and set(w.strides) <= {1}

    @functools.cached_property
    def rows(self) -> int:
        """Rows of the matrix of columns, for one group."""
        return self.cg * self.window.taps

    @functools.cached_property
    def multiplications(self) -> int:
        """Products of two numbers in the convolution, or in one of its gradients, padding included."""
        return self.batch * self.group * self.mg * self.rows * self.window.positions

    @functools.cached_property
    def rest(self) -> int:
        """Output positions of one index along the first spatial axis."""
        return self.window.positions // max(self.window.out[0], 1)

    def flipped(self) -> Geometry:
        """For strides of 1: the convolution that gives the input's gradient."""
        w = self.window
        begin = tuple((k - 1) * d - p for k, d, p in zip(w.kernel, w.dilations, w.begin, strict=True))
        return Geometry(
            self.batch, self.group, self.mg, self.cg, dataclasses.replace(w, inp=w.out, out=w.inp, begin=begin)
        )


@dataclass(frozen=True)
class Blocks:
    """How a convolution is cut: `images` whole images, or `rows` rows of one, at a time."""

    images: int
    rows: int

    def __call__(self, geo: Geometry) -> Iterator[tuple[int, int, int, int]]:
        """(first image, image after, first row, row after)."""
        for n in range(0, geo.batch, self.images):
            for r in range(0, geo.window.out[0], self.rows):
                yield n, min(n + self.images, geo.batch), r, min(r + self.rows, geo.window.out[0])


@functools.lru_cache(maxsize=1024)
def blocks(geo: Geometry, least: int = _COLUMNS) -> Blocks:
    """Blocks of about `_COLUMN_BYTES`, of at least `least` columns where there are as many."""
    wanted = max(least, _COLUMN_BYTES // (4 * max(geo.group * geo.rows, 1)))
    positions, out = max(geo.window.positions, 1), max(geo.window.out[0], 1)
    if positions < wanted:
        pieces = -(-geo.batch // max(wanted // positions, 1))
        return Blocks(max(-(-geo.batch // max(pieces, 1)), 1), out)
    pieces = -(-out // max(wanted // max(geo.rest, 1), 1))
    return Blocks(1, -(-out // pieces))


def _column_count(geo: Geometry, b: Blocks) -> int:
    return b.images * b.rows * geo.rest


def _direct(geo: Geometry) -> bool:
    """Whether the images themselves serve as columns."""
    return geo.pointwise and (geo.window.positions >= _COLUMNS or geo.batch == 1)


class Columns:
    """Fills the matrix of columns, [channels, taps, images, rows, rest], block after block in one buffer."""

    def __init__(self, geo: Geometry, buffer: Array) -> None:
        self.geo = geo
        self.buffer = buffer.reshape(-1)
        self.taps = geo.window.reach()
        self.clean: Any = None  # the shape of the blocks for which the padding has been cleared

    def view(self, n: int, rows: int) -> Array:
        """The buffer's start under the layout of a block."""
        geo = self.geo
        shape = (geo.group * geo.cg, *geo.window.kernel, n, rows, *geo.window.out[1:])
        size = geo.group * geo.rows * n * rows * geo.rest
        return self.buffer[:size].reshape(shape)

    def gather(self, x: Array, block: tuple[int, int, int, int]) -> Array:
        """Columns of a block as [group, rows, columns]."""
        n0, n1, r0, r1 = block
        geo = self.geo
        to: Any = self.view(n1 - n0, r1 - r0)
        if to.shape != self.clean:
            if self._pads():
                to.fill(0)  # what lies outside along the other axes stays zero in later blocks of this shape
            self.clean = to.shape
        for tap in self.taps:
            part = to[(slice(None), *tap.index)]
            clip = _clip(tap, geo.window.strides[0], r0, r1)
            if clip is None:
                part.fill(0)
                continue
            out, inp = clip
            part[:, :, : out[0].start].fill(0)
            part[:, :, out[0].stop :].fill(0)
            part[(slice(None), slice(None), *out)] = x[(slice(n0, n1), slice(None), *inp)].swapaxes(0, 1)
        return to.reshape(geo.group, geo.rows, -1)

    def _pads(self) -> bool:
        whole = tuple(slice(0, d) for d in self.geo.window.out)
        return len(self.taps) < self.geo.window.taps or any(t.out[1:] != whole[1:] for t in self.taps)

    def scatter(self, columns: Any, dx: Array, block: tuple[int, int, int, int]) -> None:
        """Adds columns to the input elements that they come from (the transpose of `gather`)."""
        n0, n1, r0, r1 = block
        for tap in self.taps:
            clip = _clip(tap, self.geo.window.strides[0], r0, r1)
            if clip is not None:
                out, inp = clip
                target = dx[(slice(n0, n1), slice(None), *inp)].swapaxes(0, 1)
                target += columns[(slice(None), *tap.index, slice(None), *out)]


def _clip(tap: Tap, stride: int, r0: int, r1: int) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The slices of a tap (output relative to r0) within rows [r0, r1)."""
    rows = tap.out[0]
    lo, hi = max(rows.start, r0), min(rows.stop, r1)
    if lo >= hi:
        return None
    at = tap.inp[0].start + (lo - rows.start) * stride
    return ((slice(lo - r0, hi - r0), *tap.out[1:]), (slice(at, at + (hi - lo - 1) * stride + 1, stride), *tap.inp[1:]))


# -- forward ------------------------------------------------------------------------------------------------------


def forward_scratch(geo: Geometry) -> list[int]:
    """Elements of the scratch buffers of `forward`."""
    if _direct(geo):
        return []
    if geo.cg == 1:
        return [_depth_block(geo)[2]]
    b = blocks(geo)
    n = _column_count(geo, b)
    return [geo.group * geo.rows * n] + ([geo.group * geo.mg * n] if b.images > 1 else [])


def forward(geo: Geometry, x: Array, w: Array, bias: Array | None, out: Array, scratch: Operands) -> None:
    """out[n, m] = Σ over the group's channels c and taps k of w[m, c, k] · x[n, c, position + k], plus bias."""
    if out.size == 0:
        return
    n, g, p = geo.batch, geo.group, geo.window.positions
    if _direct(geo):
        np.matmul(w.reshape(g, geo.mg, geo.cg), x.reshape(n, g, geo.cg, p), out=out.reshape(n, g, geo.mg, p))
    elif geo.cg == 1:
        Depthwise(geo, scratch[0]).forward(x, w, out)
    else:
        _forward_columns(geo, (x, w, bias), out, scratch)
        return
    if bias is not None:
        flat = out.reshape(n, g * geo.mg, p)
        np.add(flat, bias[:, None], out=flat)


def _forward_columns(geo: Geometry, ins: Sequence[Any], out: Array, scratch: Operands) -> None:
    (x, w, bias), g, m = ins, geo.group, geo.group * geo.mg
    flat = out.reshape(geo.batch, m, -1)
    w3 = w.reshape(g, geo.mg, geo.rows)
    columns = Columns(geo, scratch[0])
    for block in blocks(geo)(geo):
        n0, n1, r0, r1 = block
        cols = columns.gather(x, block)
        if n1 - n0 == 1:
            target = flat[n0].reshape(g, geo.mg, -1)[:, :, r0 * geo.rest : r1 * geo.rest]
            np.matmul(w3, cols, out=target)
            if bias is not None:
                np.add(target, bias.reshape(g, -1, 1), out=target)
            continue
        result = scratch[1].reshape(-1)[: m * cols.shape[2]]
        np.matmul(w3, cols, out=result.reshape(g, geo.mg, -1))
        images = result.reshape(m, n1 - n0, -1).swapaxes(0, 1)
        if bias is not None:
            np.add(images, bias[:, None], out=flat[n0:n1])
        else:
            flat[n0:n1] = images


# -- gradient by the input ----------------------------------------------------------------------------------------


def _flips(geo: Geometry) -> bool:
    return set(geo.window.strides) <= {1} and geo.cg > 1 and geo.mg > 1


def grad_input_scratch(geo: Geometry) -> list[int]:
    """Elements of the scratch buffers of `grad_input`."""
    if _direct(geo):
        return []
    if geo.cg == 1:
        return [_depth_block(geo)[2]]
    if _flips(geo):
        return [geo.group * geo.mg * geo.rows, *forward_scratch(geo.flipped())]
    b = blocks(geo)
    n = _column_count(geo, b)
    return [geo.group * geo.rows * n] + ([geo.group * geo.mg * n] if b.images > 1 else [])


def grad_input(geo: Geometry, w: Array, dy: Array, dx: Array, scratch: Operands) -> None:
    """dx[n, c, position + k] += w[m, c, k] · dy[n, m, position], over all m of the group, positions and taps."""
    n, g, p = geo.batch, geo.group, geo.window.positions
    if dx.size == 0:
        return
    if _direct(geo):
        transposed = w.reshape(g, geo.mg, geo.cg).swapaxes(1, 2)
        np.matmul(transposed, dy.reshape(n, g, geo.mg, p), out=dx.reshape(n, g, geo.cg, p))
    elif geo.cg == 1:
        Depthwise(geo, scratch[0]).grad_input(w, dy, dx)
    elif _flips(geo):
        kernel = geo.window.kernel
        turned = scratch[0].reshape(g, geo.cg, geo.mg, *kernel)
        back: tuple = (Ellipsis, *(slice(None, None, -1) for _ in kernel))
        turned[...] = w.reshape(g, geo.mg, geo.cg, *kernel)[back].swapaxes(1, 2)
        forward(geo.flipped(), dy, turned, None, dx, scratch[1:])
    else:
        dx.fill(0)
        transposed = w.reshape(g, geo.mg, geo.rows).swapaxes(1, 2)
        columns = Columns(geo, scratch[0])
        for block in blocks(geo)(geo):
            n0, n1, r0, r1 = block
            part = _maps(geo, dy, block, scratch)
            cols = columns.view(n1 - n0, r1 - r0)
            np.matmul(transposed, part, out=cols.reshape(g, geo.rows, -1))
            columns.scatter(cols, dx, block)


def _maps(geo: Geometry, dy: Array, block: tuple[int, int, int, int], scratch: Operands) -> Array:
    """dy of a block as [group, mg, columns]: a view for one image, else copied together."""
    n0, n1, r0, r1 = block
    flat = dy.reshape(geo.batch, geo.group * geo.mg, -1)
    if n1 - n0 == 1:
        return flat[n0].reshape(geo.group, geo.mg, -1)[:, :, r0 * geo.rest : r1 * geo.rest]
    size = (n1 - n0) * flat.shape[1] * flat.shape[2]
    together = scratch[1].reshape(-1)[:size]
    together.reshape(flat.shape[1], n1 - n0, -1)[...] = flat[n0:n1].swapaxes(0, 1)
    return together.reshape(geo.group, geo.mg, -1)


# -- gradient by the weight ---------------------------------------------------------------------------------------


def grad_weight_scratch(geo: Geometry) -> list[int]:
    """Elements of the scratch buffers of `grad_weight`."""
    if geo.cg == 1:
        return [_depth_block(geo)[2]]
    partial = geo.group * _partial_maps(geo) * geo.rows
    if _direct(geo):
        return [partial] if geo.batch > 1 else []
    b = blocks(geo, 2 * _COLUMNS)
    n = _column_count(geo, b)
    several = b.images < geo.batch or b.rows < geo.window.out[0]
    return [geo.group * geo.rows * n, geo.group * geo.mg * n if b.images > 1 else 0, partial if several else 0]


def _partial_maps(geo: Geometry) -> int:
    """Output channels of a group whose partial sums are computed at a time: about four blocks of bytes."""
    wanted = max(4 * BLOCK // (4 * max(geo.group * geo.rows, 1)), 64)
    return min(geo.mg, wanted)


def grad_weight(geo: Geometry, x: Array, dy: Array, dw: Array, scratch: Operands) -> None:
    """dw[m, c, k] = Σ over images and positions of x[n, c, position + k] · dy[n, m, position]."""
    if dw.size == 0:
        return
    if geo.cg == 1:
        Depthwise(geo, scratch[0]).grad_weight(x, dy, dw)
        return
    total = dw.reshape(geo.group, geo.mg, geo.rows)
    if dy.size == 0:
        total.fill(0)
        return
    for i, (part, cols) in enumerate(_products(geo, x, dy, scratch)):
        if i == 0:
            np.matmul(part, cols.swapaxes(1, 2), out=total)
            continue
        buffer = scratch[0] if _direct(geo) else scratch[2]
        for m in range(0, geo.mg, _partial_maps(geo)):
            target = total[:, m : m + _partial_maps(geo)]
            result = buffer.reshape(-1)[: target.size].reshape(target.shape)
            np.matmul(part[:, m : m + _partial_maps(geo)], cols.swapaxes(1, 2), out=result)
            np.add(target, result, out=target)


def _products(geo: Geometry, x: Array, dy: Array, scratch: Operands) -> Iterator[tuple[Any, Any]]:
    if _direct(geo):
        for n in range(geo.batch):
            yield dy[n].reshape(geo.group, geo.mg, -1), x[n].reshape(geo.group, geo.cg, -1)
        return
    columns = Columns(geo, scratch[0])
    for block in blocks(geo, 2 * _COLUMNS)(geo):
        yield _maps(geo, dy, block, scratch), columns.gather(x, block)


# -- depthwise: one input channel a group -------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _depth_block(geo: Geometry) -> tuple[int, int, int]:
    """(images, groups, elements) of a block of about `BLOCK` bytes."""
    positions = max(geo.window.positions, 1)
    groups = min(max(BLOCK // (4 * positions), 1), geo.group)
    images = min(max(BLOCK // (4 * positions * groups), 1), max(geo.batch, 1)) if groups == geo.group else 1
    return images, groups, images * groups * positions


@dataclass
class Depthwise:
    """One input channel a group: tap by tap over blocks of images and groups; products go through the buffer."""

    geo: Geometry
    buffer: Array

    def parts(self) -> Iterator[tuple[tuple, tuple, tuple]]:
        """Places in x [n, c, ...], in maps [n, g, mg, ...] and in weights [g, mg, ...] that belong together."""
        geo = self.geo
        images, groups, _ = _depth_block(geo)
        for g in range(0, geo.group, groups):
            for n in range(0, geo.batch, images):
                here = slice(n, n + images), slice(g, g + groups)
                for m in range(geo.mg):
                    for tap in geo.window.reach():
                        yield (*here, *tap.inp), (*here, m, *tap.out), (here[1], m, *tap.index)

    def maps(self, a: Array) -> Array:
        """Maps as [images, group, mg, ...]."""
        return a.reshape(self.geo.batch, self.geo.group, self.geo.mg, *self.geo.window.out)

    def taps(self, w: Array) -> Array:
        """Weights as [group, mg, ...]."""
        return w.reshape(self.geo.group, self.geo.mg, *self.geo.window.kernel)

    def product(self, a: Array, b: Array) -> Array:
        """a · b in the start of the buffer."""
        shape = a.shape if a.size >= b.size else b.shape
        result = self.buffer.reshape(-1)[: math.prod(shape)].reshape(shape)
        np.multiply(a, b, out=result)
        return result

    def forward(self, x: Array, w: Array, out: Array) -> None:
        """`forward` of a depthwise convolution."""
        out.fill(0)
        maps, taps, ones = self.maps(out), self.taps(w), (1,) * len(self.geo.window.kernel)
        for place, at, tap in self.parts():
            target = maps[at]
            target += self.product(x[place], taps[tap].reshape(-1, *ones))

    def grad_input(self, w: Array, dy: Array, dx: Array) -> None:
        """`grad_input` of a depthwise convolution."""
        dx.fill(0)
        maps, taps, ones = self.maps(dy), self.taps(w), (1,) * len(self.geo.window.kernel)
        for place, at, tap in self.parts():
            target = dx[place]
            target += self.product(maps[at], taps[tap].reshape(-1, *ones))

    def grad_weight(self, x: Array, dy: Array, dw: Array) -> None:
        """`grad_weight` of a depthwise convolution."""
        dw.fill(0)
        maps, taps = self.maps(dy), self.taps(dw)
        spatial = tuple(range(2, 2 + len(self.geo.window.out)))
        for place, at, tap in self.parts():
            target = taps[tap]
            target += self.product(x[place], maps[at]).sum(axis=(0, *spatial))
