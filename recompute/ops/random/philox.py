"""The random stream: Philox4x64-10 (Salmon et al. 2011), the same numbers for the same (seed, step), anywhere.

Key: (seed, step) as two 64-bit words.  Block number b = 0, 1, ... is the cipher of the counter (b + 1, 0, 0, 0) and
gives four 64-bit words; each word gives two 32-bit halves, the lower one first.  Number i is the upper 24 bits of
half i: u_i = (half_i >> 8) · 2⁻²⁴, exact in float32, 0 ≤ u_i < 1.  So u_i is a pure function of (seed, step, i).

NumPy's own C implementation, `Generator(Philox(key=[seed, step])).random(dtype=float32)`, gives exactly this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...language.contexts import FunctionWriter
from ...language.types import Array

_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_BUMPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10
_LOW = 0xFFFFFFFF
_WORD = 0xFFFFFFFFFFFFFFFF
#: words that NumPy's generator hands out at a time, in an array of its own
_DRAWN = 512


def stream(seed: int, step: Array, first: int = 0) -> Callable[[Any], None]:
    """A function that fills float32 vectors with the next numbers of the stream (seed, step), from number `first` on.

    All but the last of these vectors must have a length that 8 divides.
    """
    key = np.array([seed, int(step) & _WORD], np.uint64)  # a negative step by its bits, as kernels read it
    generator = np.random.Generator(np.random.Philox(key=key, counter=first // 8))
    generator.random(first % 8, dtype=np.float32)
    return lambda out: generator.random(dtype=np.float32, out=out)


def byte_stream(seed: int, step: Array, first: int) -> Callable[[Any], None]:
    """A function that fills vectors of uint8 with the next bytes of the stream (seed, step), from block `first` on.

    A block's 32 bytes are its four words, the lowest byte of each first.  Lengths must be multiples of 32.
    """
    key = np.array([seed, int(step) & _WORD], np.uint64)
    generator = np.random.Philox(key=key, counter=first)

    def fill(out: Array) -> None:
        words = out.view("<u8")
        for start in range(0, words.size, _DRAWN):
            part = words[start : start + _DRAWN]
            part[...] = generator.random_raw(part.size)

    return fill


def words_from(seed: int, step: Array, first: int, count: int) -> Array:
    """`count` words of the stream (seed, step), from word number `first` on: uint64 [count]."""
    key = np.array([seed, int(step) & _WORD], np.uint64)
    generator = np.random.Philox(key=key, counter=first // 4)
    return generator.random_raw(first % 4 + count)[first % 4 :]


def export_numbers(g: FunctionWriter, seed: int, step: str, count: int, start: int = 0) -> str:
    """Writes `count` numbers of the stream, from number `start` on, as ONNX nodes: 24-bit integers (int64 [count])."""
    return _Words(g).shifted(export_halves(g, seed, step, count, start), 8)


def export_halves(g: FunctionWriter, seed: int, step: str, count: int, start: int = 0) -> str:
    """Writes the halves of which numbers are the upper 24 bits as ONNX nodes: integers of 32 bits (int64 [count]).

    Pairs of the cipher's words are computed together: rows (c0, c2) in `e`, (c1, c3) in `o`.  Arithmetic is on int64,
    which wraps around like uint64; only shifts need the unsigned type.
    """
    write = _Words(g)
    blocks = -(-(start % 8 + count) // 8)
    first = np.zeros((2, blocks), np.int64)
    first[0] = np.arange(1, blocks + 1) + start // 8
    e, o = g.array(first), g.array(np.zeros((2, 1), np.int64))
    swapped = g.ints([1, 0])
    seed_only = g.array(_signed([[seed], [0]]))
    step_only = g.call("Mul", step, g.array(np.array([[0], [1]], np.int64)))
    key = g.call("Add", seed_only, step_only)
    for i in range(_ROUNDS):
        high, low = write.wide_product(e)
        bump = g.array(_signed([[_BUMPS[0] * i], [_BUMPS[1] * i]]))
        mixed = g.call("BitwiseXor", g.call("Gather", high, swapped, axis=0), o)
        e = g.call("BitwiseXor", mixed, g.call("Add", key, bump))
        o = g.call("Gather", low, swapped, axis=0)
    rows = [g.call("Unsqueeze", v, g.ints([1])) for v in (e, o)]
    words = g.call("Reshape", g.call("Concat", *rows, axis=1), g.ints([4, 1, blocks]))
    halves = g.call("Concat", write.low(words), write.high(words), axis=1)
    ordered = g.call("Reshape", g.call("Transpose", halves, perm=[2, 0, 1]), g.ints([8 * blocks]))
    if 8 * blocks != count:
        begin = start % 8
        ordered = g.call("Slice", ordered, g.ints([begin]), g.ints([begin + count]), g.ints([0]), g.ints([1]))
    return ordered


def _signed(values: Any) -> np.ndarray:
    """64-bit words as int64."""
    rows = [[v & (1 << 64) - 1 for v in row] for row in values]
    return np.array(rows, np.uint64).view(np.int64)


class _Words:
    """Arithmetic on int64 words in ONNX."""

    def __init__(self, g: FunctionWriter) -> None:
        self.g = g
        halves = [[[m & _LOW] for m in _MULTIPLIERS], [[m >> 32] for m in _MULTIPLIERS]]
        self.low_factor, self.high_factor = (g.array(np.array(h, np.int64)) for h in halves)
        self.factor = g.array(_signed([[m] for m in _MULTIPLIERS]))
        self.mask = g.array(np.array(_LOW, np.int64))

    def shifted(self, x: str, bits: int) -> str:
        """The word shifted right, zeros coming in."""
        g = self.g
        unsigned = g.call("Cast", x, to=_UINT64)
        moved = g.call("BitShift", unsigned, g.array(np.array(bits, np.uint64)), direction="RIGHT")
        return g.call("Cast", moved, to=_INT64)

    def low(self, x: str) -> str:
        """The lower half."""
        return self.g.call("BitwiseAnd", x, self.mask)

    def high(self, x: str) -> str:
        """The upper half."""
        return self.shifted(x, 32)

    def wide_product(self, x: str) -> tuple[str, str]:
        """The upper and lower 64 bits of x times the multipliers, row by row."""
        g = self.g
        low, high = self.low(x), self.high(x)
        carry = self.high(g.call("Mul", low, self.low_factor))
        middle = g.call("Add", g.call("Mul", high, self.low_factor), carry)
        other = g.call("Add", g.call("Mul", low, self.high_factor), self.low(middle))
        upper = g.call("Add", g.call("Mul", high, self.high_factor), self.high(middle))
        return g.call("Add", upper, self.high(other)), g.call("Mul", x, self.factor)


_INT64, _UINT64 = 7, 13
