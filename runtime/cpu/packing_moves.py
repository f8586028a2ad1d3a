"""First fit of the arena packer (passes/memory/packing.py), compiled and kept like kernels.

The addresses are those of `first_fit`, which runs where numba is missing.  The packer gets this by
`packing.compile_with` from above, as passes know no runtime.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...language.types import Array
from ...passes.memory.packing import Lifetime
from .device import jit, native

_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
_PLACING = (("int64", 1),) * 8


def placed(order: Sequence[Lifetime], addresses: Sequence[int] = ()) -> list[int] | None:
    """Addresses by first fit, in order, the first ones as they are known; None where Python shall do it."""
    if native.unavailable() or (not _placing().kept(_PLACING) and jit.unavailable()):
        return None
    n = len(order)
    size, start, end = (np.array([getattr(x, k) for x in order], np.int64) for k in ("size", "start", "end"))
    low = np.zeros(n, np.int64)
    low[: len(addresses)] = addresses
    sorted_ones = [np.empty(n + 1, np.int64) for _ in range(4)]
    call = _placing().call(low, size, start, end, *sorted_ones, work=0)
    _SIGNATURE(call.address)(call.words(low).ctypes.data, len(addresses), n)
    return low.tolist()


def _place(
    low: Array,
    size: Array,
    start: Array,
    end: Array,
    lows: Any,
    highs: Any,
    starts: Any,
    ends: Any,
    addresses: int,
    n: int,
) -> None:
    """`first_fit`.  `lows`, `highs`, `starts`, `ends`: of those that are placed, sorted by address."""
    count = 0
    for x in range(n):
        if size[x] == 0:
            low[x] = 0
            continue
        at = low[x] if x < addresses else 0
        if x >= addresses:
            for p in range(count):
                if starts[p] <= end[x] and ends[p] >= start[x]:
                    if lows[p] - at >= size[x]:
                        break
                    at = max(at, highs[p])
            low[x] = at
        p = count
        while p > 0 and lows[p - 1] > at:
            lows[p], highs[p], starts[p], ends[p] = lows[p - 1], highs[p - 1], starts[p - 1], ends[p - 1]
            p -= 1
        lows[p], highs[p], starts[p], ends[p] = at, at + size[x], start[x], end[x]
        count += 1


@functools.cache
def _placing() -> jit.Kernel:
    return jit.kernel(_place, here=True)
