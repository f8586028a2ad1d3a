"""Functions of single numbers for which PyTorch's ONNX exporter has none, by others.

Values are PyTorch's; gradients, too (its tools/autograd/derivatives.yaml), but for those at poles and of NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def special() -> dict[Any, Callable[..., Any]]:
    """Decompositions by operator, names in `torch.special` included."""
    aten = torch.ops.aten
    table: dict[Any, Callable[..., Any]] = {
        aten.copysign.Tensor: _copysign,
        aten.copysign.Scalar: _copysign,
        aten.fmax.default: _extreme(lambda x, y: x > y),
        aten.fmin.default: _extreme(lambda x, y: x < y),
        aten.hypot.default: _hypot,
        aten.erfinv.default: _in_float32(_erfinv),
        aten.logit.default: _logit,
        aten.special_log_ndtr.default: _in_float32(_log_ndtr),
        aten.special_ndtri.default: _in_float32(_ndtri),
        aten.lgamma.default: _in_float32(_lgamma),
        aten.mvlgamma.default: _multivariate,
        aten.digamma.default: _in_float32(lambda x: _polygamma(0, x)),
        aten.polygamma.default: lambda n, x: _in_float32(lambda y: _polygamma(n, y))(x),
        aten.i0.default: _in_float32(lambda x: _bessel(0, x) * (x.abs() / 2).exp() ** 2),
        aten.special_i0e.default: _in_float32(lambda x: _bessel(0, x)),
        aten.special_i1.default: _in_float32(lambda x: _bessel(1, x) * (x.abs() / 2).exp() ** 2),
        aten.special_i1e.default: _in_float32(lambda x: _bessel(1, x)),
    }
    names = {"psi": "digamma", "digamma": "digamma", "erfinv": "erfinv", "gammaln": "lgamma", "polygamma": "polygamma"}
    names |= {"multigammaln": "mvlgamma", "logit": "logit"}
    return table | {getattr(aten, f"special_{a}").default: table[getattr(aten, b).default] for a, b in names.items()}


def _in_float32(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of one tensor, computed in float32 for integers and for types of 16 bits, which keep their type."""

    def decomposed(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return function(x.to(torch.get_default_dtype()))
        return function(x.float()).to(x.dtype) if x.dtype.itemsize < 4 else function(x)

    return decomposed


def _copysign(x: Tensor, y: Any) -> Tensor:
    dtype = torch.result_type(x, y)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    x, y = x.to(dtype), torch.as_tensor(y, dtype=dtype).detach()
    negative = (y < 0) | ((y == 0) & (1 / y < 0))
    return torch.where(negative, -x.abs(), x.abs())


def _extreme(first: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The one of two that is not NaN, or comes first; equal ones have half of the gradient each."""

    def decomposed(x: Tensor, y: Tensor) -> Tensor:
        if not torch.result_type(x, y).is_floating_point:
            return torch.where(first(x, y), x, y)
        return torch.where(x == y, x / 2 + y / 2, torch.where(first(x, y) | y.isnan(), x, y))

    return decomposed


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    """The root of the sum of squares, in parts of the larger one: squares neither overflow nor vanish."""
    most = torch.maximum(x.abs(), y.abs()).detach()
    most = torch.where((most > 0) & (most < math.inf), most, 1)
    root = most * ((x / most) ** 2 + (y / most) ** 2).sqrt()
    return torch.where(x.isinf(), x.abs(), torch.where(y.isinf(), y.abs(), root))


def _with_slope(value: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    """A value whose derivative with respect to x is `slope`, infinite ones included; both come in float64."""
    value, slope = value.to(x.dtype), slope.to(x.dtype)
    here = torch.where(x.abs() < math.inf, x, 0)
    finite, step = slope.abs() < math.inf, here - here.detach()
    steep = torch.where(finite, 1, step).sqrt() * slope.sign()  # 0 at 0, where the derivative of a root is infinite
    return value + torch.where(finite, step * torch.where(finite, slope, 0), steep)


def _winitzki(rest: Tensor) -> Tensor:
    """erfinv of x within 0.2 %, by 1 - x² ("A handy approximation for the error function and its inverse", 2008)."""
    log = rest.log()
    term = 2 / (math.pi * 0.147) + log / 2
    return ((term * term - log / 0.147).sqrt() - term).clamp(min=0).sqrt()


def _erfinv(x: Tensor) -> Tensor:
    """Newton's method from Winitzki's approximation."""
    here = x.detach().double()  # near 1, erf has no more digits in float32
    size = here.abs()
    y = _winitzki((1 - size) * (1 + size))  # 1 - size * size would lose its last digits near 1
    for _ in range(3):
        y = y - (y.erf() - size) * (math.sqrt(math.pi) / 2) * (y * y).exp()
    y = torch.where(size == 1, math.inf, torch.where(size == 0, 0, y))
    return _with_slope(y * here.sign(), x, math.sqrt(math.pi) / 2 * (y * y).exp())


def _logit(x: Tensor, eps: float | None = None) -> Tensor:
    """The lower bound comes first where bounds cross, which ONNX's Clip does not do."""
    if eps is None:
        return NotImplemented
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    y = torch.where(x < eps, eps, torch.where(x > 1 - eps, 1 - eps, x))
    return (y / (1 - y)).log()


def _log_normal(y: Tensor) -> Tensor:
    """The logarithm of the normal distribution; of tails by a continued fraction (Abramowitz & Stegun 26.2.14)."""
    far = torch.where(y < -3, -y, 3)
    rest = far
    for k in range(40, 0, -1):
        rest = far + k / rest
    tail = -far * far / 2 - math.log(2 * math.pi) / 2 - rest.log()
    near = torch.where(y < -3, 0, y) / math.sqrt(2)
    return torch.where(y < -3, tail, torch.where(near > 0, (-near.erfc() / 2).log1p(), ((near.erf() + 1) / 2).log()))


def _log_ndtr(x: Tensor) -> Tensor:
    here = x.detach().double()
    value = _log_normal(here)
    slope = (-here * here / 2 - math.log(2 * math.pi) / 2 - value).exp()
    return _with_slope(value, x, torch.where(here == -math.inf, math.inf, slope))


def _ndtri(p: Tensor) -> Tensor:
    """Newton's method on the logarithm of the smaller tail, from Winitzki's approximation."""
    here = p.detach().double()
    tail = torch.minimum(here, 1 - here)
    y, target = -math.sqrt(2) * _winitzki(4 * tail * (1 - tail)), tail.log()
    for _ in range(4):
        value = _log_normal(y)
        y = y - (value - target) * (value + y * y / 2).exp() * math.sqrt(2 * math.pi)
    y = torch.where(tail == 0, -math.inf, torch.where(tail == 0.5, 0, y))
    y = torch.where(here > 0.5, -y, y)
    return _with_slope(y, p, math.sqrt(2 * math.pi) * (y * y / 2).exp())


def _lgamma(x: Tensor) -> Tensor:
    """Stirling's series for x + 8, less the logarithm of x to x + 7; below 0.5 by Euler's reflection."""
    here = x.detach().double()  # near 1 and 2, where the result is near 0, the series' terms cancel
    low = here < 0.5
    z = torch.where(low, 1 - here, here)
    small = z < 8
    far = torch.where(small, z + 8, z)
    two = far**-2
    value = (far - 0.5) * far.log() - far + math.log(2 * math.pi) / 2  # Abramowitz & Stegun 6.1.41
    value = value + (1 / 12 - two * (1 / 360 - two * (1 / 1260 - two * (1 / 1680 - two / 1188)))) / far
    product = torch.ones_like(z)
    for k in range(8):
        product = product * torch.where(small, z + k, 1)
    value = value - product.log()
    angle = math.pi * (here - here.round())  # the period; sines of large angles lose their digits
    value = torch.where(low, math.log(math.pi) - angle.sin().abs().log() - value, value)
    pole = (here <= 0) & (here == here.round())
    slope = torch.where(pole, -math.inf, _derivative_of_digamma(0, here))
    return torch.where(here.isinf(), x.abs(), _with_slope(torch.where(pole, math.inf, value), x, slope))


def _multivariate(x: Tensor, p: int) -> Tensor:
    parts = (_in_float32(_lgamma)(x - j / 2) for j in range(p))
    return sum(parts, p * (p - 1) / 4 * math.log(math.pi))


def _polygamma(n: int, x: Tensor) -> Tensor:
    """The n-th derivative of the digamma function, whose slope is the next one."""
    here = x.detach().double()  # digits cancel near zeros
    return _with_slope(_derivative_of_digamma(n, here), x, _derivative_of_digamma(n + 1, here))


def _derivative_of_digamma(n: int, x: Tensor) -> Tensor:
    """The asymptotic series, of 8 and more; recurrence; below 0.5 reflection (Abramowitz & Stegun 6.4.6, 7 and 11)."""
    low = x < 0.5
    z = torch.where(low, 1 - x, x)
    small = z < 8
    far = torch.where(small, z + 8, z)
    value = (far.log() * -1 if n == 0 else math.factorial(n - 1) / far**n) + math.factorial(n) / (2 * far ** (n + 1))
    for k, bernoulli in enumerate((1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6), 1):
        factor = bernoulli * math.factorial(2 * k + n - 1) / math.factorial(2 * k)
        value = value + factor / far ** (2 * k + n)
    for k in range(8):
        value = value + torch.where(small, math.factorial(n) / (z + k) ** (n + 1), 0)
    even = 1 - 2 * (n % 2)  # the sign of the reflection; that of the series is the other one
    period, slope = x - x.round(), np.polynomial.Polynomial([0, math.pi])
    half = (math.pi * (0.5 - period.abs())).tan() * period.sign()  # exactly 0 between poles: its coefficients are large
    cot = torch.where(period.abs() < 0.25, 1 / (math.pi * period).tan(), half)
    for _ in range(n):
        slope = slope.deriv() * np.polynomial.Polynomial([-math.pi, 0, -math.pi])
    turned = sum(float(c) * cot**i for i, c in enumerate(slope.coef) if c)
    value = torch.where(low, -value - turned, -even * value)
    pole = (x <= 0) & (x == x.round())
    return torch.where(pole, torch.where(x == 0, -1 / x, math.nan) if n == 0 else -even * math.inf, value)


def _bessel(order: int, x: Tensor) -> Tensor:
    """The modified Bessel function of order 0 or 1, divided by exp(|x|).

    The mean over a period of exp(x cos t), for order 1 times tanh(x cos t) cos t (cos t alone would leave rounding near
    0), by as many places as x needs, which converges faster than any power; of large x the asymptotic series
    (Abramowitz & Stegun 9.6.19 and 9.7.1).
    """
    count, most = (64, 60) if x.dtype == torch.float32 else (256, 400)
    near = x.abs() < most
    times = torch.arange(count, dtype=x.dtype) * (2 * math.pi / count)
    small = torch.where(near, x, 0).unsqueeze(-1)
    turned = small * times.cos()
    parts = (turned - small.abs()).exp()
    mean = (parts * turned.tanh() * times.cos() if order else parts).mean(-1)  # exactly 0 at 0
    large = torch.where(near, most, x.abs())
    total = term = torch.ones_like(x)
    for k in range(1, 9):
        term = term * ((2 * k - 1) ** 2 - 4 * order**2) / (8 * k * large)
        total = total + term
    return torch.where(near, mean, x.sign() ** order * total / (math.sqrt(2 * math.pi) * large.sqrt()))
