"""Safetensors files, written atomically, part by part: the library's own writer takes as much memory as the file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from .files import replacing
from .memory import in_parts

#: element type and shape
Kind = tuple[np.dtype, tuple[int, ...]]


def write_arrays(
    arrays: Mapping[str, np.ndarray], path: str | PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file, atomically.  ModelError if it cannot be written.

    `metadata`: in place of the entry of its format.
    """
    from safetensors import SafetensorError

    try:
        header, offsets, _ = layout({n: (a.dtype, a.shape) for n, a in arrays.items()}, metadata)
        with replacing(Path(path)) as temporary, open(temporary, "wb") as file:
            file.write(header)
            for name in offsets:
                for piece in pieces(arrays[name]):
                    file.write(piece)
    except (OSError, SafetensorError) as e:
        raise ModelError(f"cannot write '{path}': {reason(e)}") from None


def pieces(array: np.ndarray) -> Iterator[memoryview]:
    """The bytes of an array in row-major order, piece by piece; what was read of a mapped file leaves memory."""
    return (part.view(np.uint8).data for part in in_parts(array))


def layout(kinds: Mapping[str, Kind], metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int], int]:
    """The beginning of a file, where each tensor begins behind it, in this order, and the bytes of all of them."""
    from safetensors.numpy import save

    tiny = save({n: np.zeros(1, dtype) for n, (dtype, _) in kinds.items()}, dict(metadata or {"format": "np"}))
    (length,) = struct.unpack_from("<Q", tiny)
    entries: dict[str, Any] = json.loads(tiny[8 : 8 + length])
    header, offsets, at = {"__metadata__": entries.pop("__metadata__")}, {}, 0
    for name in entries:  # in the library's order
        (dtype, shape), offsets[name] = kinds[name], at
        at += int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": entries[name]["dtype"], "shape": list(shape), "data_offsets": [offsets[name], at]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offsets, at


def reason(e: Exception) -> str:
    """The text of an error, of a system error without the file's temporary name."""
    return e.strerror if isinstance(e, OSError) and e.strerror else str(e)
