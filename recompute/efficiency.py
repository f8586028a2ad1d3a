"""What devices and links reach of their data sheets, by the size of products: all such assumptions in one place.

A product is computed in tiles of 128 x 256 elements of its result, one a streaming multiprocessor at a time; a last
wave of tiles that does not fill the device takes as long as a full one (NVIDIA, Matrix Multiplication Background,
sections on tile and wave quantisation).  Full waves run at a part of the peak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

#: rows and columns of a tile; the other way round where that takes fewer waves
_TILE = (128, 256)


@dataclass(frozen=True)
class Reached:
    """Parts of a kind of device's peaks: `products` of full waves, `attention` of fused causal attention (operations of
    both passes that are done), `memory` of element-wise operators, `links` of collectives and messages; `units`:
    streaming multiprocessors (0: waves are not counted)."""

    products: float
    attention: float
    units: int
    memory: float = 0.9
    links: float = 0.82

    def product_seconds(self, products: Sequence[tuple[int, int, int]], rate: float, times: int) -> float:
        """Seconds of products, (rows, columns, summed length) each, at a peak of `rate` operations a second.

        `times`: 1 for the forward pass, 3 with the gradients of both factors.
        """
        seconds = 0.0
        for m, n, k in products:
            shapes = [(m, n, k), (m, k, n), (k, n, m)][:times]
            seconds += sum(2 * m * n * k / (self.filled(a, b) * self.products * rate) for a, b, _ in shapes)
        return seconds

    def filled(self, rows: int, columns: int, count: int = 1) -> float:
        """The part of the waves of tiles that `count` products of the same size need."""
        if not self.units or not rows * columns * count:
            return 1.0
        best = 0.0
        for a, b in (_TILE, _TILE[::-1]):
            waves = math.ceil(count * math.ceil(rows / a) * math.ceil(columns / b) / self.units)
            best = max(best, count * rows * columns / (a * b) / (waves * self.units))
        return best


#: `memory`: a copy on one H200, measured at 4.3 of 4.8 TB/s.  `links`: NCCL's protocol takes about a fifth of the line
#: rate, 370 of 450 GB/s (github.com/NVIDIA/nccl-tests, issue 212).  `products`: single products reach at most 85.9 %
#: (A100) and 80.1 % (H100) of the peak (github.com/stas00/ml-engineering, compute/accelerator); steps, which keep a
#: device at its limit of power, less: each fitted to one published row, FITTED.  `attention`: H100: 335 of 989 TFLOP/s
#: are the most of FlashAttention-2 (Dao 2023, arXiv 2307.08691); A100, and an H100 at 500 W: assumed.
_KINDS = {
    "a100": Reached(0.73, 0.60, 108),
    "h100 500 w": Reached(0.455, 0.30, 132),
    "h100": Reached(0.675, 0.34, 132),
    "h200": Reached(0.675, 0.34, 132),
}
#: the rows of benchmarks/cluster_tables.py to which `products` is fitted, in this order
FITTED = ("Korthikanti 175B selective", "Llama 3 405B on 8,192", "torchtitan 8B FSDP 128")
#: the part of the peak of large steps, all products alike
ACHIEVED = 0.647
_OTHER = Reached(ACHIEVED, 0.4, 0)


def reached(name: str) -> Reached:
    """What the kind of a device reaches, by its name; of others what large steps reach at least."""
    return next((r for kind, r in _KINDS.items() if name.lower().startswith(kind)), _OTHER)
