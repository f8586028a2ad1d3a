"""Bytes of images as floats, and the usual changes of small images in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from .base import Dataset, Wrapped, need_column, show_column
from .drawing import uniform

#: pixels that are converted at once, so that they stay in a processor's cache
_CACHED = 1 << 17


class Scale:
    """Bytes as floats: scaled to 0...1, less `mean`, by `std`, one number a channel or one for all."""

    def __init__(self, channels: int, mean: Any, std: Any, dtype: str = "float32") -> None:
        if dtype not in ("float32", "uint8"):
            raise UsageError(f"dtype must be 'float32' or 'uint8', not '{dtype}'")
        if dtype == "uint8" and (mean is not None or std is not None):
            raise UsageError("mean and std apply to dtype='float32', not to bytes")
        self.floats = dtype == "float32"
        m, s = (_a_channel(v, channels, n, d) for v, n, d in ((mean, "mean", 0.0), (std, "std", 1.0)))
        if not (np.isfinite(m).all() and np.isfinite(s).all() and (s > 0).all()):
            raise UsageError(f"mean must be finite, and std positive, not {mean} and {std}")
        self.factor = (1 / (255 * s)).astype(np.float32)[:, None, None]
        self.shift = (-m / s).astype(np.float32)[:, None, None]

    def into(self, out: np.ndarray, pixels: np.ndarray) -> None:
        """Writes images (channels, height and width last) to `out`."""
        if not self.floats:
            out[...] = pixels
            return
        np.multiply(pixels, self.factor, out=out)
        if self.shift.any():
            np.add(out, self.shift, out=out)


def _a_channel(value: Any, channels: int, name: str, default: float) -> np.ndarray:
    numbers = np.atleast_1d(np.asarray(default if value is None else value, np.float64))
    if numbers.shape not in ((1,), (channels,)):
        raise UsageError(f"{name} must be one number, or {channels} (one a channel), not {len(numbers)}")
    return np.broadcast_to(numbers, (channels,))


class Pixels(Wrapped):
    """A column of images as bytes, uint8[channels,height,width], made floats: scaled to 0...1, by `mean` and `std`.

    `channels_last`: the column is [height,width,channels]; the result has channels first.  [height,width] is one
    channel.  `flip` mirrors every second image at random; `pad` moves images by up to so many pixels, with zeros at the
    border.  What is random depends on `seed`, the epoch and the sample alone.
    """

    def __init__(
        self,
        inner: Dataset,
        column: str = "image",
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        channels_last: bool = False,
        flip: bool = False,
        pad: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(inner)
        dtype, shape = kind = need_column(inner, column)
        if dtype != np.uint8 or len(shape) not in (2, 3):
            raise UsageError(
                f"column '{column}' of {self.name} has samples of {show_column(kind)}, not of uint8 with 2 or 3 axes: "
                "it is no column of images as bytes"
            )
        if len(shape) == 2:
            shape = (1, *shape)
        elif channels_last:
            shape = (shape[2], *shape[:2])
        if not 0 <= pad < min(shape[1:]):
            raise UsageError(f"pad must be at least 0 and less than the images' size, {min(shape[1:])}, not {pad}")
        self.column, self.flip, self.pad, self.seed, self.epoch = column, flip, pad, seed, 0
        self.transposed = channels_last and len(kind[1]) == 3
        self.scale = Scale(shape[0], mean, std)
        self.columns = {**inner.columns, column: (np.dtype(np.float32), shape)}
        self.finite = inner.finite | {column}

    def at_epoch(self, epoch: int) -> Dataset:
        """The images as they are drawn in this epoch."""
        if not self.flip and not self.pad:
            return super().at_epoch(epoch)
        other = self.around(self.inner.at_epoch(epoch))
        other.__dict__["epoch"] = epoch
        return other

    def read(self, indices: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        taken = self.inner.read(indices, names)
        if self.column in taken:
            images = taken[self.column]
            shape = self.columns[self.column][1]
            images = images.transpose(0, 3, 1, 2) if self.transposed else images.reshape(len(images), *shape)
            if self.flip or self.pad:
                images = self._changed(images, indices)
            out = np.empty((len(images), *shape), np.float32)
            rows = max(1, _CACHED // max(1, images[:1].size))
            for start in range(0, len(images), rows):
                self.scale.into(out[start : start + rows], images[start : start + rows])
            taken[self.column] = out
        return taken

    def _changed(self, images: np.ndarray, indices: np.ndarray) -> np.ndarray:
        padded = np.zeros(images.shape, np.uint8)
        height, width = images.shape[2:]
        for sample, image, out in zip(indices.tolist(), images, padded, strict=True):
            draws = uniform(self.seed, self.epoch, sample, 3)
            image = image[:, :, ::-1] if self.flip and draws[0] < 0.5 else image
            y, x = (int(d * (2 * self.pad + 1)) - self.pad for d in draws[1:])
            to = out[:, max(0, y) : height + min(0, y), max(0, x) : width + min(0, x)]
            to[...] = image[:, max(0, -y) : height - max(0, y), max(0, -x) : width - max(0, x)]
        return padded
