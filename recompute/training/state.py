"""Save and load parameters, buffers and optimizer state (safetensors files)."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from os import PathLike
from types import MappingProxyType
from typing import Any

import numpy as np

from ..boundary import as_path, as_program
from ..errors import ModelError, OutOfMemoryError, UsageError, expect, nearest
from ..importer.tensors import tensor_array
from ..language.ir import Value
from ..language.program import Program
from ..language.types import TensorType, dtype_name
from ..support.files import regular
from ..support.memory import fill, is_stored
from ..support.tensor_file import reason, write_arrays
from .origin import digest
from .parts import Part, parts_of, stored, whole_types

__all__ = ["contents", "load_state", "metadata_of", "save_state", "set_state_dict", "state_dict", "unchanged"]

#: most differences that an error lists
_MOST = 20
#: the entry of a file's metadata with the digests of what was left out, by name
LEFT_OUT = "recompute.unchanged"
#: element types that have other names in safetensors
_EIGHT_BITS = {
    "F8_E4M3": "f8e4m3fn",
    "F8_E4M3FNUZ": "f8e4m3fnuz",
    "F8_E5M2": "f8e5m2",
    "F8_E5M2FNUZ": "f8e5m2fnuz",
    "F8_E8M0": "f8e8m0",
}


def contents(program: Program, v: Value) -> np.ndarray:
    """The array of a parameter, buffer or state, in host memory.  UsageError if it has none."""
    array = program.data.get(v.name)
    if array is None:
        raise UsageError(f"'{v.name}' ({v.type}) has no contents: load or initialise it first")
    host = array.get() if hasattr(array, "get") else array if isinstance(array, np.ndarray) else np.asarray(array)
    if tuple(host.shape) != v.shape or host.dtype != v.type.numpy:
        raise UsageError(f"'{v.name}' is {host.dtype}{list(host.shape)}, but the program declares {v.type}")
    return host


def state_dict(program: Program) -> dict[str, np.ndarray]:
    """Copies of parameters, buffers and state, by name.  UsageError if one has no contents yet."""
    _must_be_whole(program)
    return {v.name: np.array(contents(program, v)) for v in stored(program)}


def _must_be_whole(program: Program) -> None:
    """UsageError where this process has parts of parameters."""
    if as_program(program).division is not None or program.divided:
        raise UsageError(
            f"program '{program.block.name}' is divided among ranks: this one has a part of its parameters and state. "
            "rc.Trainer(..., mesh=...) writes checkpoints of all ranks together; rc.load_state reads a rank's part of "
            "such a file, or of one that a single process wrote"
        )

    if program.first_stages:
        raise UsageError(
            f"program '{program.block.name}' is one stage of a pipeline: this rank has a part of the parameters and "
            "state. rc.Trainer(..., mesh=...) writes checkpoints of all stages; rc.load_state reads a stage's part"
        )


def set_state_dict(program: Program, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Puts arrays into the program, all of them or none.

    An existing writable array is overwritten, as executors are bound to it; otherwise it is replaced by a copy.
    `strict=False` permits missing and unknown names; shapes and element types must always fit.  UsageError that lists
    all differences.
    """
    _must_be_whole(program)
    expect("state", state, Mapping, "arrays by name, as state_dict returns them")
    arrays = {name: a.get() if hasattr(a, "get") else np.asarray(a) for name, a in state.items()}
    _check(program, {n: _describe(a) for n, a in arrays.items()}, strict, "the state")
    for v in stored(program):
        if v.name in arrays:
            _put(program, v, arrays[v.name])
    _mended(program, arrays)


def unchanged(program: Program) -> dict[str, str]:
    """Digests of frozen weights that have the contents of the model file and that no step changes, by name.

    Of a value that ranks divide it is that of the whole one.  Linear in their bytes.
    """
    if program.source is None:
        return {}
    updated = {v.name for op in program.block.operators if op.op.updates for v in op.writes()}
    tensors, parts = {t.name: t for t in program.source.graph.initializer}, parts_of(program)
    digests = dict[str, str]()
    for v in program.block.buffers:
        if v.name in tensors and v.name in program.data and v.name not in updated:
            whole, array = tensor_array(tensors[v.name]), contents(program, v)
            if v.name in parts:
                same = parts[v.name].whole == TensorType.of(whole) and _has_part(array, whole, parts[v.name])
            else:
                same = TensorType.of(whole) == v.type and digest(array) == digest(whole)
            digests |= {v.name: digest(whole)} if same else {}
    return digests


def _has_part(own: np.ndarray, whole: np.ndarray, part: Part) -> bool:
    """Whether a rank's elements are those of the whole value."""
    here, there = own.reshape(-1), whole.reshape(-1)
    return all(here[b : b + n].tobytes() == there[a : a + n].tobytes() for a, b, n in part.spans())


def save_state(program: Program, path: str | PathLike[str], *, whole: bool = True) -> None:
    """Writes parameters, buffers and optimizer state as safetensors, atomically.

    `whole=False` leaves out frozen weights that are those of the model file: their digests are in the file, and
    `load_state` refuses a program whose contents differ.  UsageError if a value has no contents yet, or is divided
    among ranks; ModelError if the file cannot be written.
    """
    _must_be_whole(program)
    left = {} if expect("whole", whole, bool, "True or False") else unchanged(program)
    arrays = {v.name: contents(program, v) for v in stored(program) if v.name not in left}
    write_arrays(arrays, as_path(path), metadata_of(left))


def metadata_of(left: Mapping[str, str]) -> dict[str, str]:
    """The metadata of a file without the values of these digests: one entry, as a library orders several by chance."""
    return {LEFT_OUT: json.dumps(left, sort_keys=True)} if left else {"format": "np"}


def _left_out(metadata: Mapping[str, str] | None, path: str | PathLike[str]) -> dict[str, str]:
    """The digests of what a file leaves out.  ModelError where it has others than are written."""
    try:
        left = json.loads((metadata or {}).get(LEFT_OUT, "{}"))
    except (ValueError, RecursionError):
        left = None
    if not isinstance(left, dict) or not all(isinstance(d, str) for d in left.values()):
        raise ModelError(f"'{path}' has damaged metadata: {LEFT_OUT} is no digest by name")
    return left


def load_state(program: Program, path: str | PathLike[str], strict: bool = True) -> None:
    """Loads a file of `save_state` (or any safetensors file with these names) into the program: all values or none.

    (Of a program on disk they are read one by one: where that fails in between, it needs a complete state to run.)

    For `strict` and the arrays see `set_state_dict`.  A rank that has parts of values (ZeRO) reads its parts of whole
    ones.  Frozen weights that the file leaves out must be those of the program (not with `strict=False`).  ModelError
    if the file is missing, truncated or not a safetensors file; UsageError that lists all differences from the program.
    """
    from safetensors import SafetensorError, safe_open

    path, before = as_path(path), as_program(program).broken
    try:
        with safe_open(regular(path), framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no mapping
            left = _left_out(file.metadata(), path)
            types = {n: _type_text(s.get_dtype(), s.get_shape()) for n, s in slices.items()}
            _check(program, types, strict, f"'{path}'", left)
            parts = parts_of(program)
            far = any(map(is_stored, dict.values(program.data)))
            direct = {v.name for v in stored(program) if v.dtype not in _EIGHT_BITS.values() and v.name not in parts}
            read: Iterable[tuple[Value, np.ndarray]] = (
                (v, file.get_tensor(v.name) if v.name in direct and not far else _read_at(path, v, parts))
                for v in stored(program)
                if v.name in slices
            )
            if far:  # there may be no room for all
                program.broken = f"'{path}' was not read to its end"  # until it is
            else:
                read = list(read)
            for v, array in read:
                _put(program, v, array)
    except FileNotFoundError:
        raise ModelError(f"cannot read '{path}': there is no such file") from None
    except (OSError, SafetensorError) as e:
        raise ModelError(
            f"cannot read '{path}': it is not a safetensors file, or it is truncated ({reason(e)})"
        ) from None
    except MemoryError:
        raise OutOfMemoryError(f"not enough memory on this machine for the contents of '{path}'") from None
    program.broken = before
    _mended(program, {**slices, **left})


def _read_at(path: str | PathLike[str], v: Value, parts: Mapping[str, Part]) -> np.ndarray:
    """The contents of a value in a checked file, or a rank's part, also of types that NumPy has no names for."""
    part, flat = parts.get(v.name, Part(v.type, 0, v.size)), np.zeros(v.size, v.type.numpy)
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        first = 8 + length + json.loads(file.read(length))[v.name]["data_offsets"][0]
        for there, here, count in part.spans():
            file.seek(first + there * v.type.numpy.itemsize)
            flat[here : here + count] = np.fromfile(file, v.type.numpy, count)
    return flat.reshape(v.shape)


def _mended(program: Program, loaded: Iterable[str]) -> None:
    """Clears the mark of a program that a failed step has left partly updated: a complete state was loaded."""
    if {v.name for v in stored(program)} <= set(loaded):
        program.broken = ""


def _describe(a: np.ndarray) -> str:
    try:
        return str(TensorType(dtype_name(a.dtype), tuple(a.shape)))
    except (ValueError, TypeError):
        return f"{a.dtype}[{','.join(map(str, a.shape))}]"


def _type_text(dtype: str, shape: list[int]) -> str:
    """A safetensors type in this package's notation: the name in lower case, except for some 8-bit types."""
    return f"{_EIGHT_BITS.get(dtype, dtype.lower())}[{','.join(map(str, shape))}]"


def _check(
    program: Program, types: Mapping[str, str], strict: bool, what: str, left: Mapping[str, str] = MappingProxyType({})
) -> None:
    """UsageError that lists all names that are missing, unknown or of another type.

    `left`: digests of what was left out because it was the model's.
    """
    if as_program(program).averaged:
        raise UsageError(
            f"{what} cannot be loaded while parameters hold their averages: leave `applied(program)` first"
        )
    wanted = {name: str(t) for name, t in whole_types(program).items()}
    problems = [
        f"'{n}' is {types[n]} there, the program says {t}" for n, t in wanted.items() if n in types and types[n] != t
    ]
    if strict:
        problems += [f"'{n}' ({t}) is missing" for n, t in wanted.items() if n not in types and n not in left]
        names, here = [n for n in left if n in wanted and n not in types], unchanged(program) if left else {}
        whole = {v.name: v for v in stored(program) if v.name not in here and v.name not in parts_of(program)}
        here |= {n: digest(contents(program, whole[n])) for n in names if n in whole}
        other = [n for n in names if here.get(n) != left[n]]
        problems += [f"'{n}', a frozen weight, has other contents in this model than when it was saved" for n in other]
        unknown = [n for n in (*types, *left) if n not in wanted and not program.first_stages]  # what other stages have
        problems += [f"the program has no '{n}'{nearest(n, wanted) if len(unknown) < _MOST else ''}" for n in unknown]
    if problems:
        more = [f"and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
        lines = "\n  ".join([*problems[:_MOST], *more])
        raise UsageError(f"{what} does not fit program '{program.block.name}'; nothing was loaded:\n  {lines}")


def _put(program: Program, v: Value, array: np.ndarray) -> None:
    """Writes into the existing array if it is writable, else replaces it by a copy."""
    old = program.data.get(v.name)
    fits = old is not None and tuple(old.shape) == v.shape and old.dtype == v.type.numpy
    if fits and old.flags.writeable:
        fill(old, array)
    else:
        program.data[v.name] = np.array(array)
