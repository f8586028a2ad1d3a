"""Orthonormal transforms of real columns, DCT-II and the real Fourier basis, of which some coefficients are wanted.

P real rows become M = P/2 complex ones (for the DCT in Makhoul's order: even rows, then odd ones backwards; IEEE Trans.
ASSP 28, 1980), whose complex transform Z runs in place, decimated in frequency, so that frequency f ends in the row
whose number is f with its bits reversed.  Coefficient c is then a sum of four: the real and imaginary parts of Z at two
frequencies f and M - f.

The real Fourier basis, in order: the mean, then cosine and sine of 1, 2, ... periods, then the alternating signs.
"""

from __future__ import annotations

import math

import numpy as np

from ...language.types import Array

#: columns that are transformed together
WIDTH = 16
_SMALL = 512


def padded(rows: int) -> int:
    """P: the power of two that is not below `rows`, four at least."""
    return max(4, 1 << (rows - 1).bit_length())


def reversed_bits(f: Array, size: int) -> Array:
    """Numbers below `size`, a power of two, with their bits reversed."""
    bits = np.zeros_like(f)
    for bit in range(size.bit_length() - 1):
        bits = bits << 1 | f >> bit & 1
    return bits


def twiddles(out: Array) -> None:
    """Fills [2, M/2] with cos and sin of 2πt/M."""
    half = out.shape[1]
    for start in range(0, half, _SMALL):
        angle = np.arange(start, min(start + _SMALL, half)) * (math.pi / half)
        out[0, start : start + _SMALL] = np.cos(angle)
        out[1, start : start + _SMALL] = np.sin(angle)


def combinations(kind: str, size: int, chosen: Array, places: Array, factors: Array, scale: float) -> None:
    """Fills, for each of the coefficients `chosen` of `size`, `places` [2, k] and `factors` [4, k] (see the module).

    With V the transform of all P rows: a coefficient is u Re V[f] + v Im V[f]; V[f] = E + exp(-2πif/P) O, where
    E = (Z[f] + conj Z[M-f]) / 2 and O = (Z[f] - conj Z[M-f]) / 2i.
    """
    half = size // 2
    for start in range(0, len(chosen), _SMALL):
        here = slice(start, start + _SMALL)
        c = chosen[here].astype(np.int64)
        norm = np.where(c == 0, 1.0, math.sqrt(2)) * (scale / math.sqrt(size))
        if kind == "dct":
            f, turn = c, c * (math.pi / (2 * size))
            u, v = norm * np.cos(turn), norm * np.sin(turn)
        else:
            f = (c + 1) // 2
            norm[c == size - 1] /= math.sqrt(2)
            sine = (c % 2 == 0) & (c > 0)
            u, v = np.where(sine, 0.0, norm), np.where(sine, -norm, 0.0)
        cos, sin = np.cos(f * (2 * math.pi / size)), np.sin(f * (2 * math.pi / size))
        low = f % half
        places[0, here], places[1, here] = reversed_bits(low, half), reversed_bits((half - low) % half, half)
        factors[0, here], factors[1, here] = (u * (1 - sin) - v * cos) / 2, (u * cos + v * (1 - sin)) / 2
        factors[2, here], factors[3, here] = (u * (1 + sin) + v * cos) / 2, (u * cos - v * (1 + sin)) / 2


def load(kind: str, x: Array, signs: Array, z: Array) -> None:
    """Signed columns x [B, width] as z [2, M, width], in the order of the transform, zeros behind the last row."""
    half = z.shape[1]
    z[...] = 0
    if kind == "dct":
        back = z[:, ::-1]
        parts = [(z[0], 0, 4), (z[1], 2, 4), (back[0], 3, 4), (back[1], 1, 4)]
    else:
        parts = [(z[0], 0, 2), (z[1], 1, 2)]
    for target, first, by in parts:
        source = x[first::by]
        target = target[: min(len(source), half)]
        target[...] = source
        np.multiply(target, signs[first::by, None], out=target)


def transform(z: Array, table: Array, room: Array) -> None:
    """The complex transform of z [2, M, width] in place; `room`: [3, M/2, width]."""
    _, count, width = z.shape
    half = count // 2
    while half:
        re, im = (part.reshape(-1, 2, half, width) for part in z)
        a, b, c = (r.reshape(-1, half, width) for r in room)
        cos, sin = (t[:: count // (2 * half), None] for t in table)
        np.subtract(re[:, 0], re[:, 1], out=a)
        np.subtract(im[:, 0], im[:, 1], out=b)
        np.add(re[:, 0], re[:, 1], out=re[:, 0])
        np.add(im[:, 0], im[:, 1], out=im[:, 0])
        np.multiply(a, cos, out=re[:, 1])
        np.multiply(b, sin, out=c)
        np.add(re[:, 1], c, out=re[:, 1])
        np.multiply(b, cos, out=im[:, 1])
        np.multiply(a, sin, out=c)
        np.subtract(im[:, 1], c, out=im[:, 1])
        half //= 2


def combine(z: Array, places: Array, factors: Array, taken: Array, out: Array) -> None:
    """The wanted coefficients [k, width] of transformed columns into `out`; `taken`: [2, k, width]."""
    term, total = taken
    parts = [(z[i % 2], places[i // 2], factors[i]) for i in range(4)]
    for i, (source, at, factor) in enumerate(parts):
        target = term if i else total
        np.take(source, at, axis=0, out=target, mode="clip")
        np.multiply(target, factor[:, None], out=target)
        if i:
            np.add(total, term, out=total)
    out[...] = total
