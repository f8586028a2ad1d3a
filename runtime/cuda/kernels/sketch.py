"""Sketches: rows that are chosen, a fast transform of radix 2, and products with tiles of S, which cuBLAS multiplies.

16-bit floats are computed in float32.  Rows have the bits of the operator's own numerics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import TensorType, present
from ....ops.approximation.drawn import BITS, COLUMNS, blocks
from ....ops.approximation.sketch import Sketch
from ....ops.approximation.transforms import padded
from ....ops.tiles import wide
from ...shared.kernels.sketch import (
    sketch_circle,
    sketch_combine,
    sketch_keys,
    sketch_plus_minus,
    sketch_signs,
    sketch_take,
)
from ..code import sketch as text
from ..code.python_kernels import call_of
from ..device.kernel import Buffer, Call, Product
from ..families import Buffers, Family, family
from .loops import converted

#: rows and columns of a tile of S
_ROWS, _COLUMNS = 2048, 1536
#: elements that are transformed at a time: 16 MiB of float32
_ROOM = 1 << 22


def _columns(size: int, n: int) -> int:
    """Columns that are transformed at a time."""
    return max(1, min(n, _ROOM // size))


@family("Sketch")
class Sketches(Family):
    """(x, step) → Sᵀ x."""

    def accepts(self, op: Operator) -> bool:
        """All floats that kernels compute with."""
        y = op.outputs[0]
        return bool(y and y.size) and op.op.rows * y.shape[-1] < 1 << 40 and y.dtype in text.FLOATS  # type: ignore

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """A tile of S, for 16-bit floats also of x and y; or what is chosen, tables and columns of a transform."""
        rule = op.of(Sketch)
        x: Any = op.inputs[0]
        n, batch, kind = x.shape[-1], math.prod(x.shape[:-1]), wide(x.dtype)
        if rule.kind in COLUMNS:
            high, across = min(batch, _ROWS), min(rule.rows, _COLUMNS)
            copied = [(high, n), (across, n)] if kind != x.dtype else [(0,), (0,)]
            return tuple(TensorType(kind, s) for s in ((high * across,), *copied))
        size = batch if rule.kind == "rows" else padded(batch)
        drawn = (TensorType("i32", (size,)), TensorType("i64", (rule.rows,)))
        if rule.kind == "rows":
            return drawn
        shapes = ((batch,), (2, size // 4), (rule.rows, 4), (size * _columns(size, n),))
        return (*drawn, TensorType("i64", (rule.rows, 2)), *(TensorType(kind, s) for s in shapes))

    def bind(self, op: Operator, ins: Buffers, outs: Buffers, scratch: Sequence[Buffer]) -> Sequence[Call]:
        """Numbers first."""
        rule = op.of(Sketch)
        x, step, y = present(ins[0], ins[1], outs[0])
        n, batch, step = x.shape[-1], math.prod(x.shape[:-1]), step.reshape(1)
        if rule.kind in COLUMNS:
            return _products(rule, x.reshape(batch, n), step, y, scratch)
        keys, chosen = scratch[:2]
        calls: list[Call] = [
            call_of(sketch_keys(step, keys, np.uint64(rule.seed), work=blocks(keys.size))),
            text.choose().blocks(1, args=(keys, chosen, keys.size, rule.rows)),
        ]
        if rule.kind == "rows":
            scale = math.sqrt(batch / rule.rows)
            taken = sketch_take(x.reshape(batch, n), chosen, y.reshape(-1, n), scale, work=rule.rows, lanes=256)
            return [*calls, call_of(taken)]
        return calls + _transformed(rule, x.reshape(batch, n), step, y, scratch)


def _transformed(rule: Sketch, x: Buffer, step: Buffer, y: Buffer, scratch: Sequence[Buffer]) -> list[Call]:
    """Tables, then some columns at a time, step by step."""
    keys, chosen, places, signs, table, factors, room = scratch
    (batch, n), size, kind = x.shape, keys.size, wide(x.dtype)
    half, cosines, wanted = size // 2, int(rule.kind == "dct"), rule.rows
    work = -(-batch // (8 * BITS))
    calls: list[Call] = [
        call_of(sketch_signs(step, signs, np.uint64(rule.seed), blocks(size), work=work)),
        call_of(sketch_circle(table, half, work=half // 2)),
        call_of(sketch_combine(chosen, places, factors, size, cosines, math.sqrt(size / wanted), work=wanted)),
    ]
    across = _columns(size, n)
    for start in range(0, n, across):
        width = min(across, n - start)
        arguments = (x, signs, room, batch, n, start, width, size, cosines)
        calls.append(text.load(x.dtype)(size * width, *arguments))
        run = half // 2
        while run:
            calls.append(text.butterflies(kind)(half // 2 * width, room, table, half, run, width))
            run //= 2
        args = (room, places, factors, y, wanted, n, start, width, half)
        calls.append(text.save(x.dtype)(wanted * width, *args))
    return calls


def _products(rule: Sketch, x: Buffer, step: Buffer, y: Buffer, scratch: Sequence[Buffer]) -> list[Call]:
    """Tile by tile of S: drawn, then multiplied into its rows of y."""
    room, copied, sums = scratch
    (batch, n), kind = x.shape, wide(x.dtype)
    calls: list[Call] = []
    per, scale = COLUMNS[rule.kind], 1 / math.sqrt(rule.rows)
    for column in range(0, rule.rows, _COLUMNS):
        across = min(_COLUMNS, rule.rows - column)
        target = y.at(column * n, (across, n))
        total = sums.at(0, (across, n)) if sums.size else target
        for row in range(0, batch, _ROWS):
            high = min(_ROWS, batch - row)
            part, s = x.at(row * n, (high, n)), room.at(0, (high * across,))
            place, panels = (column // per, row, batch), -(-across // per)
            if rule.kind == "gaussian":
                drawn: Call = text.normal(kind)(high * panels, step, rule.seed, s, *place, high, across)
            else:
                matrix = s.reshape(high, across)
                tile = sketch_plus_minus(step, matrix, np.uint64(rule.seed), *place, work=high * panels, per=panels)
                drawn = call_of(tile)
            calls.append(drawn)
            if copied.size:
                widened = copied.at(0, (high, n))
                calls += converted(part, widened)
                part = widened
            calls.append(
                Product(s, part, total, across, n, high, across, n, n, ta=True, alpha=scale, beta=float(row > 0))
            )
        if sums.size:
            calls += converted(total, target)
    return calls
