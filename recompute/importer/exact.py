"""Constants whose bits are the same on every processor: operators that NumPy computes exactly, and rules where it
leaves bits to the processor: the larger of two zeros, numbers that an integer cannot hold, steps of a range."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

from ..language.kernels import EXACT
from ..language.types import DTYPES, FLOATS, dtype_from_onnx, dtype_name

#: element types that NumPy converts like ONNX
PLAIN = {*FLOATS, "bool", *(f"{sign}{bits}" for sign in "iu" for bits in (8, 16, 32, 64))}
#: attributes that rules know: of Cast, and of Clip before opset 11, whose bounds they are
_ATTRIBUTES = {"to", "saturate", "min", "max"}


def is_exact(node: onnx.NodeProto) -> bool:
    """Whether what NumPy computes for a node, where it has no rule, has the same bits everywhere, floats or not."""
    if node.op_type in ("ScatterElements", "ScatterND"):
        return not any(a.name == "reduction" and a.s in (b"max", b"min") for a in node.attribute)
    return node.op_type in EXACT


def converted(x: np.ndarray, to: str) -> np.ndarray:
    """Another plain element type: floats become the nearest integer towards zero that there is, NaN becomes 0."""
    kind = DTYPES[to]
    if kind.kind not in "iu" or x.dtype not in DTYPES.values() or dtype_name(x.dtype).strip("b")[0] != "f":
        with np.errstate(over="ignore"):  # infinity is meant, as in masks of half precision
            return x.astype(kind)
    limits, wide = np.iinfo(kind), np.trunc(x.astype(np.float64))
    low, high = wide < limits.min, wide >= float(limits.max) + 1
    whole = np.where(low | high | np.isnan(wide), 0, wide).astype(kind)
    return np.where(low, kind.type(limits.min), np.where(high, kind.type(limits.max), whole))


def larger(a: np.ndarray, b: np.ndarray, *, smaller: bool = False) -> np.ndarray:
    """The larger (or smaller) of each two, b where they are equal, NaN where one of them is: as kernels have it
    (runtime/cpu/loops)."""
    with np.errstate(invalid="ignore"):  # bfloat16's NaN
        return np.where((a < b if smaller else b < a) | (a != a), a, b)


def by_rule(node: onnx.NodeProto, arrays: Sequence[np.ndarray]) -> tuple[int, Callable[[], Any]] | None:
    """The number of a result's elements and what computes it, for operators with a rule; None for others."""
    options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    name, x = node.op_type, arrays[0]
    if options.keys() - _ATTRIBUTES or (len(arrays) > 1 and not options.keys().isdisjoint(("min", "max"))):
        return None
    if name in ("Max", "Min", "Relu", "Clip"):
        shape = x.shape if name == "Clip" else np.broadcast_shapes(*(a.shape for a in arrays))
        return math.prod(shape), lambda: _bounded(node, arrays, options)
    if name in ("Cast", "CastLike"):
        source, like = (dtype_name(a.dtype) if a.dtype in DTYPES.values() else "" for a in (x, arrays[-1]))
        to = dtype_from_onnx(options.get("to", 0)) if name == "Cast" else like
        plain = to in PLAIN and source in PLAIN
        return (x.size, lambda: converted(x, str(to))) if plain else None
    if name == "Range" and x.dtype in map(DTYPES.get, FLOATS):
        return _ranged(*arrays)
    return None


def _bounded(node: onnx.NodeProto, arrays: Sequence[np.ndarray], options: dict[str, Any]) -> np.ndarray:
    """Max and Min of any number of operands; Relu and Clip, which leave x where it equals a bound."""
    x = arrays[0]
    if node.op_type in ("Max", "Min"):
        for other in arrays[1:]:
            x = larger(x, other, smaller=node.op_type == "Min")
        return x
    rest = iter(arrays[1:])
    bounds = [next(rest) if name else None for name in node.input[1:]]
    if node.op_type == "Relu":
        bounds = [np.zeros((), x.dtype)]
    elif options:  # opset < 11
        bounds = [np.array(options[k], x.dtype) if k in options else None for k in ("min", "max")]
    for i, bound in enumerate(bounds):
        x = x if bound is None else larger(bound.reshape(()), x, smaller=i == 1)
    return x


def _ranged(start: np.ndarray, limit: np.ndarray, step: np.ndarray) -> tuple[int, Callable[[], Any]]:
    """start + i · step, each operation rounded to the element type (to float32 where that has 16 bits)."""
    first, end, each = (a.reshape(()) for a in (start, limit, step))
    with np.errstate(all="ignore"):
        count = max(0, math.ceil((end - first) / each))
    kind = np.result_type(start, np.float32)
    return count, lambda: (first.astype(kind) + np.arange(count).astype(kind) * each.astype(kind)).astype(start.dtype)
