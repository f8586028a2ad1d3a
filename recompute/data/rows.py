"""Columns of samples that are taken by their numbers."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ModelError
from .base import TEXT, Column, is_text


class Rows:
    """One column: its type, its number of rows, and rows by number.  `load` is called once, when needed."""

    def __init__(self, dtype: np.dtype, shape: Sequence[int], load: Callable[[], np.ndarray]) -> None:
        text = is_text(dtype)
        self.count = shape[0]
        self.column: Column = (TEXT if text else dtype.newbyteorder("="), tuple(shape[1:]))
        self._load: Callable[[], np.ndarray] | None = load
        self._lock = threading.Lock()
        self._rows: np.ndarray | None = None
        #: the file in which `_rows` lies, and the bytes of it that it needs
        self._mapped: tuple[Any, int] | None = None
        #: the type of the elements, if `_rows` has their bytes
        self._stored: np.dtype | None = None

    @classmethod
    def of(cls, array: np.ndarray) -> Rows:
        """The rows of an array in memory or mapped."""
        return cls(array.dtype, array.shape, lambda: array)

    def take(self, indices: np.ndarray) -> np.ndarray:
        """A C-contiguous array of the rows, in the machine's byte order."""
        rows = self._rows if self._rows is not None else self._loaded()
        if self._mapped is not None and self._mapped[0].size() < self._mapped[1]:
            raise ModelError(
                f"a mapped data file became shorter while it was used: it has {self._mapped[0].size():,} bytes of "
                f"{self._mapped[1]:,}; write another file, and rename it, to change data that is in use"
            )
        dtype, shape = self.column
        if self._stored is not None:
            taken = rows.take(indices, axis=0).view(self._stored)
            return taken.astype(dtype, copy=False).reshape(len(taken), *shape)
        if is_text(dtype):
            return rows[indices].astype(TEXT)
        taken = rows.take(indices, axis=0) if rows.flags.c_contiguous and rows.flags.aligned else rows[indices]
        return np.ascontiguousarray(taken, dtype=dtype)

    def shapes(self) -> np.ndarray:
        """int64[n, axes]: the size of every sample."""
        return np.broadcast_to(np.array(self.column[1], np.int64), (self.count, len(self.column[1])))

    def _loaded(self) -> np.ndarray:
        """The whole column; rows of unaligned or foreign bytes as bytes, which are copied fastest."""
        with self._lock:
            if self._rows is None and self._load is not None:
                content = self._load()
                if (mapping := getattr(content, "_mmap", None)) is not None:
                    start = content.offset - content.offset % mmap.ALLOCATIONGRANULARITY  # type: ignore[attr-defined]
                    self._mapped = mapping, start + len(mapping)
                array = content.view(np.ndarray)
                whole = array.flags.c_contiguous and array.size and not is_text(array.dtype)
                if whole and not (array.flags.aligned and array.dtype.isnative):
                    self._stored = array.dtype
                    array = array.reshape(-1).view(np.uint8).reshape(self.count, -1)
                self._rows, self._load = array, None
        assert self._rows is not None
        return self._rows
