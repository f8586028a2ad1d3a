"""8-bit models: ONNX Runtime runs them in integers, and scores them as `evaluate` does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from tests.passes.test_quantize_aware import NETWORK, batch, network, prepared, trained

import recompute as rc
from recompute.ops.linear.products import MatMul

ort = pytest.importorskip("onnxruntime")


def session(model: onnx.ModelProto, optimized: Path | None = None) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def initializers(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    return {t.name: t for t in model.graph.initializer}


def run(model: onnx.ModelProto, x: np.ndarray, name: str = "scores") -> np.ndarray:
    return session(model).run([name], {"x": x})[0]


def close(found: np.ndarray, expected: np.ndarray, part: float = 0.02) -> None:
    """Within a part of the largest score: an activation at the edge of a step may be rounded the other way."""
    assert np.abs(found - expected).max() <= part * np.abs(expected).max()


def test_weights_are_integers_and_onnx_runtime_computes_in_integers(tmp_path: Path) -> None:
    program = trained(prepared(reduce_range=True))
    model = rc.export_trained(program, tmp_path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    tensors = initializers(model)
    weights = [t for n, t in tensors.items() if n.endswith("_w_quantized")]
    assert len(weights) == 4 and all(t.data_type == TensorProto.INT8 for t in weights)
    assert not {"c1_w", "c2_w", "c2_b", "fc1_w", "fc2_w", "g", "v"} & tensors.keys()
    assert max(np.abs(numpy_helper.to_array(t)).max() for t in weights) == 63
    path = tmp_path / "optimized.onnx"
    own = session(model, path)
    kinds = Counter(n.op_type for n in onnx.load(path).graph.node)
    assert kinds["QLinearConv"] == 2 and kinds["QLinearAdd"] == 1
    assert kinds["QGemm"] + kinds["MatMulIntegerToFloat"] + kinds["QLinearMatMul"] == 2
    assert not {"Conv", "MatMul", "Gemm", "BatchNormalization", "MaxPool"} & kinds.keys()
    x = batch(40)["x"]
    (expected,) = program.evaluate({"x": x}, ["scores"])
    close(own.run(["scores"], {"x": x})[0], expected)


def test_a_normalisation_becomes_part_of_weights_without_loss() -> None:
    """Two of its factors are negative, one is 0: integers change their signs, and scales take the factors."""
    program = prepared("c1_w", reduce_range=True)
    program.data["g"] = program.data["g"] * np.array([1, 1, 1, 0], np.float32)
    rc.Executor().run(program, {"x": batch()["x"]}, ["scores"])
    model = rc.export_trained(program, outputs=["r1"])
    assert Counter(n.op_type for n in model.graph.node)["BatchNormalization"] == 0
    ints = numpy_helper.to_array(initializers(model)["c1_w_quantized"])
    w = program.data["c1_w"]
    plain = np.rint(w / (np.abs(w).max((1, 2, 3), keepdims=True) / 63))
    np.testing.assert_array_equal(ints, plain * np.sign(program.data["g"])[:, None, None, None])
    x = batch()["x"]
    step = (program.data["r1.range_high"] - program.data["r1.range_low"]) / 255
    (expected,) = program.evaluate({"x": x}, ["r1"])
    high = float(program.data["r1.range_high"])
    found = run(model, x, "r1")
    assert np.abs(np.minimum(found, high) - np.minimum(expected, high)).max() <= 1.01 * step


def test_the_exported_model_loads_and_scores_the_same_and_trains_through_rounding() -> None:
    program = trained(prepared(reduce_range=True))
    model = rc.export_trained(program)
    x = batch()["x"]
    (expected,) = program.evaluate({"x": x}, ["scores"])
    again = rc.load(model, batch=6, quantization="ste")
    close(again.evaluate({"x": x}, ["scores"])[0], expected)
    before = {p.name: again.data[p.name].copy() for p in again.parameters}
    rc.SGD(0.1).minimize(rc.losses.cross_entropy(again["scores"]))
    rc.Executor().run(again, batch(), [again.loss])
    moved = {n for n, a in before.items() if not np.array_equal(a, again.data[n])}
    assert "fc1_b" in moved, sorted(before)


def test_other_opsets_and_batches() -> None:
    """Below opset 13, DequantizeLinear has no axis: the model is raised."""
    model = network(NETWORK.replace('"": 21', '"": 12'))
    program = trained(rc.prepare_qat(rc.load(model, batch=6), reduce_range=True))
    found = rc.export_trained(program)
    assert found.opset_import[0].version >= 13
    x = batch(3)["x"]
    close(run(found, x), program.evaluate({"x": x}, ["scores"])[0])


def test_layers_that_were_left_out_stay_floats() -> None:
    program = trained(prepared(skip_first=True, skip_last=True, activations="int8", reduce_range=True))
    model = rc.export_trained(program)
    tensors = initializers(model)
    assert {"c1_w", "fc2_w"} <= tensors.keys() and {"c2_w", "fc1_w"}.isdisjoint(tensors)
    assert tensors["r1_zero_point"].data_type == TensorProto.INT8
    x = batch()["x"]
    close(run(model, x), program.evaluate({"x": x}, ["scores"])[0])


def test_a_new_head_is_quantized_too() -> None:
    program = rc.load(network(), batch=6)
    b = program.builder(prefix="head")
    w = program.declare("parameters", "head_w", np.eye(3, 2, dtype=np.float32))
    new = b.emit(MatMul(), program["scores"].value, w, name="new")
    program.append(b, outputs=[new.name])
    rc.prepare_qat(program, reduce_range=True)
    rc.SGD(0.01).minimize(rc.losses.mse(program["new"]))
    feed = {"x": batch()["x"], "label": np.zeros((6, 2), np.float32)}
    rc.Executor().run(program, feed, [program.loss])
    model = rc.export_trained(program)
    assert initializers(model)["head_w_quantized"].data_type == TensorProto.INT8
    close(run(model, feed["x"], "new"), program.evaluate({"x": feed["x"]}, ["new"])[0])


def test_a_bias_that_is_too_large_for_its_scale() -> None:
    """Weights that are next to nothing beside it take a larger scale."""
    program = prepared("c2_w", reduce_range=True)
    program.data["c2_w"] = program.data["c2_w"] * np.array([1, 1e-12, 1, 1], np.float32).reshape(4, 1, 1, 1)
    program.data["c2_b"] = np.array([0, 5, 0, 0], np.float32)
    rc.Executor().run(program, {"x": batch()["x"]}, ["scores"])
    x = batch()["x"]
    close(run(rc.export_trained(program), x), program.evaluate({"x": x}, ["scores"])[0])


def test_what_cannot_be_exported_is_said() -> None:
    program = trained(prepared(), 0)
    with pytest.raises(rc.UsageError, match="has seen none"):
        rc.export_trained(program)


@pytest.mark.parametrize("kind", ["bias", "no bias"])
def test_products_with_one_output_and_without_bias(kind: str) -> None:
    text = """<ir_version: 10, opset_import: ["": 21]> one (float[4,6] x) => (float[4,1] scores)
    <float[6,1] w, float[1] b> { h = Tanh (x)
      scores = PRODUCT }""".replace("PRODUCT", "Gemm (h, w, b)" if kind == "bias" else "MatMul (h, w)")
    program = rc.prepare_qat(rc.load(network(text)), reduce_range=True)
    x = np.random.default_rng(0).standard_normal((4, 6)).astype("f4")
    rc.Executor().run(program, {"x": x}, ["scores"])
    model = rc.export_trained(program)
    close(run(model, x), program.evaluate({"x": x}, ["scores"])[0], 1e-3)
