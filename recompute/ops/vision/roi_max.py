"""MaxRoiPool: the largest element of each bin of a region."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...language.factors import SUM, factor
from ...language.types import Array, TensorType
from .roi import Regions, on_host


class Pooled(Regions, abstract=True):
    """The base of MaxRoiPool and its gradient."""

    pooled_shape: tuple[int, ...]
    spatial_scale: float = 1.0

    def bins(self) -> tuple[int, int]:
        return self.pooled_shape[0], self.pooled_shape[1]

    def check(self, x: TensorType, rois: TensorType) -> None:
        """TypeRuleError where x [N, C, H, W] and rois [R, 5] do not fit."""
        if x.ndim != 4 or rois.ndim != 2 or rois.shape[1] != 5 or len(self.pooled_shape) != 2:
            raise self.fail("needs x [N, C, H, W], rois [R, 5] and two entries of pooled_shape", x, rois)
        if not x.is_float or rois.dtype != x.dtype or (rois.shape[0] and not math.prod(x.shape[2:])):
            raise self.fail("needs floats of one element type, and something to take", x, rois)
        if min(self.pooled_shape) < 1:
            raise self.fail("pooled_shape must be at least 1 by 1", x, rois)

    def candidates(self, roi: Array, h: int, w: int) -> Iterator[tuple[Any, Any]]:
        """The elements of each bin, by rows; bins that have fewer: nan."""
        spans = []
        for at, n, size in ((2, self.pooled_shape[0], h), (1, self.pooled_shape[1], w)):
            first, last = self.corner(roi[at]), self.corner(roi[at + 2])
            step = max(last - first + 1, 1) / n
            low = np.clip([math.floor(i * step) + first for i in range(n)], 0, size)
            high = np.clip([math.ceil((i + 1) * step) + first for i in range(n)], 0, size)
            spans.append((low, high))
        (top, bottom), (left, right) = spans
        for i, j in itertools.product(range((bottom - top).max(initial=0)), range((right - left).max(initial=0))):
            there = ((top + i < bottom)[:, None]) & ((left + j < right)[None])
            yield np.where(there, (top + i)[:, None] * w + (left + j)[None], 0), np.where(there, 1.0, np.nan)


class MaxRoiPool(Pooled, onnx=True):
    """(x [N, C, H, W], rois [R, 5]) → [R, C, *pooled_shape]: the largest element of each bin (Girshick 2015).

    A row of rois is (image, x1, y1, x2, y2), ends included, rounded to whole elements; an empty bin gives 0.  The
    gradient goes to the first of equal elements; none goes to the regions.
    """

    on_host = "the regions say what is read"

    def infer(self, x, rois):
        """One small image for each region."""
        self.check(x, rois)
        return (x.with_shape((rois.shape[0], x.shape[1], *self.pooled_shape)),)

    def axis_factors(self, ins, outs):
        return [factor(ins[1].shape[0], [None, 0], [0]), factor(ins[0].shape[1], [1], [1])]

    def scratch(self, ins, outs):
        return self.rooms(ins[0])

    def compute(self, ins, outs, scratch):
        x = ins[0]
        for roi, y in zip(on_host(ins[1]), outs[0], strict=True):
            n = self.image(roi[0], len(x))
            self.pick(x[n], self.winners(x[n], roi, scratch), y)

    def gradient(self, b, ins, outs, grads):
        """dy to the largest."""
        return [
            b.MaxRoiPoolGrad(*ins, grads[0], pooled_shape=self.pooled_shape, spatial_scale=self.spatial_scale),
            None,
        ]

    @classmethod
    def samples(cls, draw):
        """Regions that overlap, that leave the image, that are small."""
        yield draw.case(
            cls((2, 2)), draw.distinct("f64[2,2,5,4]"), _boxes(), still=(1,), second_order=False
        )  # piecewise constant
        yield draw.case(cls((3, 1), 0.5), draw("f32[2,1,4,4]"), _boxes().astype(np.float32))


def _boxes() -> np.ndarray:
    return np.array([[0, 0.2, 0.1, 3.3, 4.2], [1, 1, 1, 9, 2], [1, 2, 2, 2, 2], [0, -4, -3, -2, 1.2]])


class MaxRoiPoolGrad(Pooled):
    """(x, rois, dy) → the gradient of MaxRoiPool by x."""

    on_host = "the regions say what is read"

    def infer(self, x, rois, dy):
        self.check(x, rois)
        if dy != x.with_shape((rois.shape[0], x.shape[1], *self.pooled_shape)):
            raise self.fail("dy does not fit", x, rois, dy)
        return (x,)

    def axis_factors(self, ins, outs):
        return [factor(ins[1].shape[0], [None, 0, 0], [SUM]), factor(ins[0].shape[1], [1, None, 1], [1])]

    def scratch(self, ins, outs):
        return self.rooms(ins[0])

    def compute(self, ins, outs, scratch):
        x, rois, dy = ins
        outs[0].fill(0)
        for roi, up in zip(on_host(rois), dy, strict=True):
            n = self.image(roi[0], len(x))
            self.put(outs[0][n], self.winners(x[n], roi, scratch), up)

    def gradient(self, b, ins, outs, grads):
        raise self.fail("has no second derivative", *(v.type for v in ins))

    @classmethod
    def samples(cls, draw):
        x, dy = draw.distinct("f64[2,2,5,4]"), draw("f64[4,2,2,2]")
        yield draw.case(cls((2, 2)), x, _boxes(), dy, gradient=False, export=False)
