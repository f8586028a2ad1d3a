"""Updates that store in fewer bits than they compute in (ops/optimizer/storage.py), bit-identical to NumPy.

A part of the elements at a time: state of 8 bits is decoded into float32, a generated loop computes the update, and
kernels round or encode what it has written.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ....language.ir import Operator
from ....language.types import Array, Operands, TensorType
from ....ops.optimizer.base import Update
from ....ops.optimizer.storage import BLOCK, borders, code_book
from ...shared.kernels.random import words
from ...shared.stored_updates import NAMES, expressions, factors, rule_of
from ..device import native
from ..device.jit import kernel
from ..device.native import Call
from ..families import Family, family
from ..loops.kernel import Nest, Operand
from ..providers.loops import converted, row_call

#: elements that are worked on at a time: a multiple of a block, and of a block of the stream
PART = 1 << 15
#: elements of a piece of work
ROWS = 1024
_LOW, _HALF, _NAN = np.uint64(0xFFFF), np.uint32(16), np.uint32(0x40)
_INFINITE, _SIGN = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)


@kernel
def drawing(step, y, seed, first, begin, end):
    """y ← the words of the stream (seed, step) from number `first` on; blocks of four."""
    skipped = first % 4
    for block in range(begin, end):
        w0, w1, w2, w3 = words(block + first // 4, seed, step[0])
        i = block * 4 - skipped
        if i >= 0 and i + 4 <= y.size:
            y[i], y[i + 1], y[i + 2], y[i + 3] = w0, w1, w2, w3
        else:
            for j in range(4):
                if 0 <= i + j < y.size:
                    y[i + j] = w0 if j == 0 else (w1 if j == 1 else (w2 if j == 2 else w3))


@kernel
def rounding(x, y, noise, unscale, shift, begin, end):
    """y ← x, both as bits, rounded with 16 bits of each word of `noise`, `shift` from the lowest.  Nothing where
    `unscale` is 0."""
    if unscale.size and unscale[0] == 0:
        return
    by = np.uint64(shift)
    for i in range(begin * ROWS, min(end * ROWS, x.size)):
        bits = x[i]
        up = (bits + np.uint32(noise[i] >> by & _LOW)) >> _HALF
        nan = bits >> _HALF | _NAN
        y[i] = np.uint16(nan if bits & _SIGN > _INFINITE else up)


@kernel
def decoding(codes, scales, book, y, begin, end):
    """y ← the elements of blocks: codes u8 [blocks, 260], whose last 4 bytes are scales[b, 64]."""
    for b in range(begin, end):
        first, scale = b * 256, scales[b, 64]
        for i in range(min(256, y.size - first)):
            y[first + i] = book[codes[b, i]] * scale


@kernel
def encoding(x, between, codes, scales, unscale, begin, end):
    """codes, scales ← x in blocks of 256, 8 bits each; nothing where `unscale` is 0."""
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
        """Updates with stored state, which no generated loop takes."""
        rule, types = rule_of(op)
        return rule.stores and not native.unavailable() and all(t is None or t.dtype != "f16" for t in types)

    def scratch(self, op: Operator) -> tuple[TensorType, ...]:
        """Words of the stream, and a part in float32 of all that is not stored so."""
        rule, types = rule_of(op)
        w = types[0]
        assert w is not None
        there = sum(types[i] is not None for i in rule.updates[1:])
        size = (min(w.size, PART),)
        noise = (TensorType("u64", size),) if rule.stochastic else ()
        return (*noise, *[TensorType("f32", size)] * (there + (w.dtype != "f32")))

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
    operands: list[Any] = [nothing if x is None else x.reshape(-1) for x in ins]
    operands[0], operands[1] = operands[0][here], operands[1][here]
    to: list[Any] = []
    before: list[Call] = []
    after: list[Call] = []
    halves: list[tuple[int, Array, Array]] = []
    for number, i in enumerate(rule.updates):
        if ins[i] is None:
            continue
        room = operands[i] if number == 0 and types[0] is not None and types[0].dtype == "f32" else rooms.pop()[:n]
        to.append(room)
        if number and rule.eight_bits:
            signs = rule.signs[number - 1]
            rows = ins[i][here.start // BLOCK : -(-here.stop // BLOCK)]
            pair = (rows, rows.view(np.float32))
            before.append(decoding.call(*pair, code_book(signed=signs), room, work=len(rows)))
            after.append(encoding.call(room, borders(signed=signs), *pair, skip, work=len(rows)))
            operands[i] = room
        else:
            operands[i] = operands[i] if number == 0 else operands[i][here]
            if room is not operands[i]:
                halves.append((number, room, operands[i]))
    loop = row_call(_nest(rule, types), (n,), [*operands, *to])
    if not rule.stochastic:  # a parameter in 16 bits with state in 8
        return [*before, loop, *(converted(x, y) for _, x, y in halves), *after]
    noise = rooms[0][:n]
    drawn = _draws(rule, ins[rule.counter_at or 0], noise, here.start)
    return [*before, loop, drawn, *(_rounds(k, x, y, noise, skip) for k, x, y in halves), *after]


def _draws(rule: Update, step: Array, noise: Array, start: int) -> Call:
    """Fills `noise` with the words of the elements from `start` on."""
    first = rule.first + start
    work = -(-(first % 4 + noise.size) // 4)
    return drawing.call(step.reshape(1), noise, np.uint64(rule.seed), first, work=work)


def _rounds(number: int, x: Array, y: Array, noise: Array, skip: Array) -> Call:
    """Rounds state `number` (0: the parameter)."""
    pair = x.view(np.uint32), y.view(np.uint16)
    return rounding.call(*pair, noise, skip, 16 * number, work=-(-x.size // ROWS))
