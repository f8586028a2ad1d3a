"""Files that fix their batch, loaded at another: each sample's result is that of the file."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import recompute as rc
from recompute.importer import rebatch

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


# -- beside ONNX Runtime: row i of a batch is what the file gives for sample i ---------------------------------------


def _held(name: str, *shape: int) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(RNG.standard_normal(shape).astype(np.float32), name)


def _whole(name: str, *numbers: int) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.array(numbers, np.int64), name)


def _one(name: str) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Nodes from x [1, 4, 6] to y, as exporters write them for a batch of 1, and tensors that hold it."""
    if name in ("LSTM", "GRU"):  # first states, and the length, are constants of one sample
        count = 4 if name == "LSTM" else 3
        states = ["h", "c"][: count - 2]
        nodes = [
            _node("Transpose", "x", "t", perm=[1, 0, 2]),
            helper.make_node(name, ["t", "wi", "wh", "", "n", *states], ["", "last"], hidden_size=5),
            _node("Squeeze", "last zero", "y"),
        ]
        held = [_held("wi", 1, 5 * count, 6), _held("wh", 1, 5 * count, 5), *(_held(s, 1, 1, 5) for s in states)]
        return nodes, [*held, onnx.numpy_helper.from_array(np.array([3], np.int32), "n"), _whole("zero", 0)]
    if (
        name == "attention"
    ):  # the sequence comes first: [4, batch, 6] becomes [4, batch · heads, 3], then [4 · batch, 6]
        nodes = [
            _node("Transpose", "x", "t", perm=[1, 0, 2]), _node("Reshape", "t heads", "s"),
            _node("Transpose", "s", "h", perm=[1, 0, 2]), _node("Transpose", "h", "k", perm=[0, 2, 1]),
            _node("MatMul", "h k", "scores"), _node("Softmax", "scores", "p", axis=-1), _node("MatMul", "p h", "m"),
            _node("Transpose", "m", "b", perm=[1, 0, 2]), _node("Reshape", "b rows", "r"), _node("Gemm", "r w", "g"),
            _node("Reshape", "g back", "q"), _node("Transpose", "q", "y", perm=[1, 0, 2]),
        ]  # fmt: skip
        return nodes, [_held("w", 6, 6), _whole("heads", 4, 2, 3), _whole("rows", 4, 6), _whole("back", 4, 1, 6)]
    if name == "token":
        return [_node("Concat", "token x", "c", axis=1), _node("MatMul", "c w", "y")], [
            _held("token", 1, 1, 6), _held("w", 6, 3),
        ]  # fmt: skip
    if name == "resize":
        nodes = [_node("Unsqueeze", "x one", "u"), helper.make_node("Resize", ["u", "", "", "s"], ["y"], mode="linear")]
        return nodes, [_whole("one", 1), _whole("s", 1, 1, 8, 9)]
    if name == "grid":
        return [_node("Unsqueeze", "x one", "u"), _node("GridSample", "u g", "y")], [
            _whole("one", 1), _held("g", 1, 3, 3, 2),
        ]  # fmt: skip
    if name == "squeeze":  # what is left of a batch of 1 has no axis for it
        return [_node("ReduceSum", "x all", "s", keepdims=1), _node("Squeeze", "s every", "y")], [
            _whole("all", 1, 2), _whole("every", 0, 1, 2),
        ]  # fmt: skip
    if name == "gather":  # transformers' masks: places in all samples' rows, of which the file has one sample's
        nodes = [_node("Reshape", "x rows", "r"), _node("Gather", "r i", "g", axis=0), _node("GatherND", "g n", "y")]
        places = onnx.numpy_helper.from_array(np.array([[3, 1, 0]]), "i")
        return nodes, [_whole("rows", 4, 6), places, onnx.numpy_helper.from_array(np.array([[[0, 2], [0, 0]]]), "n")]
    shuffled = _node("Transpose", "r", "t", perm=[0, 2, 1, 3])
    nodes = [_node("Reshape", "x s", "r"), shuffled, _node("Reshape", "t b", "y")]
    return nodes, [_whole("s", 1, 2, 2, 6), _whole("b", 1, 4, 6)]


@pytest.mark.parametrize(
    "name", ["LSTM", "GRU", "attention", "token", "resize", "grid", "squeeze", "shuffle", "gather"]
)
def test_rows_are_those_of_the_file_in_onnx_runtime(name: str) -> None:
    runtime = pytest.importorskip("onnxruntime")
    nodes, held = _one(name)
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", 1, [1, 4, 6])], [value("y", 1, None)], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = RNG.standard_normal((3, 4, 6)).astype(np.float32)
    session = runtime.InferenceSession(model.SerializeToString())
    rows = [session.run(None, {"x": x[i : i + 1]})[0] for i in range(3)]
    expected = np.stack(rows) if name == "squeeze" else np.concatenate(rows)
    program = rc.load(model, batch=3)
    np.testing.assert_allclose(program.evaluate({"x": x})[0], expected, rtol=1e-5, atol=1e-6)
    opened = runtime.InferenceSession(rc.export_trained(program).SerializeToString())  # for any batch
    np.testing.assert_allclose(opened.run(None, {"x": x[:2]})[0], expected[:2], rtol=1e-5, atol=1e-6)


def test_states_and_settings_among_the_inputs() -> None:
    """A first state [1, batch, 5] is an input; a single number beside larger inputs has no batch."""
    nodes = [
        _node("Transpose", "x", "t", perm=[1, 0, 2]),
        helper.make_node("GRU", ["t", "wi", "wh", "", "", "h"], ["", "last"], hidden_size=5),
        _node("Mul", "last rate", "y"),
    ]
    value = helper.make_tensor_value_info
    inputs = [value("x", 1, [1, 4, 6]), value("h", 1, [1, 1, 5]), value("rate", 1, [1])]
    held = [_held("wi", 1, 15, 6), _held("wh", 1, 15, 5)]
    graph = helper.make_graph(nodes, "g", inputs, [value("y", 1, None)], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    shapes = [v.shape for v in rc.load(model, batch=3).inputs]
    assert shapes == [(3, 4, 6), (1, 3, 5), (1,)]


def test_open_dimensions_and_bound_inputs_beside_a_fixed_batch() -> None:
    """Samples are drawn at the sizes that are given; what is bound has no batch."""
    value = helper.make_tensor_value_info
    nodes = [_node("Mul", "rate x", "s"), _node("MatMul", "s w", "m"), _node("Reshape", "m s2", "y")]
    inputs = [value("rate", 1, [1, 1, 1]), value("x", 1, [1, "length", 6])]
    held = [_held("w", 6, 6), _whole("s2", 1, -1)]
    graph = helper.make_graph(nodes, "g", inputs, [value("y", 1, None)], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(rc.UsageError, match="--dim length=16"):
        rc.load(model, batch=3, set={"rate": 2})
    program = rc.load(model, batch=3, set={"rate": 2}, dims={"length": 5})
    x = RNG.standard_normal((3, 5, 6)).astype(np.float32)
    w = onnx.numpy_helper.to_array(held[0])
    np.testing.assert_allclose(program.evaluate({"x": x})[0], (2 * x @ w).reshape(3, 30), rtol=1e-4, atol=1e-5)


def test_a_mean_of_samples_is_no_row() -> None:
    """Where an output with axes is the mean of all samples, the model cannot be opened."""
    with pytest.raises(rc.UsageError, match="'y' of samples together is not that of each"):
        rc.load(_model([_node("ReduceMean", "x", "y", axes=[0], keepdims=1)], 1, {}), batch=8)


def test_samples_differ_where_they_can() -> None:
    """Masks of four places: of equal ones no difference would tell whose is read."""
    for seed in range(20):
        drawn = rebatch._different(np.random.default_rng(seed), rc.TensorType("i64", (1, 4)))
        assert len({a.tobytes() for a in drawn}) == 3
    assert len(rebatch._different(np.random.default_rng(0), rc.TensorType("bool", (1,)))) == 3


def test_samples_that_are_not_numbers_prove_nothing() -> None:
    nodes = [_node("Sub", "x x", "zero"), _node("Div", "zero zero", "y")]
    with pytest.raises(rc.UsageError, match="'y' is not a number for the samples that were drawn"):
        rc.load(_model(nodes, 1, {}), batch=8)


def test_errors_about_a_fixed_batch_say_how_to_open_it() -> None:
    model = _model(*_product())
    with pytest.raises(rc.UsageError, match=r"\[8, 4, 6\] does not fit: batch=8 opens a batch that the file fixes"):
        rc.load(model, input_shapes={"x": (8, 4, 6)})
    with pytest.raises(rc.UsageError, match=r"does not fit$"):
        rc.load(model, input_shapes={"x": (8, 4, 5)})
    with pytest.raises(rc.UsageError, match="load it with batch=3, which opens it"):
        rc.load(model).at(batch=3)


def _product() -> tuple[list[onnx.NodeProto], int, dict[str, list[int]]]:
    nodes, shapes, _ = FORMS["product"]
    return nodes, 1, shapes(1)


def test_what_cannot_be_opened_says_what_to_do() -> None:
    """A softmax over the batch: the results of samples depend on one another."""
    with pytest.raises(rc.UsageError, match=r"fixes its batch at 1, and it could not be made for 8 \('y' of samples"):
        rc.load(_model([_node("Softmax", "x", "y", axis=0)], 1, {}), batch=8)


def test_the_fixed_batch_itself_is_the_file() -> None:
    assert rc.load(_model([_node("Softmax", "x", "y", axis=0)], 1, {}), batch=1).inputs[0].shape == (1, 4, 6)


#: nodes from x [3, 4, 6] to y that join it with c, which the file holds for its three samples: their shape
HELD: dict[str, tuple[list[onnx.NodeProto], tuple[int, ...]]] = {
    "added": ([_node("Add", "x c", "h"), _node("MatMul", "h w", "y")], (3, 4, 6)),
    "multiplied": ([_node("MatMul", "x c", "y")], (3, 6, 2)),
    "joined": ([_node("Concat", "c x", "h", axis=1), _node("MatMul", "h w", "y")], (3, 1, 6)),
    "state": (
        [_node("Transpose", "x", "t", perm=[1, 0, 2]),
         helper.make_node("RNN", ["t", "wi", "wh", "", "", "c"], ["", "h"], hidden_size=5),
         _node("Transpose", "h", "y", perm=[1, 0, 2])],
        (1, 3, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", HELD)
def test_what_a_file_holds_for_several_samples(form: str) -> None:
    """The same for each: it is repeated, or read once; else it is refused by name."""
    nodes, shape = HELD[form]
    axis = shape.index(3)
    one = RNG.standard_normal([1 if i == axis else n for i, n in enumerate(shape)]).astype(np.float32)
    model = _model(nodes, 3, {})
    model.graph.initializer.extend([_held("wi", 1, 5, 6), _held("wh", 1, 5, 5)])
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.repeat(one, 3, axis), "c"))
    x = RNG.standard_normal((7, 4, 6)).astype(np.float32)
    program, of_file = rc.load(model, batch=7), rc.load(model)
    (y,) = program.evaluate({"x": x})
    for i in (0, 3, 4):
        np.testing.assert_allclose(y[i : i + 3], of_file.evaluate({"x": x[i : i + 3]})[0], rtol=1e-4, atol=1e-5)
    model.graph.initializer[-1].CopyFrom(_held("c", *shape))
    with pytest.raises(rc.UsageError, match="'c' holds other numbers for each of the 3 samples"):
        rc.load(model, batch=7)
