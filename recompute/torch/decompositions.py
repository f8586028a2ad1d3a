"""Operators of PyTorch for which its ONNX exporter has no function, by operators for which it has one.

Values and gradients are PyTorch's (its tools/autograd/derivatives.yaml says what these are).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions by operator; one that gives NotImplemented leaves the operator as it is."""
    import torch

    aten = torch.ops.aten
    return {
        aten.copysign.Tensor: _copysign,
        aten.copysign.Scalar: _copysign,
        aten.fmax.default: _extreme(lambda x, y: x > y),
        aten.fmin.default: _extreme(lambda x, y: x < y),
        aten.hypot.default: lambda x, y: (x * x + y * y).sqrt(),
        aten.erfinv.default: _erfinv,
        aten.lgamma.default: _lgamma,
        aten.cummax.default: _running(-math.inf, lambda x: x.amax(-1)),
        aten.cummin.default: _running(math.inf, lambda x: x.amin(-1)),
        aten.median.default: _median,
        aten.diagonal_scatter.default: _diagonal_scatter,
    }


def functions() -> dict[Any, Callable[..., Any]]:
    """Functions that cannot be traced as PyTorch has them."""
    import torch

    return {torch.cov: _covariance, torch.corrcoef: _correlation, torch.combinations: _combinations}


def _copysign(x: Tensor, y: Any) -> Tensor:
    import torch

    y = torch.as_tensor(y, dtype=x.dtype).detach()
    negative = (y < 0) | ((y == 0) & (1 / y < 0))
    return torch.where(negative, -x.abs(), x.abs())


def _extreme(first: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The one of two that is not NaN, or comes first; equal ones have half of the gradient each."""

    def decomposed(x: Tensor, y: Tensor) -> Tensor:
        import torch

        return torch.where(x == y, x / 2 + y / 2, torch.where(first(x, y) | y.isnan(), x, y))

    return decomposed


def _with_slope(value: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    """A value whose derivative with respect to x is `slope`."""
    return value.detach() + (x - x.detach()) * slope.detach()


def _erfinv(x: Tensor) -> Tensor:
    """Winitzki's approximation ("A handy approximation for the error function and its inverse", 2008), and Newton."""
    import torch

    here = x.detach()
    a = 0.147
    log = (1 - here * here).log()
    term = 2 / (math.pi * a) + log / 2
    y = torch.where(here < 0, -1.0, 1.0) * ((term * term - log / a).sqrt() - term).sqrt()
    for _ in range(3):
        y = y - (y.erf() - here) * (math.sqrt(math.pi) / 2) * (y * y).exp()
    y = torch.where(here.abs() == 1, here * math.inf, torch.where(here == 0, here, y))
    return _with_slope(y, x, math.sqrt(math.pi) / 2 * (y * y).exp())


def _lgamma(x: Tensor) -> Tensor:
    """Stirling's series for x + 8, less the logarithms of x to x + 7; below 0 by Euler's reflection."""
    import torch

    here = x.detach()
    low = here < 0.5
    z = torch.where(low, 1 - here, here)
    value, slope = _stirling(z + 8)
    for k in range(8):
        value, slope = value - (z + k).log(), slope - 1 / (z + k)
    angle = math.pi * here
    mirrored = math.log(math.pi) - angle.sin().abs().log() - value
    down = slope - math.pi * angle.cos() / angle.sin()
    return _with_slope(torch.where(low, mirrored, value), x, torch.where(low, down, slope))


def _stirling(z: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of the gamma function, and its derivative, of 8 and more (Abramowitz & Stegun 6.1.41, 6.3.18)."""
    one = 1 / z
    two = one * one
    value = (z - 0.5) * z.log() - z + math.log(2 * math.pi) / 2 + one * (1 / 12 - two * (1 / 360 - two / 1260))
    slope = z.log() - one / 2 - two * (1 / 12 - two * (1 / 120 - two / 252))
    return value, slope


def _running(nothing: float, reduced: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Extremes of all beginnings of an axis, and where they last are."""

    def decomposed(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        import torch

        if x.ndim == 0:
            return x * 1, torch.zeros((), dtype=torch.int64)
        rows = x.movedim(dim, -1)
        here = rows.detach()
        count = here.shape[-1]
        before = torch.ones(count, count, dtype=torch.bool).tril()
        extremes = reduced(torch.where(before, here.unsqueeze(-2), nothing))
        those = before & (here.unsqueeze(-2) == extremes.unsqueeze(-1))
        index = torch.where(those, torch.arange(count), -1).amax(-1)
        return rows.gather(-1, index.clamp(min=0)).movedim(-1, dim), index.movedim(-1, dim)

    return decomposed


def _median(x: Tensor) -> Tensor:
    """The lower median of all elements; elements that are equal to it have equal parts of its gradient."""
    import torch

    here = x.detach().reshape(-1)
    middle = torch.ops.aten.sort.default(here, 0, False)[0][(here.shape[0] - 1) // 2]
    those = x.detach() == torch.where(here.isnan().any(), math.nan, middle)
    return torch.where(those, x, 0.0).sum() / those.sum()


def _diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    import torch

    places = torch.arange(x.numel()).reshape(x.shape).diagonal(offset, dim1, dim2).reshape(-1)
    return x.reshape(-1).scatter(0, places, src.reshape(-1)).reshape(x.shape)


def _covariance(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """The covariance of rows, with weights of observations."""
    import torch

    rows = input.reshape(1, -1) if input.ndim < 2 else input
    counts = torch.ones(rows.shape[1]) if fweights is None else fweights
    weights = counts.to(rows.dtype) if aweights is None else counts * aweights
    total = weights.sum()
    centred = rows - (rows * weights).sum(1, keepdim=True) / total
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    found = (centred * weights) @ centred.T / (total - lost)
    return found.squeeze() if input.ndim < 2 else found


def _correlation(input: Tensor) -> Tensor:
    found = _covariance(input)
    if found.ndim == 0:
        return found / found
    deviations = found.diagonal().sqrt()
    return (found / deviations.unsqueeze(1) / deviations).clamp(-1, 1)


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    import torch

    choose: Callable[..., Iterator[Any]] = (
        itertools.combinations_with_replacement if with_replacement else itertools.combinations
    )
    index = torch.tensor(list(choose(range(int(input.shape[0])), r)), dtype=torch.int64).reshape(-1, r)
    return input[index.reshape(-1)].reshape(index.shape)
