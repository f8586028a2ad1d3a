"""Operators of PyTorch for which its ONNX exporter has no function, by operators for which it has one.

Values are PyTorch's; gradients, too (its tools/autograd/derivatives.yaml), but for those at poles and of NaN.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

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
        aten.digamma.default: _in_float32(lambda x: _polygamma(0, x)),
        aten.polygamma.default: lambda n, x: _in_float32(lambda y: _polygamma(n, y))(x),
        aten.i0.default: _in_float32(lambda x: _bessel(0, x) * (x.abs() / 2).exp() ** 2),
        aten.special_i0e.default: _in_float32(lambda x: _bessel(0, x)),
        aten.special_i1.default: _in_float32(lambda x: _bessel(1, x) * (x.abs() / 2).exp() ** 2),
        aten.special_i1e.default: _in_float32(lambda x: _bessel(1, x)),
        aten.cummax.default: _running(largest=True),
        aten.cummin.default: _running(largest=False),
        aten.median.default: _median,
        aten.nanmedian.default: _nan_median,
        aten.nanmedian.dim: _nan_medians,
        aten.diagonal_scatter.default: _diagonal_scatter,
        aten.as_strided_scatter.default: _as_strided_scatter,
        aten.put.default: _put,
        aten.index_reduce.default: _index_reduce,
        aten.masked_select.default: _masked_select,
        aten.squeeze.dim: _squeeze,
        aten.squeeze.dims: _squeeze,
        aten.squeeze_copy.dim: _squeeze,
        aten.squeeze_copy.dims: _squeeze,
        aten.constant_pad_nd.default: _complex_pad,
        aten.native_layer_norm.default: _native_layer_norm,
        aten._safe_softmax.default: _safe_softmax,
        **{f: _of_numbers(f) for f in (aten.topk.default, aten.scatter_add.default)},
        **{f: _of_numbers(f) for f in (aten.scatter.src, aten.scatter.value)},
        aten.gather.default: _of_numbers(aten.gather.default, like_index=True),
    }


def functions() -> dict[Any, Callable[..., Any]]:
    """Functions that cannot be traced as PyTorch has them."""
    import torch

    table = {torch.cov: _covariance, torch.corrcoef: _correlation, torch.combinations: _combinations}
    table = {**table, torch.Tensor.cov: _covariance, torch.Tensor.corrcoef: _correlation}
    return {**table, torch.nn.functional.instance_norm: _instance_norm}


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

    here = torch.where(x.abs() < math.inf, x, 0)
    finite, step = slope.abs() < math.inf, here - here.detach()
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


def _polygamma(n: int, x: Tensor) -> Tensor:
    """The n-th derivative of the digamma function, whose slope is the next one."""
    return _with_slope(_derivative_of_digamma(n, x.detach()), x, _derivative_of_digamma(n + 1, x.detach()))


def _derivative_of_digamma(n: int, x: Tensor) -> Tensor:
    """The asymptotic series, of 8 and more; recurrence; below 0.5 reflection (Abramowitz & Stegun 6.4.6, 7 and 11)."""
    import torch

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
    cot, slope = 1 / (math.pi * (x - x.round())).tan(), np.polynomial.Polynomial([0, math.pi])
    for _ in range(n):
        slope = slope.deriv() * np.polynomial.Polynomial([-math.pi, 0, -math.pi])
    turned = sum(float(c) * cot**i for i, c in enumerate(slope.coef) if c)
    value = torch.where(low, -value - turned, -even * value)
    pole = (x <= 0) & (x == x.round())
    return torch.where(pole, torch.where(x == 0, -1 / x, math.nan) if n == 0 else -even * math.inf, value)


def _bessel(order: int, x: Tensor) -> Tensor:
    """The modified Bessel function of order 0 or 1, divided by exp(|x|).

    The mean of exp(x cos t) cos(order t) over a period, by as many places as x needs, which converges faster than any
    power; of large x the asymptotic series (Abramowitz & Stegun 9.6.19, 9.7.1).
    """
    import torch

    count, most = (64, 60) if x.dtype == torch.float32 else (256, 400)
    near = x.abs() < most
    times = torch.arange(count, dtype=x.dtype) * (2 * math.pi / count)
    small = torch.where(near, x, 0).unsqueeze(-1)
    mean = ((small * times.cos() - small.abs()).exp() * (order * times).cos()).mean(-1)
    large = torch.where(near, most, x.abs())
    total = term = torch.ones_like(x)
    for k in range(1, 9):
        term = term * ((2 * k - 1) ** 2 - 4 * order**2) / (8 * k * large)
        total = total + term
    return torch.where(near, mean, x.sign() ** order * total / (2 * math.pi * large).sqrt())


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


def _nan_median(x: Tensor) -> Tensor:
    """The lower median of all elements but NaN; equal ones have equal parts of its gradient."""
    import torch

    if not x.numel():
        return NotImplemented
    flat = x.reshape(-1)
    middle = _nan_medians(flat.detach(), 0)[0]
    if not x.is_floating_point():
        return middle
    return torch.where(middle.isnan(), math.nan, torch.where(flat <= middle, flat, -math.inf).amax(0))


def _nan_medians(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Lower medians of an axis, but for NaN, and where the first of each is."""
    import torch

    if x.ndim == 0:
        return x * 1, torch.zeros((), dtype=torch.int64)
    here = x.detach()
    missing = here.isnan() if x.is_floating_point() else torch.zeros(x.shape, dtype=torch.bool)
    order = torch.ops.aten.sort.default(torch.where(missing, math.inf, here) if x.is_floating_point() else here, dim)[0]
    middle = ((~missing).sum(dim, True) - 1).clamp(min=0) // 2
    at = (here == order.gather(dim, middle)).int().argmax(dim, True)  # 0 where all are NaN
    values = (x.gather(dim, at), at)
    return values if keepdim else tuple(t.squeeze(dim) for t in values)


def _diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    x = x.contiguous()
    a, b = dim1 % x.ndim, dim2 % x.ndim
    lead = max(-offset, 0) * x.stride(a) + max(offset, 0) * x.stride(b)
    strides = [*(x.stride(d) for d in range(x.ndim) if d not in (a, b)), x.stride(a) + x.stride(b)]
    return _as_strided_scatter(x, src, src.shape, strides, lead)


def _as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    import torch

    if not x.is_contiguous():
        return NotImplemented
    places = torch.from_numpy(places_in_memory(size, stride, storage_offset or 0).reshape(-1))
    return x.reshape(-1).scatter(0, places, src.reshape(-1).to(x.dtype)).reshape(x.shape)


def places_in_memory(size: Sequence[int], stride: Sequence[int], start: int) -> np.ndarray:
    """Where the elements of a strided tensor lie: an i64 array of its shape."""
    axes = np.indices([int(n) for n in size])
    return start + sum((a * int(n) for a, n in zip(axes, stride, strict=True)), np.zeros(axes.shape[1:], np.int64))


def _put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    return x.reshape(-1).index_put([index.reshape(-1)], source.reshape(-1), accumulate).reshape(x.shape)


def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    lined = index.reshape([-1 if i == dim % x.ndim else 1 for i in range(x.ndim)]).expand(source.shape)
    return x.scatter_reduce(dim, lined, source, reduce, include_self=include_self)


def _masked_select(x: Tensor, mask: Tensor) -> Tensor:
    import torch

    x, mask = (t.reshape(t.shape or (1,)) for t in torch.broadcast_tensors(x, mask))
    return x[mask]


def _squeeze(x: Tensor, dim: Any) -> Tensor:
    """Axes of another size than 1 stay."""
    dims = [dim] if isinstance(dim, int) else list(dim)
    ones = [d for d in dims if x.ndim and x.shape[d] == 1]
    if len(ones) == len(dims):
        return NotImplemented
    return x.squeeze(ones) if ones else x.view(x.shape)


def _complex_pad(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    import torch

    if not x.is_complex() or value != 0:
        return NotImplemented
    return torch.view_as_complex(torch.nn.functional.pad(torch.view_as_real(x), [0, 0, *pad]))


def _native_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and deviation have no gradient in PyTorch."""
    axes = tuple(range(-len(shape), 0))
    mean = x.detach().mean(axes, keepdim=True)
    scale = ((x.detach() - mean).square().mean(axes, keepdim=True) + eps).rsqrt()
    centred = x - x.mean(axes, keepdim=True)
    y = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, scale


def _safe_softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """0, without a gradient, where all elements are -inf."""
    import torch

    none = (x == -math.inf).all(dim, True)
    return torch.where(none, 0, torch.softmax(torch.where(none, 0, x), dim, dtype=dtype))


def _of_numbers(operator: Callable[..., Any], like_index: bool = False) -> Callable[..., Any]:
    """An operator of a tensor without axes, or with an empty index, which ONNX does not take, of one with an axis.

    `like_index`: the result has the index's shape.
    """

    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        import torch

        index = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if index is not None and not index.numel():
            return x.new_zeros(index.shape) if like_index else x.view(x.shape)
        if x.ndim:
            return NotImplemented
        shape = index.shape if like_index and index is not None else ()
        lines = (a.reshape(-1) if isinstance(a, torch.Tensor) else a for a in args)
        result = operator(x.reshape(1), *lines, **kwargs)
        return result.reshape(shape) if isinstance(result, torch.Tensor) else tuple(t.reshape(shape) for t in result)

    return decomposed


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """With running statistics, which the exporter drops: read in evaluation, else moved towards the mean of samples."""
    from torch.nn import functional as f

    if running_mean is None or running_var is None:
        return f.instance_norm(input, None, None, weight, bias, use_input_stats, momentum, eps)
    if not use_input_stats:
        return f.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    rows = input.detach().reshape(*input.shape[:2], -1)
    for running, here in ((running_mean, rows.mean(-1)), (running_var, rows.var(-1))):
        running.copy_((1 - momentum) * running + momentum * here.mean(0))
    return f.instance_norm(input, None, None, weight, bias, True, momentum, eps)


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
