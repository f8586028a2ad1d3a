"""Files in 16 bits: their weights train in float32."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest

import recompute as rc

W = np.linspace(0.5, 1.5, 12).reshape(3, 4)


def model(kind: type, *, node: bool = False) -> onnx.ModelProto:
    name = "float16" if kind is np.float16 else "bfloat16"
    m = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g ({name}[2,3] x) => ({name}[2,4] y) {{ y = MatMul (x, w) }}'
    )
    tensor = onnx.numpy_helper.from_array(W.astype(kind), "w")
    if node:
        m.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w"], value=tensor))
    else:
        m.graph.initializer.append(tensor)
    return m


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_small_updates_are_not_lost(kind: type) -> None:
    """Ten steps of 1e-5 of a gradient of one: less than half a unit in the last place of 16 bits, each and together."""
    program = rc.load(model(kind))
    (w,) = program.parameters
    assert (w.name, w.value.type.dtype) == ("w", "f32") and program["y"].value.type.numpy == kind
    loss = rc.losses.l1(program, reduction="sum")  # labels below: the gradient of a weight is the sum of its inputs
    rc.SGD(1e-5).minimize(loss)
    feed = {"x": np.full((2, 3), 0.5, kind), "label": np.full((2, 4), -9, np.float32)}
    executor = rc.Executor()
    for _ in range(10):
        executor.run(program, feed, [loss])
    np.testing.assert_allclose(program.data["w"], W.astype(kind).astype(np.float32) - 1e-4, atol=1e-6)
    (exported,) = rc.export_trained(program).graph.initializer
    assert onnx.numpy_helper.to_array(exported).dtype == kind
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(exported), program.data["w"].astype(kind))
    (y,) = program.evaluate({"x": feed["x"]}, ["y"])
    wanted = feed["x"].astype(np.float32) @ program.data["w"].astype(kind).astype(np.float32)
    np.testing.assert_allclose(y.astype(np.float32), wanted, rtol=2**-7)


def test_edited_models_keep_their_type() -> None:
    program = rc.load(model(np.float16))
    program.data["w"] = program.data["w"] + np.float32(1)
    edited = rc.edit.linear(program, 2)
    assert edited.source.graph.initializer[0].data_type == onnx.TensorProto.FLOAT16
    np.testing.assert_array_equal(edited.data["w"], program.data["w"])


def test_what_trains_in_place_is_told() -> None:
    with pytest.warns(rc.ModelWarning, match=r"train in place.*\(w\).*float32"):
        program = rc.load(model(np.float16, node=True))
    assert program.parameters[0].value.type.dtype == "f16"


def test_what_16_bits_do_not_hold_is_not_exported() -> None:
    program = rc.load(model(np.float16))
    program.data["w"] = program.data["w"] * np.float32(1e6)
    with pytest.raises(rc.ModelError, match="'w' has trained to 1"):
        rc.export_trained(program)
