"""Writes coco.npz: random boxes and detections, and their figures by pycocotools (pip install pycocotools).

python tests/data/detection/make_coco.py
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

IMAGES, CLASSES, MOST = 12, 4, 9


def truth(g: np.random.Generator) -> dict[str, np.ndarray]:
    """Boxes [IMAGES, MOST, 4], classes (-1: no box) and boxes around crowds; the last class has no box."""
    corner = g.uniform(0, 80, (IMAGES, MOST, 2))
    boxes = np.concatenate([corner, corner + g.uniform(5, 40, (IMAGES, MOST, 2))], -1).round(2)
    classes = g.integers(0, CLASSES - 1, (IMAGES, MOST))
    classes[np.arange(MOST) >= g.integers(0, MOST + 1, IMAGES)[:, None]] = -1
    return {"boxes": boxes, "classes": classes, "crowd": g.random((IMAGES, MOST)) < 0.1}


def found(g: np.random.Generator, true: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Detections near true boxes (sometimes two of one, sometimes of a wrong class) and others; equal scores occur."""
    image, index = np.nonzero(true["classes"] >= 0)
    twice = np.concatenate([np.arange(len(image)), g.integers(0, len(image), len(image) // 2)])
    image, index = image[twice], index[twice]
    boxes = true["boxes"][image, index] + g.normal(0, 2.0, (len(image), 4))
    classes = np.where(g.random(len(image)) < 0.15, g.integers(0, CLASSES, len(image)), true["classes"][image, index])
    corner = g.uniform(0, 80, (30, 2))
    boxes = np.concatenate([boxes, np.concatenate([corner, corner + g.uniform(5, 40, (30, 2))], -1)]).round(2)
    image = np.concatenate([image, g.integers(0, IMAGES, 30)])
    classes = np.concatenate([classes, g.integers(0, CLASSES, 30)])
    order = g.permutation(len(image))
    scores = g.uniform(0, 1, len(image)).round(2)
    return {"image": image[order], "found_boxes": boxes[order], "found_classes": classes[order], "scores": scores}


def judged(true: dict[str, np.ndarray], detections: dict[str, np.ndarray], limit: int) -> list[float]:
    """mAP, mAP50 and mAP75 by pycocotools."""
    images = [{"id": i + 1} for i in range(IMAGES)]
    annotations: list[dict[str, Any]] = []
    for i, m in zip(*np.nonzero(true["classes"] >= 0), strict=True):
        box, crowd = xywh(true["boxes"][i, m]), int(true["crowd"][i, m])
        annotations.append({
            "id": len(annotations) + 1, "image_id": int(i) + 1, "category_id": int(true["classes"][i, m]) + 1,
            "bbox": box, "area": box[2] * box[3], "iscrowd": crowd,
        })  # fmt: skip
    results = [
        {"image_id": int(i) + 1, "category_id": int(c) + 1, "bbox": xywh(box), "score": float(s)}
        for i, c, box, s in zip(
            *(detections[k] for k in ("image", "found_classes", "found_boxes", "scores")), strict=True
        )
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "images": images, "annotations": annotations, "categories": [{"id": c + 1} for c in range(CLASSES)],
        }  # fmt: skip
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results), "bbox")
        evaluation.params.maxDets = [limit]
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][..., 0, 0]  # overlaps, recalls, classes
    return [float(p[p > -1].mean()) for p in (precision, precision[0], precision[5])]


def xywh(box: np.ndarray) -> list[float]:
    """(x1, y1, x2, y2) as COCO writes boxes."""
    return [float(box[0]), float(box[1]), float(box[2] - box[0]), float(box[3] - box[1])]


if __name__ == "__main__":
    g = np.random.default_rng(0)
    true = truth(g)
    detections = found(g, true)
    figures = {f"limit_{n}": np.array(judged(true, detections, n)) for n in (100, 2)}
    print(figures)
    np.savez_compressed(Path(__file__).with_name("coco.npz"), **true, **detections, **figures)  # type: ignore[arg-type]
