"""Random numbers that weights begin with: the same bits on every machine where those are asked for."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np

from .kernels import bits_are_portable

#: numbers drawn at a time
_PART = 1 << 20


def generator(seed: int, name: str) -> np.random.Generator:
    """Draws that depend on a seed and a tensor's name only."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, zlib.crc32(name.encode())], np.uint64)))


def uniform(g: np.random.Generator, limit: float, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in ±limit, float64; a product and a sum, each rounded, where a compiler of NumPy may have fused them."""
    return g.random(shape) * (2 * limit) - limit


def normal(g: np.random.Generator, shape: tuple[int, ...], kind: Any = np.float64) -> np.ndarray:
    """Normal numbers of variance 1, float64 or float32: NumPy's, which call a C library's exp and log; with portable
    bits (docs/portable.md) other ones, by Box & Muller 1958 with the series of ln (2 artanh) and cos."""
    if not bits_are_portable():
        return g.standard_normal(shape, kind)
    total = np.empty(math.prod(shape), kind)
    for i in range(0, total.size, _PART):
        part = total[i : i + _PART]
        m, e = np.frexp(1 - g.random(part.size))
        t = (m - 1) / (m + 1)
        w = 4 * g.random(part.size) - 2
        angle = (np.abs(w) - 1) * (math.pi / 2)
        log = _series(t * t, [2 / (2 * k + 1) for k in range(25)]) * t + e * 0.6931471805599453
        cos = _series(angle * angle, [(-1) ** k / math.factorial(2 * k) for k in range(12)])
        part[:] = np.copysign(np.sqrt(np.abs(2 * log)) * cos, w)
    return total.reshape(shape)


def _series(x: np.ndarray, coefficients: list[float]) -> np.ndarray:
    total = np.zeros_like(x)
    for c in reversed(coefficients):
        total = total * x + c
    return total
