"""Products of integers pass gradients straight through: to equal those of the float products that they stand for."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import from_array

import recompute as rc

G = np.random.default_rng(0)
CODES = G.integers(-120, 120, (6, 4)).astype(np.int8)
KERNEL = G.integers(-120, 120, (4, 2, 3, 3)).astype(np.int8)
S, WS = np.float32(0.02), np.float32(0.01)
WIDE = np.float32(0.05)  # a scale that cuts nothing off
X = G.standard_normal((4, 6)).astype(np.float32)
IMAGE = G.standard_normal((2, 2, 5, 5)).astype(np.float32)
ZERO = np.int8(0)


def gradients(body: str, x: np.ndarray, shape: str, tensors: dict[str, np.ndarray]) -> list[np.ndarray]:
    """y, and the gradients of Σ r·y, with fixed r, by x·k and by k, of nodes from a = x·k to y."""
    dims = ",".join(map(str, x.shape))
    domains = '"": 18, "com.microsoft": 1'
    text = f"g (float[{dims}] x) => (float[{shape}] y) {{ a = Mul (x, k) {body} }}"
    model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{domains}]> {text}")
    k = np.linspace(0.5, 1.5, x.shape[1], dtype=np.float32).reshape(-1, *(1,) * (x.ndim - 2))
    tensors = {n: np.asarray(t) for n, t in {"k": k, **tensors}.items() if f"{n}" in text}
    model.graph.initializer.extend(from_array(t, n) for n, t in tensors.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error", rc.ModelWarning)
        program = rc.load(model)
    assert {v.name for v in program.parameters} <= {"k", "b", "w", "we", "kernel"}  # no scale
    y = program["y"]
    loss = rc.losses.l1(y, reduction="sum")  # with labels far below: the sum of y
    (_, gradient), *_ = rc.SGD(0.0).backward(loss)
    label = np.full(y.shape, -1e9, np.float32)
    return list(rc.Executor().run(program, {"x": x, "label": label}, [y, gradient]))


TENSORS = {
    "wq": CODES, "kq": KERNEL, "s": S, "ws": WS, "z": ZERO, "ys": WIDE, "w": CODES * WS, "kernel": KERNEL * WS,
    "each": np.linspace(0.005, 0.02, 4, dtype=np.float32), "we": CODES * np.linspace(0.005, 0.02, 4, dtype=np.float32),
    "b": G.standard_normal(4).astype(np.float32), "bq": np.arange(-2, 2, dtype=np.int32), "shape": np.array([4, -1]),
    "seen": np.array([2, -1]),
}  # fmt: skip
DYNAMIC = "q, t, o = DynamicQuantizeLinear (a)"
STATIC = "q = QuantizeLinear (a, ys, z)"
CASES = {
    "dynamic": (f"{DYNAMIC} i = MatMulInteger (q, wq, o, z) f = Cast <to = 1> (i) v = Mul (t, ws) y = Mul (f, v)",
                "y = MatMul (a, w)"),
    "by column, two factors, a bias": (
        f"{DYNAMIC} i = MatMulInteger (q, wq, o) f = Cast <to = 1> (i) c = Mul (f, t) d = Mul (c, each) y = Add (d, b)",
        "d = MatMul (a, we) y = Add (d, b)"),
    "moved, integers added": (
        f"{DYNAMIC} i = MatMulInteger (q, wq, o) j = Add (i, bq) p = Transpose <perm = [1, 0]> (j)"
        "u = Reshape (p, shape) f = Cast <to = 1> (u) v = Mul (t, ws) m = Mul (f, v) y = Transpose <perm = [1, 0]> (m)",
        "y = MatMul (a, w)"),
    "stored": (f"{STATIC} i = MatMulInteger (q, wq) f = Cast <to = 1> (i) v = Mul (ys, ws) y = Mul (f, v)",
               "y = MatMul (a, w)"),
    "QLinearMatMul": (f"{STATIC} i = QLinearMatMul (q, ys, z, wq, ws, z, ys, z) y = DequantizeLinear (i, ys, z)",
                      "y = MatMul (a, w)"),
    "DynamicQuantizeMatMul": ("y = com.microsoft.DynamicQuantizeMatMul (a, wq, ws, z, b)",
                              "d = MatMul (a, w) y = Add (d, b)"),
    "MatMulIntegerToFloat": (f"{DYNAMIC} y = com.microsoft.MatMulIntegerToFloat (q, wq, t, ws, o, z, b)",
                             "d = MatMul (a, w) y = Add (d, b)"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_product_has_the_gradients_of_its_float_twin(case: str) -> None:
    quantized, float_twin = CASES[case]
    (y, dk), (own, twin) = (gradients(body, X, "4,4", TENSORS) for body in (quantized, float_twin))
    np.testing.assert_allclose(dk, twin, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(y, own, atol=0.4)  # rounded


def test_convolutions_of_integers() -> None:
    dynamic = f"{DYNAMIC} i = ConvInteger (q, kq, o) f = Cast <to = 1> (i) v = Mul (t, ws) y = Mul (f, v)"
    linear = f"{STATIC} i = QLinearConv (q, ys, z, kq, ws, z, ys, z) y = DequantizeLinear (i, ys, z)"
    (own, twin) = gradients("y = Conv (a, kernel)", IMAGE, "2,4,3,3", TENSORS)
    found = gradients(dynamic, IMAGE, "2,4,3,3", TENSORS)
    np.testing.assert_allclose(found[0], own, atol=0.5)
    np.testing.assert_allclose(found[1], twin, rtol=1e-5, atol=1e-4)
    assert np.abs(own).max() > 127 * WIDE  # some are cut off: as of the float twin that is cut off there
    cut = gradients("c = Conv (a, kernel) y = Clip (c, low, high)", IMAGE, "2,4,3,3",
                    {**TENSORS, "low": -128 * WIDE, "high": 127 * WIDE})  # fmt: skip
    found = gradients(linear, IMAGE, "2,4,3,3", TENSORS)
    np.testing.assert_allclose(found[0], cut[0], atol=0.5)
    np.testing.assert_allclose(found[1], cut[1], rtol=1e-5, atol=1e-4)


def test_zeros_have_a_scale_and_a_gradient() -> None:
    """As in ONNX Runtime, whose DynamicQuantizeLinear has scale 1 there."""
    (_, dk), (_, twin) = (gradients(body, 0 * X, "4,4", TENSORS) for body in CASES["dynamic"])
    assert np.isfinite(dk).all() and (dk == twin).all()


def test_symmetric_extremes_pass_their_gradient() -> None:
    """Both halves are rounded up: the largest would be 256, is cut off to 255, and keeps the gradient."""
    x = np.tile(np.array([-1, 1, 0.5, -0.25, 0, 1], np.float32), (4, 1)) / np.linspace(0.5, 1.5, 6, dtype=np.float32)
    (_, dk), (_, twin) = (gradients(body, x, "4,4", TENSORS) for body in CASES["dynamic"])
    np.testing.assert_allclose(dk, twin, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("q = QuantizeLinear (a, ys, z) y = DequantizeLinear (q, ys, z)", r"node 'y' \(DequantizeLinear\)"),
        (f"{DYNAMIC} h = BitShift <direction = \"RIGHT\"> (q, o) y = Cast <to = 1> (h)", r"node 'h' \(BitShift\)"),
    ],
)  # fmt: skip
def test_where_integers_pass_no_gradient_a_warning_names_the_node(body: str, named: str) -> None:
    with pytest.raises(rc.ModelWarning, match=named):
        gradients(body, X, "4,6", TENSORS)


def test_codes_stay_integers() -> None:
    """Neither the float nor the double of a weight is kept: it is made right before each product, backward too."""
    codes = G.integers(-120, 120, (64, 64)).astype(np.int8)
    text = (
        "g (float[8,64] x) => (float[8,64] y) { a = Mul (x, k) q, t, o = DynamicQuantizeLinear (a) "
        "i = MatMulInteger (q, wq, o, z) f = Cast <to = 1> (i) v = Mul (t, ws) y = Mul (f, v) }"
    )
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')
    tensors = {"wq": codes, "z": ZERO, "ws": WS, "k": np.ones(64, np.float32)}
    model.graph.initializer.extend(from_array(np.asarray(t), n) for n, t in tensors.items())
    program = rc.load(model)
    rc.SGD(0.1).minimize(rc.losses.mse(program["y"]))
    block = rc.Executor().planned(program)
    assert {v.name: v.dtype for v in block.buffers if v.size == 64 * 64} == {"wq": "i8"}
    assert not [c for c in block.constants if c.value.size >= 64]
    made = [o for o in block.operators if o.op.name == "Cast" and o.inputs[0] is not None and o.inputs[0].name == "wq"]
    assert [o.role.name for o in made] == ["FORWARD", "BACKWARD"]


def test_an_lstm_of_integers_trains_as_its_float_twin() -> None:
    """com.microsoft's DynamicQuantizeLSTM, with weights [input, gates] and a scale for each direction."""
    w, r = (G.integers(0, 255, (1, n, 12)).astype(np.uint8) for n in (5, 3))
    scale, zero = np.float32([0.004]), np.uint8([120])
    bias, x = G.standard_normal((1, 24)).astype("f4"), G.standard_normal((4, 2, 5)).astype("f4")
    floats = {n: ((a.astype("f4") - 120) * scale[0]).transpose(0, 2, 1) for n, a in (("w", w), ("r", r))}
    coded, found = {"w": w, "r": r, "s": scale, "z": zero}, []
    for domain, op, ins, tensors in (
        ("com.microsoft.", "DynamicQuantizeLSTM", "x, w, r, b, , , , , s, z, s, z", coded),  # states named, not read
        ("", "LSTM", "x, w, r, b", floats),
    ):
        text = f"g (float[4,2,5] x) => (float[4,1,2,3] y) {{ y, h, c = {domain}{op} <hidden_size = 3> ({ins}) }}"
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]> {text}')
        model.graph.initializer.extend(from_array(t, n) for n, t in {**tensors, "b": bias}.items())
        program = rc.load(model, trainable=["b"])
        loss = rc.losses.mse(program["y"])
        rc.SGD(1.0).minimize(loss)
        (value,) = rc.Executor().run(program, {"x": x, "label": np.ones((4, 1, 2, 3), "f4")}, [loss])
        found.append((value, program.data["b"]))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-6)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)
    assert abs(found[0][1] - bias).max() > 1e-3
