"""Files of JSON lines: an object of columns for each sample."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, UsageError
from ..support.files import regular
from .arrays import Arrays
from .base import TEXT, readable
from .ragged import rows_of_samples
from .rows import Rows


def from_jsonl(path: str | Path) -> Arrays:
    """The columns of a .jsonl file (UTF-8): numbers, truth values, text, and lists of numbers, of any lengths.

    Each line that is not empty is an object with the same keys.  Columns of other values are left out, and said when
    asked for.  ModelError for a file that cannot be read, or a line that is no such object.
    """
    cells: dict[str, list[Any]] = {}
    with readable(path, "JSON lines"), open(regular(Path(path)), encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                _add(cells, line, f"'{path}': line {number}")
    if not cells:
        raise ModelError(f"cannot read the data file '{path}': it has no lines")
    rows: dict[str, Rows] = {}
    notes: dict[str, str] = {}
    for name, values in cells.items():
        try:
            rows[name] = _rows(values, f"column '{name}' of '{path}'")
        except UsageError as e:
            notes[name] = str(e).removeprefix(f"column '{name}' of '{path}'").strip()
    return Arrays(rows, f"'{path}'", notes)


def _add(cells: dict[str, list[Any]], line: str, where: str) -> None:
    """Adds a line's values; lists as arrays, which take less memory."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ModelError(f"cannot read the data file {where} is no JSON ({e})") from None
    if not isinstance(row, Mapping):
        raise ModelError(f'cannot read the data file {where} is no object of columns, such as {{"x": [1, 2]}}')
    first = not cells
    if not first and row.keys() != cells.keys():
        other = min(row.keys() ^ cells.keys())
        raise ModelError(f"cannot read the data file {where} {'lacks' if other in cells else 'also has'} '{other}'")
    for name, value in row.items():
        cells.setdefault(name, []).append(_compact(value))


def _compact(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        return value
    return array if array.dtype.kind in "biuf" else value


def _rows(values: list[Any], what: str) -> Rows:
    kinds = {type(v) for v in values}
    if kinds == {str}:
        return Rows.of(np.array(values, TEXT))
    if kinds == {bool} or (kinds <= {int, float} and kinds):
        array = np.array(values)
        if array.dtype.kind == "O":
            raise UsageError(f"{what} has whole numbers of more than 64 bits")
        return Rows.of(array)
    if kinds <= {list, np.ndarray}:
        return rows_of_samples(values, what)
    named = ", ".join(sorted(k.__name__ for k in kinds))
    raise UsageError(f"{what} has other values than numbers, text or lists of numbers, or mixes them ({named})")
