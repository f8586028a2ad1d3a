"""Folders of images, decoded in threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, UsageError
from ..support.threads import cores
from .base import Column, Dataset
from .drawing import uniform
from .image_files import FORMATS, in_mode, opened_image, pillow
from .pixels import Scale

#: range of the ratio of width to height of random crops, and how many are tried
_RATIOS, _TRIES = (3 / 4, 4 / 3), 10


def is_image_folder(path: Path) -> bool:
    """Whether a folder has folders with images."""
    return any(_images(p) for p in sorted(path.iterdir()) if p.is_dir())


def _images(folder: Path) -> list[Path]:
    paths = (p for p in folder.rglob("*") if p.suffix.lower() in FORMATS and not p.name.startswith("."))
    return sorted(p for p in paths if p.is_file())


class ImageFolder(Dataset):
    """The images of a folder that has a folder for each class: `image` (channels first) and `label` (int64).

    Classes are numbered in the order of their folders' names (`classes`), as by torchvision's ImageFolder.  Images are
    scaled so that `size` (height and width) can be cut out of their middle; None: that of the model's input that they
    are fitted to, or 224.

    - `mode`: "RGB", or "L" for one channel.
    - `mean`, `std`: one number a channel (or one for all), of values scaled to 0...1; None: 0 and 1.
    - `dtype`: "float32", or "uint8" for the bytes as they are.
    - `crop`: the share of the shorter side that is cut out (1.0: all of it; 0.875: 224 of 256); or two numbers, the
      smallest and largest area of a random part of the image, which is scaled to `size`, for training.
    - `flip`: mirror every second image, at random.  What is random depends on `seed`, the epoch and the sample alone.
    - `workers`: threads that decode; None: one a processor.
    """

    def __init__(
        self,
        path: str | Path,
        size: int | tuple[int, int] | None = None,
        mode: str = "RGB",
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        dtype: str = "float32",
        crop: float | tuple[float, float] = 1.0,
        flip: bool = False,
        seed: int = 0,
        workers: int | None = None,
    ) -> None:
        pillow()
        if mode not in ("RGB", "L"):
            raise UsageError(f"mode must be 'RGB' or 'L', not '{mode}'")
        self.name, self.mode, self.flip, self.seed, self.epoch = f"'{path}'", mode, flip, seed, 0
        self.open = size is None
        self.size = _checked_size(224 if size is None else size)
        self.crop = _checked_crop(crop)
        channels = len(mode)
        self.scale = Scale(channels, mean, std, dtype)
        self.files, self.labels, self.classes = _listed(Path(path))
        self.columns: dict[str, Column] = {
            "image": (np.dtype(dtype), (channels, *self.size)),
            "label": (np.dtype(np.int64), ()),
        }
        self.finite = self.costly = frozenset({"image"})
        self._pool = _Pool(cores() if workers is None else workers)

    def __len__(self) -> int:
        return len(self.files)

    def at_epoch(self, epoch: int) -> Dataset:
        """The images as they are drawn in this epoch."""
        if not self.flip and not isinstance(self.crop, tuple):
            return self
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, epoch=epoch)
        return other

    def sized(self, shapes: Sequence[tuple[int, ...]]) -> Dataset:
        """The images in the size of the only shape that has their channels, if `size` was None."""
        sizes = [s for s in shapes if len(s) == 3 and s[0] == len(self.mode)]
        if not self.open or len(sizes) != 1 or not min(sizes[0]):
            return self
        other = object.__new__(type(self))
        columns = {**self.columns, "image": (self.columns["image"][0], sizes[0])}
        other.__dict__.update(self.__dict__, size=sizes[0][1:], columns=columns)
        return other

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return self.read(indices, tuple(self.columns))

    def read(self, indices: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        """See `Dataset.read`.  ModelError for an image that cannot be decoded."""
        taken: dict[str, np.ndarray] = {}
        for name in names:
            if name == "label":
                taken[name] = self.labels[indices]
            else:
                dtype, shape = self.columns["image"]
                taken[name] = np.empty((len(indices), *shape), dtype)
                self._pool.each(self._decode, list(zip(indices.tolist(), taken[name], strict=True)))
        return taken

    def _decode(self, sample: int, out: np.ndarray) -> None:
        """Reads an image into `out`."""
        path = self.files[sample]
        draws = (
            uniform(self.seed, self.epoch, sample, 1 + 4 * _TRIES)
            if self.flip or isinstance(self.crop, tuple)
            else None
        )
        try:
            with opened_image(path) as image:
                pixels = self._cut(image, draws)
        except MemoryError:
            raise
        except Exception as e:  # damaged images raise exceptions of many kinds
            why = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
            raise ModelError(f"cannot read the image '{path}': {why}") from None
        if self.flip and draws is not None and draws[0] < 0.5:
            pixels = pixels[:, ::-1]
        self.scale.into(out, pixels.reshape(*self.size, -1).transpose(2, 0, 1))

    def _cut(self, image: Any, draws: np.ndarray | None) -> np.ndarray:
        """The part of the image that is used, at the size that is asked for."""
        height, width = self.size
        if isinstance(self.crop, tuple):
            assert draws is not None
            box = _random_box(image.size, self.crop, draws[1:])
        else:
            box = _middle_box(image.size, self.size, self.crop)
        factor = min((box[2] - box[0]) / width, (box[3] - box[1]) / height)
        if factor >= 2:  # a JPEG is decoded at a half, a quarter, or an eighth of its size where that suffices
            before = image.size
            image.draft(self.mode, (int(before[0] / factor) + 1, int(before[1] / factor) + 1))
            x, y = image.size[0] / before[0], image.size[1] / before[1]
            box = (box[0] * x, box[1] * y, box[2] * x, box[3] * y)
        image = in_mode(image, self.mode)
        if box != (0, 0, width, height) or image.size != (width, height):
            image = image.resize((width, height), pillow().Resampling.BILINEAR, box)
        return np.asarray(image)


class _Pool:
    """Threads that are started at the first use, and again in a process that was forked."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: tuple[int, ThreadPoolExecutor] | None = None

    def each(self, function: Any, arguments: Sequence[tuple]) -> None:
        """Calls the function with every tuple of arguments; the first error is raised."""
        if self.workers <= 1 or len(arguments) <= 1:
            for a in arguments:
                function(*a)
            return
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool = os.getpid(), ThreadPoolExecutor(self.workers, "images")
        for future in [self._pool[1].submit(function, *a) for a in arguments]:
            future.result()


def _listed(path: Path) -> tuple[list[Path], np.ndarray, tuple[str, ...]]:
    """The images, their labels, and the names of the classes."""
    try:
        folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as e:
        raise ModelError(f"cannot read the folder '{path}': {e.strerror or e}") from None
    classes = {p.name: _images(p) for p in folders}
    empty = [name for name, files in classes.items() if not files]
    if empty or not classes:
        what = (
            f"'{path / empty[0]}' has no images" if empty else f"'{path}' has no folders of images, one for each class"
        )
        raise ModelError(f"{what} ({', '.join(sorted(FORMATS))})")
    files = [f for of_class in classes.values() for f in of_class]
    labels = np.repeat(np.arange(len(classes)), [len(of_class) for of_class in classes.values()])
    return files, labels.astype(np.int64), tuple(classes)


def _checked_size(size: Any) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or not all(isinstance(s, int) and s > 0 for s in sides):
        raise UsageError(f"size must be one positive whole number, or two (height, width), not {size}")
    return sides


def _checked_crop(crop: Any) -> float | tuple[float, float]:
    low, high = crop if isinstance(crop, (tuple, list)) else (crop, crop)
    if not 0 < low <= high <= 1:
        raise UsageError(f"crop must be a share of the image between 0 and 1, or two (smallest, largest), not {crop}")
    return (low, high) if isinstance(crop, (tuple, list)) else low


def _middle_box(have: tuple[int, int], size: tuple[int, int], share: float) -> tuple[float, float, float, float]:
    """The largest box in the middle of an image that has the proportions of `size`, times `share`."""
    width, height = have
    factor = min(width / size[1], height / size[0]) * share
    w, h = size[1] * factor, size[0] * factor
    left, top = round((width - w) / 2), round((height - h) / 2)
    return (left, top, min(left + w, width), min(top + h, height))


def _random_box(
    have: tuple[int, int], areas: tuple[float, float], draws: np.ndarray
) -> tuple[float, float, float, float]:
    """A box of random area, proportions and place; the largest in the middle if none of them fits."""
    width, height = have
    for area, ratio, x, y in draws.reshape(-1, 4):
        wanted = width * height * (areas[0] + area * (areas[1] - areas[0]))
        proportion = _RATIOS[0] * (_RATIOS[1] / _RATIOS[0]) ** ratio
        w, h = round((wanted * proportion) ** 0.5), round((wanted / proportion) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            left, top = int(x * (width - w + 1)), int(y * (height - h + 1))
            return (left, top, left + w, top + h)
    return _middle_box(have, (height, width), 1.0)
