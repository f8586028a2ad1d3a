"""Batches for `--run`: synthetic ones, or those of an .npz file."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..boundary import as_program
from ..errors import UsageError, expect, nearest
from ..language.ir import Block, Role, Value
from ..language.program import Program
from ..ops.loss.ctc import CTCLoss
from .npz import array, check_size, header, opened

__all__ = ["check_npz", "npz_batches", "synthetic_batch"]


#: most names of arrays that an error lists
_LISTED = 8


def synthetic_batch(program: Program, seed: int = 0, specs: Mapping[str, Any] | None = None) -> dict[str, np.ndarray]:
    """One batch of random inputs: floats are standard normal, integers in the range that their readers accept.

    `specs` (name → object with `sample(generator, batch=...)`) draws the inputs that it names.
    """
    g = np.random.default_rng(expect("seed", seed, (int, np.integer), "a whole number"))
    specs = expect("specs", {} if specs is None else specs, Mapping, "what draws them, by input")
    batch = {}
    for v in as_program(program).block.inputs:
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
        elif (labels := _aligned(program.logical, v, g)) is not None:
            batch[v.name] = labels.astype(v.type.numpy)
        else:
            batch[v.name] = g.integers(0, max(1, _limit(program.logical, v)), v.shape).astype(v.type.numpy)
    return batch


def _aligned(block: Block, v: Value, g: np.random.Generator) -> np.ndarray | None:
    """Labels of a CTC loss that fit its steps, half of them at most; or how many steps or entries count."""
    loss = next((op for op in block.operators if isinstance(op.op, CTCLoss)), None)
    if loss is None or all(op.role is Role.FORWARD for op in block.operators if v in op.reads()):
        return None
    x, labels, *lengths = loss.inputs
    assert x is not None and labels is not None
    steps, _, classes = x.shape
    most = max(1, min(labels.shape[1], steps // 2))
    if len(v.shape) == 1:
        return np.full(v.shape, steps) if v in lengths else g.integers(1, most + 1, v.shape)
    rule = loss.of(CTCLoss)
    drawn = (rule.blank + g.integers(1, classes, v.shape)) % classes
    ends = g.integers(1, most + 1, (v.shape[0], 1))
    return np.where(np.arange(v.shape[1]) < ends, drawn, rule.ignore_index)


def _limit(block: Block, v: Value) -> int:
    """The exclusive upper bound of an integer input: the size of the axis that it indexes, else 2.

    (`limits_of` knows more readers; here the numbers of published batches stay.)
    """
    names = {v.name}
    for op in block.operators:
        if not op.outputs or not any(r.name in names for r in op.reads()):
            continue
        first, second = op.inputs[0], op.inputs[1] if len(op.inputs) > 1 else None
        if op.op.name == "Gather" and second is not None and second.name in names and first is not None:
            return first.shape[op.op.axis]  # type: ignore[attr-defined]
        if "Loss" in op.op.name and second is not None and second.name in names and first is not None:
            return first.shape[1]
        wide = op.outputs[0].shape[-1:] if op.outputs[0] is not None else ()
        if op.op.name == "Equal" and wide not in ((), next(r for r in op.reads() if r.name in names).shape[-1:]):
            return wide[0]  # one-hot, as JAX writes it
        if op.op.name in ("Reshape", "Cast", "Transpose", "Identity", "Expand", "Slice"):
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
        if op.op.name in ("Cast", "Slice"):
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
    with opened(path) as archive:
        members = _fitting(archive, inputs, path)
        arrays = {v.name: array(archive, members[v.name]) for v in inputs}
    count = min((arrays[v.name].shape[0] // v.shape[0] for v in inputs if v.shape and v.shape[0]), default=1)
    for i in itertools.cycle(range(max(count, 1))):
        yield {v.name: _part(arrays[v.name], v, i) for v in inputs}


def check_npz(path: str | Path, program: Program | None = None) -> None:
    """The errors of `npz_batches`, without reading an array; without a program, whether this is an .npz file at all."""
    with opened(path) as archive:
        if program is not None:
            _fitting(archive, program.block.inputs, path)


def _fitting(archive: zipfile.ZipFile, inputs: Sequence[Value], path: str | Path) -> dict[str, zipfile.ZipInfo]:
    """The array of each input.  UsageError where one is missing or does not fit."""
    members = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
    for v in inputs:
        if v.name not in members:
            has = ", ".join(list(members)[:_LISTED]) + ", ..." * (len(members) > _LISTED)
            raise UsageError(
                f"'{path}' has no array '{v.name}' for the model's input {v.name}: {v.type}"
                f"{nearest(v.name, members)}; it has: {has or 'nothing'}"
            )
        _check_header(archive, members[v.name], v, path)
    return {v.name: members[v.name] for v in inputs}


def _part(array: np.ndarray, v: Value, i: int) -> np.ndarray:
    """Batch number i of an array along its first axis; a scalar is the same in every batch."""
    return array[i * v.shape[0] : (i + 1) * v.shape[0]] if v.shape else array


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo, v: Value, path: str | Path) -> None:
    """UsageError if the header of an array, the only part that is read here, does not fit the input or the file."""
    shape, _, dtype, _, rest = header(archive, member)
    if why := _why_not(shape, dtype, v):
        raise UsageError(
            f"'{path}': the array '{v.name}' is {dtype}{list(shape)}, but must be {v.type} (the first axis may be "
            f"longer): {why}"
        )
    check_size(member, shape, dtype, rest)


def _why_not(shape: tuple[int, ...], dtype: np.dtype, v: Value) -> str:
    """Why an array of this shape and type does not fit an input, with a remedy; "" if it fits."""
    if len(shape) != len(v.shape):
        return f"it has {len(shape)} dimensions, not {len(v.shape)}"
    if shape[1:] != v.shape[1:]:
        axis = next(i for i in range(1, len(shape)) if shape[i] != v.shape[i])
        return f"axis {axis} has {shape[axis]}, not {v.shape[axis]}"
    if v.shape and shape[0] < v.shape[0]:
        return f"it has {shape[0]} samples, fewer than a batch of {v.shape[0]} (--batch sets the batch)"
    return "" if dtype == v.type.numpy else f"store {v.name}.astype('{v.type.numpy}')"
