"""Damaged files of every kind are read, or refused in one error of this package."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recompute.data import Dataset, dataset
from recompute.errors import RecomputeError

X = np.arange(24, dtype=np.float64).reshape(4, 2, 3)
G = np.random.default_rng(0)


def saved(save: Callable, **arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    save(out, **arrays)
    return out.getvalue()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def parquet() -> bytes:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    out = io.BytesIO()
    pq.write_table(pa.table({"x": [1.0, 2, 3], "y": [1, 2, 3], "s": ["a", "b", "c"], "l": [[1, 2]] * 3}), out)
    return out.getvalue()


def image(kind: str) -> bytes:
    out = io.BytesIO()
    pytest.importorskip("PIL.Image").fromarray(G.integers(0, 256, (20, 24, 3), np.uint8)).save(out, kind)
    return out.getvalue()


FILES: dict[str, Callable[[], bytes]] = {
    "stored.npz": lambda: saved(np.savez, x=X, y=np.arange(4), w=np.array(list("abcd"))),
    "packed.npz": lambda: saved(np.savez_compressed, x=X, y=np.arange(4)),
    "x.npy": lambda: npy(np.asfortranarray(X)),
    "d.csv": lambda: b'a,b,c\n1,2.5,"x, y"\n2,,z\n3,4,w\n',
    "d.tsv": lambda: b'a\tb\n1\t"q\n2\tw\n',
    "d.parquet": parquet,
    "a/x.jpg": lambda: image("JPEG"),
    "a/x.png": lambda: image("PNG"),
}


def damaged(content: bytes, draw: random.Random) -> bytes:
    """The file cut, with bytes put in, with bytes changed, or with its digits changed."""
    way, data = draw.randrange(4), bytearray(content)
    if way == 0:
        return content[: draw.randrange(len(content))]
    if way == 1:
        at = draw.randrange(len(data))
        data[at:at] = draw.randbytes(draw.randrange(1, 9))
        return bytes(data)
    digits = [i for i, c in enumerate(content) if way == 2 and c in b"0123456789(,)<>"] or range(len(data))
    for _ in range(draw.randrange(1, 5)):
        data[draw.choice(digits)] = draw.choice(b"-90(,1<>") if way == 2 else draw.randrange(256)
    return bytes(data)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_read_or_refused(name: str, tmp_path: Path) -> None:
    path, content, draw, read = tmp_path / name, FILES[name](), random.Random(name), 0
    path.parent.mkdir(exist_ok=True)
    for _ in range(80):
        path.write_bytes(damaged(content, draw))
        try:
            data = dataset(tmp_path, size=8, workers=1) if name.startswith("a/") else dataset(path)
            assert isinstance(data, Dataset)
            for column, array in data.take(np.arange(len(data))).items():
                assert (array.dtype, array.shape) == (data.columns[column][0], (len(data), *data.columns[column][1]))
            read += 1
        except RecomputeError as e:
            assert len(str(e)) < 1000
    assert read < 80
