"""Image files, by Pillow: the formats that are read, and pixels of more than 8 bits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import load_extra
from ..support.files import regular

#: ends of names → Pillow's format.  No other format is tried: some start programs, as EPS does
FORMATS = {
    ".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".ppm": "PPM", ".pgm": "PPM", ".bmp": "BMP", ".tif": "TIFF",
    ".tiff": "TIFF", ".webp": "WEBP",
}  # fmt: skip


def pillow() -> Any:
    """The module `PIL.Image`.  MissingExtraError without Pillow."""
    return load_extra("PIL.Image", "images", "reading images", "Pillow")


@contextlib.contextmanager
def opened_image(path: Path) -> Iterator[Any]:
    """An image of one of `FORMATS`, whatever its name says.  OSError and Pillow's errors where it is none."""
    library = pillow()
    try:
        image = library.open(regular(path), formats=sorted(set(FORMATS.values())))
    except library.UnidentifiedImageError:
        raise OSError(f"it is none of {', '.join(sorted(set(FORMATS.values())))}, or damaged") from None
    with image:
        yield image


def in_mode(image: Any, mode: str) -> Any:
    """The image in mode "RGB" or "L"; 16 bits a pixel are scaled to 8.  ValueError for numbers of unknown scale."""
    if image.mode == mode:
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):  # 0 to 65535
        wide = np.asarray(image).astype(np.int64)
        image = pillow().fromarray(((wide + 128) // 257).astype(np.uint8))
    if image.mode[0] in "IF":
        kind = "whole numbers of 32 bits" if image.mode[0] == "I" else "floats"
        raise ValueError(
            f"its pixels are {kind} (mode {image.mode}), and the file does not say which are black and white: save "
            "it with 8 or 16 bits, or read such arrays from .npy files"
        )
    return image.convert(mode)
