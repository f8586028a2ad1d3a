"""Updates that store in fewer bits than they compute in (ops/optimizer/storage.py), bit-identical to NumPy.

A part of the elements at a time: state of 8 bits is decoded into float32, a generated loop computes the update, and
kernels round or encode what it has written.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....language.element import argument, cast
from ....language.types import Array, Operands, TensorType, dtype_name
from ....ops.optimizer.base import Update
from ....ops.optimizer.storage import BLOCK, borders, code_book
from ...shared.stored_updates import NAMES, expressions, factors, rule_of
from ..device import native
from ..device.jit import inline, kernel
from ..device.native import Call
from ..families import Family, family
from ..loops.kernel import Nest, Operand
from ..providers.loops import row_call
from .random import signed, words

if TYPE_CHECKING:
    from ....language.ir import Operator

#: elements that are worked on at a time: a multiple of a block, and of a block of the stream
PART = 1 << 16
_LOW, _NAN, _INFINITE, _SIGN = np.uint64(0xFFFF), np.uint64(0x40), np.uint64(0x7F800000), np.uint64(0x7FFFFFFF)
_HALF, _TWO, _THREE = np.uint64(16), np.uint64(32), np.uint64(48)


@inline
def _round(x, y, i, noise):
    """Element i of float32 bits as bfloat16 bits."""
    bits = np.uint64(x[i])
    up = (bits + (noise & _LOW)) >> _HALF
    if bits & _SIGN > _INFINITE:
        up = bits >> _HALF | _NAN
    y[i] = np.uint16(up)


@kernel
def rounding(x0, x1, x2, x3, y0, y1, y2, y3, step, unscale, seed, first, begin, end):
    """y ← x rounded with the words of the stream from number `first` on; operands without elements are absent.
    Nothing where `unscale` is 0."""
    if unscale.size and unscale[0] == 0:
        return
    skipped = first % 4
    for block in range(begin, end):
        found = words(block + first // 4, seed, step[0])
        for j in range(4):
            i = block * 4 + j - skipped
            if 0 <= i < x0.size:
                word = found[0] if j == 0 else (found[1] if j == 1 else (found[2] if j == 2 else found[3]))
                _round(x0, y0, i, word)
                if x1.size:
                    _round(x1, y1, i, word >> _HALF)
                if x2.size:
                    _round(x2, y2, i, word >> _TWO)
                if x3.size:
                    _round(x3, y3, i, word >> _THREE)


@kernel
def decoding(codes, scales, book, y, begin, end):
    """y ← the elements of blocks: codes u8 [blocks, 260], whose last 4 bytes are scales[b, 64]."""
    for b in range(begin, end):
        first, scale = b * 256, scales[b, 64]
        for i in range(min(256, y.size - first)):
            y[first + i] = book[codes[b, i]] * scale


@kernel
def encoding(x, between, codes, scales, unscale, begin, end):
    """The same back; nothing where `unscale` is 0."""
    if unscale.size and unscale[0] == 0:
        return
    for b in range(begin, end):
        first = b * 256
        size = min(256, x.size - first)
        most = abs(x[first])
        for i in range(1, size):
            a = abs(x[first + i])
            if a > most or a != a:
                most = a
        by = most if most != 0 else np.float32(1)
        for i in range(size):
            v = x[first + i] / by
            code = 0
            half = 128
            while half:
                if not v <= between[code + half - 1]:
                    code += half
                half >>= 1
            codes[b, i] = code
        for i in range(size, 256):
            codes[b, i] = 0
        scales[b, 64] = most


@functools.lru_cache(maxsize=1 << 10)
def _nest(op: Update, types: tuple[TensorType | None, ...]) -> Nest:
    roots = tuple(x for x in expressions(op, types, factors(op, types)) if x is not None)
    state = set(op.updates[1:])
    operands = tuple(
        Operand("f32", (), False)
        if t is None
        else Operand("f32" if op.eight_bits and i in state else t.dtype, (), i < 2 or i in state)
        for i, t in enumerate(types)
    )
    return Nest(0, operands, roots)


@family(*NAMES)
class StoredUpdates(Family):
    """(w, g, ...) → w, state ..., where they are rounded stochastically or have 8 bits."""

    def accepts(self, op: Operator) -> bool:
        """What no generated loop takes."""
        rule, types = rule_of(op)
        return rule.stores and not native.unavailable() and all(t is None or t.dtype != "f16" for t in types)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """A part in float32 of all that is not stored so."""
        rule, types = rule_of(op)
        w = types[0]
        assert w is not None
        there = sum(types[i] is not None for i in rule.updates[1:])
        return (TensorType("f32", (min(w.size, PART),)),) * (there + (w.dtype != "f32"))

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        """Part by part: decode, compute, round and encode."""
        rule, types = rule_of(op)
        calls: list[Call] = []
        for start in range(0, ins[0].size, PART):
            here = slice(start, min(start + PART, ins[0].size))
            calls += _part(rule, types, list(ins[: len(types)]), here, list(scratch))
        return calls


def _part(
    rule: Update, types: tuple[TensorType | None, ...], ins: list[Any], here: slice, rooms: list[Array]
) -> list[Call]:
    """The calls for the elements `here`."""
    n, unscale = here.stop - here.start, rule.unscale(ins)
    nothing, skip = np.empty(0, np.float32), np.empty(0, np.float32) if unscale is None else unscale.reshape(1)
    given: list[Any] = [nothing if x is None else x.reshape(-1) for x in ins]
    given[0], given[1] = given[0][here], given[1][here]
    to: list[Any] = []
    before: list[Call] = []
    after: list[Call] = []
    halves: list[tuple[int, Array, Array]] = []
    for number, i in enumerate(rule.updates):
        if ins[i] is None:
            continue
        room = given[i] if number == 0 and types[0] is not None and types[0].dtype == "f32" else rooms.pop()[:n]
        to.append(room)
        if number and rule.eight_bits:
            signs = rule.signs[number - 1]
            rows = ins[i][here.start // BLOCK : -(-here.stop // BLOCK)]
            pair = (rows, rows.view(np.float32))
            before.append(decoding.call(*pair, code_book(signed=signs), room, work=len(rows)))
            after.append(encoding.call(room, borders(signed=signs), *pair, skip, work=len(rows)))
            given[i] = room
        else:
            given[i] = given[i] if number == 0 else given[i][here]
            if room is not given[i]:
                halves.append((number, room, given[i]))
    loop = row_call(_nest(rule, types), (n,), [*given, *to])
    return [*before, loop, *_rounds(rule, halves, ins, skip, here), *after]


def _rounds(
    rule: Update, halves: Sequence[tuple[int, Array, Array]], ins: Sequence[Any], skip: Array, here: slice
) -> list[Call]:
    """What writes float32 as 16 bits."""
    if not halves:
        return []
    if not rule.stochastic:  # a parameter in 16 bits with state in 8
        return [_nearest(x, y) for _, x, y in halves]
    nothing = np.empty(0, np.uint32), np.empty(0, np.uint16)
    pairs = [nothing] * 4
    for number, x, y in halves:
        pairs[number] = x.view(np.uint32), y.view(np.uint16)
    first = rule.first + here.start
    work = -(-(first % 4 + here.stop - here.start) // 4)
    given = (*(x for x, _ in pairs), *(y for _, y in pairs))
    step = ins[rule.counter_at or 0].reshape(1)
    return [rounding.call(*given, step, skip, signed(rule.seed), first, work=work)]


def _nearest(x: Array, y: Array) -> Call:
    nest = Nest(0, (Operand("f32", (), True),), (cast(argument(0, "f32"), dtype_name(y.dtype)),))
    return row_call(nest, (x.size,), (x, y))
