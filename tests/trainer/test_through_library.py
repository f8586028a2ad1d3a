"""`recompute-train --library`: the bits of a run without it, on the same kernels; what is no library is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.errors import UsageError
from recompute.runtime.cpu.device import jit

#: the command, and the same in a process whose kernels are a library's
TRAIN = "import sys; from recompute.cli.train import main; sys.exit(main(sys.argv[1:]))"
EXECUTOR = f"import recompute as rc; rc.build_for('x86_64', 'native'); {TRAIN}"
needs_compiler = pytest.mark.skipif(
    bool(jit.unavailable()) or shutil.which("gcc") is None or os.uname().machine != "x86_64",
    reason="needs numba, a C compiler and x86-64",
)


def data(path: Path, samples: int) -> Path:
    """Samples for the network mlp."""
    g = np.random.default_rng(0)
    (x,) = rc.models.info("mlp").inputs
    np.savez(path, x=g.standard_normal((samples, *x.shape[1:]), dtype=np.float32), label=g.integers(0, 2, samples))
    return path


def trained(script: str, folder: Path, *more: str) -> Any:
    """The results of a run with evaluations and a falling rate."""
    folder.mkdir()
    given = ["mlp", "--data", data(folder / "data.npz", 22), "--eval", data(folder / "eval.npz", 7), "--batch", "4",
             "--drop-last", "--schedule", "linear", "--epochs", "2", "--json", folder / "out.json", *more]  # fmt: skip
    subprocess.run([sys.executable, "-c", script, *map(str, given)], check=True, capture_output=True)
    return json.loads((folder / "out.json").read_text())


@needs_compiler
@pytest.mark.slow
def test_a_run_by_the_library_has_the_executors_bits(tmp_path: Path) -> None:
    ours, theirs = trained(TRAIN, tmp_path / "a", "--library"), trained(EXECUTOR, tmp_path / "b")
    assert ours["weights_sha256"] == theirs["weights_sha256"] and ours["steps"] == theirs["steps"] == 10
    for a, b in zip(ours["epochs"], theirs["epochs"], strict=True):
        assert (a["train"], a["eval"]) == (b["train"], b["eval"])
    assert ours["peak_bytes"]["measured"] > ours["peak_bytes"]["predicted"] == theirs["peak_bytes"]["measured"]


@needs_compiler
@pytest.mark.slow
def test_another_batch_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TRAIN, "mlp", "--data", str(data(tmp_path / "data.npz", 22))]
    done = subprocess.run([*command, "--batch", "4", "--library"], check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "here of a batch of 4, and this run has one of 2: leave out" in done.stderr


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    program = rc.load(rc.models.build("mlp"), batch=4)
    for options, says in (
        ({"place": "emulated"}, "this run is on"),
        ({"buckets": {"sequence": (8, 16)}}, "buckets of several sizes"),
        ({}, "call rc.build_for"),
    ):
        with pytest.raises(UsageError, match=says):
            rc.Trainer(program, rc.Adam(), library=True, **options)  # type: ignore[arg-type]
