"""Kernels of sketches that are the same everywhere: numbers, signs, rows that are taken, tables of transforms.

See ops/approximation/drawn.py and transforms.py for what they compute.
"""

from __future__ import annotations

import math

from ....ops.approximation.drawn import BITS
from ..texts import inline, kernel, lanes
from .random import half, words


@inline
def _fill(keys, first, count, draws):
    """Some numbers of a block."""
    for i in range(count):
        keys[first + i] = half(draws, i)


@kernel
def sketch_keys(step, keys, seed, begin, end):
    """The number of each of those to choose from; blocks of eight."""
    for block in range(begin, end):
        first, draws = block * 8, words(block, seed, step[0])
        if first + 8 <= keys.size:
            _fill(keys, first, 8, draws)
        else:
            _fill(keys, first, keys.size - first, draws)


@kernel
def sketch_take(x, chosen, y, scale, begin, end):
    """Rows of x, scaled."""
    factor = y.dtype.type(scale)
    for r in range(begin, end):
        source, target = x[chosen[r]], y[r]
        for j in lanes(target.size):
            target[j] = source[j] * factor


@inline
def _signs(line, first, draws):
    """24 signs of each of a block's numbers, from an element on."""
    one = line.dtype.type(1)
    for h in range(8):
        at, number = first + h * BITS, half(draws, h)
        for e in range(min(BITS, line.size - at)):
            line[at + e] = one if (number >> e) & 1 else -one


@kernel
def sketch_signs(step, signs, seed, skipped, begin, end):
    """Signs of rows, in blocks of 192."""
    for block in range(begin, end):
        _signs(signs, block * 8 * BITS, words(block + skipped, seed, step[0]))


@kernel(rows=True)
def sketch_plus_minus(step, s, seed, panel, first, rows, row, begin, end):
    """Rows of a tile of S, which begins with row `first` of `rows`: 192 signs from a block."""
    line = s[row]
    for p in range(begin, end):
        _signs(line, p * 8 * BITS, words((panel + p) * rows + first + row, seed, step[0]))


@kernel
def sketch_circle(table, count, begin, end):
    """cos and sin of 2πt / count."""
    for t in range(begin, end):
        angle = float(t) * (2.0 * math.pi / float(count))
        table[0, t], table[1, t] = math.cos(angle), math.sin(angle)


@inline
def _reversed(f, size):
    """The number with its bits in reverse."""
    bits = 0
    while size > 1:
        bits = (bits << 1) | (f & 1)
        f >>= 1
        size >>= 1
    return bits


@kernel
def sketch_combine(chosen, places, factors, size, cosines, scale, begin, end):
    """Where a coefficient's parts are, and their factors (ops/approximation/transforms.py)."""
    whole = size // 2
    for j in range(begin, end):
        c = chosen[j]
        norm = scale / math.sqrt(float(size))
        if c > 0 and (cosines or c < size - 1):
            norm *= math.sqrt(2.0)
        f, u, v = c, norm, 0.0
        if cosines:
            turn = float(c) * (math.pi / float(2 * size))
            u, v = norm * math.cos(turn), norm * math.sin(turn)
        else:
            f = (c + 1) // 2
            if c > 0 and c % 2 == 0:
                u, v = 0.0, -norm
        angle = float(f) * (2.0 * math.pi / float(size))
        cos, sin = math.cos(angle), math.sin(angle)
        low = f % whole
        places[j, 0] = _reversed(low, whole)
        places[j, 1] = _reversed((whole - low) % whole, whole)
        factors[j, 0] = (u * (1.0 - sin) - v * cos) / 2.0
        factors[j, 1] = (u * cos + v * (1.0 - sin)) / 2.0
        factors[j, 2] = (u * (1.0 + sin) + v * cos) / 2.0
        factors[j, 3] = (u * cos - v * (1.0 + sin)) / 2.0
