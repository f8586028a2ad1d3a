"""Mean average precision of detected boxes, as COCO defines it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..errors import UsageError
from .base import Metric

#: intersections over unions from which a box counts as found
OVERLAPS = np.linspace(0.5, 0.95, 10)
#: recalls at which the precision is read
RECALLS = np.linspace(0, 1, 101)


class Detections(NamedTuple):
    """What was found in an image: boxes [K, 4] (x1, y1, x2, y2), scores [K] and classes [K]."""

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray


@dataclass
class _OfClass:
    """What was found of a class so far: scores, and for each overlap whether it is right, and whether it counts."""

    scores: list[np.ndarray] = field(default_factory=list)
    right: list[np.ndarray] = field(default_factory=list)
    counts: list[np.ndarray] = field(default_factory=list)
    there: int = 0


class MeanAveragePrecision(Metric):
    """COCO's mAP: the mean over classes, and over overlaps .50, .55, ..., .95, of the mean precision at 101 recalls.

    `decode`: from a batch of outputs to one `Detections` an image; `reads`: the outputs that it needs.  The truth is
    read from the batch: `boxes` names boxes [N, M, 4] (x1, y1, x2, y2), `classes` their classes [N, M], -1 where there
    is no box, and `crowd` (None: there are none) marks [N, M] boxes around many objects, which may be found or not.  Of
    each class and image the `limit` best detections count.  Classes without a true box do not count.
    """

    def __init__(
        self,
        decode: Callable[[Mapping[str, np.ndarray]], Sequence[Detections]],
        reads: Sequence[str],
        *,
        boxes: str = "boxes",
        classes: str = "classes",
        crowd: str | None = None,
        limit: int = 100,
        name: str = "mAP",
    ) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise UsageError(f"metric '{name}': limit must be a whole number of at least 1, not {limit!r}")
        if isinstance(reads, str) or not reads:
            raise UsageError(f"metric '{name}': reads must be a list of the outputs that decode needs, not {reads!r}")
        self.decode, self.reads, self.limit = decode, tuple(reads), limit
        self.boxes, self.classes, self.crowd = boxes, classes, crowd
        super().__init__(name, self.reads[0], classes)

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the forward values that `update` reads."""
        return self.reads

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the truth."""
        return tuple(self._columns())

    def reset(self) -> None:
        """Forgets every batch."""
        self._found: dict[int, _OfClass] = {}

    def update(self, outputs: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]) -> None:
        """Adds a batch."""
        for wanted, have, what in ((self.reads, outputs, "output"), (self._columns(), batch, "batch's column")):
            for name in wanted:
                if name not in have:
                    raise UsageError(
                        f"metric '{self.name}' reads the {what} '{name}', but got {', '.join(have) or 'nothing'}"
                    )
        boxes, classes = np.asarray(batch[self.boxes]), np.asarray(batch[self.classes])
        if boxes.shape != (*classes.shape, 4) or classes.ndim != 2:
            raise UsageError(
                f"metric '{self.name}': '{self.boxes}' must be [N, M, 4] and '{self.classes}' [N, M], but they are "
                f"{boxes.shape} and {classes.shape}"
            )
        crowd = np.zeros(classes.shape, bool) if self.crowd is None else np.asarray(batch[self.crowd], bool)
        found = self.decode(outputs)
        if len(found) != len(boxes):
            raise UsageError(f"metric '{self.name}': decode gave {len(found)} images, but the batch has {len(boxes)}")
        for image, detections in enumerate(found):
            there = classes[image] >= 0
            self.add(detections, boxes[image, there], classes[image, there], crowd[image, there])

    def _columns(self) -> list[str]:
        return [self.boxes, self.classes, *([] if self.crowd is None else [self.crowd])]

    def add(self, found: Detections, boxes: np.ndarray, classes: np.ndarray, crowd: np.ndarray | None = None) -> None:
        """Adds an image: what was found, and the true boxes [M, 4] and classes [M]."""
        crowd = np.zeros(len(classes), bool) if crowd is None else np.asarray(crowd, bool)
        found_classes = np.asarray(found.classes)
        for c in np.union1d(found_classes, classes).tolist():
            mine, true = found_classes == c, np.asarray(classes) == c
            # true boxes that must be found come first, as in COCO's evaluation
            order = np.argsort(crowd[true], kind="stable")
            self._add_class(int(c), found.boxes[mine], found.scores[mine], boxes[true][order], crowd[true][order])

    def _add_class(self, c: int, boxes: np.ndarray, scores: np.ndarray, true: np.ndarray, crowd: np.ndarray) -> None:
        best = np.argsort(-scores, kind="stable")[: self.limit]
        overlap = overlaps(boxes[best], true, crowd)
        right = np.zeros((len(OVERLAPS), len(best)), bool)
        counts = np.ones_like(right)
        for i, least in enumerate(OVERLAPS):
            _match(overlap, crowd, least, right[i], counts[i])
        here = self._found.setdefault(c, _OfClass())
        here.scores.append(scores[best])
        here.right.append(right)
        here.counts.append(counts)
        here.there += int((~crowd).sum())

    def result(self) -> dict[str, float]:
        """The figures, from 0 to 1: over all overlaps (under the metric's name), at .50 ("...50") and .75 ("...75")."""
        each = np.array([_average_precision(c) for _, c in sorted(self._found.items()) if c.there])
        if not each.size:
            return dict.fromkeys((self.name, f"{self.name}50", f"{self.name}75"), math.nan)
        return {
            self.name: float(each.mean()),
            f"{self.name}50": float(each[:, 0].mean()),
            f"{self.name}75": float(each[:, 5].mean()),
        }


def overlaps(boxes: np.ndarray, others: np.ndarray, crowd: np.ndarray | None = None) -> np.ndarray:
    """Intersection over union of boxes [K, 4] with others [M, 4], as [K, M] in float64; for boxes around a crowd, the
    intersection over the own area."""
    a = np.asarray(boxes, np.float64).reshape(-1, 1, 4)
    b = np.asarray(others, np.float64).reshape(1, -1, 4)
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    both = np.maximum(sides, 0).prod(-1)
    area, other = ((x[..., 2:] - x[..., :2]).prod(-1) for x in (a, b))
    union = area + other - both
    if crowd is not None:
        union = np.where(np.asarray(crowd, bool)[None, :], area, union)
    return np.divide(both, union, out=np.zeros_like(both), where=union > 0)


def _match(overlap: np.ndarray, crowd: np.ndarray, least: float, right: np.ndarray, counts: np.ndarray) -> None:
    """Gives each detection, the best first, the true box that it overlaps most among those that are left."""
    left = np.ones(len(crowd), bool)
    for d in np.flatnonzero((overlap >= least).any(1)):
        row = overlap[d]
        for among in (left & ~crowd, crowd):
            fits = among & (row >= least)
            if fits.any():
                best = len(row) - 1 - int(np.where(fits, row, -1)[::-1].argmax())  # the last of equal ones, as COCO's
                left[best] = False
                right[d], counts[d] = True, not crowd[best]
                break


def _average_precision(c: _OfClass) -> np.ndarray:
    """The mean precision at all recalls, for each overlap."""
    order = np.argsort(-np.concatenate(c.scores), kind="stable")
    right, counts = np.concatenate(c.right, 1)[:, order], np.concatenate(c.counts, 1)[:, order]
    found = np.cumsum(right & counts, 1, dtype=np.float64)
    wrong = np.cumsum(~right & counts, 1, dtype=np.float64)
    averages = np.zeros(len(OVERLAPS))
    for i in range(len(OVERLAPS)):
        precision = found[i] / np.maximum(found[i] + wrong[i], 1)
        precision = np.maximum.accumulate(precision[::-1])[::-1]
        at = np.searchsorted(found[i] / c.there, RECALLS, side="left")
        averages[i] = np.append(precision, 0.0)[at].mean()
    return averages
