"""Parts of datasets, functions of samples, and numbers that are drawn by counter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recompute.data import Dataset, dataset, mapped, select, split, subset
from recompute.data.drawing import permutation, uniform
from recompute.errors import UsageError

X = np.arange(20.0).reshape(10, 2)


def data() -> Dataset:
    found = dataset({"x": X, "label": np.arange(10)})
    assert isinstance(found, Dataset)
    return found


def test_split() -> None:
    first, second = split(data(), 0.25, seed=3)
    parts = [p.take(np.arange(len(p)))["label"].tolist() for p in (first, second)]
    assert sorted(parts[0] + parts[1]) == list(range(10)) and len(parts[1]) == 2
    again = split(data(), 0.25, seed=3)[1]
    assert again.take(np.arange(2))["label"].tolist() == parts[1]
    assert len({tuple(split(data(), 0.25, seed=s)[1].indices) for s in range(20)}) > 5
    assert [len(p) for p in split(data(), 0.01)] == [9, 1] and [len(p) for p in split(data(), 0.99)] == [1, 9]
    with pytest.raises(UsageError, match="between 0 and 1, not 1"):
        split(data(), 1)
    with pytest.raises(UsageError, match="has 1 sample, which cannot be split"):
        split(subset(data(), [3]), 0.5)


def test_subset() -> None:
    for chosen in ([7, 2, 7], np.array([7, 2, 7], np.uint8)):
        part = subset(data(), chosen)
        assert len(part) == 3 and part.take(np.array([2, 1]))["label"].tolist() == [7, 2]
    assert subset(data(), np.arange(10) > 6).take(np.arange(3))["label"].tolist() == [7, 8, 9]
    for wrong, message in (
        ([10], "arrays has no sample 10: its samples are numbered 0 to 9"), ([-1], "no sample -1"),
        ([0.5], "by whole numbers"), ([[1]], "by whole numbers"), ([True], "by whole numbers"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            subset(data(), wrong)


def test_mapped() -> None:
    def function(batch: dict[str, np.ndarray]) -> dict[str, Any]:
        return {"sum": batch["x"].sum(1), "turned": np.stack([batch["x"]] * 3, 1).transpose(0, 2, 1)}

    found = mapped(data(), function)
    assert found.columns["turned"] == (np.dtype(np.float64), (2, 3))
    taken = found.take(np.array([4, 1]))
    assert taken["sum"].tolist() == [17, 5] and taken["turned"].flags.c_contiguous
    functions: list[tuple[Any, str]] = [
        (lambda b: b["x"], "must return arrays by column, not ndarray"),
        (lambda b: {"x": b["x"][:0]}, "gives 0 rows of 'x' for 1 samples"),
        (lambda b: {"x": b["x"].repeat(len(b["x"]), 1)}, "gives 'x' another type for other samples"),
    ]
    for wrong, message in functions:
        with pytest.raises(UsageError, match=message):
            mapped(data(), wrong).take(np.array([4, 1]))


def test_columns_of_what_is_no_array_are_chosen_as_of_arrays() -> None:
    wide = dataset({"x": X, "label": np.arange(10), "weight": np.arange(10, dtype=np.float32) / 4})
    assert isinstance(wide, Dataset)
    names: Any = {"row": ["label", "weight"], "y": "label", "x": "x"}
    by_array, by_batch = select(wide, names), select(mapped(wide, lambda batch: batch), names)
    assert by_batch.columns == by_array.columns == {
        "row": (np.dtype(np.float64), (2,)), "y": (np.dtype(np.int64), ()), "x": (np.dtype(np.float64), (2,))
    }  # fmt: skip
    for found in (by_array, by_batch):
        taken = found.take(np.array([4, 1]))
        assert taken["row"].tolist() == [[4, 1], [1, 0.25]] and taken["y"].tolist() == [4, 1]
        assert np.array_equal(taken["x"], X[[4, 1]])


def test_draws_depend_on_their_counter_alone() -> None:
    """The numbers are those of this test in every version of NumPy: they are made of Philox's bits."""
    found = uniform(1, 2, 3, 4)
    np.testing.assert_array_equal(found[:2], uniform(1, 2, 3, 2))
    generator = np.random.Philox(key=1, counter=[0, 0, 2, 3])
    np.testing.assert_array_equal(found, (generator.random_raw(4) >> 11) / 2**53)
    others = [uniform(2, 2, 3, 4), uniform(1, 3, 3, 4), uniform(1, 2, 4, 4), uniform(-1, 2, 3, 4)]
    assert all((o != found).all() for o in others) and ((found >= 0) & (found < 1)).all()
    many = np.concatenate([uniform(0, 0, i, 3) for i in range(2000)])
    assert abs(many.mean() - 0.5) < 0.02 and abs(many.var() - 1 / 12) < 0.01


def test_permutations() -> None:
    assert sorted(permutation(100, 5)) == list(range(100))
    assert permutation(100, 5).tolist() == permutation(100, 5).tolist() != permutation(100, 6).tolist()
