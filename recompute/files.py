"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import platform
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np


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


def _mode(path: Path) -> int:
    """The permissions that the file has, or that a new one gets; some writers make theirs readable by nobody else."""
    try:
        return path.stat().st_mode & 0o777
    except OSError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask


def is_special(path: Path) -> bool:
    """Whether a device or a pipe is at `path` (/dev/null, /dev/stdout): it is written to, and never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name in the same folder to write to, which takes `path`'s place at the end.

    Where the body fails, nothing is left behind and what was at `path` stays as it was.  A device or a pipe gets
    the whole contents written to it.  OSError as the system raises it.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if is_special(path):
        with tempfile.TemporaryDirectory(prefix="recompute-") as folder:
            yield Path(folder, "whole")
            with open(Path(folder, "whole"), "rb") as source, open(path, "wb") as target:
                shutil.copyfileobj(source, target)
        return
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
