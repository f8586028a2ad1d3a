"""What each location of a feature pyramid is to find: the targets of FCOS (Tian et al. 2019, arXiv 1904.01355)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recompute.errors import UsageError


class Locations:
    """The locations of a pyramid's levels, level by level and row by row, and the assignment of boxes to them.

    `image`: (height, width); `strides`: those of the levels.  A level of stride s is for boxes whose farthest side is
    more than `reach`·s/2 and at most `reach`·s away (the first level also for smaller ones, the last also for larger
    ones); the paper's `reach` is 8.  Only locations within `radius` strides of a box's middle are for it.
    """

    def __init__(
        self, image: Sequence[int], strides: Sequence[int] = (8, 16, 32), *, reach: float = 8.0, radius: float = 1.5
    ) -> None:
        self.image, self.strides = (int(image[0]), int(image[1])), tuple(int(s) for s in strides)
        if not self.strides or min(self.strides) < 1 or min(self.image) < 1:
            raise UsageError(f"locations need an image and strides of at least 1, not {self.image} and {self.strides}")
        if not (reach > 0 and radius > 0):
            raise UsageError(f"reach and radius must be positive, not {reach} and {radius}")
        points, stride, least, most = [], [], [], []
        for i, s in enumerate(self.strides):
            rows, columns = (np.arange(-(-side // s)) * s + s // 2 for side in self.image)
            y, x = np.meshgrid(rows, columns, indexing="ij")
            points.append(np.stack([x.ravel(), y.ravel()]))
            stride.append(np.full(y.size, s))
            least.append(np.full(y.size, 0.0 if i == 0 else reach * s / 2))
            most.append(np.full(y.size, np.inf if i == len(self.strides) - 1 else reach * s))
        #: x and y of each location [2, L], and its level's stride [L]
        self.points = np.concatenate(points, 1).astype(np.float64)
        self.stride = np.concatenate(stride).astype(np.float64)
        self._least, self._most = np.concatenate(least), np.concatenate(most)
        self._radius = radius * self.stride

    def __len__(self) -> int:
        return len(self.stride)

    def assign(self, boxes: np.ndarray, classes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Targets of one image: classes i64 [L], distances f32 [4, L] in strides, and centerness f32 [L].

        `boxes` [M, 4] (x1, y1, x2, y2), `classes` [M], -1 where there is no box.  A location that is for several boxes
        takes the smallest.  Where there is no box the class is -1, the distances are 1 and the centerness is 0.
        """
        there = np.asarray(classes) >= 0
        boxes, classes = np.asarray(boxes, np.float64)[there], np.asarray(classes)[there]
        found = np.full(len(self), -1, np.int64)
        distances, centerness = np.ones((4, len(self)), np.float32), np.zeros(len(self), np.float32)
        if not len(boxes):
            return found, distances, centerness
        low = self.points[None] - boxes[:, :2, None]
        high = boxes[:, 2:, None] - self.points[None]
        sides = np.concatenate([low, high], 1)  # boxes, sides, locations
        away = np.abs((low - high) / 2).max(1)  # from the middle
        farthest = sides.max(1)
        fits = (sides.min(1) > 0) & (away < self._radius) & (farthest > self._least) & (farthest <= self._most)
        area = (boxes[:, 2:] - boxes[:, :2]).prod(1)
        best = np.where(fits, area[:, None], np.inf).argmin(0)
        front = np.flatnonzero(fits.any(0))
        own = sides[best[front], :, front].T
        found[front] = classes[best[front]]
        distances[:, front] = own / self.stride[front]
        shares = np.minimum(own[:2], own[2:]) / np.maximum(own[:2], own[2:])
        centerness[front] = np.sqrt(shares.prod(0))
        return found, distances, centerness

    def targets(self, boxes: Any, classes: Any) -> dict[str, np.ndarray]:
        """Targets of a batch, by the names of the zoo's detectors: boxes [N, M, 4], classes [N, M]."""
        each = [self.assign(b, c) for b, c in zip(boxes, classes, strict=True)]
        names = ("target_classes", "target_distances", "target_centerness")
        empty = self.assign(np.zeros((0, 4)), np.zeros(0))
        return {
            name: np.stack([e[i] for e in each]) if each else np.zeros((0, *empty[i].shape), empty[i].dtype)
            for i, name in enumerate(names)
        }

    def columns(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Element types and shapes of one image's targets."""
        empty = self.targets(np.zeros((1, 0, 4)), np.zeros((1, 0)))
        return {name: (a.dtype, a.shape[1:]) for name, a in empty.items()}
