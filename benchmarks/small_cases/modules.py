"""Small modules after public reports of wrong numbers: edges, losses, optimizers, pooling, resizing, attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from beside import CASES, SGD, Optimizers, W, add, each, layer, over, run
from torch import nn

import recompute as rc
from recompute import clip

__all__ = ["CASES", "run"]

T, INF = torch.tensor, float("inf")

# -- gradients at edges -----------------------------------------------------------------------------------------------

_ROWS = [[0.0, 0.0, 0.0], [1.0, -2.0, 2.0], [0.0, 3.0, 0.0]]
_NEAR = [[0.0, 0.0, 0.0], [1.0, -1.0, 2.0], [0.0, 3.0, 0.0]]
each("norm_0", "torch#2421", "the gradient of a norm that is 0 is NaN", lambda w: w.norm(dim=1), w=_ROWS)
each("norm_3", "torch#2421", "the same of another norm", lambda w: w.norm(p=3, dim=1), w=_ROWS)
each("norm_half", "torch#44452", "norms with 0 < p < 1 have NaN gradients", lambda w: w.norm(p=0.5, dim=1), w=_ROWS)
each("norm_inf_ties", "torch#2421", "the maximum norm with equal elements", lambda w: w.norm(p=INF, dim=1), w=_ROWS)
each("normalize_1", "torch#3264", "F.normalize(p=1) gives NaN", lambda w: F.normalize(w, p=1, eps=1e-3), w=_ROWS)
each("normalize_0", "torch#184575", "F.normalize of 0", lambda w: F.normalize(w, eps=1e-2), w=_ROWS)
each(
    "cdist_equal",
    "torch#37154",
    "cdist of equal rows has NaN gradients",
    lambda a, b: torch.cdist(a, b),
    a=_ROWS,
    b=_NEAR,
)
each("cdist_1", "torch#26076", "wrong gradients of cdist", lambda a, b: torch.cdist(a, b, p=1.0), a=_ROWS, b=_NEAR)
each(
    "cdist_inf", "https://github.com/flagos-ai/FlagGems/issues/5023", "the gradient of cdist ignores p",
    lambda a, b: torch.cdist(a, b, p=INF), a=_ROWS, b=_NEAR,
)  # fmt: skip
each("cdist_3", "torch#36493", "NaN where one difference is 0", lambda a, b: torch.cdist(a, b, p=3.0), a=_ROWS, b=_NEAR)
each("pdist", "torch#37154", "the same distances of one set of points", lambda w: F.pdist(w), w=_NEAR)
each(
    "std_0",
    "torch#4320",
    "torch.std has NaN gradients where all is equal",
    lambda w: w.std(1),
    w=[[1.0, 1.0], [1.0, 3.0]],
)
each("var_correction", "torch#94184", "wrong gradient of var", lambda w: w.var((0, 1), correction=2), w=_ROWS)
each("prod_0", "torch#82644", "prod's gradient where a factor is 0", lambda w: w.prod(1), w=_ROWS)
each(
    "cumprod_0",
    "tf#3862",
    "cumprod's gradient is NaN at 0",
    lambda w: w.cumprod(1),
    w=[[0.0, 2.0, 3.0], [2.0, 0.0, 0.0]],
)
each("cumprod_2", "tf#119430", "cumprod's gradient is 0 where it is not", lambda w: w.cumprod(0), w=[2.0, 3.0, 0.0])
each(
    "logsumexp_inf", "torch#31829", "logsumexp's gradient is NaN where all is -inf",
    lambda w: torch.logsumexp(torch.stack([w, torch.full_like(w, -INF)]), 0), w=[1.0, 2.0],
)  # fmt: skip
each("logsumexp_far", "jax#23842", "logsumexp beside a large number", lambda w: torch.logsumexp(w, 0), w=[0.0, 100.0])
each(
    "logcumsumexp",
    "jax#6811",
    "sums of exponentials step by step",
    lambda w: torch.logcumsumexp(w, 0),
    w=[-99.0, 1.0, 99.0],
)
each(
    "softmax_min", "torch#25110", "softmax of a masked row",
    lambda w: torch.softmax(w.masked_fill(T([[True, True], [False, True]]), torch.finfo(w.dtype).min), 1),
    w=[[1.0, 2.0], [3.0, 4.0]],
)  # fmt: skip
each(
    "where_sqrt",
    "torch#187297",
    "NaN from the branch that is not taken",
    lambda w: torch.where(w > 0, w.sqrt(), w),
    w=[-1.0, 4.0],
)
each(
    "where_exp",
    "torch#68425",
    "the same of an exponential",
    lambda w: torch.where(w <= 0, w.exp(), 1 + w),
    w=[1000.0, -1.0],
)
each(
    "topk_unequal",
    "https://github.com/tensorflow/tensorflow/pull/109337",
    "which of equal elements counts",
    lambda w: w.topk(2).values,
    w=[1.0, 3.0, 2.0],
)
each(
    "amax_ties",
    "https://github.com/tensorflow/tensorflow/pull/109337",
    "equal elements share the gradient",
    lambda w: w.amax(1),
    w=_ROWS,
)
each(
    "remainder",
    "torch#1164",
    "remainder has the sign of the divisor",
    lambda w: torch.remainder(w, 3.0),
    w=[-4.0, 4.0, -1.0],
)
each("fmod", "torch#48739", "fmod and remainder of an exported file", lambda w: torch.fmod(w, 3.0), w=[-4.0, 4.0, -1.0])
layer(
    "integer_ceiling", "https://github.com/onnx/tensorflow-onnx/issues/2174", "-(-a // b) is exported as a // b",
    lambda s, i: s.w * -(-i // 3).sum(), (T([3, 7, 10]),), w=W([1.0, 2.0]),
)  # fmt: skip
layer(
    "integer_truncated", "https://github.com/onnx/onnx/issues/7570", "division of negative integers differs",
    lambda s, i: s.w * torch.div(-i, 3, rounding_mode="trunc").sum(), (T([3, 7, 10]),), w=W([1.0, 2.0]),
)  # fmt: skip

# -- losses -----------------------------------------------------------------------------------------------------------

_LABELS, _CLASSES = T([0, 2, -100, 1]), T([1.0, 3.0, 0.5])


def scored(name: str, source: str, said: str, f: Any, *targets: Any, optimizers: Optimizers = SGD) -> None:
    """A loss of a linear layer's scores."""
    add(name, source, said, lambda s, x, *y: f(s.a(x), *y), ((4, 5), *targets), optimizers, a=lambda: nn.Linear(5, 3))


scored("ce_none_counts", "torch#116349", "cross entropy of no label is NaN", F.cross_entropy, T([-100] * 4))
scored(
    "ce_none_counts_sum", "torch#70348", "the same as a sum",
    lambda z, y: F.cross_entropy(z, y, reduction="sum") + z.pow(2).mean(), T([-100] * 4),
)  # fmt: skip
scored(
    "ce_ignored_and_weights", "torch#12670", "ignored labels count in the mean",
    lambda z, y: F.cross_entropy(z, y, weight=_CLASSES.to(z.dtype)), _LABELS,
)  # fmt: skip
scored(
    "ce_ignored_class", "torch#63004", "an ignored class stays in the softmax",
    lambda z, y: F.cross_entropy(z, y, ignore_index=1), T([0, 2, 1, 1]),
)  # fmt: skip
scored(
    "ce_ignored_none", "torch#12670", "a mean of losses that are not reduced",
    lambda z, y: F.cross_entropy(z, y, reduction="none").mean(), _LABELS,
)  # fmt: skip
_PROBABILITIES = T([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.2, 0.3, 0.5]])
for _reduction in ("batchmean", "mean", "sum"):
    scored(
        f"kl_{_reduction}", "torch#89558", "KLDivLoss has NaN gradients where a target is 0",
        lambda z, q, r=_reduction: F.kl_div(F.log_softmax(z, 1), q, reduction=r), _PROBABILITIES,
    )  # fmt: skip
scored(
    "kl_log_target", "torch#114049", "NaN from kl_div",
    lambda z: F.kl_div(F.log_softmax(z, 1), F.log_softmax(z * 2, 1), log_target=True, reduction="batchmean"),
)  # fmt: skip

# -- optimizers -------------------------------------------------------------------------------------------------------

_FLAG = "https://github.com/flagos-ai/FlagGems/pull/4989"
_BITS = "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2010"


class _Clipped(torch.optim.SGD):
    """Gradients are clipped by their common norm."""

    def step(self) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        super().step()


for _name, _source, _said, _theirs, _ours in (
    ("adam_decay", _FLAG, "Adam decays as AdamW does",
     lambda p: torch.optim.Adam(p, 0.05, weight_decay=0.3), lambda: rc.Adam(0.05, weight_decay=0.3)),
    ("adamw_decay", _BITS, "decay in the wrong order",
     lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.3), lambda: rc.AdamW(0.05, weight_decay=0.3)),
    ("amsgrad", "torch#51539", "Adam with decay and amsgrad",
     lambda p: torch.optim.Adam(p, 0.05, amsgrad=True, weight_decay=0.1),
     lambda: rc.Adam(0.05, amsgrad=True, weight_decay=0.1)),
    ("nesterov", "https://github.com/oysteijo/simd_neuralnet/issues/10", "Nesterov's momentum half works",
     lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True), lambda: rc.Nesterov(0.05, momentum=0.9)),
    ("clipped", "https://github.com/huggingface/transformers/issues/35203", "the gradient's norm is not the batch's",
     lambda p: _Clipped(p, 0.125), lambda: rc.SGD(0.125, grad_clip=clip.ClipGradByGlobalNorm(0.1))),
):  # fmt: skip
    scored(_name, _source, _said, F.cross_entropy, T([0, 2, 1, 1]), optimizers=(_theirs, _ours))

# -- pooling, resizing, padding, convolutions -------------------------------------------------------------------------

_AVERAGE = "torch#183528"
over("resize_1x1", "torch#183523", "bilinear to 1 x 1 differs", lambda s, x: F.interpolate(x, (1, 1), mode="bilinear"))
over(
    "resize_corners", "torch#22906", "align_corners is lost",
    lambda s, x: F.interpolate(x, (8, 9), mode="bicubic", align_corners=True),
)  # fmt: skip
over(
    "resize_antialias", "torch#177138", "bicubic with antialias has the other coefficient",
    lambda s, x: F.interpolate(x, (3, 4), mode="bicubic", antialias=True),
)  # fmt: skip
over(
    "adaptive_average",
    "torch#42653",
    "sizes that do not divide are refused",
    lambda s, x: F.adaptive_avg_pool2d(x, (3, 4)),
)
over("adaptive_maximum", "torch#64806", "the same", lambda s, x: F.adaptive_max_pool2d(x, (3, 4)))
over(
    "average_ceil", _AVERAGE, "average pooling with ceil_mode and padding differs",
    lambda s, x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=True),
)  # fmt: skip
over(
    "average_last",
    "torch#116420",
    "a last window in the padding",
    lambda s, x: F.avg_pool2d(x, 4, 4, 2, ceil_mode=True),
)
over(
    "maximum_ceil", "https://github.com/onnx/onnx/issues/4958", "ceil_mode makes windows of nothing",
    lambda s, x: F.max_pool2d(x, 2, 4, 1, ceil_mode=True),
)  # fmt: skip


def _grid() -> nn.Parameter:
    """Points exactly on the pixels, the last ones on the border."""
    whole = T([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    return nn.Parameter(F.affine_grid(whole, [1, 1, 5, 5], align_corners=True))


for _padding, _number in (("border", "23925"), ("reflection", "63559")):
    over(
        f"grid_{_padding}", f"torch#{_number}", "grid_sample at the border",
        lambda s, x, p=_padding: F.grid_sample(x, s.grid, padding_mode=p, align_corners=True), (1, 1, 5, 5), grid=_grid,
    )  # fmt: skip
over(
    "pad_circular",
    "torch#86690",
    "circular padding is exported wrongly",
    lambda s, x: F.pad(x, (1, 2, 3, 0), mode="circular"),
)
over(
    "pad_reflect",
    "https://github.com/onnx/onnx/issues/6735",
    "reflection is computed wrongly",
    lambda s, x: F.pad(x, (3, 0, 1, 4), mode="reflect"),
)
over(
    "pad_negative",
    "torch#60179",
    "the exporter has the padded axes wrong",
    lambda s, x: F.pad(x, (-1, 2, 1, -2), value=1.5),
)
over(
    "conv_circular", "torch#95229", "convolutions with circular padding", lambda s, x: s.c(x),
    c=lambda: nn.Conv2d(3, 4, (4, 3), padding="same", dilation=(1, 2), padding_mode="circular"),
)  # fmt: skip
over(
    "conv_transposed", "ort#14208", "output_padding with dilation differs", lambda s, x: s.c(x),
    c=lambda: nn.ConvTranspose2d(3, 2, 2, stride=1, padding=3, dilation=2, output_padding=1),
)  # fmt: skip
over(
    "conv_transposed_strided", "ort#2518", "the shape with dilation is wrong", lambda s, x: s.c(x),
    c=lambda: nn.ConvTranspose2d(3, 2, (3, 5), stride=(2, 1), padding=(4, 2), dilation=(3, 1)),
)  # fmt: skip
over(
    "unfold",
    "torch#22862",
    "unfold is not exported",
    lambda s, x: F.unfold(x, (2, 3), dilation=(2, 1), padding=1, stride=2),
)
over(
    "fold",
    "torch#41423",
    "fold is not exported",
    lambda s, x: F.fold(F.unfold(x, (2, 3), padding=1), (5, 6), (2, 3), padding=1),
)
over(
    "pixel_unshuffle",
    "script#2891",
    "channels come in another order",
    lambda s, x: F.pixel_unshuffle(x, 2),
    (1, 2, 4, 6),
)
over("batch_norm", "torch#19902", "running variances are unbiased", lambda s, x: s.n(x), n=lambda: nn.BatchNorm2d(3))
over(
    "batch_norm_momentum",
    "torch#15298",
    "which way momentum counts",
    lambda s, x: s.n(x),
    n=lambda: nn.BatchNorm2d(3, momentum=0.3),
)
over("roll", "torch#128324", "roll is not exported", lambda s, x: x.roll((-2, 9), (2, 3)))

# -- indexing, views --------------------------------------------------------------------------------------------------

_TWICE = T([0, 4, 2, 2, 4])
layer(
    "index_put", "torch#61034", "repeated indices count once",
    lambda s, b, i: s.w.index_put((i,), b * s.v, accumulate=True), ((5, 3), _TWICE), w=W((5, 3)), v=W((5, 3)),
)  # fmt: skip
layer(
    "segment_sum", "torch#91357", "sums of segments are wrong after export",
    lambda s, i: torch.zeros_like(s.w).scatter_add(0, i[:, None].expand(5, 3), s.w), (_TWICE,), w=W((5, 3)),
)  # fmt: skip
for _reduction in ("mean", "amax", "prod"):
    layer(
        f"scatter_{_reduction}", "script#1683", "scattering with a reduction is missing",
        lambda s, i, r=_reduction: s.v.scatter_reduce(0, i[:, None].expand(5, 3), s.w, r), (_TWICE,),
        w=W((5, 3)), v=W((5, 3)),
    )  # fmt: skip
layer(
    "steps",
    "ort#4202",
    "slices with a step are wrong",
    lambda s, x: (s.w * x)[:, ::2, 1::2].flip(1),
    ((2, 5, 6),),
    w=W((5, 6)),
)


def _assigned(s: Any, x: torch.Tensor) -> torch.Tensor:
    a = s.w * 2
    a[1:4:2] = x[:2] * s.w[0]
    a[:, -1] = 0
    return a


def _masked_view(s: Any, x: torch.Tensor) -> torch.Tensor:
    a = s.w * 2
    a.view(3, 5).masked_fill_(T([[True, False, True, False, False]]), 7.0)
    return a * x


layer("slice_assigned", "torch#19948", "assignments to slices are lost", _assigned, ((5, 3),), w=W((5, 3)))
layer("masked_view", "torch#95050", "masked_fill_ of a view is lost", _masked_view, ((5, 3),), w=W((5, 3)))

# -- recurrent layers, attention --------------------------------------------------------------------------------------

layer(
    "gru",
    "script#2852",
    "GRU without linear_before_reset",
    lambda s, x: s.r(x)[0],
    ((4, 2, 3),),
    r=lambda: nn.GRU(3, 4),
)
layer(
    "gru_no_bias",
    "torch#34800",
    "without bias the export fails",
    lambda s, x: s.r(x)[0],
    ((4, 2, 3),),
    r=lambda: nn.GRU(3, 4, bias=False),
)
layer(
    "rnn_bidirectional", "ort#1607", "the backward direction with a first state is wrong",
    lambda s, x, h: s.r(x, h)[0] + s.r(x, h)[1].mean(), ((2, 4, 3), (2, 2, 4)),
    r=lambda: nn.RNN(3, 4, nonlinearity="relu", bidirectional=True, batch_first=True),
)  # fmt: skip
layer(
    "lstm_bidirectional", "https://github.com/onnx/onnx-tensorflow/issues/409", "first states of both directions",
    lambda s, x: s.r(x, (s.h, s.c))[0] + s.r(x, (s.h, s.c))[1][1].mean(), ((4, 2, 3),),
    r=lambda: nn.LSTM(3, 4, bidirectional=True), h=W((2, 2, 4)), c=W((2, 2, 4)),
)  # fmt: skip
_PADDED = T([[0, 0, 0, 1], [0, 0, 1, 1]])
_EMPTY = T([[0, 0, 0, 1], [1, 1, 1, 1]])
for _name, _number, _mask, _weights, _said in (
    ("padded", "27968", _PADDED, True, "padding is masked wrongly"),
    ("all_padded", "40932", _EMPTY, True, "a sample of padding gives NaN"),
    ("all_padded_fast", "41508", _EMPTY, False, "gradients become NaN"),
):
    layer(
        f"attention_{_name}", f"torch#{_number}", _said,
        lambda s, x, m, n=_weights: s.a(x, x, x, key_padding_mask=m > 0, need_weights=n)[0], ((2, 4, 6), _mask),
        a=lambda: nn.MultiheadAttention(6, 2, batch_first=True),
    )  # fmt: skip


def _rotated(s: Any, x: torch.Tensor, half: bool) -> torch.Tensor:
    angles = torch.outer(torch.arange(4), T([1.0, 0.1, 0.01])).to(x.dtype)
    x = x * s.w
    if half:
        angles, (a, b) = torch.cat([angles, angles], 1), x.chunk(2, -1)
        turned = torch.cat([-b, a], -1)
    else:
        angles = angles.repeat_interleave(2, 1)
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    return x * angles.cos() + turned * angles.sin()


_ROTARY = "https://github.com/EleutherAI/gpt-neox/issues/834"
layer("rotary_half", _ROTARY, "which half is rotated", lambda s, x: _rotated(s, x, True), ((2, 4, 6),), w=W((6,)))
layer("rotary_pairs", _ROTARY, "pairs instead of halves", lambda s, x: _rotated(s, x, False), ((2, 4, 6),), w=W((6,)))
layer(
    "weight_norm",
    "ort#3143",
    "weight_norm differs after export",
    lambda s, x: s.c(x),
    ((2, 3, 8),),
    c=lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 3)),
)
layer(
    "weight_norm_vector",
    "torch#130644",
    "the norm of a vector is one number",
    lambda s, x: s.a(x),
    ((4, 3),),
    a=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2), name="bias"),
)
layer(
    "weight_norm_0",
    "torch#19126",
    "weights of 0 give NaN",
    lambda s, x: s.a(x) * s.w,
    ((4, 3),),
    a=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    w=W([0.0, 1.0]),
)


def _frozen() -> nn.Module:
    return nn.Linear(3, 3).requires_grad_(False)


layer(
    "lora_scaled",
    "peft#2486",
    "merging forgets the scale",
    lambda s, x: F.linear(x, s.a.weight + 2.5 * s.up @ s.down, s.a.bias),
    ((4, 3),),
    a=_frozen,
    down=W((2, 3)),
    up=W([[0.0, 0.0]] * 3),
)
layer(
    "lora_beside",
    "peft#1035",
    "merged and separate adapters differ",
    lambda s, x: s.a(x) + 2.5 * (x @ s.down.T @ s.up.T),
    ((4, 3),),
    a=_frozen,
    down=W((2, 3)),
    up=W([[0.0, 0.0]] * 3),
)
