"""Pipes and devices in the place of files; mapped files that become shorter; readers that take linear time."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import recompute as rc
from recompute import models
from recompute.compat.onnxruntime_training.api import CheckpointState
from recompute.data import dataset
from recompute.errors import ModelError, RecomputeError
from recompute.passes.planners.core.adapters import read_problem
from recompute.planning import load_plan
from recompute.support.files import regular
from recompute.training.state import load_state

MLP = Path(models.__file__).parent / "mlp.onnx"
needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")

READERS = {
    "x.onnx": rc.load,
    **{f"x.{end}": dataset for end in ("npz", "npy", "csv", "tsv", "parquet")},
    "x.json": load_plan,
    "graph.json": read_problem,
    "x.safetensors": lambda p: load_state(rc.Program(rc.parse("program p {\n  param %w: f32[2]\n}"), {}), p),
    "checkpoint": CheckpointState.load_checkpoint,
    "x.npy in a dict": lambda p: dataset({"x": str(p)}),
    "vocab.txt": lambda p: rc.data.Tokenized(dataset({"s": ["a", "b"]}), "s", p, length=4),
}


@needs_pipes
@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_no_file(name: str, tmp_path: Path) -> None:
    """Without a writer, reading it would wait for ever."""
    if extra := {"x.parquet": "pyarrow", "vocab.txt": "tokenizers"}.get(name):
        pytest.importorskip(extra)
    path = tmp_path / name.split(" ")[0]
    os.mkfifo(path)
    with pytest.raises(RecomputeError, match="it is a pipe, not a file"):
        READERS[name](path)


@needs_pipes
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_of_pipes(name: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match="it is a pipe, not a file"):
        rc.load_adapter(str(MLP), tmp_path)


def test_devices_links_and_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it is a device, not a file"):
        regular("/dev/zero")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert regular(tmp_path / "link") == tmp_path / "link"
    with pytest.raises(FileNotFoundError):
        regular(tmp_path / "nothing")


@pytest.mark.parametrize("kind", ["npy", "npz", "array"])
def test_a_mapped_file_that_becomes_shorter_is_an_error(kind: str, tmp_path: Path) -> None:
    """Reading beyond its end would kill the process (SIGBUS)."""
    path, x = tmp_path / f"x.{'npz' if kind == 'npz' else 'npy'}", np.arange(1 << 14).reshape(-1, 2)
    np.savez(path, x=x) if kind == "npz" else np.save(path, x)
    data = dataset({"x": np.load(path, mmap_mode="r")} if kind == "array" else path)
    assert data.take(np.array([5]))["x"].tolist() == [[10, 11]]
    shutil.copy(path, tmp_path / "other")
    os.truncate(path, 4096)
    with pytest.raises(ModelError, match="became shorter while it was used: it has 4,096 bytes"):
        data.take(np.array([8000]))
    os.replace(tmp_path / "other", path)  # renamed: the mapped file stays as it was
    assert dataset(path).take(np.array([8000]))["x"].tolist() == [[16000, 16001]]


def test_a_file_replaced_by_another_is_still_read(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(8192))
    data = dataset(tmp_path / "x.npy")
    data.take(np.array([0]))
    np.save(tmp_path / "y.npy", np.arange(3))
    os.replace(tmp_path / "y.npy", tmp_path / "x.npy")
    assert data.take(np.array([8191]))["x"].tolist() == [8191]


def test_many_columns_of_a_csv_file(tmp_path: Path) -> None:
    """A search of each name in all others took a minute of processor time."""
    n = 30_000
    names = [f"column number {i}" for i in range(n)]
    (tmp_path / "x.csv").write_text(",".join(names) + "\n" + ",".join(["1"] * n) + "\n")
    start = time.process_time()
    assert len(dataset(tmp_path / "x.csv").columns) == n and time.process_time() - start < 5
    (tmp_path / "x.csv").write_text("a,b,c,b,a\n1,2,3,4,5\n")
    with pytest.raises(ModelError, match="two columns are called 'a'"):
        dataset(tmp_path / "x.csv")


def test_a_parquet_file_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for name in "ab":
        pq.write_table(pa.table({f"c{i}": [1.0 * i, ord(name)] for i in range(9)}), tmp_path / f"{name}.parquet")
    opened = []
    plain = pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", lambda *a, **k: opened.append(a) or plain(*a, **k))
    monkeypatch.setattr(pq, "read_table", lambda *a, **k: opened.append(a))
    taken = dataset(tmp_path).take(np.array([0, 3]))
    assert [taken[f"c{i}"].tolist() for i in range(9)] == [[i, 98.0] for i in range(9)] and len(opened) == 2
