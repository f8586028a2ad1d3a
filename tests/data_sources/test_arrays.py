"""Datasets of arrays in memory and in .npy and .npz files."""

from __future__ import annotations

import threading
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from recompute.data import Dataset, dataset
from recompute.errors import ModelError, UsageError

X = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
Y = np.arange(10)
SOME = np.array([7, 0, 7])


def open_(source: Any, columns: Any = None) -> Dataset:
    found = dataset(source, columns)
    assert isinstance(found, Dataset)
    return found


class Shared:
    """An array of another library, as DLPack sees it."""

    def __init__(self, array: np.ndarray, device: int = 1) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0


class Unreadable(Shared):
    """An array of a device that the host cannot read."""

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("on a device")


class OnDevice(Shared):
    """An array of CuPy."""

    def get(self) -> np.ndarray:
        return self.array.copy()


def test_arrays_in_memory_are_used_in_place() -> None:
    x, shared = X.copy(), Y.copy()
    data = open_({"x": x, "y": Shared(shared), "z": OnDevice(Y, 2), "words": ["a"] * 10})
    x[7], shared[0] = -1, 100
    found = data.take(SOME)
    assert len(data) == 10 and (found["x"][0] == -1).all() and found["y"].tolist() == [7, 100, 7]
    assert found["z"].tolist() == [7, 0, 7] and found["words"].tolist() == ["a"] * 3
    assert data.columns["x"] == (np.dtype(np.float32), (2, 3)) and data.columns["y"] == (np.dtype(np.int64), ())
    assert "10 samples" in repr(data) and "x: float32[2,3]" in repr(data) and "words: text" in repr(data)


@pytest.mark.parametrize("array", [
    X.astype(">f4"), np.asfortranarray(X), np.concatenate([X, X], 2)[..., ::2], X.astype(ml_dtypes.bfloat16), X > 3,
    X.astype(">i2"), np.zeros((10, 0), np.float32), X.astype(np.uint8), X.astype(ml_dtypes.bfloat16)[::-1],
])  # fmt: skip
def test_rows_are_contiguous_and_native(array: np.ndarray, tmp_path: Path) -> None:
    data = open_({"x": array})
    for found in [data.take(SOME)["x"], data.take(np.arange(0))["x"]]:
        assert found.flags.c_contiguous and found.flags.aligned and found.dtype.isnative
        assert (found.dtype, found.shape[1:]) == data.columns["x"]
    np.testing.assert_array_equal(data.take(SOME)["x"], array[SOME])


@pytest.mark.parametrize("arrays, message", [
    ({}, "arrays has no column of samples"),
    ({"x": X, "y": Y[:3]}, "different numbers of rows: 'x' has 10, 'y' has 3; choose some by columns="),
    ({"x": X[:0]}, r"arrays is empty: its columns \(x: float32\[2,3\]\) have 0 rows"),
    ({"x": np.float32(3)}, "column 'x' of arrays is a single value"),
    ({"x": np.array([{}])}, "column 'x' of arrays has Python objects"),
    ({"x": np.array([1j])}, "elements of type complex128"),
    ({"x": np.zeros(3, "f4,i4")}, "elements of type"),
    ({"x": np.array(["2020"], "M8[D]")}, "elements of type datetime64"),
    ({"x": [[1, 2], 3]}, "its rows have different shapes; pad them"),
    ({"x": [[1, 2], [[3]]]}, "column 'x' of arrays has samples of 1 axes, and of 2 in sample 1"),
    ({"x": [[1, 2], ["a"]]}, "column 'x' of arrays has no array of numbers in sample 1"),
    ({3: X}, r"named by strings, not int \(3\)"),
    ({"x": Unreadable(X, 2)}, "column 'x' of arrays cannot be read as an array"),
    (X, r"one ndarray has no name as a column: give a dict"),
    (3, "type int is no source of data"),
])  # fmt: skip
def test_what_is_no_column(arrays: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dataset(arrays)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<i8", "u1", "?", "<f2"])
def test_npz(save: Any, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "d.npz"
    x = X.astype(dtype)
    further = {"names": np.array(["a", "b"]), "one": np.float32(1), "objects": np.array([{}] * 10)}
    save(path, x=np.asfortranarray(x), odd=np.zeros((10, 3), np.uint8), y=Y, **further)
    data = open_(path)
    assert list(data.columns) == ["x", "odd", "y"] and set(data.notes) == set(further)
    found = data.take(SOME)
    np.testing.assert_array_equal(found["x"], x[SOME])
    assert found["x"].flags.aligned and found["x"].dtype.isnative and found["y"].tolist() == [7, 0, 7]
    for columns, message in (
        (["names", "one"], r"no column 'names' \(has 2 rows, the other columns have 10\)"),
        (["x", "names"], "different numbers of rows"),
        (["objects"], "no column 'objects' .has Python objects"),
    ):
        with pytest.raises(UsageError, match=message):
            dataset(path, columns=columns)
    with pytest.raises(UsageError, match=r"d\.npz' is read without an option 'mmap'; it takes none"):
        dataset(path, mmap=True)


def test_chosen_columns_may_be_shorter_than_others(tmp_path: Path) -> None:
    """As in keras' mnist.npz, which has training and test data in one file."""
    parts = {"x_train": X, "y_train": Y, "x_test": X[:4], "y_test": Y[:4]}
    np.savez(tmp_path / "d.npz", **parts)
    for name, array in parts.items():
        (tmp_path / "f").mkdir(exist_ok=True)
        np.save(tmp_path / "f" / f"{name}.npy", array)
    for source in (tmp_path / "d.npz", parts, tmp_path / "f"):
        test = open_(source, {"x": "x_test", "label": "y_test"})
        assert len(test) == 4 and test.take(np.array([3]))["label"].tolist() == [3]
        with pytest.raises(UsageError, match=r"different numbers of rows: .*; choose some by columns="):
            dataset(source)


def test_data_frames() -> None:
    pandas = pytest.importorskip("pandas")
    data = open_(
        pandas.DataFrame({"x": Y * 0.5, "label": Y, "word": ["a"] * 10}), {"x": ["x", "label"], "label": "label"}
    )
    assert data.take(SOME)["x"].tolist() == [[3.5, 7], [0, 0], [3.5, 7]] and data.name == "the data frame"


def mapped_bytes(path: Path) -> int:
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
def test_stored_arrays_are_mapped_and_compressed_ones_are_not_read_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "stored.npz", x=X, y=Y)
    np.savez_compressed(tmp_path / "packed.npz", x=X, y=Y)
    stored, packed = open_(tmp_path / "stored.npz"), open_(tmp_path / "packed.npz")
    stored.read(SOME, ["x"])
    assert mapped_bytes(tmp_path / "stored.npz")
    reads: list[str] = []
    plain = np.lib.format.read_array
    monkeypatch.setattr(np.lib.format, "read_array", lambda f, **o: (reads.append(f.name), plain(f, **o))[1])
    for _ in range(3):
        packed.read(SOME, ["y"])
    assert reads == ["y.npy"]


def test_npy(tmp_path: Path) -> None:
    for name, array in (("x", X.astype(">f8")), ("label", Y)):
        np.save(tmp_path / f"{name}.npy", array)
    one = open_(tmp_path / "x.npy")
    both = [open_({n: tmp_path / f"{n}.npy" for n in ("x", "label")}), open_(tmp_path)]
    np.testing.assert_array_equal(one.take(SOME)["x"], X[SOME])
    for data in both:
        assert set(data.columns) == {"x", "label"} and data.take(SOME)["label"].tolist() == [7, 0, 7]


def damaged(folder: Path, name: str) -> Path:
    """A file that cannot be read."""
    path = folder / name
    if name == "cut.npz":
        np.savez(path, x=X)
        path.write_bytes(path.read_bytes()[:-40])
    elif name == "size.npz":
        np.save(folder / "x.npy", X)
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", (folder / "x.npy").read_bytes()[:-4])
    elif name in ("cut.npy", "shape.npy"):
        np.save(path, X)
        content = path.read_bytes()
        path.write_bytes(content[:-4] if name == "cut.npy" else content.replace(b"(10, 2", b"(-9, 2"))
    elif name.startswith("empty"):
        path.write_bytes(b"")
    elif name.startswith("text"):
        path.write_text("some text")
    return path


@pytest.mark.parametrize("name, message", [
    ("cut.npz", "not an .npz file, or damaged"), ("size.npz", "the array 'x' has 236 bytes"),
    ("empty.npz", "it is empty"), ("text.npz", "not an .npz file"), ("cut.npy", "has 236 bytes, fewer than"),
    ("empty.npy", "it is empty"), ("text.npy", "not an .npy file"), ("emty.npz", "it does not exist"),
    ("shape.npy", r"the shape \[-9, 2, 3\] is impossible"), ("none.npy", "it does not exist"),
])  # fmt: skip
def test_damaged_files(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"cannot read the data file '.*{name}': .*{message}"):
        dataset(damaged(tmp_path, name))


def test_a_missing_file_that_has_another_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "digits.npz", x=X)
    with pytest.raises(ModelError, match=r"does not exist \(did you mean digits.npz\?\)"):
        dataset(tmp_path / "digit.npz")
    for path, message in ((tmp_path / "a.h5", "is no known kind of data: .*, or a file that ends in .npz"),):
        with pytest.raises(UsageError, match=message):
            dataset(path)


def test_python_objects_are_never_read(tmp_path: Path) -> None:
    np.save(tmp_path / "o.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(UsageError, match="has Python objects, which are not read"):
        dataset(tmp_path / "o.npy")
    np.savez(tmp_path / "o.npz", x=np.array([{}]))
    with pytest.raises(UsageError, match="no column of samples: 'x' has Python objects"):
        dataset(tmp_path / "o.npz")


def test_columns_are_chosen_renamed_and_joined(tmp_path: Path) -> None:
    data = {"x": X, "a": Y, "b": Y * 0.5, "words": ["a"] * 10}
    assert list(open_(data, ["b", "x"]).columns) == ["b", "x"]
    found = open_(data, {"image": "x", "row": ["a", "b", "a"]})
    assert found.columns["row"] == (np.dtype(np.float64), (3,))
    assert found.take(SOME)["row"].tolist() == [[7, 3.5, 7], [0, 0, 0], [7, 3.5, 7]]
    for columns, message in (
        (["z"], "no column 'z'"),
        ({"row": ["a", "x"]}, "column 'x' of arrays is not one number a sample: 'row' cannot join it"),
        ("x", r"columns= takes a list of names"),
    ):
        with pytest.raises(UsageError, match=message):
            open_(data, columns)
    with pytest.raises(UsageError, match="type dict takes no option 'size'"):
        dataset(data, size=3)


def test_threads_take_at_the_same_time(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "d.npz", x=np.arange(4000).reshape(1000, 4))
    data = open_(tmp_path / "d.npz")
    wrong: list[int] = []

    def work(seed: int) -> None:
        indices = np.random.default_rng(seed).integers(0, 1000, 100)
        wrong.extend(np.flatnonzero(data.take(indices)["x"][:, 0] != 4 * indices))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_rows_of_a_map_are_copied_once(tmp_path: Path) -> None:
    """256 rows of a mapped file take the memory of 256 rows, whatever the alignment in the archive."""
    import tracemalloc

    np.savez(tmp_path / "odd_name.npz", y=Y[:1].repeat(2000), images=np.zeros((2000, 3000), np.float32))
    data = open_(tmp_path / "odd_name.npz")
    tracemalloc.start()
    data.take(np.arange(256))
    assert tracemalloc.get_traced_memory()[1] < 1.1 * 256 * 3000 * 4
    tracemalloc.stop()
