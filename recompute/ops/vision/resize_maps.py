"""Resizing as a linear map along each axis: which input elements make an output element, with which weights."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

#: the transformations of coordinates that a static program can hold
COORDINATES = (
    "half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "half_pixel_symmetric", "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
)  # fmt: skip
#: resizing along an axis: output by input size, and the part of the input that is resized (tf_crop_and_resize)
Span = tuple[float, float, float]
NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
#: the relative distance (two roundings in float32) from halfway between two elements that counts as halfway
TIE = 2.5e-7


def coordinates(mode: str, size: int, out: int, span: Span, kind: Any) -> np.ndarray:
    """Positions in the input (fractions of elements) of the output's elements, in float type `kind` (ONNX Resize)."""
    x, s, half = np.arange(out, dtype=kind), kind(span[0]), kind(0.5)
    if mode == "tf_crop_and_resize":
        start, end, last = kind(span[1]), kind(span[2]), kind(size - 1)
        step = (end - start) * last / kind(out - 1) if out > 1 else kind(0)
        return start * last + x * step if out > 1 else x + half * (start + end) * last
    if mode == "align_corners":
        return x * (kind(size - 1) / kind(out - 1)) if out > 1 else x * 0
    if mode == "asymmetric":
        return x / s
    if mode == "tf_half_pixel_for_nn":
        return (x + half) / s
    if mode == "pytorch_half_pixel" and out <= 1:
        return x * 0
    places = (x + half) / s - half
    if mode == "half_pixel_symmetric":
        places = kind(size / 2) * (1 - kind(out) / (s * kind(size))) + places
    return places


def nearest(mode: str, at: np.ndarray, size: int) -> np.ndarray:
    """Indices of the nearest elements.  What is halfway but for the rounding of `at` is halfway, as in ONNX Runtime."""
    half = at.dtype.type(0.5)
    if mode.startswith("round"):
        tie = np.floor(at) + half
        at = np.where(np.abs(at - tie) <= at.dtype.type(TIE) * np.abs(tie), tie, at)
    if mode == "round_prefer_floor":
        places = np.ceil(at - half)
    elif mode == "round_prefer_ceil":
        places = np.floor(at + half)
    else:
        places = np.floor(at) if mode == "floor" else np.ceil(at)
    return np.clip(places.astype(np.int64), 0, size - 1)


@functools.lru_cache(maxsize=256)
def outside(op: Any, size: int, out: int, span: Span) -> np.ndarray:
    """Indices of the output elements that lie outside of the input and are extrapolated (tf_crop_and_resize)."""
    at = coordinates(op.coordinate_transformation_mode, size, out, span, np.float64)
    return np.flatnonzero((at < 0) | (at > size - 1))


def taps(mode: str, at: np.ndarray, cubic: float, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Indices (not yet clipped) and weights [taps, out] for linear and cubic (Keys 1981) interpolation.

    `scale` < 1 widens the filter by its inverse, against aliasing; weights then sum to 1 by division.
    """
    low = np.floor(at)
    r = at - low
    reach = math.ceil((1 if mode == "linear" else 2) / scale)
    steps = np.arange(1 - reach, reach + 1)
    d = np.abs(steps[:, None] - r) * scale
    if mode == "linear":
        weights = np.clip(1 - d, 0, None)
    else:
        a = cubic
        near, far = ((a + 2) * d - (a + 3)) * d * d + 1, ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        weights = np.where(d <= 1, near, np.where(d < 2, far, 0.0))
    if scale < 1:
        weights = weights / weights.sum(axis=0)
    return low.astype(np.int64) + steps[:, None], weights


@functools.lru_cache(maxsize=256)
def indices(op: Any, size: int, out: int, span: Span) -> np.ndarray:
    """For `nearest`: the input index of each output element.  In float32, as other runtimes: ties depend on it."""
    at = coordinates(op.coordinate_transformation_mode, size, out, span, np.float32)
    return nearest(op.nearest_mode, at, size)


@functools.lru_cache(maxsize=256)
def matrix(op: Any, size: int, out: int, span: Span, dtype: str) -> np.ndarray:
    """The map along an axis as a matrix [out, size]; zeros for what is outside (see `outside`)."""
    weights = np.zeros((out, size))
    rows = np.arange(out)
    if op.mode == "nearest":
        weights[rows, indices(op, size, out, span)] = 1.0
    else:
        _interpolated(weights, op, size, out, span)
    if op.coordinate_transformation_mode == "tf_crop_and_resize":
        weights[outside(op, size, out, span)] = 0.0
    return weights.astype(dtype)


def _interpolated(found: np.ndarray, op: Any, size: int, out: int, span: Span) -> None:
    """Adds the weights of linear and cubic interpolation to a matrix of zeros."""
    rows = np.arange(out)
    at = coordinates(op.coordinate_transformation_mode, size, out, span, np.float64)
    where, weights = taps(op.mode, at, op.cubic_coeff_a, min(span[0], 1.0) if op.antialias else 1.0)
    if op.exclude_outside:
        weights = weights * ((where >= 0) & (where < size))
        weights = weights / weights.sum(axis=0)
    for i, w in zip(np.clip(where, 0, size - 1), weights, strict=True):
        found[rows, i] += w
