"""The cost of evaluating an ONNX node at load time, from the shapes and contents of its inputs.

Only operators listed here are evaluated at load time: shape arithmetic, data movement, element-wise mathematics,
reductions, matrix products, and operators without another implementation.  All others stay in the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from ..errors import ModelError
from ..ops.reference.nodes import pixels_of
from .limits import PYTHON

#: most numbers of a shape, axes or sizes
MAX_SIZES = 256
#: most tensors of a sequence
MAX_SEQUENCE = 10_000


def _rates() -> dict[str, int]:
    """Units of work per element of the inputs and outputs, by operator."""
    groups = {
        2: """Abs Neg Not Add Sub Mul And Or Xor Where Equal Less Greater LessOrEqual GreaterOrEqual Min Max Sum Mean
            Relu Clip Cast CastLike BitCast Concat Gather Slice Split Squeeze Unsqueeze Reshape Transpose Flatten
            Expand Tile Pad Trilu EyeLike DepthToSpace SpaceToDepth Range BitwiseAnd BitwiseOr BitwiseXor BitwiseNot
            BitShift Ceil Floor Sign IsNaN IsInf PRelu LeakyRelu ThresholdedRelu ReduceSum ReduceMax ReduceMin
            ReduceProd ReduceMean ArgMax ArgMin""",
        5: "CumSum CumProd Compress OneHot NonZero ReverseSequence GatherElements Round Identity CenterCropPad Hardmax",
        20: """Div Mod Pow Sqrt Exp Log Reciprocal Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh Acosh Atanh Sigmoid
            Softplus Softsign Softmax LogSoftmax ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare
            HardSigmoid Elu Selu Celu Shrink QuantizeLinear DequantizeLinear DynamicQuantizeLinear HannWindow
            HammingWindow BlackmanWindow""",
        200: "TopK Unique Erf DFT MatMul Gemm MatMulInteger",
        # element by element in Python
        5 * PYTHON: """GatherND ScatterElements ScatterND Scatter StringNormalizer MelWeightMatrix TfIdfVectorizer
            NonMaxSuppression ImageDecoder""",
    }
    return {name: rate for rate, names in groups.items() for name in names.split()}


_RATES = _rates()
_ML_RATE = 5 * PYTHON
#: operators computed here without ONNX's evaluator (see onnx_text)
TEXT = {"StringConcat", "StringSplit", "RegexFullMatch"}
_AXES = "Squeeze Unsqueeze CumSum CumProd Trilu ReduceSum ReduceMax ReduceMin ReduceMean ReduceProd ReduceL1 ReduceL2"
_AXES += " ReduceLogSum ReduceLogSumExp ReduceSumSquare"
#: (operator, inputs) that hold shapes, axes or sizes
_SIZE_INPUTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(["Reshape", "Expand", "Tile", "CenterCropPad", "OneHot", "TopK", "AffineGrid", "Upsample"], (1,)),
    **dict.fromkeys(_AXES.split(), (1,)),
    **dict.fromkeys(("Split", "SplitToSequence"), (1,)),
    **dict.fromkeys(["ConstantOfShape", "HannWindow", "HammingWindow", "BlackmanWindow"], (0,)),
    "Pad": (1, 3),
    "Slice": (1, 2, 3, 4),
    "Range": (0, 1, 2),
    "DFT": (1, 2),
    "Resize": (1, 2, 3),
    "Col2Im": (1, 2),
    "MaxUnpool": (2,),
    "Dropout": (1, 2),
    "Loop": (0, 1),
    "If": (0,),
    "STFT": (1, 3),
}


def may_fold(node: onnx.NodeProto) -> bool:
    """Whether a node is evaluated at load time if its inputs are known."""
    if node.domain == "ai.onnx.ml":
        return True
    return node.op_type in _RATES or node.op_type in TEXT


def check_sizes(node: onnx.NodeProto, known: Mapping[str, Any]) -> None:
    """ModelError if an input with a shape, axes or sizes has more numbers than a tensor can have dimensions.

    Such an input is written out as a list by whoever reads it; `known`: what is known by name, with its `array`.
    """
    op_type = node.op_type
    places = _SIZE_INPUTS.get(op_type)
    if places is None:
        return
    most = {"Split": len(node.output), "SplitToSequence": MAX_SEQUENCE}.get(op_type, MAX_SIZES)
    for i in places:
        if i < len(node.input) and (constant := known.get(node.input[i])) is not None and constant.array.size > most:
            size = constant.array.size
            raise ModelError(f"its input {i} ('{node.input[i]}') has {size:,} numbers, at most {most:,} are possible")


def work_of(node: onnx.NodeProto, arrays: Sequence[np.ndarray], results: int) -> int:
    """Units of work (see onnx_limits) for a node with `results` elements in its outputs."""
    elements = results + sum(a.size for a in arrays)
    if node.domain == "ai.onnx.ml":
        return _ML_RATE * max(elements, 1) + 100 * elements * _ml_values(node)
    special = _SPECIAL.get(node.op_type)
    more = special(node, arrays, results) if special is not None else 0
    return _RATES.get(node.op_type, PYTHON) * elements + more


def bytes_of(node: onnx.NodeProto, arrays: Sequence[np.ndarray], results: int) -> int:
    """Upper bound of the bytes of the node's results and of temporaries of their computation."""
    elements = results + sum(a.size for a in arrays)
    if any(a.dtype.kind in "OUST" for a in arrays) or _longest_attribute(node):
        # arrays of text in NumPy are as wide as their longest string
        longest = max((len(str(t)) for a in arrays if a.dtype.kind in "OUST" for t in a.reshape(-1)[:4096]), default=0)
        return elements * (8 + 4 * max(longest, _longest_attribute(node)))
    width = 8 * max((a.ndim for a in arrays), default=1) if node.op_type in ("TopK", "NonZero") else 8
    return elements * width


def _longest_attribute(node: onnx.NodeProto) -> int:
    if node.domain != "ai.onnx.ml" and node.op_type != "StringNormalizer":
        return 0
    return max((len(s) for a in node.attribute for s in (a.s, *a.strings)), default=0)


def ml_results(node: onnx.NodeProto, arrays: Sequence[np.ndarray]) -> int:
    """Upper bound of the elements of the results of an operator of ai.onnx.ml."""
    sizes = {a.name: a for a in node.attribute}
    targets = sizes["n_targets"].i if "n_targets" in sizes else 1
    if node.op_type == "FeatureVectorizer" and "inputdimensions" in sizes:
        targets = sum(abs(i) for i in sizes["inputdimensions"].ints)
    return max(sum(a.size for a in arrays), 1) * (abs(targets) + _ml_values(node))


def _ml_values(node: onnx.NodeProto) -> int:
    """Numbers and strings in the attributes of a node."""
    return sum(1 + len(a.ints) + len(a.floats) + len(a.strings) + math.prod(a.t.dims) for a in node.attribute)


def _option(node: onnx.NodeProto, name: str, default: int) -> int:
    return next((a.i for a in node.attribute if a.name == name), default)


def _product(node: onnx.NodeProto, arrays: Sequence[np.ndarray], results: int) -> int:
    """Multiplications of a matrix product."""
    a = arrays[0]
    inner = a.shape[-1] if a.ndim else 1
    if node.op_type == "Gemm" and _option(node, "transA", 0) and a.ndim:
        inner = a.shape[0]
    return 4 * results * inner


def _ngrams(node: onnx.NodeProto, arrays: Sequence[np.ndarray], results: int) -> int:
    """Steps of counting n-grams: every start, at every distance, as far as they go."""
    reach = min(_option(node, "max_gram_length", 1), sum(a.size for a in arrays) + 1)
    return PYTHON * sum(a.size for a in arrays) * max(reach, 1) * (abs(_option(node, "max_skip_count", 0)) + 1)


def _boxes(node: onnx.NodeProto, arrays: Sequence[np.ndarray], results: int) -> int:
    """Pairs of boxes, for every class."""
    scores = arrays[1] if len(arrays) > 1 else arrays[0]
    return 5 * PYTHON * scores.size * (scores.shape[-1] if scores.ndim else 1)


_SPECIAL: dict[str, Callable[[onnx.NodeProto, Sequence[np.ndarray], int], int]] = {
    "MatMul": _product,
    "Gemm": _product,
    "MatMulInteger": _product,
    "TfIdfVectorizer": _ngrams,
    "NonMaxSuppression": _boxes,
    "ImageDecoder": lambda node, arrays, results: 50 * pixels_of(arrays[0]),  # by the image's header
}
