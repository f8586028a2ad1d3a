"""Python's random numbers (the Mersenne Twister, Matsumoto & Nishimura 1998) on an array, for `moves.py`."""

from __future__ import annotations

from ....language.types import Array
from .layout import DRAWN, TWISTER

_UPPER, _LOWER, _WORD, _TWIST = 0x80000000, 0x7FFFFFFF, 0xFFFFFFFF, 0x9908B0DF


def word(x: Array) -> int:
    """The next 32 bits."""
    at = x[TWISTER]
    if x[DRAWN] >= 624:
        for k in range(624):
            y = (x[at + k] & _UPPER) | (x[at + (k + 1) % 624] & _LOWER)
            x[at + k] = x[at + (k + 397) % 624] ^ (y >> 1) ^ (_TWIST if y & 1 else 0)
        x[DRAWN] = 0
    y = x[at + x[DRAWN]]
    x[DRAWN] += 1
    y ^= y >> 11
    y ^= (y << 7) & 0x9D2C5680
    y ^= (y << 15) & 0xEFC60000
    return (y ^ (y >> 18)) & _WORD


def uniform(x: Array) -> float:
    """`random.random()`."""
    a = word(x) >> 5
    b = word(x) >> 6
    return (a * 67108864.0 + b) * (1.0 / 9007199254740992.0)


def below(x: Array, n: int) -> int:
    """The index that `random.choice` draws among n, 0 < n < 2^32."""
    bits = 0
    while n >> bits:
        bits += 1
    found = word(x) >> (32 - bits)
    while found >= n:
        found = word(x) >> (32 - bits)
    return found
