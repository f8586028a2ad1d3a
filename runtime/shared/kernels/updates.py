"""Updates that store in fewer bits than they compute in (ops/optimizer/storage.py), bit-identical to NumPy.

An item is 256 elements, a block of 8-bit state.  Where there are such blocks their largest magnitudes are found first:
states are computed twice, and need no room.  Then elements are updated in fours, which share a block of the stream.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....language.element import argument, constant, nodes
from ....language.formulas import Elements
from ....language.types import TensorType
from ....ops.optimizer.base import Update
from ....ops.optimizer.storage import BLOCK, ROW, borders, code_book
from ..families import SharedFamily, family
from ..mathematics import larger
from ..stack import put, stack, word
from ..texts import Inline, Text, bound, inline, instructions, kernel, lanes, on_processor, written
from .random import one_of, words

if TYPE_CHECKING:
    from ....language.element import Expr
    from ....language.ir import Operator
    from ..llvm import IRBuilder, Word

#: what an update's kernel is made for: its formula, which states there are, whether they have 8 bits, and whether what
#: it stores is rounded stochastically
formula: Any = None
FIRST, SECOND, THIRD, EIGHT, ROUNDS = False, False, False, False, False
#: numbers of codes, and where the nearest one changes: with both signs, without
_BOOKS = np.array([code_book(signed=s) for s in (True, False)])
_BORDERS = np.array([borders(signed=s) for s in (True, False)])
_ZERO, _ONE = np.float32(0), np.float32(1)
_LOW, _UPPER, _LAST = np.uint64(0xFFFF), np.uint64(0xFFFF0000), np.uint64(0xFF)


@instructions(
    lambda types, x: types.uint32 if x == types.float32 else types.float32,
    c="""DEVICE Whole<unsigned> turned(float x) { return Whole<unsigned>(__float_as_uint(x)); }
DEVICE float turned(Whole<unsigned> x) { return __uint_as_float(x.v); }
""",
)
def turned(builder: IRBuilder, x: Word) -> Word:
    """The bits of a float32; and back."""
    from llvmlite import ir

    return builder.bitcast(x, ir.IntType(32) if x.type == ir.FloatType() else ir.FloatType())


@inline(
    c="""template <class X, class I> DEVICE void put_half(X&& x, I i, float v)
{
    x.p[i.v].bits = (unsigned short)(__float_as_uint(v) >> 16 | (v != v) << 6);
}
"""
)
def put_half(x, i, v):
    """Stores a number of bfloat16, or a NaN with its bits."""
    x[i] = v


@inline
def _put(x, i, v, word, number):
    """Stores v as bfloat16, up where its lower bits and those of `word` for state `number` (0: w itself) exceed 16."""
    up = (np.uint64(turned(v)) + ((word >> np.uint64(16 * number)) & _LOW)) & _UPPER
    put_half(x, i, turned(np.uint32(up)) if v == v else v)


@inline
def _magnitude(x, b):
    """A block's magnitude, in its last four bytes."""
    bits = np.uint64(0)
    for j in range(ROW - BLOCK):
        bits |= np.uint64(x[b * ROW + BLOCK + j]) << np.uint64(8 * j)
    return turned(np.uint32(bits))


@inline
def _end(x, b, size, most):
    """Zeros behind a block's last element, and its magnitude."""
    for i in lanes(size, BLOCK):
        x[b * ROW + i] = 0
    bits = np.uint64(turned(most))
    for j in lanes(ROW - BLOCK):
        x[b * ROW + BLOCK + j] = (bits >> np.uint64(8 * j)) & _LAST


@inline
def _old(x, b, i, most, signs):
    """Element i of a state: of block b, whose magnitude is `most`."""
    if EIGHT:
        return _BOOKS[signs, np.int64(x[b * (ROW - BLOCK) + i])] * most
    return np.float32(x[i])


@inline
def _code(x, signs):
    """The number of the nearest entry."""
    code = 0
    for k in range(8):
        half = 128 >> k
        code += 0 if x <= _BORDERS[signs, code + half - 1] else half
    return code


@inline
def _keep(x, b, i, value, most, signs, word, number):
    """Stores element i of a state."""
    if EIGHT:
        x[b * (ROW - BLOCK) + i] = _code(value / most, signs)
    else:
        _put(x, i, value, word, number)


@inline
def _new(w, g, states, b, i, scalars, old):
    """The parameter and the states after the update."""
    x0 = _old(states[0], b, i, old[0], 0) if FIRST else _ZERO
    x1 = _old(states[1], b, i, old[1], 1) if SECOND else _ZERO
    x2 = _old(states[2], b, i, old[2], 1) if THIRD else _ZERO
    return formula(w[i], g[i], x0, x1, x2, scalars)


@inline
def _one(w, g, states, b, i, scalars, most, word):
    """The update of element i; `most`: old magnitudes, then new ones."""
    y, x0, x1, x2 = _new(w, g, states, b, i, scalars, most[0])
    if FIRST:
        _keep(states[0], b, i, x0, most[1][0], 0, word, 1)
    if SECOND:
        _keep(states[1], b, i, x1, most[1][1], 1, word, 2)
    if THIRD:
        _keep(states[2], b, i, x2, most[1][2], 1, word, 3)
    if ROUNDS:
        _put(w, i, y, word, 0)
    else:
        w[i] = y


@inline
def _some(w, g, states, b, e, scalars, most, draws, first, last):
    """The update of elements [e + first, e + last), of four that share a block of the stream."""
    for j in range(first, last):
        _one(w, g, states, b, e + j, scalars, most, one_of(draws, j))


@kernel
def stored_update(w, g, s0, s1, s2, scalars, step, numbers, begin, end):
    """w, s0, s1, s2 ← the update; `numbers`: the stream's seed, and w's first element's number."""
    seed, start = numbers[0], np.int64(numbers[1])
    states, factors = (s0, s1, s2), (scalars[0], scalars[1], scalars[2], scalars[3])
    if scalars[3] == _ZERO:
        return
    for b in range(begin, end):
        low, high = b * BLOCK, min(b * BLOCK + BLOCK, w.size)
        z0 = _magnitude(s0, b) if EIGHT and FIRST else _ONE
        z1 = _magnitude(s1, b) if EIGHT and SECOND else _ONE
        z2 = _magnitude(s2, b) if EIGHT and THIRD else _ONE
        old = (z0, z1, z2)
        y0, y1, y2 = _ZERO, _ZERO, _ZERO
        if EIGHT:
            for i in lanes(low, high):
                _, x0, x1, x2 = _new(w, g, states, b, i, factors, old)
                y0 = larger(y0, abs(x0))
                y1 = larger(y1, abs(x1))
                y2 = larger(y2, abs(x2))
        by = (y0 if y0 != _ZERO else _ONE, y1 if y1 != _ZERO else _ONE, y2 if y2 != _ZERO else _ONE)
        skipped = (start + low) % 4 if ROUNDS else 0
        block, fours = (start + low) // 4, (high - low + skipped + 3) // 4
        done = 0
        if on_processor() and not EIGHT:
            p = stack()
            for q in range(fours):
                w0, w1, w2, w3 = words(block + q, seed, step[0])
                put(p, 4 * q, w0)
                put(p, 4 * q + 1, w1)
                put(p, 4 * q + 2, w2)
                put(p, 4 * q + 3, w3)
            for i in range(low, high):
                _one(w, g, states, b, i, factors, (old, by), word(p, i - low + skipped))
            done = fours
        for q in lanes(done, fours):
            e = low - skipped + 4 * q
            draws = words(block + q, seed, step[0]) if ROUNDS else (seed, seed, seed, seed)
            if low <= e and e + 4 <= high:
                _some(w, g, states, b, e, factors, (old, by), draws, 0, 4)
            else:
                _some(w, g, states, b, e, factors, (old, by), draws, max(0, low - e), min(4, high - e))
        if EIGHT:
            if FIRST:
                _end(s0, b, high - low, y0)
            if SECOND:
                _end(s1, b, high - low, y1)
            if THIRD:
                _end(s2, b, high - low, y2)


#: how functions of elements are written in Python, and the names that the text has
_NAMES = {"np": np, "math": math, "larger": larger}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "eq": "=="}


def _line(x: Expr, names: dict[int, str], args: Sequence[str]) -> str:
    """One function of variables, in Python."""
    match x.fn:
        case "input":
            return names[x.value]
        case "constant":
            return f"np.float32({x.value!r})"
        case "sqrt":
            return f"math.sqrt({args[0]})"
        case "where":
            return f"{args[1]} if {args[0]} else {args[2]}"
        case "max":
            return f"larger({args[0]}, {args[1]})"
    return f"{args[0]} {_INFIX[x.fn]} {args[1]}"


def _formula(op: Update, there: Sequence[bool], *, unscaled: bool) -> Inline:
    """The update of an element in float32: (w, g, x0, x1, x2, scalars) → w, x0, x1, x2, where absent states are 0."""
    names = {0: "w", 1: "g"} | {i: f"x{k}" for k, i in enumerate(op.updates[1:])}
    inputs = [argument(i, "f32") if i in names else None for i in range(op.unscale_at)]
    scalars = [argument(-1 - k, "f32") for k in range(4)]
    names |= {-1 - k: f"scalars[{k}]" for k in range(4)}
    states = [argument(i, "f32") if yes else None for i, yes in zip(op.updates[1:], there, strict=True)]
    inputs += scalars[3:] * unscaled
    roots = op.widened(Elements(), inputs, states, scalars[:3])  # type: ignore[arg-type]
    found: dict[int, str] = {}
    lines: list[str] = []
    for x in nodes([r for r in roots if r is not None]):
        found[id(x)] = f"v{len(found)}"
        lines.append(f"{found[id(x)]} = {_line(x, names, [found[id(a)] for a in x.args])}")
    results = [*("np.float32(0)" if r is None else found[id(r)] for r in roots), *["np.float32(0)"] * 3][:4]
    return inline(written("formula", "w, g, x0, x1, x2, scalars", [*lines, f"return {', '.join(results)}"], _NAMES))


@functools.lru_cache(maxsize=1 << 10)
def _text(op: Update, there: tuple[bool, ...], *, unscaled: bool) -> Text:
    """The kernel of an update; `there`: which states are."""
    given = {"formula": _formula(op, there, unscaled=unscaled), "EIGHT": op.eight_bits, "ROUNDS": op.stochastic}
    given |= dict(zip(("FIRST", "SECOND", "THIRD"), [*there, False, False, False], strict=False))
    return Text(bound(stored_update.function, f"stored_{op.name}", given))


@functools.lru_cache(maxsize=1 << 10)
def _scalars(op: Update, *, unscaled: bool) -> Any:
    """The formula of the scalars of a step, and 1 or `unscale`."""

    def formula(rate: Expr, *others: Expr) -> list[Expr]:
        inputs: list[Any] = [None] * (op.unscale_at + 1)
        inputs[op.rate_at] = rate
        if op.step_at is not None:
            inputs[op.step_at] = others[0]
        values = op.values(Elements(), inputs, "f64")  # type: ignore[arg-type]
        return [*values, *[constant(0.0, "f64")] * (3 - len(values)), others[-1] if unscaled else constant(1.0, "f64")]

    return formula


@family("SGDUpdate", "MomentumUpdate", "AdagradUpdate", "RMSPropUpdate", "AdamUpdate")
class StoredUpdates(SharedFamily):
    """(w, g, ...) → w, state ..., where they are rounded stochastically or have 8 bits."""

    def accepts(self, op: Operator) -> bool:
        """Updates with stored state, which no generated loop takes."""
        return op.of(Update).stores and (self.place.device or all(v.dtype != "f16" for v in op.reads()))

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """The scalars of a step."""
        return (TensorType("f32", (4,)),)

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> Sequence[Any]:
        """The scalars, then 256 elements an item."""
        rule = op.of(Update)
        w, g = (x.reshape(-1) for x in ins[:2])
        same, unscale = dataclasses.replace(rule, seed=0, first=0), rule.unscale(ins)
        given = [ins[rule.rate_at], *([] if rule.step_at is None else [ins[rule.step_at]])]
        given += [] if unscale is None else [unscale]
        scalars = [scratch[0][k : k + 1] for k in range(4)]
        first = self.place.computed(
            _scalars(same, unscaled=unscale is not None), "f64", [x.reshape(1) for x in given], scalars
        )
        states = [None if ins[i] is None else ins[i].reshape(-1) for i in rule.updates[1:]]
        text = _text(same, tuple(s is not None for s in states), unscaled=unscale is not None)
        step = None if rule.counter_at is None else ins[rule.counter_at].reshape(1)
        numbers = np.array([rule.seed, rule.first], np.uint64)
        operands = (w, g, *[*states, None, None, None][:3], scratch[0], step, numbers)
        return [*first, text(*operands, work=-(-w.size // BLOCK), lanes=32)]
