"""Shared parts of normalisations: the type of their sums, and sums of products over rows."""

from __future__ import annotations

import numpy as np

from ...language.types import Array, TensorType

View = tuple[int, int, int, int]


def wide(t: TensorType) -> TensorType:
    """The type in which elements of type `t` are summed: at least float32."""
    return t.with_dtype("f32") if t.dtype in ("f16", "bf16") else t


def row_dots(a: Array, b: Array, out: Array) -> None:
    """out = Σ a · b over the last axis, by BLAS."""
    np.matmul(a[..., None, :], b[..., None], out=out[..., None, None])
