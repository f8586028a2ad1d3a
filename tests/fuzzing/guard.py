"""Memory that ends, or begins, at a page that nobody may touch: a write outside of it ends the process."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from recompute.errors import OutOfMemoryError
from recompute.language.ir import Constant
from recompute.passes import ALIGNMENT
from recompute.runtime.cpu import session

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def guarded(nbytes: int, behind: bool) -> np.ndarray:
    """`nbytes` with a forbidden page behind their end (rounded up to the alignment), or before their beginning."""
    room = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
    pages = -(-room // PAGE) * PAGE
    memory = mmap.mmap(-1, pages + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = np.frombuffer(memory, np.uint8)
    closed = raw.ctypes.data + (pages if behind else 0)
    if _libc.mprotect(ctypes.c_void_p(closed), ctypes.c_size_t(PAGE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    start = pages - room if behind else PAGE
    return raw[start : start + nbytes]


def copied(array: np.ndarray, behind: bool) -> np.ndarray:
    """A copy in guarded memory.  Its end is the page's wherever the alignment of its elements allows it."""
    slack = -(-max(array.nbytes, 1) // ALIGNMENT) * ALIGNMENT - array.nbytes if behind else 0
    slack -= slack % max(array.dtype.itemsize, 16)
    whole = guarded(array.nbytes + slack, behind)
    found = whole[slack:].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


@contextlib.contextmanager
def guard(behind: bool) -> Iterator[None]:
    """Inside, arenas, constants and the arrays given to sessions are guarded; arenas hold NaN at first."""

    class GuardedArena(session.Arena):
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes
            try:
                self._raw = guarded(nbytes, behind)
            except (OSError, OverflowError, ValueError):
                raise OutOfMemoryError(f"this machine cannot allocate the arena of {nbytes:,} bytes") from None
            self._raw[...] = 0xFF
            self._start = 0

    def bind(self: Any, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            if array.flags.writeable and array.flags.owndata:
                arrays[name] = copied(array, behind)  # type: ignore[index]
        plain(self, arrays)

    arena, plain, numpy = session.Arena, session.Session._bind_persistent, Constant.numpy
    session.Arena = GuardedArena  # type: ignore[misc]
    session.Session._bind_persistent = bind  # type: ignore[method-assign]
    Constant.numpy = lambda self: copied(numpy(self), behind)  # type: ignore[method-assign]
    try:
        yield
    finally:
        session.Arena, session.Session._bind_persistent = arena, plain  # type: ignore[misc, method-assign]
        Constant.numpy = numpy  # type: ignore[method-assign]
