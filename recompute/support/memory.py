"""Memory as the operating system counts it: what is mapped or freed is given back."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

import numpy as np

#: bytes of a mapped file that are in memory at a time while it is copied
_PART = 1 << 24


def taken(array: np.ndarray) -> np.ndarray:
    """A copy that can be written, in row-major order; what it has read of a mapped file leaves memory again."""
    file = getattr(array, "_mmap", None) if isinstance(array, np.memmap) else None
    if not isinstance(file, mmap.mmap) or not array.flags.c_contiguous or not hasattr(file, "madvise"):
        return np.array(array, order="C")
    found = np.empty(array.shape, array.dtype)
    source, target = array.reshape(-1).view(np.uint8), found.reshape(-1).view(np.uint8)
    begin = source.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data
    for at in range(0, source.size, _PART):
        part = slice(at, at + _PART)
        target[part] = source[part]
        first = (begin + at) // mmap.PAGESIZE * mmap.PAGESIZE
        file.madvise(mmap.MADV_DONTNEED, first, min(begin + at + _PART, len(file)) - first)
    return found


def give_back() -> None:
    """Gives what was freed back to the system, where the C library would keep it (glibc)."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
