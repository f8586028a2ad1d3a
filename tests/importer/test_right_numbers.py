"""Small files whose gradients are easily wrong in silence; the right numbers are PyTorch's in float64, by hand here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import recompute as rc

F32 = np.float32
W = (np.arange(12).reshape(4, 3) / 10 - 0.5).astype(F32)
X = (np.arange(20).reshape(5, 4) % 7 / 3 - 1).astype(F32)
KINDS = {"f": TensorProto.FLOAT, "i": TensorProto.INT64}


def model(nodes: Sequence[Any], feed: Mapping[str, np.ndarray], held: Mapping[str, Any]) -> onnx.ModelProto:
    """A file with the inputs of `feed`, the initializers `held`, and the output "loss"."""
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info(n, KINDS[a.dtype.kind], a.shape) for n, a in feed.items()],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in held.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def step(made: onnx.ModelProto, feed: Mapping[str, np.ndarray], **options: Any) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and what one step of SGD(1.0) took from each array: the gradient of a parameter."""
    program = rc.load(made, **options)
    before = {k: np.array(a) for k, a in program.data.items()}
    rc.SGD(1.0).minimize(program["loss"])
    (loss,) = rc.Executor().run(program, dict(feed), [program["loss"]])
    return float(loss), {k: a - np.array(program.data[k]) for k, a in before.items()}


def unary(*operators: str) -> list[Any]:
    """loss = Σ x · f(g(... w))."""
    names = ["w", *(f"v{i}" for i in range(len(operators)))]
    nodes = [helper.make_node(op, [names[i]], [names[i + 1]]) for i, op in enumerate(operators)]
    return [*nodes, *summed(names[-1])]


def summed(name: str) -> list[Any]:
    return [
        helper.make_node("Mul", [name, "x"], ["weighted"]),
        helper.make_node("ReduceSum", ["weighted"], ["loss"], keepdims=0),
    ]


def test_a_mean_over_no_labels_has_no_gradient() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["z"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["z", "y"], ["loss"], ignore_index=-100),
    ]
    feed = {"x": X, "y": np.full(5, -100)}
    loss, taken = step(model(nodes, feed, {"w": W}), feed)
    assert np.isnan(loss) and not taken["w"].any()


def test_normalisations_in_a_chain_update_their_statistics_as_often() -> None:
    def norm(x: str, before: Sequence[str], y: str, after: Sequence[str]) -> Any:
        return helper.make_node(
            "BatchNormalization", [x, "s", "b", *before], [y, *after], training_mode=1, momentum=0.9
        )

    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]), norm("h", ["m", "v"], "y1", ["m1", "v1"]),
        helper.make_node("MatMul", ["y", "w"], ["k"]), norm("k", ["m1", "v1"], "y2", ["m2", "v2"]),
        helper.make_node("Sub", ["y1", "y2"], ["d"]), helper.make_node("Mul", ["d", "d"], ["q"]),
        helper.make_node("ReduceMean", ["q"], ["loss"], keepdims=0),
    ]  # fmt: skip
    held = {"w": W, "s": np.ones(3, F32), "b": np.zeros(3, F32), "m": np.zeros(3, F32), "v": np.ones(3, F32)}
    feed = {"x": X, "y": X[::-1] * 2 + 1}
    _, taken = step(model(nodes, feed, held), feed, mode="file")
    mean, variance = np.zeros(3), np.ones(3)
    for batch in (feed["x"] @ W, feed["y"] @ W):
        mean = 0.9 * mean + 0.1 * batch.mean(0)
        variance = 0.9 * variance + 0.1 * batch.var(0)
    np.testing.assert_allclose(-taken["m"], mean, atol=1e-6)
    np.testing.assert_allclose(1 - taken["v"], variance, atol=1e-5)


@pytest.mark.parametrize(
    ("nodes", "held", "w", "gradient"),
    [
        ([helper.make_node("Pow", ["w", "e"], ["a"]), *summed("a")], {"e": F32(0)}, [0, 1, 2], [0, 0, 0]),
        (unary("Relu", "Sqrt"), {}, [-1, 0, 4], [0, 0, 0.25]),
        (
            [helper.make_node("Clip", ["w", "lo"], ["a"]), helper.make_node("Sqrt", ["a"], ["c"]), *summed("c")],
            {"lo": F32(0)}, [-1, -2, 4], [0, 0, 0.25],
        ),
        (
            [helper.make_node("Clip", ["w", "lo", "hi"], ["a"]), helper.make_node("Acos", ["a"], ["c"]), *summed("c")],
            {"lo": F32(-1), "hi": F32(1)}, [-2, 0, 3], [0, -1, 0],
        ),
        (
            [
                helper.make_node("Sigmoid", ["w"], ["s"]), helper.make_node("Sub", ["one", "s"], ["t"]),
                helper.make_node("Log", ["t"], ["u"]), helper.make_node("Clip", ["u", "lo"], ["c"]), *summed("c"),
            ],
            {"one": F32(1), "lo": F32(-100)}, [30, 0, 0], [0, -0.5, -0.5],
        ),
    ],
    ids=["x ** 0", "root of relu", "root of clip", "acos of clip", "log of a saturated sigmoid"],
)  # fmt: skip
def test_what_is_cut_off_has_no_gradient(
    nodes: list[Any], held: dict[str, Any], w: list[float], gradient: list[float]
) -> None:
    feed = {"x": np.ones(3, F32)}
    _, taken = step(model(nodes, feed, {"w": np.array(w, F32), **held}), feed, trainable=["w"])
    np.testing.assert_allclose(taken["w"], gradient, atol=1e-6)


def test_the_padding_row_of_a_table_is_not_trained() -> None:
    table, feed = np.arange(6).reshape(3, 2).astype(F32), {"ids": np.array([0, 0, 2])}
    nodes = [
        helper.make_node("TorchEmbedding", ["t", "ids", "pad"], ["e"], domain="com.microsoft"),
        helper.make_node("ReduceSum", ["e"], ["loss"], keepdims=0),
    ]
    _, taken = step(model(nodes, feed, {"t": table, "pad": np.array(0)}), feed, trainable=["t"])
    np.testing.assert_array_equal(taken["t"], [[0, 0], [0, 0], [1, 1]])
    with pytest.raises(rc.RecomputeError, match="scale_grad_by_freq"):
        by_count = [
            helper.make_node("TorchEmbedding", ["t", "ids", "pad", "by"], ["e"], domain="com.microsoft"),
            nodes[1],
        ]
        rc.load(model(by_count, feed, {"t": table, "pad": np.array(-1), "by": np.array(True)}))


def test_defaults_of_a_functions_attributes_are_used() -> None:
    """onnx's inliner drops them, and LeakyRelu then has its own slope, 0.01."""
    text = """
    < ir_version: 9, opset_import: [ "" : 17, "local" : 1] >
    main (float[3] x) => (float[3] y, float[3] z) { y = local.f (x)  z = local.f <slope = 0.5> (x) }
    < opset_import: [ "" : 17 ], domain: "local" >
    f <slope: float = 0.25> (x) => (y) { y = LeakyRelu <alpha: float = @slope> (x) }
    """
    program = rc.load(onnx.parser.parse_model(text))
    y, z = rc.Executor().run(program, {"x": np.array([-1, 2, -4], F32)}, ["y", "z"])
    assert y.tolist() == [-0.25, 2, -1] and z.tolist() == [-0.5, 2, -2]


@pytest.mark.parametrize("places", [[1, 5, 11], [[0, 1], [1, 2], [3, 2]]])
def test_sparse_initializers_are_dense(places: list) -> None:
    made = model([helper.make_node("MatMul", ["x", "w"], ["y"]), *summed_only("y")], {"x": X}, {})
    values = numpy_helper.from_array(np.array([2, -3, 0.5], F32), "w")
    where = numpy_helper.from_array(np.array(places, np.int64), "places")
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, where, [4, 3]))
    loss, taken = step(made, {"x": X})
    dense = np.zeros((4, 3), F32)
    dense[[0, 1, 3], [1, 2, 2]] = 2, -3, 0.5
    np.testing.assert_allclose(loss, (X @ dense).sum(), rtol=1e-6)
    np.testing.assert_allclose(taken["w"], np.repeat(X.sum(0)[:, None], 3, 1), rtol=1e-5, atol=1e-6)


def test_a_broken_sparse_initializer_is_named() -> None:
    made = model(summed_only("w"), {}, {})
    values, where = (numpy_helper.from_array(np.array(a), n) for a, n in ((np.ones(2, F32), "w"), ([1, 12], "places")))
    made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, where, [4, 3]))
    with pytest.raises(rc.ModelError, match="sparse initializer 'w'"):
        rc.load(made)


def summed_only(name: str) -> list[Any]:
    return [helper.make_node("ReduceSum", [name], ["loss"], keepdims=0)]


def test_a_loss_that_contains_a_gradient() -> None:
    """ONNX's Gradient node is differentiated once more; with recomputation the bits are the same."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["u"]),
        helper.make_node("Tanh", ["u"], ["y"]),
        helper.make_node("ReduceSum", ["y"], ["sum"], keepdims=0),
        helper.make_node("Gradient", ["x"], ["g"], domain="ai.onnx.preview.training", xs=["x"], y="sum"),
        helper.make_node("ReduceSumSquare", ["g"], ["loss"], keepdims=0),
    ]
    file = model(nodes, {"x": X}, {"w": W})
    file.opset_import.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    after = []
    for optimizer in (rc.SGD(1.0), rc.RecomputeOptimizer(rc.SGD(1.0)).set_checkpoints(["g"])):
        program = rc.load(file)
        optimizer.minimize(program["loss"])
        rc.Executor().run(program, {"x": X}, [program["loss"]])
        after.append(program.data["w"].copy())
    assert any(op.role == "recompute" for op in program.logical.operators)
    assert after[0].tobytes() == after[1].tobytes()

    def loss_of(w: np.ndarray) -> float:
        return float((((1 - np.tanh(X.astype("f8") @ w) ** 2) @ w.T) ** 2).sum())

    sides = np.eye(W.size).reshape(-1, *W.shape) * 1e-5
    slopes = [(loss_of(W + side) - loss_of(W - side)) / 2e-5 for side in sides]
    np.testing.assert_allclose(W - after[0], np.reshape(slopes, W.shape), rtol=1e-4, atol=1e-5)
