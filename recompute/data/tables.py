"""Tables: CSV and TSV by Python's csv, Parquet by pyarrow."""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, UsageError, load_extra
from ..support.files import regular
from .arrays import Arrays
from .base import TEXT, readable
from .ragged import rows_of_lists, rows_of_samples
from .rows import Rows

#: rows of a CSV file that are converted at once
_ROWS = 4096
#: longest cell: a document rather than Python's 128 KiB
_LONGEST_CELL = 1 << 30


def from_csv(
    path: str | Path, separator: str | None = None, header: bool | Sequence[str] = True, quoted: bool | None = None
) -> Arrays:
    """The columns of a CSV or TSV file (UTF-8): whole numbers (int64), floats (float64, an empty cell is NaN), or text.

    `separator`: the character between cells (None: a tab in .tsv files, else a comma).  `header`: whether the first
    line has the names (without it they are "0", "1", ...), or the names.  `quoted`: whether `"` encloses cells (None:
    not in .tsv files).  ModelError for a file that cannot be read, or whose rows have different numbers of cells.
    """
    path = Path(path)
    tabs = path.suffix.lower() == ".tsv"
    separator = separator if separator is not None else "\t" if tabs else ","
    if len(separator) != 1:
        raise UsageError(f"separator must be one character, not {separator!r}")
    quotes = (not tabs) if quoted is None else quoted
    table = _Table(path, separator, csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE, header)
    with readable(path, "a table of CSV"):
        while not table.read():  # again where a column of numbers turned out to have text
            pass
    rows = {n: Rows.of(a) for n, a in table.arrays().items()}
    return Arrays(rows, f"'{path}'", table.notes)


class _Table:
    """The columns of a CSV file, converted a block of rows at a time."""

    def __init__(self, path: Path, separator: str, quoting: int, header: bool | Sequence[str]) -> None:
        self.path, self.separator, self.quoting, self.header = path, separator, quoting, header
        self.names: list[str] = []
        self.texts: set[int] = set()
        self.notes: dict[str, str] = {}
        self.blocks: list[list[np.ndarray]] = []

    def read(self) -> bool:
        """Reads the file; False if it has to be read again, since a column that began with numbers is text."""
        self.blocks, self.rows, self.again = [], 0, False
        with open(regular(self.path), encoding="utf-8-sig", newline="") as file, _long_cells():
            lines = csv.reader(file, delimiter=self.separator, quoting=self.quoting, strict=True)  # type: ignore[arg-type]
            rows = self._begin(lines)
            block: list[list[str]] = []
            for cells in rows:
                if cells:
                    self._check(cells, lines.line_num)
                    block.append(cells)
                if len(block) == _ROWS:
                    self._convert(block)
                    block = []
            if block:
                self._convert(block)
        if not self.blocks:
            raise ModelError(f"cannot read the data file '{self.path}': it has no rows")
        return not self.again

    def _begin(self, lines: Iterator[list[str]]) -> Iterator[list[str]]:
        """Sets the names of the columns; the rows."""
        first = next(lines, None)
        if first is None:
            raise ModelError(f"cannot read the data file '{self.path}': it is empty")
        if self.header is True:
            self.names = [n.strip() for n in first]
        else:
            self.names = [str(i) for i in range(len(first))] if self.header is False else list(self.header)
            lines = itertools.chain([first], lines)
        count = Counter(self.names)
        double = next((n for n in self.names if count[n] > 1), None)
        if double is not None:
            raise ModelError(f"cannot read the data file '{self.path}': two columns are called '{double}'")
        return lines

    def _check(self, cells: Sequence[str], line: int) -> None:
        if len(cells) != len(self.names):
            raise ModelError(
                f"cannot read the data file '{self.path}': line {line} has {len(cells)} cells, not {len(self.names)} "
                f"({', '.join(self.names[:8])}{', ...' * (len(self.names) > 8)})"
            )

    def _convert(self, block: list[list[str]]) -> None:
        start, self.rows = self.rows, self.rows + len(block)
        arrays = []
        for i, cells in enumerate(zip(*block, strict=True)):
            array = None if i in self.texts else _numbers(cells)
            if array is None:
                if i not in self.texts:
                    at = next(r for r, c in enumerate(cells) if _numbers((c,)) is None)
                    self.notes[self.names[i]] = f"text because of {cells[at][:40]!r} in sample {start + at}"
                    self.texts.add(i)
                    self.again |= bool(self.blocks)
                array = np.array(cells, dtype=TEXT)
            elif array.dtype.kind == "f" and (at := next((r for r, c in enumerate(cells) if not c.strip()), -1)) >= 0:
                self.notes.setdefault(self.names[i], f"the cell of sample {start + at} is empty")
            arrays.append(array)
        self.blocks.append(arrays)

    def arrays(self) -> dict[str, np.ndarray]:
        """Name → column, all blocks concatenated."""
        found = {}
        for name, blocks in zip(self.names, zip(*self.blocks, strict=True), strict=True):
            found[name] = np.concatenate(blocks)
        return found


@contextlib.contextmanager
def _long_cells() -> Iterator[None]:
    """Cells may be long texts while a file is read."""
    before = csv.field_size_limit(_LONGEST_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _numbers(cells: Sequence[str]) -> np.ndarray | None:
    """Cells as whole numbers, or as numbers where an empty one is NaN; None if they are text."""
    if "_" in "".join(cells):  # which Python allows between digits
        return None
    try:
        return np.fromiter(map(int, cells), np.int64, len(cells))
    except (ValueError, OverflowError):
        pass
    try:
        return np.array([float(c) if c and not c.isspace() else np.nan for c in cells], np.float64)
    except ValueError:
        return None


def from_parquet(path: str | Path | Sequence[str | Path]) -> Arrays:
    """The columns of a Parquet file, or of several files one after another, each read at its first use.

    Numbers, truth values, text, and lists of numbers, of one length or several.  Other columns are left out, and said
    when asked for.
    ModelError for a file that cannot be read, MissingExtraError without pyarrow (extra `tables`).
    """
    parquet = load_extra("pyarrow.parquet", "tables", "reading Parquet files")
    import pyarrow as pa

    paths = [path] if isinstance(path, (str, Path)) else list(path)
    where = paths[0] if len(paths) == 1 else Path(paths[0]).parent
    name = f"'{where}'"
    rows: dict[str, Rows] = {}
    notes: dict[str, str] = {}

    lock = threading.Lock()  # a file is read by one thread at a time

    def column(wanted: str) -> Any:
        with readable(where, "a Parquet file"), lock:
            parts = [f.read(columns=[wanted]) for f in files]
            array = pa.concat_tables(parts).column(0).combine_chunks()
            if len(array) != count:
                raise ValueError(f"column '{wanted}' has {len(array)} rows, not {count}")
            return array

    with readable(where, "a Parquet file"):
        files = [parquet.ParquetFile(regular(p)) for p in paths]
        schema, count = files[0].schema_arrow, sum(f.metadata.num_rows for f in files)
    for field in schema:
        array = _of_type(field, count, functools.partial(column, field.name), name)
        if isinstance(array, str):
            notes[field.name] = array
        else:
            rows[field.name] = array
    return Arrays(rows, name, notes)


def _of_type(field: Any, count: int, load: Callable[[], Any], source: str) -> Rows | str:
    """A column by its Arrow type, or why it is none.  Lists are read now: their lengths are in the data."""
    import pyarrow.types as kinds

    arrow, what = field.type, f"column '{field.name}' of {source}"
    if kinds.is_string(arrow) or kinds.is_large_string(arrow) or kinds.is_dictionary(arrow):
        return Rows(TEXT, (count,), lambda: _without_nulls(load(), what).to_numpy(zero_copy_only=False).astype(TEXT))
    if kinds.is_integer(arrow) or kinds.is_floating(arrow) or kinds.is_boolean(arrow):
        dtype = np.dtype(arrow.to_pandas_dtype())
        return Rows(dtype, (count,), lambda: _plain(load(), what, dtype))
    shape, array = [count], load() if kinds.is_nested(arrow) else None
    while array is not None and (kinds.is_list(array.type) or kinds.is_large_list(array.type)):
        lengths = _without_nulls(array, what).value_lengths().to_numpy(zero_copy_only=False)
        if len(lengths) and (lengths != lengths[0]).any():
            return _ragged(array, lengths, outermost=len(shape) == 1, load=load, what=what)
        shape.append(int(lengths[0]) if len(lengths) else 0)
        array = array.flatten()
    if array is not None and kinds.is_fixed_size_list(array.type) and not array.null_count:
        shape.append(array.type.list_size)
        array = array.flatten()
    if array is None or not (kinds.is_integer(array.type) or kinds.is_floating(array.type)):
        return f"has elements of Arrow's type {arrow}, which are no numbers or strings"
    return Rows.of(_plain(array, what, np.dtype(array.type.to_pandas_dtype())).reshape(shape))


def _ragged(array: Any, lengths: np.ndarray, *, outermost: bool, load: Callable[[], Any], what: str) -> Rows | str:
    import pyarrow.types as kinds

    values = array.flatten()
    if outermost and (kinds.is_integer(values.type) or kinds.is_floating(values.type)):
        return rows_of_lists(_plain(values, what, np.dtype(values.type.to_pandas_dtype())), lengths)
    try:
        return rows_of_samples(load().to_pylist(), what)
    except UsageError as e:
        return str(e).removeprefix(what).strip()


def _without_nulls(array: Any, what: str) -> Any:
    if array.null_count:
        at = array.is_null().to_pylist().index(True)
        raise UsageError(f"{what} has no value in sample {at} (counted from 0): mend or leave out such samples")
    return array


def _plain(array: Any, what: str, dtype: np.dtype) -> np.ndarray:
    """Numbers; a float that is missing is NaN, which `check_values` finds."""
    checked = array if dtype.kind == "f" else _without_nulls(array, what)
    return np.ascontiguousarray(checked.to_numpy(zero_copy_only=False), dtype)
