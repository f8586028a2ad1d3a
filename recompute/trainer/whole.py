"""What all ranks have together: one file of the state, a hash of the weights, a program for export.

A rank's part of a value (ZeRO) is a range of the value's elements, so that the file and the hash are those of one
process, whatever the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..language.program import Program
from ..language.types import TensorType
from ..training.parts import parts_of, stored, whole_types
from ..training.state import contents
from .ranks import Ranks


def write_state(program: Program, path: Path, ranks: Ranks) -> None:
    """Writes parameters, buffers and state of all ranks as one safetensors file, the bytes of `rc.save_state`.

    Each rank writes its parts, rank 0 also what all have; all of it is on the disk when this returns.  All ranks call
    it, with the same path.
    """
    header, offsets, size = _layout(whole_types(program))

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
                if part is None and not ranks.leads:
                    continue
                array = contents(program, v)
                spans = [(0, 0, array.size)] if part is None else part.spans()
                for there, here, count in spans if array.size else ():
                    file.seek(len(header) + offsets[v.name] + there * array.itemsize)
                    file.write(_bytes(array)[here * array.itemsize : (here + count) * array.itemsize])
            file.flush()
            os.fsync(file.fileno())

    ranks.together("the beginning of a checkpoint", begin)
    ranks.together("the writing of a checkpoint", write)


def weights_sha256(program: Program, ranks: Ranks) -> str:
    """A hash of all parameters and buffers: names in order, types, contents."""
    digest, types, parts = hashlib.sha256(), whole_types(program), parts_of(program)
    for v in sorted((*program.block.parameters, *program.block.buffers), key=lambda v: v.name):
        digest.update(f"{v.name}:{types[v.name]};".encode())
        own = contents(program, v)
        if v.name in parts:
            found = ranks.gather(f"the hash of '{v.name}'", own[: parts[v.name].count])
            own = parts[v.name].joined(found) if found else own
        digest.update(_bytes(own) if own.size else b"")
    return ranks.first("the hash of the weights", digest.hexdigest)


def whole_program(program: Program, ranks: Ranks, *, everywhere: bool = False) -> Program | None:
    """The forward pass with all parameters whole, for export: on rank 0 (else None), or on all ranks.

    The program itself, where nothing is divided.
    """
    if program.division is None and not program.divided:
        return program if everywhere or ranks.leads else None
    parts, collect = parts_of(program), ranks.collect if everywhere else ranks.gather
    arrays: dict[str, Any] = {v.name: program.data[v.name] for v in program.block.buffers}
    for v in program.block.parameters:
        arrays[v.name] = own = contents(program, v)
        if v.name in parts:
            found = collect(f"the parts of '{v.name}'", own[: parts[v.name].count])
            arrays[v.name] = parts[v.name].joined(found) if found else None
    if not everywhere and not ranks.leads:
        return None
    made = Program(program.forward_block, {**program.data, **arrays}, source=program.source)
    made.take_origin(program)
    made.loss = program.loss
    return made


def _layout(types: Mapping[str, TensorType]) -> tuple[bytes, dict[str, int], int]:
    """The beginning of a safetensors file, where each tensor begins behind it, and the bytes of all of them."""
    from safetensors.numpy import save

    def entries(file: bytes) -> dict[str, Any]:
        (length,) = struct.unpack_from("<Q", file)
        return dict(json.loads(file[8 : 8 + length]))

    tiny = entries(save({n: np.zeros(1, t.numpy) for n, t in types.items()}, metadata={"format": "np"}))
    header, offsets, at = {"__metadata__": tiny.pop("__metadata__")}, {}, 0
    for name in tiny:  # in the library's order
        offsets[name], t = at, types[name]
        at += t.size * t.numpy.itemsize
        header[name] = {"dtype": tiny[name]["dtype"], "shape": list(t.shape), "data_offsets": [offsets[name], at]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, offsets, at


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
