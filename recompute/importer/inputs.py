"""Inputs that are bound to values, and what depends on inputs that are not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from ..errors import UsageError, nearest
from ..language.types import DTYPES, dtype_from_onnx
from .fold import Known
from .state import ImportState


def bind(importer: ImportState, values: Mapping[str, Any]) -> None:
    """Makes inputs known constants: numbers or arrays by name; a single number fills an input of fixed shape.

    UsageError for names that are no inputs, and for values that do not fit the input's type or shape.
    """
    inputs = {i.name: i for i in importer.graph.input if i.name not in importer.initializers}
    for name, value in values.items():
        if name not in inputs:
            raise UsageError(
                f"set: the model has no input '{name}'{nearest(name, inputs)}; it has: {', '.join(inputs)}"
            )
        array = fitted(inputs[name], value)
        importer.budget.take(array.nbytes)
        importer.known[name] = Known(array, "folded")
        importer.initializers[name] = onnx.TensorProto(name=name)  # no input any more


def fitted(declared: onnx.ValueInfoProto, value: Any) -> np.ndarray:
    """A value in the type and shape of an input."""
    name, t = declared.name, declared.type.tensor_type
    dtype = dtype_from_onnx(t.elem_type)
    if dtype is None:
        raise UsageError(f"set: input '{name}' has a type that cannot be bound")
    try:
        given = np.asarray(value)
        array = given.astype(DTYPES[dtype])
    except (TypeError, ValueError):
        raise UsageError(f"set: {value!r} for input '{name}' is no number and no array of numbers") from None
    same = array.astype(np.float64) == given.astype(np.float64)
    close = np.isclose(array.astype(np.float64), given.astype(np.float64), rtol=1e-2)
    if not (close if dtype[0] in "fb" and dtype != "bool" else same).all():
        raise UsageError(f"set: {value!r} for input '{name}' does not fit its type {dtype}")
    dims = [d.dim_value if d.HasField("dim_value") else None for d in t.shape.dim] if t.HasField("shape") else None
    if dims is None:
        return array
    if array.ndim == 0 and all(d is not None for d in dims):
        return np.full(tuple(d or 0 for d in dims), array)
    if len(dims) != array.ndim or any(d not in (None, n) for d, n in zip(dims, array.shape, strict=True)):
        shown = [d.dim_param or "?" if n is None else n for d, n in zip(t.shape.dim, dims, strict=True)]
        raise UsageError(f"set: input '{name}' is {shown} in the model, the value is {list(array.shape)}")
    return array


def inputs_behind(importer: ImportState, name: str) -> list[str]:
    """The inputs that a value is computed from."""
    makers = {v.name: o for o in importer.builder.operators for v in o.writes()}
    inputs = {v.name for v in importer.inputs}
    names: dict[str, None] = {}
    stack, seen = [importer.env[name].name] if name in importer.env else [], set()
    while stack:
        n = stack.pop()
        if n in seen:
            continue
        seen.add(n)
        if n in inputs:
            names[n] = None
        elif n in makers:
            stack += [v.name for v in makers[n].reads()]
    return sorted(names)


def unknown(importer: ImportState, name: str) -> str:
    """How an error goes on about a value whose contents a static program needs."""
    behind = inputs_behind(importer, name)
    if not behind:
        return "is computed from data; a static program needs it known at compile time"
    which = f"input{'s' * (len(behind) > 1)} {', '.join(repr(n) for n in behind)}"
    small = [n for n in behind if importer.env[n].type.size <= _FEW]
    hint = ""
    if len(small) == len(behind):
        bound = ", ".join(f"{n!r}: VALUE" for n in small)
        hint = f": bind it, set={{{bound}}} ({' '.join(f'--set {n}=VALUE' for n in small)})"
    return f"is computed from data ({which}); a static program needs it known at compile time{hint}"


#: inputs of at most this many elements are likely to be settings rather than data
_FEW = 16
