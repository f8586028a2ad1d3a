"""Random numbers by counter: what is drawn for a sample depends on the seed, the epoch and the sample alone."""

from __future__ import annotations

import numpy as np

_WORD = 1 << 64


def uniform(seed: int, epoch: int, sample: int, count: int) -> np.ndarray:
    """Uniform numbers in [0, 1) for a sample in an epoch, the same ones in every process and version of NumPy."""
    generator = np.random.Philox(key=seed % _WORD, counter=[0, 0, epoch % _WORD, sample % _WORD])
    return (generator.random_raw(count) >> 11) * 2.0**-53


def permutation(count: int, seed: int) -> np.ndarray:
    """The numbers below `count` in an order that depends on the seed alone."""
    return np.argsort(np.random.Philox(key=seed % _WORD).random_raw(count), kind="stable")
