"""Col2Im, its transpose Im2Col, and DeformConv."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...language.factors import Place, factor
from ...language.op import Cost, Imported, ImportedNode, imports
from ...language.types import Array
from ..shape.reshape import Move
from ..window import Window, full, output_size


class Windows(Move, abstract=True):
    """The base of both: windows of `block` elements over an image of shape `image`."""

    image: tuple[int, ...]
    block: tuple[int, ...]
    strides: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    dilations: tuple[int, ...] = ()

    def window(self) -> Window:
        """The geometry of the windows."""
        n = len(self.block)
        strides, dilations = full(self.strides, n, 1), full(self.dilations, n, 1)
        pads = full(self.pads, 2 * n, 0)
        if len(self.image) != n or min((*self.block, *strides, *dilations), default=1) < 1:
            raise self.fail("image and block need the same axes; blocks, strides and dilations must be positive")
        out = tuple(
            max(output_size(self.image[a], self.block[a], strides[a], dilations[a], pads[a] + pads[n + a]), 0)
            for a in range(n)
        )
        return Window(self.image, out, self.block, strides, dilations, pads[:n])

    def parts(self, columns: Any, image: Any, w: Window) -> Iterator[tuple[Array, Array]]:
        """Views [N, C, ...] of the columns and of the image, one pair for each element of a window."""
        columns = columns.reshape(*image.shape[:2], w.taps, *w.out)
        for tap in w.reach():
            yield columns[:, :, tap.number][(..., *tap.out)], image[(..., *tap.inp)]

    def cost(self, ins, outs):
        """One addition for each element of the columns."""
        return Cost(max(ins[0].size, outs[0].size), super().cost(ins, outs).bytes)


class Col2Im(Windows):
    """columns [N, C·∏block, windows] → [N, C, *image]: each column added where its window lies (ONNX Col2Im-18)."""

    def infer(self, x):
        w = self.window()
        if x.ndim != 3 or x.shape[2] != w.positions or x.shape[1] % w.taps:
            raise self.fail(f"needs [N, a multiple of {w.taps}, {w.positions}]", x)
        return (x.with_shape((x.shape[0], x.shape[1] // w.taps, *self.image)),)

    def axis_factors(self, ins, outs):
        x, taps = ins[0], self.window().taps
        return [factor(x.shape[0], [0], [0]), factor(outs[0].shape[1], [Place(1, inner=taps)], [1])]

    def compute(self, ins, outs, scratch):
        """One addition of views for each element of a window."""
        outs[0].fill(0)
        for source, target in self.parts(ins[0], outs[0], self.window()):
            target += source

    def gradient(self, b, ins, outs, grads):
        return [b.Im2Col(grads[0], **vars(self))]

    def export(self, g, ins, outs):
        options = {"strides": self.strides, "pads": self.pads, "dilations": self.dilations}
        g.node("Col2Im", [ins[0], g.ints(self.image), g.ints(self.block)], outs, **options)
        return True

    @classmethod
    def from_onnx(cls, node):
        image, block = (tuple(map(int, node.need_constant(i, n))) for i, n in ((1, "image_shape"), (2, "block_shape")))
        options = {k: tuple(node.attributes[k]) for k in ("strides", "pads", "dilations") if k in node.attributes}
        return node.emit(cls(image, block, **options), node.need(0))

    @classmethod
    def samples(cls, draw):
        for op, shape, _ in _samples(cls):
            yield draw.case(op, draw(f"f64[{shape}]"), export=len(op.image) == 2)
        yield draw.case(cls((2, 2), (1, 1)), draw("f32[1,2,4]"))


def _samples(cls: Any) -> list[tuple[Any, str, str]]:
    return [
        (cls((3, 4), (2, 2)), "2,8,6", "2,2,3,4"),
        (cls((5, 4), (2, 3), strides=(2, 1), pads=(1, 0, 0, 1)), "1,6,9", "1,1,5,4"),
        (cls((6,), (2,), strides=(3,), dilations=(2,)), "1,4,2", "1,2,6"),
    ]


class Im2Col(Windows):
    """[N, C, *image] → columns [N, C·∏block, windows]: the elements of each window, 0 outside."""

    def infer(self, x):
        w = self.window()
        if x.shape[2:] != self.image:
            raise self.fail(f"needs images {list(self.image)}", x)
        return (x.with_shape((x.shape[0], x.shape[1] * w.taps, w.positions)),)

    def axis_factors(self, ins, outs):
        x, taps = ins[0], self.window().taps
        return [factor(x.shape[0], [0], [0]), factor(x.shape[1], [1], [Place(1, inner=taps)])]

    def compute(self, ins, outs, scratch):
        """One copy of views for each element of a window."""
        outs[0].fill(0)
        for target, source in self.parts(outs[0], ins[0], self.window()):
            target[...] = source

    def gradient(self, b, ins, outs, grads):
        return [b.Col2Im(grads[0], **vars(self))]

    def expand(self, b, x):
        """A Gather from the padded image, flat."""
        w, n = self.window(), len(self.image)
        pads = full(self.pads, 2 * n, 0)
        wide = tuple(d + pads[a] + pads[n + a] for a, d in enumerate(self.image))
        padded = b.Pad(x, pads=(0, 0, *pads[:n], 0, 0, *pads[n:])) if any(pads) else x
        at = np.zeros((*w.kernel, *w.out), np.int64)
        for a in range(n):
            at = at * wide[a] + _places(a, n, w.out[a], w.kernel[a], w.strides[a], w.dilations[a])
        flat = b.Reshape(padded, shape=(*x.shape[:2], math.prod(wide)))
        taken = b.Gather(flat, b.constant(at.reshape(-1), "i64"), axis=2)
        return (b.Reshape(taken, shape=(x.shape[0], x.shape[1] * w.taps, w.positions)),)

    @classmethod
    def samples(cls, draw):
        for op, _, shape in _samples(cls):
            yield draw.case(op, draw(f"f64[{shape}]"))


def _places(axis: int, rank: int, out: int, kernel: int, stride: int, dilation: int) -> np.ndarray:
    """Where the elements of the windows lie along one of `rank` axes; broadcasts with [*kernel, *out]."""
    places = np.arange(kernel)[:, None] * dilation + np.arange(out) * stride
    shape = [1] * 2 * rank
    shape[axis], shape[rank + axis] = kernel, out
    return places.reshape(shape)


@imports("DeformConv")
def deform_conv(node: ImportedNode) -> Imported:
    """Samples of x at shifted places, times the mask, then a product with the weights (Dai et al. 2017, Zhu 2019).

    The places become a grid for GridSample, so x, weights, offsets, mask and bias all have gradients.
    """
    b, attributes = node.builder, node.attributes
    x, weights, offset = (node.need(i) for i in range(3))
    bias, mask = node.input(3), node.input(4)
    n, c, *size = x.shape
    r, kernel = len(size), weights.shape[2:]
    groups, apart = attributes.get("group", 1), attributes.get("offset_group", 1)
    strides, dilations = full(attributes.get("strides", ()), r, 1), full(attributes.get("dilations", ()), r, 1)
    pads, out, taps = full(attributes.get("pads", ()), 2 * r, 0), offset.shape[2:], math.prod(kernel)
    base = np.zeros((*kernel, r, *out))
    for a in range(r):
        base[(slice(None),) * r + (a,)] = _places(a, r, out[a], kernel[a], strides[a], dilations[a]) - pads[a]
    # place p of n elements is (2p + 1) / n - 1 of the grid, where corners are not aligned
    scale = (2 / np.array(size)).reshape(r, *(1,) * r)
    shift = node.named(node.body().constant((base.reshape(taps, r, *out) + 0.5) * scale - 1, x.type.numpy))
    moved = b.Reshape(offset, shape=(n * apart, taps, r, *out))
    grid = b.Add(b.Mul(moved, b.constant(scale, x)), shift)
    axes = (0, 1, *range(3, 3 + r), 2)
    grid = b.Transpose(grid, perm=axes)
    if r > 1:  # x first
        grid = b.Gather(grid, b.constant(np.arange(r)[::-1].copy(), "i64"), axis=2 + r)
    grid = b.Reshape(grid, shape=(n * apart, taps * out[0], *out[1:], r))
    columns = b.GridSample(b.Reshape(x, shape=(n * apart, c // apart, *size)), grid)
    if mask is not None:
        columns = b.Mul(columns, b.Reshape(mask, shape=(n * apart, 1, taps * out[0], *out[1:])))
    columns = b.Reshape(columns, shape=(n, groups, c // groups * taps, math.prod(out)))
    y = b.MatMul(b.Reshape(weights, shape=(groups, weights.shape[0] // groups, c // groups * taps)), columns)
    y = b.Reshape(y, shape=(n, weights.shape[0], *out))
    return y if bias is None else b.Add(y, b.Reshape(bias, shape=(weights.shape[0], *(1,) * r)))
