"""Room in this process's memory, asked for before a library that ends the process where there is none."""

from __future__ import annotations

import numpy as np


def need_room(size: int) -> None:
    """MemoryError where this process can get no more `size` bytes: protobuf would end it where an array is copied into
    a tensor.  Memory that is asked for and not written to costs nothing."""
    np.empty(size + (1 << 20), np.uint8)
