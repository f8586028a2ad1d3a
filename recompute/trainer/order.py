"""The order of samples: a permutation of each epoch, computed from a counter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: rounds of the Feistel network
_ROUNDS = 8
_MASK = (1 << 64) - 1


def mixed(*numbers: int) -> int:
    """64 bits that depend on all bits of the numbers (splitmix64: Steele, Lea & Flood 2014)."""
    state = 0
    for n in numbers:
        state = (state ^ (n & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


@dataclass(frozen=True)
class Order:
    """The samples of an epoch in their order: `shuffle` permutes the numbers 0 to `samples` - 1.

    Nothing is stored: which sample stands where follows from seed, epoch and place, so that any step of a run can be
    repeated alone.  The permutation is a Feistel network over the next power of four; numbers beyond `samples` go
    through it again (cycle walking: Black & Rogaway 2002).
    """

    samples: int
    seed: int
    epoch: int
    shuffle: bool = True

    def at(self, begin: int, end: int) -> np.ndarray:
        """The numbers (int64) of the samples at the places from `begin` to before `end`."""
        places = np.arange(begin, min(end, self.samples), dtype=np.int64)
        if not self.shuffle or self.samples < 2:
            return places
        half = ((self.samples - 1).bit_length() + 1) // 2
        keys = [np.uint64(mixed(self.seed, self.epoch, r)) for r in range(_ROUNDS)]
        order = _network(places.astype(np.uint64), half, keys)
        while (outside := order >= self.samples).any():
            order[outside] = _network(order[outside], half, keys)
        return order.astype(np.int64)


def _network(x: np.ndarray, half: int, keys: list[np.uint64]) -> np.ndarray:
    """A permutation of the numbers of 2·`half` bits."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> bits, x & mask
    for key in keys:
        left, right = right, left ^ (_hashed(right ^ key) & mask)
    return left << bits | right


def _hashed(x: np.ndarray) -> np.ndarray:
    """splitmix64's mixing of 64-bit numbers."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
