"""Safetensors files, written atomically."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import numpy as np

from ..errors import ModelError
from .files import replacing


def write_arrays(
    arrays: Mapping[str, np.ndarray], path: str | PathLike[str], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file, atomically.  ModelError if it cannot be written.

    `metadata`: in place of the entry of its format.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        with replacing(Path(path)) as temporary:
            whole = {n: np.asarray(a, order="C") for n, a in arrays.items()}
            save_file(whole, temporary, metadata={"format": "np"} if metadata is None else dict(metadata))
    except (OSError, SafetensorError) as e:
        raise ModelError(f"cannot write '{path}': {reason(e)}") from None


def reason(e: Exception) -> str:
    """What a system error says, without the file's temporary name."""
    return e.strerror if isinstance(e, OSError) and e.strerror else str(e)
