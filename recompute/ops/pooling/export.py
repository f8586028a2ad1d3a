"""Max pooling's window numbers and gradients as plain ONNX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...language.contexts import FunctionWriter
from ...language.types import dtype_to_onnx
from ..window import Window


def _starts(w: Window, axis: int) -> np.ndarray:
    """First input index of each window along an axis, shaped to broadcast over positions."""
    place = tuple(-1 if i == axis else 1 for i in range(len(w.out)))
    return (np.arange(w.out[axis], dtype=np.int64) * w.strides[axis] - w.begin[axis]).reshape(place)


def export_max_window(op: Any, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> None:
    """MaxPool with indices; number along an axis = (index along it - first of the window) / dilation."""
    number = outs[2]
    indices = outs[1] or g.fresh("indices")
    g.node("MaxPool", ins, [outs[0], indices], **op.options())
    w = op.window(g.shape(ins[0])[2:], op.infer(g.type(ins[0]))[0].shape[2:])
    total = ""
    step, inner = 1, 1
    for a in reversed(range(len(w.out))):
        at = g.call("Mod", g.call("Div", indices, g.ints([step])), g.ints([w.inp[a]]))
        along = g.call("Div", g.call("Sub", at, g.array(_starts(w, a))), g.ints([w.dilations[a]]))
        term = g.call("Mul", along, g.ints([inner]))
        total = term if not total else g.call("Add", total, term)
        step *= w.inp[a]
        inner *= w.kernel[a]
    g.node("Cast", [total], [number], to=dtype_to_onnx(op.infer(g.type(ins[0]))[2].dtype))


def _flat_indices(g: Any, w: Window, number: str) -> str:
    """Index within its plane of the element that each window number names: i64 [n, c, positions]."""
    shape = g.shape(number)
    wide = g.call("Cast", number, to=dtype_to_onnx("i64"))
    total = ""
    step, inner = 1, 1
    for a in reversed(range(len(w.out))):
        along = g.call("Mod", g.call("Div", wide, g.ints([inner])), g.ints([w.kernel[a]]))
        at = g.call("Add", g.call("Mul", along, g.ints([w.dilations[a]])), g.array(_starts(w, a)))
        term = g.call("Mul", at, g.ints([step]))
        total = term if not total else g.call("Add", total, term)
        step *= w.inp[a]
        inner *= w.kernel[a]
    return g.call("Reshape", total, g.ints((*shape[:2], math.prod(shape[2:]))))


def export_max_grad(op: Any, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> None:
    """Adds dy at the maxima into planes of zeros."""
    number, dy = ins
    shape = g.shape(dy)
    w = op.window(op.shape, shape[2:])
    flat = (*shape[:2], math.prod(op.shape))
    zeros = g.call("Expand", g.zero(dy), g.ints(flat))
    rows = g.call("Reshape", dy, g.ints((*shape[:2], math.prod(shape[2:]))))
    summed = g.call("ScatterElements", zeros, _flat_indices(g, w, number), rows, axis=2, reduction="add")
    g.node("Reshape", [summed, g.ints((*shape[:2], *op.shape))], outs)


def export_max_gather(op: Any, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> None:
    """Takes the elements at the maxima from flat planes."""
    number, x = ins
    shape, out = g.shape(x), g.shape(number)
    w = op.window(shape[2:], out[2:])
    flat = g.call("Reshape", x, g.ints((*shape[:2], math.prod(shape[2:]))))
    taken = g.call("GatherElements", flat, _flat_indices(g, w, number), axis=2)
    g.node("Reshape", [taken, g.ints(out)], outs)
