"""Former place of `recompute.data`'s functions for batches."""

from __future__ import annotations

from ..data.batches import check_npz, npz_batches, synthetic_batch

__all__ = [
    "check_npz",
    "npz_batches",
    "synthetic_batch",
]
