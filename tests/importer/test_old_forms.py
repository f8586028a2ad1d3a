"""Forms of old opsets that onnx's version converter leaves as they are, or gets wrong; in subgraphs, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.helper import make_node as node

import recompute as rc
from recompute.importer.convert import raised

KINDS = {"f2": 10, "f4": 1, "f8": 11}
DRAW = np.random.default_rng(0)
X = DRAW.standard_normal((2, 3, 3, 3)).astype("f4")


def model(nodes: list[Any], opset: int, x: np.ndarray, *, inside: bool = False, **held: np.ndarray) -> onnx.ModelProto:
    """A file whose nodes make `y` of `x`, and z = 2 y; with `inside`, in the chosen branch of an If."""
    two = node("Add", ["y", "y"], ["z"])
    kind, held = KINDS[x.dtype.str[1:]], {**held, "yes": np.array(True)}
    outputs = [helper.make_tensor_value_info("z", kind, [None] * x.ndim)]
    if inside:
        other = helper.make_graph([node("Identity", ["x"], ["w"])], "other", [], [onnx.ValueInfoProto(name="w")])
        chosen = helper.make_graph(nodes, "chosen", [], [onnx.ValueInfoProto(name="y")])
        nodes = [node("If", ["yes"], ["y"], else_branch=other, then_branch=chosen)]
    inputs = [helper.make_tensor_value_info("x", kind, x.shape)]
    weights = [numpy_helper.from_array(a, n) for n, a in held.items()]
    graph = helper.make_graph([*nodes, two], "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def run(source: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return rc.Executor().run(rc.load(source, trainable=[]), {"x": x}, ["z"])[0] / 2


def hardmax(x: np.ndarray) -> np.ndarray:
    flat = x.reshape(len(x), -1)
    return np.eye(flat.shape[1], dtype=x.dtype)[flat.argmax(1)].reshape(x.shape)


def from_the_corner(x: np.ndarray) -> np.ndarray:
    at = np.arange(int(x.shape[-1] * 1.4)) / np.float32(1.4)
    return x[..., np.floor(at).astype(int)]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("nodes", "opset", "want"),
    [
        ([node("Hardmax", ["x"], ["y"])], 11, hardmax),
        ([node("Upsample", ["x", "sizes"], ["y"])], 9, from_the_corner),
        ([node("Resize", ["x", "sizes"], ["y"])], 10, from_the_corner),
    ],
)
def test_a_form_of_an_old_opset_is_known_in_subgraphs(nodes: list[Any], opset: int, want: Any, inside: bool) -> None:
    sizes = np.array([1, 1, 1, 1.4], np.float32)
    assert np.array_equal(run(model(nodes, opset, X, inside=inside, sizes=sizes), X), want(X))


def test_a_model_that_is_raised_keeps_its_numbers() -> None:
    ort = pytest.importorskip("onnxruntime")
    nodes = [node("Hardmax", ["x"], ["h"]), node("Resize", ["h", "sizes"], ["y"])]
    source = model(nodes, 10, X, sizes=np.array([1, 1, 1, 1.4], np.float32))
    (z,) = ort.InferenceSession(raised(source, 21).SerializeToString()).run(["z"], {"x": X})
    assert np.array_equal(z, 2 * from_the_corner(hardmax(X)))


@pytest.mark.parametrize("shape", [(3, 3, 4, 4), (1, 3, 4, 4), (2, 3, 3, 3), (2, 3, 4, 5)])
@pytest.mark.parametrize(("operator", "held", "axis"), [("Add", (3,), 1), ("Mul", (3, -1), 1), ("Sub", (-2,), -2)])
def test_an_operand_stood_at_an_axis_up_to_opset_6(shape: Any, operator: str, held: Any, axis: int) -> None:
    """Batch 1, or as large as the operand: without an error, and wrong, if it stands elsewhere."""
    x = DRAW.standard_normal(shape).astype("f4")
    w = DRAW.standard_normal([shape[2] if d < 0 else d for d in held]).astype("f4")
    source = model([node(operator, ["x", "w"], ["y"], axis=axis, broadcast=1)], 6, x, w=w)
    aligned = w.reshape(w.shape + (1,) * (4 - axis % 4 - w.ndim))
    want = {"Add": np.add, "Mul": np.multiply, "Sub": np.subtract}[operator](x, aligned)
    assert np.array_equal(run(source, x), want)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_bounds_of_a_clip_have_its_type(dtype: str, inside: bool) -> None:
    x = X.astype(dtype)
    found = run(model([node("Clip", ["x"], ["y"], min=-0.5, max=0.75)], 10, x, inside=inside), x)
    assert found.dtype == dtype
    assert np.array_equal(found, x.clip(-0.5, 0.75))


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
def test_a_subgraph_may_read_a_softmax_of_rows(operator: str) -> None:
    then = helper.make_graph([node("Neg", ["s"], ["a"])], "then", [], [onnx.ValueInfoProto(name="a")])
    other = helper.make_graph([node("Abs", ["s"], ["b"])], "other", [], [onnx.ValueInfoProto(name="b")])
    nodes = [node(operator, ["x"], ["s"]), node("If", ["yes"], ["y"], then_branch=then, else_branch=other)]
    e = np.exp(X.astype("f8"))
    share = e / e.sum((1, 2, 3), keepdims=True)
    want = -share if operator == "Softmax" else -np.log(share)
    np.testing.assert_allclose(run(model(nodes, 11, X), X), want, rtol=1e-5)
