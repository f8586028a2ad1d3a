"""Training through QuantizeLinear and DequantizeLinear by the straight-through estimator."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import recompute as rc


def model(w: np.ndarray, s: np.ndarray) -> onnx.ModelProto:
    """x [4, 3] times w [3, 2], which is quantized to 8 bits with a scale for each row."""
    nodes = [
        helper.make_node("QuantizeLinear", ["w", "s", "z"], ["q"], axis=0),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["v"], axis=0),
        helper.make_node("MatMul", ["x", "v"], ["y"]),
    ]
    weights = [numpy_helper.from_array(a, n) for n, a in (("w", w), ("s", s), ("z", np.zeros(3, np.int8)))]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [4, d]) for n, d in (("x", 3), ("y", 2)))
    graph = helper.make_graph(nodes, "quantized", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


def test_straight_through_gradients() -> None:
    r = np.random.default_rng(0)
    w, s = r.normal(size=(3, 2)).astype(np.float32), np.array([0.02, 0.005, 0.01], np.float32)
    program = rc.load(model(w, s), quantization="ste", trainable=["w", "s"])
    loss = rc.losses.mse(program.outputs[0])
    feed = {"x": r.normal(size=(4, 3)).astype(np.float32), "label": np.zeros((4, 2), np.float32)}
    pairs = rc.SGD(learning_rate=0.0).backward(program[loss.name])
    found = rc.Executor().run(program, feed, [g for _, g in pairs])
    grads = {p.name: g for (p, _), g in zip(pairs, found, strict=True)}
    ratio = w / s[:, None]
    q = np.clip(np.rint(ratio), -128, 127)
    dv = feed["x"].T @ (2 / 8 * feed["x"] @ (q * s[:, None]))
    inside = (ratio >= -128) & (ratio <= 127)
    assert 0 < inside.sum() < inside.size
    np.testing.assert_allclose(grads["w"], dv * inside, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads["s"], (dv * (q - ratio * inside)).sum(1), rtol=1e-4, atol=1e-5)


def test_nothing_trains_through_integers_unless_asked() -> None:
    source = model(np.ones((3, 2), np.float32), np.ones(3, np.float32))
    program = rc.load(source, trainable=["w", "s"])
    loss = rc.losses.mse(program.outputs[0])
    assert [p.name for p, _ in rc.SGD(learning_rate=0.0).backward(program[loss.name])] == ["s"]
    with pytest.raises(rc.UsageError, match="quantization must be None or 'ste', not 'lsq'"):
        rc.load(source, quantization="lsq")


def test_integer_sums_wrap_around_beyond_32_bits() -> None:
    graph = "(uint8[1,70000] a, uint8[70000,1] b) => (int32[1,1] y) { y = MatMulInteger(a, b) }"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> agraph {graph}')
    program = rc.load(model)
    a = np.full((1, 70000), 255, np.uint8)
    (y,) = rc.Executor().run(program, {"a": a, "b": a.T.copy()}, ["y"])
    assert y.item() == 255 * 255 * 70000 - 2**32 < 2**31


@pytest.mark.parametrize("op, options", [
    ("QuantizeLinear", {"output_dtype": 1000}),
    ("QuantizeLinear", {"output_dtype": 3, "precision": 1000}),
    ("DequantizeLinear", {"output_dtype": 8}),
    ("RandomNormalLike", {"dtype": 1000}),
    ("Bernoulli", {"dtype": 8}),
])  # fmt: skip
def test_element_types_that_there_are_not(op: str, options: dict[str, int]) -> None:
    kind = TensorProto.INT8 if op == "DequantizeLinear" else TensorProto.FLOAT
    inputs = ["x", "s"] if "Quantize" in op or "Dequantize" in op else ["x"]
    node = helper.make_node(op, inputs, ["y"], **options)
    given = [helper.make_tensor_value_info("x", kind, [3]), helper.make_tensor_value_info("s", TensorProto.FLOAT, [])]
    made = onnx.ValueInfoProto(name="y")
    graph = helper.make_graph([node], "g", given[: len(inputs)], [made])
    with pytest.raises(rc.ModelError, match="supported"):
        rc.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]))


@pytest.mark.parametrize("form", ["pair", "QLinearMatMul", "QLinearAdd"])
def test_what_is_at_a_bound_and_not_cut_off_has_a_gradient(form: str) -> None:
    """As in PyTorch's fake_quantize: of whole numbers -129 to 128 of int8, all but the ends pass gradients."""
    whole = np.array([[-129, -128, -127, 0, 127, 128]], np.float32)
    body = {
        "pair": "q = QuantizeLinear (x, s, z)  y = DequantizeLinear (q, s, z)",
        "QLinearMatMul": "a = QuantizeLinear (x, s, w)  q = QLinearMatMul (a, s, w, eye, s, z, s, z)"
        "  y = DequantizeLinear (q, s, z)",
        "QLinearAdd": "a = QuantizeLinear (x, s, w)  q = com.microsoft.QLinearAdd (a, s, w, none, s, z, s, z)"
        "  y = DequantizeLinear (q, s, z)",
    }[form]
    opsets = '"": 21, "com.microsoft": 1'
    text = f"<ir_version: 10, opset_import: [{opsets}]> g (float[1,6] x) => (float[1,6] y) {{ x1 = Mul (x, p) {body} }}"
    source = onnx.parser.parse_model(text.replace("(x, s", "(x1, s"))
    held = {"s": np.float32(1), "z": np.int8(0), "w": np.int16(0), "p": np.ones((1, 6), np.float32),
            "eye": np.eye(6, dtype=np.int8), "none": np.zeros((1, 6), np.int8)}  # fmt: skip
    if form != "pair":  # the first rounding has room for what the second cuts off
        held.update(w=np.uint8(128), s=np.float32(1))
        whole = np.clip(whole, -128, 127)
    source.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in held.items() if n in text)
    program = rc.load(source, quantization="ste", trainable=["p"])
    loss = rc.losses.l1(program, reduction="sum")
    rc.SGD(1.0).minimize(loss)
    rc.Executor().run(program, {"x": whole, "label": np.full((1, 6), -999, np.float32)}, [loss])
    inside = (whole >= -128) & (whole <= 127)
    np.testing.assert_array_equal(1 - program.data["p"], whole * inside)
