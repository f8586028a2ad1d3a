"""Initializers that have the contents of others: copies of tied parameters, which train apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import onnx

from ..errors import ModelError
from .tensors import tensor_array


def copies_of(names: Iterable[str], tensors: Mapping[str, onnx.TensorProto]) -> dict[str, str]:
    """Which of the named matrices is equal to another tensor, or to its transpose; those of equal elements are none.

    Contents are read where shapes and first elements agree.
    """
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, t in tensors.items():
        by_shape.setdefault(tuple(sorted(t.dims)), []).append(name)
    copies: dict[str, str] = {}
    for name in names:
        for other in by_shape[tuple(sorted(tensors[name].dims))]:
            if other != name and other not in copies and _same(tensors[name], tensors[other]):
                copies[name] = other
                break
    return copies


def _same(one: onnx.TensorProto, other: onnx.TensorProto) -> bool:
    try:
        a, b = tensor_array(one), tensor_array(other)
    except ModelError:  # told where it is read
        return False
    if a.ndim != 2 or not a.size or (a[0, 0] == a[-1, -1] and (a == a[0, 0]).all()):
        return False
    forms = [x for x in (b, b.T) if x.shape == a.shape]
    return any(np.array_equal(x[:, :1], a[:, :1]) and np.array_equal(x, a) for x in forms)
