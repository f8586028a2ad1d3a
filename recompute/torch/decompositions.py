"""Operators of PyTorch for which its ONNX exporter has no function, by operators for which it has one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..ops.loss.ctc import NO_LENGTH


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions by operator; one that gives NotImplemented leaves the operator as it is."""
    aten = torch.ops.aten
    other = {"divide": "div", "true_divide": "div", "multiply": "mul", "subtract": "sub", "greater": "gt"}
    other |= {"greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne"}
    return {
        # other names, of which the exporter does not bring both sides to one type
        **{getattr(aten, a).Tensor: getattr(aten, b).Tensor for a, b in other.items()},
        aten.cummax.default: _running(largest=True),
        aten.cummin.default: _running(largest=False),
        aten.median.default: _median,
        aten.nanmedian.default: _nan_median,
        aten.nanmedian.dim: chosen(_place_of_nan_median),
        aten.mode.default: chosen(_place_of_mode),
        aten.diagonal_scatter.default: _diagonal_scatter,
        aten.as_strided_scatter.default: _as_strided_scatter,
        aten.put.default: _put,
        aten.index_fill.int_Scalar: _index_fill,
        aten.index_fill.int_Tensor: _index_fill,
        aten.index_reduce.default: _index_reduce,
        aten.squeeze.dim: _squeeze,
        aten.squeeze.dims: _squeeze,
        aten.squeeze_copy.dim: _squeeze,
        aten.squeeze_copy.dims: _squeeze,
        **{f.default: _resized(f.default) for f in (aten.fft_fft2, aten.fft_ifft2, aten.fft_fftn, aten.fft_ifftn)},
        aten.native_layer_norm.default: _native_layer_norm,
        aten.grid_sampler_3d.default: aten.grid_sampler.default,
        aten._safe_softmax.default: _safe_softmax,
        aten._grouped_mm.default: _grouped_product,
        **{f.default: _grouped_product for f in [getattr(torch.ops.transformers, "grouped_mm_fallback", None)] if f},
        **{f: _of_numbers(f) for f in (aten.topk.default, aten.scatter_add.default)},
        **{f: _of_numbers(f) for f in (aten.scatter.src, aten.scatter.value)},
        aten.gather.default: _of_numbers(aten.gather.default, like_index=True),
    }


def functions() -> dict[Any, Callable[..., Any]]:
    """Functions that cannot be traced as PyTorch has them."""
    table: dict[Any, Callable[..., Any]] = {torch.cov: _covariance, torch.corrcoef: _correlation}
    table = {**table, torch.Tensor.cov: _covariance, torch.Tensor.corrcoef: _correlation}
    table = {**table, torch.masked_select: _masked_select, torch.Tensor.masked_select: _masked_select}
    table = {**table, torch.combinations: _combinations, functional.instance_norm: _instance_norm}
    table = {**table, functional.gaussian_nll_loss: _gaussian_nll_loss, functional.embedding_bag: _embedding_bag}
    return {**table, torch.ctc_loss: _ctc_loss, functional.ctc_loss: _ctc_loss}


def _running(*, largest: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    """Extremes of all beginnings of an axis, and where they last are; NaN from the first NaN on."""

    def decomposed(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
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
    if not x.numel():
        return NotImplemented
    here = x.detach().reshape(-1)
    order = torch.ops.aten.sort.default(here, 0, False)[0]
    middle = order.narrow(0, (here.shape[0] - 1) // 2, 1).squeeze(0)  # an index would be that of the example's batch
    if not x.is_floating_point():
        return middle
    below = torch.where(here <= middle, x.reshape(-1), -math.inf)
    return torch.where(here.isnan().any(), math.nan, below.amax(0))


def _nan_median(x: Tensor) -> Tensor:
    """The lower median of all elements but NaN; equal ones have equal parts of its gradient."""
    if not x.numel():
        return NotImplemented
    flat = x.reshape(-1)
    middle = chosen(_place_of_nan_median)(flat.detach(), 0)[0]
    if not x.is_floating_point():
        return middle
    return torch.where(middle.isnan(), math.nan, torch.where(flat <= middle, flat, -math.inf).amax(0))


def chosen(place: Callable[[Tensor, int], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """One element of an axis, and where it is: `place(x, dim)`, i64 with a size of 1 there; a number is at 0."""

    def decomposed(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, ...]:
        if x.ndim == 0:
            return x * 1, torch.zeros((), dtype=torch.int64)
        at = place(x.detach(), dim)
        values = (x.gather(dim, at), at)
        return values if keepdim else tuple(t.squeeze(dim) for t in values)

    return decomposed


def _place_of_nan_median(here: Tensor, dim: int) -> Tensor:
    """The lower median but for NaN, the first of equal ones."""
    missing = here.isnan() if here.is_floating_point() else torch.zeros(here.shape, dtype=torch.bool)
    rest = torch.where(missing, math.inf, here) if here.is_floating_point() else here
    middle = ((~missing).sum(dim, True) - 1).clamp(min=0) // 2
    median = torch.ops.aten.sort.default(rest, dim)[0].gather(dim, middle)
    return (here == median).int().argmax(dim, True)  # 0 where all are NaN


def _place_of_mode(x: Tensor, dim: int) -> Tensor:
    """The most frequent elements, of those the smallest one, the last of equal ones."""
    rows = x.movedim(dim, -1)
    counts = (rows.unsqueeze(-1) == rows.unsqueeze(-2)).sum(-1)
    usual = counts == counts.amax(-1, True)
    least = torch.where(usual, rows, rows.amax(-1, True)).amin(-1, True)
    return torch.where(rows == least, torch.arange(rows.shape[-1]), -1).amax(-1, True).movedim(-1, dim)


def _diagonal_scatter(x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    x = x.contiguous()
    a, b = dim1 % x.ndim, dim2 % x.ndim
    lead = max(-offset, 0) * x.stride(a) + max(offset, 0) * x.stride(b)
    strides = [*(x.stride(d) for d in range(x.ndim) if d not in (a, b)), x.stride(a) + x.stride(b)]
    return _as_strided_scatter(x, src, src.shape, strides, lead)


def _as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
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


def _index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """By a mask: places may be named twice, and the value's gradient counts each once."""
    places = torch.arange(x.shape[dim] if x.ndim else 1)
    filled = (places[:, None] == places[index.reshape(-1)]).any(1)
    filled = filled.reshape([-1 if i == dim % x.ndim else 1 for i in range(x.ndim)])
    return torch.where(filled, value.to(x.dtype) if isinstance(value, torch.Tensor) else x.new_full((), value), x)


def _index_reduce(
    x: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    lined = index.reshape([-1 if i == dim % x.ndim else 1 for i in range(x.ndim)]).expand(source.shape)
    return x.scatter_reduce(dim, lined, source, reduce, include_self=include_self)


def _masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """TorchScript's exporter does not broadcast."""
    x, mask = (t.reshape(t.shape or (1,)) for t in torch.broadcast_tensors(input, mask))
    return x[mask]


def _squeeze(x: Tensor, dim: Any) -> Tensor:
    """Axes of another size than 1 stay; one whose size is the batch's stays or goes, and fixes the batch."""
    dims = [dim] if isinstance(dim, int) else list(dim)
    if any(isinstance(x.shape[d], torch.SymInt) for d in dims if x.ndim):
        raise NotImplementedError(
            "squeeze of an axis that is 1 at some batches only: it takes the example's batch only"
        )
    ones = [d for d in dims if x.ndim and x.shape[d] == 1]
    if len(ones) == len(dims):
        return NotImplemented
    return x.squeeze(ones) if ones else x.view(x.shape)


def _resized(transform: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Fourier transforms that pad or cut real tensors; the exporter would pad complex ones, which it cannot."""

    def decomposed(x: Tensor, s: Sequence[int] | None = None, dim: Any = None, norm: str | None = None) -> Tensor:
        if s is None or x.is_complex():
            return NotImplemented
        axes = list(range(-len(s), 0) if dim is None else dim)
        for axis, n in zip(axes, s, strict=True):
            ends = [0, 0] * (-1 - axis if axis < 0 else x.ndim - 1 - axis)
            x = x if n < 0 else functional.pad(x, [*ends, 0, n - x.shape[axis]])
        return transform(x, None, axes, norm)

    return decomposed


def _native_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and deviation have no gradient in PyTorch."""
    axes, dtype = tuple(range(-len(shape), 0)), x.dtype
    x = x.float() if dtype.itemsize < 4 else x  # squares of 16 bits overflow
    mean = x.detach().mean(axes, keepdim=True)
    scale = ((x.detach() - mean).square().mean(axes, keepdim=True) + eps).rsqrt()
    centred = x - x.mean(axes, keepdim=True)
    y = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(dtype), mean.to(dtype), scale.to(dtype)


def _safe_softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """0, without a gradient, where all elements are -inf."""
    none = (x == -math.inf).all(dim, True)
    return torch.where(none, 0, torch.softmax(torch.where(none, 0, x), dim, dtype=dtype))


def _grouped_product(
    x: Tensor, weight: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Rows by the matrix of their group, where the groups' ends are data: all matrices, of which each row takes one.

    Rows after the last group are 0.
    """
    if offs is None or bias is not None or x.ndim != 2 or weight.ndim != 3:
        return NotImplemented
    group = (torch.arange(x.shape[0]).unsqueeze(1) >= offs).sum(1).reshape(1, -1, 1)
    products = torch.matmul(x, weight)
    index = group.clamp(max=weight.shape[0] - 1).expand(1, -1, weight.shape[2])
    rows = torch.where(group < weight.shape[0], products.gather(0, index), 0.0).squeeze(0)
    return rows.to(out_dtype or x.dtype)


def _of_numbers(operator: Callable[..., Any], like_index: bool = False) -> Callable[..., Any]:
    """An operator of a tensor without axes, or with an empty index, which ONNX does not take, of one with an axis.

    `like_index`: the result has the index's shape.
    """

    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Any:
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
    if running_mean is None or running_var is None:
        return functional.instance_norm(input, None, None, weight, bias, use_input_stats, momentum, eps)
    if not use_input_stats:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    rows = input.detach().reshape(*input.shape[:2], -1)
    for running, here in ((running_mean, rows.mean(-1)), (running_var, rows.var(-1))):
        running.copy_((1 - momentum) * running + momentum * here.mean(0))
    return functional.instance_norm(input, None, None, weight, bias, True, momentum, eps)


def _covariance(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """The covariance of rows, with weights of observations."""
    rows = input.reshape(1, -1) if input.ndim < 2 else input
    counts = torch.ones(rows.shape[1]) if fweights is None else fweights
    weights = counts.to(rows.dtype) if aweights is None else counts * aweights
    total = weights.sum()
    centred = rows - (rows * weights).sum(1, keepdim=True) / total
    lost = correction if aweights is None else correction * (weights * aweights).sum() / total
    return ((centred * weights) @ centred.T / (total - lost).clamp(min=0)).squeeze()


def _correlation(input: Tensor) -> Tensor:
    matrix = _covariance(input)
    if matrix.ndim == 0:
        return matrix / matrix
    deviations = matrix.diagonal().sqrt()
    return (matrix / deviations.unsqueeze(1) / deviations).clamp(-1, 1)


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    if input.ndim != 1 or r < 1:  # PyTorch's errors, and its empty tensor
        return torch.combinations(input, r, with_replacement)
    choose: Callable[..., Iterator[Any]] = (
        itertools.combinations_with_replacement if with_replacement else itertools.combinations
    )
    index = torch.tensor(list(choose(range(int(input.shape[0])), r)), dtype=torch.int64).reshape(-1, r)
    return input[index.reshape(-1)].reshape(index.shape)


def _gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Without PyTorch's look for variances below 0, which only data could answer."""
    var = var if isinstance(var, Tensor) else torch.full_like(input, var)
    if var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (var.log() + (input - target) ** 2 / var + (math.log(2 * math.pi) if full else 0))
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def _embedding_bag(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Bags of one length with a padding index are sums over masks; the exporter counts them by data."""
    names = (
        "offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights include_last_offset padding_idx"
    )
    given = {**dict(zip(names.split(), args, strict=False)), **kwargs}
    padding, mode = given.get("padding_idx"), given.get("mode", "mean")
    if padding is None or input.ndim != 2 or given.get("max_norm") is not None or given.get("scale_grad_by_freq"):
        return functional.embedding_bag(input, weight, *args, **kwargs)
    there = (input != padding % weight.shape[0]).unsqueeze(-1)
    rows = functional.embedding(input, weight)
    if mode == "max":
        most = torch.where(there, rows, -math.inf).max(1).values
        return torch.where(there.any(1), most, 0.0)
    factors = there.to(rows.dtype)
    if given.get("per_sample_weights") is not None:
        factors = factors * given["per_sample_weights"].unsqueeze(-1)
    total = (rows * factors).sum(1)
    return total if mode == "sum" else total / there.sum(1).clamp(min=1)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: Any = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """One operator of labels that end at -100, which `rc.losses.ctc` has too."""
    x = log_probs.reshape(log_probs.shape[0], -1, log_probs.shape[-1])  # without a batch: of one sample
    x = x.float() if x.dtype.itemsize < 4 else x
    steps, counts = (torch.as_tensor(n, dtype=torch.int64).reshape(-1) for n in (input_lengths, target_lengths))
    if log_probs.ndim == 2 or targets.ndim == 2:
        rows = targets.reshape(-1, targets.shape[-1])
    else:  # one after the other
        most = targets.shape[0] if isinstance(target_lengths, torch.Tensor) else max(target_lengths)
        places = (counts.cumsum(0) - counts)[:, None] + torch.arange(most)
        rows = targets[places.clamp(max=targets.shape[0] - 1)]
    size = rows.shape[1]
    labels = torch.where(torch.arange(size) < counts[:, None], rows.long(), -100)
    labels = torch.where(((counts < 0) | (counts > size))[:, None], NO_LENGTH, labels)
    options = {"blank": blank, "zero_infinity": int(zero_infinity)}
    loss = torch.onnx.ops.symbolic(
        "recompute::CTCLoss", (x, labels, steps), options, dtype=x.dtype, shape=x.shape[1:2], version=1
    ).to(log_probs.dtype)
    if reduction in (1, "mean"):
        return (loss / counts.clamp(min=1)).mean()
    return loss.sum() if reduction in (2, "sum") else loss.reshape(log_probs.shape[1:-1])
