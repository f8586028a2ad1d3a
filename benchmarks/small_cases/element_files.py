"""Cases of operators on elements, indices and shapes, after public reports on other importers and runtimes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from checks import GITHUB, Verdict, node, operator, wave

CASES: dict[str, tuple[str, str, Callable[[], Verdict]]] = {}
I64 = np.int64
INT_MIN = np.iinfo(I64).min


def add(name: str, source: str, said: str, case: Callable[[], Verdict]) -> None:
    CASES[name] = (GITHUB + source, said, case)


def ints(*values: int) -> np.ndarray:
    return np.array(values, I64)


for _op in ("Softmax", "LogSoftmax", "Hardmax"):
    add(
        f"{_op.lower()} of opset 11",
        f"apache/tvm/issues/{20183 if _op == 'Softmax' else 19420}",
        "before opset 13 the axes from `axis` on are one",
        operator(node(_op, "x"), {"x": wave(2, 3, 4)}, opset=11, gradient=_op != "Hardmax"),
    )
_q = (np.arange(16) % 7).astype(np.uint8).reshape(2, 8)
add(
    "dequantized in blocks",
    "openvinotoolkit/openvino/pull/32917",
    "blocks along axis 1 are interleaved",
    operator(
        node("DequantizeLinear", "q s z", axis=1, block_size=2),
        {"q": _q},
        {"s": np.abs(wave(2, 4)) + 0.1, "z": (np.arange(8) % 3).astype(np.uint8).reshape(2, 4)},
        opset=21,
    ),
)
add(
    "dequantized, a row",
    "onnx/onnx/pull/6095",
    "the axis where the input has one dimension",
    operator(node("DequantizeLinear", "q s"), {"q": _q[0]}, {"s": np.float32(0.25)}, opset=13),
)
add(
    "quantized along axis 0",
    "onnx/onnx/pull/5812",
    "scales along an axis",
    operator(
        node("QuantizeLinear", "x s z", axis=0),
        {"x": wave(2, 4) * 9},
        {"s": np.array([0.1, 0.2], np.float32), "z": np.array([3, 5], np.uint8)},
        gradient=False,
    ),
)

_a = np.arange(7, dtype=np.float32) + wave(7)
add(
    "pad, crop and reflect",
    "microsoft/onnxruntime/issues/11828",
    "values that were never written",
    operator(
        node("Pad", "x p", mode="reflect"), {"x": _a}, {"p": ints(-2, 3)}, want=[np.pad(_a[2:], (0, 3), "reflect")]
    ),
)
add(
    "pad, reflect beyond the input",
    "microsoft/onnxruntime/issues/8265",
    "more padding than there are elements",
    operator(
        node("Pad", "x p", mode="reflect"), {"x": wave(3)}, {"p": ints(4, 5)}, want=[np.pad(wave(3), (4, 5), "reflect")]
    ),
)
add(
    "pad, less than nothing",
    "microsoft/onnxruntime/issues/2433",
    "negative pads give any memory",
    operator(node("Pad", "x p c"), {"x": wave(3, 4)}, {"p": ints(-1, 1, 2, -2), "c": np.float32(0.5)}),
)
add(
    "pad, axis from the end",
    "onnx/onnx/issues/5003",
    "negative axes of opset 18",
    operator(
        node("Pad", "x p c a"), {"x": wave(1, 2, 2, 2)}, {"p": ints(1, 1), "c": np.float32(0), "a": ints(-1)}, opset=18
    ),
)
add(
    "pad, around",
    "onnx/onnx/issues/4294",
    "the mode wrap",
    operator(
        node("Pad", "x p", mode="wrap"),
        {"x": wave(3, 4)},
        {"p": ints(0, 2, 1, 3)},
        opset=19,
        want=[np.pad(wave(3, 4), ((0, 1), (2, 3)), "wrap")],
    ),
)
add(
    "slice, last to first",
    "microsoft/onnxruntime/issues/11107",
    "a negative step to INT_MIN",
    operator(
        node("Slice", "x a b c d"),
        {"x": wave(3, 5)},
        {"a": ints(-1, 9), "b": ints(INT_MIN, 0), "c": ints(0, 1), "d": ints(-1, -2)},
    ),
)
add(
    "slice, from 0 backwards",
    "tracel-ai/burn-onnx/pull/477",
    "a forward range reversed instead of nothing",
    operator(node("Slice", "x a b c d"), {"x": wave(5)}, {"a": ints(0), "b": ints(5), "c": ints(0), "d": ints(-1)}),
)
add(
    "gather from the end",
    "tinygrad/tinygrad/pull/9375",
    "negative indices",
    operator(node("Gather", "x i", axis=1), {"x": wave(2, 4, 3), "i": np.array([[-1, 0], [2, -4]], I64)}),
)
_d, _i, _u = wave(3, 4, 2), np.array([[0, 1], [-1, 3], [0, 1]], I64), wave(3, 2, phase=2) * 2
for _r in ("add", "mul", "max", "min"):
    add(
        f"scatter, {_r}",
        f"onnx/onnx/issues/{8096 if _r in ('max', 'min') else 6019}",
        "three dimensions, equal and negative indices",
        operator(node("ScatterND", "x i u", reduction=_r), {"x": _d, "u": _u}, {"i": _i}, opset=18),
    )
add(
    "scatter of no columns",
    "microsoft/onnxruntime/issues/8421",
    "a dimension of size 0",
    operator(
        node("ScatterND", "x i u"), {"x": wave(2, 2, 0), "u": wave(1, 2, 0)}, {"i": ints(0).reshape(1, 1)}, opset=18
    ),
)
add(
    "einsum with blanks and dots",
    "onnx/onnx/issues/5739",
    "an ellipsis of different lengths",
    operator(
        node("Einsum", "x w", equation=" ...ik, ...j -> ...ij "),
        {"x": wave(1, 2, 3)},
        {"w": wave(3)},
        want=[np.einsum("...ik,...j->...ij", wave(1, 2, 3), wave(3))],
    ),
)
add(
    "einsum, a diagonal",
    "robertknight/rten/pull/303",
    "a label twice in one term",
    operator(node("Einsum", "x w", equation="bii,i->bi"), {"x": wave(2, 3, 3)}, {"w": wave(3)}),
)
add(
    "einsum, capital letters, no arrow",
    "robertknight/rten/pull/301",
    "the implicit output is in order of letters",
    operator(
        node("Einsum", "x w", equation="bA,AC"),
        {"x": wave(2, 3)},
        {"w": wave(3, 4)},
        want=[np.einsum("bA,AC", wave(2, 3), wave(3, 4))],
    ),
)
_n = np.array([7, -7, 8, -8], I64)
add(
    "whole numbers divided",
    "onnx/onnx/issues/7570",
    "down, or towards zero",
    operator(node("Div", "a b"), {"a": _n, "b": ints(2, 2, -3, 3)}),
)
add(
    "remainders of negative numbers",
    "onnx/onnx/issues/5564",
    "whose sign the remainder has",
    operator(node("Mod", "a b"), {"a": _n, "b": ints(3, 3, -3, -3)}),
)
add(
    "remainders of fractions",
    "apache/tvm/pull/6160",
    "fmod=1 takes the dividend's sign",
    operator(node("Mod", "a b", fmod=1), {"a": wave(5) * 5, "b": np.array([2, -2, 1.5, -0.7, 3], np.float32)}),
)
add(
    "integers to a power",
    "microsoft/onnxruntime/issues/19298",
    "3 ** 1 is 2",
    operator(node("Pow", "a b"), {"a": np.array([3, -2, 5], np.int32), "b": np.array([1, 3, 2], np.int32)}),
)
add(
    "a negative base, whole exponents",
    "huggingface/candle/pull/2439",
    "a power of a negative base is NaN",
    operator(node("Pow", "x e"), {"x": wave(2, 3) * 2}, {"e": np.array([2, 3, 1], I64)}),
)
for _e, _v in ((1, 0), (0, 1), (1, 1)):
    add(
        f"running sum, exclusive={_e}, reverse={_v}",
        "apache/tvm/pull/19773",
        "exclusive sums are refused",
        operator(node("CumSum", "x a", exclusive=_e, reverse=_v), {"x": wave(2, 4)}, {"a": np.int64(-1)}),
    )
add(
    "running sum of one",
    "microsoft/onnxruntime/pull/13174",
    "exclusive, reverse, an axis of size 1",
    operator(node("CumSum", "x a", exclusive=1, reverse=1), {"x": wave(2, 1)}, {"a": np.int64(1)}),
)
add(
    "largest of equal ones",
    "onnx/onnx/pull/6593",
    "of equal values the lower index is first",
    operator(
        node("TopK", "x k", "y i", axis=0, largest=0),
        {"x": np.array([2, 1, 1, 3, 1], np.float32)},
        {"k": ints(2)},
        outputs=("y", "i"),
        gradient=False,
    ),
)
add(
    "clip without a lower bound",
    "pytorch/pytorch/issues/61404",
    "an empty name for min",
    operator(node("Clip", "x _ m"), {"x": wave(5) * 3}, {"m": np.float32(1)}),
)
add(
    "clip with crossed bounds",
    "onnx/onnx/issues/6165",
    "min > max gives max",
    operator(node("Clip", "x a b"), {"x": wave(5)}, {"a": np.float32(0.5), "b": np.float32(-0.5)}, opset=13),
)
add(
    "clip of opset 6",
    "microsoft/onnxconverter-common/issues/17",
    "bounds are attributes",
    operator(node("Clip", "x", min=-0.5, max=0.25), {"x": wave(9)}, opset=6, ir=3),
)
for _op in ("ReduceSum", "ReduceSumSquare"):
    _want = wave(3, 2) if _op == "ReduceSum" else wave(3, 2) ** 2
    add(
        f"{_op} over no axes",
        f"microsoft/onnxruntime/issues/{19147 if _op == 'ReduceSum' else 26288}",
        "noop_with_empty_axes without axes; squares are taken nevertheless",
        operator(node(_op, "x", noop_with_empty_axes=1), {"x": wave(3, 2)}, opset=18, want=[_want]),
    )
add(
    "largest of nothing",
    "microsoft/onnxruntime/issues/7563",
    "a maximum over an axis of size 0",
    operator(
        node("ReduceMax", "x a", keepdims=0),
        {"x": wave(2, 0)},
        {"a": ints(1)},
        gradient=False,
        want=[np.full(2, -np.inf, np.float32)],
    ),
)
add(
    "join with nothing",
    "microsoft/onnxruntime/issues/681",
    "Concat with an empty tensor",
    operator(node("Concat", "e x", axis=0), {"x": wave(2), "e": wave(0)}),
)
add(
    "reshape to no elements",
    "microsoft/onnxruntime/issues/28449",
    "allowzero=1 is lost in a chain",
    operator(
        [node("Reshape", "x a", "t"), node("Reshape", "t b", allowzero=1)],
        {"x": wave(0, 8, 2)},
        {"a": ints(4, 2, -1), "b": ints(0, 0, 4)},
        opset=18,
        want=[np.zeros((0, 0, 4), np.float32)],
    ),
)
for _o in (17, 20):
    _n = node("DFT", "x", onesided=1, axis=1) if _o == 17 else node("DFT", "x _ a", onesided=1)
    _f = np.fft.rfft(wave(2, 6, 1)[..., 0])
    add(
        f"half a spectrum, opset {_o}",
        "onnx/onnx/issues/4699",
        "which axis is halved",
        operator(
            _n,
            {"x": wave(2, 6, 1)},
            {"a": np.int64(1)} if _o == 20 else {},
            opset=_o,
            want=[np.stack([_f.real, _f.imag], -1)],
        ),
    )
add(
    "grid, cubic, border",
    "microsoft/onnxruntime/issues/28090",
    "points are moved before their neighbours are read",
    operator(
        node("GridSample", "x g", mode="bicubic", padding_mode="border"),
        {"x": wave(1, 1, 4, 4)},
        {"g": np.array([[[[-0.95, -0.9], [0.85, -0.95], [0.1, 0.2]]]], np.float32)},
        opset=16,
    ),
)
_rois = np.array([[0.3, 0.4, 3.6, 3.2]], np.float32)
for _o in (10, 16):
    add(
        f"aligned regions, opset {_o}",
        "onnx/onnx/pull/3625",
        "16 shifts by half a pixel by default, 10 does not",
        operator(
            node("RoiAlign", "x r i", output_height=2, output_width=2, sampling_ratio=2),
            {"x": wave(1, 2, 5, 5)},
            {"r": _rois, "i": ints(0)},
            opset=_o,
            wrt=("x",),
        ),
    )
