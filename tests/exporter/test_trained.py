"""Trained models for inference: ONNX Runtime scores them as `evaluate` does."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tests.training.test_modes import RNG, X, Y, network, trained

import recompute as rc
from recompute.ops.elementwise.relu import Relu

ort = pytest.importorskip("onnxruntime")


def scores(model: onnx.ModelProto, feed: dict[str, np.ndarray], name: str = "scores") -> np.ndarray:
    """ONNX Runtime's, by the model as its file has it."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    found = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return found.run([name], feed)[0]


def node_types(graph: onnx.GraphProto) -> set[str]:
    return {n.op_type for n in graph.node}


def same(a: Any, b: Any) -> None:
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_model_exported_in_training_mode_scores_one_by_one() -> None:
    """By the running statistics, not the batch's; dropout is gone."""
    program = trained(steps=5)
    model = rc.export_trained(program)
    onnx.checker.check_model(model, full_check=True)
    assert "Dropout" not in node_types(model.graph)
    norms = [n for n in model.graph.node if n.op_type == "BatchNormalization"]
    assert all(len(n.output) == 1 and not any(a.name == "training_mode" for a in n.attribute) for n in norms)
    (expected,) = program.evaluate({"x": X}, ["scores"])
    same(scores(model, {"x": X}), expected)
    same(np.concatenate([scores(model, {"x": X[i : i + 1]}) for i in range(6)]), expected)


def test_frozen_parts_have_the_weights_that_were_loaded_later() -> None:
    """Not those of the model's file."""
    program = rc.load(network(), batch=6)
    for name in ("body.conv1", "body.m1"):
        program.data[name] = program.data[name] + np.float32(0.5)
    program.freeze("body.*", eval=True)
    rc.SGD(0.1).minimize(rc.losses.cross_entropy(program))
    rc.Executor().run(program, {"x": X, "label": Y}, ["loss"])
    same(scores(rc.export_trained(program), {"x": X}), program.evaluate({"x": X}, ["scores"])[0])


def with_head(model: onnx.ModelProto, **load: Any) -> rc.Program:
    """The model with a new head on its features: Linear, Relu, Dropout, Linear."""
    program = rc.load(model, batch=6, **load)
    program.freeze(["body.*"], eval=True)
    b = program.builder()
    weights = [RNG.standard_normal(s).astype(np.float32) for s in ((4, 8), (8, 5))]
    w = [program.declare("parameters", f"new.{i}", a) for i, a in enumerate(weights)]
    step = program.declare("state", "step", np.zeros((), np.int64))
    h = b.Dropout(b.emit(Relu(), b.MatMul(program["f"].value, w[0])), step, ratio=0.5, seed=3)
    y = b.Add(b.MatMul(h, w[1]), b.constant(np.arange(5), h))
    top = b.Reshape(y, shape=(6, 5, 1))
    program.append(b, outputs=[top.name])
    rc.Adam(0.1).minimize(rc.losses.cross_entropy(program[y.name], soft_label=True))
    return program


@pytest.mark.parametrize("opset", [20, 21])
def test_new_heads_are_exported(opset: int) -> None:
    """With their parameters, at any batch, in a model of an earlier opset too."""
    model = network()
    model.opset_import[0].version = opset
    program = with_head(model)
    feed = {"x": X, "label": np.full((6, 5), 0.2, np.float32)}
    executor = rc.Executor()
    for _ in range(3):
        executor.run(program, feed, ["loss"])
    name = program.forward.outputs[1]
    exported = rc.export_trained(program)
    onnx.checker.check_model(exported, full_check=True)
    assert [o.name for o in exported.graph.output] == ["scores", name]
    (expected,) = program.evaluate({"x": X}, [name])
    same(scores(exported, {"x": X}, name), expected)
    only = rc.export_trained(program, outputs=[name])
    assert [o.name for o in only.graph.output] == [name] and "head.weight" not in {
        t.name for t in only.graph.initializer
    }
    same(scores(only, {"x": X[:2]}, name), expected[:2])


def test_the_loss_and_its_label_are_left_out() -> None:
    """Of a model that computes them itself; alone it stays."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20]>
        net (float[N,3] x, int64[N] target) => (float loss, float[N,3] scores) {
            scores = MatMul (x, w)
            loss = SoftmaxCrossEntropyLoss (scores, target)
        }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.eye(3, dtype=np.float32), "w"))
    program = rc.load(model, batch=2)
    rc.SGD(0.1).minimize(program["loss"])
    x = np.ones((2, 3), np.float32)
    rc.Executor().run(program, {"x": x, "target": np.array([0, 1])}, ["loss"])
    exported = rc.export_trained(program)
    assert [o.name for o in exported.graph.output] == ["scores"]
    assert [i.name for i in exported.graph.input] == ["x"]
    same(scores(exported, {"x": x}), program.evaluate({"x": x}, ["scores"])[0])
    whole = rc.export_trained(program, outputs=["loss"])
    assert [i.name for i in whole.graph.input] == ["x", "target"]
    with pytest.raises(rc.UsageError, match=r"no value 'score'.*scores"):
        rc.export_trained(program, outputs=["score"])


def inner(op_type: str, ins: list[str], outs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, ins, outs, **attributes)


def test_masks_statistics_subgraphs_and_functions() -> None:
    """Dropout whose mask or result is an output, statistics that are outputs, both inside a subgraph and a function."""
    norm_ins = ["s", "b", "m", "v"]
    branch = helper.make_graph(
        [inner("Dropout", ["h", "half", "yes"], ["t"]), inner("Relu", ["t"], ["r"])], "branch", [],
        [helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, None)],
    )  # fmt: skip
    function = helper.make_function(
        "mine", "Layer", ["a", "ratio", "on"], ["c"],
        [inner("Dropout", ["a", "ratio", "on"], ["c"])], [helper.make_opsetid("", 20)],
    )  # fmt: skip
    nodes = [
        inner("BatchNormalization", ["x", *norm_ins], ["n", "mean", "var"], training_mode=1),
        inner("Dropout", ["n", "half", "yes"], ["h", "mask"]),
        inner("If", ["yes"], ["picked"], then_branch=branch, else_branch=branch),
        inner("Layer", ["picked", "half", "yes"], ["y"], domain="mine"),
        inner("Dropout", ["y", "half", "yes"], ["z"]),
    ]
    floats = onnx.TensorProto.FLOAT
    outputs = [
        helper.make_tensor_value_info(n, floats, [4, 2] if n in "yz" else [2]) for n in ("y", "z", "mean", "var")
    ]
    outputs.append(helper.make_tensor_value_info("mask", onnx.TensorProto.BOOL, [4, 2]))
    graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", floats, [4, 2])], outputs)
    arrays = {"s": [1, 2], "b": [0, 1], "m": [0.5, 1], "v": [2, 3], "half": 0.5, "yes": True}
    for name, a in arrays.items():
        graph.initializer.append(numpy_helper.from_array(np.array(a, bool if a is True else np.float32), name))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    program = rc.load(helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=10))
    model = rc.export_trained(program)
    onnx.checker.check_model(model)
    x = RNG.standard_normal((4, 2)).astype(np.float32)
    expected = np.maximum((x - [0.5, 1]) / np.sqrt(np.array([2, 3]) + 1e-5) * [1, 2] + [0, 1], 0)
    for name in ("y", "z"):
        same(scores(model, {"x": x}, name), expected)
    same(scores(model, {"x": x}, "mean"), [0.5, 1])
    same(scores(model, {"x": x}, "var"), [2, 3])
    assert scores(model, {"x": x}, "mask").all()


@pytest.mark.parametrize("opset", [9, 13])
def test_old_opsets(opset: int) -> None:
    """Training mode was the number of outputs."""
    nodes = [
        inner("BatchNormalization", ["x", "s", "b", "m", "v"], ["n", "mean", "var", "saved_mean", "saved_var"]),
        inner("Dropout", ["n"], ["d"]),
        inner("Relu", ["d"], ["y"]),
    ]
    floats = onnx.TensorProto.FLOAT
    values = [helper.make_tensor_value_info(n, floats, [4, 2]) for n in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:])
    for name, a in {"s": [1, 2], "b": [0, 1], "m": [0.5, 1], "v": [2, 3]}.items():
        graph.initializer.append(numpy_helper.from_array(np.array(a, np.float32), name))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    program = rc.load(model)
    x = RNG.standard_normal((4, 2)).astype(np.float32)
    same(scores(rc.export_trained(program), {"x": x}, "y"), program.evaluate({"x": x}, ["y"])[0])


def test_an_output_may_be_a_weight() -> None:
    inputs = [helper.make_tensor_value_info("x", 1, [2, 3])]
    outputs = [helper.make_tensor_value_info(n, 1, [2, 3]) for n in ("scores", "w")]
    weight = numpy_helper.from_array(np.ones((2, 3), np.float32), "w")
    graph = helper.make_graph([helper.make_node("Mul", ["x", "w"], ["scores"])], "g", inputs, outputs, [weight])
    program = rc.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))
    rc.SGD(0.1).minimize(rc.losses.mse(program["scores"]))
    feed = {"x": np.ones((2, 3), np.float32)}
    rc.Executor().run(program, {**feed, "label": np.zeros((2, 3), np.float32)}, ["loss"])
    model = rc.export_trained(program)
    assert program.data["w"][0, 0] != 1
    same(scores(model, feed, "w"), program.data["w"])
