"""Files in COCO's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from detecting import CocoBoxes, Locations
from detecting.coco import DEVIATION, MEAN

LOCATIONS = Locations((64, 96), (8, 16))


def contents() -> dict[str, Any]:
    """Two images, the second without boxes; classes with gaps in their numbers."""
    return {
        "images": [
            {"id": 9, "file_name": "b.png", "width": 40, "height": 40},
            {"id": 4, "file_name": "a.png", "width": 96, "height": 32},
        ],
        "annotations": [
            {"image_id": 4, "category_id": 7, "bbox": [10, 4, 20, 16], "iscrowd": 0},
            {"image_id": 4, "category_id": 2, "bbox": [50.5, 8, 30, 12]},
            {"image_id": 4, "category_id": 2, "bbox": [0, 0, 90, 30], "iscrowd": 1},
        ],
        "categories": [{"id": 7, "name": "dog"}, {"id": 2, "name": "cat"}],
    }


def written(folder: Path, found: Any) -> Path:
    """The file of annotations."""
    path = folder / "boxes.json"
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    return path


def images(folder: Path) -> dict[str, np.ndarray]:
    """Image files of random colours."""
    image = pytest.importorskip("PIL.Image")
    g = np.random.default_rng(0)
    drawn = {"a": g.integers(0, 256, (32, 96, 3), np.uint8), "b": g.integers(0, 256, (40, 40, 3), np.uint8)}
    for name, colours in drawn.items():
        image.fromarray(colours).save(folder / f"{name}.png")
    return drawn


def test_boxes_and_targets(tmp_path: Path) -> None:
    data = CocoBoxes(written(tmp_path, contents()), tmp_path, LOCATIONS)
    assert (len(data), data.names, data.objects) == (2, ["cat", "dog"], 3)
    names = tuple(name for name in data.columns if name != "x")  # no image is opened
    batch = data.read(np.array([0, 1]), names)
    np.testing.assert_array_equal(batch["boxes"][0], [[10, 4, 30, 20], [50.5, 8, 80.5, 20], [0, 0, 90, 30]])
    assert batch["classes"].tolist() == [[1, 0, 0], [-1, -1, -1]]
    assert batch["crowd"].tolist() == [[False, False, True], [False] * 3]
    # what is around a crowd is no target
    expected = LOCATIONS.targets(batch["boxes"][:1, :2], batch["classes"][:1, :2])
    for name, array in expected.items():
        np.testing.assert_array_equal(batch[name][:1], array)
    assert (batch["target_classes"][1] == -1).all()


def test_images_are_scaled_to_fit(tmp_path: Path) -> None:
    drawn = images(tmp_path)
    data = CocoBoxes(written(tmp_path, contents()), tmp_path, LOCATIONS, objects=5)
    batch = data.take(np.array([1, 0]))
    assert {name: (a.dtype, a.shape[1:]) for name, a in batch.items()} == data.columns
    expected = (drawn["a"] / 255 - MEAN) / DEVIATION
    np.testing.assert_allclose(batch["x"][1, :, :32], expected.transpose(2, 0, 1), atol=1e-5)  # fits as it is
    assert not batch["x"][1, :, 32:].any()
    square = batch["x"][0]  # 40x40 becomes 64x64
    assert square[:, :64, :64].std() > 0.5 and not square[:, :, 64:].any()


def test_boxes_are_scaled_with_the_image(tmp_path: Path) -> None:
    found = contents()
    found["annotations"] = [{"image_id": 9, "category_id": 7, "bbox": [5, 10, 20, 30]}]
    batch = CocoBoxes(written(tmp_path, found), tmp_path, LOCATIONS).read(np.array([1]), ("boxes",))
    np.testing.assert_allclose(batch["boxes"][0, 0], [8, 16, 40, 64])


def changed(part: str, **fields: Any) -> dict[str, Any]:
    """The contents with other fields of the first entry of a part."""
    found = contents()
    found[part][0].update(fields)
    return found


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("{", "boxes.json' is no JSON file"),
        ("[]", "not in COCO's format: it has no list 'images'"),
        ({"images": [], "annotations": []}, "it has no list 'categories'"),
        (changed("images", width="40"), "entry 0 of 'images' has no 'width' of type int"),
        (changed("images", height=0), "entry 0 of 'images' is 40x0"),
        (changed("annotations", bbox=[1, 2, 3]), "'bbox' of annotation 0 is not left, top, width and height"),
        (changed("annotations", bbox=[1, 2, -3, 4]), "'bbox' of annotation 0 is not left, top, width and height"),
        (changed("annotations", bbox=[1, 2, 3, float("nan")]), "'bbox' of annotation 0"),
        (changed("annotations", image_id=5), "an annotation is for image 5 and category 7"),
        (changed("annotations", category_id=5), "an annotation is for image 4 and category 5"),
    ],
)
def test_broken_files(tmp_path: Path, found: Any, message: str) -> None:
    with pytest.raises(rc.JobError, match=message):
        CocoBoxes(written(tmp_path, found), tmp_path, LOCATIONS)


def test_broken_images(tmp_path: Path) -> None:
    images(tmp_path)
    (tmp_path / "c.png").write_bytes(b"no image")
    for name, message in (
        ("d.png", "cannot be read"),
        ("c.png", "cannot be read"),
        ("../b.png", r"'../b.png' is not inside of"),
        ("a.png", "is 96x32, but the file says 40x40"),
    ):
        data = CocoBoxes(written(tmp_path, changed("images", file_name=name)), tmp_path, LOCATIONS)
        with pytest.raises(rc.JobError, match=message):
            data.take(np.array([1]))


def test_requests_are_checked(tmp_path: Path) -> None:
    path = written(tmp_path, contents())
    with pytest.raises(rc.UsageError, match="has an image with 3 boxes, more than objects=2"):
        CocoBoxes(path, tmp_path, LOCATIONS, objects=2)
    with pytest.raises(rc.UsageError, match="has no image 2: they are numbered 0 to 1"):
        CocoBoxes(path, tmp_path, LOCATIONS).take(np.array([2]))
    with pytest.raises(rc.JobError, match=r"none.json' cannot be read: No such file"):
        CocoBoxes(tmp_path / "none.json", tmp_path, LOCATIONS)
