"""Targets of locations, decoding, suppression and scenes."""

from __future__ import annotations

import math

import numpy as np
import pytest

import recompute as rc
from detecting import SHAPES, Decoder, Locations, MeanAveragePrecision, Scenes, overlaps, suppress

INPUTS = ("target_classes", "target_distances", "target_centerness")


def test_locations_are_the_middles_of_their_cells() -> None:
    locations = Locations((32, 64), (8, 32))
    assert len(locations) == 4 * 8 + 1 * 2
    np.testing.assert_array_equal(locations.points[:, :9], [[4, 12, 20, 28, 36, 44, 52, 60, 4], [4] * 8 + [12]])
    np.testing.assert_array_equal(locations.points[:, -2:], [[16, 48], [16, 16]])
    assert len(Locations((36, 20), (16,))) == 3 * 2  # sides are rounded up, as convolutions with a stride do


def assigned_by_hand(
    locations: Locations, boxes: np.ndarray, classes: np.ndarray, reach: float, radius: float
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """The rules of the paper, location by location and box by box."""
    found, distances, centerness = [], np.ones((4, len(locations))), np.zeros(len(locations))
    last = len(locations.strides) - 1
    for i, ((x, y), s) in enumerate(zip(locations.points.T, locations.stride, strict=True)):
        level, fits = locations.strides.index(int(s)), []
        for j, (x1, y1, x2, y2) in enumerate(boxes):
            sides = (x - x1, y - y1, x2 - x, y2 - y)
            middle = max(abs(x - (x1 + x2) / 2), abs(y - (y1 + y2) / 2)) < radius * s
            low = 0 if level == 0 else reach * s / 2
            high = math.inf if level == last else reach * s
            if classes[j] >= 0 and min(sides) > 0 and middle and low < max(sides) <= high:
                fits.append(((x2 - x1) * (y2 - y1), j, sides))
        found.append(int(classes[min(fits)[1]]) if fits else -1)
        if fits:
            left, top, right, bottom = min(fits)[2]
            distances[:, i] = np.array(min(fits)[2]) / s
            across, down = min(left, right) / max(left, right), min(top, bottom) / max(top, bottom)
            centerness[i] = math.sqrt(across * down)
    return found, distances, centerness


@pytest.mark.parametrize(("reach", "radius"), [(8, 1.5), (3, 1.5), (2, 0.7)])
def test_targets_follow_the_paper(reach: float, radius: float) -> None:
    g = np.random.default_rng(0)
    locations = Locations((96, 128), (8, 16, 32), reach=reach, radius=radius)
    for _ in range(20):
        corner = g.uniform(0, 80, (5, 2))
        boxes = np.concatenate([corner, corner + g.uniform(4, 60, (5, 2))], -1)
        classes = g.integers(-1, 4, 5)
        expected = assigned_by_hand(locations, boxes, classes, reach, radius)
        for ours, theirs in zip(locations.assign(boxes, classes), expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_what_the_targets_say_is_decoded_to_the_boxes() -> None:
    pytest.importorskip("pycocotools")
    locations = Locations((64, 64), (8, 16, 32), reach=3)
    batch = Scenes(locations, 40, seed=5).take(np.arange(40))
    classes = batch["target_classes"]
    right = np.arange(3)[None, :, None] == classes[:, None]
    centerness = batch["target_centerness"].astype(np.float64)
    with np.errstate(divide="ignore"):
        middle = np.log(centerness) - np.log1p(-centerness)
    outputs = {
        "scores": np.where(right, 20.0, -1000.0),
        "distances": batch["target_distances"],
        "centerness": middle,
    }
    metric = MeanAveragePrecision(Decoder(locations))
    assert math.isnan(metric.result()["mAP"])
    metric.update({**outputs, "scores": np.full_like(outputs["scores"], -1000.0)}, batch)
    assert metric.result()["mAP"] == 0.0  # objects, of which none is found
    metric.reset()
    metric.update(outputs, batch)
    found = metric.result()
    # a box in the middle of which no location lies, or only those of a smaller box, is not found
    assert found["mAP50"] == found["mAP"] > 0.95


def test_overlaps() -> None:
    a = np.array([[0, 0, 2, 2], [0, 0, 4, 4], [1, 1, 1, 1]])
    b = np.array([[1, 1, 3, 3], [5, 5, 6, 6]])
    np.testing.assert_array_equal(overlaps(a, b), [[1 / 7, 0], [4 / 16, 0], [0, 0]])


def test_suppression_keeps_the_best_of_each_class() -> None:
    boxes = np.array([[0, 0, 10, 10], [1, 0, 11, 10], [0, 0, 10, 10], [20, 20, 30, 30], [0, 0, 10, 5]])
    scores, classes = np.array([0.5, 0.9, 0.4, 0.1, 0.3]), np.array([0, 0, 1, 0, 0])
    assert suppress(boxes, scores, classes, 0.6).tolist() == [1, 2, 4, 3]
    assert suppress(boxes, scores, classes, 0.4).tolist() == [1, 2, 3]
    assert suppress(boxes[:0], scores[:0], classes[:0], 0.5).tolist() == []


def test_decoding_keeps_its_limits() -> None:
    g = np.random.default_rng(0)
    locations = Locations((64, 64), (8, 16))
    count = len(locations)
    outputs = {
        "scores": g.normal(0, 3, (2, 4, count)),
        "distances": g.uniform(0.5, 3, (2, 4, count)),
        "centerness": g.normal(0, 1, (2, count)),
    }
    for found in Decoder(locations, limit=7)(outputs):
        assert len(found.scores) == 7 and (np.diff(found.scores) <= 0).all()
        assert found.boxes.min() >= 0 and found.boxes.max() <= 64
    for found in Decoder(locations, least=0.9)(outputs):
        assert (found.scores > 0.9).all()
    few = Decoder(locations, candidates=3, overlap=1.0, least=0.0)(outputs)
    assert [len(found.scores) for found in few] == [6, 6]  # three of each level
    nothing = Decoder(locations)({**outputs, "scores": np.full((2, 4, count), -1000.0)})
    assert [found.boxes.shape for found in nothing] == [(0, 4)] * 2


def test_scenes_depend_on_the_seed_and_their_number_only() -> None:
    locations = Locations((64, 96))
    scenes = Scenes(locations, 10, seed=3)
    whole = scenes.take(np.arange(10))
    assert {name: (a.dtype, a.shape[1:]) for name, a in whole.items()} == scenes.columns
    some = Scenes(locations, 10_000, seed=3).read(np.array([7, 2]), ("x", "target_classes"))
    assert list(some) == ["x", "target_classes"]
    for name, array in some.items():
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, whole[name][[7, 2]])
    assert not np.array_equal(Scenes(locations, 1, seed=4).take(np.array([0]))["x"], whole["x"][:1])
    assert scenes.at_epoch(1) is scenes and len(scenes) == 10
    assert scenes.take(np.array([], np.int64))["target_classes"].shape == (0, len(locations))


def test_boxes_are_those_of_the_shapes() -> None:
    batch = Scenes(Locations((64, 64)), 60, noise=0.0).take(np.arange(60))
    seen = set()
    for x, boxes, classes in zip(batch["x"], batch["boxes"], batch["classes"], strict=True):
        there = boxes[classes >= 0].astype(int)
        seen.update(classes[classes >= 0].tolist())
        assert len(there)
        covered = np.zeros((64, 64), bool)
        for left, top, right, bottom in there:
            covered[top:bottom, left:right] = True
        drawn = (x != 0).any(0)
        assert not (drawn & ~covered).any()
        if len(there) == 1:
            rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
            assert [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1] == there[0].tolist()
    assert seen == set(range(len(SHAPES)))


def test_errors_say_what_is_wrong() -> None:
    locations = Locations((64, 64))
    with pytest.raises(rc.UsageError, match="10 scenes of seed 0 have no number 10: they are numbered 0 to 9"):
        Scenes(locations, 10).take(np.array([3, 10]))
    with pytest.raises(rc.UsageError, match=r"sides of \(12, 80\) do not fit an image of 64x64"):
        Scenes(locations, sides=(12, 80))
    with pytest.raises(rc.UsageError, match=r"for 5 locations, but an image of \(64, 64\) with strides .* has 84"):
        Decoder(locations)(
            {"scores": np.zeros((1, 3, 5)), "distances": np.zeros((1, 4, 5)), "centerness": np.zeros((1, 5))}
        )
    with pytest.raises(rc.UsageError, match="strides of at least 1"):
        Locations((64, 64), (8, 0))
    with pytest.raises(rc.UsageError, match="reach and radius must be positive"):
        Locations((64, 64), reach=0)
