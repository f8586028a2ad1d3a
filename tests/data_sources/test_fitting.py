"""Columns of data against the inputs of a program: names, shapes, element types, values."""

from __future__ import annotations

import numpy as np
import pytest

import recompute as rc
from recompute.data import Limit, check_values, dataset, fitted, limits_of
from recompute.errors import UsageError
from recompute.language.types import Value

X = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
Y = np.array([0, 2, 1, 2])
ALL = np.arange(4)


def inputs(**types: str) -> list[Value]:
    return [Value(name, rc.TensorType.parse(t)) for name, t in types.items()]


IMAGES = inputs(x="f32[2,2,3]", label="i64[2]")


def taken(columns: dict, wanted: list[Value], indices: np.ndarray = ALL, **options: object) -> dict[str, np.ndarray]:
    return fitted(dataset(columns), wanted, **options).take(indices)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("columns, names", [
    ({"x": X, "label": Y}, None),
    ({"label": Y, "x": X, "further": X}, None),
    ({"x": X, "y": Y}, None),
    ({"image": X, "targets": Y}, None),
    ({"a": X, "b": Y, "c": Y}, {"x": "a", "label": "b"}),
    ({"x": X.astype(np.float64), "label": Y.astype(np.int32)}, None),
    ({"x": X.astype(">f4"), "label": Y.astype(np.uint8)[:, None]}, None),
    ({"x": X[:, None], "label": Y}, None),
    ({"x": X.reshape(4, 6), "label": Y}, None),
    ({"x": X.astype(np.int64), "label": Y}, None),
    ({**{f"c{i}": X.reshape(4, 6)[:, i] for i in range(6)}, "label": Y}, None),
    ({"x": np.asfortranarray(X), "label": np.stack([Y, Y], 1)[:, 0]}, None),
])  # fmt: skip
def test_columns_become_inputs(columns: dict, names: dict[str, str] | None) -> None:
    found = taken(columns, IMAGES, np.array([3, 1]), names=names)
    assert list(found) == ["x", "label"] and all(a.flags.c_contiguous for a in found.values())
    assert found["x"].dtype == np.float32 and found["label"].dtype == np.int64
    np.testing.assert_array_equal(found["x"], X[[3, 1]])
    np.testing.assert_array_equal(found["label"], Y[[3, 1]])


@pytest.mark.parametrize("columns, message", [
    ({"x": X, "labl": Y, "z": Y}, r"no column 'label' for .* needs int64\[\] a sample \(did you mean labl\?\)"),
    ({"image": X, "other": X, "label": Y}, r"no column 'x' .* image: float32\[2,3\], other.* names=\{'x': \.\.\.\}"),
    ({"x": X[:, :1], "label": Y}, r"column 'x' of arrays has samples of float32\[1,3\].*: a sample has|axis 0|2 dim"),
    ({"x": np.zeros((4, 2, 5)), "label": Y}, r"'x' .*float64\[2,5\].* needs float32\[2,3\]: axis 1 .* 5, not 3"),
    ({"x": X.transpose(0, 2, 1), "label": Y}, r"another order: rc\.data\.mapped with x\.transpose\(0, 2, 1\)"),
    ({"x": X.astype(np.uint8), "label": Y}, r"rc\.data\.Pixels"),
    ({"x": X, "label": Y.astype(np.float64)}, r"fractions would be lost: store \.astype\('int64'\)"),
    ({"x": X, "label": ["a", "b", "c", "d"]}, r"has samples of text.* rc\.data\.encoded"),
    ({"x": X > 3, "label": Y > 1, "n": Y}, None),
])  # fmt: skip
def test_columns_that_do_not_fit(columns: dict, message: str | None) -> None:
    if message is None:
        assert taken(columns, IMAGES)["label"].tolist() == [0, 1, 0, 1]
        return
    with pytest.raises(UsageError, match=message):
        taken(columns, IMAGES)


def test_names_that_are_none() -> None:
    for names, message in (({"z": "x"}, "no input 'z'"), ({"x": "images"}, r"no column 'images' \(did you mean image")):
        with pytest.raises(UsageError, match=message):
            taken({"image": X, "label": Y}, IMAGES, names=names)
    with pytest.raises(UsageError, match="'scale' is a single number"):
        taken({"scale": Y}, inputs(scale="f32[]"))


@pytest.mark.parametrize("array, to, message", [
    (np.array([1, 2, 3, 1 << 40]), "i32[2]", r"column 'n' of arrays has 1099511627776 in sample 3 .* int32 cannot"),
    (np.array([1, 2, -3, 4]), "u8[2]", r"has -3 in sample 2"),
    (np.array([1, 2, 3, (1 << 24) + 1]), "f32[2]", r"has 16777217 in sample 3 .* -16,777,216 to 16,777,216"),
    (np.array([1, 2, 3, 1 << 63], np.uint64), "i64[2]", r"has 9223372036854775808 in sample 3"),
    (np.array([0, 1, 2, 0]), "bool[2]", r"has 2 in sample 2"),
    (np.array([2049, 1, 2, 0]), "f16[2]", r"has 2049 in sample 0"),
])  # fmt: skip
def test_whole_numbers_that_are_out_of_range(array: np.ndarray, to: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        taken({"n": array}, inputs(n=to), ALL)
    rows = np.array([1])
    assert taken({"n": array}, inputs(n=to), rows)["n"] == array[1]


@pytest.mark.parametrize("value, shown", [(np.nan, "NaN"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_numbers_that_are_not_finite(value: float, shown: str) -> None:
    x = X.copy()
    x[2, 1, 1] = value
    data = fitted(dataset({"image": x, "label": Y}), IMAGES)
    with pytest.raises(UsageError, match=rf"column 'image' of arrays has {shown} in sample 2 \(counted from 0\)"):
        check_values(data)
    check_values(data, IMAGES[1:])


def test_floats_that_overflow_in_the_inputs_type() -> None:
    data = fitted(dataset({"x": np.array([1.0, 1e39])}), inputs(x="f32[2]"))
    with pytest.raises(UsageError, match="'x' of arrays has inf in sample 1"):
        check_values(data)


def test_wrong_values_far_into_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data are searched in parts; the sample is counted from the start of all."""
    monkeypatch.setattr("recompute.data.fitting._CHUNK", 64)
    labels = np.zeros(1000, np.int64)
    labels[977] = 3
    with pytest.raises(UsageError, match=r"column 'label' of arrays has 3 in sample 977 .* takes 0 to 2"):
        check_values(dataset({"label": labels}), limits={"label": 3})  # type: ignore[arg-type]


def test_limits() -> None:
    data = dataset({"label": np.array([0, -100, 4])})
    check_values(data, limits={"label": Limit(5, ignored=-100)})  # type: ignore[arg-type]
    for limit, message in ((5, "has -100 in sample 1"), (Limit(4, -100), "has 4 in sample 2")):
        with pytest.raises(UsageError, match=message):
            check_values(data, limits={"label": limit})  # type: ignore[arg-type]


def test_limits_of_a_program() -> None:
    text = """program p {
      input %ids: i64[2,3]
      input %kind: i32[2]
      input %label: i64[2,3]
      param %w: f32[7,5]
      %flat: i64[6] = Reshape(%ids) {shape=[6]}
      %e: f32[6,5] = Gather(%w, %flat)
      output %e
    }"""
    found = limits_of(rc.parse(text))
    assert found == {"ids": Limit(7, -7)}


def test_limits_of_a_loss() -> None:
    """Labels of -100 do not count, as the loss says."""
    program = rc.Program(rc.parse("program p {\n  input %x: f32[2,5]\n  %y: f32[2,5] = Relu(%x)\n  output %y\n}"))
    rc.losses.cross_entropy(program["y"])
    assert limits_of(program.block) == {"label": Limit(5, 0, -100)}


def test_batches_of_a_stream_are_fitted_one_by_one() -> None:
    good = {"image": X, "y": Y}
    stream = fitted(dataset([good, good]), IMAGES, {"label": 3})
    found = list(stream.batches(0))  # type: ignore[union-attr]
    assert len(found) == 2 and found[0]["label"].tolist() == Y.tolist()
    bad = {"image": X, "y": Y + 1}
    with pytest.raises(UsageError, match=r"column 'y' of the list has 3 in sample 5"):
        list(fitted(dataset([good, bad]), IMAGES, {"label": 3}).batches(0))  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="columns with different numbers of samples"):
        list(fitted(dataset([{"x": X, "y": Y[:2]}]), IMAGES).batches(0))  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"another order"):
        list(fitted(dataset([good, {"x": X.transpose(0, 2, 1), "y": Y}]), IMAGES).batches(0))  # type: ignore[union-attr]


def test_costly_columns_are_checked_in_each_batch() -> None:
    """Samples that somebody's code decodes are not all read before the first step."""
    reads: list[int] = []

    class Samples:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, i: int) -> dict:
            reads.append(i)
            return {"x": np.full((2, 3), np.nan if i == 7 else i, np.float32), "label": i}

    data = fitted(dataset(Samples()), IMAGES, {"label": 9})  # type: ignore[arg-type]
    check_values(data, IMAGES, {"label": 9})
    assert reads == [0] and data.take(np.array([8]))["label"].tolist() == [8]
    for i, message in ((7, "column 'x' of the Samples has NaN in sample 7"), (9, "'label' of the Samples has 9 in")):
        with pytest.raises(UsageError, match=message):
            data.take(np.array([1, i]))
