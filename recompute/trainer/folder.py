"""The folder of a run: one run at a time, without what killed ones have left."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..errors import JobError, UsageError
from ..support.files import make_folder
from .ranks import Ranks

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

#: the file that a run locks; the system ends the lock with the process
LOCK = ".lock"
_TAG = r"\.[0-9a-f]{8}\.tmp"
#: temporary names of what a run writes to its folder, and of the check whether it can
_LEFT = re.compile(rf"\.(log(\.rank\d+)?\.jsonl|(model|best)\.onnx(\.[0-9a-f]{{8}}\.data)?|[0-9a-f]{{32}}\.tmp){_TAG}")
#: those of checkpoints
UNFINISHED = re.compile(rf"\.step-\d+{_TAG}")


@contextlib.contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Inside, this run alone has the folder, which is made, and cleared of what killed runs have left there.

    UsageError that names the process if another run has it; JobError where it cannot be written.
    """
    try:
        make_folder(folder)
        lock = _locked(folder / LOCK)
        _clear(folder)
    except OSError as e:
        raise JobError(f"cannot write to the folder '{folder}': {e.strerror or e}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink()
        os.close(lock)


@contextlib.contextmanager
def occupied_by(ranks: Ranks, folder: Path | None) -> Iterator[None]:
    """`occupied` by a run of several ranks, of which the first has the lock.  None: no folder."""
    with contextlib.ExitStack() as stack:
        if folder is not None:
            ranks.first("the lock of the folder", lambda: stack.enter_context(occupied(folder)))
        yield


def _locked(path: Path) -> int:
    """The descriptor of the lock's file, locked; it says whose it is."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(lock, 200).decode(errors="replace").strip()
            os.close(lock)
            raise UsageError(
                f"another run writes to the folder '{path.parent}' ({owner or 'it has just begun'}): wait for its end, "
                "or give another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        try:
            if os.path.samestat(os.fstat(lock), os.lstat(path)):
                break
        except FileNotFoundError:  # the run before has ended, and removed it
            pass
        os.close(lock)
    os.truncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {platform.node()}\n".encode())
    return lock


def _clear(folder: Path) -> None:
    """Removes unfinished files and checkpoints; no run is writing them, as this one has the lock."""
    for there, names in ((folder, _LEFT), (folder / "checkpoints", UNFINISHED)):
        for path in there.iterdir() if there.is_dir() else ():
            if not names.fullmatch(path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    path.unlink()
