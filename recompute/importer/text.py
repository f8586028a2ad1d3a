"""Evaluation of operators on strings, with a check of the result size in advance.

ONNX's evaluator pads every string of an array to the longest one and leaves regular expressions to Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from ..errors import ModelError
from ..support.patterns import regular_expression
from .limits import PYTHON, Budget

#: bytes of a Python string in addition to its characters, and of its reference in an array
_HEAD = 64


def evaluate_text(node: onnx.NodeProto, arrays: list[np.ndarray], budget: Budget) -> list[np.ndarray] | None:
    """The results of StringConcat, StringSplit and RegexFullMatch; None for other nodes.

    ModelError for invalid inputs, LimitError if the results would be too large.
    """
    function = {"StringConcat": _concat, "StringSplit": _split, "RegexFullMatch": _match}.get(node.op_type)
    if function is None or node.domain not in ("", "ai.onnx"):
        return None
    for a in arrays:
        if a.dtype.kind not in "OUST":
            raise ModelError(f"{node.op_type} takes strings, not {a.dtype}")
    options = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return function(arrays, options, budget)


def _size(text: str) -> int:
    return _HEAD + len(text) * (1 if text.isascii() else 4)


def _decoded(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _concat(arrays: list[np.ndarray], options: dict[str, Any], budget: Budget) -> list[np.ndarray]:
    shape = np.broadcast_shapes(*(a.shape for a in arrays))
    size = int(np.prod(shape, dtype=object)) if shape else 1
    budget.spend(2 * PYTHON * size, "joining strings")
    x, y = (np.broadcast_to(a, shape).reshape(-1).tolist() for a in arrays)
    budget.take(sum(_size(a) + _size(b) for a, b in zip(x, y, strict=True)))
    return [_texts([a + b for a, b in zip(x, y, strict=True)], shape)]


def _split(arrays: list[np.ndarray], options: dict[str, Any], budget: Budget) -> list[np.ndarray]:
    (x,) = arrays
    texts = x.reshape(-1).tolist()
    by, most = _decoded(options.get("delimiter", b"")) or None, int(options.get("maxsplit", -1))
    budget.spend(sum(PYTHON + len(t) for t in texts), "splitting strings")
    bounds = [len(t) // 2 + 1 if by is None else t.count(by) + 1 for t in texts]
    if most >= 0:
        bounds = [min(b, most + 1) for b in bounds]
    budget.take(sum(_size(t) + _HEAD * b for t, b in zip(texts, bounds, strict=True)))
    parts = [t.split(by, most) for t in texts]
    longest = max(map(len, parts), default=0)
    budget.take(8 * longest * len(parts))
    budget.spend(10 * longest * len(parts), "splitting strings")
    rows = [p + [""] * (longest - len(p)) for p in parts]
    return [
        _texts([t for row in rows for t in row], (*x.shape, longest)),
        np.array([len(p) for p in parts], np.int64).reshape(x.shape),
    ]


def _match(arrays: list[np.ndarray], options: dict[str, Any], budget: Budget) -> list[np.ndarray]:
    (x,) = arrays
    pattern = _decoded(options.get("pattern", b""))
    budget.spend(PYTHON * len(pattern), "reading a regular expression")
    compiled = regular_expression(pattern)
    texts = x.reshape(-1).tolist()
    work = sum(PYTHON + 10 * len(t) * compiled.programsize for t in texts)
    budget.spend(work, "matching a regular expression")
    return [np.array([compiled.fullmatch(t) is not None for t in texts], np.bool_).reshape(x.shape)]


def _texts(listed: list[str], shape: tuple[int, ...]) -> np.ndarray:
    array = np.empty(len(listed), object)
    array[:] = listed
    return array.reshape(shape)
