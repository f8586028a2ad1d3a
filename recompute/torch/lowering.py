"""What PyTorch's ONNX exporter would lose, written as plain operators before it sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from .decompositions import chosen, decompositions, functions, places_in_memory
from .matrices import matrices
from .pooling import pooling
from .special import special

#: arguments that the exporter drops, of operators that are written out here
LOWERED = {
    "aten.embedding": {"padding_idx", "scale_grad_by_freq"},
    "aten.avg_pool2d": {"divisor_override"},
    "aten.avg_pool3d": {"divisor_override"},
    "aten.cross_entropy_loss": {"label_smoothing"},
    "aten._upsample_bilinear2d_aa": {"scales_h", "scales_w"},
    "aten._upsample_bicubic2d_aa": {"scales_h", "scales_w"},
}
#: arguments that change no number where they are dropped, by operator ("": of all)
HARMLESS = {
    "": {"layout", "device", "pin_memory", "memory_format", "non_blocking", "dtype", "generator", "sparse", "stride"},
    "aten.einsum": {"path"},
    "aten.expand": {"implicit"},
    "aten.gather": {"sparse_grad"},
    "aten.layer_norm": {"cudnn_enable"},
    "aten.group_norm": {"cudnn_enabled"},
    "aten.native_group_norm": {"C", "HxW"},
    "aten.repeat_interleave.self_int": {"output_size"},
    "aten.sym_storage_offset": {"self", "dim"},
    "aten._unique": {"sorted"},
    "aten._unique2": {"sorted"},
    "aten.unique_dim": {"sorted"},
    "aten.unique_consecutive": {"return_inverse", "return_counts"},
    "aten._scaled_dot_product_flash_attention": {"return_debug_mask"},
}


def lowered(program: ExportedProgram) -> ExportedProgram:
    """The exported program (`torch.export.ExportedProgram`), functional, with such nodes decomposed."""
    return program.run_decompositions(_table())


def _table() -> dict[Any, Callable[..., Any]]:
    """Decompositions by operator; NotImplemented: as it is."""
    aten = torch.ops.aten
    return {
        **decompositions(),
        **special(),
        **matrices(),
        **pooling(),
        aten.cross_entropy_loss.default: _cross_entropy,
        aten.embedding.default: _embedding,
        aten.lstm.input: _lstm,
        aten.cdist.default: _distances,
        aten._cdist_forward.default: _distances,
        aten.pdist.default: _distances_within,
        aten.linalg_vector_norm.default: _norm,
        aten.scatter_reduce.two: _scatter_reduce,
        aten.searchsorted.Tensor: _places,
        aten._weight_norm.default: _weight_norm,
        aten.sort.stable: _stable_sort,
        aten.kthvalue.default: _kth,
        aten.median.dim: chosen(_place_of_median),
        aten.cumprod.default: _running(lambda x: x.prod(-1), 1.0),
        aten.logcumsumexp.default: _running(lambda x: x.logsumexp(-1), -math.inf),
        **{getattr(aten.std, o): _deviation(getattr(aten.var, o)) for o in ("default", "dim", "correction")},
    }


def _cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """With label smoothing or probabilities as targets, or of one sample, as PyTorch's documentation defines it."""
    soft = target.is_floating_point()
    if not soft and label_smoothing == 0 and x.ndim > 1:
        return NotImplemented
    axis = 0 if x.ndim == 1 else 1
    classes = x.shape[axis]
    logp = torch.log_softmax(x, axis)
    shape = [classes if i == axis else 1 for i in range(x.ndim)]
    scaled = logp if weight is None else logp * weight.reshape(shape)
    if soft:
        smooth = target * (1 - label_smoothing) + label_smoothing / classes
        each = -(scaled * smooth).sum(axis)
        return _reduced(each, reduction, each.numel() if x.ndim > 1 else 1)
    counted = target != ignore_index
    index = torch.where(counted, target, 0).unsqueeze(axis)
    chosen = -scaled.gather(axis, index).squeeze(axis)
    each = (1 - label_smoothing) * chosen - label_smoothing / classes * scaled.sum(axis)
    each = torch.where(counted, each, 0.0)
    total = counted.to(x.dtype)
    if weight is not None:
        total = torch.where(counted, weight[index.squeeze(axis)], 0.0)
    return _reduced(each, reduction, total.sum())


def _reduced(each: Tensor, reduction: int, count: Tensor | float) -> Tensor:
    return each if reduction == 0 else each.sum() / count if reduction == 1 else each.sum()


def _embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    """The row `padding_idx` gets no gradient."""
    if scale_grad_by_freq:
        raise NotImplementedError("scale_grad_by_freq=True of an embedding is not supported: leave it out")
    if padding_idx < 0:
        return NotImplemented
    rows = torch.ops.aten.embedding.default(weight, indices)
    return torch.where((indices == padding_idx).unsqueeze(-1), rows.detach(), rows)


def _lstm(x: Tensor, state: Sequence[Tensor], params: Sequence[Tensor], *options: Any) -> tuple[Tensor, ...]:
    """With projections, which ONNX's LSTM does not have: step by step."""
    has_biases, num_layers, _, _, bidirectional, _ = options
    if len(params) == (2 + 2 * has_biases) * num_layers * (1 + bidirectional):
        return NotImplemented
    one = decomposition_table[torch.ops.aten.lstm.input]
    return one(x, state, params, *options)


def _distances(a: Tensor, b: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Tensor:
    """Distances of all pairs of rows."""
    return _between(a.unsqueeze(-2) - b.unsqueeze(-3), p)


def _distances_within(x: Tensor, p: float = 2.0) -> Tensor:
    """Distances of each pair of different rows, once."""
    count = int(x.shape[0])
    first = [i for i in range(count) for _ in range(i + 1, count)]
    second = [j for i in range(count) for j in range(i + 1, count)]
    return _between(x[first] - x[second], p)


def _between(difference: Tensor, p: float) -> Tensor:
    """Norms of differences; at p = infinity each of the largest has the whole gradient, as in PyTorch's distances."""
    if p != math.inf:
        return torch.linalg.vector_norm(difference, ord=p, dim=-1)
    sizes = difference.abs()
    largest = sizes.detach().amax(-1, keepdim=True)
    those = torch.where(sizes == largest, sizes, 0.0).sum(-1)
    return those + (largest.squeeze(-1) - those).detach()


def _norm(
    x: Tensor,
    ord: float = 2,
    dim: int | tuple[int, ...] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Norms whose roots have no gradient at 0, as PyTorch defines it."""
    if ord in (0, 1, 2, math.inf, -math.inf) or ord < 0 or x.is_complex():
        return NotImplemented
    sizes = x.abs().to(dtype or x.dtype)
    none = sizes == 0
    powers = torch.where(none, 0.0, torch.where(none, 1.0, sizes) ** ord)
    total = powers.sum() if dim is None else powers.sum(dim, keepdim)
    if dim is None and keepdim:
        total = total.reshape([1] * x.ndim)
    none = total == 0
    return torch.where(none, 0.0, torch.where(none, 1.0, total) ** (1 / ord))


def _deviation(variance: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Standard deviations, which have no gradient at 0, as PyTorch defines it."""

    def decomposed(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        squares = variance(x, *args, **kwargs)
        none = squares == 0
        return torch.where(none, 0.0, torch.where(none, 1.0, squares).sqrt())

    return decomposed


def _scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Means of what is scattered to one place; extremes without what was there, of which the exporter keeps NaN."""
    if reduce in ("amax", "amin") and not include_self and x.is_floating_point():
        replaced = torch.zeros_like(x).scatter(dim, index, 1) > 0
        rest = torch.where(replaced, -math.inf if reduce == "amax" else math.inf, x)
        return torch.ops.aten.scatter_reduce.two(rest, dim, index, src, reduce)
    if reduce != "mean":
        return NotImplemented
    src = src[tuple(slice(n) for n in index.shape)]
    count = torch.zeros_like(x).scatter_add(dim, index, torch.ones_like(src))
    if include_self:
        return x.scatter_add(dim, index, src) / (count + 1)
    means = torch.zeros_like(x).scatter_add(dim, index, src) / count.clamp(min=1)
    return torch.where(count == 0, x, means)


def _running(reduced: Callable[[Tensor], Tensor], nothing: float) -> Callable[..., Tensor]:
    """Reductions of all beginnings of an axis."""

    def decomposed(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        if x.ndim == 0:
            return x.to(dtype or x.dtype)
        rows = x.to(dtype or x.dtype).movedim(dim, -1)
        first = torch.ones(rows.shape[-1], rows.shape[-1], dtype=torch.bool).tril()
        fill = nothing if rows.is_floating_point() else int(nothing)  # else integers would become float32
        return reduced(torch.where(first, rows.unsqueeze(-2), fill)).movedim(-1, dim)

    return decomposed


def _places(
    sorted_sequence: Tensor, x: Tensor, *, out_int32: bool = False, right: bool = False, **other: Any
) -> Tensor:
    """How many of a row come before each of x."""
    if other.get("sorter") is not None:
        return NotImplemented
    before = torch.le if right or other.get("side") == "right" else torch.lt
    rows, x = sorted_sequence.unsqueeze(-2) if sorted_sequence.ndim > 1 else sorted_sequence, x.unsqueeze(-1)
    those = before(rows, x) | x.isnan() if x.is_floating_point() else before(rows, x)  # NaN comes last
    return those.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)


def _stable_sort(
    x: Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Tensor, ...]:
    """ONNX's sorting is stable."""
    return torch.ops.aten.sort.default(x, dim, descending)


def _kth(x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, ...]:
    """The k-th smallest, and where it is."""
    return chosen(lambda x, dim: torch.ops.aten.sort.default(x, dim, False)[1].narrow(dim, k - 1, 1))(x, dim, keepdim)


def _place_of_median(x: Tensor, dim: int) -> Tensor:
    """The median, of an even number of elements the lower one; NaN where there is one."""
    at = _kth(x, (x.shape[dim] + 1) // 2, dim, True)[1]
    if not x.is_floating_point():
        return at
    missing = x.isnan()
    return torch.where(missing.any(dim, True), missing.int().argmax(dim, True), at)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Weight normalisation; a vector's elements are normalised one by one, where the exporter takes the norm of all."""
    return v * (g / v.abs()) if v.ndim == 1 and dim == 0 else NotImplemented


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by its documentation's formula."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.size(-3) // x.size(-3), -3) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (q.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if hidden else scores + attn_mask
    return torch.dropout(torch.softmax(scores, -1), dropout_p, True) @ v


def traceable(dynamic: bool) -> Any:
    """Within: functions that cannot be traced, or are exported wrongly, are written in others.

    `torch.as_strided`, which exporters apply to a copy without gaps, takes tensors that lie otherwise too.
    A mode, not a function in its place: PyTorch calls that itself, for the shapes of slices.
    """

    def as_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Tensor:
        start = int(x.storage_offset())
        if x.is_contiguous() and not storage_offset and not start:
            return torch.as_strided(x, size, stride, storage_offset)
        held = {int(at): i for i, at in enumerate(places_in_memory(x.shape, x.stride(), start).flat)}
        read = places_in_memory(size, stride, start if storage_offset is None else storage_offset)
        if not held.keys() >= set(read.flat):
            raise NotImplementedError("as_strided reads memory that its tensor does not have: take the whole tensor")
        if dynamic:
            raise NotImplementedError("as_strided of a tensor with gaps takes the example's batch only")
        index = [held[at] for at in read.reshape(-1).tolist()]
        return x.reshape(-1)[torch.tensor(index)].reshape(read.shape)

    instead = {torch.as_strided: as_strided, torch.Tensor.as_strided: as_strided, **functions()}

    class Traceable(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return instead.get(func, func)(*args, **(kwargs or {}))

    return Traceable()
