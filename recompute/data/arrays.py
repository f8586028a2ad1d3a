"""Datasets of arrays: in memory, or mapped from .npy files; and arrays of other libraries without a copy."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, OutOfMemoryError, UsageError
from ..language.types import DTYPES
from ..support.files import regular
from .base import Dataset, readable, show_columns
from .ragged import is_list_of_samples, rows_of_samples
from .rows import Rows

#: devices of DLPack whose memory the host reads: itself, and memory pinned or managed by CUDA and ROCm
_HOST = (1, 3, 11, 13)


class Arrays(Dataset):
    """Columns with a row for each sample."""

    def __init__(self, rows: Mapping[str, Rows], name: str, notes: Mapping[str, str] | None = None) -> None:
        if not rows:
            why = "; ".join(f"'{n}' {text}" for n, text in (notes or {}).items())
            raise UsageError(f"{name} has no column of samples{f': {why}' if why else ''}")
        self.rows, self.name, self.notes = dict(rows), name, dict(notes or {})
        self.columns = {n: r.column for n, r in rows.items()}
        counts = {r.count for r in rows.values()}
        if len(counts) > 1:
            shown = ", ".join(f"'{n}' has {r.count}" for n, r in rows.items())
            raise UsageError(f"the columns of {name} have different numbers of rows: {shown}; choose some by columns=")
        self._count = counts.pop()
        if not self._count:
            raise UsageError(f"{name} is empty: its columns ({show_columns(self.columns)}) have 0 rows")

    def __len__(self) -> int:
        return self._count

    def joined(self, columns: Sequence[str], dtype: np.dtype) -> Rows:
        """A column; or several of one number a sample side by side, which are copied at the first use."""
        if len(columns) == 1:
            return self.rows[columns[0]]
        every = np.arange(self._count)

        def load() -> np.ndarray:
            whole = np.empty((self._count, len(columns)), dtype)
            for at, name in enumerate(columns):
                whole[:, at] = self.rows[name].take(every)
            return whole

        return Rows(dtype, (self._count, len(columns)), load)

    def read(self, indices: np.ndarray, names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: self.rows[name].take(indices) for name in names}

    def shapes(self, name: str) -> np.ndarray:
        return self.rows[name].shapes()

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return self.read(indices, tuple(self.rows))


def of_equal_length(rows: Mapping[str, Rows], name: str, notes: Mapping[str, str]) -> Arrays:
    """The columns of a file that have as many rows as most of them; the others (lists of class names) are noted."""
    (most, often), *others = Counter(r.count for r in rows.values()).most_common() or [(0, 0)]
    if others and others[0][1] == often:
        return Arrays(rows, name, notes)  # which is right of two lengths cannot be known: its error
    odd = {n: f"has {r.count} rows, the other columns have {most}" for n, r in rows.items() if r.count != most}
    return Arrays({n: r for n, r in rows.items() if n not in odd}, name, {**notes, **odd})


def from_arrays(arrays: Mapping[str, Any], name: str = "arrays") -> Arrays:
    """A dataset of arrays by column: NumPy's, PyTorch's, CuPy's, lists, or paths of .npy files (mapped).

    Lists of arrays or lists of different sizes are ragged columns.  Arrays on the host are used in place.  UsageError
    for what is no array of numbers or strings.
    """
    rows = {}
    for column, data in arrays.items():
        if not isinstance(column, str):
            raise UsageError(f"columns of {name} are named by strings, not {type(column).__name__} ({column!r})")
        if isinstance(data, (str, Path)):
            array = mapped_npy(data)
        elif isinstance(found := _array_or_rows(data, f"column '{column}' of {name}"), Rows):
            rows[column] = found
            continue
        else:
            array = found
        if why := why_no_column(array.dtype, array.shape, array):
            raise UsageError(f"column '{column}' of {name} {why}")
        rows[column] = Rows.of(array)
    return Arrays(rows, name)


def _array_or_rows(data: Any, what: str) -> np.ndarray | Rows:
    """`as_array`; of lists and arrays of different sizes, their rows."""
    try:
        array = as_array(data, what)
    except UsageError:
        if not is_list_of_samples(data):
            raise
        return rows_of_samples(data, what)
    return rows_of_samples(array, what) if array.dtype.kind == "O" and is_list_of_samples(array) else array


def as_array(data: Any, what: str) -> np.ndarray:
    """A NumPy array that shares the memory of `data` if that is an array on the host; of a device's array, a copy."""
    if isinstance(data, np.ndarray):
        return data
    if hasattr(data, "detach"):  # a tensor of PyTorch
        return _of_tensor(data.detach())
    if hasattr(data, "__dlpack__"):
        try:
            if data.__dlpack_device__()[0] not in _HOST and hasattr(data, "get"):  # CuPy's, on a device
                return data.get()
            return np.from_dlpack(data)
        except (BufferError, RuntimeError, TypeError, ValueError) as e:
            raise UsageError(f"{what} cannot be read as an array: {e}") from None
    try:
        return np.asarray(data)
    except ValueError:
        raise UsageError(f"{what} is no array: its rows have different shapes; pad them to one length") from None


def _of_tensor(tensor: Any) -> np.ndarray:
    """The memory of a tensor; bfloat16 goes by its bits, since DLPack of NumPy does not know it."""
    host = tensor if tensor.device.type == "cpu" else tensor.cpu()
    if str(host.dtype) == "torch.bfloat16":
        import ml_dtypes

        torch: Any = sys.modules["torch"]
        return np.from_dlpack(host.view(torch.int16)).view(ml_dtypes.bfloat16)
    host = host.resolve_conj().resolve_neg() if host.is_conj() or host.is_neg() else host
    return np.from_dlpack(host)


def why_no_column(dtype: np.dtype, shape: Sequence[int], array: np.ndarray | None = None) -> str:
    """Why an array cannot be a column, or ""."""
    if not shape:
        return "is a single value, without a row for each sample"
    if dtype.kind == "O":
        if array is not None and all(isinstance(a, str) for a in array.flat):
            return ""
        return "has Python objects, which are not read from files and cannot be fed: store numbers or strings"
    if dtype.kind == "U" or dtype.newbyteorder("=") in DTYPES.values():
        return ""
    return f"has elements of type {dtype}, which programs do not have: store numbers or strings"


def mapped_npy(path: str | Path) -> np.ndarray:
    """The array of an .npy file, mapped.  ModelError if it cannot be read, UsageError for Python objects."""
    with readable(path, "an .npy file"), open(regular(path), "rb") as file:
        shape, fortran, dtype = npy_header(file)
        start = file.tell()
        rest = file.seek(0, 2) - start
    if why := why_no_column(dtype, shape):
        raise UsageError(f"the array of '{path}' {why}")
    if math.prod(shape) * dtype.itemsize > rest:
        raise ModelError(f"cannot read the data file '{path}': it has {rest:,} bytes, fewer than {dtype}{list(shape)}")
    return mapped(path, start, dtype, shape, fortran)


def npy_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether in Fortran's order, and type of the array of an .npy file that begins here."""
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"unknown version {version}")
    shape, fortran, dtype = read(file)
    if min(shape, default=0) < 0:
        raise ValueError(f"the shape {list(shape)} is impossible")
    return tuple(shape), fortran, dtype


def mapped(path: str | Path, start: int, dtype: np.dtype, shape: tuple[int, ...], fortran: bool) -> np.ndarray:
    """An array that lies in a file."""
    if not math.prod(shape):
        return np.empty(shape, dtype)
    try:
        order = "F" if fortran else "C"
        return np.memmap(path, mode="r", offset=start, dtype=dtype, shape=shape, order=order)  # type: ignore[call-overload]
    except OSError as e:
        raise ModelError(f"cannot map the data file '{path}': {e.strerror or e}") from None
    except ValueError as e:  # the file became shorter since it was opened
        raise ModelError(f"cannot map the data file '{path}': {e}") from None
    except MemoryError:
        raise OutOfMemoryError(f"not enough address space to map '{path}'") from None
