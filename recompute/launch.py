"""`python -m recompute.launch --nproc 4 SCRIPT ARGUMENTS...`: starts a script on several processes of this machine.

It runs `mpiexec` (that of the `mpich` wheel beside this Python, or the one on PATH), with as many threads for each
process as there are cores for it, and ends with its exit code.  Without `--nproc` it is one of the processes that
`mpiexec` or `srun` has started: `srun python -m recompute.launch SCRIPT`.  A script that they start themselves runs,
too (what rank a process is, MPI says); but if one is killed, nobody says which rank it was.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from .errors import MissingExtraError, RecomputeError, UsageError, need_extra
from .runtime.communication.rank import main as rank_of
from .runtime.communication.started import given_rank
from .support.children import ends_with
from .support.threads import cores


def mpiexec() -> str:
    """The launcher.  MissingExtraError where there is none."""
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if path is None:
        raise MissingExtraError(
            "no mpiexec: it is not beside this Python, nor on PATH; pip install 'onnx-recompute[mpi]' brings one, or "
            "load your cluster's MPI"
        )
    return path


def command(arguments: argparse.Namespace) -> list[str]:
    """The command line of mpiexec."""
    target = ["-m", arguments.script] if arguments.module else [arguments.script]
    start = [sys.executable, "-m", "recompute.runtime.communication.rank"]
    bound = ["--cores", str(own_cores(arguments.nproc))] if arguments.bind else []
    return [mpiexec(), "-n", str(arguments.nproc), *start, *bound, *target, *arguments.arguments]


def own_cores(processes: int) -> int:
    """Cores of each process alone.  UsageError where there are not enough, or the system binds no processes."""
    if not hasattr(os, "sched_setaffinity"):
        raise UsageError("--bind: this system cannot bind processes to cores; leave it out")
    if cores() < processes:
        raise UsageError(f"--bind: there are {cores()} cores for {processes} processes; start fewer, or leave it out")
    return cores() // processes


def launch(arguments: argparse.Namespace) -> int:
    """Runs the processes; returns the exit code."""
    if arguments.nproc is None:
        raise UsageError("give --nproc N; without it, this process must be one that mpiexec or srun has started")
    if arguments.nproc < 1:
        raise UsageError(f"--nproc must be at least 1, not {arguments.nproc}")
    if not arguments.module and not Path(arguments.script).is_file():
        raise UsageError(f"there is no script '{arguments.script}'")
    if importlib.util.find_spec("mpi4py") is None:
        raise need_extra("mpi4py", "mpi", "communication between ranks")
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(cores() // arguments.nproc, 1)))
    if arguments.deadline is not None:
        environment["RECOMPUTE_DEADLINE"] = str(arguments.deadline)
    end = functools.partial(ends_with, os.getpid(), signal.SIGTERM)
    with subprocess.Popen(command(arguments), env=environment, preexec_fn=end) as process, _passed_on(process):
        while True:
            try:
                code = process.wait()
                return code if code >= 0 else 128 - code
            except KeyboardInterrupt:
                continue  # the processes got it, too, and end


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Inside, signals that would end this process alone go to the launcher, which ends all ranks."""
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    main = threading.current_thread() is threading.main_thread()
    taken = [n for n in numbers if main and signal.getsignal(n) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, lambda number, _: process.send_signal(number))
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m recompute.launch", description="start a script on several processes, which communicate by MPI"
    )
    result.add_argument("--nproc", type=int, metavar="N", help="how many processes to start")
    result.add_argument(
        "--deadline", type=float, metavar="SECONDS", help="how long a rank waits for one that gives no sign of life"
    )
    result.add_argument(
        "--bind", action="store_true", help="give each process cores of its own, on a machine that runs nothing else"
    )
    result.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    result.add_argument("script", metavar="SCRIPT")
    result.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's arguments")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    try:
        options = parser().parse_args(arguments)
        if options.nproc is None and given_rank():
            return rank_of(["-m"] * options.module + [options.script, *options.arguments])
        return launch(options)
    except RecomputeError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code


if __name__ == "__main__":
    sys.exit(main())
