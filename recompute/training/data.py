"""Batches for `--run`: synthetic ones, or those of an .npz file."""

from __future__ import annotations

import itertools
import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError, OutOfMemoryError, RecomputeError, UsageError, nearest
from ..language.ir import Block, Role, Value
from ..language.program import Program

__all__ = [
    "npz_batches",
    "synthetic_batch",
]


def synthetic_batch(program: Program, seed: int = 0, specs: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    """One batch of random inputs: floats are standard normal, integers in the range that their readers accept.

    `specs` (name → object with `sample(generator, batch=...)`) draws the inputs that it names.
    """
    g = np.random.default_rng(seed)
    batch = {}
    for v in program.block.inputs:
        if specs and v.name in specs:
            batch[v.name] = np.asarray(specs[v.name].sample(g, batch=v.shape[0] if v.shape else 1), v.type.numpy)
        elif v.type.is_float:
            binary = _is_probability(program.logical, v)
            drawn = g.integers(0, 2, v.shape) if binary else g.standard_normal(v.shape)
            batch[v.name] = np.asarray(drawn).astype(v.type.numpy)
        elif v.dtype == "bool":
            batch[v.name] = np.ones(v.shape, np.bool_)
        elif "mask" in v.name.lower():
            batch[v.name] = np.ones(v.shape, v.type.numpy)
        else:
            batch[v.name] = g.integers(0, max(1, _limit(program.logical, v)), v.shape).astype(v.type.numpy)
    return batch


def _limit(block: Block, v: Value) -> int:
    """The exclusive upper bound of an integer input: the size of the axis that it indexes, else 2."""
    names = {v.name}
    for op in block.operators:
        if not any(r.name in names for r in op.reads()):
            continue
        first, second = op.inputs[0], op.inputs[1] if len(op.inputs) > 1 else None
        if op.op.name == "Gather" and second is not None and second.name in names and first is not None:
            return first.shape[op.op.axis]  # type: ignore[attr-defined]
        if "Loss" in op.op.name and second is not None and second.name in names and first is not None:
            return first.shape[1]
        if op.op.name in ("Reshape", "Cast", "Transpose", "Identity", "Expand"):
            names.update(o.name for o in op.writes())
    return 2


def _is_probability(block: Block, v: Value) -> bool:
    """Whether a float input is a probability or a 0/1 label: only the loss reads it, and not only by a difference.

    The label of a regression is subtracted from the model's output (or the output from it), and nothing else.
    """
    declared = {c.name for c in block.persistent()}
    names, probability = {v.name}, False
    for op in block.operators:
        if op.role not in (Role.FORWARD, Role.LOSS) or not any(r.name in names for r in op.reads()):
            continue
        if op.role is Role.FORWARD:
            return False
        if op.op.name == "Cast":
            names.update(o.name for o in op.writes())
        else:
            probability |= op.op.name != "Sub" or any(r.name in declared for r in op.reads())
    return probability


def npz_batches(path: str | Path, program: Program) -> Iterator[dict[str, np.ndarray]]:
    """Batches from an .npz file with one array per input; longer arrays are cut along the first axis into batches.

    ModelError if the file cannot be read, UsageError if an array is missing or does not fit.  The headers of the
    arrays are compared with the program before any array is read; other arrays of the file are ignored.
    """
    inputs = program.block.inputs
    try:
        with zipfile.ZipFile(path) as archive:
            members = {m.filename: m for m in archive.infolist()}
            for v in inputs:
                member = members.get(f"{v.name}.npy")
                if member is None:
                    known = [name.removesuffix(".npy") for name in members]
                    raise UsageError(f"'{path}' has no array for input '{v.name}'{nearest(v.name, known)}")
                _check_header(archive, member, v, path)
            arrays = {v.name: _array(archive, members[f"{v.name}.npy"]) for v in inputs}
    except MemoryError:
        raise OutOfMemoryError(f"not enough memory on this machine for the arrays of '{path}'") from None
    except OSError as e:
        raise ModelError(f"cannot read the data file '{path}': {e.strerror or e}") from None
    except RecomputeError:
        raise
    except Exception as e:  # damaged archives, compressed data and headers raise exceptions of many kinds
        raise ModelError(f"cannot read the data file '{path}': not an .npz file, or damaged ({e})") from None
    count = min((arrays[v.name].shape[0] // v.shape[0] for v in inputs if v.shape and v.shape[0]), default=1)
    for i in itertools.cycle(range(max(count, 1))):
        yield {v.name: _part(arrays[v.name], v, i) for v in inputs}


def _part(array: np.ndarray, v: Value, i: int) -> np.ndarray:
    """Batch number i of an array along its first axis; a scalar is the same in every batch."""
    return array[i * v.shape[0] : (i + 1) * v.shape[0]] if v.shape else array


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo, v: Value, path: str | Path) -> None:
    """UsageError if the header of an array, the only part that is read here, does not fit the input or the file."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"the array '{v.name}' has the unknown version {version}")
        shape, _, dtype = read(file)
        rest = member.file_size - file.tell()
    fits = len(shape) == len(v.shape) and shape[1:] == v.shape[1:] and (not v.shape or shape[0] >= v.shape[0])
    if not fits or dtype != v.type.numpy:
        raise UsageError(
            f"'{path}': '{v.name}' is {dtype}{list(shape)}, but must be {v.type} (the first axis may be longer)"
        )
    if math.prod(shape) * dtype.itemsize != rest:
        raise ValueError(f"the array '{v.name}' has {rest:,} bytes, which is not the size of {dtype}{list(shape)}")
