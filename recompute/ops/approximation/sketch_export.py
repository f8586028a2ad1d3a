"""Sketch as ONNX nodes: S, or the rows of the transform that are wanted, as a matrix from the stream's bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...language.contexts import FunctionWriter
from ...language.types import DTYPES, dtype_to_onnx
from ..random.philox import export_numbers
from ..tiles import wide
from . import transforms
from .drawn import BITS, COLUMNS, blocks

_FLOAT, _INT64, _UINT64 = 1, 7, 13


def export_sketch(op: Any, g: FunctionWriter, ins: Sequence[str], outs: Sequence[str]) -> None:
    """Writes y = Sᵀ x."""
    x, step = ins
    t = g.type(x)
    n, batch, kind = t.shape[-1], math.prod(t.shape[:-1]), wide(t.dtype)
    if not n:
        g.node("Expand", [g.array(np.zeros((), DTYPES[t.dtype])), g.ints((op.rows, n))], outs)
        return
    flat = g.call("Cast", g.call("Reshape", x, g.ints((batch, n))), to=dtype_to_onnx(kind))
    if op.kind in COLUMNS:
        matrix, scale = _dense(op, g, step, batch, kind), 1 / math.sqrt(op.rows)
        result = g.call("MatMul", matrix, flat)
    elif op.kind == "rows":
        result, scale = g.call("Gather", flat, _chosen(op, g, step, batch), axis=0), math.sqrt(batch / op.rows)
    else:
        result, scale = _transformed(op, g, step, flat, (batch, kind)), 1.0
    scaled = g.call("Mul", result, g.array(np.array(scale, DTYPES[kind])))
    g.node("Cast", [scaled], outs, to=dtype_to_onnx(t.dtype))


def _chosen(op: Any, g: FunctionWriter, step: str, size: int) -> str:
    """The numbers of those that are taken, ascending."""
    numbers = export_numbers(g, op.seed, step, size)
    keys = g.call("Mul", numbers, g.array(np.array(1 << 31)))
    keys = g.call("Add", keys, g.array(np.arange(size, dtype=np.int64)))
    least = _least(g, keys, op.rows)
    return _least(g, g.call("Mod", least, g.array(np.array(1 << 31))), op.rows)


def _least(g: FunctionWriter, values: str, count: int) -> str:
    name, other = g.fresh("least"), g.fresh("at")
    g.node("TopK", [values, g.ints((count,))], [name, other], axis=0, largest=0, sorted=1)
    return name


def _bits(g: FunctionWriter, numbers: str) -> str:
    """Signs, -1 or 1, of numbers along a last axis of one: 24 each, as float32."""
    shifts = g.array(np.arange(BITS, dtype=np.uint64))
    moved = g.call("BitShift", g.call("Cast", numbers, to=_UINT64), shifts, direction="RIGHT")
    bit = g.call("BitwiseAnd", g.call("Cast", moved, to=_INT64), g.array(np.array(1)))
    twice = g.call("Mul", g.call("Cast", bit, to=_FLOAT), g.array(np.array(2, np.float32)))
    return g.call("Sub", twice, g.array(np.array(1, np.float32)))


def _dense(op: Any, g: FunctionWriter, step: str, batch: int, kind: str) -> str:
    """Sᵀ without its scale, in the element type `kind`."""
    width = COLUMNS[op.kind]
    panels = -(-op.rows // width)
    numbers = export_numbers(g, op.seed, step, 8 * panels * batch)
    if op.kind == "rademacher":
        bits = _bits(g, g.call("Reshape", numbers, g.ints((panels, batch, 8, 1))))
        bits = g.call("Cast", bits, to=dtype_to_onnx(kind))
    else:
        t = DTYPES[kind]
        u = g.call("Mul", g.call("Cast", numbers, to=dtype_to_onnx(kind)), g.array(np.array(2.0**-24, t)))
        pairs = g.call("Reshape", u, g.ints((panels, batch, 4, 2)))
        first, second = (g.call("Gather", pairs, g.array(np.array([i])), axis=3) for i in (0, 1))
        log = g.call("Log", g.call("Sub", g.array(np.array(1, t)), first))
        radius = g.call("Sqrt", g.call("Mul", log, g.array(np.array(-2, t))))
        angle = g.call("Mul", second, g.array(np.array(2 * math.pi, t)))
        turned = g.call("Concat", g.call("Cos", angle), g.call("Sin", angle), axis=3)
        bits = g.call("Mul", radius, turned)
    rows = g.call("Reshape", bits, g.ints((panels, batch, width)))
    turned = g.call("Reshape", g.call("Transpose", rows, perm=[0, 2, 1]), g.ints((panels * width, batch)))
    return g.call("Slice", turned, g.ints((0,)), g.ints((op.rows,)), g.ints((0,)), g.ints((1,)))


def _transformed(op: Any, g: FunctionWriter, step: str, x: str, form: tuple[int, str]) -> str:
    """The wanted rows of the transform's matrix times the signed rows of x.

    The angle is an integer number of parts of a circle, so that its cosine is exact.
    """
    batch, kind = form
    size, to = transforms.padded(batch), dtype_to_onnx(kind)
    chosen = g.call("Reshape", _chosen(op, g, step, size), g.ints((op.rows, 1)))
    zero, one, two = (g.array(np.array(i)) for i in range(3))
    if op.kind == "dct":
        parts, odd = 4 * size, g.array((2 * np.arange(batch) + 1)[None])
        around = g.call("Mul", chosen, odd)
        single = g.call("Equal", chosen, zero)
    else:  # sines are cosines a quarter later
        parts = 4 * size
        f = g.call("Div", g.call("Add", chosen, one), two)
        around = g.call("Mul", f, g.array(4 * np.arange(batch)[None]))
        even = g.call("Equal", g.call("Mod", chosen, two), zero)
        sine = g.call("And", even, g.call("Greater", chosen, zero))
        around = g.call("Sub", around, g.call("Mul", g.call("Cast", sine, to=_INT64), g.array(np.array(size))))
        single = g.call("Or", g.call("Equal", chosen, zero), g.call("Equal", chosen, g.array(np.array(size - 1))))
    angle = g.call("Cast", g.call("Mod", around, g.array(np.array(parts))), to=to)
    wave = g.call("Cos", g.call("Mul", angle, g.array(np.array(2 * math.pi / parts, DTYPES[kind]))))
    norms = [g.array(np.array(math.sqrt(i / op.rows), DTYPES[kind])) for i in (1, 2)]
    matrix = g.call("Mul", wave, g.call("Where", single, *norms))
    count = -(-batch // BITS)
    numbers = export_numbers(g, op.seed, step, count, 8 * blocks(size))
    signs = g.call("Reshape", _bits(g, g.call("Reshape", numbers, g.ints((count, 1)))), g.ints((BITS * count, 1)))
    signs = g.call("Slice", signs, g.ints((0,)), g.ints((batch,)), g.ints((0,)), g.ints((1,)))
    return g.call("MatMul", matrix, g.call("Mul", g.call("Cast", signs, to=to), x))
