"""Element types, static tensor types, and values: names with types."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import ml_dtypes
import numpy as np

#: an array of NumPy
Array: TypeAlias = np.ndarray
#: those of an operator's inputs or outputs, or its scratch
Operands: TypeAlias = Sequence[Array]


#: short name (as in the text form) → NumPy dtype
DTYPES: dict[str, np.dtype] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "u8": np.dtype(np.uint8),
    "u16": np.dtype(np.uint16),
    "u32": np.dtype(np.uint32),
    "u64": np.dtype(np.uint64),
    "bool": np.dtype(np.bool_),
    # only stored and converted: no gradient flows through them; one byte per element in memory
    "f8e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "f8e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "f8e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "f8e8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "f4e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
    "i4": np.dtype(ml_dtypes.int4),
    "u4": np.dtype(ml_dtypes.uint4),
    "i2": np.dtype(ml_dtypes.int2),
    "u2": np.dtype(ml_dtypes.uint2),
}
#: bits per element of the types that are packed in ONNX files
PACKED = {"f4e2m1": 4, "i4": 4, "u4": 4, "i2": 2, "u2": 2}
FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ITEMSIZE = {name: dtype.itemsize for name, dtype in DTYPES.items()}
# ONNX's TensorProto.DataType numbers
_ONNX = {
    "f32": 1, "u8": 2, "i8": 3, "u16": 4, "i16": 5, "i32": 6, "i64": 7, "bool": 9,
    "f16": 10, "f64": 11, "u32": 12, "u64": 13, "bf16": 16, "f8e4m3fn": 17, "f8e4m3fnuz": 18, "f8e5m2": 19,
    "f8e5m2fnuz": 20, "u4": 21, "i4": 22, "f4e2m1": 23, "f8e8m0": 24, "u2": 25, "i2": 26,
}  # fmt: skip
_FROM_ONNX = {number: name for name, number in _ONNX.items()}
_ONNX["string"] = 8  # known at compile time only: programs do not compute with strings
_TYPE = re.compile(r"^(host )?(\w+)\[([\d,\s]*)\]$")


def dtype_name(dtype: np.dtype | type | str) -> str:
    """The short name of a NumPy dtype (or of a short name).  ValueError for unsupported types."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    name = _NAMES.get(np.dtype(dtype))
    if name is None:
        raise ValueError(f"element type {dtype} is not supported; supported: {', '.join(DTYPES)}")
    return name


def dtype_from_onnx(number: int) -> str | None:
    """The short name of an ONNX TensorProto.DataType number; None for unsupported types."""
    return _FROM_ONNX.get(number)


def show_onnx_dtype(number: int) -> str:
    """A name for any TensorProto.DataType number, for errors: ours, ONNX's, or the number itself."""
    import onnx

    numbers = onnx.TensorProto.DataType.values()
    return _FROM_ONNX.get(number) or (
        onnx.TensorProto.DataType.Name(number) if number in numbers else f"number {number}"
    )


def dtype_to_onnx(name: str) -> int:
    """The ONNX TensorProto.DataType number of a short name."""
    return _ONNX[name]


#: most dimensions of a NumPy array
MAX_DIMENSIONS = 64
#: a value must take fewer bytes than this
MAX_BYTES = 1 << 56


@dataclass(frozen=True, slots=True)
class TensorType:
    """A static type: element type (short name) and shape (dimensions ≥ 0, at most MAX_DIMENSIONS in a program).

    `host`: the value is in host memory; only copies read and write it (ops/memory/offload.py).
    """

    dtype: str
    shape: tuple[int, ...] = ()
    host: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense, row-major buffer."""
        return self.size * _ITEMSIZE[self.dtype]

    @property
    def numpy(self) -> np.dtype:
        """The NumPy dtype of the elements."""
        return DTYPES[self.dtype]

    @property
    def is_float(self) -> bool:
        """Whether a gradient can flow through values of this type."""
        return self.dtype in FLOATS

    def with_shape(self, shape: tuple[int, ...] | list[int]) -> TensorType:
        """The same element type with another shape."""
        return TensorType(self.dtype, tuple(int(d) for d in shape), self.host)

    def with_dtype(self, dtype: str) -> TensorType:
        """The same shape with another element type."""
        return TensorType(dtype, self.shape, self.host)

    def __str__(self) -> str:
        return f"{'host ' * self.host}{self.dtype}[{','.join(map(str, self.shape))}]"

    def placed(self, *, host: bool) -> TensorType:
        """The same type in host memory, or on the device."""
        return TensorType(self.dtype, self.shape, host)

    def impossible(self) -> str:
        """Why no program can have a value of this type; "" if it can.

        An empty one must not be too large in its other dimensions: NumPy multiplies them.
        """
        if len(self.shape) > MAX_DIMENSIONS:
            return f"has {len(self.shape)} dimensions, {MAX_DIMENSIONS} are possible"
        nbytes = math.prod(self.shape) * _ITEMSIZE[self.dtype] or math.prod(d for d in self.shape if d)
        if 0 < nbytes < MAX_BYTES and min(self.shape, default=0) >= 0:
            return ""
        if min(self.shape, default=0) < 0:
            return "has a negative dimension"
        return f"is {self}: {nbytes:,} bytes are more than any machine has"

    @staticmethod
    def parse(text: str) -> TensorType:
        """Parses `f32[2,3]` or `host f32[2,3]`.  ValueError for other texts."""
        match = _TYPE.match(text)
        if not match or match[2] not in DTYPES:
            raise ValueError(f"'{text}' is not a tensor type (expected e.g. f32[2,3])")
        return TensorType(match[2], tuple(int(d) for d in match[3].split(",") if d.strip()), bool(match[1]))

    @staticmethod
    def of(array: np.ndarray) -> TensorType:
        """The type of a NumPy array."""
        return TensorType(dtype_name(array.dtype), tuple(array.shape))


class Typed:
    """An object with a type, such as a value."""

    __slots__ = ()
    type: TensorType

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions."""
        return self.type.shape

    @property
    def dtype(self) -> str:
        """Short name of the element type."""
        return self.type.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.type.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.type.size

    @property
    def nbytes(self) -> int:
        """Bytes of its buffer."""
        return self.type.nbytes


@dataclass(frozen=True, slots=True)
class Value(Typed):
    """A name with a type.  Within a block a name denotes one value."""

    name: str
    type: TensorType

    def renamed(self, name: str) -> Value:
        """The same type under another name."""
        return Value(name, self.type)


#: types and values of an operator's inputs or outputs, None where an optional one is absent
Types: TypeAlias = Sequence[TensorType | None]
Values: TypeAlias = Sequence[Value | None]

T = TypeVar("T")


def need(x: T | None) -> T:
    """x, which the rule of its operator says is present."""
    assert x is not None
    return x


def present(*given: T | None) -> tuple[T, ...]:
    """These, none of which is absent."""
    return tuple(map(need, given))
