"""Cases of how files are built: initializers, functions, subgraphs, sequences, types, and contributed operators."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from checks import GITHUB, Verdict, by_runtime, model, node, operator, wave
from onnx import TensorProto, helper, numpy_helper, parser

import recompute as rc

CASES: dict[str, tuple[str, str, Callable[[], Verdict]]] = {}
W = wave(4, 3)


def case(name: str, source: str, said: str) -> Callable[[Callable[[], Verdict]], Callable[[], Verdict]]:
    """Enters a function as a case."""

    def enter(run: Callable[[], Verdict]) -> Callable[[], Verdict]:
        CASES[name] = (GITHUB + source, said, run)
        return run

    return enter


def same(program: rc.Program, feed: dict[str, Any], expected: list[np.ndarray]) -> Verdict:
    """Whether a program gives these outputs."""
    found = rc.Executor().run(program, feed, list(program.outputs))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, 2e-5, 2e-5)
    return "right", "values"


@case("initializers among the inputs", "microsoft/onnxruntime/pull/1324", "IR 3: weights are inputs, too")
def _ir3() -> Verdict:
    x = wave(2, 4)
    made = model([node("MatMul", "x w")], {"x": x, "w": W}, {"w": W}, opset=8, ir=3)
    program = rc.load(made)
    assert [v.name for v in program.inputs] == ["x"] and [v.name for v in program.parameters] == ["w"]
    return same(program, {"x": x}, [x @ W])


@case("an unused initializer", "microsoft/onnxruntime/issues/19186", "training everything: no consumer node")
def _unused() -> Verdict:
    made = model([node("MatMul", "x w")], {"x": wave(2, 4)}, {"w": W, "const_fold_opt__2874": wave(7)})
    program = rc.load(made)
    loss = rc.losses.mse(program["y"])
    rc.SGD(0.1).minimize(loss)
    assert [v.name for v in program.parameters] == ["w"]
    try:
        rc.load(made, trainable=["w", "const_fold_opt__2874"])
    except rc.RecomputeError as e:
        assert "const_fold_opt__2874" in str(e)
        return "right", f"left out; by name: {e}"[:280]
    return "wrong", "a weight that nothing reads is taken for trainable without a word"


@case("a weight used twice", "microsoft/onnxruntime/issues/16597", "gradients of shared weights add up")
def _tied() -> Verdict:
    square = wave(3, 3)
    return operator(
        [node("MatMul", "x w", "h"), node("Tanh", "h", "t"), node("MatMul", "t w")], {"x": wave(2, 3)}, {"w": square}
    )()


@case("a sparse initializer", "microsoft/onnxruntime/pull/5540", "weights that are stored as values and indices")
def _sparse() -> Verdict:
    made = model([node("MatMul", "x w")], {"x": wave(2, 4)})
    values = numpy_helper.from_array(np.array([2, -3, 0.5], np.float32), "w")
    places = numpy_helper.from_array(np.array([1, 5, 11], np.int64), "w_indices")
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [4, 3]))
    dense = np.zeros(12, np.float32)
    dense[[1, 5, 11]] = 2, -3, 0.5
    return same(rc.load(made), {"x": wave(2, 4)}, [wave(2, 4) @ dense.reshape(4, 3)])


@case("external data that is not there", "microsoft/onnxruntime/issues/6696", "a message about another folder")
def _external() -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.onnx")
        made = model([node("MatMul", "x w")], {"x": wave(2, 64)}, {"w": wave(64, 64)})
        onnx.save(made, path, save_as_external_data=True, location="m.data", size_threshold=0)
        same(rc.load(path), {"x": wave(2, 64)}, [wave(2, 64) @ wave(64, 64)])
        Path(folder, "m.data").unlink()
        rc.load(path)
    return "wrong", "loads without its weights"


@case("bfloat16 weights in raw_data", "onnx/onnx/issues/6604", "numbers that were never read")
def _bfloat16() -> Verdict:
    kind = ml_dtypes.bfloat16
    made = model([node("Cast", "w", "f", to=1), node("MatMul", "x f")], {"x": wave(2, 4)})
    data = W.astype(kind)
    made.graph.initializer.append(helper.make_tensor("w", TensorProto.BFLOAT16, W.shape, data.tobytes(), raw=True))
    return same(rc.load(made), {"x": wave(2, 4)}, [wave(2, 4) @ data.astype(np.float32)])


@case("float8 weights", "NVIDIA/Model-Optimizer/pull/2314", "8-bit floats with a scale")
def _float8() -> Verdict:
    made = model(
        [node("DequantizeLinear", "w s", "f"), node("MatMul", "x f")],
        {"x": wave(2, 4)},
        {"s": np.float32(0.5)},
        opset=21,
    )
    data = W.astype(ml_dtypes.float8_e4m3fn)
    made.graph.initializer.append(helper.make_tensor("w", TensorProto.FLOAT8E4M3FN, W.shape, data.tobytes(), raw=True))
    return same(rc.load(made), {"x": wave(2, 4)}, [wave(2, 4) @ (data.astype(np.float32) * np.float32(0.5))])


@case("int4 weights", "microsoft/onnxruntime/pull/20362", "two numbers in a byte")
def _int4() -> Verdict:
    made = model(
        [node("DequantizeLinear", "w s", "f", axis=1), node("MatMul", "x f")],
        {"x": wave(2, 4)},
        {"s": np.array([0.5, 1, 2], np.float32)},
        opset=21,
    )
    q = np.arange(-8, 4).reshape(4, 3)
    made.graph.initializer.append(helper.make_tensor("w", TensorProto.INT4, [4, 3], q.ravel().tolist()))
    return same(rc.load(made), {"x": wave(2, 4)}, [wave(2, 4) @ (q * np.array([0.5, 1, 2], np.float32))])


_NESTED = """
< ir_version: 9, opset_import: [ "" : 17, "local" : 1] >
agraph (float[3] x) => (float[3] y) { y = local.func <outer = 2.5> (x) }
< opset_import: [ "" : 17 ], domain: "local" >
f1 <inner> (x) => (y) { c = Constant <value_float: float = @inner> ()  y = Mul (x, c) }
< opset_import: [ "" : 17, "local" : 1 ], domain: "local" >
func <outer> (x) => (y) { y = local.f1 <inner: float = @outer> (x) }
"""


@case("functions that pass attributes on", "microsoft/onnxruntime/issues/12506", "the attribute becomes zero")
def _functions() -> Verdict:
    return same(rc.load(parser.parse_model(_NESTED)), {"x": wave(3)}, [wave(3) * 2.5])


@case("a function's default attribute", "onnx/onnx/pull/4911", "defaults of functions are not stored")
def _defaults() -> Verdict:
    text = _NESTED.replace("<outer = 2.5>", "").replace("func <outer>", "func <outer: float = 1.5>")
    return same(rc.load(parser.parse_model(text)), {"x": wave(3)}, [wave(3) * 1.5])


@case("a function's default where the operator has one", "microsoft/onnxscript/pull/58", "defaults in functions")
def _defaults_of_operators() -> Verdict:
    text = _NESTED.replace("<outer = 2.5>", "").replace("func <outer>", "func <outer: float = 0.3>")
    text = text.replace(
        "c = Constant <value_float: float = @inner> ()  y = Mul (x, c)", "y = LeakyRelu <alpha: float = @inner> (x)"
    )
    x = wave(3, phase=3)
    return same(rc.load(parser.parse_model(text)), {"x": x}, [np.where(x < 0, np.float32(0.3) * x, x)])


def _branch(name: str, op: str, held: dict[str, np.ndarray]) -> onnx.GraphProto:
    return helper.make_graph(
        [node(op, f"h {name}_w", f"{name}_y")],
        name,
        [],
        [onnx.ValueInfoProto(name=f"{name}_y")],
        [numpy_helper.from_array(a, n) for n, a in held.items()],
    )


@case("branches with weights of their own", "microsoft/onnxscript/issues/2157", "initializers of subgraphs")
def _if() -> Verdict:
    parts = {
        "then_branch": _branch("t", "MatMul", {"t_w": wave(3, 3)}),
        "else_branch": _branch("e", "Add", {"e_w": W[0]}),
    }
    made = model(
        [node("MatMul", "x w", "h"), node("If", "c", **parts)], {"x": wave(2, 4)}, {"w": W, "c": np.array(True)}
    )
    program = rc.load(made)
    assert len(program.parameters) == 2, [v.name for v in program.parameters]
    return same(program, {"x": wave(2, 4)}, by_runtime(made, {"x": wave(2, 4)}))


@case("a loop over rows of the outside", "ENOT-AutoDL/onnx2torch/issues/204", "Loop is not implemented")
def _loop() -> Verdict:
    infos = [
        helper.make_tensor_value_info(n, t, s)
        for n, t, s in (("i", TensorProto.INT64, []), ("c", TensorProto.BOOL, []), ("s", TensorProto.FLOAT, [3]))
    ]
    body = helper.make_graph(
        [
            node("Identity", "c", "c2"),
            node("Gather", "x i", "r"),
            node("MatMul", "r w", "m"),
            node("Tanh", "m", "t"),
            node("Add", "s t", "s2"),
            node("Identity", "s2", "o"),
        ],
        "body",
        infos,
        [onnx.ValueInfoProto(name=n) for n in ("c2", "s2", "o")],
    )
    return operator(
        node("Loop", "n _ z", "y o", body=body),
        {"x": wave(3, 4)},
        {"w": W, "n": np.int64(3), "z": wave(3)},
        outputs=("y", "o"),
    )()


@case("a loop whose condition is data", "microsoft/onnxruntime/issues/3755", "a scripted comparison in a loop")
def _while() -> Verdict:
    infos = [
        helper.make_tensor_value_info(n, t, s)
        for n, t, s in (("i", TensorProto.INT64, []), ("c", TensorProto.BOOL, []), ("s", TensorProto.FLOAT, []))
    ]
    body = helper.make_graph(
        [node("ReduceSum", "x", "q", keepdims=0), node("Add", "s q", "s2"), node("Less", "s2 q", "c2")],
        "body",
        infos,
        [onnx.ValueInfoProto(name=n) for n in ("c2", "s2")],
    )
    rc.load(model([node("Loop", "_ t z", "y", body=body)], {"x": wave(3)}, {"z": np.float32(0), "t": np.array(True)}))
    return "wrong", "a loop of unknown length is loaded"


@case("a scan from the last row", "onnx/onnx-tensorflow/issues/383", "subgraphs of operators are unsupported")
def _scan() -> Verdict:
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("s", [3]), ("r", [3]))]
    body = helper.make_graph(
        [node("Mul", "s r", "p"), node("Add", "p r", "s2"), node("Identity", "s2", "o")],
        "body",
        infos,
        [onnx.ValueInfoProto(name=n) for n in ("s2", "o")],
    )
    return operator(
        node("Scan", "z x", "y o", body=body, num_scan_inputs=1, scan_input_directions=[1]),
        {"x": wave(4, 3), "z": wave(3)},
        outputs=("y", "o"),
    )()


CASES["a sequence of parts"] = (
    GITHUB + "openvinotoolkit/openvino/issues/15094",
    "SplitToSequence and ConcatFromSequence are not supported",
    operator(
        [
            node("SplitToSequence", "x n", "q", axis=1),
            node("SequenceAt", "q i", "a"),
            node("SequenceErase", "q i", "e"),
            node("SequenceInsert", "e a", "r"),
            node("ConcatFromSequence", "r", axis=1),
        ],
        {"x": wave(2, 6)},
        {"n": np.array([1, 2, 3]), "i": np.int64(0)},
    ),
)
CASES["a sequence that begins empty"] = (
    GITHUB + "onnx/onnx-tensorrt/issues/1044",
    "SequenceEmpty is not supported",
    operator(
        [
            node("SequenceEmpty", "", "q"),
            node("SequenceInsert", "q x", "r"),
            node("SequenceInsert", "r x", "s"),
            node("ConcatFromSequence", "s", axis=0, new_axis=1),
        ],
        {"x": wave(2, 3)},
    ),
)
CASES["dropout of opset 12 in inference"] = (
    GITHUB + "sonos/tract/pull/2865",
    "ratio and training_mode are inputs, a mask is an output",
    operator(
        node("Dropout", "x r t", "y m"),
        {"x": wave(3, 4)},
        {"r": np.float32(0.3), "t": np.array(False)},
        outputs=("y", "m"),
        opset=13,
    ),
)


@case("dropout that trains", "openvinotoolkit/openvino/issues/37767", "training_mode=true cannot be converted")
def _dropout() -> Verdict:
    held = {"r": np.float32(0.5), "t": np.array(True)}
    x = np.ones((64, 64), np.float32)
    program = rc.load(model([node("Dropout", "x r t", "y m")], {"x": x}, held, ("y", "m"), opset=13), mode="file")
    y, mask = rc.Executor().run(program, {"x": x}, list(program.outputs))
    assert set(np.unique(y)) == {0.0, 2.0} and np.array_equal(y > 0, mask) and 0.4 < mask.mean() < 0.6
    return "right", "zeros and twos, as its mask says"


@case("scores, ignored labels, weights", "llvm/torch-mlir/pull/3585", "a mean divides by all labels")
def _loss() -> Verdict:
    feed = {"x": wave(4, 3, 2), "t": np.array([[0, -1], [2, 1], [1, -1], [2, 0]], np.int64)}
    return operator(
        node("SoftmaxCrossEntropyLoss", "x t w", "y p", ignore_index=-1),
        feed,
        {"w": np.array([0.2, 1, 3], np.float32)},
        outputs=("y", "p"),
    )()


@case("log-probabilities with weights", "onnx/onnx/pull/2705", "what ignore_index does to the loss")
def _nll() -> Verdict:
    feed = {"x": wave(4, 3), "t": np.array([0, 2, 1, 2], np.int64)}
    return operator(
        node("NegativeLogLikelihoodLoss", "x t w", ignore_index=1), feed, {"w": np.array([0.2, 1, 3], np.float32)}
    )()


def contributed(name: str, source: str, said: str, op: str, inputs: str, feed: dict, held: dict, **given: Any) -> None:
    outputs = given.pop("outputs", "y")
    CASES[name] = (
        GITHUB + source,
        said,
        operator(
            node(op, inputs, outputs, domain=given.pop("domain", "com.microsoft"), **given),
            feed,
            held,
            outputs=tuple(o for o in outputs.split() if o != "_"),
        ),
    )


_h = {"g": wave(8) + 1, "b": wave(8), "c": wave(8, phase=2)}
contributed(
    "skip and norm, with the sum",
    "tracel-ai/burn-onnx/issues/289",
    "optional outputs of fused operators",
    "SkipLayerNormalization",
    "x s g b c",
    {"x": wave(2, 3, 8), "s": wave(2, 3, 8, phase=1)},
    _h,
    outputs="y _ _ z",
    epsilon=1e-5,
)
contributed(
    "gelu with a bias",
    "apache/tvm/pull/13074",
    "fused operators of other frontends",
    "BiasGelu",
    "x b",
    {"x": wave(2, 3, 8)},
    {"b": _h["b"]},
)
contributed(
    "quick gelu", "apache/tvm/pull/13074", "alpha is an attribute", "QuickGelu", "x", {"x": wave(2, 8)}, {}, alpha=1.5
)
contributed(
    "fused product, both transposed",
    "microsoft/onnxruntime/issues/18344",
    "a fused Gemm does not train",
    "FusedMatMul",
    "x w",
    {"x": wave(2, 4, 3)},
    {"w": wave(2, 5, 4)},
    transA=1,
    transB=1,
    alpha=0.5,
)
contributed(
    "attention with a mask",
    "microsoft/onnxruntime/issues/22465",
    "gradients of exported transformers",
    "Attention",
    "x w b m",
    {"x": wave(2, 3, 8), "m": np.array([3, 2], np.int32)},
    {"w": wave(8, 24), "b": wave(24)},
    num_heads=2,
)
contributed(
    "rotary embedding, interleaved",
    "onnx/onnx/pull/6461",
    "halves or pairs are turned",
    "RotaryEmbedding",
    "x p c s",
    {"x": wave(1, 2, 3, 8), "p": np.array([[0, 1, 2]], np.int64)},
    {"c": np.cos(wave(5, 4)), "s": np.sin(wave(5, 4))},
    interleaved=1,
)
contributed(
    "4-bit product",
    "microsoft/onnxruntime/pull/20362",
    "packed weights with zero points",
    "MatMulNBits",
    "x q s z",
    {"x": wave(2, 32)},
    {
        "q": (np.arange(6 * 2 * 8) * 37 % 256).astype(np.uint8).reshape(6, 2, 8),
        "s": np.abs(wave(12)) + 0.1,
        "z": (np.arange(6) * 51 % 256).astype(np.uint8),
    },
    K=32,
    N=6,
    bits=4,
    block_size=16,
)
contributed(
    "scaled features",
    "microsoft/onnxruntime/issues/4883",
    "a scaler's numbers differ",
    "Scaler",
    "x",
    {"x": wave(3, 4)},
    {},
    domain="ai.onnx.ml",
    offset=[1.0, 2.0, 3.0, 4.0],
    scale=[0.5, 2.0, 1.0, 3.0],
)
contributed(
    "rows of norm 1",
    "onnx/sklearn-onnx/issues/679",
    "Normalizer of a matrix",
    "Normalizer",
    "x",
    {"x": wave(3, 4)},
    {},
    domain="ai.onnx.ml",
    norm="L2",
)
contributed(
    "two classes of a discriminant",
    "onnx/sklearn-onnx/issues/1116",
    "probabilities of two classes",
    "LinearClassifier",
    "x",
    {"x": wave(5, 2)},
    {},
    domain="ai.onnx.ml",
    outputs="l y",
    post_transform="LOGISTIC",
    coefficients=[0.5, -1.0, -0.5, 1.0],
    intercepts=[0.1, -0.1],
    classlabels_ints=[0, 1],
)
