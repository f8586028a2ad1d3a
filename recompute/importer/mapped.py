"""Models whose large tensors are elsewhere: in their file, or in arrays that a program takes as its own.

A file of 500 MB would be held three times: as it was read, in the parsed model, and as arrays.  So the parsed model
refers to its own file as to external data (onnx.proto, `TensorProto.external_data`), which is mapped: contents are read
when they become a program's.  A model that comes in memory refers to arrays in the same way.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import onnx

from ..language.types import DTYPES, PACKED, dtype_from_onnx, need
from ..support.memory import Contents, contents_at
from .graphs import without_fields

#: contents of at least so many bytes stay in the file
LARGE_BYTES = 1 << 16
#: numbers of fields in onnx.proto
_GRAPH, _INITIALIZER, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION = 7, 5, 9, 13, 14
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Buffer = bytes | mmap.mmap

#: files that are mapped, by stamp and path, as long as something holds them: one that is replaced keeps its contents
_MAPS: WeakValueDictionary[str, np.memmap] = WeakValueDictionary()


def read(path: Path) -> bytes:
    """The file, without the contents of its large initializers.  OSError as for reading it.

    A file that is no protobuf message is returned as it is, for the parser to say so.
    """
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return b""
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as raw:
            try:
                return b"".join(_model(raw, path.resolve().name))
            except (ValueError, IndexError):
                return bytes(raw)


def serialized(model: onnx.ModelProto) -> Iterator[bytes]:
    """The bytes of a model, an initializer at a time: protobuf itself takes three times the model's size at once."""
    graph = model.graph
    rest, sizes = without_fields(graph, "initializer").SerializeToString(), [t.ByteSize() for t in graph.initializer]
    heads = [_head(_INITIALIZER, size) for size in sizes]
    yield without_fields(model, "graph").SerializeToString()
    yield _head(_GRAPH, len(rest) + sum(sizes) + sum(map(len, heads)))
    yield rest
    for t, head in zip(graph.initializer, heads, strict=True):
        yield head
        if t.HasField("raw_data"):
            yield without_fields(t, "raw_data").SerializeToString()
            yield _head(_RAW_DATA, len(t.raw_data))
            yield t.raw_data
        else:
            yield t.SerializeToString()


def whole(path: str, stamp: str) -> np.memmap:
    """The bytes of a file that is as it was when it got its `stamp`, or that was mapped then.

    ValueError if it has changed and was not mapped.
    """
    key = f"{stamp} {path}"
    array = _MAPS.get(key)
    if array is None:
        if stamp_of(path) != stamp:
            raise ValueError("the file has changed since it was loaded: load it again")
        array = _MAPS[key] = np.memmap(path, np.uint8, "r")
    return array


def held(model: onnx.ModelProto) -> list[np.memmap | Contents]:
    """The mapped files and arrays of a model's initializers, whose contents stay in memory as long as this list.

    Those in memory get the initializers' names.
    """
    files, arrays = set(), []
    for t in model.graph.initializer:
        info = {e.key: e.value for e in t.external_data}
        if "stamp" in info:
            files.add((info["location"], info["stamp"]))
        elif (contents := contents_at(info.get("location", ""))) is not None:
            contents.name = t.name
            arrays.append(contents)
    return [*(whole(*file) for file in sorted(files)), *arrays]


def with_arrays(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Contents]]:
    """A model that refers to arrays for its large contents, and these; the model itself where nothing is large."""
    large = {t.name for t in model.graph.initializer if _is_large(t)}
    if not large:
        return model, []
    light, arrays = without_fields(model, "graph"), []
    light.graph.CopyFrom(without_fields(model.graph, "initializer"))
    for t in model.graph.initializer:
        if t.name in large:
            dtype = DTYPES[need(dtype_from_onnx(t.data_type))]
            array = np.array(np.frombuffer(t.raw_data, dtype).reshape(tuple(t.dims)))
            arrays.append(Contents(array, t.name))
            light.graph.initializer.append(referring(t, arrays[-1].location, 0, array.nbytes))
        else:
            light.graph.initializer.append(t)
    return light, arrays


def referring(t: onnx.TensorProto, location: str, offset: int, length: int) -> onnx.TensorProto:
    """A tensor of the name and type of another whose contents are at a location."""
    tensor = onnx.TensorProto(name=t.name, data_type=t.data_type, dims=t.dims, doc_string=t.doc_string)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _is_large(t: onnx.TensorProto) -> bool:
    """Whether contents are raw and large; they are not read, as that copies them."""
    name = dtype_from_onnx(t.data_type)
    if name not in DTYPES or name in PACKED or not t.HasField("raw_data"):
        return False
    return math.prod(t.dims) * DTYPES[name].itemsize >= LARGE_BYTES


def stamp_of(path: str | Path) -> str:
    """A text that differs between versions of a file: inode, size and time of modification."""
    status = os.stat(path)
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def _model(raw: Buffer, name: str) -> Iterator[bytes]:
    for number, wire, start, inside, end in _fields(raw, 0, len(raw)):
        if (number, wire) == (_GRAPH, _BYTES):
            yield _message(_GRAPH, b"".join(_graph(raw, inside, end, name)))
        else:
            yield raw[start:end]


def _graph(raw: Buffer, at: int, end: int, name: str) -> Iterator[bytes]:
    since = at  # fields in a row are copied at once
    for number, wire, start, inside, after in _fields(raw, at, end):
        if (number, wire) == (_INITIALIZER, _BYTES) and after - inside >= LARGE_BYTES:
            yield raw[since:start]
            yield _message(_INITIALIZER, _tensor(raw, inside, after, name))
            since = after
    yield raw[since:end]


def _tensor(raw: Buffer, at: int, end: int, name: str) -> bytes:
    """A tensor that refers to the file for its raw data; as it is if these are elsewhere, few, or twice."""
    fields = list(_fields(raw, at, end))
    numbers = [number for number, *_ in fields]
    if numbers.count(_RAW_DATA) != 1 or {_EXTERNAL_DATA, _DATA_LOCATION} & set(numbers):
        return raw[at:end]
    _, wire, start, inside, after = fields[numbers.index(_RAW_DATA)]
    if wire != _BYTES or after - inside < LARGE_BYTES:
        return raw[at:end]
    entries = (("location", name), ("offset", str(inside)), ("length", str(after - inside)))
    external = (
        _message(_EXTERNAL_DATA, _message(1, key.encode()) + _message(2, value.encode())) for key, value in entries
    )
    return b"".join((raw[at:start], raw[after:end], *external, _number(_DATA_LOCATION << 3), _number(1)))


def _fields(raw: Buffer, at: int, end: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(number, wire type, where the field, its value and what follows begin) of a message's fields.

    ValueError for what is no message.
    """
    while at < end:
        start = at
        key, at = _varint(raw, at)
        wire, after = key & 7, at
        if wire == _VARINT:
            _, after = _varint(raw, at)
        elif wire == _BYTES:
            size, at = _varint(raw, at)
            after = at + size
        elif wire in (_FIXED64, _FIXED32):
            after = at + (8 if wire == _FIXED64 else 4)
        else:
            raise ValueError(f"unknown wire type {wire}")
        if after > end:
            raise ValueError("a field is longer than what it is in")
        yield key >> 3, wire, start, at, after
        at = after


def _varint(raw: Buffer, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, and where the next field begins."""
    byte = raw[at]
    number, shift = byte & 127, 7
    while byte & 128:
        at += 1
        byte = raw[at]
        number |= (byte & 127) << shift
        shift += 7
        if shift > 70:
            raise ValueError("a number of more than 64 bits")
    return number, at + 1


def _number(value: int) -> bytes:
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])


def _message(number: int, content: bytes) -> bytes:
    return _head(number, len(content)) + content


def _head(number: int, size: int) -> bytes:
    """The tag and the length before the content of a field of bytes."""
    return _number(number << 3 | _BYTES) + _number(size)
