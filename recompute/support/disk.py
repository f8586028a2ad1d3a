"""Rates of disks."""

from __future__ import annotations

import functools
import os
import random
import tempfile
import time

#: bytes of the file with which a disk is measured, and how many are written at a time
_FILE, _PART = 1 << 26, 1 << 23


@functools.cache
def disk_rates(folder: str) -> tuple[float, float]:
    """Bytes a second that a folder's disk writes, and reads; measured once in a process.  OSError where it is full."""
    part = random.Random(0).randbytes(_PART)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(_FILE // _PART):
            file.write(part)
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        while file.read(_PART):
            pass
        return _FILE / (written - start), _FILE / (time.perf_counter() - written)
