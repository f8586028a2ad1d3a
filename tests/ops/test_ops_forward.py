"""Mathematics, activations, reductions, softmax and losses: numerics against ONNX's reference evaluator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import recompute as rc

RNG = np.random.default_rng(11)


def floats(*shape: int, low: float = -2.0, high: float = 2.0, dtype: Any = np.float32) -> np.ndarray:
    return RNG.uniform(low, high, shape).astype(dtype)


def ints(*shape: int, low: int = -9, high: int = 9, dtype: Any = np.int64) -> np.ndarray:
    return RNG.integers(low, high, shape).astype(dtype)


def bools(*shape: int) -> np.ndarray:
    return RNG.random(shape) < 0.5


def model_of(
    op: str, inputs: list[Any], *, opset: int = 21, outputs: int = 1, constant: tuple[int, ...] = (), **attributes: Any
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """One node; None: an absent input; inputs numbered in `constant` are initializers."""
    names = ["" if a is None else f"x{i}" for i, a in enumerate(inputs)]
    outs = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, names, outs, name="n", **attributes)
    fed = {n: a for i, (n, a) in enumerate(zip(names, inputs, strict=True)) if n and i not in constant}
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in fed.items()],
        [onnx.ValueInfoProto(name=o) for o in outs],
        [onnx.numpy_helper.from_array(inputs[i], names[i]) for i in constant],
    )
    inferred = onnx.shape_inference.infer_shapes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    )
    return inferred, fed


def check(
    op: str, inputs: list[Any], *, rtol: float | None = None, want: list[np.ndarray] | None = None, **options: Any
) -> None:
    model, fed = model_of(op, inputs, **options)
    names = [o.name for o in model.graph.output]
    if want is None:
        with np.errstate(all="ignore"):
            want = ReferenceEvaluator(model).run(None, fed)
    program = rc.load(model, mode="eval", trainable=())
    got = rc.Executor().run(program, fed, names)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape, f"{op}: {g.dtype}{g.shape}, reference {w.dtype}{w.shape}"
        if g.dtype.kind != "f":
            np.testing.assert_array_equal(g, w)
            continue
        tolerance = rtol or 16 * float(np.finfo(g.dtype).eps)
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance, err_msg=op)


UNARY = {
    "Abs": (-2, 2), "Sign": (-2, 2), "Reciprocal": (0.5, 2), "Floor": (-3, 3), "Ceil": (-3, 3), "Round": (-3, 3),
    "Sin": (-3, 3), "Cos": (-3, 3), "Tan": (-1, 1), "Asin": (-1, 1), "Acos": (-1, 1), "Atan": (-3, 3),
    "Sinh": (-2, 2), "Cosh": (-2, 2), "Asinh": (-3, 3), "Acosh": (1, 3), "Atanh": (-0.9, 0.9), "Erf": (-4, 4),
    "Exp": (-2, 2), "Log": (0.1, 3), "Sqrt": (0, 3), "Neg": (-2, 2), "IsNaN": (-2, 2),
    "Relu": (-2, 2), "Tanh": (-3, 3), "Sigmoid": (-9, 9), "Softplus": (-9, 9), "Softsign": (-9, 9),
    "HardSwish": (-5, 5), "Mish": (-9, 9), "Elu": (-3, 3), "Selu": (-3, 3), "Celu": (-3, 3), "LeakyRelu": (-3, 3),
    "ThresholdedRelu": (-3, 3), "HardSigmoid": (-5, 5), "Shrink": (-3, 3), "Gelu": (-4, 4),
}  # fmt: skip


@pytest.mark.parametrize("op", UNARY)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_unary(op: str, dtype: Any) -> None:
    low, high = UNARY[op]
    wide = dtype if op != "Celu" else np.float32  # ONNX's Celu is float32 only
    # the evaluator computes some of them with float32 numbers inside, or with a rational approximation of erf
    rough = op in ("Erf", "Gelu", "HardSwish", "LeakyRelu", "HardSigmoid")
    check(op, [floats(3, 40, low=low, high=high, dtype=wide)], rtol=1e-6 if rough else None)


def test_erf_is_exact_to_the_last_bits() -> None:
    x = np.concatenate([np.linspace(-7, 7, 2001), np.logspace(-300, 0, 100)])
    exact = np.array([math.erf(v) for v in x])
    model, _ = model_of("Erf", [x])
    (found,) = rc.Executor().run(rc.load(model), {"x0": x}, ["y0"])
    np.testing.assert_allclose(found, exact, rtol=5e-16, atol=0)
    x32 = x[:2001].astype(np.float32)
    model, _ = model_of("Erf", [x32])
    (found,) = rc.Executor().run(rc.load(model), {"x0": x32}, ["y0"])
    np.testing.assert_allclose(found, [math.erf(v) for v in x32], rtol=3e-7, atol=0)


ACTIVATIONS: list[tuple[str, dict[str, Any]]] = [
    ("Elu", {"alpha": 0.5}), ("Celu", {"alpha": 2.0}), ("Selu", {"alpha": 1.5, "gamma": 2.0}),
    ("LeakyRelu", {"alpha": 0.2}), ("LeakyRelu", {"alpha": -0.5}), ("LeakyRelu", {"alpha": 2.0}),
    ("ThresholdedRelu", {"alpha": -0.5}), ("HardSigmoid", {"alpha": 0.5, "beta": 0.3}),
    ("Shrink", {"bias": 0.5, "lambd": 0.25}), ("Gelu", {"approximate": "tanh"}), ("Swish", {"alpha": 1.5, "opset": 24}),
    ("IsInf", {"detect_negative": 0}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "options"), ACTIVATIONS)
def test_activation_with_attributes(op: str, options: dict[str, Any]) -> None:
    check(op, [floats(3, 40)], rtol=1e-6, **options)


def test_not_finite() -> None:
    x = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
    for op in ("IsNaN", "IsInf", "Relu", "Sigmoid", "Abs"):
        check(op, [x])


BINARY: list[tuple[str, np.ndarray, np.ndarray, dict[str, Any]]] = [
    ("Equal", ints(3, 4, low=0, high=3), ints(4, low=0, high=3), {}), ("Less", floats(3, 1), floats(4), {}),
    ("LessOrEqual", ints(9, low=0, high=3), ints(9, low=0, high=3), {}), ("Greater", floats(3, 1), floats(4), {}),
    ("GreaterOrEqual", ints(9, low=0, high=3), ints(9, low=0, high=3), {}), ("And", bools(3, 4), bools(4), {}),
    ("Or", bools(3, 4), bools(4), {}), ("Xor", bools(3, 4), bools(4), {}), ("Mod", ints(20), ints(20, low=1), {}),
    ("Mod", ints(20), -ints(20, low=1), {"fmod": 1}), ("Mod", floats(20), floats(20, low=0.3), {"fmod": 1}),
    ("BitwiseAnd", ints(9), ints(9), {}), ("BitwiseOr", ints(9), ints(9), {}), ("BitwiseXor", ints(9), ints(9), {}),
    ("BitShift", ints(9, low=0, dtype=np.uint32), ints(9, low=0, dtype=np.uint32), {"direction": "LEFT"}),
    ("BitShift", ints(9, low=0, dtype=np.uint8), ints(9, low=0, dtype=np.uint8), {"direction": "RIGHT"}),
    ("PRelu", floats(2, 3, 4), floats(3, 1), {}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "a", "b", "options"), BINARY)
def test_binary(op: str, a: np.ndarray, b: np.ndarray, options: dict[str, Any]) -> None:
    check(op, [a, b], **options)


@pytest.mark.parametrize("op", ["Max", "Min", "Sum", "Mean"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_variadic(op: str, count: int) -> None:
    check(op, [floats(3, 4), floats(4), floats(3, 1)][:count])


def test_choices() -> None:
    check("Where", [bools(3, 1), floats(4), floats(3, 4)])
    check("Not", [bools(5)])
    low, high = np.float32(-0.5).reshape(()), np.float32(0.5).reshape(())
    for bounds in ([low, high], [low], [None, high], []):
        check("Clip", [floats(20), *bounds])
        check("Clip", [floats(20), *bounds], constant=tuple(i + 1 for i, v in enumerate(bounds) if v is not None))
    x = floats(20)
    check("Clip", [x], opset=10, min=-0.5, max=0.25, want=[x.clip(-0.5, 0.25)])


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
def test_cumsum(exclusive: int, reverse: int) -> None:
    for axis in (0, -1):
        check("CumSum", [floats(3, 4), np.array(axis)], constant=(1,), exclusive=exclusive, reverse=reverse)


REDUCTIONS = ["Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp"]


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [None, [1], [0, -1]])
def test_reductions(name: str, keepdims: int, axes: list[int] | None) -> None:
    x = floats(3, 4, 5, low=0.5)
    rest = [] if axes is None else [np.array(axes)]
    check(f"Reduce{name}", [x, *rest], constant=tuple(range(1, 1 + len(rest))), keepdims=keepdims)
    if name not in ("Sum",):  # old form: axes as an attribute
        expected = ReferenceEvaluator(
            model_of(f"Reduce{name}", [x, *rest], constant=(1,)[: len(rest)], keepdims=keepdims)[0]
        )
        fed = {"x0": x}
        old = {} if axes is None else {"axes": axes}
        check(f"Reduce{name}", [x], opset=13, keepdims=keepdims, want=expected.run(None, fed), **old)


def test_reduction_of_nothing_named() -> None:
    x = floats(3, 4)
    check("ReduceSum", [x], noop_with_empty_axes=1)
    check("ReduceSumSquare", [x], noop_with_empty_axes=1, want=[x * x])
    check("ReduceMax", [ints(3, 4), np.array([0])], constant=(1,))


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("last", [0, 1])
def test_arg(op: str, last: int) -> None:
    for axis in (0, -1):
        for keepdims in (0, 1):
            check(op, [ints(4, 6, low=0, high=3)], axis=axis, keepdims=keepdims, select_last_index=last)


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
def test_softmax(op: str) -> None:
    x = floats(2, 3, 4, 5)
    for axis in (-1, 0, 2):
        check(op, [x], axis=axis)
    check(op, [x])
    flat = model_of(op, [x.reshape(6, 20)])[0]
    (expected,) = ReferenceEvaluator(flat).run(None, {"x0": x.reshape(6, 20)})
    check(op, [x], opset=11, axis=2, want=[expected.reshape(x.shape)])


LOSSES = ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"]


@pytest.mark.parametrize("op", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore", [None, 1, -100])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses(op: str, reduction: str, ignore: int | None, weighted: bool) -> None:
    for shape in ((6, 4), (2, 3, 4, 2)):
        scores = floats(*shape)
        labels = ints(shape[0], *shape[2:], low=0, high=shape[1], dtype=np.int64)
        if ignore is not None:
            labels.reshape(-1)[1] = ignore
        weights = [floats(shape[1], low=0.5)] if weighted else []
        options: dict[str, Any] = {} if ignore is None else {"ignore_index": ignore}
        outputs = 2 if op == LOSSES[0] else 1
        check(op, [scores, labels, *weights], reduction=reduction, outputs=outputs, **options)
        check(op, [scores, labels, *weights], reduction=reduction, constant=(2,)[: len(weights)], **options)


def test_label_out_of_range_is_an_error() -> None:
    model, fed = model_of(LOSSES[0], [floats(2, 3), np.array([0, 3])])
    program = rc.load(model, trainable=())
    with pytest.raises(rc.JobError, match=r"^label 3 is outside the 3 classes"):
        rc.Executor().run(program, fed, ["y0"])
