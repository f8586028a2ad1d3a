"""Which element types and shapes of columns a program's input takes, and the conversions with their checks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..errors import UsageError
from ..language.types import DTYPES, FLOATS, TensorType, dtype_name
from .base import RAGGED, is_text

#: bits of the significand of the element types to which whole numbers are converted
_EXACT = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8}


def why_no_shape(have: tuple[int, ...], need: tuple[int, ...]) -> str:
    """Why samples of one shape cannot be given for another; "" if they can.

    Axes of size 1 come and go; a flat row is taken in row-major order.
    """
    if RAGGED in have:
        return (
            "its samples have different sizes: a trainer pads them to the next of buckets={'sequence': (64, 128)} "
            "(--buckets sequence=64,128)"
        )
    if _without_ones(have) == _without_ones(need) or (len(have) == 1 and have[0] == math.prod(need)):
        return ""
    if sorted(have) == sorted(need):
        axes = _order(have, need)
        return f"its axes are in another order: rc.data.mapped with x.transpose({', '.join(map(str, (0, *axes)))})"
    if len(have) != len(need):
        return f"a sample has {len(have)} dimensions, not {len(need)}"
    axis = next(i for i, (a, b) in enumerate(zip(have, need, strict=True)) if a != b)
    return f"axis {axis} of a sample has {have[axis]}, not {need[axis]}"


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [d for d in shape if d != 1]


def _order(have: Sequence[int], need: Sequence[int]) -> list[int]:
    """Positions, in an array of samples, of the axes of `have` in the order of `need`."""
    left, order = list(range(len(have))), []
    for d in need:
        at = next(i for i in left if have[i] == d)
        left.remove(at)
        order.append(at + 1)
    return order


def why_no_cast(have: np.dtype, shape: tuple[int, ...], need: TensorType) -> str:
    """Why elements of a column are not converted to an input's type, with a remedy; "" if they are."""
    if have == need.numpy:
        return ""
    if is_text(have):
        return "it is text: make numbers of it by rc.data.Tokenized (words) or rc.data.encoded (classes)"
    if have not in DTYPES.values():
        return f"elements of type {have} are no numbers of a program"
    if have == np.uint8 and need.is_float and len(_without_ones(shape)) >= 2:
        return (
            "bytes of an image are not scaled unasked: rc.data.Pixels makes floats of them (0...1, by mean and "
            "standard deviation)"
        )
    if have.kind == "f" and need.numpy.kind in "iu":
        return f"fractions would be lost: store .astype('{need.numpy}') if its values are whole numbers"
    kinds = have.kind in "biu" or dtype_name(have) in FLOATS, need.numpy.kind in "biu" or need.is_float
    if all(kinds) and not (need.numpy.kind == "b" and have.kind not in "iu"):
        return ""
    return f"store .astype('{need.numpy}')"


def cast(array: np.ndarray, need: TensorType, indices: np.ndarray, what: str) -> np.ndarray:
    """Samples converted to the element type of an input.

    UsageError, with the number of the first such sample, for a value that the type cannot represent.
    """
    have, to = array.dtype, need.numpy
    if have == to:
        return array
    if have.kind in "iu" and array.size:
        low, high = _range_of(to)
        if low > np.iinfo(have).min or high < np.iinfo(have).max:
            _check_range(array, low, high, to, indices, what)
    with np.errstate(over="ignore"):  # infinity, which `check_values` finds
        return array.astype(to)


def _range_of(dtype: np.dtype) -> tuple[int, int]:
    """The whole numbers that a type has, all of them between the two."""
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if dtype.kind == "b":
        return 0, 1
    exact = 1 << _EXACT[dtype_name(dtype)]
    return -exact, exact


def _check_range(array: np.ndarray, low: int, high: int, to: np.dtype, indices: np.ndarray, what: str) -> None:
    smallest, largest = int(array.min()), int(array.max())
    if smallest >= low and largest <= high:
        return
    wrong = (array < low) | (array > high) if array.dtype.kind == "i" else array > high
    row, value = first(wrong, array)
    raise UsageError(
        f"{what} has {value} in sample {indices[row]} (counted from 0), which {to} cannot represent: it has {low:,} to "
        f"{high:,}"
    )


def first(wrong: np.ndarray, array: np.ndarray) -> tuple[int, object]:
    """The row of the first true element, and what the array has there."""
    at = int(np.argmax(wrong))
    return at // max(1, wrong.size // len(wrong)), array.reshape(-1)[at]
