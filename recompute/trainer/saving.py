"""Checkpoints of a training run: folders that are complete, or not there.

DIR/checkpoints/step-000000120/ holds `state.safetensors` (parameters, buffers, optimizer state, the counters of random
operators; of frozen weights that are the model file's a digest each) and `trainer.json` (position in the data, results
so far, versions, the size and hash of the state, and a hash of all this).  It is written under another name, flushed to
the disk and renamed, so that a run that is killed leaves either all of it or nothing that counts.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from platform import python_version
from typing import Any

import numpy as np

from ..boundary import as_path
from ..errors import JobError, ModelError, UsageError
from ..language.program import Program
from ..support.files import make_folder, regular, why_no_folder
from ..training.state import load_state, save_state
from ..version import __version__
from .ranks import ONE, Ranks
from .whole import write_state

#: the value of the field `format` of trainer.json
FORMAT = "recompute-checkpoint-1"
_STATE, _POSITION = "state.safetensors", "trainer.json"
_NAME = re.compile(r"step-(\d{9,})")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, the number of steps before it, and the contents of trainer.json."""

    folder: Path
    step: int
    position: dict[str, Any]


class Saving:
    """Where and when a run is saved: in a folder, after each epoch, and every `steps` steps.

    The last `keep` checkpoints stay, and that of the best epoch.  `tensorboard`: TensorBoard's event files are written,
    too (extra).  `log_ranks`: each rank of a mesh writes a log, log.rank1.jsonl and so on; else rank 0 alone does.
    All ranks must see the folder.  UsageError where nothing can be written to the folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        steps: int | None = None,
        keep: int = 2,
        tensorboard: bool = False,
        log_ranks: bool = False,
    ) -> None:
        for name, value in (("steps", steps), ("keep", keep)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
        self.folder = as_path(folder, "folder")
        self.steps, self.tensorboard, self.log_ranks = steps, tensorboard, log_ranks
        self.checkpoints = Checkpoints(self.folder, keep)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is written after a step within an epoch."""
        return self.steps is not None and step % self.steps == 0


class Checkpoints:
    """The checkpoints below a folder; the last `keep` of them stay, and those that are asked for by step.

    UsageError where nothing can be written there.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.root, self.keep = folder / "checkpoints", keep
        #: messages about checkpoints that were found damaged
        self.damaged: list[str] = []
        why = why_no_folder(self.root)
        if why:
            raise UsageError(f"checkpoints cannot be written to '{folder}': {why}")

    def save(
        self, program: Program, step: int, position: dict[str, Any], also: Collection[int] = (), ranks: Ranks = ONE
    ) -> Path:
        """Writes a checkpoint, and removes older ones but the last `keep` and those of the steps `also`.

        All ranks call it: there is one checkpoint of them, the same as that of one process.
        JobError if the disk is full or the folder cannot be written: older checkpoints are left as they are.
        """
        final = self.root / f"step-{step:09d}"

        def begin() -> Path | None:
            if self.at(step) is not None:  # written before the run was resumed: the same bits
                return None
            part = self.root / f".step-{step:09d}.{uuid.uuid4().hex[:8]}.tmp"
            make_folder(self.root)
            part.mkdir()
            return part

        part: Path | None = None
        try:
            part = ranks.first("a new checkpoint", begin)
            if part is None:
                return final
            if ranks.size == 1:
                save_state(program, part / _STATE, whole=False)
            else:
                write_state(program, part / _STATE, ranks)
            ranks.first("the end of a checkpoint", functools.partial(self._complete, part, final, step, position))
        except (OSError, ModelError) as e:
            if ranks.leads and part is not None:
                shutil.rmtree(part, ignore_errors=True)
            raise JobError(f"cannot write the checkpoint '{final}': {getattr(e, 'strerror', None) or e}") from None
        if ranks.leads:
            self._remove_old({*also, step})
        return final

    def _complete(self, part: Path, final: Path, step: int, position: dict[str, Any]) -> None:
        """Writes the position beside the state, waits until both are on the disk, and gives the folder its name."""
        content = {
            "format": FORMAT, "step": step, **position,
            "state": {"bytes": (part / _STATE).stat().st_size, "sha256": _file_hash(part / _STATE)},
            "versions": {"onnx-recompute": __version__, "numpy": np.__version__, "python": python_version()},
        }  # fmt: skip
        content["sha256"] = digest_of(json.loads(json.dumps(content)))
        (part / _POSITION).write_text(json.dumps(content, indent=1) + "\n")
        for name in (_STATE, _POSITION):
            _flush(part / name)
        _flush(part)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one
        part.rename(final)
        _flush(self.root)

    def newest(self) -> Checkpoint | None:
        """The newest complete checkpoint; damaged ones are passed over, and named in `damaged`.  None without any.

        JobError where there are checkpoints, but none that is complete.
        """
        self.damaged = []
        for step, folder in sorted(self._there().items(), reverse=True):
            why, position = _read(folder)
            if not why:
                return Checkpoint(folder, step, position)
            self.damaged.append(f"'{folder}' is not complete ({why})")
        if self.damaged:
            raise JobError("there is no complete checkpoint: " + "; ".join(self.damaged))
        return None

    def at(self, step: int) -> Checkpoint | None:
        """The checkpoint after so many steps, if it is there and complete."""
        folder = self._there().get(step)
        why, position = ("", {}) if folder is None else _read(folder)
        return None if folder is None or why else Checkpoint(folder, step, position)

    def _there(self) -> dict[int, Path]:
        if not self.root.is_dir():
            return {}
        names = ((_NAME.fullmatch(p.name), p) for p in self.root.iterdir())
        return {int(m[1]): p for m, p in names if m and p.is_dir()}

    def _remove_old(self, kept: set[int]) -> None:
        there = self._there()
        kept |= set(sorted(there)[-self.keep :])
        old = [p for step, p in there.items() if step not in kept]
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)


def load(program: Program, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint's parameters, buffers and state into the program.

    UsageError where they do not fit, or frozen weights are not those of the run.
    """
    load_state(program, checkpoint.folder / _STATE)


def _read(folder: Path) -> tuple[str, dict[str, Any]]:
    """Why a checkpoint is not complete ("" if it is), and the contents of trainer.json."""
    try:
        position = json.loads(regular(folder / _POSITION).read_text())
        if not isinstance(position, dict) or position.get("format") != FORMAT:
            return f"{_POSITION} is of another format", {}
        state, file = position["state"], regular(folder / _STATE)
        if file.stat().st_size != state["bytes"]:
            return f"{_STATE} has {file.stat().st_size:,} bytes, not {state['bytes']:,}", {}
        if _file_hash(file) != state["sha256"]:
            return f"{_STATE} has other contents than were written", {}
    except OSError as e:
        return f"{Path(e.filename or folder).name}: {e.strerror}", {}
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        return f"{_POSITION} cannot be read: {e}", {}
    return "", position


def digest_of(position: dict[str, Any]) -> str:
    """The hash of all that trainer.json says besides this hash."""
    rest = {name: value for name, value in position.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
