"""CIFAR-10's binary files: records of a label and 3 × 32 × 32 bytes.  Nothing is unpickled."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import ModelError, UsageError, nearest
from ..support.files import regular
from .arrays import Arrays, Rows

_PIXELS = 3 * 32 * 32
_RECORD = 1 + _PIXELS
_CLASSES = 10


def is_cifar(folder: Path) -> bool:
    """Whether a folder has files of CIFAR-10's binary version."""
    return any(folder.glob("data_batch_*.bin")) or (folder / "test_batch.bin").exists()


def cifar10(path: str | Path, train: bool = True, sha256: Mapping[str, str] | None = None) -> Arrays:
    """The images (`image`: uint8[3,32,32]) and labels (`label`: int64) of a folder of binary files, or of one file.

    `train`: those of `data_batch_*.bin`, else those of `test_batch.bin`.  `sha256`: file name → the digest that its
    contents must have.  ModelError for a file that is missing or damaged.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("data_batch_*.bin")) if train else [path / "test_batch.bin"]
        if not files:
            raise ModelError(f"the folder '{path}' has no file data_batch_1.bin: it is not CIFAR-10's binary version")
    else:
        files = [path]
    for name in sha256 or {}:
        if name not in [f.name for f in files]:
            raise UsageError(f"sha256= names '{name}', which is not read{nearest(name, [f.name for f in files])}")
    records = np.concatenate([_records(f, (sha256 or {}).get(f.name)) for f in files])
    images = records[:, 1:].reshape(-1, 3, 32, 32)
    labels = records[:, 0].astype(np.int64)
    return Arrays({"image": Rows.of(images), "label": Rows.of(labels)}, f"'{path}'")


def _records(path: Path, digest: str | None) -> np.ndarray:
    """The records of a file, checked."""
    try:
        content = regular(path).read_bytes()
    except OSError as e:
        raise ModelError(f"cannot read the data file '{path}': {e.strerror or e}") from None
    if not content or len(content) % _RECORD:
        raise ModelError(
            f"cannot read the data file '{path}': it has {len(content):,} bytes, which are not whole records "
            f"of {_RECORD:,} (a label and an image)"
        )
    if digest is not None and (found := hashlib.sha256(content).hexdigest()) != digest.lower():
        raise ModelError(f"the data file '{path}' is damaged or another version: its SHA-256 is {found}, not {digest}")
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD)
    wrong = np.flatnonzero(records[:, 0] >= _CLASSES)
    if wrong.size:
        raise ModelError(
            f"the data file '{path}' is damaged: record {wrong[0]} has the label {records[wrong[0], 0]}, not 0 to 9"
        )
    return records
