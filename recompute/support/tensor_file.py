"""Safetensors files, written atomically, part by part: the library's own writer takes as much memory as the file."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from .files import replacing
from .memory import in_parts

#: NumPy's names of element types → those in the files
NAMES = {
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip


def write_arrays(
    arrays: Mapping[str, np.ndarray], path: str | PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file, atomically.  ModelError if it cannot be written.

    `metadata`: in place of the entry of its format.
    """
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # each is aligned then
    header: dict[str, Any] = {"__metadata__": {"format": "np"} if metadata is None else dict(metadata)}
    at = 0
    for name, a in ordered:
        if a.dtype.name not in NAMES:
            raise ModelError(f"cannot write '{path}': '{name}' is {a.dtype.name}, which safetensors files have not")
        header[name] = {"dtype": NAMES[a.dtype.name], "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    try:
        with replacing(Path(path)) as temporary, open(temporary, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, a in ordered:
                for part in in_parts(a):
                    file.write(part.view(np.uint8).data)
    except OSError as e:
        raise ModelError(f"cannot write '{path}': {reason(e)}") from None


def reason(e: Exception) -> str:
    """What a system error says, without the file's temporary name."""
    return e.strerror if isinstance(e, OSError) and e.strerror else str(e)
