"""Generated scenes for detectors: coloured shapes on noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from recompute.data import Dataset
from recompute.errors import UsageError

from .targets import Locations

#: classes of objects
SHAPES = ("rectangle", "ellipse", "triangle")
#: most that an object may overlap one before it, of the smaller area
_HIDDEN = 0.2


class Scenes(Dataset):
    """`count` images [3, height, width] of up to `objects` shapes on noise, with their boxes, classes and targets.

    Image i depends on the seed and i only: it is drawn when it is taken, from counters, and nothing is stored.
    Columns: `x`, the targets of `locations`, `boxes` [objects, 4] (x1, y1, x2, y2) and `classes` [objects] (-1: none).
    """

    def __init__(
        self,
        locations: Locations,
        count: int = 1000,
        *,
        objects: int = 3,
        sides: tuple[int, int] = (12, 32),
        noise: float = 0.25,
        seed: int = 0,
    ) -> None:
        height, width = locations.image
        if not 2 <= sides[0] <= sides[1] <= min(height, width):
            raise UsageError(f"sides of {sides} do not fit an image of {height}x{width}: give smaller ones")
        if count < 0 or objects < 1:
            raise UsageError(f"scenes need a count of at least 0 and at least 1 object, not {count} and {objects}")
        self.locations, self.count, self.objects = locations, count, objects
        self.sides, self.noise, self.seed = sides, noise, seed
        self.name = f"{count} scenes of seed {seed}"
        self.notes: Mapping[str, str] = {}
        self.columns = {
            "x": (np.dtype(np.float32), (3, height, width)),
            **locations.columns(),
            "boxes": (np.dtype(np.float32), (objects, 4)),
            "classes": (np.dtype(np.int64), (objects,)),
        }
        self.finite = frozenset(self.columns)

    def __len__(self) -> int:
        return self.count

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The images with these numbers, stacked, with their targets."""
        return self.read(indices, tuple(self.columns))

    def read(self, indices: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Some columns of `take`."""
        numbers = np.asarray(indices)
        wrong = numbers[(numbers < 0) | (numbers >= self.count)]
        if wrong.size:
            raise UsageError(f"{self.name} have no number {wrong[0]}: they are numbered 0 to {self.count - 1}")
        x = np.empty((len(numbers), 3, *self.locations.image), np.float32)
        boxes = np.zeros((len(numbers), self.objects, 4), np.float32)
        classes = np.full((len(numbers), self.objects), -1, np.int64)
        for i, index in enumerate(numbers.tolist()):
            self._draw(index, x[i], boxes[i], classes[i])
        every: dict[str, np.ndarray] = {"x": x, "boxes": boxes, "classes": classes}
        if any(name not in every for name in names):
            every.update(self.locations.targets(boxes, classes))
        return {name: every[name] for name in names}

    def at_epoch(self, epoch: int) -> Scenes:
        """The same in every epoch."""
        return self

    def _draw(self, index: int, image: np.ndarray, boxes: np.ndarray, classes: np.ndarray) -> None:
        """Writes an image, and its boxes and classes over "none"."""
        g = np.random.Generator(np.random.Philox(key=np.array([self.seed, index], np.uint64)))
        height, width = self.locations.image
        g.standard_normal(out=image, dtype=np.float32)
        image *= np.float32(self.noise)
        there = 0
        for _ in range(int(g.integers(1, self.objects + 1))):
            w, h = (int(s) for s in g.integers(self.sides[0], self.sides[1] + 1, 2))
            left, top = int(g.integers(0, width - w + 1)), int(g.integers(0, height - h + 1))
            box, kind = np.array([left, top, left + w, top + h]), int(g.integers(len(SHAPES)))
            colour = g.uniform(0.7, 1.5, 3) * g.choice([-1.0, 1.0], 3)
            if _hides(box, boxes[:there]):
                continue
            mask = _shape(kind, h, w)
            rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
            part = image[:, top : top + h, left : left + w]
            part += colour.astype(np.float32)[:, None, None] * mask
            boxes[there] = left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1
            classes[there], there = kind, there + 1


def _shape(kind: int, height: int, width: int) -> np.ndarray:
    """A mask [height, width] of a shape that fills it, but perhaps for pixels at its corners."""
    y = (np.arange(height)[:, None] + 0.5) / height
    x = (np.arange(width)[None, :] + 0.5) / width
    if SHAPES[kind] == "ellipse":
        return (2 * x - 1) ** 2 + (2 * y - 1) ** 2 <= 1
    if SHAPES[kind] == "triangle":
        return np.abs(2 * x - 1) <= y
    return np.ones((height, width), bool)


def _hides(box: np.ndarray, others: np.ndarray) -> bool:
    """Whether a box covers too much of another one, or is covered too much."""
    sides = np.minimum(box[2:], others[:, 2:]) - np.maximum(box[:2], others[:, :2])
    both = np.maximum(sides, 0).prod(-1)
    area = np.minimum((box[2:] - box[:2]).prod(), (others[:, 2:] - others[:, :2]).prod(-1))
    return bool((both > _HIDDEN * area).any())
