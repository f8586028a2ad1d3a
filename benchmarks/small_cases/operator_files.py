"""Cases of resizing, normalisation, recurrent operators, convolution and pooling, after public reports."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from checks import GITHUB, Verdict, node, operator, wave

CASES: dict[str, tuple[str, str, Callable[[], Verdict]]] = {}
I64 = np.int64
GROUPS = wave(2, 6, 5)


def add(name: str, source: str, said: str, case: Callable[[], Verdict]) -> None:
    CASES[name] = (GITHUB + source, said, case)


def ints(*values: int) -> np.ndarray:
    return np.array(values, I64)


def resize(shape: tuple[int, ...], sizes: tuple[int, ...] | None = None, scales: tuple | None = None, **given: object):
    """A case of Resize; `want` may be given."""
    want, opset, x = given.pop("want", None), given.pop("opset", 18), given.pop("x", wave(*shape))
    held = {"z": ints(*sizes)} if sizes else {"z": np.array(scales, np.float32)}
    made = node("Resize", "x _ _ z" if sizes else "x _ z", **given)
    return operator(made, {"x": x}, held, want=want, opset=opset)


LINE = np.linspace(0, 1, 20, dtype=np.float32).reshape(1, 1, 1, 20)
add(
    "resize nearest, ties up",
    "onnx/onnx/issues/7841",
    "20 to 6: element 4 is that of index 14, not 15",
    resize(
        (1, 1, 1, 20),
        (1, 1, 1, 6),
        x=LINE,
        mode="nearest",
        nearest_mode="round_prefer_ceil",
        coordinate_transformation_mode="half_pixel",
        want=[LINE[..., [1, 5, 8, 11, 15, 18]]],
    ),
)
for _mode, _scale in (("half_pixel", 1.5), ("asymmetric", 3.0)):
    add(
        f"resize nearest, floor, {_mode}",
        f"iree-org/iree/issues/{24264 if _mode == 'half_pixel' else 24581}",
        "some elements come from the wrong place",
        resize(
            (1, 1, 4, 4),
            scales=(1, 1, _scale, _scale),
            mode="nearest",
            nearest_mode="floor",
            coordinate_transformation_mode=_mode,
        ),
    )
add(
    "resize cubic, exclude outside",
    "onnx/onnx/issues/4583",
    "cubic, asymmetric, with a coefficient: wrong numbers",
    resize((1, 2, 5, 4), (1, 2, 7, 9), mode="cubic", cubic_coeff_a=-0.5, exclude_outside=1),
)
add(
    "resize 26 to 64 by scale",
    "microsoft/onnxruntime/issues/28085",
    "pixels one off from another framework",
    resize((1, 1, 1, 26), scales=(1, 1, 1, 64 / 26), mode="nearest", nearest_mode="round_prefer_ceil"),
)
add(
    "upsample of opset 9",
    "onnx/onnx/issues/4583",
    "the older operator with scales as input",
    operator(
        node("Upsample", "x s", mode="linear"),
        {"x": wave(1, 2, 3, 4)},
        {"s": np.array([1, 1, 2, 3], np.float32)},
        opset=9,
        ir=4,
    ),
)

_bn = {"s": wave(3), "b": wave(3, phase=1), "m": wave(3, phase=2), "v": np.abs(wave(3)) + 0.5}
_x = wave(4, 3, 5)
_mean, _var = _x.mean((0, 2)), _x.var((0, 2))
add(
    "batch norm in training",
    "microsoft/onnxruntime/issues/16867",
    "training mode of opset 14 is not supported",
    operator(
        node("BatchNormalization", "x s b m v", "y rm rv", training_mode=1, momentum=0.8),
        {"x": _x},
        _bn,
        outputs=("y", "rm", "rv"),
        opset=15,
        gradient=False,
        want=[
            ((_x - _mean[:, None]) / np.sqrt(_var + 1e-5)[:, None] * _bn["s"][:, None] + _bn["b"][:, None]),
            _bn["m"] * 0.8 + _mean * 0.2,
            _bn["v"] * 0.8 + _var * 0.2,
        ],
    ),
)
add(
    "batch norm of a matrix",
    "ENOT-AutoDL/onnx2torch/issues/121",
    "spatial rank -2 is not implemented",
    operator(node("BatchNormalization", "x s b m v"), {"x": wave(4, 3)}, _bn, opset=9),
)

for _name, _opset, _size in (("a group", 18, 2), ("a channel", 21, 6)):
    _s, _b = wave(_size) + 2, wave(_size, phase=2)
    _g = GROUPS.reshape(2, 2, -1)
    _n = ((_g - _g.mean(2, keepdims=True)) / np.sqrt(_g.var(2, keepdims=True) + 1e-5)).reshape(2, 6, 5)
    add(
        f"group norm, a scale for {_name}",
        "onnx/onnx/issues/5466",
        "18: one scale for each group; 21: each channel",
        operator(
            node("GroupNormalization", "x s b", num_groups=2),
            {"x": GROUPS},
            {"s": _s, "b": _b},
            opset=_opset,
            want=[_n * np.repeat(_s, 6 // _size)[:, None] + np.repeat(_b, 6 // _size)[:, None]],
        ),
    )
add(
    "layer norm, two axes, three outputs",
    "microsoft/onnxruntime/issues/22955",
    "the gradient asks for outputs",
    operator(
        node("LayerNormalization", "x s _", "y m i", axis=1),
        {"x": wave(2, 3, 4)},
        {"s": wave(3, 4) + 2},
        outputs=("y", "m", "i"),
        opset=17,
    ),
)
add(
    "instance norm of 1 channel",
    "onnx/onnx/issues/7805",
    "loops over the wrong axis where batch is not channels",
    operator(node("InstanceNormalization", "x s b"), {"x": wave(3, 1, 4, 2)}, {"s": wave(1) + 1, "b": wave(1)}),
)
add(
    "lrn of an odd window",
    "onnx/onnx/issues/7805",
    "loops over the batch instead of the channels",
    operator(node("LRN", "x", size=3, alpha=0.5, beta=0.6, bias=1.2), {"x": wave(2, 5, 3, 3)}),
)
_p = np.pad(wave(1, 4, 2, 2) ** 2, ((0, 0), (1, 2), (0, 0), (0, 0)))
add(
    "lrn of an even window",
    "apache/mxnet/issues/11281",
    "the window reaches farther up for even sizes",
    operator(
        node("LRN", "x", size=4, alpha=0.8, beta=0.5, bias=1.0),
        {"x": wave(1, 4, 2, 2)},
        want=[wave(1, 4, 2, 2) / np.sqrt(1 + 0.2 * sum(_p[:, i : i + 4] for i in range(4)))],
    ),
)

_gru = {"w": wave(1, 12, 3), "r": wave(1, 12, 4, phase=1), "b": wave(1, 24)}
add(
    "gru, reset after the product",
    "microsoft/onnxscript/issues/2852",
    "linear_before_reset is lost",
    operator(
        node("GRU", "x w r b", "y h", hidden_size=4, linear_before_reset=1),
        {"x": wave(5, 2, 3)},
        _gru,
        outputs=("y", "h"),
    ),
)
add(
    "gru without a bias, batch 3",
    "microsoft/onnxruntime/pull/3893",
    "memory that is not cleared",
    operator(node("GRU", "x w r", "y", hidden_size=4, linear_before_reset=1), {"x": wave(4, 3, 3)}, _gru),
)
add(
    "gru with other activations",
    "sonos/tract/issues/2751",
    "activations and clip are ignored in silence",
    operator(
        node("GRU", "x w r b", "y", hidden_size=4, activations=["HardSigmoid", "Softsign"]), {"x": wave(4, 2, 3)}, _gru
    ),
)
_lstm = {"w": wave(1, 16, 3), "r": wave(1, 16, 4, phase=1), "b": wave(1, 32), "p": wave(1, 12, phase=2)}
add(
    "lstm with peepholes",
    "PINTO0309/onnx2tf/pull/303",
    "peepholes",
    operator(
        node("LSTM", "x w r b _ _ _ p", "y h c", hidden_size=4), {"x": wave(4, 2, 3)}, _lstm, outputs=("y", "h", "c")
    ),
)
add(
    "lstm, input and forget gate joined",
    "sonos/tract/issues/2751",
    "input_forget is ignored in silence",
    operator(node("LSTM", "x w r b", "y", hidden_size=4, input_forget=1), {"x": wave(4, 2, 3)}, _lstm),
)
add(
    "lstm with a clip",
    "microsoft/onnxruntime/issues/27224",
    "the cell is not clipped before its activation",
    operator(node("LSTM", "x w r b", "y", hidden_size=4, clip=0.4), {"x": wave(4, 2, 3)}, _lstm),
)
add(
    "lstm backwards",
    "microsoft/onnxruntime/issues/4187",
    "outputs are in the reverse order",
    operator(
        node("LSTM", "x w r b", "y h", hidden_size=4, direction="reverse"),
        {"x": wave(4, 2, 3)},
        _lstm,
        outputs=("y", "h"),
    ),
)
add(
    "lstm backwards with lengths",
    "NervanaSystems/ngraph/pull/3176",
    "each row is reversed in its own length",
    operator(
        node("LSTM", "x w r b n", "y h", hidden_size=4, direction="reverse"),
        {"x": wave(4, 2, 3)},
        {**_lstm, "n": np.array([4, 2], np.int32)},
        outputs=("y", "h"),
    ),
)
_turned = wave(4, 2, 3).transpose(1, 0, 2).copy()


def batch_first() -> Verdict:
    from checks import by_runtime, model

    made = model([node("LSTM", "x w r b", "y h", hidden_size=4)], {"x": wave(4, 2, 3)}, _lstm, ("y", "h"))
    y, h = by_runtime(made, {"x": wave(4, 2, 3)})
    return operator(
        node("LSTM", "x w r b", "y h", hidden_size=4, layout=1),
        {"x": _turned},
        _lstm,
        outputs=("y", "h"),
        want=[y.transpose(2, 0, 1, 3), h.transpose(1, 0, 2)],
    )()


add("lstm with the batch first", "onnx/onnx/issues/5218", "layout=1 does not give layout=0's numbers", batch_first)
add(
    "rnn with relu",
    "onnx/onnx/pull/2279",
    "activations of the recurrent operators are untested",
    operator(
        node("RNN", "x w r b _ h", "y", hidden_size=4, activations=["Relu"]),
        {"x": wave(3, 2, 3)},
        {"w": wave(1, 4, 3), "r": wave(1, 4, 4), "b": wave(1, 8), "h": wave(1, 2, 4)},
    ),
)

_w = {"w": wave(2, 3, 3, 3)}
add(
    "transposed convolution, same",
    "onnx/onnx/issues/2788",
    "auto_pad is ignored",
    operator(node("ConvTranspose", "x w", auto_pad="SAME_UPPER", strides=[1, 1]), {"x": wave(1, 2, 4, 4)}, _w),
)
add(
    "transposed convolution, same, stride 2",
    "microsoft/onnxruntime/issues/11927",
    "the shape is not input x stride",
    operator(node("ConvTranspose", "x w", auto_pad="SAME_LOWER", strides=[2, 2]), {"x": wave(1, 2, 3, 3)}, _w),
)
add(
    "transposed convolution, same, added",
    "onnx/onnx/issues/4299",
    "auto_pad together with output_padding",
    operator(
        node("ConvTranspose", "x w", auto_pad="SAME_UPPER", strides=[2, 2], output_padding=[1, 1]),
        {"x": wave(1, 2, 3, 3)},
        _w,
    ),
)
add(
    "transposed convolution to a shape",
    "microsoft/onnxruntime/pull/13311",
    "odd padding on the wrong side",
    operator(node("ConvTranspose", "x w", output_shape=[8, 6], strides=[2, 2]), {"x": wave(1, 2, 4, 3)}, _w),
)
add(
    "transposed convolution in groups",
    "microsoft/onnxruntime/issues/4698",
    "shapes with auto_pad and dilations",
    operator(node("ConvTranspose", "x w", group=2, dilations=[2, 1], pads=[1, 0, 0, 1]), {"x": wave(1, 2, 4, 4)}, _w),
)

_row = wave(1, 2, 9)
_ends = [(0, 7), (3, 10), (6, 13), (9, 15)]
_padded = np.pad(_row, ((0, 0), (0, 0), (3, 3)))
add(
    "average pool, rounded up",
    "microsoft/onnxruntime/issues/16203",
    "the last window divides by the whole kernel",
    operator(
        node("AveragePool", "x", kernel_shape=[7], strides=[3], pads=[3, 3], ceil_mode=1, count_include_pad=1),
        {"x": _row},
        want=[np.stack([_padded[..., a:b].mean(-1) for a, b in _ends], -1)],
        opset=19,
    ),
)
add(
    "average pool, end padding",
    "microsoft/onnxruntime/issues/24681",
    "19 leaves out the padding at the end",
    operator(
        node("AveragePool", "x", kernel_shape=[5, 1], auto_pad="SAME_LOWER", count_include_pad=1),
        {"x": wave(1, 1, 6, 2)},
        opset=19,
        want=[
            np.stack(
                [np.pad(wave(1, 1, 6, 2), ((0, 0), (0, 0), (2, 2), (0, 0)))[:, :, i : i + 5].mean(2) for i in range(6)],
                2,
            )
        ],
    ),
)
add(
    "average pool, windows of nothing",
    "onnx/onnx/issues/4958",
    "rounded up: a window of padding alone is NaN",
    operator(
        node("AveragePool", "x", kernel_shape=[1, 1], strides=[3, 3], pads=[0, 0, 1, 1], ceil_mode=1),
        {"x": wave(1, 1, 6, 6)},
        want=[wave(1, 1, 6, 6)[..., ::3, ::3]],
        opset=22,
    ),
)
add(
    "max pool, rounded up, padded",
    "microsoft/onnxruntime/issues/15446",
    "ceil_mode with padding",
    operator(
        node("MaxPool", "x", ceil_mode=1, kernel_shape=[3] * 3, pads=[1] * 6, strides=[3] * 3),
        {"x": wave(1, 2, 3, 6, 5)},
        opset=14,
    ),
)
_nine = np.array([[[1, 9, 2, 8, 3, 7, 4, 6, 5]]], np.float32)
add(
    "max pool, dilated, padded, places",
    "microsoft/onnxruntime/issues/29637",
    "wrong values and wrong places",
    operator(
        node("MaxPool", "x", "y i", kernel_shape=[2], strides=[1], pads=[1, 1], dilations=[2]),
        {"x": _nine},
        outputs=("y", "i"),
        opset=12,
        want=[[[[9, 2, 9, 3, 8, 4, 7, 5, 6]]], [[[1, 2, 1, 4, 3, 6, 5, 8, 7]]]],
    ),
)
add(
    "max pool, places by columns",
    "Talmaj/onnx2pytorch/issues/11",
    "the second output is not handled",
    operator(
        node("MaxPool", "x", "y i", kernel_shape=[2, 2], strides=[2, 2], storage_order=1),
        {"x": wave(2, 2, 4, 6)},
        outputs=("y", "i"),
        opset=12,
    ),
)
add(
    "lp pool, rounded up",
    "microsoft/onnxruntime/issues/25848",
    "a last window in the padding: the schema has it, the runtime not",
    operator(
        node("LpPool", "x", ceil_mode=1, p=2, kernel_shape=[2, 2], pads=[1, 1, 1, 1], strides=[2, 2]),
        {"x": wave(1, 1, 5, 5)},
        opset=18,
    ),
)
add(
    "global lp pool, p 3",
    "microsoft/onnxruntime/issues/25848",
    "norms of negative numbers",
    operator(node("GlobalLpPool", "x", p=3), {"x": wave(2, 2, 3, 3)}),
)
