"""Resizing as a linear map along each axis: which input elements make an output element, with which weights."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

#: the transformations of coordinates that a static program can hold
COORDINATES = (
    "half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric", "tf_half_pixel_for_nn",
)  # fmt: skip
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def coordinates(mode: str, size: int, out: int, scale: float, kind: Any) -> np.ndarray:
    """Positions in the input (fractions of elements) of the output's elements, in float type `kind` (ONNX Resize)."""
    x, s, half = np.arange(out, dtype=kind), kind(scale), kind(0.5)
    if mode == "align_corners":
        return x * (kind(size - 1) / kind(out - 1)) if out > 1 else x * 0
    if mode == "asymmetric":
        return x / s
    if mode == "tf_half_pixel_for_nn":
        return (x + half) / s
    if mode == "pytorch_half_pixel" and out <= 1:
        return x * 0
    found = (x + half) / s - half
    if mode == "half_pixel_symmetric":
        found = kind(size / 2) * (1 - kind(out) / (s * kind(size))) + found
    return found


def nearest(mode: str, at: np.ndarray, size: int) -> np.ndarray:
    """Indices of the nearest elements."""
    half = at.dtype.type(0.5)
    if mode == "round_prefer_floor":
        found = np.ceil(at - half)
    elif mode == "round_prefer_ceil":
        found = np.floor(at + half)
    else:
        found = np.floor(at) if mode == "floor" else np.ceil(at)
    return np.clip(found.astype(np.int64), 0, size - 1)


def taps(mode: str, at: np.ndarray, cubic: float) -> tuple[np.ndarray, np.ndarray]:
    """Indices (not yet clipped) and weights [taps, out] for linear and cubic (Keys 1981) interpolation."""
    low = np.floor(at)
    r = at - low
    first = low.astype(np.int64)
    if mode == "linear":
        return np.stack([first, first + 1]), np.stack([1 - r, r])
    a = cubic
    weights = np.stack(
        [
            ((a * (r + 1) - 5 * a) * (r + 1) + 8 * a) * (r + 1) - 4 * a,
            ((a + 2) * r - (a + 3)) * r * r + 1,
            ((a + 2) * (1 - r) - (a + 3)) * (1 - r) * (1 - r) + 1,
            ((a * (2 - r) - 5 * a) * (2 - r) + 8 * a) * (2 - r) - 4 * a,
        ]
    )
    return np.stack([first - 1, first, first + 1, first + 2]), weights


@functools.lru_cache(maxsize=256)
def indices(op: Any, size: int, out: int, scale: float) -> np.ndarray:
    """For `nearest`: the input index of each output element.  In float32, as other runtimes: ties depend on it."""
    at = coordinates(op.coordinate_transformation_mode, size, out, scale, np.float32)
    return nearest(op.nearest_mode, at, size)


@functools.lru_cache(maxsize=256)
def matrix(op: Any, size: int, out: int, scale: float, dtype: str) -> np.ndarray:
    """The map along an axis as a matrix [out, size]."""
    found = np.zeros((out, size))
    rows = np.arange(out)
    if op.mode == "nearest":
        found[rows, indices(op, size, out, scale)] = 1.0
        return found.astype(dtype)
    at = coordinates(op.coordinate_transformation_mode, size, out, scale, np.float64)
    where, weights = taps(op.mode, at, op.cubic_coeff_a)
    if op.exclude_outside:
        weights = weights * ((where >= 0) & (where < size))
        weights = weights / weights.sum(axis=0)
    for i, w in zip(np.clip(where, 0, size - 1), weights, strict=True):
        found[rows, i] += w
    return found.astype(dtype)
