"""How the command ends: its last words, its exit code, signals, and nothing half written.

Handlers of signals are set while the command runs, and by nothing else in this package.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

from ..errors import RecomputeError, printable
from ..support.files import discard_unfinished

_NAME = "recompute-compile"
#: what end a process that says nothing about them, and leave it no time to remove its temporary files
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
#: how libraries put it that there is no memory
_NO_MEMORY = ("allocate memory", "failed to map segment", "can't start new thread", "bad_alloc")
#: a message of a library, at most
_LONGEST = 2000


class Signalled(BaseException):
    """A signal ends the command, as KeyboardInterrupt does."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def say(text: str) -> None:
    """Prints for people on standard output, at once: OSError where nobody takes it."""
    if sys.stdout is not None:
        print(printable(text), flush=True)


def tell(text: str) -> None:
    """Prints on standard error, if that is there."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(printable(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def prepared(args: argparse.Namespace) -> Iterator[None]:
    """Signals end the body with `Signalled`, any text can be printed, warnings are lines; all as before afterwards."""
    _open_streams()
    streams = [s for s in (sys.stdout, sys.stderr) if hasattr(s, "reconfigure")]
    strict = [s.errors for s in streams]
    shown = warnings.showwarning

    def show(message: Warning | str, *_: Any) -> None:
        if not getattr(args, "quiet", False):
            tell(f"warning: {message}")

    warnings.showwarning = show  # type: ignore[assignment]
    for s in streams:
        s.reconfigure(errors="backslashreplace")  # a terminal of another encoding
    try:
        with _signals():
            yield
    finally:
        discard_unfinished()
        warnings.showwarning = shown
        for s, before in zip(streams, strict, strict=True):
            with contextlib.suppress(OSError, ValueError):
                s.reconfigure(errors=before)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Those that would end the process raise; what a caller handles or ignores (nohup) stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if seen:  # it is being ended already, and somebody does not want to wait
            discard_unfinished()
            os._exit(128 + number)
        seen.append(number)
        raise Signalled(number)

    taken = [s for s in _SIGNALS if signal.getsignal(s) is signal.SIG_DFL]
    for s in taken:
        signal.signal(s, end)
    try:
        yield
    finally:
        for s in taken:
            signal.signal(s, signal.SIG_DFL)


def _open_streams() -> None:
    """The number of a closed stream (`>&-`) leads nowhere: else the next file would get it, and be printed into."""
    with contextlib.suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)


def exit_code(error: BaseException, verbose: bool) -> int:
    """Says why the command ends, and gives its exit code."""
    if isinstance(error, (SystemExit, GeneratorExit)):  # argparse has said it
        _silence()
        raise error
    if isinstance(error, (KeyboardInterrupt, Signalled)):
        number = error.number if isinstance(error, Signalled) else signal.SIGINT
        _silence()
        tell(f"{_NAME}: {'interrupted' if number == signal.SIGINT else f'ended by {signal.Signals(number).name}'}")
        return 128 + number
    if isinstance(error, BrokenPipeError) and error.filename is None:  # `| head`
        _silence()
        return 1
    if verbose:
        tell("".join(traceback.format_exception(error)))
    traceback.clear_frames(error.__traceback__)  # what they hold may be what there is no memory for
    tell(f"{_NAME}: error: {_last_words(error)}")
    _silence()
    return error.exit_code if isinstance(error, RecomputeError) else 1


def _last_words(error: BaseException) -> str:
    """One message for what went wrong."""
    if isinstance(error, RecomputeError):
        return str(error)
    no_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if no_memory or isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        return "out of memory on this machine; a smaller --batch takes less"
    if isinstance(error, OSError):  # a full disk, a folder that may not be written to
        where = "" if error.filename is None else f"'{error.filename}': "
        return printable(f"{where}{error.strerror or error}", _LONGEST)
    said = printable(f"{type(error).__name__}: {error}", _LONGEST)
    return f"this is a defect of the compiler ({said}); --verbose shows where"


def flush() -> None:
    """Writes what standard output still holds.  OSError where nobody takes it."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _silence() -> None:
    """Where standard output takes nothing more, nothing more is tried at the end of the process."""
    with contextlib.suppress(OSError, ValueError):
        try:
            flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
