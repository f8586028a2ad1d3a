"""Datasets and loaders of PyTorch and Hugging Face, and iterables of batches."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.data import Dataset, Stream, dataset, fitted
from recompute.data.base import RAGGED
from recompute.errors import UsageError
from recompute.language.types import Value

X = np.arange(24, dtype=np.float32).reshape(4, 6)
Y = np.arange(4)
BATCHES = [{"x": X[:2], "label": Y[:2]}, {"x": X[2:], "label": Y[2:]}]
INPUTS = [Value("x", rc.TensorType("f32", (2, 6))), Value("label", rc.TensorType("i64", (2,)))]


class Samples:
    """A dataset as PyTorch's are."""

    def __init__(self, samples: list) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        return self.samples[i]


class Loader:
    """A loader as PyTorch's is."""

    def __init__(self) -> None:
        self.dataset, self.batch_size, self.epochs = None, 2, []
        self.sampler = SimpleNamespace(set_epoch=self.epochs.append)

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[tuple]:
        return ((b["x"], b["label"]) for b in BATCHES)


def rows(found: Any) -> list:
    return [(b["x"].tolist(), b["label"].tolist()) for b in found]


def test_samples() -> None:
    tuples = dataset(Samples([(x, int(y)) for x, y in zip(X, Y, strict=True)]), columns=("x", "label"))
    dicts = dataset(Samples([{"x": x, "label": y, "text": str(y)} for x, y in zip(X, Y, strict=True)]))
    for data in (tuples, dicts):
        assert isinstance(data, Dataset) and len(data) == 4 and data.name == "the Samples"
        found = data.take(np.array([3, 0]))
        assert found["x"].tolist() == X[[3, 0]].tolist() and found["label"].tolist() == [3, 0]
        assert data.columns["label"] == (np.dtype(np.int64), ()) and found["x"].flags.c_contiguous
    assert dicts.take(np.array([2]))["text"].tolist() == ["2"]  # type: ignore[union-attr]


@pytest.mark.parametrize("samples, columns, message", [
    ([], None, "the Samples is empty"),
    ([(X[0], 1)], None, r"a sample of the Samples is 2 values without names: columns=\("),
    ([X[0]], None, "is one ndarray without names"),
    ([(X[0], 1)], ("x",), "is 2 values, but columns= names 1: x"),
    ([{"x": X[0]}], ("y",), "has no column 'y'; it has: x"),
    ([{"x": {}}], None, "'x' of the Samples has Python objects"),
])  # fmt: skip
def test_samples_that_are_none(samples: list, columns: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dataset(Samples(samples), columns=columns)


def test_samples_that_differ() -> None:
    data = dataset(Samples([{"x": X[0]}, {"x": X[0][:3]}, {"y": 1}, {"x": X[0].astype("f8")}]))
    assert isinstance(data, Dataset)
    for i, found in ((1, r"float32\[3\]"), (2, "nothing"), (3, r"float64\[6\]")):
        with pytest.raises(UsageError, match=rf"sample {i} of the Samples has {found} as 'x', where sample 0 has"):
            data.take(np.array([0, i]))


def generated() -> Iterator[dict]:
    yield from BATCHES


@pytest.mark.parametrize("source, columns, name", [
    (BATCHES, None, "the list"), (generated, None, "generated()"), (Loader(), ("x", "label"), "the Loader"),
    ([(b["x"], b["label"]) for b in BATCHES], ("x", "label"), "the list"),
    ([{**b, "further": 1} for b in BATCHES], ("x", "label"), "the list"),
])  # fmt: skip
def test_batches(source: Any, columns: Any, name: str) -> None:
    stream = dataset(source, columns)
    assert isinstance(stream, Stream) and stream.name == name
    for epoch in (0, 1):
        assert rows(stream.batches(epoch)) == rows(BATCHES)
        assert rows(fitted(stream, INPUTS, {"label": 4}).batches(epoch)) == rows(BATCHES)  # type: ignore[union-attr]
    if isinstance(source, Loader):
        assert source.epochs == [0, 0, 1, 1]


def test_a_generator_serves_one_epoch() -> None:
    stream = dataset(generated())
    assert isinstance(stream, Stream) and len(list(stream.batches(0))) == 2
    with pytest.raises(UsageError, match="was read in an earlier epoch and cannot be read again: give a list"):
        next(stream.batches(1))
    with pytest.raises(UsageError, match="the list gives no batches"):
        next(dataset([]).batches(0))  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="does not apply to a stream"):
        dataset(stream, columns=["x"])


def test_a_stream_of_samples_is_no_stream_of_batches() -> None:
    stream = dataset(lambda: [{"x": X[0], "label": 1}])
    with pytest.raises(UsageError, match=r"no column 'label' .* is a single value in a batch: .* source\.batch\(32\)"):
        list(fitted(stream, INPUTS).batches(0))  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def hugging_face() -> ModuleType:
    return pytest.importorskip("datasets")


def test_hugging_face(hugging_face: ModuleType) -> None:
    source = hugging_face.Dataset.from_dict({
        "x": X.tolist(), "label": Y.tolist(), "text": ["a", "b", "c", "d"], "grid": [[[1, 2], [3, 4]]] * 4,
        "ragged": [[1], [2, 3], [4], [5]], "flag": [True, False] * 2,
    })  # fmt: skip
    data = dataset(source.select([3, 1, 2, 0]).select([3, 1, 2, 0]))
    assert isinstance(data, Dataset) and len(data) == 4
    found = data.read(np.array([3, 0, 3]), ["x", "label", "text", "grid", "flag"])
    np.testing.assert_array_equal(found["x"], X[[3, 0, 3]])
    assert found["label"].tolist() == [3, 0, 3] and found["text"].tolist() == ["d", "a", "d"]
    assert found["grid"].shape == (3, 2, 2) and found["flag"].tolist() == [False, True, False]
    assert all(a.flags.c_contiguous for a in found.values())
    ragged = data.read(np.array([1, 0]), ["ragged"])["ragged"]
    assert data.columns["ragged"][1] == (RAGGED,) and [a.tolist() for a in ragged] == [[2, 3], [1]]
    assert data.shapes("ragged").tolist() == [[1], [2], [1], [1]]
    assert dataset(source.select([2, 3])).columns["ragged"][1] == (1,)  # type: ignore[union-attr]
    chosen = dataset(source, columns={"x": "x", "label": "label"})
    assert fitted(chosen, INPUTS).take(np.array([1]))["label"].tolist() == [1]  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"Hugging Face dataset.* is empty"):
        dataset(source.select([]))
    with pytest.raises(UsageError, match="dict of datasets, of which one is needed: 'train', 'test'"):
        dataset(hugging_face.DatasetDict({"train": source, "test": source}))
    batches = dataset(source.select_columns(["x", "label"]).to_iterable_dataset().batch(2))
    assert rows(batches.batches(0)) == rows(BATCHES)  # type: ignore[union-attr]


def test_pytorch() -> None:
    torch = pytest.importorskip("torch")
    x, y = torch.arange(24.0).reshape(4, 6).requires_grad_(), torch.arange(4)
    arrays = dataset({"x": x, "label": y, "half": x.detach().bfloat16(), "turned": x.detach().T.contiguous().T})
    y[3] = 9  # shared
    found = arrays.take(np.array([3]))  # type: ignore[union-attr]
    assert found["label"].tolist() == [9] and found["half"].tolist() == found["x"].tolist() == found["turned"].tolist()
    y[3] = 3
    samples = torch.utils.data.TensorDataset(x.detach(), y)
    by_number = dataset(samples, columns=("x", "label"))
    np.testing.assert_array_equal(by_number.take(np.array([2, 1]))["x"], X[[2, 1]])  # type: ignore[union-attr]
    loader = torch.utils.data.DataLoader(samples, batch_size=2)
    stream = dataset(loader, columns=("x", "label"))
    assert isinstance(stream, Stream) and rows(stream.batches(0)) == rows(BATCHES)
    with pytest.raises(UsageError, match="one Tensor has no name"):
        dataset(x)
