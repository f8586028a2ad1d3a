"""The beginning of MPI, which waits for all processes in calls that this process cannot end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import warnings
from collections.abc import Iterator
from typing import Any

from ...support.children import as_worker
from .started import given_deadline, given_rank, started_together

#: seconds after which the wait is told, where no deadline is given, and after how many of them it ends
DEADLINE, BUSY = 60.0, 10


@contextlib.contextmanager
def bounded_beginning() -> Iterator[None]:
    """Inside, the wait for processes that never begin MPI ends this one, and so all, after ten deadlines.

    MPI's beginning holds Python's lock: so a copy of this process looks at the clock.
    """
    if started_together() == 1 or not hasattr(os, "fork"):
        yield
        return
    limit = given_deadline() or DEADLINE
    parent, (read, write) = os.getpid(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the copy runs a few calls, whatever threads there are
        child = os.fork()
    if not child:
        try:
            os.close(write)
            as_worker(parent)
            _look(read, limit, parent)
        finally:
            os._exit(0)
    os.close(read)
    handlers = _without_handlers()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(write)
        os.waitpid(child, 0)


def _without_handlers() -> dict[int, Any]:
    """Has signals end this process at once, as Python's handlers run only when MPI has begun; gives those handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    taken: dict[int, Any] = {n: handler for n, handler in handlers.items() if callable(handler)}
    for number in taken:
        signal.signal(number, signal.SIG_DFL)
    return taken


def _look(read: int, limit: float, parent: int) -> None:
    """Waits until the other end of `read` is closed; says when this takes long, and ends the parent after that."""
    for seconds in (limit, (BUSY - 1) * limit):
        if select.select([read], [], [], seconds)[0]:
            return
        if seconds == limit:
            _say(f"has waited for {limit:.0f} s for all processes to begin: one of them has ended, computes before it "
                 f"uses ranks, or has no mesh; all end after {BUSY * limit:.0f} s")  # fmt: skip
    _say(f"has waited for {BUSY * limit:.0f} s for all processes to begin; all ranks end")
    os.kill(parent, signal.SIGKILL)


def _say(what: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"recompute: rank {given_rank()} {what}\n".encode())
