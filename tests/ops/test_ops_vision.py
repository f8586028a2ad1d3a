"""Convolution, pooling, normalisation and resizing: imported one-node models against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import recompute as rc
from recompute.testing import evaluate

ort = pytest.importorskip("onnxruntime")


def model(op_type: str, inputs: list[Any], attributes: dict[str, Any], opset: int, outputs: int = 1) -> onnx.ModelProto:
    """One node; the first input is fed, other arrays are initializers, None is absent."""
    names = [None if a is None else f"x{i}" for i, a in enumerate(inputs)]
    node = helper.make_node(op_type, [n or "" for n in names], [f"y{i}" for i in range(outputs)], **attributes)
    first = helper.np_dtype_to_tensor_dtype(inputs[0].dtype)
    types = [first, TensorProto.INT64 if op_type == "MaxPool" else first, first]
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x0", first, inputs[0].shape)],
        [helper.make_tensor_value_info(f"y{i}", t, None) for i, t in enumerate(types[:outputs])],
        [numpy_helper.from_array(a, n) for a, n in zip(inputs[1:], names[1:], strict=True) if n],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    return onnx.shape_inference.infer_shapes(made, data_prop=True)


def compare(
    op_type: str,
    inputs: list[Any],
    attributes: dict[str, Any],
    opset: int = 18,
    *,
    outputs: int = 1,
    mode: str = "train",
) -> None:
    """What the imported model gives is what ONNX Runtime gives."""
    made = model(op_type, inputs, attributes, opset, outputs)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x0": inputs[0]})
    program = rc.load(made, mode=mode)
    names = [f"y{i}" for i in range(outputs)]
    found = rc.Executor().run(program, {"x0": inputs[0]}, names)
    for f, e in zip(found, expected, strict=True):
        assert f.shape == e.shape
        np.testing.assert_allclose(f, e, rtol=2e-5, atol=2e-5)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


CONVS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 8, 9), (4, 3, 3, 3), {"pads": (1, 1, 1, 1)}),
    ((2, 3, 8, 9), (4, 3, 3, 2), {"pads": (0, 1, 2, 0), "strides": (2, 3)}),
    ((2, 3, 8, 9), (4, 3, 3, 2), {"dilations": (2, 3), "strides": (1, 2)}),
    ((2, 3, 8, 9), (4, 3, 3, 3), {"auto_pad": "SAME_UPPER", "strides": (2, 2)}),
    ((2, 3, 8, 9), (4, 3, 2, 2), {"auto_pad": "SAME_LOWER"}),
    ((2, 3, 8, 9), (4, 3, 2, 2), {"auto_pad": "VALID", "strides": (2, 2)}),
    ((2, 4, 6, 6), (6, 2, 3, 3), {"group": 2}),
    ((2, 4, 6, 6), (4, 1, 3, 3), {"group": 4, "pads": (1, 1, 1, 1), "strides": (2, 2)}),
    ((2, 4, 6, 6), (8, 1, 3, 3), {"group": 4}),
    ((2, 4, 17, 18), (3, 4, 1, 1), {}),
    ((1, 4, 5, 5), (3, 4, 1, 1), {"strides": (2, 2)}),
    ((2, 3, 10), (4, 3, 4), {"pads": (3, 1), "strides": (2,)}),
    ((2, 2, 5, 4, 6), (3, 2, 2, 3, 2), {"pads": (1, 0, 1, 0, 1, 0), "strides": (2, 1, 2)}),
    ((2, 8, 70, 70), (4, 8, 3, 3), {"pads": (1, 1, 1, 1)}),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("x", "w", "attributes"), CONVS)
def test_conv(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any], bias: bool) -> None:
    compare("Conv", [draw(*x), draw(*w), *([draw(w[0])] if bias else [])], attributes)


@pytest.mark.parametrize(
    ("x", "w", "attributes"),
    [
        ((2, 3, 4, 5), (3, 2, 3, 3), {"strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 1)}),
        ((2, 3, 4, 5), (3, 2, 3, 2), {"strides": (2, 3), "pads": (0, 1, 2, 0), "dilations": (2, 1)}),
        ((2, 4, 4, 5), (4, 3, 2, 2), {"group": 2, "strides": (2, 2)}),
        ((2, 3, 4, 5), (3, 2, 3, 3), {"strides": (2, 2), "output_shape": (8, 9)}),
        ((2, 3, 4, 5), (3, 2, 3, 3), {"strides": (2, 2), "output_shape": (8, 10), "auto_pad": "SAME_UPPER"}),
        ((2, 3, 4, 5), (3, 2, 3, 3), {"strides": (2, 2), "auto_pad": "SAME_UPPER"}),
        ((2, 3, 4, 5), (3, 2, 3, 3), {"strides": (2, 2), "auto_pad": "SAME_LOWER"}),
        ((2, 3, 6), (3, 2, 4), {"strides": (3,)}),
        ((1, 2, 2, 3, 2), (2, 2, 2, 2, 2), {"strides": (1, 2, 1)}),
    ],
)
def test_conv_transpose(x: tuple[int, ...], w: tuple[int, ...], attributes: dict[str, Any]) -> None:
    bias = draw(w[1] * attributes.get("group", 1))
    compare("ConvTranspose", [draw(*x), draw(*w), bias], attributes)


POOLS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 8, 9), {"kernel_shape": (2, 2), "strides": (2, 2)}),
    ((2, 3, 8, 9), {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((2, 3, 8, 9), {"kernel_shape": (3, 2), "strides": (2, 3), "pads": (0, 1, 1, 0), "ceil_mode": 1}),
    ((2, 3, 8, 9), {"kernel_shape": (2, 2), "strides": (3, 3), "ceil_mode": 1}),
    ((2, 3, 8, 9), {"kernel_shape": (3, 3), "auto_pad": "SAME_LOWER", "strides": (2, 2)}),
    ((2, 3, 7), {"kernel_shape": (3,), "pads": (1, 1)}),
    ((1, 2, 4, 5, 6), {"kernel_shape": (2, 2, 2), "strides": (2, 1, 2)}),
]


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize(("x", "attributes"), POOLS)
def test_pools(op_type: str, x: tuple[int, ...], attributes: dict[str, Any]) -> None:
    if op_type == "LpPool" and attributes.get("ceil_mode"):
        pytest.skip("ONNX Runtime's LpPool has other windows at the end")
    compare(op_type, [draw(*x)], attributes)


@pytest.mark.parametrize(("x", "attributes"), [p for p in POOLS if not p[1].get("ceil_mode")])
def test_average_pool_counts_padding(x: tuple[int, ...], attributes: dict[str, Any]) -> None:
    compare("AveragePool", [draw(*x)], {**attributes, "count_include_pad": 1})


def test_dilated_pools() -> None:
    attributes = {"kernel_shape": (2, 3), "dilations": (3, 2), "pads": (1, 2, 1, 2)}
    compare("MaxPool", [draw(2, 3, 8, 9)], attributes)
    compare("AveragePool", [draw(2, 3, 8, 9)], attributes, 19)


def test_max_pool_indices() -> None:
    for attributes in ({"kernel_shape": (2, 3), "strides": (2, 2)}, {"kernel_shape": (3, 3), "pads": (1, 1, 1, 1)}):
        compare("MaxPool", [draw(2, 3, 8, 9)], attributes, outputs=2)
    compare(
        "MaxPool", [np.random.default_rng(0).integers(-9, 9, (1, 2, 6, 6)).astype(np.int8)], {"kernel_shape": (2, 2)}
    )


@pytest.mark.parametrize("op_type", ["GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"])
def test_global_pools(op_type: str) -> None:
    compare(op_type, [draw(2, 3, 4, 5)], {})
    compare(op_type, [draw(2, 3, 7)], {})


@pytest.mark.parametrize(
    ("op_type", "x", "vectors", "attributes", "opset"),
    [
        ("LayerNormalization", (2, 3, 8), [(8,), (8,)], {}, 17),
        ("LayerNormalization", (2, 3, 8), [(3, 8)], {"axis": 1, "epsilon": 0.1}, 17),
        ("InstanceNormalization", (2, 3, 4, 5), [(3,), (3,)], {"epsilon": 0.01}, 18),
        ("GroupNormalization", (2, 4, 3, 3), [(2,), (2,)], {"num_groups": 2}, 18),
        ("GroupNormalization", (2, 4, 3, 3), [(4,), (4,)], {"num_groups": 2}, 21),
        ("RMSNormalization", (2, 3, 8), [(8,)], {"epsilon": 0.1}, 23),
        ("LRN", (2, 7, 3, 4), [], {"size": 5, "alpha": 0.1, "beta": 0.6, "bias": 2.0}, 18),
        ("LRN", (2, 7, 3, 4), [], {"size": 3, "alpha": 0.1}, 18),
        ("LpNormalization", (2, 3, 4), [], {"axis": 1, "p": 2}, 18),
        ("LpNormalization", (2, 3, 4), [], {"p": 1}, 18),
        ("MeanVarianceNormalization", (2, 3, 4, 4), [], {}, 18),
        ("MeanVarianceNormalization", (2, 3, 4, 4), [], {"axes": (1, 2)}, 18),
        ("DepthToSpace", (2, 8, 3, 4), [], {"blocksize": 2}, 18),
        ("DepthToSpace", (2, 8, 3, 4), [], {"blocksize": 2, "mode": "CRD"}, 18),
        ("SpaceToDepth", (2, 3, 4, 6), [], {"blocksize": 2}, 18),
        ("GroupNormalization", (8, 32, 40, 40), [(32,), (32,)], {"num_groups": 8}, 21),
    ],
)
def test_norms(
    op_type: str, x: tuple[int, ...], vectors: list[tuple[int, ...]], attributes: dict[str, Any], opset: int
) -> None:
    compare(op_type, [draw(*x), *(draw(*v, seed=i) for i, v in enumerate(vectors))], attributes, opset)


def test_layer_norm_statistics() -> None:
    compare("LayerNormalization", [draw(2, 3, 8), draw(8), draw(8)], {"axis": -1}, 17, outputs=3)


def test_batch_norm_inference() -> None:
    vectors = [draw(3, seed=i) for i in range(3)]
    var = np.abs(draw(3, seed=9)) + 0.1
    compare("BatchNormalization", [draw(2, 3, 4, 5), *vectors, var], {"epsilon": 0.01}, mode="eval")


def test_batch_norm_training() -> None:
    x, scale, bias, mean = draw(4, 3, 5, 5) + 3, draw(3), draw(3, seed=1), draw(3, seed=2)
    var = np.abs(draw(3, seed=9)) + 0.1
    inputs = [x, scale, bias, mean, var]
    attributes = {"epsilon": 0.01, "momentum": 0.8, "training_mode": 1}
    compare("BatchNormalization", inputs, attributes, outputs=3)
    program = rc.load(model("BatchNormalization", inputs, {"epsilon": 0.01, "momentum": 0.8}, 18))
    y = rc.Executor().run(program, {"x0": x}, ["y0"])[0]
    axes = (0, 2, 3)
    batch = x.mean(axis=axes), x.var(axis=axes)
    shape = (1, 3, 1, 1)
    expected = (x - batch[0].reshape(shape)) / np.sqrt(batch[1].reshape(shape) + 0.01) * scale.reshape(shape)
    np.testing.assert_allclose(y, expected + bias.reshape(shape), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(program.data["x3"], 0.8 * mean + 0.2 * batch[0], rtol=1e-5)
    np.testing.assert_allclose(program.data["x4"], 0.8 * var + 0.2 * batch[1], rtol=1e-5)
    assert not {v.name for v in program.block.parameters} & {"x3", "x4"}


def test_batch_norm_is_robust() -> None:
    """A mean a thousand times the deviation: the variance still has five digits."""
    x = (np.random.default_rng(0).standard_normal((16, 2, 40, 40)) + 1000).astype(np.float32)
    made = model("BatchNormalization", [x, np.ones(2, "f"), *(np.zeros(2, "f"),) * 2, np.ones(2, "f")], {}, 18)
    program = rc.load(made)
    y = rc.Executor().run(program, {"x0": x}, ["y0"])[0]
    exact = x.astype(np.float64)
    exact = (exact - exact.mean((0, 2, 3), keepdims=True)) / exact.std((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(y, exact, atol=5e-4)


RESIZES: list[tuple[tuple[int, ...], dict[str, Any], Any, Any]] = [
    ((1, 2, 3, 4), {"mode": "nearest"}, (1, 1, 2, 3), None),
    ((1, 2, 3, 4), {"mode": "nearest"}, (1, 1, 1.7, 0.6), None),
    ((1, 2, 3, 4), {"mode": "linear"}, (1, 1, 2, 3), None),
    ((1, 2, 5, 7), {"mode": "linear"}, (1, 1, 0.6, 0.5), None),
    ((1, 2, 5, 7), {"mode": "linear"}, None, (1, 2, 9, 3)),
    ((1, 2, 5, 7), {"mode": "cubic"}, None, (1, 2, 9, 5)),
    ((1, 2, 5, 7), {"mode": "cubic", "cubic_coeff_a": -0.5, "exclude_outside": 1}, (1, 1, 2, 2), None),
    ((1, 2, 5, 7), {"mode": "linear", "axes": (2, 3)}, None, (9, 5)),
    ((1, 2, 5, 7), {"mode": "linear", "axes": (3, 2), "keep_aspect_ratio_policy": "not_larger"}, None, (14, 9)),
    ((1, 2, 5, 7), {"mode": "nearest", "axes": (2, 3), "keep_aspect_ratio_policy": "not_smaller"}, None, (12, 13)),
    ((2, 3, 6), {"mode": "linear"}, (1, 1, 2), None),
]


@pytest.mark.parametrize("coordinate", ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"])
@pytest.mark.parametrize(("x", "attributes", "scales", "sizes"), RESIZES)
def test_resize(x: tuple[int, ...], attributes: dict[str, Any], scales: Any, sizes: Any, coordinate: str) -> None:
    inputs = [draw(*x), None, None if scales is None else np.array(scales, np.float32)]
    if sizes is not None:
        inputs.append(np.array(sizes, np.int64))
    compare("Resize", inputs, {**attributes, "coordinate_transformation_mode": coordinate}, 19)


@pytest.mark.parametrize("nearest", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_resize_nearest(nearest: str) -> None:
    for scales in ((1, 1, 2, 3), (1, 1, 0.5, 1.5), (1, 1, 0.3, 2.6)):
        for coordinate in ("half_pixel", "asymmetric", "align_corners"):
            attributes = {"nearest_mode": nearest, "coordinate_transformation_mode": coordinate}
            compare("Resize", [draw(1, 2, 10, 4), None, np.array(scales, np.float32)], attributes, 13)


def test_upsample() -> None:
    """Nodes of old opsets, which take coordinates from the corner."""
    compare("Upsample", [draw(1, 2, 3, 4), np.array((1, 1, 1.5, 2.5), np.float32)], {"mode": "nearest"}, 9)
    compare("Resize", [draw(1, 2, 3, 4), np.array((1, 1, 2, 2.5), np.float32)], {"mode": "linear"}, 10)
    compare("Upsample", [draw(1, 2, 3, 4), np.array((1, 1, 2, 2), np.float32)], {"mode": "nearest"}, 9)
    compare("Upsample", [draw(1, 2, 3, 4), np.array((1, 1, 2, 2), np.float32)], {"mode": "linear"}, 9)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_resize_against_aliasing_and_of_a_part(mode: str) -> None:
    compare(
        "Resize", [draw(1, 2, 9, 7), None, np.array((1, 1, 0.5, 0.4), np.float32)], {"mode": mode, "antialias": 1}, 18
    )
    roi = np.array((0.1, 0.2, 0.8, 1.3), np.float32)
    crop = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "axes": (2, 3)}
    compare("Resize", [draw(1, 2, 9, 7), roi, None, np.array((4, 9))], {**crop, "extrapolation_value": 3.0}, 18)


def test_recomputed_batch_norm_moves_statistics_once() -> None:
    """Statistics move in an operator of their own, so that a clone of the normalisation is pure."""
    inputs = [draw(4, 3, 5), *(draw(3, seed=i) for i in range(3)), np.ones(3, np.float32)]
    block = rc.load(model("BatchNormalization", inputs, {}, 18)).block
    assert [o.op.name for o in block.operators] == ["BatchNormTrain", "RunningUpdate", "RunningUpdate"]
    assert not block.operators[0].op.updates


def test_max_pool_gradient_goes_to_the_first_of_equal() -> None:
    from recompute.ops.pooling.windows import MaxPool
    from recompute.passes.gradient.autodiff import differentiate
    from recompute.testing import Draw, case_block, weighted_loss

    case = Draw().case(MaxPool(kernel_shape=(2, 2), strides=(2, 2)), np.ones((1, 1, 2, 4)), want=1)
    block, feed = case_block(case)
    block, loss = weighted_loss(block, block.outputs)
    after, pairs = differentiate(block, loss, ["x0"])
    grad = evaluate(after, feed, [pairs[0][1].name])[0]
    assert np.array_equal(grad != 0, [[[[True, False, True, False], [False] * 4]]])
