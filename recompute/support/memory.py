"""Memory as the operating system counts it: contents are held once, and what is mapped or freed is given back."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np

#: elements of a mapped file that are in memory at a time while it is copied
_PART = 1 << 22


class Contents:
    """An array beside a model that refers to it by `location`, as to a file of external data.

    What reads it has read-only views.  A program whose view of it, by `name`, is the only one that is left may take the
    array as its own (`own`), and trains it: the model refers to what it holds by then.  `stays`: there may be no room
    for a copy, so that models which are written keep to the reference.
    """

    _numbers = itertools.count()

    def __init__(self, array: np.ndarray, name: str = "", *, stays: bool = False) -> None:
        self.array, self.name, self.location, self.stays = array, name, f"memory:{next(self._numbers)}", stays
        _LOCATIONS[self.location] = _ROOTS[id(array)] = self


#: all contents, by location and by their array
_LOCATIONS: WeakValueDictionary[str, Contents] = WeakValueDictionary()
_ROOTS: WeakValueDictionary[int, Contents] = WeakValueDictionary()


def contents_at(location: str) -> Contents | None:
    """The contents that models call so, if something still holds them."""
    return _LOCATIONS.get(location)


def is_stored(array: object) -> bool:
    """Whether an array is a program's in a file that steps read and write (runtime/cpu/disk.py): no copy or view."""
    return isinstance(getattr(array, "contents", None), Contents)


def resident_bytes(what: str = "VmRSS") -> int:
    """The resident set of this process (`VmHWM`: its highest since `ResidentGrowth` began); 0 where it is unknown."""
    try:
        match = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) << 10 if match else 0


def bytes_beside_steps() -> int:
    """Bytes of this process beside the weights of models: Python, libraries, data of the user; 0 if unknown."""
    held = (c.array for c in list(_LOCATIONS.values()))
    return max(0, resident_bytes() - sum(a.nbytes for a in held if not isinstance(a, np.memmap)))  # which is on disk


def own(arrays: dict[str, np.ndarray], name: str) -> None:
    """Gives a mapping an array that can be written, in place of one that cannot.

    Contents of this name become its own if it has the only view of them; anything else is copied.
    """
    array = dict.__getitem__(arrays, name)
    dict.__setitem__(arrays, name, _NONE)  # which leaves the one reference to it that is here
    contents = _ROOTS.get(id(array.base))
    whole = contents is not None and contents.name == name and contents.array.nbytes == array.nbytes
    try:
        if contents is not None and whole and array.flags.c_contiguous and _references(array) == _alone():
            found = contents.array.view(array.dtype).reshape(array.shape)
        else:
            found = taken(array)
        dict.__setitem__(arrays, name, found)
    except BaseException:
        dict.__setitem__(arrays, name, array)
        raise


_NONE = np.empty(0)


def _references(view: np.ndarray) -> tuple[int, int]:
    """How many references there are to a view, and to the array that it shows."""
    return sys.getrefcount(view), sys.getrefcount(view.base)


@functools.cache
def _alone() -> tuple[int, int]:
    """`_references` of the only view of contents: versions of Python count differently."""
    contents = Contents(np.empty(1))
    view = contents.array.view()
    return _references(view)


def fill(target: np.ndarray, source: np.ndarray) -> None:
    """Copies an array into another of the same shape and type; pages of mapped files leave memory."""
    if not target.flags.c_contiguous:
        target[...] = source
        return
    for part, there in zip(in_parts(source), in_parts(target), strict=True):
        there[...] = part


def taken(array: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
    """A copy that can be written (in another type), in row-major order; what it read of a mapped file leaves memory."""
    if _mapping(array) is None:
        return np.array(array, dtype, order="C")
    found = np.empty(array.shape, dtype or array.dtype)
    target, at = found.reshape(-1), 0
    for part in in_parts(array):
        target[at : at + part.size] = part
        at += part.size
    return found


def in_parts(array: np.ndarray) -> Iterator[np.ndarray]:
    """The elements in row-major order, in flat parts; what was read of a mapped file leaves memory."""
    file = _mapping(array)
    source = np.ascontiguousarray(array).view(np.ndarray).reshape(-1)
    begin = 0 if file is None else source.ctypes.data - np.frombuffer(file, np.uint8).ctypes.data
    for at in range(0, source.size, _PART):
        yield source[at : at + _PART]
        if file is not None:
            start, end = (begin + i * source.itemsize for i in (at, min(at + _PART, source.size)))
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            file.madvise(mmap.MADV_DONTNEED, first, end - first)


def _mapping(array: np.ndarray) -> mmap.mmap | None:
    """The mapped file whose contents an array is, in row-major order, if its pages can leave memory."""
    # of a private mapping ("c"), what was written into it would be lost
    file = getattr(array, "_mmap", None) if isinstance(array, np.memmap) and array.mode != "c" else None
    fits = isinstance(file, mmap.mmap) and array.flags.c_contiguous and hasattr(file, "madvise")
    return file if fits else None


def give_back() -> None:
    """Gives what was freed back to the system, where the C library would keep it (glibc)."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another system
        return None
