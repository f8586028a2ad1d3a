"""Host memory of CPU sessions in files: parameters, state and offloaded values, and the threads that copy them."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np

from ...errors import JobError, UsageError
from ...language.ir import Value
from ...language.types import Array
from ...ops.memory import offload as ops
from ...support.memory import Contents, in_parts, is_stored

#: alignment of values in files: a page
_PAGE = 4096


class Stored(np.memmap):
    """The newest contents of a parameter or of state, in a file that steps read and write; models refer to them.

    `at`: where they begin there.  Copies, views and results of arithmetic have the class, too, but no `contents`.
    """

    file: IO[bytes]
    at: int
    contents: Contents


def move_to_disk(folder: str, arrays: dict[str, np.ndarray], values: list[Value]) -> None:
    """Puts these arrays of a program into a file of a folder, which is gone when nothing refers to them any more.

    Those that are in a file already stay there.  UsageError where the folder has no room for them.
    """
    wanted = [v for v in values if not is_stored(dict.__getitem__(arrays, v.name))]
    if not wanted:
        return
    offsets = np.cumsum([0, *(-(-v.nbytes // _PAGE) * _PAGE for v in wanted)]).tolist()
    file = _file(folder, offsets[-1])
    whole = np.memmap(file, np.uint8, "r+")  # one mapping: each has a file descriptor
    for v, at in zip(wanted, offsets, strict=False):
        array = dict.__getitem__(arrays, v.name)
        done = at
        for part in in_parts(array):
            if part.view(np.uint8).any():  # else the file has these zeros already
                _write(file.fileno(), part, done)
            done += part.nbytes
        mapped = whole[at : at + v.nbytes].view(array.dtype).reshape(array.shape)
        there = mapped.view(Stored)
        there.file, there.at, there.contents = file, at, Contents(mapped, v.name, stays=True)
        dict.__setitem__(arrays, v.name, there)
        del array


def _file(folder: str, nbytes: int) -> IO[bytes]:
    """A file of zeros without a name.  UsageError where it cannot be."""
    try:
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it is open as long as a session
        os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))
    except OSError as e:
        what = f"{nbytes:,} bytes of parameters, state and values"
        raise UsageError(f"disk '{folder}': no room for {what}: {e.strerror}") from None
    return file


def _bytes(array: Array) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))


def _write(file: int, array: Array, at: int) -> None:
    left = _bytes(array)
    while len(left):
        n = os.pwrite(file, left, at)
        left, at = left[n:], at + n


def _read(file: int, array: Array, at: int) -> None:
    left = _bytes(array)
    while len(left):
        n = os.preadv(file, [left], at)
        if not n:
            raise JobError("the file of parameters and state ends early: another process has cut it")
        left, at = left[n:], at + n


@dataclass
class Disk:
    """The file of one session's offloaded values, and two threads: one reads, one writes, each in the order asked.

    `read`, `written`: bytes so far; `waited`: seconds for which the steps have waited for copies.
    """

    folder: str
    nbytes: int
    read: int = 0
    written: int = 0
    waited: float = 0.0
    flying: dict[str, Future[None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.file = _file(self.folder, self.nbytes)
        self.reader = ThreadPoolExecutor(1, "recompute-read")
        self.writer = ThreadPoolExecutor(1, "recompute-write")

    def place(self, v: Value, arrays: Mapping[str, Any], address: int | None) -> tuple[int, int]:
        """File descriptor and offset of a value in host memory."""
        if address is not None:
            return self.file.fileno(), address
        array = arrays[v.name]
        return array.file.fileno(), array.at

    def begin(self, op: ops.Copy, name: str, device: Array, place: tuple[int, int]) -> None:
        """Begins to copy a buffer to the place in a file, or from there; `name`: of the value that it writes."""
        if isinstance(op, ops.Prefetch):
            self.read += device.nbytes
            self.flying[name] = self.reader.submit(_read, place[0], device, place[1])
        else:
            self.written += device.nbytes
            self.flying[name] = self.writer.submit(_write, place[0], device, place[1])

    def wait(self, name: str) -> None:
        """Waits for the copy that writes a value.  JobError where it failed."""
        start = time.perf_counter()
        try:
            self.flying[name].result()
            del self.flying[name]  # not before: an interrupt may come while it waits
        except OSError as e:
            raise JobError(f"disk '{self.folder}': '{name}' was not copied: {e.strerror}") from e
        finally:
            self.waited += time.perf_counter() - start

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Waits for the copies of a step that fails inside: the next step writes into the same buffers."""
        if self.flying:  # a second interrupt has ended the wait
            self._settle()
        try:
            yield
        except BaseException:
            self._settle()
            raise

    def _settle(self) -> None:
        for thread in self.reader, self.writer:  # each copies in the order asked, also what is not noted yet
            thread.submit(int).result()
        self.flying.clear()
