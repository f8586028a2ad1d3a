"""Tests of several ranks: what each has, whether processes can be started, what those of distributed_step.py say."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from recompute.errors import RecomputeError
from recompute.language.program import Program
from recompute.launch import mpiexec
from recompute.training.parts import stored


def own_arrays(program: Program) -> dict[str, np.ndarray]:
    """Copies of the parameters, buffers and state that one rank has."""
    return {v.name: np.array(program.data[v.name]) for v in stored(program)}


def environment(*folders: Path) -> dict[str, str]:
    """That of ranks, which import from `folders`: an MPI library may lie beside a launcher of another environment."""
    libraries = [str(Path(mpiexec()).parents[1] / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    found = {**os.environ, "OMP_NUM_THREADS": "1", "LD_LIBRARY_PATH": ":".join(filter(None, libraries))}
    return {**found, "PYTHONPATH": ":".join(map(str, folders))} if folders else found


@functools.cache
def without_mpi() -> str:
    """Why no ranks can be started; "" where they can."""
    try:
        launcher = mpiexec()
    except RecomputeError as e:
        return str(e)
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (pip install 'onnx-recompute[mpi]')"
    tried = subprocess.run(
        [launcher, "-n", "2", sys.executable, "-c", "from mpi4py import MPI; assert MPI.COMM_WORLD.size == 2"],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return f"MPI does not start here: {tried.stderr[-200:]}" if tried.returncode else ""


def started(place: str, ranks: int, folder: Path, *options: str, timeout: float = 200) -> subprocess.CompletedProcess:
    """Runs distributed_step.py on several ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).parent / "distributed_step.py"
    command = [sys.executable, "-m", "recompute.launch", "--nproc", str(ranks), str(script), place, str(folder)]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, env=environment(), timeout=timeout, check=False
    )


def results(place: str, ranks: int, folder: Path, *options: str, timeout: float = 200) -> list[dict[str, Any]]:
    """What each rank says."""
    done = started(place, ranks, folder, *options, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(ranks)]
