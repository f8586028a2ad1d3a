"""Random operators: the Philox stream of ops/random, bit-identical; an item is a block of eight numbers.

Elements are drawn in runs: the first of run r is number `start` + r · `skip` of the stream; a row of the work
is the blocks that have all numbers of a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ....language.types import need
from ..families import SharedFamily, family
from ..texts import Work, eight, inline, instructions, kernel, whole_blocks

if TYPE_CHECKING:
    from ....language.ir import Operator
    from ..llvm import IRBuilder, Word


@instructions(
    lambda types, a, b: types.UniTuple(a, 2),
    c="DEVICE auto product(unsigned long long a, unsigned long long b) { return many(__umul64hi(a, b), a * b); }\n",
)
def product(builder: IRBuilder, a: Word, b: Word) -> Word:
    """The upper and the lower 64 bits of the product of two unsigned words."""
    from llvmlite import ir

    wide = ir.IntType(128)
    whole = builder.mul(builder.zext(a, wide), builder.zext(b, wide))
    both = ir.Constant(ir.ArrayType(a.type, 2), ir.Undefined)
    for i, part in enumerate((builder.lshr(whole, wide(64)), whole)):
        both = builder.insert_value(both, builder.trunc(part, a.type), i)
    return both


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
        h0, l0 = product(c0, _M0)
        h1, l1 = product(c2, _M1)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0 += _B0
        k1 += _B1
    return c0, c1, c2, c3


@inline
def one_of(draws, k):
    """Word `k` of four."""
    return draws[0] if k == 0 else (draws[1] if k == 1 else (draws[2] if k == 2 else draws[3]))


@inline
def half(draws, i):
    """24 bits of half `i` of four words."""
    word = draws[0] if i < 2 else (draws[1] if i < 4 else (draws[2] if i < 6 else draws[3]))
    part = word & _LOW if i % 2 == 0 else word >> _HALF
    return np.int32(part >> _EIGHT)


@inline
def _run(row, runs):
    """A run's first block of the stream, the block's first number and the run's, counted from the first of all runs.

    `runs`: numbers of a run, from the first of one to the first of the next, and the first of all in the stream;
    behind them dropout has its threshold.
    """
    first = runs[2] + row * runs[1]
    low = row * runs[0]
    return first >> 3, low - (first & 7), low, low + runs[0]


@inline
def _drop(x, y, mask, draws, first, low, high, threshold, factor):
    """Dropout of some elements of a block."""
    for i in range(low, high):
        keep = half(draws, i) >= threshold
        y[first + i] = x[first + i] * factor
        y[first + i] *= x.dtype.type(keep)
        if mask.size:
            mask[first + i] = keep


@kernel(rows=True)
def dropout(x, step, y, mask, seed, scale, runs, row, begin, end):
    """y = x · scale where the number is at least the threshold, of 2²⁴, else 0 · x."""
    factor, most, time = x.dtype.type(scale), np.int32(runs[3]), step[0]
    first, zero, low, high = _run(row, runs)
    for b in range(begin, end):
        e = zero + b * 8
        draws = words(first + b, seed, time)
        if whole_blocks() or (low <= e and e + 8 <= high):
            _drop(eight(x, e), eight(y, e), eight(mask, e), draws, e, 0, 8, most, factor)
        else:
            _drop(x, y, mask, draws, e, max(0, low - e), min(8, high - e), most, factor)


@inline
def _spread(y, draws, first, low, high, factor, offset):
    """Uniform numbers of a block."""
    for i in range(low, high):
        y[first + i] = np.float32(half(draws, i)) * _SCALE * factor + offset


@kernel(rows=True)
def uniform(step, y, seed, span, least, runs, row, begin, end):
    """least + span · u, in float32."""
    factor, offset, time = np.float32(span), np.float32(least), step[0]
    first, zero, low, high = _run(row, runs)
    for b in range(begin, end):
        e = zero + b * 8
        draws = words(first + b, seed, time)
        if whole_blocks() or (low <= e and e + 8 <= high):
            _spread(eight(y, e), draws, e, 0, 8, factor, offset)
        else:
            _spread(y, draws, e, max(0, low - e), min(8, high - e), factor, offset)


@kernel(rows=True)
def normal(step, y, seed, turn, scale, mean, runs, row, begin, end):
    """mean + scale · √(-2 ln(1 - u)) · cos(2π v), in float32; four elements of a block's eight numbers."""
    turns, factor, offset, time = np.float32(turn), np.float32(scale), np.float32(mean), step[0]
    first, zero, low, high = _run(row, runs)
    for b in range(begin, end):
        e = zero + b * 8
        draws = words(first + b, seed, time)
        for i in range(max(0, low - e), min(8, high - e), 2):
            u, v = np.float32(half(draws, i)) * _SCALE, np.float32(half(draws, i + 1)) * _SCALE
            z = math.sqrt(math.log(np.float32(1) - u) * np.float32(-2)) * math.cos(v * turns)
            y[(e + i) >> 1] = z * factor + offset


@inline
def _below(p, y, draws, first, low, high):
    """Whether the numbers of a block are below p."""
    for i in range(low, high):
        y[first + i] = np.float32(half(draws, i)) * _SCALE < p[first + i]


@kernel(rows=True)
def bernoulli(p, step, y, seed, runs, row, begin, end):
    """Whether u < p."""
    time = step[0]
    first, zero, low, high = _run(row, runs)
    for b in range(begin, end):
        e = zero + b * 8
        draws = words(first + b, seed, time)
        if whole_blocks() or (low <= e and e + 8 <= high):
            _below(eight(p, e), eight(y, e), draws, e, 0, 8)
        else:
            _below(p, y, draws, e, max(0, low - e), min(8, high - e))


@family("Dropout", "DropoutPart", "RandomUniform", "RandomNormal", "Bernoulli")
class Draws(SharedFamily):
    """(x, step) → y, mask?; (step) → y; (p, step) → y."""

    def accepts(self, op: Operator) -> bool:
        """On a processor: types that it has; normal numbers are NumPy's, whose logarithm and cosine have other bits."""
        if self.place.device:
            return super().accepts(op)
        y, name = need(op.outputs[0]), op.op.name
        if name.startswith("Dropout"):
            return super().accepts(op)
        kinds = {v.dtype for v in (*op.reads(), y)}
        types = {"f32", "i64", "u64"} if name == "RandomUniform" else {"f32", "f64", "bool", "i32", "i64"}
        return name != "RandomNormal" and y.size >= self.place.enough() and kinds <= types

    def works(self, op: Operator, ins: Sequence[Any], outs: Sequence[Any], scratch: Sequence[Any]) -> list[Work]:
        """A block of eight numbers an item."""
        rule: Any = op.op
        x, y, seed = ins[0].reshape(-1), outs[0].reshape(-1), np.uint64(rule.seed)
        each = 2 if rule.name == "RandomNormal" else 1
        run, skip, begin = getattr(rule, "run", y.size), getattr(rule, "skip", 0), each * rule.first
        blocks = -(-each * run // 8) + bool(begin % 8 or skip % 8)
        runs = np.array([each * run, skip, begin, math.ceil(float(np.float32(getattr(rule, "ratio", 0))) * 2**24)])
        whole = not any(n % 8 for n in (begin, skip, run))
        how: Any = {"work": y.size // max(run, 1) * blocks, "per": blocks, "whole": whole}
        if rule.name.startswith("Dropout"):
            mask = None if outs[1] is None else outs[1].reshape(-1)
            scale = float(need(op.outputs[0]).type.numpy.type(1 / (1 - rule.ratio)))
            return [dropout(x, ins[1].reshape(-1), y, mask, seed, scale, runs, **how)]
        if rule.name == "RandomUniform":
            return [uniform(x, y, seed, float(rule.high - rule.low), float(rule.low), runs, **how)]
        if rule.name == "RandomNormal":
            return [normal(x, y, seed, 2 * math.pi, float(rule.scale), float(rule.mean), runs, **how)]
        return [bernoulli(x, ins[1].reshape(-1), y, seed, runs, **how)]
