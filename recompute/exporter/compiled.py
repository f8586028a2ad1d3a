"""Model files: save models, and load compiled training steps."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import uuid
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from google.protobuf.message import EncodeError

from ..boundary import as_path
from ..errors import ModelError, RecomputeError, UsageError, expect
from ..importer.graphs import without_fields
from ..importer.mapped import referring, serialized
from ..importer.model import read_model
from ..importer.tensors import tensor_array
from ..language.ir import Block, Value
from ..language.program import Program
from ..language.text import parse
from ..language.types import DTYPES, TensorType, dtype_from_onnx, dtype_to_onnx, show_onnx_dtype
from ..language.verify import verify
from ..passes import RecomputePlan, Rerun
from ..passes.base import without_gc
from ..proof.prove import prove
from ..support.files import afterwards, is_special, replacing, together
from ..support.memory import contents_at
from ..support.room import need_room
from ..support.tensor_file import pieces

#: models above this size have their tensors in a separate file, as protobuf is limited to 2 GiB
EXTERNAL_ABOVE = 1_900_000_000
#: tensors up to this size stay in the model file
SMALL_BYTES = 1024
#: alignment of external tensors, so that they can be mapped
_ALIGNMENT = 4096


# -- writing -----------------------------------------------------------------------------------------------


def save_model(model: onnx.ModelProto, path: str | PathLike[str], *, external_above: int = EXTERNAL_ABOVE) -> None:
    """Writes a model file atomically.

    Above `external_above` bytes the tensors are written to `NAME.XXXXXXXX.data` in the same folder (a new name each
    time, so that the old model stays intact until the new one is complete; then the old data file is removed).  The
    model is not changed.  ModelError if it cannot be written.
    """
    expect("model", model, onnx.ModelProto, "an ONNX model")
    expect("external_above", external_above, int, "a number of bytes")
    save_beside(model, as_path(path), external_above)


def save_beside(
    model: onnx.ModelProto, path: Path, external_above: int = EXTERNAL_ABOVE, keep: Iterable[str] = ()
) -> None:
    """`save_model`; data files of earlier models that `keep` names stay."""
    path = path.resolve() if path.is_symlink() and not is_special(path) else path
    data: Path | None = None
    external_above = 0 if any(map(_stays, all_tensors(model.graph))) else external_above
    if sum(map(tensor_bytes, all_tensors(model.graph))) > external_above and not is_special(path):
        data = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.data")
    try:
        with together():
            if data is not None:
                with replacing(data) as temporary, open(temporary, "wb") as file:
                    model = _externalised(model, file, data.name)
            with replacing(path) as temporary, open(temporary, "wb") as file:
                file.writelines(serialized(model))
    except BaseException as e:
        if data is not None:
            data.unlink(missing_ok=True)
        if not isinstance(e, (OSError, EncodeError)):
            raise
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise ModelError(f"cannot write '{path}': {reason}") from None
    if not is_special(path):
        kept = {data.name if data else "", *(Path(k).name for k in keep)}
        afterwards(lambda: _remove_stale(path, kept))


def _remove_stale(path: Path, keep: set[str]) -> None:
    """Removes the data files of earlier models of this name."""
    pattern = re.compile(re.escape(path.name) + r"\.[0-9a-f]{8}\.data")
    for other in path.parent.iterdir():
        if pattern.fullmatch(other.name) and other.name not in keep:
            with contextlib.suppress(OSError):
                other.unlink()


def tensor_bytes(t: onnx.TensorProto) -> int:
    """Bytes of a tensor's elements."""
    name = dtype_from_onnx(t.data_type)
    return int(np.prod(list(t.dims), dtype=object)) * (DTYPES[name].itemsize if name else 1) if t.dims else 8


def all_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Initializers and tensor attributes, those of nested graphs too."""
    yield from graph.initializer
    for node in graph.node:
        for a in node.attribute:
            if a.type == onnx.AttributeProto.TENSOR:
                yield a.t
            elif a.type == onnx.AttributeProto.GRAPH:
                yield from all_tensors(a.g)


def _stays(t: onnx.TensorProto) -> bool:
    """Whether a tensor refers to contents of which there may be no room for a copy in memory."""
    held = contents_at(next((e.value for e in t.external_data if e.key == "location"), ""))
    return held is not None and held.stays


def take_in(graph: onnx.GraphProto) -> None:
    """Reads tensors that lie in other files into the graph."""
    for t in all_tensors(graph):
        if t.data_location == onnx.TensorProto.EXTERNAL and not _stays(t):
            need_room(2 * tensor_bytes(t))  # as bytes, and in the tensor
            t.raw_data = tensor_array(t).tobytes()
            t.ClearField("external_data")
            t.ClearField("data_location")


def _externalised(model: onnx.ModelProto, file: BinaryIO, location: str) -> onnx.ModelProto:
    """A copy of the model whose larger initializers are in `file`."""
    light = without_fields(model, "graph")
    light.graph.CopyFrom(without_fields(model.graph, "initializer"))
    for t in model.graph.initializer:
        if tensor_bytes(t) <= SMALL_BYTES or dtype_from_onnx(t.data_type) is None:
            light.graph.initializer.append(t)
            continue
        file.write(b"\0" * (-file.tell() % _ALIGNMENT))
        offset = file.tell()
        file.writelines(pieces(tensor_array(t)))
        light.graph.initializer.append(referring(t, location, offset, file.tell() - offset))
    return light


# -- reading compiled models -------------------------------------------------------------------------------


def load_compiled(
    model: str | PathLike[str] | onnx.ModelProto, *, max_bytes: int | None = None, proves: Program | None = None
) -> Program:
    """Loads a program that `export_step` wrote, with its contents.

    The file is not trusted: its program is parsed and verified, its tensors are compared with the program.  ModelError
    if the file is broken, was not written by `export_step`, or was changed so that graph and program differ.
    `max_bytes`: limit on one tensor (default: the machine's memory).  `proves`: a program whose step the loaded one
    must be proved to compute (`rc.prove`), and whose aliases must stand for the same: VerifyError if it is not.
    """
    proto = read_model(model, max_bytes=max_bytes)
    where = "the model" if isinstance(model, onnx.ModelProto) else f"'{model}'"
    metadata = _metadata(proto, where)
    if "recompute.program" not in metadata:
        raise ModelError(
            f"{where} holds no compiled program (no metadata 'recompute.program'): use load() for ONNX models"
        )
    block = _block(metadata["recompute.program"], where)
    program = Program(block, _data(block, proto, where))
    try:
        pairs = json.loads(metadata.get("recompute.gradients", "[]"))
        aliases = json.loads(metadata.get("recompute.aliases", "{}"))
        program.plan = _plan(json.loads(metadata["recompute.plan"])) if "recompute.plan" in metadata else None
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{where} has damaged metadata: {e}") from None
    if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) == 2 and _texts(p) for p in pairs):
        raise ModelError(f"{where} has damaged metadata: recompute.gradients is not a list of pairs of names")
    if not isinstance(aliases, dict) or not _texts(aliases.values()):
        raise ModelError(f"{where} has damaged metadata: recompute.aliases is not an object of names")
    values = block.values()
    program.gradients = [(p, g) for p, g in pairs if p in values and g in values]
    program.aliases = {a: n for a, n in aliases.items() if n in values}
    if proves is not None:
        prove(proves, program)
    return program


def _texts(found: Iterable[Any]) -> bool:
    return all(isinstance(x, str) for x in found)


def _metadata(proto: onnx.ModelProto, where: str) -> dict[str, str]:
    """The metadata entries.  ModelError if one of this package is not UTF-8 text, for which protobuf returns bytes."""
    fields = {p.key: p.value for p in proto.metadata_props if isinstance(p.key, str)}
    for key, value in fields.items():
        if key.startswith("recompute.") and not isinstance(value, str):
            raise ModelError(f"{where} has damaged metadata: {key} is not UTF-8 text")
    return fields


def _plan(fields: Any) -> Any:
    """The RecomputePlan in the metadata; other contents, put there by a user, are returned as parsed JSON."""
    names = [f.name for f in dataclasses.fields(RecomputePlan) if f.name != "reruns"]
    later = {"offloads", "slices", "approximations", "before"}  # which earlier versions do not have
    if not isinstance(fields, dict) or later | set(fields) != {"reruns", *names}:
        return fields
    texts = [fields.get(k, []) for k in names]
    reruns = fields["reruns"]
    if not all(isinstance(t, list) and all(isinstance(x, str) for x in t) for t in texts) or not all(
        isinstance(r, dict) and set(r) == {"operator", "before"} and all(type(i) is int for i in r.values())
        for r in (reruns if isinstance(reruns, list) else [None])
    ):
        raise ValueError("recompute.plan is not a plan")
    return RecomputePlan(tuple(Rerun(**r) for r in reruns), **{k: tuple(t) for k, t in zip(names, texts, strict=True)})


def _block(text: str, where: str) -> Block:
    """The verified block of a program's text; ModelError for any fault."""
    try:
        with without_gc():
            block = verify(parse(text))
        for c in block.constants:
            if len(c.data) != c.value.size:
                raise UsageError(f"constant '{c.value.name}' has {len(c.data)} elements, its type is {c.value.type}")
            c.numpy()
        return block
    except RecomputeError as e:
        raise ModelError(f"{where} holds a program that is not valid: {e}") from None
    except Exception as e:  # type rules may get attributes of any type
        raise ModelError(f"{where} holds a program that is not valid: {type(e).__name__}: {e}") from None


def _data(block: Block, proto: onnx.ModelProto, where: str) -> dict[str, np.ndarray]:
    """Writable copies of the contents of parameters, buffers and state."""
    tensors = {t.name: t for t in proto.graph.initializer}
    problems = []
    stored = (*block.parameters, *block.buffers, *block.state)
    for v in stored:
        t = tensors.get(v.name)
        if t is None:
            problems.append(f"'{v.name}' ({v.type}) has no initializer")
        elif (t.data_type, tuple(t.dims)) != (dtype_to_onnx(v.dtype), v.shape):
            kind = show_onnx_dtype(t.data_type)
            problems.append(f"'{v.name}' is {v.type}, its initializer {kind}[{','.join(map(str, t.dims))}]")
    inputs = {i.name for i in proto.graph.input}
    problems += [f"input '{v.name}' is missing" for v in block.inputs if v.name not in inputs]
    if problems:
        raise ModelError(listed(f"{where}: the graph does not match the program in its metadata", problems))
    return {v.name: _copied(tensors[v.name], v) for v in stored}


def _copied(t: onnx.TensorProto, v: Value) -> np.ndarray:
    array = np.array(tensor_array(t))
    if TensorType.of(array) != v.type.placed(host=False):
        raise ModelError(f"initializer '{v.name}' holds {TensorType.of(array)}, but the program declares {v.type}")
    return array


def listed(title: str, problems: list[str], most: int = 20) -> str:
    """A message with a line for each problem."""
    rest = [f"and {len(problems) - most} more"] if len(problems) > most else []
    return "\n  ".join([f"{title}:", *problems[:most], *rest])
