"""Gathering and scattering by flat row numbers: what all the indexing operators come down to."""

from __future__ import annotations

import numpy as np

from ...language.types import Array

#: rows of at least this many elements are added one by one, narrower ones column by column
_WIDE_ROW = 96


def check_bounds(indices: Array, size: int, what: str) -> None:
    """IndexError where an index is outside [-size, size)."""
    if not indices.size:
        return
    low, high = int(indices.min()), int(indices.max())
    if low < -size or high >= size:
        raise IndexError(f"{what}: index {low if low < -size else high} is out of range for {size} entries")


def check_lengths(lengths: Array, size: int, what: str) -> None:
    """IndexError where a length is outside [0, size]."""
    wrong = lengths[(lengths < 0) | (lengths > size)]
    if wrong.size:
        raise IndexError(f"{what}: length {int(wrong[0])} is outside an axis of {size} rows")


def take_rows(x: Array, rows: Array, out: Array, axis: int = 0) -> None:
    """out = x[rows] along `axis`; negative numbers count from the end.  The caller checks the bounds."""
    if rows.size and out.size:
        np.take(x, rows, axis=axis, out=out, mode="wrap")


def add_rows(target: Array, rows: Array, values: Array, ufunc: str = "add") -> None:
    """target[:, rows[j], :] += values[:, j, :], in the order of j: the same bits every time.

    target [outer, n, inner], rows i64 [k], values [outer, k, inner]; `ufunc` may replace the addition.
    """
    if not values.size:
        return
    function = getattr(np, ufunc)
    if target.shape[0] * target.shape[2] >= _WIDE_ROW:
        for j, row in enumerate(rows.tolist()):
            part = target[:, row]
            function(part, values[:, j], out=part)
        return
    for i in range(target.shape[0]):
        for c in range(target.shape[2]):
            function.at(target[i, :, c], rows, values[i, :, c])


#: ONNX's reductions → ufuncs
REDUCTIONS = {"add": "add", "mul": "multiply", "max": "maximum", "min": "minimum"}


def set_rows(target: Array, rows: Array, values: Array, how: str) -> None:
    """target[rows[j]] = values[j], or reduced with what is there by `how` (ONNX's names), in the order of j.

    target [n, inner], rows i64 [k], values [k, inner].
    """
    if how != "none":
        add_rows(target[None], rows, values[None], REDUCTIONS[how])
    elif values.size:
        target[rows] = values
