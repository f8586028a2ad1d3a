"""Sketches: rows that are chosen, fast transforms, and products with tiles of S that are drawn as they are needed.

`rows` gives the bits of the operator's own numerics.  The others add in another order, and draw normal numbers by other
functions, so that they differ from them by rounding.  No kind's bits depend on the number of threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ....language.element import Expr
from ....language.ir import Operator
from ....language.types import Operands, TensorType, dtype_name
from ....ops.approximation.drawn import BITS, COLUMNS, blocks
from ....ops.approximation.sketch import Sketch
from ....ops.approximation.transforms import padded
from ...shared.kernels.random import half, words
from ...shared.kernels.sketch import (
    sketch_circle,
    sketch_combine,
    sketch_keys,
    sketch_plus_minus,
    sketch_signs,
    sketch_take,
)
from ...shared.mathematics import fma, log
from ...shared.texts import inline
from ..code import transform as text
from ..device import native
from ..device.jit import call_of, kernel
from ..device.native import Call
from ..families import Family, family, floats
from ..providers import blas
from ..providers.loops import computed
from .recurrent_steps import Products

#: rows and columns of a tile of S, and into how many parts its product is cut, for any number of threads
_ROWS, _COLUMNS, _PARTS = 512, 768, 8
#: values of the upper and of the lower half of a number
_BINS, _HALF = 4096, 12
#: rows of a piece of work
_PIECE = 64
_F = np.float32
_SCALE, _TURNS, _QUARTER = _F(2.0**-24), _F(4), _F(0.25)
_ONE, _ROUND = _F(1), _F(0.5)
#: terms of the Taylor series of sin 2πr and cos 2πr, |r| ≤ ⅛: the first that is left out is below 2⁻²⁷
_S0, _S1, _S2, _S3, _S4 = (_F((-1) ** i * (2 * math.pi) ** (2 * i + 1) / math.factorial(2 * i + 1)) for i in range(5))
_C1, _C2, _C3, _C4 = (_F((-1) ** i * (2 * math.pi) ** (2 * i) / math.factorial(2 * i)) for i in range(1, 5))


@inline
def _bin(hist, wanted):
    """The bin in which the `wanted`-th smallest is, and how many are in those before it."""
    before = 0
    for i in range(hist.size):
        if before + hist[i] >= wanted:
            return i, before
        before += hist[i]
    return hist.size - 1, before


@kernel
def _choose(keys, chosen, hist, begin, end):
    """The numbers of the smallest, ascending; of those that are equal the first ones."""
    for i in range(hist.size):
        hist[i] = 0
    for i in range(keys.size):
        hist[keys[i] >> _HALF] += 1
    high, before = _bin(hist, chosen.size)
    for i in range(hist.size):
        hist[i] = 0
    for i in range(keys.size):
        if keys[i] >> _HALF == high:
            hist[keys[i] & (_BINS - 1)] += 1
    low, less = _bin(hist, chosen.size - before)
    last, ties, at = high * _BINS + low, chosen.size - before - less, 0
    for i in range(keys.size):
        key = keys[i]
        if key < last or (key == last and ties > 0):
            chosen[at] = i
            at += 1
            if key == last:
                ties -= 1


@kernel
def _slots(slots, rows, size, cosines, begin, end):
    """The row of x that each slot of the transform takes; -1: none."""
    for t in range(begin, end):
        row = t
        if cosines:
            row = 2 * t if 2 * t < size else 2 * (size - 1 - t) + 1
        slots[t] = row if row < rows else -1


def _wave64(x):
    angle = x * (2 * math.pi)
    return math.cos(angle), math.sin(angle)


@inline(double=_wave64)
def _wave(x):
    """cos and sin of 2πx, x in [0, 1)."""
    quarter = np.int32(x * _TURNS + _ROUND)
    r = x - np.float32(quarter) * _QUARTER
    q = r * r
    sin = r * fma(fma(fma(fma(_S4, q, _S3), q, _S2), q, _S1), q, _S0)
    cos = fma(fma(fma(fma(_C4, q, _C3), q, _C2), q, _C1), q, _ONE)
    a = sin if quarter & 1 else cos
    b = cos if quarter & 1 else sin
    return -a if (quarter + 1) & 2 else a, -b if quarter & 2 else b


@kernel
def _normal(step, s, seed, panel, row, rows, begin, end):
    """Rows of a tile of S: eight normal numbers from a block, without the scale."""
    t = s.dtype.type
    one, minus_two, scale = t(1), t(-2), t(_SCALE)
    width = s.shape[1]
    for i in range(begin, end):
        line = s[i]
        for p in range(-(-width // 8)):
            draws = words((panel + p) * rows + row + i, seed, step[0])
            first = 8 * p
            for e in range(min(8, width - first)):
                line[first + e] = t(half(draws, e)) * scale
            if width - first < 8 and width % 2:
                last = width - 1
                a, b = _wave(t(half(draws, last - first + 1)) * scale)
                line[last] = t(math.sqrt(minus_two * log(one - line[last]))) * a
        for j in range(width // 2):
            radius = t(math.sqrt(minus_two * log(one - line[2 * j])))
            a, b = _wave(line[2 * j + 1])
            line[2 * j], line[2 * j + 1] = radius * a, radius * b


def _scaled(y: Expr, scale: float) -> tuple[Expr, ...]:
    return (y * scale,)


@family("Sketch")
class Sketches(Family):
    """(x, step) → Sᵀ x."""

    def accepts(self, op: Operator) -> bool:
        """float32 and float64; products where there is a BLAS."""
        rule = op.of(Sketch)
        y = op.outputs[0]
        return floats(op) and bool(y and y.size) and not (rule.kind in COLUMNS and blas.unavailable())

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """A tile of S; or numbers, the chosen ones, counts, and tables and columns of a transform."""
        rule, x = op.op, op.inputs[0]
        assert x is not None
        kind, rows, batch = rule.kind, rule.rows, math.prod(x.shape[:-1])  # type: ignore[attr-defined]
        if kind in COLUMNS:
            return (TensorType(x.dtype, (min(batch, _ROWS) * min(rows, _COLUMNS),)),)
        size = batch if kind == "rows" else padded(batch)
        drawn = (TensorType("i32", (size,)), TensorType("i64", (rows,)), TensorType("i64", (_BINS,)))
        if kind == "rows":
            return drawn
        room = native.threads() * size * text.lanes(x.dtype)
        numbers = [(batch,), (2, size // 2), (rows, 4), (room,)]
        return (
            *drawn,
            TensorType("i64", (size,)),
            TensorType("i64", (rows, 2)),
            *(TensorType(x.dtype, shape) for shape in numbers),
        )

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """Numbers first."""
        rule = op.of(Sketch)
        x, step, y = ins[0].reshape(-1, ins[0].shape[-1]), ins[1].reshape(1), outs[0]
        if rule.kind in COLUMNS:
            return _products(rule, x, step, y, scratch[0])
        keys, chosen, hist = scratch[:3]
        calls = [
            call_of(sketch_keys(step, keys, np.uint64(rule.seed), work=blocks(keys.size))),
            _choose.call(keys, chosen, hist, work=1, parallel=False),
        ]
        if rule.kind == "rows":
            return [*calls, call_of(sketch_take(x, chosen, y, math.sqrt(len(x) / rule.rows), work=rule.rows))]
        return calls + _transformed(rule, x, step, y, scratch)


def _transformed(rule: Any, x: Any, step: Any, y: Any, scratch: Any) -> list[Call]:
    """Tables, then blocks of columns."""
    keys, chosen, _, slots, places, signs, table, factors, room = scratch
    size, cosines = keys.size, int(rule.kind == "dct")
    pieces = room.size // (size * text.lanes("f32" if x.dtype == np.float32 else "f64"))
    operands = (x, y, slots, signs, table, places, factors, room, x.shape[1], size, rule.rows, pieces)
    return [
        _slots.call(slots, len(x), size, cosines, work=size),
        call_of(sketch_signs(step, signs, np.uint64(rule.seed), blocks(size), work=-(-len(x) // (8 * BITS)))),
        call_of(sketch_circle(table, size // 2, work=size // 2)),
        call_of(sketch_combine(chosen, places, factors, size, cosines, math.sqrt(size / rule.rows), work=rule.rows)),
        Call(native.compile_ir(text.transform("f32" if x.dtype == np.float32 else "f64")), operands, pieces),
    ]


def _products(rule: Any, x: Any, step: Any, y: Any, room: Any) -> list[Call]:
    """Tile by tile of S: drawn, then multiplied into its rows of y."""
    todo, width = Products(), COLUMNS[rule.kind]
    seed = np.uint64(rule.seed)
    for column in range(0, rule.rows, _COLUMNS):
        target = y[column : column + _COLUMNS]
        for row in range(0, len(x), _ROWS):
            part = x[row : row + _ROWS]
            s = room[: len(part) * len(target)].reshape(len(part), len(target))
            place, panels = (column // width, row, len(x)), -(-len(target) // width)
            if rule.kind == "gaussian":
                todo.add(_normal.call(step, s, seed, *place, work=len(part)))
            else:
                work = sketch_plus_minus(step, s, seed, *place, work=len(part) * panels, per=panels)
                todo.add(call_of(work))
            todo.add(*blas.strided(s.T, part, target, more=target if row else None, parts=_PARTS))
    todo.add(computed(_scaled, dtype_name(y.dtype), [y], [y], (1 / math.sqrt(rule.rows),)))
    return todo.calls
