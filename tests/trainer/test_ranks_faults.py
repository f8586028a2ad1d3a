"""A rank that is killed, fails, leaves or stops takes all ranks down at once; what follows a resume is the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from distributed_cases import environment
from test_ranks import FOLDERS, files
from trainer_cases import data, trainer

import recompute as rc

HERE = Path(__file__)
DEADLINE = 2.0


class Fault(rc.data.Dataset):
    """The tests' data; on rank `victim` something happens when it reads its rows for the `when`-th time."""

    def __init__(self, folder: Path, kind: str, when: int) -> None:
        self.arrays, self.folder, self.kind, self.when, self.reads, self.name = (
            data(48),
            folder,
            kind,
            when,
            0,
            "faults",
        )
        self.columns = {n: (a.dtype, a.shape[1:]) for n, a in self.arrays.items()}

    def __len__(self) -> int:
        return 48

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        self.reads += 1
        if self.reads == self.when:
            (self.folder / "when").write_text(str(time.time()))
            if self.kind == "exit":
                os._exit(0)
            if self.kind in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
            raise RuntimeError("the disk is gone")
        return {n: a[indices] for n, a in self.arrays.items()}


def _main(folder: Path, kind: str, victim: int, when: int) -> None:
    one = trainer(mesh="dp=2", zero=1)
    mine = one.ranks.rank == victim
    given = Fault(folder, kind if mine else "", when if mine else -1)
    history = one.fit(given, epochs=4, save=rc.Saving(folder / "run", steps=1), resume=True)
    if one.ranks.rank == 0:
        print(history.weights_sha256, history.resumed_at, flush=True)


def ranks_run(folder: Path, kind: str, victim: int, when: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recompute.launch", "--nproc", "2", "--deadline", str(DEADLINE), str(HERE)]
    return subprocess.run(
        [*command, str(folder), kind, str(victim), str(when)], env=environment(*FOLDERS), capture_output=True,
        text=True, timeout=100, check=False,
    )  # fmt: skip


@pytest.mark.usefixtures("mpi")
@pytest.mark.parametrize(
    ("kind", "victim"), [("kill", 0), ("kill", 1), ("raise", 1), ("exit", 0), ("stop", 1)]
)  # fmt: skip
def test_all_are_gone_and_a_resume_gives_the_same_bits(kind: str, victim: int, tmp_path: Path) -> None:
    wanted = trainer(mesh="dp=1").fit(data(48), epochs=4, save=rc.Saving(tmp_path / "whole", steps=1))
    when = random.Random(f"{kind}{victim}").randint(7, 10)
    done = ranks_run(tmp_path, kind, victim, when)
    gone = time.time() - float((tmp_path / "when").read_text())
    assert done.returncode != 0
    assert gone < 5 + (DEADLINE if kind == "stop" else 0)
    assert f"rank {victim}" in done.stderr
    again = ranks_run(tmp_path, "nothing", 0, -1)
    assert again.returncode == 0, again.stderr[-2000:]
    sha256, resumed_at = again.stdout.split()
    assert sha256 == wanted.weights_sha256
    assert 0 < int(resumed_at) < 12, "batches are read at most a few steps ahead"
    assert files(tmp_path / "run") == files(tmp_path / "whole")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
