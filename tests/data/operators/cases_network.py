"""Convolutions, pooling, normalisations, attention, recurrent operators, losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from spec import Const, Ints, Table, Uniform, exact, floats, number
from torch import Tensor

SPECS = Table()
add = SPECS.add
IMAGE = (2, 4, 6, 7)

# --------------------------------------------------------------------------------------
# Convolutions: kernels are (outputs, inputs / groups, ...)


def conv(note: str, shapes: list[tuple[int, ...]], before: tuple[int, ...] = (), **options: Any) -> None:
    """A Conv; `options` are ONNX's, `before` is the padding in F.pad's order where it is not symmetric."""
    dims = len(shapes[0]) - 2
    theirs = {
        k: options[o]
        for k, o in {"stride": "strides", "dilation": "dilations", "groups": "group"}.items()
        if o in options
    }
    pads = options.get("pads", [0] * 2 * dims)
    padding = [] if before or "auto_pad" in options else pads[:dims]
    function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]

    def run(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return function(F.pad(x, before), w, b, padding=padding or 0, **theirs)

    add("Conv", note, shapes, run, **options)


conv("2d", [IMAGE, (3, 4, 3, 3), (3,)])
conv("2d, pads", [IMAGE, (3, 4, 3, 3), (3,)], pads=[1, 2, 1, 2])
conv("2d, no bias", [IMAGE, (3, 4, 3, 2)], kernel_shape=[3, 2])
conv("2d, strides", [IMAGE, (3, 4, 3, 3), (3,)], strides=[2, 3], pads=[1, 1, 1, 1])
conv("2d, dilations", [IMAGE, (3, 4, 2, 3), (3,)], dilations=[2, 3], pads=[1, 3, 1, 3])
conv("2d, groups", [IMAGE, (6, 2, 3, 3), (6,)], group=2, pads=[1, 1, 1, 1])
conv("2d, depthwise", [IMAGE, (4, 1, 3, 3), (4,)], group=4, pads=[1, 1, 1, 1])
conv("2d, depthwise, two per channel, strides", [IMAGE, (8, 1, 3, 3)], group=4, pads=[1, 1, 1, 1], strides=[2, 2])
conv("2d, 1x1", [IMAGE, (5, 4, 1, 1), (5,)])
conv("2d, 1x1, strides", [IMAGE, (5, 4, 1, 1)], strides=[2, 2])
conv("2d, uneven pads", [IMAGE, (3, 4, 3, 3), (3,)], (2, 0, 0, 1), pads=[0, 2, 1, 0], strides=[2, 1])
conv("2d, SAME_UPPER", [IMAGE, (3, 4, 2, 4), (3,)], (1, 2, 0, 1), auto_pad="SAME_UPPER")
conv("2d, SAME_LOWER", [IMAGE, (3, 4, 2, 4), (3,)], (2, 1, 1, 0), auto_pad="SAME_LOWER")
conv("2d, SAME_UPPER, strides", [IMAGE, (3, 4, 3, 3)], (1, 1, 0, 1), auto_pad="SAME_UPPER", strides=[2, 2])
conv("2d, VALID", [IMAGE, (3, 4, 3, 3)], auto_pad="VALID", strides=[2, 2])
conv("1d", [(2, 3, 9), (4, 3, 3), (4,)], strides=[2], pads=[1, 1])
conv("1d, dilations, causal", [(2, 3, 9), (4, 3, 2), (4,)], (4, 0), dilations=[4], pads=[4, 0])
conv("1d, depthwise", [(2, 3, 9), (3, 1, 5)], group=3, pads=[2, 2])
conv("3d", [(1, 2, 4, 5, 4), (3, 2, 3, 2, 3), (3,)], pads=[1, 0, 1, 1, 0, 1])
conv(
    "3d, strides, dilations",
    [(2, 2, 5, 5, 6), (2, 2, 2, 3, 2)],
    strides=[2, 1, 2],
    dilations=[1, 2, 2],
    pads=[0, 2, 1] * 2,
)
conv("3d, groups", [(1, 4, 3, 4, 4), (4, 2, 2, 2, 2), (4,)], group=2)
conv("2d, kernel larger than the image", [(1, 2, 2, 2), (3, 2, 5, 5), (3,)], pads=[2, 2, 2, 2])


def transposed(
    note: str, shapes: list[tuple[int, ...]], cut: Callable[[Tensor], Tensor] | None = None, **options: Any
) -> None:
    """A ConvTranspose; `cut` removes what PyTorch cannot."""
    dims = len(shapes[0]) - 2
    names = {"stride": "strides", "dilation": "dilations", "groups": "group", "output_padding": "output_padding"}
    theirs = {k: options[o] for k, o in names.items() if o in options}
    padding = 0 if cut else options.get("pads", [0] * 2 * dims)[:dims]
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]

    def run(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        y = function(x, w, b, padding=padding, **theirs)
        return cut(y) if cut else y

    add("ConvTranspose", note, shapes, run, **options)


SMALL = (2, 4, 3, 4)
transposed("2d", [SMALL, (4, 3, 3, 3), (3,)])
transposed("2d, strides, pads", [SMALL, (4, 3, 3, 3), (3,)], strides=[2, 2], pads=[1, 1, 1, 1])
transposed("2d, output_padding", [SMALL, (4, 3, 3, 3), (3,)], strides=[2, 3], pads=[1, 1, 1, 1], output_padding=[1, 2])
transposed("2d, groups", [SMALL, (4, 3, 2, 2), (6,)], group=2, strides=[2, 2])
transposed("2d, depthwise", [SMALL, (4, 1, 3, 3)], group=4, strides=[2, 1], pads=[1, 1, 1, 1])
transposed("2d, dilations", [SMALL, (4, 2, 2, 3), (2,)], dilations=[2, 2], pads=[1, 2, 1, 2])
transposed("2d, uneven pads", [SMALL, (4, 2, 3, 3)], lambda y: y[..., 1:, :-2], strides=[2, 2], pads=[1, 0, 0, 2])
transposed("2d, SAME_UPPER", [SMALL, (4, 2, 3, 3)], lambda y: y[..., :-1, :-1], strides=[2, 2], auto_pad="SAME_UPPER")
transposed("1d", [(2, 3, 5), (3, 4, 4), (4,)], strides=[2], pads=[1, 1])
transposed(
    "3d", [(1, 2, 2, 3, 2), (2, 3, 3, 2, 3), (3,)], strides=[2, 1, 2], pads=[1, 0, 1, 1, 0, 1], output_padding=[1, 0, 1]
)

# --------------------------------------------------------------------------------------
# Pooling

add("MaxPool", "2d", [IMAGE], lambda x: F.max_pool2d(x, 2), kernel_shape=[2, 2], strides=[2, 2])
add(
    "MaxPool",
    "2d, pads",
    [IMAGE],
    lambda x: F.max_pool2d(x, 3, 2, 1),
    kernel_shape=[3, 3],
    strides=[2, 2],
    pads=[1] * 4,
)
add("MaxPool", "2d, ceil_mode", [IMAGE], lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True), kernel_shape=[3, 3],
    strides=[2, 2], ceil_mode=1)  # fmt: skip
add("MaxPool", "2d, ceil_mode, pads", [(1, 2, 7, 8)], lambda x: F.max_pool2d(x, (2, 3), (3, 2), (1, 1), ceil_mode=True),
    kernel_shape=[2, 3], strides=[3, 2], pads=[1] * 4, ceil_mode=1, opset=22)  # fmt: skip
add("MaxPool", "2d, dilations", [IMAGE], lambda x: F.max_pool2d(x, 2, 1, dilation=(2, 3)), kernel_shape=[2, 2],
    dilations=[2, 3])  # fmt: skip
add("MaxPool", "2d, dilations, strides, pads", [IMAGE], lambda x: F.max_pool2d(x, (3, 2), 2, 1, dilation=(2, 1)),
    kernel_shape=[3, 2], dilations=[2, 1], strides=[2, 2], pads=[1] * 4)  # fmt: skip
add("MaxPool", "2d, SAME_UPPER", [(1, 2, 5, 5)], lambda x: F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-np.inf), 2, 1),
    kernel_shape=[2, 2], auto_pad="SAME_UPPER")  # fmt: skip
add("MaxPool", "1d, overlapping", [(2, 3, 9)], lambda x: F.max_pool1d(x, 3, 1, 1), kernel_shape=[3], pads=[1, 1])
add(
    "MaxPool", "3d", [(1, 2, 4, 5, 4)], lambda x: F.max_pool3d(x, 2, (2, 1, 2)), kernel_shape=[2] * 3, strides=[2, 1, 2]
)
add("MaxPool", "ties", [exact(np.ones((1, 1, 4, 4)))], lambda x: F.max_pool2d(x, 2, 1), kernel_shape=[2, 2])
add("MaxPool", "with indices", [(1, 1, 4, 6)], lambda x: F.max_pool2d(x, 2, return_indices=True), kernel_shape=[2, 2],
    strides=[2, 2])  # fmt: skip
add("AveragePool", "2d", [IMAGE], lambda x: F.avg_pool2d(x, 2), kernel_shape=[2, 2], strides=[2, 2])
for note, include in [("count_include_pad", True), ("pads not counted", False)]:
    add("AveragePool", f"2d, {note}", [IMAGE], lambda x, c=include: F.avg_pool2d(x, 3, 2, 1, count_include_pad=c),
        kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4, count_include_pad=int(include))  # fmt: skip
    add("AveragePool", f"2d, {note}, ceil_mode", [(1, 2, 7, 8)],
        lambda x, c=include: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=c), kernel_shape=[3, 3],
        strides=[2, 2], pads=[1] * 4, count_include_pad=int(include), ceil_mode=1)  # fmt: skip
add(
    "AveragePool",
    "2d, ceil_mode",
    [(1, 2, 6, 6)],
    lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
    kernel_shape=[3, 3],
    strides=[2, 2],
    ceil_mode=1,
)
add("AveragePool", "1d", [(2, 3, 8)], lambda x: F.avg_pool1d(x, 3, 1), kernel_shape=[3])
add("AveragePool", "3d", [(1, 2, 4, 4, 5)], lambda x: F.avg_pool3d(x, 2, 2), kernel_shape=[2] * 3, strides=[2] * 3)
add(
    "AveragePool",
    "adaptive, as exported",
    [(2, 3, 6, 8)],
    lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    kernel_shape=[2, 4],
    strides=[2, 4],
)
add("MaxPool", "adaptive, as exported", [(2, 3, 6, 8)], lambda x: F.adaptive_max_pool2d(x, (3, 2)), kernel_shape=[2, 4],
    strides=[2, 4])  # fmt: skip
add("GlobalAveragePool", "2d", [IMAGE], lambda x: F.adaptive_avg_pool2d(x, 1))
add("GlobalAveragePool", "3d", [(2, 3, 2, 3, 4)], lambda x: F.adaptive_avg_pool3d(x, 1))
add("GlobalMaxPool", "2d", [IMAGE], lambda x: F.adaptive_max_pool2d(x, 1))
add("LpPool", "p 2", [IMAGE], lambda x: F.lp_pool2d(x, 2.0, 2), kernel_shape=[2, 2], strides=[2, 2])
add(
    "LpPool",
    "p 3, overlapping",
    [Uniform(IMAGE, 0.1, 2)],
    lambda x: F.lp_pool2d(x, 3.0, 3, 1),
    kernel_shape=[3, 3],
    p=3,
)
add("LpPool", "p 1, 1d", [(2, 3, 9)], lambda x: F.lp_pool1d(x.abs(), 1.0, 3, 2), kernel_shape=[3], strides=[2], p=1)
add("GlobalLpPool", "p 2", [(2, 3, 3, 4)], lambda x: torch.linalg.vector_norm(x, 2, (2, 3), True))


def unpool(x: Tensor, at: Tensor) -> Tensor:
    offset = torch.arange(x.shape[0] * x.shape[1]).view(*x.shape[:2], 1, 1) * 16
    return F.max_unpool2d(x, at - offset, 2)


add("MaxUnpool", "2d", [(1, 2, 2, 2), exact([[[[0, 3], [13, 10]], [[21, 18], [24, 31]]]])], unpool, kernel_shape=[2, 2],
    strides=[2, 2])  # fmt: skip

# --------------------------------------------------------------------------------------
# Normalisations

C = (3,)
ONE = Uniform(C, 0.5, 2)


def trained(x: Tensor, w: Tensor, b: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The result and the running mean (PyTorch's running variance is the unbiased one, ONNX's is not)."""
    mean = m.clone()
    return F.batch_norm(x, mean, v.clone(), w, b, True), mean


for note, shape in [("2d", (2, 3, 4, 4)), ("rows", (5, 3)), ("1d", (2, 3, 6)), ("3d", (2, 3, 2, 3, 2))]:
    add("BatchNormalization", f"training, {note}", [shape, ONE, C, C, ONE],
        trained, fixed=(3, 4), unread=1, training_mode=1)  # fmt: skip
    add("BatchNormalization", f"inference, {note}", [shape, ONE, C, C, ONE],
        lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, False, eps=2**-10), fixed=(3, 4), epsilon=2**-10)  # fmt: skip
X = (2, 3, 4)
for axis in (-1, 1, 0):
    part = X[axis:] if axis else X
    add(
        "LayerNormalization", f"axis {axis}", [X, part, part], lambda x, w, b: F.layer_norm(x, w.shape, w, b), axis=axis
    )
    add(
        "RMSNormalization", f"axis {axis}", [X, part], lambda x, w: F.rms_norm(x, w.shape, w, 1e-5), axis=axis, opset=23
    )
add(
    "LayerNormalization",
    "no bias, epsilon",
    [X, (4,)],
    lambda x, w: F.layer_norm(x, (4,), w, None, 2**-7),
    epsilon=2**-7,
)
add("LayerNormalization", "axis 2 of an image", [(2, 3, 4, 5), (4, 5), (4, 5)],
    lambda x, w, b: F.layer_norm(x, (4, 5), w, b), axis=2)  # fmt: skip
add(
    "LayerNormalization",
    "large mean",
    [Uniform((2, 8), 20.0, 22.0), (8,), (8,)],
    lambda x, w, b: F.layer_norm(x, (8,), w, b),
)
add("RMSNormalization", "epsilon", [X, (4,)], lambda x, w: F.rms_norm(x, (4,), w, 2**-7), epsilon=2**-7, opset=23)
for groups in (1, 2, 4):
    add(
        "GroupNormalization",
        f"{groups} groups",
        [(2, 4, 3, 3), (4,), (4,)],
        lambda x, w, b, g=groups: F.group_norm(x, g, w, b),
        num_groups=groups,
    )
add(
    "GroupNormalization",
    "rows of a sequence",
    [(2, 6, 5), (6,), (6,)],
    lambda x, w, b: F.group_norm(x, 3, w, b, 2**-10),
    num_groups=3,
    epsilon=2**-10,
)
for shape in [(2, 3, 4, 4), (2, 3, 6), (1, 3, 2, 3, 2)]:
    add(
        "InstanceNormalization",
        f"{len(shape) - 2}d",
        [shape, C, C],
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    )
add(
    "LRN",
    "size 3",
    [(2, 5, 3, 3)],
    lambda x: F.local_response_norm(x, 3, 0.125, 0.75, 1.0),
    size=3,
    alpha=0.125,
    beta=0.75,
)
add(
    "LRN",
    "size 5, bias 2",
    [(2, 7, 2, 3)],
    lambda x: F.local_response_norm(x, 5, 0.5, 0.5, 2.0),
    size=5,
    alpha=0.5,
    beta=0.5,
    bias=2.0,
)
add("MeanVarianceNormalization", "", [(2, 3, 3, 3)], lambda x: F.batch_norm(x, None, None, training=True, eps=1e-20))
for axis in (-1, 0, 1):
    add("Softmax", f"axis {axis}", [X], lambda x, a=axis: x.softmax(a), axis=axis)
    add("LogSoftmax", f"axis {axis}", [X], lambda x, a=axis: x.log_softmax(a), axis=axis)
add("Softmax", "a row masked but for one", [exact([[0.5, -1e9, -1e9], [1.0, 2.0, -1e9]])], lambda x: x.softmax(-1))
add("LogSoftmax", "far apart", [exact([[90.0, -90.0, 0.5], [1.0, 2.0, 3.0]])], lambda x: x.log_softmax(-1))
add("Dropout", "off", [X], lambda x: F.dropout(x, 0.5, False))

# --------------------------------------------------------------------------------------
# Attention


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


Q, KV = (2, 4, 3, 4), (2, 4, 5, 4)
attend = {"opset": 23}
add("Attention", "plain", [Q, KV, KV], sdpa, **attend)
add("Attention", "scale", [Q, KV, KV], lambda *x: sdpa(*x, scale=0.25), scale=0.25, **attend)
add("Attention", "causal", [KV, KV, KV], lambda *x: sdpa(*x, is_causal=True), is_causal=1, **attend)
add("Attention", "boolean mask", [Q, KV, KV, exact([[True, True, False, True, False]] * 3)], sdpa, **attend)
add("Attention", "float mask per head", [Q, KV, KV, (2, 4, 3, 5)], sdpa, **attend)
add("Attention", "float mask, broadcast", [Q, KV, KV, (3, 5)], sdpa, **attend)
add("Attention", "grouped queries", [Q, (2, 2, 5, 4), (2, 2, 5, 4)], lambda *x: sdpa(*x, enable_gqa=True), **attend)
add("Attention", "grouped queries, causal", [KV, (2, 2, 5, 4), (2, 2, 5, 4)],
    lambda *x: sdpa(*x, enable_gqa=True, is_causal=True), is_causal=1, **attend)  # fmt: skip
add("Attention", "one key head", [Q, (2, 1, 5, 4), (2, 1, 5, 4)], lambda *x: sdpa(*x, enable_gqa=True), **attend)
add(
    "Attention",
    "causal with a mask",
    [KV, KV, KV, Uniform((5, 5), -1, 1)],
    lambda q, k, v, m: sdpa(q, k, v, m.masked_fill(torch.ones(5, 5).triu(1).bool(), -np.inf)),
    is_causal=1,
    **attend,
)
add(
    "Attention",
    "a past",
    [Q, (2, 4, 2, 4), (2, 4, 2, 4), None, (2, 4, 3, 4), (2, 4, 3, 4)],
    lambda q, k, v, pk, pv: (sdpa(q, k := torch.cat([pk, k], 2), v := torch.cat([pv, v], 2)), k, v),
    **attend,
)
add("Attention", "wider values", [Q, KV, (2, 4, 5, 6)], sdpa, **attend)
add("Attention", "three dimensions", [(2, 3, 8), (2, 5, 4), (2, 5, 4)],
    lambda q, k, v: sdpa(heads(q, 4), heads(k, 2), heads(v, 2), enable_gqa=True).transpose(1, 2).flatten(2),
    q_num_heads=4, kv_num_heads=2, **attend)  # fmt: skip

# --------------------------------------------------------------------------------------
# Recurrent operators: ONNX's gates are (i, o, f, c) and (z, r, h), PyTorch's (i, f, c, o) and (r, z, n)

ORDER = {"LSTM": [0, 2, 3, 1], "GRU": [1, 0, 2], "RNN": [0]}
H = 3
LENGTHS = np.array([3, 5, 1], np.int32)


def recurrent(op: str, x: Tensor, w: Tensor, r: Tensor, b: Tensor | None, *states: Tensor | None, relu: bool = False,
              reverse: bool = False) -> tuple[Tensor, ...]:  # fmt: skip
    """ONNX's outputs by PyTorch's recurrent layers, weights and results laid out as ONNX requires them."""
    gates, directions, order = len(ORDER[op]), w.shape[0], ORDER[op]

    def swap(m: Tensor) -> Tensor:
        return m.unflatten(0, (gates, H))[order].flatten(0, 1)

    weights: list[Tensor] = []
    for d in range(directions):
        weights += [swap(w[d]), swap(r[d])]
        if b is not None:
            weights += [swap(part) for part in b[d].chunk(2)]
    zero = x.new_zeros(directions, x.shape[1], H)
    start = [zero if s is None else s for s in states] or [zero] * (2 if op == "LSTM" else 1)
    options = (weights, b is not None, 1, 0.0, False, directions == 2, False)
    x = x.flip(0) if reverse else x
    if op == "LSTM":
        y, *last = torch.lstm(x, start, *options)
    else:
        function = torch.gru if op == "GRU" else torch.rnn_relu if relu else torch.rnn_tanh
        y, *last = function(x, start[0], *options)
    y = y.flip(0) if reverse else y
    return y.unflatten(2, (directions, H)).transpose(1, 2), *last


def batch_first(op: str, x: Tensor, w: Tensor, r: Tensor, b: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    y, *last = recurrent(op, x.transpose(0, 1), w, r, b, *(s.transpose(0, 1) for s in states))
    return y.permute(2, 0, 1, 3), *(s.transpose(0, 1) for s in last)


def packed(op: str, x: Tensor, w: Tensor, r: Tensor, b: Tensor, lengths: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    """Sequences of unequal lengths, zeros behind their ends."""
    layer = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "RNN": torch.nn.RNN}[op](2, H, bidirectional=w.shape[0] == 2)
    gates, order = len(ORDER[op]), ORDER[op]
    values = {}
    for d, suffix in enumerate(["", "_reverse"][: w.shape[0]]):
        parts = zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), (w[d], r[d], *b[d].chunk(2)), strict=True)
        values |= {f"{n}_l0{suffix}": m.unflatten(0, (gates, H))[order].flatten(0, 1) for n, m in parts}
    rows = torch.nn.utils.rnn.pack_padded_sequence(x, lengths.long(), enforce_sorted=False)
    y, last = torch.func.functional_call(layer, values, (rows, states if op == "LSTM" else states[0]))
    y, _ = torch.nn.utils.rnn.pad_packed_sequence(y, total_length=len(x))
    return y.unflatten(2, (w.shape[0], H)).transpose(1, 2), *(last if op == "LSTM" else (last,))


for op, gates in [("LSTM", 4), ("GRU", 3), ("RNN", 1)]:
    more = {"hidden_size": H, **({"linear_before_reset": 1} if op == "GRU" else {})}
    count = 2 if op == "LSTM" else 1

    def weights(d: int, gates: int = gates) -> list[tuple[int, ...]]:
        return [(d, gates * H, 2), (d, gates * H, H), (d, 2 * gates * H)]

    run = lambda *x, o=op: recurrent(o, *x)  # noqa: E731
    add(op, "forward", [(4, 2, 2), *weights(1)], run, **more)
    add(op, "no bias", [(4, 2, 2), *weights(1)[:2]], lambda x, w, r, o=op: recurrent(o, x, w, r, None), **more)
    add(op, "initial states", [(4, 2, 2), *weights(1), None, *[(1, 2, H)] * count], run, **more)
    add(
        op,
        "bidirectional",
        [(4, 2, 2), *weights(2), None, *[(2, 2, H)] * count],
        run,
        direction="bidirectional",
        **more,
    )
    add(
        op,
        "reverse",
        [(4, 2, 2), *weights(1)],
        lambda *x, o=op: recurrent(o, *x, reverse=True),
        direction="reverse",
        **more,
    )
    add(op, "batch first, bidirectional", [(2, 4, 2), *weights(2), None, *[(2, 2, H)] * count],
        lambda *x, o=op: batch_first(o, *x), direction="bidirectional", layout=1, **more)  # fmt: skip
    for d, direction in [(1, "forward"), (2, "bidirectional")]:
        add(op, f"sequence_lens, {direction}", [(5, 3, 2), *weights(d), LENGTHS, *[(d, 3, H)] * count],
            lambda *x, o=op: packed(o, *x), direction=direction, **more)  # fmt: skip
    add(op, "one step", [(1, 2, 2), *weights(1)], run, **more)
add("RNN", "relu", [(4, 2, 2), (1, H, 2), (1, H, H), (1, 2 * H)], lambda *x: recurrent("RNN", *x, relu=True),
    hidden_size=H, activations=["Relu"])  # fmt: skip

# --------------------------------------------------------------------------------------
# Losses

CLASSES = Ints((5,), 0, 3)
PIXELS = Ints((2, 2, 3), 0, 3)
IGNORED = exact([0, 2, -1, 1, -1])
W3 = Uniform((3,), 0.5, 2)
for op, function in [("SoftmaxCrossEntropyLoss", F.cross_entropy), ("NegativeLogLikelihoodLoss", F.nll_loss)]:
    for reduction in ("mean", "sum", "none"):
        add(
            op,
            reduction,
            [(5, 3), CLASSES],
            lambda x, t, f=function, r=reduction: f(x, t, reduction=r),
            reduction=reduction,
        )
        add(
            op,
            f"{reduction}, weights",
            [(5, 3), CLASSES, W3],
            lambda x, t, w, f=function, r=reduction: f(x, t, w.detach(), reduction=r),
            reduction=reduction,
            fixed=(2,),
        )
        add(
            op,
            f"{reduction}, ignore_index, weights",
            [(5, 3), IGNORED, W3],
            lambda x, t, w, f=function, r=reduction: f(x, t, w.detach(), ignore_index=-1, reduction=r),
            reduction=reduction,
            ignore_index=-1,
            fixed=(2,),
        )
    add(op, "pixels", [(2, 3, 2, 3), PIXELS], function)
    add(op, "pixels, ignore_index, weights", [(2, 3, 2, 3), PIXELS, W3],
        lambda x, t, w, f=function: f(x, t, w.detach(), ignore_index=1), ignore_index=1, fixed=(2,))  # fmt: skip
add(
    "SoftmaxCrossEntropyLoss",
    "with log_prob",
    [(5, 3), CLASSES],
    lambda x, t: (F.cross_entropy(x, t), x.log_softmax(1)),
)

# --------------------------------------------------------------------------------------
# Quantisation: the straight-through estimator of PyTorch's fake quantisation

WIDE = Uniform((3, 8), -12, 12)
pair: dict[str, Any] = {"chain": ("DequantizeLinear",)}
for note, kind, low, high, zero in [("uint8", np.uint8, 0, 255, 100), ("int8", np.int8, -128, 127, 0)]:
    add("QuantizeLinear", f"{note}, then back", [WIDE, number(1 / 16), Const(np.array(zero, kind))],
        lambda x, z=zero, a=low, b=high: torch.fake_quantize_per_tensor_affine(x, 1 / 16, z, a, b), **pair)  # fmt: skip
STEPS, ZEROS = [1 / 16, 1 / 8, 1 / 32], [3, -5, 0]
add(
    "QuantizeLinear",
    "per channel, then back",
    [WIDE, floats(*STEPS), Const(np.array(ZEROS, np.int8))],
    lambda x: torch.fake_quantize_per_channel_affine(
        x, torch.tensor(STEPS), torch.tensor(ZEROS, dtype=torch.int32), 0, -128, 127
    ),
    axis=0,
    **pair,
)
