"""Frozen weights stored in 8 bits: codes and one scale for each output channel, dequantised where they are read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import onnx
from onnx import helper

from ..errors import UsageError
from .graph import Graph, edits
from .lora import chosen
from .weights import Weight, matrices, weight_of

#: nodes by the identity of the one that they come before
Inserted = dict[int, list[onnx.NodeProto]]

__all__ = ["quantize_frozen"]

#: the largest code; -128 is not used, so that the codes are symmetric
_LARGEST = 127


@partial(edits, oldest=13)  # DequantizeLinear by axis
def quantize_frozen(model: Graph, patterns: str | Sequence[str] | None = None) -> None:
    """Stores weights of linear layers as int8 codes with a float scale for each output channel, and freezes them.

    Each weight W becomes DequantizeLinear(codes, scale), codes = round(W / scale), scale = max |W| of a channel / 127:
    an element is off by at most half its scale.  A training step makes the floating-point weight right before each
    product that reads it, forward and backward, and keeps the codes alone.

    `model`: a path, a ModelProto, or a Program from before losses and `minimize`; it stays as it is.  The result is a
    ModelProto, or a Program for a Program.  `patterns`: names or globs of weights (default: all of linear layers).
    Adapters come after it: `rc.lora(rc.quantize_frozen(model), ...)`.  UsageError for weights that are read otherwise.
    """
    weights = _linear(model) if patterns is None else chosen(model, patterns, "quantize_frozen")
    if tables := [w.name for w in weights if w.kind != "linear"]:
        raise UsageError(
            f"'{tables[0]}' is a table that Gather reads: only weights of linear layers are stored in 8 bits"
        )
    readers, makers = model.reading(), model.makers()
    before: Inserted = {}
    frozen = [name for w in weights for name in _store(model, w, readers(w.name), before)]
    model.insert(before)
    nodes = [makers[w.name] for w in weights if w.name in makers]
    gone = set(map(id, nodes))
    model.nodes = [n for n in model.nodes if id(n) not in gone]
    model.remove_tensors({w.name for w in weights})
    model.drop_unread([i for n in nodes for i in n.input])
    model.freeze(frozen)


def _linear(model: Graph) -> list[Weight]:
    """All weights that only linear layers read."""
    layers, readers = [], model.reading()
    for name, (shape, kind) in matrices(model).items():
        try:
            w = weight_of(readers, name, shape, kind)
        except UsageError:
            continue
        if w.kind == "linear" and not w.packed and model.constant(name) is not None:
            layers.append(w)
    if not layers:
        raise UsageError(
            "the model has no linear layers (MatMul or Gemm of a weight) whose weights could be stored in 8 bits"
        )
    return layers


def quantized(array: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes, scales) of a matrix with one scale for each index of an axis.  UsageError for what is not finite."""
    largest = np.abs(array.astype(np.float64)).max(axis=1 - axis)
    if not np.isfinite(largest).all():
        raise UsageError("a weight holds NaN or infinity, which 8 bits cannot store")
    scale = np.where(largest > 0, largest / _LARGEST, 1.0).astype(array.dtype)
    codes = np.rint(array / np.expand_dims(scale, 1 - axis)).clip(-_LARGEST, _LARGEST)
    return codes.astype(np.int8), scale


def _store(
    model: Graph, w: Weight, readers: Sequence[onnx.NodeProto], before: dict[int, list[onnx.NodeProto]]
) -> list[str]:
    """Adds codes and scales of a weight, and to `before` what makes it of them for each of its readers; what of it is
    frozen."""
    if w.onnx_type not in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16):
        raise UsageError(f"'{w.name}' is neither float32 nor float16: DequantizeLinear makes no other weights")
    array = None if w.packed else model.constant(w.name)
    if array is None:
        raise UsageError(f"the contents of '{w.name}' are not in the model, or it is stored in 8 bits or fewer already")
    axis = 0 if w.turned else 1
    try:
        codes, scale = quantized(array, axis)
    except UsageError as e:
        raise UsageError(f"'{w.name}': {e}") from None
    names = model.fresh(f"{w.name}.int8"), model.fresh(f"{w.name}.scale")
    copies = [w.name, *(model.fresh(w.name) for _ in readers[1:])]
    for name, contents in zip(names, (codes, scale), strict=True):
        model.add_tensor(name, contents)
    for value, node in zip(copies, readers, strict=True):
        node.input[:] = [value if i == w.name else i for i in node.input]
        again = helper.make_node("DequantizeLinear", names, [value], name=value, axis=axis)
        before.setdefault(id(node), []).append(again)
    return [w.name, names[1]]
