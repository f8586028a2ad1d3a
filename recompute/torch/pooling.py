"""Pooling and resizing that PyTorch's ONNX exporter has no function for, or of which it drops arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def pooling() -> dict[Any, Callable[..., Any]]:
    """Decompositions of pooling, by operator; one that gives NotImplemented leaves the operator as it is."""
    aten = torch.ops.aten
    linear, cubic = _antialiased(lambda x: 1 - x, 1), _antialiased(_cubic, 2)
    return {
        aten.avg_pool2d.default: _averages(aten.avg_pool2d.default, 2),
        aten.avg_pool3d.default: _averages(aten.avg_pool3d.default, 3),
        aten.adaptive_avg_pool3d.default: _adaptive_averages,
        aten._adaptive_avg_pool3d.default: _adaptive_averages,
        aten.adaptive_max_pool1d.default: _adaptive_largest,
        aten.adaptive_max_pool2d.default: _adaptive_largest,
        aten.adaptive_max_pool3d.default: _adaptive_largest,
        aten._upsample_bilinear2d_aa.default: linear,
        aten._upsample_bilinear2d_aa.vec: lambda x, size, align, factors=None: linear(x, size, align, *factors or ()),
        aten._upsample_bicubic2d_aa.default: cubic,
        aten._upsample_bicubic2d_aa.vec: lambda x, size, align, factors=None: cubic(x, size, align, *factors or ()),
    }


def _averages(pool: Callable[..., Tensor], axes: int) -> Callable[..., Tensor]:
    """Average pooling with a divisor of its own, of zeros around the tensor: the exporter drops it."""

    def decomposed(
        x: Tensor,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        if divisor_override is None:
            return NotImplemented
        lists = (kernel_size, stride or kernel_size, [padding] if isinstance(padding, int) else padding)
        sizes, steps, before = ([*v] * axes if len(v) == 1 else [*v] for v in lists)
        around: list[int] = []
        for n, k, s, p in zip(x.shape[-axes:], sizes, steps, before, strict=True):
            last = ((n + 2 * p - k + (s - 1) * ceil_mode) // s) * s  # where the last window begins
            last -= s * (last >= n + p)
            around = [p, max(last + k - n - p, 0), *around]
        padded = torch.nn.functional.pad(x, around)
        return pool(padded, sizes, steps, [0] * axes, False, True) * (math.prod(sizes) / divisor_override)

    return decomposed


def _windows(n: int, count: int) -> tuple[Tensor, Tensor]:
    """Places of `count` windows over n elements, each as long as the longest by its last place, and which are its own.

    PyTorch's windows, which overlap where n is no multiple of `count`.
    """
    starts = torch.arange(count) * n // count
    ends = -(-(torch.arange(count) + 1) * n // count)
    places = starts[:, None] + torch.arange(-(-n // count) + (n % count > 0))
    inside = places < ends[:, None]
    return torch.where(inside, places, ends[:, None] - 1), inside


def _adaptive_averages(x: Tensor, output_size: Sequence[int]) -> Tensor:
    for axis, count in zip(range(-len(output_size), 0), output_size, strict=True):
        places, inside = _windows(int(x.shape[axis]), count)
        parts = torch.where(inside, x.movedim(axis, -1)[..., places], 0)
        x = (parts.sum(-1) / inside.sum(-1)).movedim(-1, axis)
    return x


def _adaptive_largest(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The largest of each window, the first one of equals, and where in its image it is."""
    image = x.shape[-len(output_size) :]
    at = torch.arange(math.prod(image)).reshape(image).expand(x.shape)
    for axis, count in zip(range(-1, -len(output_size) - 1, -1), reversed(output_size), strict=True):
        places, _ = _windows(int(x.shape[axis]), count)
        x, at = (t.movedim(axis, -1)[..., places] for t in (x, at))
        first = x.detach().argmax(-1, keepdim=True)
        x, at = (t.gather(-1, first).squeeze(-1).movedim(-1, axis) for t in (x, at))
    return x, at


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' cubic convolution with a = -1/2 ("Cubic convolution interpolation", 1981), of distances."""
    near, far = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    return np.where(x < 1, near, far)


def _antialiased(kernel: Callable[[np.ndarray], np.ndarray], radius: int) -> Callable[..., Tensor]:
    """Resizing by factors or of corners, which the exporter drops, as products with matrices of weights."""

    def weights(count: int, n: int, scale: float) -> Tensor:
        wide = max(scale, 1.0)
        centres = scale * (np.arange(count)[:, None] + 0.5)
        places = np.arange(n)
        first, last = ((centres + s * radius * wide + 0.5).astype(int) for s in (-1, 1))
        distances = np.abs(places - centres + 0.5) / wide
        taken = (places >= first) & (places < last) & (distances < radius)
        table = np.where(taken, kernel(distances), 0)
        return torch.from_numpy(table / table.sum(1, keepdims=True))

    def scale(n: int, count: int, corners: bool, factor: float | None) -> float:
        if corners:
            return (n - 1) / (count - 1) if count > 1 else 0.0
        return 1 / factor if factor else n / count

    def decomposed(x: Tensor, size: Sequence[int] | None, corners: bool, *factors: float | None) -> Tensor:
        if not corners and not any(factors):
            return NotImplemented
        both = factors or (None, None)
        sizes = size or [math.floor(n * f) for n, f in zip(x.shape[-2:], both, strict=True) if f]
        axes = zip(sizes, map(int, x.shape[-2:]), both, strict=True)
        rows, columns = (weights(m, n, scale(n, m, corners, f)).to(x.dtype) for m, n, f in axes)
        return rows @ x @ columns.T

    return decomposed
