"""Weights that are drawn from their names, so that they need not be stored; used by make.py and the tests."""

from __future__ import annotations

import zlib

import numpy as np
import onnx
from onnx import numpy_helper

_MARK = "drawn"
#: weights have more elements, and more different ones; masks and small tables are stored
_MANY = 24


def strip(model: onnx.ModelProto) -> bytes:
    """A model without contents of weights, texts and metadata."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    for t in found.graph.initializer:
        if t.data_type != onnx.TensorProto.FLOAT or np.prod(t.dims) < _MANY:
            continue
        if len(np.unique(numpy_helper.to_array(t))) >= _MANY:
            t.ClearField("raw_data")
            t.ClearField("float_data")
            t.doc_string = _MARK
    for nodes in (found.graph.node, *(f.node for f in found.functions)):
        for node in nodes:
            del node.metadata_props[:]
            node.doc_string = ""
    del found.graph.value_info[:]
    return found.SerializeToString()


def fill(data: bytes) -> onnx.ModelProto:
    """The model, with weights of the size of fresh ones."""
    model = onnx.ModelProto.FromString(data)
    for t in model.graph.initializer:
        if t.doc_string == _MARK:
            g = np.random.default_rng(zlib.crc32(t.name.encode()))
            size = (3 / max(t.dims[-1], 3)) ** 0.5
            t.raw_data = g.uniform(-size, size, tuple(t.dims)).astype(np.float32).tobytes()
            t.doc_string = ""
    return model
