"""Tests that start several processes: whether they can, and what the ranks of distributed_step.py say."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from recompute.errors import RecomputeError
from recompute.launch import mpiexec
from recompute.runtime.communication.mpi import load_mpi


@functools.cache
def without_mpi() -> str:
    """Why no ranks can be started; "" where they can.  MPI is loaded in a process of its own, which it changes."""
    try:
        mpiexec()
    except RecomputeError as e:
        return str(e)
    text = f"from {load_mpi.__module__} import load_mpi; load_mpi()"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    return "" if not done.returncode else done.stderr.strip().splitlines()[-1]


def started(place: str, ranks: int, folder: Path, *options: str, timeout: float = 200) -> subprocess.CompletedProcess:
    """Runs distributed_step.py on several ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).parent / "distributed_step.py"
    command = [sys.executable, "-m", "recompute.launch", "--nproc", str(ranks), str(script), place, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, env=environment, timeout=timeout, check=False
    )


def results(place: str, ranks: int, folder: Path, *options: str, timeout: float = 200) -> list[dict[str, Any]]:
    """What each rank says."""
    done = started(place, ranks, folder, *options, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(ranks)]
