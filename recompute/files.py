"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


def _mode(path: Path) -> int:
    """The permissions that the file has, or that a new one gets; some writers make theirs readable by nobody else."""
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name in the same folder to write to, which takes `path`'s place at the end.

    Where the body fails, nothing is left behind and what was at `path` stays as it was.  OSError as the
    system raises it.
    """
    path = path.resolve() if path.is_symlink() else path
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, _mode(path))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
