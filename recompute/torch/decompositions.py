"""Operators of PyTorch for which its ONNX exporter has no function, by operators for which it has one.

Values are PyTorch's; gradients, too (its tools/autograd/derivatives.yaml), but for those at poles and of NaN.
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
        aten.hypot.default: _hypot,
        aten.erfinv.default: _in_float32(_erfinv),
        aten.lgamma.default: _in_float32(_lgamma),
        aten.cummax.default: _running(largest=True),
        aten.cummin.default: _running(largest=False),
        aten.median.default: _median,
        aten.diagonal_scatter.default: _diagonal_scatter,
    }


def functions() -> dict[Any, Callable[..., Any]]:
    """Functions that cannot be traced as PyTorch has them."""
    import torch

    table = {torch.cov: _covariance, torch.corrcoef: _correlation, torch.combinations: _combinations}
    return {**table, torch.Tensor.cov: _covariance, torch.Tensor.corrcoef: _correlation}


def _in_float32(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of one tensor, computed in float32 for integers and for types of 16 bits, which keep their type."""

    def decomposed(x: Tensor) -> Tensor:
        import torch

        if not x.is_floating_point():
            return function(x.to(torch.get_default_dtype()))
        return function(x.float()).to(x.dtype) if x.dtype.itemsize < 4 else function(x)

    return decomposed


def _copysign(x: Tensor, y: Any) -> Tensor:
    import torch

    dtype = torch.result_type(x, y)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    x, y = x.to(dtype), torch.as_tensor(y, dtype=dtype).detach()
    negative = (y < 0) | ((y == 0) & (1 / y < 0))
    return torch.where(negative, -x.abs(), x.abs())


def _extreme(first: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The one of two that is not NaN, or comes first; equal ones have half of the gradient each."""

    def decomposed(x: Tensor, y: Tensor) -> Tensor:
        import torch

        if not torch.result_type(x, y).is_floating_point:
            return torch.where(first(x, y), x, y)
        return torch.where(x == y, x / 2 + y / 2, torch.where(first(x, y) | y.isnan(), x, y))

    return decomposed


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    """The root of the sum of squares, in parts of the larger one: squares neither overflow nor vanish."""
    import torch

    most = torch.maximum(x.abs(), y.abs()).detach()
    most = torch.where((most > 0) & (most < math.inf), most, 1)
    root = most * ((x / most) ** 2 + (y / most) ** 2).sqrt()
    return torch.where(x.isinf(), x.abs(), torch.where(y.isinf(), y.abs(), root))


def _with_slope(value: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    """A value whose derivative with respect to x is `slope`, infinite ones included."""
    import torch

    finite, step = slope.abs() < math.inf, x - x.detach()
    steep = torch.where(finite, 1, step).sqrt() * slope.sign()  # 0 at 0, where the derivative of a root is infinite
    return value + torch.where(finite, step * torch.where(finite, slope, 0), steep)


def _erfinv(x: Tensor) -> Tensor:
    """Winitzki's approximation ("A handy approximation for the error function and its inverse", 2008), and Newton."""
    import torch

    here = x.detach()
    size = here.abs()
    a = 0.147
    rest = (1 - size) * (1 + size)  # 1 - size * size would lose its last digits near 1
    log = rest.log()
    term = 2 / (math.pi * a) + log / 2
    y = ((term * term - log / a).sqrt() - term).clamp(min=0).sqrt()
    for _ in range(3):
        y = y - (y.erf() - size) * (math.sqrt(math.pi) / 2) * (y * y).exp()
    y = torch.where(size == 1, math.inf, torch.where(size == 0, 0, y))
    return _with_slope(y * here.sign(), x, math.sqrt(math.pi) / 2 * (y * y).exp())


def _lgamma(x: Tensor) -> Tensor:
    """Stirling's series for x + 8, less the logarithm of x to x + 7; below 0.5 by Euler's reflection."""
    import torch

    here = x.detach()
    low = here < 0.5
    z = torch.where(low, 1 - here, here)
    small = z < 8
    value, slope = _stirling(torch.where(small, z + 8, z))
    product = torch.ones_like(z)
    for k in range(8):
        product, slope = product * torch.where(small, z + k, 1), slope - torch.where(small, 1 / (z + k), 0)
    value = value - product.log()
    angle = math.pi * (here - here.round())  # the period of both; sines of large angles lose their digits
    mirrored = math.log(math.pi) - angle.sin().abs().log() - value
    down = slope - math.pi * angle.cos() / angle.sin()
    value, slope = torch.where(low, mirrored, value), torch.where(low, down, slope)
    pole = (here <= 0) & (here == here.round())
    result = _with_slope(torch.where(pole, math.inf, value), x, torch.where(pole, -math.inf, slope))
    return torch.where(here.isinf(), x.abs(), result)


def _stirling(z: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of the gamma function, and its derivative, of 8 and more (Abramowitz & Stegun 6.1.41, 6.3.18)."""
    one = 1 / z
    two = one * one
    value = (z - 0.5) * z.log() - z + math.log(2 * math.pi) / 2
    value = value + one * (1 / 12 - two * (1 / 360 - two * (1 / 1260 - two * (1 / 1680 - two / 1188))))
    slope = z.log() - one / 2 - two * (1 / 12 - two * (1 / 120 - two * (1 / 252 - two * (1 / 240 - two / 132))))
    return value, slope


def _running(*, largest: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Extremes of all beginnings of an axis, and where they last are; NaN from the first NaN on."""

    def decomposed(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        import torch

        if x.ndim == 0 or not x.numel():
            return x * 1, torch.zeros(x.shape, dtype=torch.int64)
        rows = x.movedim(dim, -1)
        here, count = rows.detach(), rows.shape[-1]
        here = here.int() if x.dtype == torch.bool else here
        before = torch.ones(count, count, dtype=torch.bool).tril()
        some = torch.where(before, here.unsqueeze(-2), here[..., :1].unsqueeze(-2))
        extremes = some.amax(-1) if largest else some.amin(-1)
        equal = before & (here.unsqueeze(-2) == extremes.unsqueeze(-1))
        index = torch.where(equal, torch.arange(count), -1).amax(-1)
        last = torch.where(before & here.isnan().unsqueeze(-2), torch.arange(count), -1).amax(-1)
        index = torch.where(last < 0, index, last)
        return rows.gather(-1, index).movedim(-1, dim), index.movedim(-1, dim)

    return decomposed


def _median(x: Tensor) -> Tensor:
    """The lower median of all elements; elements that are equal to it have equal parts of its gradient."""
    import torch

    if not x.numel():
        return NotImplemented
    here = x.detach().reshape(-1)
    middle = torch.ops.aten.sort.default(here, 0, False)[0][(here.shape[0] - 1) // 2]
    if not x.is_floating_point():
        return middle
    below = torch.where(here <= middle, x.reshape(-1), -math.inf)
    return torch.where(here.isnan().any(), math.nan, below.amax(0))


def _diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    import torch

    x = x.contiguous()
    a, b = dim1 % x.ndim, dim2 % x.ndim
    lead = max(-offset, 0) * x.stride(a) + max(offset, 0) * x.stride(b)
    places = lead + torch.arange(src.shape[-1]) * (x.stride(a) + x.stride(b))
    for d in (d for d in reversed(range(x.ndim)) if d not in (a, b)):
        places = (torch.arange(x.shape[d]) * x.stride(d)).reshape(-1, *[1] * places.ndim) + places
    return x.reshape(-1).scatter(0, places.reshape(-1), src.reshape(-1).to(x.dtype)).reshape(x.shape)


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
    matrix = (centred * weights) @ centred.T / (total - lost).clamp(min=0)
    return matrix.squeeze() if input.ndim < 2 else matrix


def _correlation(input: Tensor) -> Tensor:
    matrix = _covariance(input)
    if matrix.ndim == 0:
        return matrix / matrix
    deviations = matrix.diagonal().sqrt()
    return (matrix / deviations.unsqueeze(1) / deviations).clamp(-1, 1)


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    import torch

    if input.ndim != 1 or r < 1:  # PyTorch's errors, and its empty tensor
        return torch.combinations(input, r, with_replacement)
    choose: Callable[..., Iterator[Any]] = (
        itertools.combinations_with_replacement if with_replacement else itertools.combinations
    )
    index = torch.tensor(list(choose(range(int(input.shape[0])), r)), dtype=torch.int64).reshape(-1, r)
    return input[index.reshape(-1)].reshape(index.shape)
