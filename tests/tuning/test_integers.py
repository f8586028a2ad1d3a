"""LoRA on files in 8 bits: products of integers, and weights written as Cast and Mul."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx.numpy_helper import from_array

import recompute as rc

onnxruntime = pytest.importorskip("onnxruntime")
G = np.random.default_rng(0)
CODES = G.integers(-60, 60, (32, 16)).astype(np.int8)
SCALES = G.uniform(0.002, 0.006, 16).astype(np.float32)
X = G.standard_normal((4, 32)).astype(np.float32)
DYNAMIC = "q, t, o = DynamicQuantizeLinear (x) "
FORMS = {
    "two factors": f"{DYNAMIC} i = MatMulInteger (q, w, o, z) f = Cast <to = 1> (i) v = Mul (t, s) y = Mul (f, v)",
    "one by one": f"{DYNAMIC} i = MatMulInteger (q, w, o) f = Cast <to = 1> (i) c = Mul (f, t) y = Mul (c, s)",
    "to float": f"{DYNAMIC} y = com.microsoft.MatMulIntegerToFloat (q, w, t, s, o)",
    "fused": "y = com.microsoft.DynamicQuantizeMatMul (x, w, s)",
    "cast": "c = Cast <to = 1> (w) d = Sub (c, zf) v = Mul (d, s) y = MatMul (x, v)",
}


def source(form: str) -> onnx.ModelProto:
    domains = '"": 18, "com.microsoft": 1'
    text = f"g (float[4,32] x) => (float[4,16] y) {{ {FORMS[form]} }}"
    model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{domains}]> {text}")
    tensors = {"w": CODES, "s": SCALES, "z": np.int8(0), "zf": np.float32(0)}
    model.graph.initializer.extend(from_array(np.asarray(t), n) for n, t in tensors.items() if n in text.split("{")[1])
    return model


def adapted(form: str, size: float = 0.1) -> rc.Program:
    """With adapters that are not zero."""
    name = "v" if form == "cast" else "w"
    program = rc.lora(rc.load(source(form)), name, r=3, alpha=3)
    g = np.random.default_rng(1)
    for what in "AB":
        key = f"{name}.lora_{what}.weight"
        program.data[key] = (size * g.standard_normal(program[key].shape)).astype("f4")
    return program


def scores(model: onnx.ModelProto) -> np.ndarray:
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": X})[0]


@pytest.mark.parametrize("form", FORMS)
def test_adapters_train_beside_integers(form: str) -> None:
    """What is added is s·(x·Aᵀ)·Bᵀ of the real x; the gradients are those beside a float weight."""
    program = adapted(form)
    name = "v" if form == "cast" else "w"
    assert sorted(v.name for v in program.parameters) == [f"{name}.lora_{w}.weight" for w in "AB"]
    assert {v.name: v.dtype for v in program.block.buffers if v.size == CODES.size} == {"w": "i8"}
    a, b = (program.data[f"{name}.lora_{w}.weight"].astype(float) for w in "AB")
    (base,), (own,) = rc.load(source(form)).evaluate({"x": X}), program.evaluate({"x": X})
    np.testing.assert_allclose(own - base, X @ a.T @ b.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scores(rc.export_trained(program)), own, rtol=1e-4, atol=1e-4)
    loss = rc.losses.mse(program["y"])
    rc.SGD(1.0).minimize(loss)
    rc.Executor().run(program, {"x": X, "label": np.zeros((4, 16), "f4")}, [loss])
    gradient = b - program.data[f"{name}.lora_B.weight"]
    np.testing.assert_allclose(gradient, (2 / own.size) * own.T @ (X @ a.T), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_merging(form: str) -> None:
    """Integers take what they hold of an adapter, where it is little that they lose; Cast and Mul become a float."""
    program = adapted(form, 0.05)
    kept = [] if form == "cast" else ["w"]
    if kept:
        with pytest.warns(rc.ModelWarning, match="1 of 1 adapters stay beside their weights"):
            beside = rc.merge_adapters(program, tolerance=0)
        np.testing.assert_allclose(scores(beside), program.evaluate({"x": X})[0], rtol=1e-4, atol=1e-4)
    merged = rc.merge_adapters(program, tolerance=math.inf)
    assert not [t.name for t in merged.graph.initializer if "lora" in t.name]
    assert [t.data_type for t in merged.graph.initializer if t.name in "vw"] == [onnx.TensorProto.INT8 if kept else 1]
    (own,), (base,) = program.evaluate({"x": X}), rc.load(source(form)).evaluate({"x": X})
    assert np.linalg.norm(scores(merged) - own) < 0.3 * np.linalg.norm(base - own)
