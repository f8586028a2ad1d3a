"""Gathers sharded state: one checkpoint file, a hash of the weights, a program for export.

A rank has some of a value's elements (ZeRO, divided operators), or values of its own stages (pipelines): the file and
the hash are those of one process, whatever the mesh.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..language.program import Program
from ..language.types import TensorType
from ..passes.pipelines.borders import without_borders
from ..support.tensor_file import layout, pieces
from ..training.parts import Part, parts_of, stored, whole_types
from ..training.state import contents, metadata_of, unchanged
from .ranks import Ranks

#: names with arrays
_Arrays = Iterator[tuple[str, "np.ndarray | None"]]


@dataclass(frozen=True)
class _Value:
    """A parameter, buffer or state of the ranks together: its whole type, and the first rank that has some of it.

    `part`: what that rank has of it; None: all of it.
    """

    type: TensorType
    rank: int
    part: Part | None


def _values(program: Program, ranks: Ranks, *, state: bool = True) -> dict[str, _Value]:
    """The values of all ranks together, by name, with or without the `state`: in a pipeline, a rank has its stages'."""
    parts, left_out = parts_of(program), set() if state else {v.name for v in program.block.state}
    types = {n: (t, parts.get(n)) for n, t in whole_types(program).items() if n not in left_out}
    values: dict[str, _Value] = {}
    for rank, theirs in enumerate(ranks.collect("what each rank has", types)):
        for name, (its_type, part) in (theirs or {}).items():
            values.setdefault(name, _Value(its_type, rank, part))
    return values


def _joined(program: Program, values: Mapping[str, _Value], ranks: Ranks, *, everywhere: bool = False) -> _Arrays:
    """The values with their whole contents, on rank 0 or on all ranks; None where a rank does not get them."""
    mine = {v.name: v for v in stored(program)}
    for name, value in sorted(values.items()):
        array = contents(program, mine[name]) if name in mine else None
        if value.part is None and value.rank == 0 and (not everywhere or program.pipe is None):
            yield name, array
            continue
        sent = None if value.part is None and value.rank != ranks.rank else array
        arrays = (ranks.collect if everywhere else ranks.gather)(f"the contents of '{name}'", sent)
        if not arrays:
            yield name, None
        else:
            yield name, arrays[value.rank] if value.part is None else value.part.joined(arrays)


def write_state(program: Program, path: Path, ranks: Ranks) -> None:
    """Writes parameters, buffers and state of all ranks as one safetensors file: the bytes of
    `rc.save_state(..., whole=False)`.

    Each rank writes its parts, and what it is the first to have; all of it is on the disk when this returns.  All ranks
    call it, with the same path.
    """
    values, left = _values(program, ranks), dict[str, str]()
    for mine in ranks.collect("what is the model file's", unchanged(program)):
        left.update(mine or {})
    values = {n: v for n, v in values.items() if n not in left}
    kinds = {n: (v.type.numpy, v.type.shape) for n, v in values.items()}
    header, offsets, size = layout(kinds, metadata_of(left))

    def begin() -> None:
        if ranks.leads:
            with open(path, "wb") as file:
                file.write(header)
                file.truncate(len(header) + size)

    def write() -> None:
        parts = parts_of(program)
        with open(path, "r+b") as file:
            for v in stored(program):
                part = parts.get(v.name)
                if v.name in left or (part is None and values[v.name].rank != ranks.rank):
                    continue
                array = contents(program, v)
                for there, here, count in [(0, 0, array.size)] if part is None else part.spans():
                    file.seek(len(header) + offsets[v.name] + there * array.itemsize)
                    for piece in pieces(array if part is None else array.reshape(-1)[here : here + count]):
                        file.write(piece)
            file.flush()
            os.fsync(file.fileno())

    ranks.together("the beginning of a checkpoint", begin)
    ranks.together("the writing of a checkpoint", write)


def weights_sha256(program: Program, ranks: Ranks) -> str:
    """A hash of all parameters and buffers: names in order, types, contents."""
    digest = hashlib.sha256()
    values = _values(program, ranks, state=False)
    for name, whole in _joined(program, values, ranks):
        digest.update(f"{name}:{values[name].type};".encode())
        for piece in () if whole is None else pieces(whole):
            digest.update(piece)
    return ranks.first("the hash of the weights", digest.hexdigest)


def whole_program(program: Program, ranks: Ranks, *, everywhere: bool = False) -> Program | None:
    """The forward pass with all parameters whole, for export: on rank 0 (else None), or on all ranks.

    The program itself, where nothing is divided.
    """
    if program.division is None and not program.divided and program.pipe is None:
        return program if everywhere or ranks.leads else None
    values = _values(program, ranks, state=False)
    arrays: dict[str, Any] = dict(_joined(program, values, ranks, everywhere=everywhere))
    if not everywhere and not ranks.leads:
        return None
    joined = Program(without_borders(program.forward_block), {**program.data, **arrays}, source=program.source)
    joined.take_origin(program)
    joined.forward, joined.loss = None, program.loss
    return joined
