"""Damage to plans, states, data and compiled steps that knows their fields."""

from __future__ import annotations

import copy
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from . import programs
from .onnx_files import change_tensor
from .seeds import archive, npy

#: what stands in JSON where something else is expected
ODD: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 0.5, 1e308, float("nan"), float("inf"),
                  "", "x", "0", "\x00", "é", "x" * 2000, [], {}, [[]], [None], {"": None}, [0], [1, 2], ["x", "y"],
                  [["x", "y"]]]  # fmt: skip


def damaged_json(r: random.Random, raw: bytes) -> bytes:
    """A JSON document with one to three fields removed, retyped, renamed, repeated or exchanged."""
    document = json.loads(raw)
    for _ in range(r.choice((1, 1, 2, 3))):
        document = change_json(r, document)
    if r.random() < 0.02:
        return ('{"format": ' + "[" * 100_000 + "]" * 100_000 + "}").encode()
    return json.dumps(document).encode("utf-8", "surrogatepass")


def change_json(r: random.Random, document: Any) -> Any:
    """The document with one change somewhere."""
    places = list(_places(document))
    if not places:
        return copy.deepcopy(r.choice(ODD))
    holder, key = r.choice(places)
    how = r.random()
    if how < 0.2:
        del holder[key]
    elif how < 0.5:
        holder[key] = copy.deepcopy(r.choice(ODD))
    elif how < 0.65:
        other, at = r.choice(places)
        holder[key] = copy.deepcopy(other[at])
    elif isinstance(holder[key], str):
        holder[key] = r.choice([holder[key] + "#2", holder[key][:-1], holder[key] * 2, holder[key].upper()])
    elif isinstance(holder[key], (int, float)) and not isinstance(holder[key], bool):
        holder[key] = r.choice([-holder[key], holder[key] + 1, holder[key] * 2**40, str(holder[key]), [holder[key]]])
    elif isinstance(holder, list):
        holder.insert(r.randrange(len(holder) + 1), copy.deepcopy(holder[key] if how < 0.9 else r.choice(ODD)))
    else:
        holder[str(key) + "_"] = holder.pop(key)
    return document


def _places(node: Any) -> Any:
    if isinstance(node, dict):
        for key in list(node):
            yield node, key
            yield from _places(node[key])
    elif isinstance(node, list):
        for i, item in enumerate(node):
            yield node, i
            yield from _places(item)


# -- states: safetensors ----------------------------------------------------------------------------------------------


def damaged_state(r: random.Random, raw: bytes) -> bytes:
    """A safetensors file whose header, lengths, types, shapes, offsets or names say something else."""
    (length,) = struct.unpack("<Q", raw[:8])
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    for _ in range(r.choice((1, 1, 2))):
        names = [n for n in header if n != "__metadata__"]
        if not names:
            break
        _change_entry(r, header, r.choice(names), body)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    if r.random() < 0.05:
        text += b" " * r.choice((1, 7, 10_000))
    size = len(text) if r.random() < 0.93 else r.choice([0, 1, len(text) + 8, 2**31, 2**63 - 1, 2**64 - 1])
    if r.random() < 0.1:
        body = body[: r.randrange(len(body) + 1)] if r.random() < 0.7 else body + b"\1" * r.choice((1, 64))
    return struct.pack("<Q", size) + text + body


def _change_entry(r: random.Random, header: dict[str, Any], name: str, body: bytes) -> None:
    entry = header[name]
    how = r.randrange(10)
    if how == 0 or not isinstance(entry, dict) or not {"dtype", "shape"} <= set(entry):
        del header[name]
    elif how == 1:
        header[r.choice(["", "x", name + "_", name.upper(), "\x00", "é" * 50, "__metadata__"])] = header.pop(name)
    elif how == 2:
        entry["dtype"] = r.choice(["F32", "F16", "BF16", "F64", "I8", "I64", "U8", "BOOL", "F8_E4M3", "x", 1, None])
    elif how == 3:
        turned = entry["shape"][::-1] if isinstance(entry["shape"], list) else []
        entry["shape"] = r.choice([[], [0], [2**62, 2**62], [-1], [len(body)], turned, ["x"], None, 3])
    elif how == 4:
        entry["data_offsets"] = r.choice([[0, 0], [0, len(body)], [8, 4], [0, 2**63], [-4, 0], [0], None, [0.5, 4]])
    elif how == 5:  # the same bytes in another type that fits
        entry["dtype"] = {"F32": "I32", "I64": "U64", "F64": "I64"}.get(entry["dtype"], "U8")
    elif how == 6:
        other = r.choice([n for n in header if n != "__metadata__"])
        header[name], header[other] = header[other], header[name]
    elif how == 7:
        header[name + "_2"] = dict(entry)
    elif how == 8:
        header["__metadata__"] = r.choice([{}, {"format": "pt"}, {"x": 1}, [], None, {"format": "np" * 9999}])
    else:
        header[name] = change_json(r, entry)


# -- data: npz --------------------------------------------------------------------------------------------------------


def damaged_data(r: random.Random, raw: bytes) -> bytes:
    """An .npz file with other arrays, other headers, or another archive around them."""
    with np.load(io.BytesIO(raw)) as f:
        members = {name: npy(f[name]) for name in f.files}
    for _ in range(r.choice((1, 1, 2))):
        if members:
            _change_member(r, members, r.choice(sorted(members)))
    kind = r.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
    suffix = ".npy" if r.random() < 0.95 else r.choice(["", ".NPY", ".npy.npy", "/x.npy"])
    return archive({name + suffix: data for name, data in members.items()}, kind)


def _change_member(r: random.Random, members: dict[str, bytes], name: str) -> None:
    try:
        a = np.load(io.BytesIO(members[name]), allow_pickle=True)
    except Exception:  # damaged before
        return
    how = r.randrange(8)
    if how == 0:
        del members[name]
    elif how == 1:
        members[r.choice(["x", "label", name + " ", "../" + name, "é", "a" * 200])] = members.pop(name)
    elif how == 2:
        dtypes = [
            "<f4",
            ">f4",
            "<f8",
            "<i8",
            "<i4",
            ">i8",
            "u1",
            "?",
            "<U3",
            "S4",
            "<c8",
            "O",
            "<M8[s]",
            "<f4,<i4",
            "V8",
        ]
        try:
            members[name] = npy(a.astype(r.choice(dtypes)))
        except (TypeError, ValueError):
            members[name] = npy(np.array([{"x": 1}], object))
    elif how == 3:
        shapes = [a.T, a[:0], a[:1], np.concatenate([a, a]) if a.ndim else a, a.reshape(-1), a[None], a[..., None]]
        members[name] = npy(np.asarray(r.choice(shapes)))
    elif how == 4 and a.dtype.kind in "fiu":
        odd = [float("nan"), float("inf"), 1e30, -1e30] if a.dtype.kind == "f" else [-1, 2**31 - 1, -(2**31), 1000]
        b = a.copy()
        if b.size:
            b.reshape(-1)[r.randrange(b.size)] = np.array(r.choice(odd)).astype(b.dtype)
        members[name] = npy(b)
    elif how == 5:
        members[name] = npy(np.asfortranarray(a))
    elif how == 6:
        members[name] = _header_only(r, a)
    else:
        members[name] = members[name][: r.randrange(len(members[name]) + 1)]


def _header_only(r: random.Random, a: np.ndarray) -> bytes:
    """An array's file whose header says something else than what follows it."""
    shape = r.choice(["(1000000000000,)", "(4294967296, 4294967296)", "(-1,)", "()", "[2]", "(2,", "(0, 10000000000)",
                      "None", "(" * 500, str((10**9, *a.shape[1:])), str((2, *a.shape[1:]))])  # fmt: skip
    descr = r.choice([f"'{a.dtype.str}'", "'<f4'", "'O'", "'V1000000000'", "[('a', '<f4')]", "None", "'<f999'", "1"])
    text = f"{{'descr': {descr}, 'fortran_order': {r.choice(['False', 'True', '3'])}, 'shape': {shape}, }}\n".encode()
    size = len(text) if r.random() < 0.9 else r.choice([0, 65535])
    return b"\x93NUMPY" + bytes(r.choice([(1, 0), (2, 0), (9, 9)])) + struct.pack("<H", size) + text + a.tobytes()


# -- compiled steps ---------------------------------------------------------------------------------------------------


def damaged_step(r: random.Random, raw: bytes) -> bytes:
    """A compiled step whose program, tensors or other metadata say something else, alone or together."""
    model = onnx.ModelProto()
    model.ParseFromString(raw)
    how = r.random()
    entry = {p.key: p for p in model.metadata_props}
    if how < 0.75:
        text = entry["recompute.program"].value
        changed = programs.damaged_program(r, text)
        if r.random() < 0.6:
            _follow(r, model, changed)
        _set(entry["recompute.program"], changed)
    elif how < 0.9:
        p = entry[r.choice(sorted(entry))]
        if p.key in ("recompute.program", "recompute.version"):
            _set(p, r.choice(["", "x", p.value[:-3], p.value * 2]))
        else:
            _set(p, json.dumps(change_json(r, json.loads(p.value))))
    else:
        tensors = list(model.graph.initializer)
        if tensors:
            change_tensor(r, r.choice(tensors))
    return model.SerializeToString()


def _set(entry: Any, text: str) -> None:
    """A value that protobuf takes: valid UTF-8."""
    entry.value = text.encode("utf-8", "replace").decode()


def _follow(r: random.Random, model: onnx.ModelProto, text: str) -> None:
    """Makes initializers and inputs what the changed program declares, so that more than the comparison is met."""
    from recompute import RecomputeError, parse
    from recompute.language.types import dtype_to_onnx

    try:
        block = parse(text)
    except (RecomputeError, ValueError, TypeError, RecursionError):
        return
    held = {t.name: t for t in model.graph.initializer}
    for v in (*block.parameters, *block.buffers, *block.state):
        if v.nbytes > 1 << 20 or max(v.shape, default=0) > 1 << 20:
            return
        t = held.get(v.name)
        if t is None or (tuple(t.dims), t.data_type) != (v.shape, dtype_to_onnx(v.dtype)):
            if t is not None:
                model.graph.initializer.remove(t)
            array = np.full(v.shape, r.choice([0, 1, 3, 100]), np.float32)
            held[v.name] = t = model.graph.initializer.add()
            t.CopyFrom(onnx.numpy_helper.from_array(array.astype(v.type.numpy), v.name))
    inputs = {i.name for i in model.graph.input}
    for v in block.inputs:
        if v.name not in inputs:
            model.graph.input.append(onnx.helper.make_tensor_value_info(v.name, 1, None))


DAMAGE: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "plan": damaged_json,
    "state": damaged_state,
    "data": damaged_data,
    "step": damaged_step,
}
