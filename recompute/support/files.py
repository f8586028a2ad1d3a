"""Atomic file writes, of one file or of several together."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import re
import shutil
import stat
import tempfile
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

import numpy as np

from .threads import cores

try:
    import fcntl
except ImportError:  # Windows has no such locks: temporary files of killed processes stay there
    fcntl = None  # type: ignore[assignment]

#: longest file name in bytes
_LONGEST_NAME = 255


def cache_folder() -> Path | None:
    """The folder for measurements and compiled kernels, below XDG_CACHE_HOME or ~/.cache.  None without a home."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(folder):
        return Path(folder) / "onnx-recompute"
    try:
        return Path.home() / ".cache" / "onnx-recompute"
    except RuntimeError:
        return None


@functools.cache
def machine() -> tuple[str, str]:
    """Properties on which measured times depend (processor, cores, thread settings, NumPy), and a short key of them."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    threads = [os.environ.get(f"{name}_NUM_THREADS", "") for name in ("OPENBLAS", "MKL", "OMP")]
    text = f"{model}, {cores()} cores{''.join(f', threads {t}' for t in threads if t)}, NumPy {np.__version__}"
    return text, f"{zlib.crc32(text.encode()):08x}"


def is_special(path: Path) -> bool:
    """Whether `path` is a device or a pipe (/dev/null, /dev/stdout), which is written to and never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def regular(path: str | os.PathLike[str]) -> Path:
    """The path of a file to read; OSError for a pipe, a device or a socket, where reading might wait for ever."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a folder says what it is
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise OSError(errno.EINVAL, f"it is {kind}, not a file: copy what it gives to a file", str(path))
    return Path(path)


class _Unfinished:
    """A file under a temporary name.  It is locked while its writer runs, which distinguishes it from files left by
    killed processes."""

    def __init__(self, path: Path) -> None:
        self.given, self.special = path, is_special(path)
        self.path = Path(os.path.realpath(path)) if path.is_symlink() and not self.special else path
        tag = uuid.uuid4().hex[:8]
        self.temporary = Path(tempfile.gettempdir(), f"recompute-{tag}.tmp")
        if not self.special:
            self.temporary = self.path.with_name(f"{_hidden(self.path.name)}.{tag}.tmp")
        self.lock = -1
        _unfinished.add(self)  # before the file exists, as an interrupt may come at any time
        try:
            with self._said():
                self.mode = self._create()
        except BaseException:
            self.discard()
            raise

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        """Makes system errors name the requested file, not its temporary name."""
        try:
            yield
        except OSError as e:
            if e.errno is None or str(e.filename or self.path) not in map(str, (self.temporary, self.path)):
                raise
            raise OSError(e.errno, e.strerror, str(self.given)) from None

    def _create(self) -> int:
        """Creates the file, empty and readable by this user only; returns the mode of new files."""
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
        """The body writes the contents; then they are synced, and the file gets the mode of the one it replaces."""
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
        """Renames the file to its final name; copies the contents if that is a device or a pipe."""
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
        """Removes the temporary file."""
        with contextlib.suppress(OSError):
            self.temporary.unlink(missing_ok=True)
        self._unlock()
        _unfinished.discard(self)


_unfinished: set[_Unfinished] = set()
#: functions to call at the end of `together`, each with one to call instead if it fails
_Waiting = list[tuple[Callable[[], object], Callable[[], object]]]
_waiting: ContextVar[_Waiting | None] = ContextVar("waiting", default=None)


def _hidden(name: str) -> str:
    """The prefix of the temporary names of a file."""
    while len(os.fsencode(name)) > _LONGEST_NAME - len("..00000000.tmp"):
        name = name[:-1]
    return f".{name}"


def _remove_abandoned(path: Path) -> None:
    """Removes temporary files of this name left by killed processes; those of running ones are locked."""
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
    """Removes the temporary files of this process, when it ends before they are finished."""
    for one in list(_unfinished):
        one.discard()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name in the same folder to write to, which is renamed to `path` at the end.

    If the body fails, the temporary file is removed and `path` is unchanged.  If `path` is a device or a pipe, the
    contents are copied to it.  Inside `together`, all files are renamed together.  OSError of the system, about `path`.
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
            waiting.append((one.take_place, one.discard))
    except BaseException:
        one.discard()
        raise


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Files written inside by `replacing` get their final names together at the end; none if the body fails."""
    if _waiting.get() is not None:
        yield
        return
    waiting: _Waiting = []
    token = _waiting.set(waiting)
    try:
        yield
        while waiting:
            waiting[0][0]()
            waiting.pop(0)
    except BaseException:
        for _, undo in reversed(waiting):
            undo()
        raise
    finally:
        _waiting.reset(token)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Files written inside get their final names at once, even inside `together`: files that are read by this process,
    or kept for later ones."""
    token = _waiting.set(None)
    try:
        yield
    finally:
        _waiting.reset(token)


def afterwards(action: Callable[[], None]) -> None:
    """Does an action when the files of `together` have their final names; now, if there are none."""
    waiting = _waiting.get()
    if waiting is None:
        action()
    else:
        waiting.append((action, lambda: None))


def make_folder(path: Path) -> None:
    """Creates a folder and missing parents; inside `together` they are removed if it fails."""
    folders: list[Path] = []
    waiting = _waiting.get()
    if waiting is not None:
        waiting.append((lambda: None, lambda: _remove_empty(folders)))
    for folder in (*reversed(path.parents), path):
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            folders.append(folder)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):
        while folders:
            folders.pop().rmdir()


# -- before any work --------------------------------------------------------------------------------------------------


def why_not_writable(path: Path) -> str:
    """Why no file can be written at `path`, checked by creating a temporary one; "" if it can."""
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
    """Why no files can be written to the folder `path`, which may not exist yet; "" if they can."""
    try:
        there = next(p for p in (path, *path.parents, Path("/")) if os.path.lexists(p))
        if there == path and not path.is_dir():
            return "it is not a folder"
        return _why_no_new_file(there / f"{uuid.uuid4().hex}.tmp", there)
    except (OSError, ValueError) as e:
        return getattr(e, "strerror", None) or str(e)


def _why_no_new_file(path: Path, folder: Path) -> str:
    """Why no file can be created at `path`; messages call its folder `folder`."""
    if not path.parent.is_dir():
        return f"'{folder}' is not a folder" if path.parent.exists() else f"the folder '{folder}' does not exist"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"you may not write to the folder '{folder}'"
    _Unfinished(path).discard()
    return ""
