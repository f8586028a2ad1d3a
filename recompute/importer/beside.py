"""The state of a training step in a file of its own: a safetensors file beside the model, as `save_step` writes it.

Its tensors become initializers when the model is read: they are declared as external data, and mapped like those.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx

from ..errors import ModelError
from ..language.types import DTYPES, PACKED, dtype_to_onnx
from ..support.files import regular

#: the metadata entry of the model that names the file, which lies in the model's folder
STATE_FILE = "recompute.state"
#: element types that have other names in safetensors
_OTHER_NAMES = {"F8_E4M3": "f8e4m3fn", "F8_E8M0": "f8e8m0"}
#: safetensors name → ours
_TYPES = {n.upper().replace("F8E", "F8_E"): n for n in DTYPES if n not in PACKED} | _OTHER_NAMES
#: longest header that is read
_MAX_HEADER = 100_000_000


def in_state_file(dtype: str) -> bool:
    """Whether safetensors has the element type."""
    return dtype not in PACKED


def attach_state(model: onnx.ModelProto, folder: Path | None) -> list[onnx.TensorProto]:
    """Declares the tensors of the state file that the model names as its initializers, removes the entry, and returns
    these tensors, which are still to be checked.

    `folder`: the model's folder.  ModelError if the file is missing or broken, or if the folder is unknown.
    """
    entry = next((p for p in model.metadata_props if p.key == STATE_FILE), None)
    if entry is None:
        return []
    name = entry.value if isinstance(entry.value, str) else repr(entry.value)
    if folder is None:
        raise ModelError(f"the weights of this training step are in '{name}': load it by its path, not as a ModelProto")
    start, header = _header(folder / name, name)
    there = {t.name for t in model.graph.initializer}
    wanted = [i.name for i in model.graph.input if i.name in header and i.name not in there]
    before = len(model.graph.initializer)
    model.graph.initializer.extend(_external(n, header[n], name, start) for n in dict.fromkeys(wanted))
    model.metadata_props.remove(entry)
    return list(model.graph.initializer[before:])


def _header(path: Path, name: str) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and what the file says of its tensors."""
    if Path(name).name != name:
        raise ModelError(f"the state of this training step is outside the model's folder: '{name}' is not read")
    try:
        size = path.stat().st_size
        with open(regular(path), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise ValueError("it is truncated, or no safetensors file")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelError(f"the state of this training step is missing: keep '{name}' beside the model") from None
    except (OSError, ValueError, RecursionError) as e:
        raise ModelError(f"the state of this training step, '{name}', cannot be read: {e}") from None
    if not isinstance(header, dict):
        raise ModelError(f"the state of this training step, '{name}', is no safetensors file")
    return 8 + length, header


def _external(name: str, entry: Any, file: str, start: int) -> onnx.TensorProto:
    """A tensor of the file as external data, which the reader of the model checks like any other."""
    try:
        dtype, shape, (begin, end) = _TYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not all(type(d) is int and 0 <= d < 2**63 for d in (*shape, begin, end)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"'{file}': tensor '{name}' has a damaged entry: {entry!r:.100}") from None
    t = onnx.TensorProto(name=name, data_type=dtype_to_onnx(dtype), dims=shape)
    t.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", file), ("offset", start + begin), ("length", end - begin)):
        t.external_data.add(key=key, value=str(value))
    return t
