"""Mean average precision of detected boxes, by pycocotools."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from recompute.metrics import Metric

from .decoding import Decoder


class MeanAveragePrecision(Metric):
    """COCO's mAP, with mAP50 and mAP75, of the boxes that `decoder` makes of a batch of outputs.

    The truth is read from the batch: `boxes` [N, M, 4] (x1, y1, x2, y2), `classes` [N, M], -1 where there is no box,
    and, where `crowd` is true, `crowd` [N, M], which marks boxes around many objects.
    """

    def __init__(self, decoder: Decoder, *, crowd: bool = False) -> None:
        self.decoder, self.crowd = decoder, crowd
        super().__init__("mAP", decoder.READS[0], "classes")

    @property
    def needs(self) -> tuple[str, ...]:
        """The outputs that the decoder reads."""
        return self.decoder.READS

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the truth."""
        return ("boxes", "classes", "crowd") if self.crowd else ("boxes", "classes")

    def reset(self) -> None:
        """Forgets every batch."""
        self._images = 0
        self._true: list[dict[str, Any]] = []
        self._found: list[dict[str, Any]] = []

    def update(self, outputs: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]) -> None:
        """Adds a batch."""
        crowd = batch["crowd"] if self.crowd else np.zeros(batch["classes"].shape, bool)
        for found, boxes, classes, around in zip(
            self.decoder(outputs), batch["boxes"], batch["classes"], crowd, strict=True
        ):
            there = classes >= 0
            for box, kind, many in zip(boxes[there], classes[there], around[there], strict=True):
                entry = self._entry(box, kind)
                entry |= {"id": len(self._true) + 1, "iscrowd": int(many), "area": entry["bbox"][2] * entry["bbox"][3]}
                self._true.append(entry)
            for box, score, kind in zip(*found, strict=True):
                self._found.append(self._entry(box, kind) | {"score": float(score)})
            self._images += 1

    def _entry(self, box: np.ndarray, kind: int) -> dict[str, Any]:
        """An object of the current image, its box as left, top, width and height."""
        left, top, right, bottom = (float(x) for x in box)
        return {
            "image_id": self._images,
            "category_id": int(kind),
            "bbox": [left, top, right - left, bottom - top],
        }

    def result(self) -> dict[str, float]:
        """The figures, from 0 to 1; NaN where nothing was to be found."""
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        names = ("mAP", "mAP50", "mAP75")
        if not self._true or not self._found:
            return dict.fromkeys(names, 0.0 if self._true else math.nan)
        truth = COCO()
        kinds = sorted({entry["category_id"] for entry in (*self._true, *self._found)})
        truth.dataset = {
            "info": {},
            "images": [{"id": i} for i in range(self._images)],
            "annotations": self._true,
            "categories": [{"id": kind} for kind in kinds],
        }
        with contextlib.redirect_stdout(io.StringIO()):
            truth.createIndex()
            judged = COCOeval(truth, truth.loadRes(self._found), "bbox")
            judged.evaluate()
            judged.accumulate()
            judged.summarize()
        return dict(zip(names, map(float, judged.stats[:3]), strict=True))
