"""Columns whose samples have several sizes: lists in Python, .jsonl and .parquet files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.data import Dataset, dataset
from recompute.errors import ModelError, UsageError

ROWS = [
    {"ids": [1, 2], "label": 1, "text": "a", "pair": [0.5, 1], "grid": [[1], [2]], "none": None},
    {"ids": [3, 4, 5], "label": 0, "text": "b", "pair": [1, 2], "grid": [[1, 2]], "none": None},
    {"ids": [], "label": 2, "text": "c", "pair": [1, 2], "grid": [[1, 2, 3]], "none": None},
]
KINDS = ("python", ".jsonl", ".parquet")


def made(kind: str, folder: Path) -> Dataset:
    columns: dict[str, Any] = {n: [row[n] for row in ROWS] for n in ROWS[0] if n != "none"}
    if kind == "python":
        found = dataset({n: c if n != "text" else np.array(c) for n, c in columns.items()})
    elif kind == ".jsonl":
        (folder / "d.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
        found = dataset(folder / "d.jsonl")
    else:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table(columns), folder / "d.parquet")
        found = dataset(folder / "d.parquet")
    assert isinstance(found, Dataset)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_columns(kind: str, tmp_path: Path) -> None:
    data = made(kind, tmp_path)
    assert "ids: int64[?]" in repr(data) and "grid: int64[?,?]" in repr(data) and "pair: float64[2]" in repr(data)
    taken = data.take(np.array([1, 2, 1]))
    assert [a.tolist() for a in taken["ids"]] == [[3, 4, 5], [], [3, 4, 5]]
    assert [a.shape for a in taken["grid"]] == [(1, 2), (1, 3), (1, 2)]
    assert taken["label"].tolist() == [0, 2, 0] and taken["text"].tolist() == ["b", "c", "b"]
    assert data.shapes("ids").tolist() == [[2], [3], [0]] and data.shapes("pair").tolist() == [[2]] * 3


def test_parts_and_functions_of_ragged_columns(tmp_path: Path) -> None:
    data = made("python", tmp_path)
    some = rc.data.subset(data, [2, 1])
    assert some.shapes("ids").tolist() == [[0], [3]]
    chosen = rc.data.select(some, {"x": "ids"})
    assert chosen.shapes("x").tolist() == [[0], [3]] and chosen.columns["x"][1] == (-1,)
    cut = rc.data.mapped(data, lambda batch: {"ids": np.array([*(a[:1] for a in batch["ids"]), None], object)[:-1]})
    assert [a.tolist() for a in cut.take(np.arange(3))["ids"]] == [[1], [3], []]
    assert cut.shapes("ids").tolist() == [[1], [1], [0]]


def test_values_of_ragged_columns_are_searched() -> None:
    data = dataset({"x": [[1.0, 2.0], [1.0, np.nan, 3.0]]})
    assert isinstance(data, Dataset)
    with pytest.raises(UsageError, match=r"column 'x' of arrays has NaN in sample 1"):
        rc.data.check_values(data)


LINES = {
    "{}x": "line 1 is no JSON",
    "[1]": "line 1 is no object of columns",
    '{"x": 1}\n{"y": 1}': "line 2 lacks 'x'",
    '{"x": 1}\n{"x": 1, "y": 1}': "line 2 also has 'y'",
    "\n": "it has no lines",
}


@pytest.mark.parametrize("text", LINES)
def test_json_lines_that_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(text)
    with pytest.raises(ModelError, match=LINES[text]):
        dataset(tmp_path / "d.jsonl")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ([1, "a"], r"mixes them \(int, str\)"),
        ([None, 1], "NoneType"),
        ([[1], [[2]]], "samples of 1 axes, and of 2 in sample 1"),
        ([1, 1 << 70], "more than 64 bits"),
    ],
)
def test_columns_of_json_lines_that_are_left_out(values: list[Any], why: str, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"x": v, "y": 1}) for v in values))
    with pytest.raises(UsageError, match=why):
        dataset(tmp_path / "d.jsonl", columns=["x"])
