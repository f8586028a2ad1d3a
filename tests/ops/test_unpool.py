"""MaxUnpool: imported against ONNX Runtime, its gradient, and what it keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import recompute as rc
from recompute import models
from recompute.compiling.compiler import compile_step
from recompute.errors import ModelError

ort = pytest.importorskip("onnxruntime")
X = np.random.default_rng(0).standard_normal((1, 2, 2, 3)).astype(np.float32)


def pooled(size: tuple[int, int], attributes: dict[str, Any], output_shape: bool = False) -> onnx.ModelProto:
    """x [2, 3, *size] pooled, doubled and put back where it came from."""
    shape = numpy_helper.from_array(np.array([2, 3, *size]), "shape")
    nodes = [
        helper.make_node("MaxPool", ["x"], ["p", "i"], **attributes),
        helper.make_node("Add", ["p", "p"], ["d"]),
        helper.make_node("MaxUnpool", ["d", "i", "shape"] if output_shape else ["d", "i"], ["y"], **attributes),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, *size])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    return finish(nodes, inputs, outputs, [shape] if output_shape else [])


def finish(nodes: Any, inputs: Any, outputs: Any, initializers: Any) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "unpool", inputs, outputs, initializers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return onnx.shape_inference.infer_shapes(made, data_prop=True)


def same(made: onnx.ModelProto, feed: dict[str, np.ndarray]) -> rc.Program:
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    program = rc.load(made)
    np.testing.assert_array_equal(rc.Executor().run(program, feed, ["y"])[0], session.run(None, feed)[0])
    return program


@pytest.mark.parametrize(
    ("size", "attributes", "output_shape", "numbers"),
    [
        ((8, 8), {"kernel_shape": [2, 2], "strides": [2, 2]}, False, True),
        ((9, 6), {"kernel_shape": [3, 2], "strides": [3, 2]}, True, True),
        ((9, 7), {"kernel_shape": [2, 2], "strides": [2, 2]}, True, True),
        ((9, 7), {"kernel_shape": [3, 3], "strides": [2, 2]}, False, False),
    ],
)
def test_what_a_pool_took_goes_back(size: Any, attributes: Any, output_shape: bool, numbers: bool) -> None:
    x = np.random.default_rng(1).standard_normal((2, 3, *size)).astype(np.float32)
    program = same(pooled(size, attributes, output_shape), {"x": x})
    kinds = [o.op.name for o in program.operators]
    assert ("MaxPoolGrad" in kinds, "ScatterElements" in kinds) == (numbers, not numbers)


def fed(output_shape: list[int] | None = None) -> onnx.ModelProto:
    """x and its indices come from outside."""
    shape = [numpy_helper.from_array(np.array(output_shape), "shape")] if output_shape else []
    node = helper.make_node(
        "MaxUnpool", ["x", "i", *["shape"] * len(shape)], ["y"], kernel_shape=[2, 2], strides=[2, 2]
    )
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 2, 3]),
        helper.make_tensor_value_info("i", TensorProto.INT64, [1, 2, 2, 3]),
    ]
    return finish([node], inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, output_shape)], shape)


def test_indices_from_outside() -> None:
    indices = np.random.default_rng(2).permutation(48)[:12].reshape(1, 2, 2, 3)
    same(fed(), {"x": X, "i": indices})
    same(fed([1, 2, 4, 6]), {"x": X, "i": indices})


def test_a_shape_that_leaves_the_indices_open_is_refused() -> None:
    with pytest.raises(ModelError, match=r"output_shape \[1, 2, 5, 7\] is not the inferred \[1, 2, 4, 6\]"):
        rc.load(fed([1, 2, 5, 7]))


def test_a_training_step_keeps_no_index() -> None:
    """One byte a window in place of eight: the window numbers do for pooling, its gradient and unpooling."""
    program = rc.load(models.build("segnet", batch=1, image=32, width=2, classes=3))
    loss = rc.losses.cross_entropy(program).name
    step = compile_step(program, loss, rc.SGD(learning_rate=0.1))
    assert not any(v.dtype == "i64" and v.ndim for o in step.program.operators for v in o.writes())
    assert sum(o.op.name == "MaxPoolGather" for o in step.program.operators) == 5
