"""Arrays in .npz files: their headers are checked first; stored arrays are mapped, compressed ones read once."""

from __future__ import annotations

import contextlib
import math
import struct
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from ..support.files import regular
from .arrays import Arrays, mapped, npy_header, of_equal_length, why_no_column
from .base import readable
from .rows import Rows

#: bytes of the fixed part of a member's local header, and where in it the lengths of name and extra field are
_LOCAL, _LENGTHS = 30, 26


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[zipfile.ZipFile]:
    """The archive; what goes wrong while it is read is one of this package's errors."""
    with readable(path, "an .npz file"), zipfile.ZipFile(regular(path)) as archive:
        yield archive


def header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> tuple[tuple[int, ...], bool, np.dtype, int, int]:
    """Shape, whether in Fortran's order, and type of an array, the bytes of its header and the bytes that follow.

    Nothing else of the member is read.  ValueError for a header that is damaged.
    """
    with archive.open(member) as file:
        try:
            shape, fortran, dtype = npy_header(file)
        except ValueError as e:
            raise ValueError(f"the array '{member_name(member)}': {e}") from None
        return shape, fortran, dtype, file.tell(), member.file_size - file.tell()


def check_size(member: zipfile.ZipInfo, shape: tuple[int, ...], dtype: np.dtype, rest: int) -> None:
    """ValueError if the bytes of an array are not those of its type."""
    if math.prod(shape) * dtype.itemsize != rest:
        name = member_name(member)
        raise ValueError(f"the array '{name}' has {rest:,} bytes, which is not the size of {dtype}{list(shape)}")


def array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """An array of the archive, read into memory; never Python objects."""
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def member_name(member: zipfile.ZipInfo) -> str:
    """The array's name."""
    return member.filename.removesuffix(".npy")


def from_npz(path: str | Path, wanted: Collection[str] | None = None) -> Arrays:
    """The arrays of an .npz file as columns.

    Those that were stored uncompressed (`np.savez`) are mapped, so that only rows that are taken are read; compressed
    ones are read whole at their first use.  `wanted`: only these, if all are there.  Single values and Python objects
    are left out, and said when asked for.  ModelError if the file cannot be read.
    """
    rows: dict[str, Rows] = {}
    notes: dict[str, str] = {}
    with opened(path) as archive:
        for member in archive.infolist():
            name = member_name(member)
            shape, fortran, dtype, begin, rest = header(archive, member)
            if why := why_no_column(dtype, shape):
                notes[name] = why
                continue
            check_size(member, shape, dtype, rest)
            rows[name] = _rows(path, archive, member, (shape, fortran, dtype, begin))
    if wanted is not None and set(wanted) <= set(rows):
        rows = {name: rows[name] for name in wanted}
    return of_equal_length(rows, f"'{path}'", notes)


def _rows(
    path: str | Path,
    archive: zipfile.ZipFile,
    member: zipfile.ZipInfo,
    head: tuple[tuple[int, ...], bool, np.dtype, int],
) -> Rows:
    shape, fortran, dtype, begin = head
    if member.compress_type == zipfile.ZIP_STORED and not member.flag_bits & 1:
        start = _start(path, archive, member) + begin
        return Rows(dtype, shape, lambda: mapped(path, start, dtype, shape, fortran))

    def load() -> np.ndarray:
        with opened(path) as again:
            return array(again, member)

    return Rows(dtype, shape, load)


def _start(path: str | Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """Where the contents of a stored member begin; the length of its local header is written there only."""
    with open(path, "rb") as file:
        file.seek(member.header_offset + _LENGTHS)
        name, extra = struct.unpack("<HH", file.read(4))
    return member.header_offset + _LOCAL + name + extra
