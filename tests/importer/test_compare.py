"""Imports beside their references, buffers that a run changes, and gradients that come with a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import recompute as rc
from recompute.importer.state import BUFFERS
from recompute.torch.check_import import _writable

W = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
X = np.array([[1.0, 2.0], [-1.0, 0.5], [0.0, 1.0]], np.float32)


def _model(nodes: list[onnx.NodeProto], tensors: dict[str, np.ndarray], **buffers: str) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 2])],
        [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])],
        [numpy_helper.from_array(a, n) for n, a in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("recompute", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    if buffers:
        model.metadata_props.add(key=BUFFERS, value=json.dumps(buffers))
    return model


def _squares(**more: np.ndarray) -> onnx.ModelProto:
    """mean((x w)²): its gradient is 2 xᵀ x w / 6."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Mul", ["h", "h"], ["q"]),
        helper.make_node("ReduceMean", ["q"], ["loss"], keepdims=0),
    ]
    return _model(nodes, {"w": W, **more})


def _reference() -> dict[str, np.ndarray]:
    h = X @ W
    return {"x": X, "loss": np.mean(h * h), "h": h, "w_grad": 2 * X.T @ h / h.size}


def test_what_a_session_holds_keeps_the_order_of_its_elements() -> None:
    held = np.array([[0, 1, 2], [3, 4, 5]], order="F")
    np.testing.assert_array_equal(_writable(held.T), [[0, 3], [1, 4], [2, 5]])


def test_an_empty_batch_in_groups_and_a_number_with_an_axis() -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "groups"], ["h"]),
        helper.make_node("ReduceSum", ["h"], ["total"], keepdims=0),
        helper.make_node("ReduceMax", ["total", "axis"], ["loss"], keepdims=0),
    ]
    model = _model(nodes, {"groups": np.array([0, 1, -1]), "axis": np.array([-1])})
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 0
    program = rc.load(model)
    assert program["h"].shape == (0, 1, 2)
    assert rc.Executor().run(program, {"x": np.zeros((0, 2), "f4")}, ["loss"])[0] == 0


def test_a_right_import(tmp_path: Path) -> None:
    np.savez(tmp_path / "r.npz", **_reference())
    program = rc.check_import(_squares(), tmp_path / "r.npz")
    assert [v.name for v in program.parameters] == ["w"]


@pytest.mark.parametrize("name", ["loss", "h", "w_grad"])
def test_a_difference_is_named(name: str) -> None:
    reference = _reference()
    reference[name] = reference[name] * np.float32(1.01)
    with pytest.raises(rc.ModelError, match=rf"'{name.removesuffix('_grad')}' differs by 9.9e-03 of its largest"):
        rc.check_import(_squares(), reference)


@pytest.mark.parametrize("change", [{"x": None}, {"v_grad": W}, {"loss_after": W}])
def test_references_that_do_not_fit(change: dict[str, np.ndarray | None]) -> None:
    reference = {n: a for n, a in {**_reference(), **change}.items() if a is not None}
    with pytest.raises(rc.UsageError, match=r"the reference (lacks|has)"):
        rc.check_import(_squares(), reference)


def test_a_reference_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "r.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(rc.UsageError, match="cannot read the reference"):
        rc.check_import(_squares(), tmp_path / "r.npz")


def _averaged(value: str = "after") -> onnx.ModelProto:
    """mean((h - after)²) for after = 0.5 m + 0.5 mean(h), which is kept in m."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("ReduceMean", ["h", "axes"], ["now"], keepdims=0),
        helper.make_node("Add", ["m", "now"], ["sum"]),
        helper.make_node("Mul", ["sum", "half"], ["after"]),
        helper.make_node("Sub", ["h", "after"], ["d"]),
        helper.make_node("Mul", ["d", "d"], ["q"]),
        helper.make_node("ReduceMean", ["q"], ["loss"], keepdims=0),
    ]
    tensors = {"w": W, "m": np.zeros(2, np.float32), "half": np.float32(0.5), "axes": np.array([0])}
    return _model(nodes, tensors, m=value)


def test_a_buffer_keeps_what_the_model_says() -> None:
    program = rc.load(_averaged(), trainable=["w"])
    m, losses, executor = np.zeros(2), [], rc.Executor()
    rc.SGD(0.0).minimize(program["loss"])
    for _ in range(3):
        losses.append(float(executor.run(program, {"x": X}, ["loss"])[0]))
        m = 0.5 * m + 0.5 * (X @ W).mean(0)
        np.testing.assert_allclose(losses[-1], np.mean((X @ W - m) ** 2), rtol=1e-5)
        np.testing.assert_allclose(program.data["m"], m, rtol=1e-6)
    assert len(set(losses)) == 3


def test_damaged_metadata_of_buffers() -> None:
    with pytest.raises(rc.ModelError, match=r"recompute.buffers names 'nothing', which nothing writes"):
        rc.load(_averaged("nothing"))


def _reversed() -> onnx.ModelProto:
    """The sum of squares of y = x w, through which the gradient g of y passes as -2 g h."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Identity", ["h"], ["y"]),
        helper.make_node("Cotangent", ["y"], ["g"], domain="recompute"),
        helper.make_node("Mul", ["g", "h"], ["gh"]),
        helper.make_node("Mul", ["gh", "minus"], ["back"]),
        helper.make_node("CustomGradient", ["y", "g", "h", "back"], ["z"], domain="recompute"),
        helper.make_node("Mul", ["z", "z"], ["q"]),
        helper.make_node("ReduceSum", ["q"], ["loss"], keepdims=0),
    ]
    return _model(nodes, {"w": W, "minus": np.float32(-2)})


@pytest.mark.parametrize("providers", [None, ("numpy",)])
def test_a_gradient_that_comes_with_the_model(providers: tuple[str, ...] | None) -> None:
    program = rc.load(_reversed(), trainable=["w"])
    before = program.data["w"].copy()
    rc.SGD(0.125).minimize(program["loss"])
    (loss,) = rc.Executor(providers=providers).run(program, {"x": X}, ["loss"])
    h = X @ W
    np.testing.assert_allclose(loss, np.sum(h * h), rtol=1e-6)
    np.testing.assert_allclose(before - program.data["w"], 0.125 * X.T @ (-2 * 2 * h * h), rtol=1e-5)
    assert rc.parse(str(program.forward)) == program.forward


def test_a_custom_gradient_is_left_out_of_the_model_for_inference() -> None:
    program = rc.load(_reversed(), trainable=["w"])
    model = rc.export_trained(program)
    assert [o.domain for o in model.opset_import] == [""]
    assert {n.op_type for n in model.graph.node} <= {"MatMul", "Identity", "Mul", "ReduceSum"}
    (loss,) = program.evaluate({"x": X}, ["loss"])
    np.testing.assert_allclose(loss, np.sum((X @ W) ** 2), rtol=1e-6)


@pytest.mark.parametrize("inputs", [["y", "g", "h"], ["y"], ["y", "g", "h", ""]])
def test_damaged_custom_gradients(inputs: list[str]) -> None:
    model = _reversed()
    model.graph.node[5].input[:] = inputs
    with pytest.raises(rc.ModelError, match=r"CustomGradient.*its inputs are not"):
        rc.load(model)
