"""CSV, TSV and Parquet."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.data import Dataset, check_values, dataset, encoded, fitted
from recompute.errors import MissingExtraError, ModelError, UsageError
from recompute.language.types import Value

TABLE = 'size,price,kind,note\n1,0.5,cat,\n2,1e3,dog,a b\n-3,7,cat,"x, ""y"""\n'
ALL = np.arange(3)


def written(folder: Path, text: str | bytes, name: str = "d.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def open_(source: Any, **options: Any) -> Dataset:
    found = dataset(source, **options)
    assert isinstance(found, Dataset)
    return found


@pytest.mark.parametrize("text", [TABLE, "\ufeff" + TABLE, TABLE.replace("\n", "\r\n"), TABLE + "\n\n"])
def test_csv(text: str, tmp_path: Path) -> None:
    data = open_(written(tmp_path, text))
    found = data.take(np.array([2, 0]))
    assert {n: a.tolist() for n, a in found.items()} == {
        "size": [-3, 1], "price": [7.0, 0.5], "kind": ["cat", "cat"], "note": ['x, "y"', ""],
    }  # fmt: skip
    assert found["size"].dtype == np.int64 and found["price"].dtype == np.float64


def test_tsv_has_no_quotes_and_may_have_no_header(tmp_path: Path) -> None:
    path = written(tmp_path, 'gj04\t1\t\t"Quoted" first\ngj04\t0\t*\tIt\'s\t\n'.replace("\t\n", "\n"), "d.tsv")
    data = open_(path, header=False)
    assert list(data.columns) == ["0", "1", "2", "3"]
    assert data.take(np.arange(2))["3"].tolist() == ['"Quoted" first', "It's"]
    named = open_(path, header=["source", "label", "mark", "sentence"], columns=["sentence", "label"])
    assert named.take(np.arange(2))["label"].tolist() == [1, 0]
    with pytest.raises(ModelError, match=r"line 1 has 4 cells, not 2 \(a, b\)"):
        open_(path, header=["a", "b"])


@pytest.mark.parametrize("late, dtype", [("2.5", "float64"), ("", "float64"), ("x", "object"), ("7", "int64"),
                                         ("1_0", "object"), (str(1 << 70), "float64")])  # fmt: skip
def test_the_type_of_a_column_is_that_of_all_its_cells(
    late: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the cell comes long after numbers were read: nothing of the text before is lost."""
    monkeypatch.setattr("recompute.data.tables._ROWS", 4)
    cells = ["01", *map(str, range(1, 10)), late, "11"]
    data = open_(written(tmp_path, "a,b\n" + "".join(f"{c},z\n" for c in cells)))
    found = data.read(np.arange(12), ["a"])["a"]
    assert found.dtype == dtype and data.columns["a"][0] == dtype
    if dtype == "object":
        assert found.tolist() == cells and data.notes["a"] == f"text because of '{late}' in sample 10"
    else:
        assert found[0] == 1 and (np.isnan(found[10]) if late == "" else found[10] == float(late))


@pytest.mark.parametrize("text, message", [
    ("", "it is empty"), ("a,b\n", "it has no rows"), ("a,b\n1,2\n1\n", r"line 3 has 1 cells, not 2 \(a, b\)"),
    ("a,a\n1,2\n", "two columns are called 'a'"), (b"a,b\n\xff,1\n", "it is not UTF-8"), ('a\n"x\n', "unexpected end"),
])  # fmt: skip
def test_tables_that_cannot_be_read(text: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"cannot read the data file '.*d.csv': .*{message}"):
        dataset(written(tmp_path, text))


def test_options_that_are_none(tmp_path: Path) -> None:
    path = written(tmp_path, TABLE)
    with pytest.raises(UsageError, match=r"without an option 'seperator' \(did you mean separator\?\); it takes: sep"):
        dataset(path, seperator=";")
    with pytest.raises(UsageError, match="separator must be one character, not ', '"):
        dataset(path, separator=", ")


def inputs(**types: str) -> list[Value]:
    return [Value(name, rc.TensorType.parse(t)) for name, t in types.items()]


def test_what_made_a_column_unfit_is_said(tmp_path: Path) -> None:
    data = open_(written(tmp_path, "x,label\n1.5,0\nN/A,1\n,\n"))
    with pytest.raises(UsageError, match=r"'x' of .*text \(text because of 'N/A' in sample 1\), but"):
        fitted(data, inputs(x="f32[2]", label="i64[2]"))
    with pytest.raises(UsageError, match=r"'label' .* float64\[\] \(the cell of sample 2 is empty\), but"):
        fitted(data, inputs(label="i64[2]"))
    with pytest.raises(UsageError, match=r"column 'label' of .*d.csv' has NaN in sample 2"):
        check_values(fitted(data, inputs(label="f32[2]")))


def test_columns_of_a_table_make_a_row_and_classes_become_numbers(tmp_path: Path) -> None:
    data = encoded(open_(written(tmp_path, TABLE), columns=["price", "size", "kind"]), "kind")
    assert data.classes == ("cat", "dog")
    found = fitted(data, inputs(x="f32[2,2]", label="i64[2]"), names={"label": "kind"}).take(ALL)  # type: ignore[union-attr]
    assert found["x"].tolist() == [[0.5, 1], [1000, 2], [7, -3]] and found["label"].tolist() == [0, 1, 0]
    few = encoded(data.inner, "kind", ["cat"])
    with pytest.raises(UsageError, match=r"column 'kind' of .* has 'dog', none of its 1 classes: cat"):
        few.take(ALL)


def parquet(folder: Path, name: str = "d.parquet", start: int = 0) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {
        "x": pa.array([1.5, None, 3.0]),
        "label": pa.array(np.arange(start, start + 3)),
        "gap": pa.array([1, None, 3]),
        "text": pa.array(["a", "b", "c"]),
        "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
        "pixels": pa.array([[[1, 2], [3, 4]]] * 3, pa.list_(pa.list_(pa.uint8()))),
        "fixed": pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2)),
        "ragged": pa.array([[1], [2, 3], [4]]),
        "flag": pa.array([True, False, True]),
        "when": pa.array([0, 1, 2], pa.timestamp("s")),
    }
    pq.write_table(pa.table(columns), folder / name)
    return folder / name


def test_parquet(tmp_path: Path) -> None:
    data = open_(parquet(tmp_path))
    assert set(data.notes) == {"when"} and data.columns["pixels"] == (np.dtype(np.uint8), (2, 2))
    found = data.read(np.array([2, 0]), ["x", "label", "text", "kind", "pixels", "fixed", "flag"])
    assert found["label"].tolist() == [2, 0] and found["text"].tolist() == ["c", "a"]
    assert found["kind"].tolist() == ["a", "a"] and found["flag"].tolist() == [True, True]
    assert found["pixels"].tolist() == [[[1, 2], [3, 4]]] * 2 and found["fixed"].tolist() == [[1, 2]] * 2
    assert np.isnan(data.read(ALL, ["x"])["x"]).tolist() == [False, True, False]
    for columns, message in ((["when"], r"elements of Arrow's type timestamp.*, which are no numbers"),):
        with pytest.raises(UsageError, match=message):
            open_(tmp_path / "d.parquet", columns=columns)
    with pytest.raises(UsageError, match=r"column 'gap' of .* has no value in sample 1"):
        data.read(ALL, ["gap"])


def test_a_folder_of_parquet_files(tmp_path: Path) -> None:
    parquet(tmp_path, "a.parquet")
    parquet(tmp_path, "b.parquet", 3)
    data = open_(tmp_path, columns=["label", "text"])
    assert len(data) == 6 and data.take(np.arange(6))["label"].tolist() == list(range(6))


def test_parquet_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ModelError, match=r"cannot read the data file '.*d.parquet': not a Parquet file, or damaged"):
        dataset(path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"'pyarrow'.*onnx-recompute\[tables\]"):
        dataset(path)
