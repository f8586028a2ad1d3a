"""Images with boxes in COCO's format: a JSON file of annotations, and a folder of images."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recompute.data import Dataset
from recompute.data.image_files import in_mode, opened_image, pillow
from recompute.errors import JobError, UsageError
from recompute.support.files import regular

from .targets import Locations

#: mean and standard deviation of ImageNet's colours, from 0 to 1
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class CocoBoxes(Dataset):
    """The images of a file of annotations, in the order of their ids, scaled to fit `locations.image`.

    Columns: `x` [3, height, width] (colours less ImageNet's mean, by its deviation; 0 to the right and below what the
    image fills), the targets of `locations`, `boxes` [objects, 4] (x1, y1, x2, y2 in the scaled image), `classes`
    [objects] (positions in `names`; -1: no box) and `crowd` [objects] (boxes around many objects, which are no
    target).  `objects`: room for boxes (default: the most that an image has).
    """

    def __init__(
        self, annotations: str | Path, folder: str | Path, locations: Locations, *, objects: int | None = None
    ) -> None:
        self.path, self.folder, self.locations = Path(annotations), Path(folder), locations
        self.name = f"'{self.path}'"
        self.notes: Mapping[str, str] = {}
        images, boxes, categories = _read(self.path)
        self._class = {c["id"]: i for i, c in enumerate(sorted(categories, key=lambda c: c["id"]))}
        #: names of the classes
        self.names = [str(c.get("name", c["id"])) for c in sorted(categories, key=lambda c: c["id"])]
        self._images = sorted(images, key=lambda image: image["id"])
        self._boxes: dict[Any, list[dict[str, Any]]] = {image["id"]: [] for image in self._images}
        for box in boxes:
            if box["image_id"] not in self._boxes or box["category_id"] not in self._class:
                raise JobError(f"{self.name}: an annotation is for image {box['image_id']} and category "
                               f"{box['category_id']}, which the file does not list both")  # fmt: skip
            self._boxes[box["image_id"]].append(box)
        most = max((len(b) for b in self._boxes.values()), default=0)
        self.objects = max(most, 1) if objects is None else objects
        if self.objects < most:
            raise UsageError(f"{self.name} has an image with {most} boxes, more than objects={objects}")
        height, width = locations.image
        self.columns = {
            "x": (np.dtype(np.float32), (3, height, width)),
            **locations.columns(),
            "boxes": (np.dtype(np.float32), (self.objects, 4)),
            "classes": (np.dtype(np.int64), (self.objects,)),
            "crowd": (np.dtype(bool), (self.objects,)),
        }
        self.finite = frozenset(self.columns)

    def __len__(self) -> int:
        return len(self._images)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The images with these numbers, stacked, with their targets."""
        return self.read(indices, tuple(self.columns))

    def read(self, indices: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Some columns of `take`; image files are opened for `x` only."""
        numbers = np.asarray(indices)
        wrong = numbers[(numbers < 0) | (numbers >= len(self))]
        if wrong.size:
            raise UsageError(f"{self.name} has no image {wrong[0]}: they are numbered 0 to {len(self) - 1}")
        count = len(numbers)
        boxes, classes = np.zeros((count, self.objects, 4), np.float32), np.full((count, self.objects), -1, np.int64)
        crowd = np.zeros((count, self.objects), bool)
        for i, number in enumerate(numbers.tolist()):
            image = self._images[number]
            scale = self._scale(image["width"], image["height"])
            for j, box in enumerate(self._boxes[image["id"]]):
                left, top, wide, high = box["bbox"]
                boxes[i, j] = np.array([left, top, left + wide, top + high]) * scale
                classes[i, j], crowd[i, j] = self._class[box["category_id"]], bool(box.get("iscrowd", 0))
        every: dict[str, np.ndarray] = {"boxes": boxes, "classes": classes, "crowd": crowd}
        if "x" in names:
            every["x"] = np.zeros((count, 3, *self.locations.image), np.float32)
            for i, number in enumerate(numbers.tolist()):
                self._open(self._images[number], every["x"][i])
        if any(name not in every for name in names):
            every.update(self.locations.targets(boxes, np.where(crowd, -1, classes)))
        return {name: every[name] for name in names}

    def at_epoch(self, epoch: int) -> CocoBoxes:
        """The same in every epoch."""
        return self

    def _scale(self, width: int, height: int) -> float:
        return min(self.locations.image[0] / height, self.locations.image[1] / width)

    def _open(self, image: dict[str, Any], x: np.ndarray) -> None:
        """Writes an image's colours, scaled, to the upper left of x."""
        library = pillow()
        path = self.folder / image["file_name"]
        if not path.resolve().is_relative_to(self.folder.resolve()):
            raise JobError(f"{self.name}: the image '{image['file_name']}' is not inside of '{self.folder}'")
        try:
            with opened_image(path) as opened:
                if opened.size != (image["width"], image["height"]):
                    raise JobError(
                        f"{self.name}: '{path}' is {opened.size[0]}x{opened.size[1]}, but the file says "
                        f"{image['width']}x{image['height']}"
                    )
                scale = self._scale(*opened.size)
                size = max(1, round(opened.size[0] * scale)), max(1, round(opened.size[1] * scale))
                colours = in_mode(opened, "RGB").resize(size, library.Resampling.BILINEAR)
        except (OSError, ValueError, library.DecompressionBombError) as e:
            raise JobError(f"{self.name}: the image '{path}' cannot be read: {e}") from e
        colours = (np.asarray(colours, np.float32) / 255 - np.array(MEAN, np.float32)) / np.array(DEVIATION, np.float32)
        x[:, : size[1], : size[0]] = colours.transpose(2, 0, 1)


def _read(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Images, annotations and categories of a file.  JobError where it is not in COCO's format."""
    try:
        found = json.loads(regular(path).read_bytes())
    except OSError as e:
        raise JobError(f"'{path}' cannot be read: {e.strerror or e}") from e
    except (ValueError, RecursionError) as e:
        raise JobError(f"'{path}' is no JSON file: {e}") from e
    needed: dict[str, dict[str, type]] = {
        "images": {"id": int, "file_name": str, "width": int, "height": int},
        "annotations": {"image_id": int, "category_id": int, "bbox": list},
        "categories": {"id": int},
    }
    lists = []
    for part, fields in needed.items():
        entries = found.get(part) if isinstance(found, dict) else None
        if not isinstance(entries, list):
            raise JobError(f"'{path}' is not in COCO's format: it has no list '{part}'")
        for number, entry in enumerate(entries):
            for name, kind in fields.items():
                if not isinstance(entry, dict) or not isinstance(entry.get(name), kind):
                    raise JobError(f"'{path}': entry {number} of '{part}' has no '{name}' of type {kind.__name__}")
            _check_sizes(path, part, number, entry)
        lists.append(entries)
    return lists[0], lists[1], lists[2]


def _check_sizes(path: Path, part: str, number: int, entry: dict[str, Any]) -> None:
    """JobError where an image has no area, or a box is not four finite numbers."""
    if part == "images" and min(entry["width"], entry["height"]) < 1:
        raise JobError(f"'{path}': entry {number} of 'images' is {entry['width']}x{entry['height']}")
    if part == "annotations":
        box = entry["bbox"]
        good = len(box) == 4 and all(isinstance(v, (int, float)) and math.isfinite(v) for v in box)
        if not good or min(box[2:]) < 0:
            raise JobError(f"'{path}': the 'bbox' of annotation {number} is not left, top, width and height: {box}")
