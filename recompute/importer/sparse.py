"""Sparse initializers, written out as dense ones before anything else looks at the model."""

from __future__ import annotations

import math

import numpy as np
import onnx

from ..errors import ModelError
from ..language.types import DTYPES, PACKED, dtype_from_onnx, show_onnx_dtype
from .graphs import all_graphs
from .limits import Budget
from .tensors import tensor_array


def without_sparse(model: onnx.ModelProto, budget: Budget) -> onnx.ModelProto:
    """The model, or a copy whose sparse initializers are dense; their bytes are charged to `budget`.

    ModelError for one of another element type, with external data, or with places outside of it.
    """
    if not any(g.sparse_initializer for g in all_graphs(model)):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for graph in all_graphs(copy):
        graph.initializer.extend(_dense(s, budget) for s in graph.sparse_initializer)
        del graph.sparse_initializer[:]
    return copy


def _dense(sparse: onnx.SparseTensorProto, budget: Budget) -> onnx.TensorProto:
    """One sparse tensor with its zeros."""
    values, shape = sparse.values, tuple(sparse.dims)
    what = f"sparse initializer '{values.name}'"
    kind = dtype_from_onnx(values.data_type)
    if kind is None or kind in PACKED:
        raise ModelError(f"{what} has element type {show_onnx_dtype(values.data_type)}, which is not supported")
    if onnx.TensorProto.EXTERNAL in (values.data_location, sparse.indices.data_location):
        raise ModelError(f"{what} is stored in another file, which is not supported: store it in the model itself")
    size = math.prod(shape)
    if min(shape, default=1) < 0 or size * DTYPES[kind].itemsize > budget.tensor_bytes:
        raise ModelError(f"{what} has shape {list(shape)}; the limit is {budget.tensor_bytes:,} bytes (max_bytes=)")
    budget.take(size * DTYPES[kind].itemsize)
    try:
        kept, places = tensor_array(values).reshape(-1), tensor_array(sparse.indices).astype(np.int64)
        if places.ndim == 2:
            places = np.ravel_multi_index(tuple(places.T), shape)
        if places.shape != kept.shape or (places < 0).any():
            raise ValueError
        array = np.zeros(size, DTYPES[kind])
        array[places] = kept
    except (ValueError, IndexError, TypeError):
        raise ModelError(f"{what} {list(shape)}: its {len(values.dims)}-d values and its indices do not fit") from None
    return onnx.TensorProto(name=values.name, data_type=values.data_type, dims=shape, raw_data=array.tobytes())
