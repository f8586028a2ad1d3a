"""`python -m recompute.runtime.communication.rank [--cores N] [-m] SCRIPT ARGUMENTS...`: a rank of `recompute.launch`.

The script runs in a process of its own, whose parent says how it ended: MPI's launcher ends all ranks at once when one
is killed, and says which process that was, but not which rank.  The watch over all ranks begins before the script
does, so that a rank that fails while others are still starting ends them, too.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

from ...support.children import ends_with
from .started import given_rank


def main(arguments: list[str]) -> int:
    """Runs the script in a child, and waits for it; returns the exit code."""
    if arguments[:1] == ["--cores"]:
        _bind(int(arguments[1]))
        arguments = arguments[2:]
    read, write = os.pipe()
    parent, child = os.getpid(), os.fork()
    if not child:
        ends_with(parent)
        os.close(read)
        _run(arguments, write)
        return 0
    os.close(write)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):  # the child gets them, too
        signal.signal(number, signal.SIG_IGN)
    _, status = os.waitpid(child, 0)
    said = os.read(read, 1)
    code = os.waitstatus_to_exitcode(status)
    if not said:
        rank = given_rank() or "?"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}, and at once"
        _write(f"recompute: rank {rank} (process {child}) {how}; all ranks end\n")
        code = code or 1
    return 128 - code if code < 0 else code


def _bind(each: int) -> None:
    """Leaves this process, and those that it starts, the cores of its rank: `each` of those that all ranks may use."""
    rank = int(given_rank() or 0)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[rank * each : (rank + 1) * each])


def _write(text: str) -> None:
    os.write(2, text.encode())


def _run(arguments: list[str], end: int) -> None:
    """Runs the script as Python would; `end` is written to when its end was announced."""
    from .mpi import watch

    over = watch()
    over.announce = end
    module = arguments[:1] == ["-m"]
    sys.argv = arguments[module:]
    try:
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
        if code:
            over.abort(f"rank {over.rank} has ended with exit code {code}{over.because}", code)
    except BaseException as e:
        at = e.__traceback__
        while at is not None and at.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            at = at.tb_next
        over.raised(type(e), e, at or e.__traceback__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
