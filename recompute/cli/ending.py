"""How the command ends: error message, exit code, signals, and removal of unfinished files.

Signal handlers are installed only while the command runs, and nowhere else in this package.
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

#: signals that end a process by default and leave it no time to remove its temporary files
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
#: phrases of libraries' messages that mean that memory ran out
_NO_MEMORY = ("allocate memory", "failed to map segment", "can't start new thread", "bad_alloc")
#: longest library message that is printed, in characters
_LONGEST = 2000


class Signalled(BaseException):
    """A signal ends the command, as KeyboardInterrupt does."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def say(text: str) -> None:
    """Prints a line to standard output and flushes it.  OSError if standard output cannot be written."""
    if sys.stdout is not None:
        print(printable(text), flush=True)


def tell(text: str) -> None:
    """Prints a line to standard error, if it is open."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(printable(text), file=sys.stderr, flush=True)


@contextlib.contextmanager
def prepared(args: argparse.Namespace) -> Iterator[None]:
    """Inside: signals raise `Signalled`, any text can be printed, warnings are one line.  Restored afterwards."""
    _open_streams()
    streams = [s for s in (sys.stdout, sys.stderr) if hasattr(s, "reconfigure")]
    strict = [s.errors for s in streams]
    shown = warnings.showwarning

    told: set[str] = set()

    def show(message: Warning | str, *_: Any) -> None:
        if not getattr(args, "quiet", False) and str(message) not in told:  # a model may be loaded twice
            told.add(str(message))
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
    """Signals that would end the process raise instead; those that a caller handles or ignores (nohup) stay as set."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if seen:  # second signal while the first one is handled: end at once
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
    """Opens closed standard streams (`>&-`) on the null device; else the next file would get their descriptors."""
    with contextlib.suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)


def exit_code(error: BaseException, verbose: bool, command: str = "recompute-compile") -> int:
    """Prints why the command ends, and returns its exit code."""
    if isinstance(error, (SystemExit, GeneratorExit)):  # argparse has printed its message
        _silence()
        raise error
    if isinstance(error, (KeyboardInterrupt, Signalled)):
        number = error.number if isinstance(error, Signalled) else signal.SIGINT
        _silence()
        tell(f"{command}: {'interrupted' if number == signal.SIGINT else f'ended by {signal.Signals(number).name}'}")
        return 128 + number
    if isinstance(error, BrokenPipeError) and error.filename is None:  # `| head`
        _silence()
        return 1
    if verbose:
        tell("".join(traceback.format_exception(error)))
    traceback.clear_frames(error.__traceback__)  # frees what the frames hold, in case memory ran out
    tell(f"{command}: error: {_last_words(error)}")
    _silence()
    return error.exit_code if isinstance(error, RecomputeError) else 1


def _last_words(error: BaseException) -> str:
    if isinstance(error, RecomputeError):
        return str(error)
    no_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if no_memory or isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        return "out of memory on this machine: choose a smaller --batch, or recompute more (--memory-budget)"
    if isinstance(error, OSError):  # a full disk, a folder without write permission
        where = "" if error.filename is None else f"'{error.filename}': "
        return printable(f"{where}{error.strerror or error}", _LONGEST)
    said = printable(f"{type(error).__name__}: {error}", _LONGEST)
    return f"this is a bug in the compiler ({said}); --verbose shows where"


def flush() -> None:
    """Flushes standard output.  OSError if it cannot be written."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _silence() -> None:
    """If standard output is closed, redirects it to the null device, so that the exit of the process does not fail."""
    with contextlib.suppress(OSError, ValueError):
        try:
            flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
