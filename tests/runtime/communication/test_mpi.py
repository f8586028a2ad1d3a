"""The engine on MPI: the interpreter's bits on several processes, and no process left when one fails."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from distributed_cases import environment

from recompute.launch import command, main, mpiexec, parser
from recompute.runtime.communication import rank as rank_module
from recompute.support.threads import cores

RANKS = Path(__file__).parent / "ranks.py"


needs_mpi = pytest.mark.usefixtures("mpi")


def launched(n: int, *arguments: str, deadline: float = 60) -> tuple[int, str, float]:
    """Exit code, what was printed, and when it ended."""
    command = [sys.executable, "-m", "recompute.launch", "--nproc", str(n), "--deadline", str(deadline), str(RANKS)]
    with subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
    ) as process:
        try:
            out, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            pytest.fail(f"it hangs: {out}")
    return process.returncode, out, time.time()


@needs_mpi
@pytest.mark.parametrize("n", [2, 4])
def test_the_bits_of_the_interpreter(n: int) -> None:
    code, out, _ = launched(n, "checks")
    assert code == 0, out
    assert "Warning" not in out, out
    assert sorted(re.findall(rf"rank (\d) of {n}: all is well", out)) == [str(r) for r in range(n)]


@needs_mpi
def test_started_by_mpiexec(tmp_path: Path) -> None:
    """A script alone, and through the module, as under srun; a module's name."""
    (tmp_path / "job.py").write_text(
        # One write for the line: the pieces of an unbuffered print may mix with the other rank's.
        "import sys\nimport recompute as rc\nsys.stdout.write(f\"rank {rc.Executor(mesh='dp=2').rank}\\n\")\n"
    )
    python = sys.executable
    for line in (
        [mpiexec(), "-n", "2", python, str(tmp_path / "job.py")],
        [mpiexec(), "-n", "2", python, "-m", "recompute.launch", str(tmp_path / "job.py")],
        [python, "-m", "recompute.launch", "--nproc", "2", "-m", "job"],
        *([[python, "-m", "recompute.launch", "--nproc", "2", "--bind", "-m", "job"]] if cores() > 1 else ()),
    ):
        found = subprocess.run(line, env=environment(tmp_path), capture_output=True, text=True, check=True, timeout=60)
        assert sorted(found.stdout.split()) == ["0", "1", "rank", "rank"], found


FAULTS = {
    "raise": r"rank {r} has raised ZeroDivisionError: integer division",
    "exit": r"rank {r} has ended its program, and rank \d waits for it at AllToAll number 0 on channel 'dp.parts'",
    "code": r"rank {r} has ended with exit code 5",
    "leave": r"rank {r} \(process \d+\) ended with exit code 0, and at once",
    "kill": r"rank {r} \(process \d+\) was killed by SIGKILL",
    "stop": r"has waited for \d s at AllToAll number 0 on channel 'dp.parts' \(operator \d\): rank {r} gives no sign",
}


@needs_mpi
@pytest.mark.parametrize(
    ("what", "n", "rank"),
    [(what, n, rank) for what in FAULTS for n, rank in ((2, 1), (4, 0))],
)
def test_one_rank_takes_all_down(what: str, n: int, rank: int) -> None:
    """Within 5 seconds, and 5 after the deadline for one that is stopped."""
    code, out, end = launched(n, "fault", what, str(rank), deadline=1)
    at = re.search(r"at (\d+\.\d+)", out)
    assert at is not None, out
    assert code != 0 and re.search(FAULTS[what].format(r=rank), out), out
    assert end - float(at[1]) < (6 if what == "stop" else 5), out


@needs_mpi
def test_a_step_that_fails_is_told() -> None:
    code, out, end = launched(2, "caught", "1")
    said = r"rank 1 has ended its program after an error \(.*index.*\), and rank 0 waits for it at AllGather number 0"
    assert code != 0 and re.search(said, out), out
    assert end - float(out.partition("at ")[2].split()[0]) < 5


def test_each_rank_has_its_own_cores(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With --bind: as many cores as there are for each; an error where they are too few."""
    pytest.importorskip("mpi4py")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {1, 3, 4, 6, 7})
    bound: list[list[int]] = []
    monkeypatch.setattr("os.sched_setaffinity", lambda _, found: bound.append(list(found)))
    monkeypatch.setattr("recompute.launch.mpiexec", lambda: "mpiexec")
    line = command(parser().parse_args(["--nproc", "2", "--bind", str(RANKS), "--cores", "9"]))
    assert line[:3] == ["mpiexec", "-n", "2"] and line[-5:-2] == ["--cores", "2", str(RANKS)]
    for rank in "01":
        monkeypatch.setattr(rank_module, "given_rank", lambda rank=rank: rank)
        rank_module._bind(int(line[-4]))
    assert bound == [[1, 3], [4, 6]]
    assert "--cores" not in command(parser().parse_args(["--nproc", "2", str(RANKS)]))
    assert main(["--nproc", "6", "--bind", str(RANKS)]) == 2
    assert "there are 5 cores for 6 processes" in capsys.readouterr().err


def test_launch_says_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--nproc", "0", str(RANKS)]) == 2
    assert main(["--nproc", "2", str(tmp_path / "none.py")]) == 2
    assert main([str(RANKS)]) == 2
    said = capsys.readouterr().err
    assert "give --nproc N" in said and "--nproc must be at least 1" in said and "there is no script" in said


def test_without_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert main(["--nproc", "2", str(RANKS)]) == 1
    assert "no mpiexec" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["--nproc", "2", str(RANKS)]) == 1
    assert "onnx-recompute[mpi]" in capsys.readouterr().err


def test_one_rank_needs_no_mpi() -> None:
    code = """
import sys
sys.modules["mpi4py"] = None
import numpy as np, recompute as rc
executor = rc.Executor(mesh="dp=1")
block = rc.parse('''program p {
  input %x: f32[2]
  communicate %s: f32[2] = AllReduce(%x) {axis="dp", ranks=1, number=0}
  communicate %y: f32[2] = CommWait(%s, %x)
  output %y
}''')
print(executor.rank, executor.mesh, executor.run(rc.Program(block), {"x": np.ones(2, np.float32)}, ["y"]))
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "SLURM"))}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.startswith("0 dp=1 [array([1., 1.]")


def test_without_mpi4py() -> None:
    code = "import sys; sys.modules['mpi4py'] = None; import recompute as rc; rc.Executor(mesh='dp=2')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MissingExtraError: communication between ranks needs the package 'mpi4py'" in found.stderr
