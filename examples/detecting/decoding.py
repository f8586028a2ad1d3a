"""From a detector's outputs to boxes: decoding, and suppression of boxes that overlap better ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from recompute.errors import UsageError

from .targets import Locations


class Detections(NamedTuple):
    """What was found in an image: boxes [K, 4] (x1, y1, x2, y2), scores [K] and classes [K]."""

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray


class Decoder:
    """Boxes from `scores` [N, classes, L], `distances` [N, 4, L] and `centerness` [N, L] of a detector of the zoo.

    A box's score is the root of its class's probability times the centerness.  Boxes below `least` are left out; of a
    level at most `candidates` are looked at, of an image at most `limit` are kept, after boxes that overlap a better
    one of their class by more than `overlap` are left out.  For the metric:

        MeanAveragePrecision(Decoder(locations), Decoder.READS)
    """

    #: outputs that are read
    READS = ("scores", "distances", "centerness")

    def __init__(
        self,
        locations: Locations,
        *,
        least: float = 0.05,
        overlap: float = 0.6,
        candidates: int = 1000,
        limit: int = 100,
    ) -> None:
        self.locations = locations
        self.least, self.overlap, self.candidates, self.limit = least, overlap, candidates, limit

    def __call__(self, outputs: Mapping[str, np.ndarray]) -> list[Detections]:
        """The boxes of each image, the best first."""
        scores, distances, centerness = (np.asarray(outputs[name], np.float64) for name in self.READS)
        count = len(self.locations)
        if scores.shape[-1] != count or distances.shape[-2:] != (4, count) or centerness.shape[-1] != count:
            raise UsageError(
                f"these outputs are for {scores.shape[-1]} locations, but an image of {self.locations.image} with "
                f"strides {self.locations.strides} has {count}"
            )
        probability = np.sqrt(_sigmoid(scores) * _sigmoid(centerness)[:, None])
        return [self._image(p, d) for p, d in zip(probability, distances, strict=True)]

    def _image(self, probability: np.ndarray, distances: np.ndarray) -> Detections:
        points, stride = self.locations.points, self.locations.stride
        chosen = []
        for s in self.locations.strides:
            of_level = np.flatnonzero(stride == s)
            classes, where = np.nonzero(probability[:, of_level] > self.least)
            values = probability[classes, of_level[where]]
            best = np.argsort(-values, kind="stable")[: self.candidates]
            chosen.append((classes[best], of_level[where[best]], values[best]))
        classes, where, values = (np.concatenate(parts) for parts in zip(*chosen, strict=True))
        away = distances[:, where] * stride[where]
        height, width = self.locations.image
        boxes = np.concatenate([points[:, where] - away[:2], points[:, where] + away[2:]])
        boxes = np.clip(boxes, 0, np.array([[width], [height], [width], [height]])).T
        kept = suppress(boxes, values, classes, self.overlap)[: self.limit]
        return Detections(boxes[kept], values[kept], classes[kept])


def suppress(boxes: np.ndarray, scores: np.ndarray, classes: np.ndarray, overlap: float) -> np.ndarray:
    """Numbers of the boxes that overlap no better kept one of their class by more than `overlap`, the best first."""
    order = np.argsort(-scores, kind="stable")
    kept = []
    left = np.ones(len(order), bool)
    for i, box in enumerate(order):
        if left[i]:
            kept.append(box)
            rest = order[i + 1 :]
            same = classes[rest] == classes[box]
            left[i + 1 :] &= ~(same & (overlaps(boxes[box], boxes[rest])[0] > overlap))
    return np.array(kept, np.int64)


def overlaps(boxes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Intersection over union of boxes [K, 4] with others [M, 4], as [K, M] in float64."""
    a, b = (np.asarray(x, np.float64).reshape(-1, 4) for x in (boxes, others))
    sides = np.minimum(a[:, None, 2:], b[:, 2:]) - np.maximum(a[:, None, :2], b[:, :2])
    both = np.maximum(sides, 0).prod(-1)
    area, other = ((x[:, 2:] - x[:, :2]).prod(-1) for x in (a, b))
    union = area[:, None] + other - both
    return np.divide(both, union, out=np.zeros_like(both), where=union > 0)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x) without overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)
