"""The contents of ONNX tensors."""

from __future__ import annotations

import math

import numpy as np
import onnx

from ..errors import ModelError
from ..language.types import DTYPES, PACKED, dtype_from_onnx, need
from ..support.memory import contents_at
from .mapped import whole


def tensor_array(t: onnx.TensorProto) -> np.ndarray:
    """A tensor's contents; raw bytes are not copied, so that the array is then read-only."""
    if t.data_type == onnx.TensorProto.STRING:
        if min(t.dims, default=0) < 0 or len(t.string_data) != math.prod(t.dims):
            raise ModelError(f"tensor '{t.name}' {list(t.dims)} contains {len(t.string_data)} strings")
        return np.array([s.decode("utf-8", "replace") for s in t.string_data], object).reshape(tuple(t.dims))
    name = need(dtype_from_onnx(t.data_type))
    shape = tuple(t.dims)
    if t.data_location == onnx.TensorProto.EXTERNAL:
        info = {e.key: e.value for e in t.external_data}
        if math.prod(shape) == 0:
            return np.empty(shape, DTYPES[name])
        held = contents_at(info["location"])
        if held is not None:
            return held.array.view(DTYPES[name]).reshape(shape)
        try:
            file = whole(info["location"], info["stamp"]) if "stamp" in info else np.memmap(info["location"], mode="r")
        except (OSError, ValueError) as e:
            raise ModelError(f"tensor '{t.name}' cannot be read from '{info['location']}': {e}") from None
        begin = int(info["offset"])
        raw = file[begin : begin + int(info["length"])]
        if name in PACKED:
            return onnx.numpy_helper.to_array(onnx.TensorProto(data_type=t.data_type, dims=shape, raw_data=bytes(raw)))
        return raw.view(DTYPES[name]).reshape(shape)
    if t.HasField("raw_data") and name not in PACKED:
        return np.frombuffer(t.raw_data, DTYPES[name]).reshape(shape)
    try:
        return onnx.numpy_helper.to_array(t)
    except Exception as e:
        raise ModelError(f"tensor '{t.name}' cannot be read: {e}") from None


def in_type_of(array: np.ndarray, t: onnx.TensorProto) -> np.ndarray:
    """An array, in a tensor's 16 bits where these are kept in float32, or in its float32 where that is kept in 16 bits.

    ModelError where 16 bits do not hold it.
    """
    name = dtype_from_onnx(t.data_type)
    if name == "f32" and array.dtype == DTYPES["bf16"]:
        return array.astype(np.float32)
    if name not in ("f16", "bf16") or array.dtype != np.float32:
        return array
    with np.errstate(over="ignore"):
        found = array.astype(DTYPES[name])
    if np.isfinite(array).all() and not np.isfinite(found.astype(np.float32)).all():
        raise ModelError(f"'{t.name}' has trained to {abs(array).max():.3g}, which the file's {name} does not hold")
    return found
