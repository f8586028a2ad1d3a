"""Random draws of sketches: signs, normal numbers, and k of N without replacement, as functions of (seed, step).

`numbers` below are those of the stream (ops/random/philox.py), 24 bits each.  A matrix S of signs or normal numbers is
drawn in panels of COLUMNS columns: row i of panel p takes the eight numbers of block p · B + i.  A number gives 24
signs, lowest bit first (1: +1); two numbers u, v give two normals, √(-2 ln(1 - u)) times cos 2πv and sin 2πv (Box &
Muller 1958).  Of N, those k are taken whose numbers are the least, the first ones where numbers are equal; N numbers
take whole blocks, and the signs of a fast transform's rows follow behind them.
"""

from __future__ import annotations

import math

import numpy as np

from ...language.types import Array
from ..random.philox import stream

#: columns of S that one block of eight numbers makes
COLUMNS = {"gaussian": 8, "rademacher": 192}
#: signs that a number makes
BITS = 24
#: numbers of the stream are multiples of this inverse
UNITS = 1 << BITS
#: elements of small temporaries
_SMALL = 512


def blocks(count: int) -> int:
    """Blocks of the stream that hold so many numbers."""
    return -(-count // 8)


def choose(seed: int, step: Array, keys: Array, copy: Array, chosen: Array) -> None:
    """Fills `chosen` with the numbers of those that are taken of `keys.size`, ascending; `keys`, `copy`: float32."""
    stream(seed, step)(keys)
    copy[...] = keys
    copy.partition(chosen.size - 1)
    last = copy[chosen.size - 1]
    ties = chosen.size
    for start in range(0, keys.size, _SMALL):
        ties -= int(np.count_nonzero(keys[start : start + _SMALL] < last))
    at = 0
    for start in range(0, keys.size, _SMALL):
        part = keys[start : start + _SMALL]
        equal = np.flatnonzero(part == last)[:ties]
        ties -= equal.size
        places = np.sort(np.concatenate([np.flatnonzero(part < last), equal]))
        chosen[at : at + places.size] = places + start
        at += places.size


def bits_of(u: Array) -> Array:
    """[numbers, 24]: the bits of numbers in [0, 1), lowest first."""
    whole = (u * np.float32(UNITS)).astype(np.int32)
    return whole[:, None] >> np.arange(BITS, dtype=np.int32) & 1


def signs(seed: int, step: Array, before: int, out: Array) -> None:
    """Fills `out` with the signs whose numbers follow the blocks of `before` numbers."""
    fill = stream(seed, step, 8 * blocks(before))
    u = np.empty(16, np.float32)
    for start in range(0, out.size, 16 * BITS):
        fill(u)
        part = out[start : start + 16 * BITS]
        part[...] = 2 * bits_of(u).reshape(-1)[: part.size] - 1


def tile(kind: str, seed: int, step: Array, first: tuple[int, int], rows: int, u: Array, out: Array) -> None:
    """Fills `out` [rows of S, columns] from row and column `first` of `rows` rows, without the scale.

    Computed in out's type.  The column is the first one of a panel.  `u`: eight float32 numbers for each row of `out`.
    """
    width = COLUMNS[kind]
    for column in range(0, out.shape[1], width):
        panel = (first[1] + column) // width
        stream(seed, step, 8 * (panel * rows + first[0]))(u)
        there = min(width, out.shape[1] - column)
        make = _normals if kind == "gaussian" else _signs
        for row in range(0, len(out), _SMALL // 8):
            part = out[row : row + _SMALL // 8, column : column + there]
            part[...] = make(u[8 * row : 8 * (row + len(part))].astype(out.dtype))[:, :there]


def _signs(u: Array) -> Array:
    return 2 * bits_of(u).reshape(-1, COLUMNS["rademacher"]) - 1


def _normals(u: Array) -> Array:
    kind = u.dtype.type
    radius = np.sqrt(kind(-2) * np.log(kind(1) - u[0::2]))
    angle = u[1::2] * kind(2 * math.pi)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1, COLUMNS["gaussian"])
