"""`LoadedStep`: a step's library in this process, from the one file that `packed` (write.py) makes of it."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import tempfile
import threading
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  # NumPy knows bfloat16 by its name from then on
import numpy as np

from ...boundary import as_path
from ...errors import JobError, ModelError, NotFiniteError, OutOfMemoryError, UsageError, nearest

_BAD_DATA, _BAD_FILE = 1, 2
#: where a step's memory begins: at a multiple of so many bytes (nothing is imported here that takes time)
_ALIGNMENT = 64


class LoadedStep:
    """A compiled training step: one piece of memory, and machine code that works on it with one thread.

    `values` are parameters, buffers and state, arrays in that memory, which may be read and set between steps;
    `learning_rate` is one of them where it does not follow a schedule.  One thread uses it at a time.
    """

    def __init__(self, file: bytes) -> None:
        """`file`: what `packed` made, and nobody else: its code runs here."""
        (size,) = struct.unpack_from("<Q", file)
        head = json.loads(file[8 : 8 + size])
        self.loss, self.model = str(head["loss"]), str(head["model"])
        code = 8 + size + head["library"]
        self._c = _library(file[8 + size : code])
        self.peak_bytes = int(self._c.step_memory())
        try:
            self._room = np.zeros(self.peak_bytes + _ALIGNMENT, np.uint8)
        except MemoryError:
            raise OutOfMemoryError(f"this machine cannot allocate the step's {self.peak_bytes:,} bytes") from None
        self._memory = ctypes.c_void_p(self._room.ctypes.data + -self._room.ctypes.data % _ALIGNMENT)
        self._lock = threading.Lock()
        weights = np.frombuffer(file, np.uint8)[code:]
        given = ctypes.c_void_p(weights.ctypes.data), ctypes.c_size_t(len(weights))
        self._done(self._c.step_load(self._memory, *given))
        self._inputs, self._outputs = self._arrays(head, "input"), self._arrays(head, "output")
        self._tested, self._scores = self._arrays(head, "evaluation_input"), self._arrays(head, "evaluation_output")
        self.values: Mapping[str, np.ndarray] = self._arrays(head, "value")

    def __repr__(self) -> str:
        return f"<LoadedStep {self.model}: peak {self.peak_bytes:,} bytes>"

    @property
    def inputs(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Element types and shapes of what `run` takes."""
        return {n: (a.dtype, a.shape) for n, a in self._inputs.items()}

    def run(self, feed: Mapping[str, np.ndarray]) -> float:
        """One training step; its loss.

        UsageError for inputs of other names, shapes or element types, JobError for data that a kernel cannot use, such
        as a label that is no class: then no weight has changed.
        """
        with self._lock:
            _fill(self._inputs, feed)
            self._done(self._c.step_run(self._memory))
            return float(self._outputs[self.loss].reshape(()))

    def evaluate(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The loss and the model's outputs in inference mode, copies; errors as in `run`."""
        with self._lock:
            _fill(self._tested, feed)
            self._done(self._c.step_evaluate(self._memory))
            return {n: a.copy() for n, a in self._scores.items()}

    def save(self, path: str | PathLike[str]) -> None:
        """Writes parameters, buffers and state as safetensors.  ModelError where the file cannot be written."""
        with self._lock:
            self._done(self._c.step_save(self._memory, _file(path)))

    def load(self, path: str | PathLike[str]) -> None:
        """Reads them.  ModelError, with nothing changed, for a file that is another step's, or damaged."""
        with self._lock:
            self._done(self._c.step_init(self._memory, _file(path)))

    def _arrays(self, head: Mapping[str, Any], kind: str) -> dict[str, np.ndarray]:
        """Arrays in the step's memory, by name."""
        find = getattr(self._c, f"step_{kind}")
        found = {}
        for name, (dtype, shape) in head[f"{kind}s"].items():
            at = find(self._memory, name.encode()) - self._room.ctypes.data
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            found[name] = self._room[at : at + size].view(dtype).reshape(shape)
        return found

    def _done(self, code: int) -> None:
        """An error for a code other than 0."""
        if code == 0:
            return
        said = self._c.step_error().decode(errors="replace")
        if code == _BAD_FILE:
            raise ModelError(said)
        raise (NotFiniteError if code == _BAD_DATA and said.startswith("the loss is ") else JobError)(said)


def _library(code: bytes) -> Any:
    """The functions of a shared library.  JobError where the system does not load it."""
    try:
        with tempfile.TemporaryDirectory() as folder:  # of a name that no other library here ever had
            path = Path(folder) / "libstep.so"
            path.write_bytes(code)
            c = ctypes.CDLL(str(path))
    except OSError as e:
        raise JobError(f"cannot load a step's library: {e}") from None
    c.step_memory.restype = ctypes.c_size_t
    c.step_error.restype = ctypes.c_char_p
    for name in ("input", "output", "value", "evaluation_input", "evaluation_output"):
        getattr(c, f"step_{name}").restype = ctypes.c_void_p
    return c


def _file(path: str | PathLike[str]) -> bytes:
    """A path as C takes it.  ModelError for one that would end too early there."""
    name = os.fsencode(as_path(path))
    if b"\0" in name:
        raise ModelError(f"a file's name has no zero byte in it: {os.fspath(path)!r}")
    return name


def _fill(inputs: Mapping[str, np.ndarray], feed: Mapping[str, np.ndarray]) -> None:
    """Copies what is fed; nothing is copied where something does not fit."""
    for name in (*feed, *inputs):
        if name not in inputs:
            raise UsageError(f"the step has no input '{name}'{nearest(name, inputs)}; inputs: {', '.join(inputs)}")
        if name not in feed:
            raise UsageError(f"input '{name}' is not fed")
    found = {n: np.asarray(feed[n]) for n in inputs}
    for name, into in inputs.items():
        if (found[name].shape, found[name].dtype) != (into.shape, into.dtype):
            raise UsageError(
                f"input '{name}' is {found[name].dtype}{list(found[name].shape)}, and the step, which is for one "
                f"batch, takes {into.dtype}{list(into.shape)}"
            )
    for name, into in inputs.items():
        into[...] = found[name]


__all__ = ["LoadedStep"]
