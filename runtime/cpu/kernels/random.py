"""Random operators: the Philox stream of ops/random, bit-identical, eight numbers at a time, from any position."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ....language.types import Operands
from ....ops.random.draws import Dropout
from ..device.jit import inline, instructions, kernel
from ..device.native import Call
from ..families import Family, enough, family, floats

if TYPE_CHECKING:
    from ....language.ir import Operator
    from ..device.llvm import IRBuilder, Word


@instructions(lambda types, a, b: a)
def upper(builder: IRBuilder, a: Word, b: Word) -> Word:
    """The upper 64 bits of the product of two unsigned words."""
    from llvmlite import ir

    wide = ir.IntType(128)
    return builder.trunc(builder.lshr(builder.mul(builder.zext(a, wide), builder.zext(b, wide)), wide(64)), a.type)


_U = np.uint64
_M0, _M1 = _U(0xD2E7470EE14C6C93), _U(0xCA5A826395121157)
_B0, _B1 = _U(0x9E3779B97F4A7C15), _U(0xBB67AE8584CAA73B)
_ONE, _ZERO, _LOW, _HALF, _EIGHT = _U(1), _U(0), _U(0xFFFFFFFF), _U(32), _U(8)
_SCALE = np.float32(2.0**-24)


@inline
def words(block, seed, step):
    """The four words of a block of the stream (seed, step)."""
    k0, k1 = np.uint64(seed), np.uint64(step)
    c0, c1, c2, c3 = np.uint64(block) + _ONE, _ZERO, _ZERO, _ZERO
    for _ in range(10):
        h0, l0 = upper(c0, _M0), c0 * _M0
        h1, l1 = upper(c2, _M1), c2 * _M1
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0 += _B0
        k1 += _B1
    return c0, c1, c2, c3


@inline
def half(draws, i):
    """24 bits of half `i` of four words."""
    word = draws[0] if i < 2 else (draws[1] if i < 4 else (draws[2] if i < 6 else draws[3]))
    part = word & _LOW if i % 2 == 0 else word >> _HALF
    return np.int64(part >> _EIGHT)


@inline
def _drop(x, y, mask, found, first, count, threshold, factor):
    """Dropout of the first `count` elements of a block; `found`: the block's random words."""
    for i in range(count):
        keep = half(found, i) >= threshold
        y[first + i] = x[first + i] * factor * x.dtype.type(keep)
        if mask.size:
            mask[first + i] = keep


@kernel
def dropout(x, step, y, mask, seed, threshold, scale, skipped, begin, end):
    """y = x · scale where the number is at least the threshold (of 2²⁴), else 0 · x; blocks of eight elements, and
    of numbers, of which the first ones are skipped."""
    factor = x.dtype.type(scale)
    for block in range(begin, end):
        draws = words(block + skipped, seed, step[0])
        first = block * 8
        if first + 8 <= x.size:
            _drop(x, y, mask, draws, first, 8, threshold, factor)
        else:
            _drop(x, y, mask, draws, first, x.size - first, threshold, factor)


@kernel
def uniform(step, y, seed, span, low, skipped, begin, end):
    """low + span · u, in float32."""
    factor, offset = np.float32(span), np.float32(low)
    for block in range(begin, end):
        draws = words(block + skipped, seed, step[0])
        first = block * 8
        for i in range(min(8, y.size - first)):
            y[first + i] = np.float32(half(draws, i)) * _SCALE * factor + offset


@kernel
def bernoulli(p, step, y, seed, skipped, begin, end):
    """Whether u < p."""
    for block in range(begin, end):
        draws = words(block + skipped, seed, step[0])
        first = block * 8
        for i in range(min(8, y.size - first)):
            y[first + i] = np.float32(half(draws, i)) * _SCALE < p[first + i]


def signed(seed: int) -> int:
    """The bits of a seed as a signed word."""
    return int(np.array(seed, np.uint64).astype(np.int64))


@family("Dropout")
class Dropouts(Family):
    """(x, step) → y, mask?"""

    def accepts(self, op: Operator) -> bool:
        """Floats; a slice that begins with a block of the stream."""
        rule = op.of(Dropout)
        return floats(op) and rule.first % 8 == 0

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        rule = op.of(Dropout)
        x, step, y = ins[0].reshape(-1), ins[1].reshape(1), outs[0].reshape(-1)
        mask = np.empty(0, np.bool_) if outs[1] is None else outs[1].reshape(-1)
        threshold = math.ceil(float(np.float32(rule.ratio)) * 2**24)
        arguments = (signed(rule.seed), threshold, 1 / (1 - rule.ratio), rule.first // 8)
        return [dropout.call(x, step, y, mask, *arguments, work=-(-x.size // 8))]


@family("RandomUniform", "Bernoulli")
class Draws(Family):
    """(step) → uniform numbers in float32; (p, step) → zeros and ones."""

    def accepts(self, op: Operator) -> bool:
        """Types that the processor has; a slice that begins with a block of the stream."""
        y, rule = cast(Any, op.outputs[0]), cast(Any, op.op)
        if rule.first % 8:
            return False
        kinds = {v.dtype for v in (*op.reads(), y)}
        if op.op.name == "RandomUniform":
            return y.size >= enough() and y.dtype == "f32"
        return y.size >= enough() and kinds <= {"f32", "f64", "bool", "i32", "i64"}

    def bind(self, op: Operator, ins: Operands, outs: Operands, scratch: Operands) -> list[Call]:
        rule: Any = op.op
        y, seed = outs[0].reshape(-1), signed(rule.seed)
        work = -(-y.size // 8)
        if op.op.name == "RandomUniform":
            arguments = (seed, float(rule.high - rule.low), float(rule.low), rule.first // 8)
            return [uniform.call(ins[0].reshape(1), y, *arguments, work=work)]
        return [bernoulli.call(ins[0].reshape(-1), ins[1].reshape(1), y, seed, rule.first // 8, work=work)]
