"""A check that memory is available, before calls of libraries that end the process if it is not."""

from __future__ import annotations

import numpy as np


def need_room(size: int) -> None:
    """MemoryError if this process cannot allocate `size` bytes: protobuf would end the process when an array is copied
    into a tensor.  Memory that is allocated but not written costs nothing."""
    np.empty(size + (1 << 20), np.uint8)
