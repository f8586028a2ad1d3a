"""Processes that this package starts end with the one that started them, however that ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

#: prctl's request for a signal when the parent ends (Linux)
_PDEATHSIG = 1


def ends_with(parent: int, number: int = signal.SIGKILL) -> None:
    """This process gets the signal `number` when the process `parent`, its parent, ends; at once if it has ended.

    Only Linux has such a request; elsewhere nothing happens.  For a process that was just forked.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def as_worker(parent: int) -> None:
    """For a forked copy that only computes: signals end it at once, whatever handlers its parent has installed, and
    so does the end of its parent.  Ctrl-C, which a terminal sends to both, is left to the parent."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ends_with(parent)
