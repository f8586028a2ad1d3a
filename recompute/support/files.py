"""Files that are there whole or not at all, alone or several together."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import re
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

import numpy as np

try:
    import fcntl
except ImportError:  # Windows has no such locks: what a killed process has left there stays
    fcntl = None  # type: ignore[assignment]

#: most bytes of a file's name
_LONGEST_NAME = 255


def cache_folder() -> Path | None:
    """Where this package keeps what it measured: below XDG_CACHE_HOME or ~/.cache.  None where there is no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "onnx-recompute"
    try:
        return Path.home() / ".cache" / "onnx-recompute"
    except RuntimeError:
        return None


@functools.cache
def machine() -> tuple[str, str]:
    """What measured times depend on (processor, its cores, threads asked for, NumPy), and a short key of it."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = [os.environ.get(f"{name}_NUM_THREADS", "") for name in ("OPENBLAS", "MKL", "OMP")]
    text = f"{model}, {cores} cores{''.join(f', threads {t}' for t in threads if t)}, NumPy {np.__version__}"
    return text, f"{zlib.crc32(text.encode()):08x}"


def is_special(path: Path) -> bool:
    """Whether a device or a pipe is at `path` (/dev/null, /dev/stdout): it is written to, and never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


class _Unfinished:
    """A file under a temporary name.  It is locked while its writer lives, which tells it from what a killed process
    has left."""

    def __init__(self, path: Path) -> None:
        self.given, self.special = path, is_special(path)
        self.path = Path(os.path.realpath(path)) if path.is_symlink() and not self.special else path
        tag = uuid.uuid4().hex[:8]
        self.temporary = Path(tempfile.gettempdir(), f"recompute-{tag}.tmp")
        if not self.special:
            self.temporary = self.path.with_name(f"{_hidden(self.path.name)}.{tag}.tmp")
        self.lock = -1
        _unfinished.add(self)  # before the file is there: an interruption may come at any time
        try:
            with self._said():
                self.mode = self._create()
        except BaseException:
            self.discard()
            raise

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        """Errors of the system name the file that was asked for, not its temporary name."""
        try:
            yield
        except OSError as e:
            if e.errno is None or str(e.filename or self.path) not in map(str, (self.temporary, self.path)):
                raise
            raise OSError(e.errno, e.strerror, str(self.given)) from None

    def _create(self) -> int:
        """Makes the file, empty and readable by nobody else; gives the mode that a new file has here."""
        self.lock = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        mode = os.fstat(self.lock).st_mode & 0o777
        if fcntl is None:
            self._unlock()
            return mode
        os.fchmod(self.lock, 0o600)
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(self.lock, fcntl.LOCK_EX)
        return mode

    def _unlock(self) -> None:
        lock, self.lock = self.lock, -1
        if lock >= 0:
            os.close(lock)

    @contextlib.contextmanager
    def written(self) -> Iterator[None]:
        """The body writes the contents; they go to the disk, and the file gets the mode of the one it replaces."""
        with self._said():
            yield
            self._finish()

    def _finish(self) -> None:
        with open(self.temporary, "rb+") as file:
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            self.mode = self.path.stat().st_mode & 0o777
        os.chmod(self.temporary, self.mode)

    def take_place(self) -> None:
        """The file gets its name; a device or a pipe gets the contents."""
        with self._said():
            if self.special:
                with open(self.temporary, "rb") as source, open(self.path, "wb") as target:
                    shutil.copyfileobj(source, target)
                self.discard()
                return
            os.replace(self.temporary, self.path)
        _unfinished.discard(self)
        self._unlock()
        _remove_abandoned(self.path)

    def discard(self) -> None:
        """Leaves nothing behind."""
        with contextlib.suppress(OSError):
            self.temporary.unlink(missing_ok=True)
        self._unlock()
        _unfinished.discard(self)


class _Action:
    """Something that is done when the files before it are in their places."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.take_place = action

    def discard(self) -> None:
        """It is not done."""


class _NewFolders:
    """Folders that were made for files, and go again with them."""

    def __init__(self, made: list[Path]) -> None:
        self.made = made

    def take_place(self) -> None:
        """They are there already."""

    def discard(self) -> None:
        """Removes them, the innermost first, if nothing else was put there."""
        with contextlib.suppress(OSError):
            while self.made:
                self.made.pop().rmdir()


_unfinished: set[_Unfinished] = set()
#: what waits for the end of `together`
_waiting: ContextVar[list[_Unfinished | _NewFolders | _Action] | None] = ContextVar("waiting", default=None)


def _hidden(name: str) -> str:
    """How the temporary names of a file begin."""
    while len(os.fsencode(name)) > _LONGEST_NAME - len("..00000000.tmp"):
        name = name[:-1]
    return f".{name}"


def _remove_abandoned(path: Path) -> None:
    """Removes temporary files of this name that killed processes have left; those of living ones are locked."""
    pattern = re.compile(re.escape(_hidden(path.name)) + r"(\.[0-9a-f]{8}\.data)?\.[0-9a-f]{8}\.tmp")
    if fcntl is None:
        return
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for other in entries:
            if not pattern.fullmatch(other.name) or not other.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError), open(other.path, "rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(other.path)


def discard_unfinished() -> None:
    """Removes the temporary files of this process: it ends before they are finished."""
    for one in list(_unfinished):
        one.discard()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name in the same folder to write to, which takes `path`'s place at the end.

    Where the body fails, nothing is left behind and what was at `path` stays as it was.  A device or a pipe gets
    the whole contents written to it.  Inside of `together` the file takes its place when all do.
    OSError as the system raises it, about `path`.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    one = _Unfinished(path)
    try:
        with one.written():
            yield one.temporary
        waiting = _waiting.get()
        if waiting is None:
            one.take_place()
        else:
            waiting.append(one)
    except BaseException:
        one.discard()
        raise


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Files that are written inside by `replacing` take their places at the end, all of them; none where it fails."""
    if _waiting.get() is not None:
        yield
        return
    waiting: list[_Unfinished | _NewFolders | _Action] = []
    token = _waiting.set(waiting)
    try:
        yield
        while waiting:
            waiting[0].take_place()
            waiting.pop(0)
    except BaseException:
        for one in reversed(waiting):
            one.discard()
        raise
    finally:
        _waiting.reset(token)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Files that are written inside take their places at once, inside of `together` too: what is read again, or kept
    for later processes."""
    token = _waiting.set(None)
    try:
        yield
    finally:
        _waiting.reset(token)


def afterwards(action: Callable[[], None]) -> None:
    """Does something when the files that wait in `together` are in their places: now, if none wait."""
    waiting = _waiting.get()
    if waiting is None:
        action()
    else:
        waiting.append(_Action(action))


def make_folder(path: Path) -> None:
    """Makes a folder and those above it; inside of `together` they go again where it fails."""
    made: list[Path] = []
    waiting = _waiting.get()
    if waiting is not None:
        waiting.append(_NewFolders(made))
    for folder in (*reversed(path.parents), path):
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            made.append(folder)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


# -- before any work --------------------------------------------------------------------------------------------------


def why_not_writable(path: Path) -> str:
    """Why no file can be written at `path`, found out by making a temporary one; "" where it can."""
    try:
        if path.is_dir():
            return "it is a folder"
        if is_special(path):
            return "" if os.access(path, os.W_OK) else "you may not write to it"
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            return "it is a link that leads to itself"
        if target.exists() and not os.access(target, os.W_OK):
            return "you may not write to it"
        return _why_no_new_file(target, target.parent if path.is_symlink() else path.parent)
    except (OSError, ValueError) as e:  # ValueError: a zero byte in the name
        return getattr(e, "strerror", None) or str(e)


def why_no_folder(path: Path) -> str:
    """Why no files can be written into the folder `path`, which may not be there yet; "" where they can."""
    try:
        there = next(p for p in (path, *path.parents, Path("/")) if os.path.lexists(p))
        if there == path and not path.is_dir():
            return "it is no folder"
        return _why_no_new_file(there / f"{uuid.uuid4().hex}.tmp", there)
    except (OSError, ValueError) as e:
        return getattr(e, "strerror", None) or str(e)


def _why_no_new_file(path: Path, folder: Path) -> str:
    """Why no file can be made at `path`; its folder is called `folder`."""
    if not path.parent.is_dir():
        return f"'{folder}' is no folder" if path.parent.exists() else f"the folder '{folder}' does not exist"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"you may not write to the folder '{folder}'"
    _Unfinished(path).discard()
    return ""
