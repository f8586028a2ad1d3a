"""Mean average precision beside pycocotools' figures (tests/data/detection/make_coco.py)."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import recompute as rc
from recompute.metrics import Detections, MeanAveragePrecision
from recompute.metrics.average_precision import overlaps

DATA = dict(np.load(Path(__file__).parents[1] / "data" / "detection" / "coco.npz"))
TRUTH = {name: DATA[name] for name in ("boxes", "classes", "crowd")}


def detections(outputs: dict[str, np.ndarray]) -> list[Detections]:
    """The stored detections of the images that the "outputs" number."""
    found = []
    for i in outputs["images"]:
        mine = DATA["image"] == i
        found.append(Detections(DATA["found_boxes"][mine], DATA["scores"][mine], DATA["found_classes"][mine]))
    return found


@pytest.mark.parametrize("limit", [100, 2])
@pytest.mark.parametrize("batch", [5, 12])
def test_figures_are_those_of_pycocotools(limit: int, batch: int) -> None:
    metric = MeanAveragePrecision(detections, ["images"], crowd="crowd", limit=limit)
    for i in range(0, 12, batch):
        part = slice(i, min(i + batch, 12))
        metric.update({"images": np.arange(12)[part]}, {name: a[part] for name, a in TRUTH.items()})
    figures = metric.result()
    assert list(figures) == ["mAP", "mAP50", "mAP75"]
    np.testing.assert_allclose(list(figures.values()), DATA[f"limit_{limit}"], rtol=0, atol=1e-12)


def test_all_boxes_found_is_one_and_nothing_found_is_none() -> None:
    def all_of(outputs: dict[str, np.ndarray]) -> list[Detections]:
        return [
            Detections(b[c >= 0], np.ones((c >= 0).sum()), c[c >= 0]) for b, c in zip(*truth_of(outputs), strict=True)
        ]

    def truth_of(outputs: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        return TRUTH["boxes"][outputs["images"]], TRUTH["classes"][outputs["images"]]

    metric = MeanAveragePrecision(all_of, ["images"])
    assert math.isnan(metric.result()["mAP"])
    metric.update({"images": np.arange(12)}, TRUTH)
    assert metric.result() == {"mAP": 1.0, "mAP50": 1.0, "mAP75": 1.0}
    nothing = Detections(np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64))
    metric = MeanAveragePrecision(lambda outputs: [nothing] * 12, ["images"])
    metric.update({"images": np.arange(12)}, TRUTH)
    assert metric.result()["mAP"] == 0.0


def test_overlaps() -> None:
    a = np.array([[0, 0, 2, 2], [0, 0, 4, 4], [1, 1, 1, 1]])
    b = np.array([[1, 1, 3, 3], [5, 5, 6, 6]])
    np.testing.assert_array_equal(overlaps(a, b), [[1 / 7, 0], [4 / 16, 0], [0, 0]])
    np.testing.assert_array_equal(overlaps(a, b, np.array([True, False])), [[1 / 4, 0], [4 / 16, 0], [0, 0]])


def test_errors_say_what_is_wrong() -> None:
    metric = MeanAveragePrecision(detections, ["images"])
    assert metric.needs == ("images",)
    with pytest.raises(rc.UsageError, match=r"'mAP' reads the output 'images', but got scores"):
        metric.update({"scores": np.zeros(1)}, TRUTH)
    with pytest.raises(rc.UsageError, match=r"'mAP' reads the batch's column 'classes', but got boxes"):
        metric.update({"images": np.arange(12)}, {"boxes": TRUTH["boxes"]})
    with pytest.raises(rc.UsageError, match=r"'boxes' must be \[N, M, 4\] and 'classes' \[N, M\]"):
        metric.update({"images": np.arange(12)}, {"boxes": TRUTH["boxes"][0], "classes": TRUTH["classes"]})
    with pytest.raises(rc.UsageError, match="decode gave 3 images, but the batch has 12"):
        metric.update({"images": np.arange(3)}, TRUTH)
    with pytest.raises(rc.UsageError, match="limit must be"):
        MeanAveragePrecision(detections, ["images"], limit=0)
    with pytest.raises(rc.UsageError, match="reads must be a list"):
        MeanAveragePrecision(detections, "images")
