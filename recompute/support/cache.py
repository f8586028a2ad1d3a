"""A cache of files that is read only if no other user can have written it.

A folder is trusted if it is not a link, belongs to the user of this process, and is not writable by others; it is
checked through a descriptor, so that it cannot be exchanged meanwhile.  Its files begin with a digest under a secret in
the same folder, readable by that user alone: files that were damaged, renamed or copied from elsewhere are not read.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import stat
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

#: systems without file owners, or without opening relative to a descriptor, cache nothing
_POSSIBLE = hasattr(os, "geteuid") and {os.open, os.link, os.rename, os.unlink} <= os.supports_dir_fd
_SECRET, _DIGEST = "secret", 32
#: largest file in bytes, where nobody says another: object code of a kernel
_MOST = 1 << 28
#: folders for which a warning was given
_noted: set[Path] = set()


class KeptFiles:
    """Files of this user in a folder, each complete and unchanged, or absent.  A failed write is not an error."""

    def __init__(self, path: Path, most: int = _MOST) -> None:
        """`most`: bytes of a file; a longer one is not read."""
        self.path, self.most = path, most

    def read(self, name: str) -> bytes | None:
        """The contents stored under the name; None if there are none, or none that can be trusted."""
        with contextlib.suppress(OSError), self._opened() as folder:
            secret = _contents(folder, _SECRET, _DIGEST)
            held = _contents(folder, name, self.most)
            if secret and held and hmac.compare_digest(_digest(secret, name, held[_DIGEST:]), held[:_DIGEST]):
                return held[_DIGEST:]
        return None

    def write(self, name: str, data: bytes) -> None:
        """Stores the contents; a failure is ignored, as the next process then makes them again."""
        with contextlib.suppress(OSError):
            make_private(self.path)
            with self._opened() as folder:
                _put(folder, name, _digest(_secret(folder), name, data) + data)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """The folder's descriptor.  OSError if it does not exist, or cannot be trusted (with a warning)."""
        if not _POSSIBLE:
            raise OSError("no owners of files")
        try:
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            if self.path.is_symlink():
                _note(self.path, "it is a link")
            raise
        try:
            if why := _why_not(os.fstat(folder)):
                _note(self.path, why)
                raise PermissionError(why)
            yield folder
        finally:
            os.close(folder)


def make_private(path: Path) -> None:
    """Creates a folder (and missing parents) that only this user may read or write."""
    if not path.exists():
        make_private(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)


def is_own(path: Path) -> bool:
    """Whether only this user can have written to `path`, a file of the cache, or a folder from which files are
    loaded.  If others can, one warning is given."""
    if not _POSSIBLE:
        return True
    for one in (path.parent, path):
        with contextlib.suppress(FileNotFoundError):
            status = one.lstat()
            why = "it is a link" if stat.S_ISLNK(status.st_mode) else _why_not(status)
            if why:
                _note(one, why)
                return False
    return True


def _why_not(status: os.stat_result) -> str:
    """Why others may have written a folder or a file; "" if they cannot have."""
    if status.st_uid != os.geteuid():
        return "it belongs to another user"
    return "others may write to it ('chmod go-w' mends that)" if status.st_mode & 0o022 else ""


def _note(path: Path, why: str) -> None:
    if path not in _noted:
        _noted.add(path)
        warnings.warn(f"the cache '{path}' is not used: {why}", stacklevel=2)


def _digest(secret: bytes, name: str, data: bytes) -> bytes:
    return hmac.digest(secret, name.encode() + b"\0" + data, "sha256")


def _contents(folder: int, name: str, most: int) -> bytes | None:
    """The bytes of a file in a folder; None if it is not a plain file of this user, or too long."""
    try:
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError:
        return None
    with open(opened, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or _why_not(status) or status.st_size > most:
            return None
        if name == _SECRET and (status.st_mode & 0o077 or status.st_size != _DIGEST):
            return None
        return file.readall()


def _put(folder: int, name: str, data: bytes, *, only_new: bool = False) -> None:
    """Writes a file of the folder atomically; `only_new`: OSError if it exists."""
    temporary = f".{name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        with open(descriptor, "wb") as file:
            file.write(data)
        if only_new:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        else:
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)


def _secret(folder: int) -> bytes:
    """The folder's secret, created if missing.  If several processes create it, all use that of one."""
    if (secret := _contents(folder, _SECRET, _DIGEST)) is not None:
        return secret
    try:
        _put(folder, _SECRET, os.urandom(_DIGEST), only_new=True)
    except FileExistsError:
        if _contents(folder, _SECRET, _DIGEST) is None:  # damaged, or readable by others
            _put(folder, _SECRET, os.urandom(_DIGEST))
    if (secret := _contents(folder, _SECRET, _DIGEST)) is None:
        raise OSError("no secret")
    return secret
