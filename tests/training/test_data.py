"""Data for `--run`: what is in an archive is compared with the program before it is read."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

import recompute as rc
from recompute.data.batches import npz_batches
from recompute.errors import ModelError, UsageError

BLOCK = "program p {\n  input %x: f32[2,3]\n  input %n: i64[]\n  %y: f32[2,3] = Relu(%x)\n  output %y\n}"
GOOD = {"x": np.arange(12, dtype=np.float32).reshape(4, 3), "n": np.array(7)}


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def written(folder: Path, **members: bytes | np.ndarray) -> Path:
    path = folder / "data.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name + ".npy", content if isinstance(content, bytes) else npy(content))
    return path


def program() -> rc.Program:
    return rc.Program(rc.parse(BLOCK))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_batches_in_turn(tmp_path: Path, save: object) -> None:
    path = tmp_path / "data.npz"
    save(path, **GOOD, further=np.array([{}]))  # type: ignore[operator]
    batches = npz_batches(path, program())
    found = [next(batches) for _ in range(3)]
    assert [b["x"][0, 0] for b in found] == [0, 6, 0] and all(b["n"] == 7 for b in found)


@pytest.mark.parametrize("x, error, message", [
    (b"no array", ModelError, "not an .npz file, or damaged"),
    (npy(GOOD["x"])[:-1], ModelError, "has 47 bytes"),
    (npy(GOOD["x"]).replace(b"(4, 3)", b"(9, 3)"), ModelError, "has 48 bytes"),
    (npy(GOOD["x"]).replace(b"(4, 3), ", b"(4, 3" + b"(" * 3), ModelError, "not an .npz file, or damaged"),
    (b"\x93NUMPY\x09\x09" + npy(GOOD["x"])[8:], ModelError, "not an .npz file, or damaged"),
    (np.array([{}] * 2), UsageError, "'x' is object"),
    (GOOD["x"].astype(np.float64), UsageError, "'x' is float64"),
    (GOOD["x"][:1], UsageError, "but must be f32"),
])  # fmt: skip
def test_arrays_that_do_not_fit(tmp_path: Path, x: bytes | np.ndarray, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        next(npz_batches(written(tmp_path, x=x, n=GOOD["n"]), program()))


def test_files_that_are_no_archive(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(npy(GOOD["x"]))
    cases = ((tmp_path / "x.npy", "not an .npz file"), (tmp_path, "directory"), (tmp_path / "no", "No such"))
    for path, message in cases:
        with pytest.raises(ModelError, match=message):
            next(npz_batches(path, program()))


def test_what_is_not_asked_for_is_not_unpacked(tmp_path: Path) -> None:
    """80 MB of zeros take 80 kB in the file: neither as a further array nor as one that does not fit are they read."""
    zeros = np.zeros((10_000_000,))
    path = written(tmp_path, **GOOD, zeros=npy(zeros))
    tracemalloc.start()
    next(npz_batches(path, program()))
    with pytest.raises(UsageError, match="float64"):
        next(npz_batches(path, rc.Program(rc.parse(BLOCK.replace("%x", "%zeros")))))
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
