"""Files that fix their batch, loaded at another: each sample's result is that of the file."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import recompute as rc

RNG = np.random.default_rng(0)
W = RNG.standard_normal((6, 6)).astype(np.float32)
TOKEN = RNG.standard_normal((1, 1, 6)).astype(np.float32)


def _node(kind: str, ins: str, out: str, **options: Any) -> onnx.NodeProto:
    return helper.make_node(kind, ins.split(), [out], **options)


def _heads(x: np.ndarray) -> np.ndarray:
    y = (x @ W).reshape(len(x), 4, 2, 3).transpose(0, 2, 1, 3)
    return y.transpose(0, 2, 1, 3).reshape(len(x), 24)


def _first(x: np.ndarray) -> np.ndarray:
    return np.concatenate([np.broadcast_to(TOKEN, (len(x), 1, 6)), x], axis=1) @ W


#: form → nodes from x [batch, 4, 6] to y, the shapes in them for a batch, and the same in NumPy
FORMS: dict[str, tuple[list[onnx.NodeProto], Any, Any]] = {
    "product": ([_node("MatMul", "x w", "y")], lambda b: {}, lambda x: x @ W),
    "reshape": (
        [_node("MatMul", "x w", "h"), _node("Reshape", "h s", "r"), _node("Transpose", "r", "t", perm=[0, 2, 1, 3]),
         _node("Transpose", "t", "u", perm=[0, 2, 1, 3]), _node("Reshape", "u f", "y")],
        lambda b: {"s": [b, 4, 2, 3], "f": [b, -1]},
        _heads,
    ),
    "joined": (
        [_node("Reshape", "x s", "r"), _node("MatMul", "r w", "h"), _node("Reshape", "h f", "y")],
        lambda b: {"s": [4 * b, 6], "f": [b, 4, 6]},
        lambda x: x @ W,
    ),
    "expand": (
        [_node("Expand", "token s", "e"), _node("Concat", "e x", "c", axis=1), _node("MatMul", "c w", "y")],
        lambda b: {"s": [b, 1, 6]},
        _first,
    ),
    "weight reshaped": (
        [_node("Reshape", "w s", "k"), _node("MatMul", "x k", "y")],
        lambda b: {"s": [1, 6, 6]},
        lambda x: x @ W,
    ),
    "mean": ([_node("ReduceMean", "x", "y", keepdims=0)], lambda b: {}, lambda x: x.mean()),
}  # fmt: skip


def _model(nodes: list[onnx.NodeProto], batch: int, shapes: dict[str, list[int]]) -> onnx.ModelProto:
    held = [onnx.numpy_helper.from_array(a, n) for n, a in (("w", W), ("token", TOKEN))]
    held += [onnx.numpy_helper.from_array(np.array(a, np.int64), n) for n, a in shapes.items()]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", 1, [batch, 4, 6])], [value("y", 1, None)], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("fixed", [1, 2])
@pytest.mark.parametrize("form", FORMS)
def test_a_fixed_batch_is_opened(form: str, fixed: int) -> None:
    nodes, shapes, expected = FORMS[form]
    program = rc.load(_model(nodes, fixed, shapes(fixed)), batch=5)
    assert program.inputs[0].shape == (5, 4, 6)
    x = RNG.standard_normal((5, 4, 6)).astype(np.float32)
    np.testing.assert_allclose(program.evaluate({"x": x})[0], expected(x), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(program.evaluate({"x": x[:3]})[0], expected(x[:3]), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_opened_says_what_to_do() -> None:
    """A softmax over the batch: the results of samples depend on one another."""
    with pytest.raises(
        rc.UsageError, match=r"fixes its batch at 1, and it could not be made for 8 \('y' of two samples"
    ):
        rc.load(_model([_node("Softmax", "x", "y", axis=0)], 1, {}), batch=8)


def test_the_fixed_batch_itself_is_the_file() -> None:
    assert rc.load(_model([_node("Softmax", "x", "y", axis=0)], 1, {}), batch=1).inputs[0].shape == (1, 4, 6)
