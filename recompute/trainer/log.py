"""The log of a run: one JSON object a line, and TensorBoard's files where they are asked for."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from ..errors import JobError, need_extra
from ..support.files import make_folder

#: lines of steps reach the file after so many seconds, at most, and with any other line
_SECONDS = 0.5


class Log:
    """Appends to DIR/log.jsonl (None: nowhere); each line has `event` ("step", "epoch", ...) and `step`.

    `rank`: of which rank it is, log.rank1.jsonl for rank 1.
    `resumed_at`: the step of the checkpoint that a run goes on from, in epoch `epoch`; later lines are left out.
    """

    def __init__(
        self, folder: Path | None, resumed_at: int | None, tensorboard: bool = False, *, epoch: int = 1, rank: int = 0
    ) -> None:
        self._file: Any = None
        self._flushed = 0.0
        self._board: Any = _board(folder, resumed_at) if tensorboard else None
        if folder is None:
            return
        self._path = path = folder / (f"log.rank{rank}.jsonl" if rank else "log.jsonl")
        try:
            make_folder(folder)
            kept = _until(path, resumed_at, epoch) if resumed_at is not None else b""
            self._file = _begun(path, kept)
        except OSError as e:
            raise JobError(f"cannot write '{path}': {e.strerror or e}") from None

    def write(self, event: str, step: int, **facts: Any) -> None:
        """One line.  JobError where it cannot be written."""
        if self._file is not None:
            try:
                self._file.write(json.dumps({"event": event, "step": step, **facts}) + "\n")
            except OSError as e:
                raise JobError(f"cannot write '{self._path}': {e.strerror or e}") from None
            if event != "step" or time.monotonic() > self._flushed + _SECONDS:
                self.flush()
        if self._board is not None:
            for name, value in flat(facts).items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._board.add_scalar(name, value, step)

    def flush(self) -> None:
        """Writes buffered lines to the file.  JobError if it cannot be written."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as e:
                raise JobError(f"cannot write '{self._path}': {e.strerror or e}") from None
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Closes the files."""
        for file in (self._file, self._board):
            if file is not None:
                file.close()
        self._file = self._board = None


def flat(facts: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with names such as eval.loss."""
    values: dict[str, Any] = {}
    for name, value in facts.items():
        values |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return values


def _until(path: Path, step: int, epoch: int) -> bytes:
    """The lines of a log up to a step, and the results of epochs before `epoch`: what came after is done again."""
    if not path.exists():
        return b""
    if not path.is_file():  # the reading of a pipe would not end
        raise JobError(f"'{path}' is no file: remove it to go on without the log so far")
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            entry = json.loads(line)
            fits = line.endswith(b"\n") and entry["step"] <= step
            fits &= entry["event"] != "epoch" or entry["epoch"] < epoch
        except (ValueError, KeyError, TypeError, RecursionError):
            fits = False
        if fits:
            kept.append(line)
    return b"".join(kept)


def _begun(path: Path, kept: bytes) -> Any:
    """A new file with this beginning, in the place of what is there; open, for more text.  It follows no link."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    file = open(temporary, "x", encoding="utf-8")  # noqa: SIM115  closed by `Log.close`
    try:
        file.buffer.write(kept)
        file.flush()
        temporary.replace(path)
    except BaseException:
        file.close()
        temporary.unlink(missing_ok=True)
        raise
    return file


class _Board:
    """TensorBoard's event file of scalars."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise need_extra("tensorboard", "tensorboard", "writing its event files") from None
        self._event, self._summary, self._writer = Event, Summary, EventFileWriter(os.fspath(folder))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        summary = self._summary(value=[self._summary.Value(tag=name.replace(".", "/"), simple_value=float(value))])
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()


def _board(folder: Path | None, resumed_at: int | None) -> _Board:
    place = (folder or Path()) / "tensorboard"
    return _Board(place if resumed_at is None else place / f"from-step-{resumed_at}")
