"""Dimensions that are open, inputs that are bound to values, and conditions that depend on inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import recompute as rc
from recompute.cli import command, train
from recompute.errors import ModelWarning

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 6)).astype(np.float32)
W = {n: RNG.standard_normal((6, 4)).astype(np.float32) for n in ("w8", "w16")}
value = helper.make_tensor_value_info


def _model(nodes: list[Any], inputs: list[Any], outputs: list[Any], held: dict[str, Any]) -> onnx.ModelProto:
    tensors = [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in held.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _branch(name: str, nodes: list[Any], held: dict[str, Any], shape: Any = ("N", 4)) -> onnx.GraphProto:
    tensors = [onnx.numpy_helper.from_array(a, n) for n, a in held.items()]
    return helper.make_graph(nodes, name, [], [value(name, 1, shape)], tensors)


def _chosen(other: onnx.GraphProto | None = None, kind: int = 7) -> onnx.ModelProto:
    """y = x · w16 where rate = 16000, else x · w8."""
    make = helper.make_node
    then = _branch("t", [make("MatMul", ["x", "w16"], ["t"])], {"w16": W["w16"]})
    other = other or _branch("e", [make("MatMul", ["x", "w8"], ["e"])], {"w8": W["w8"]})
    nodes = [
        make("Equal", ["rate", "k"], ["c"]),
        make("If", ["c"], ["y"], then_branch=then, else_branch=other),
    ]
    inputs = [value("x", 1, ["N", 6]), value("rate", kind, [])]
    return _model(nodes, inputs, [value("y", 1, ["N", 4])], {"k": np.array(16000, np.int64)})


@pytest.mark.parametrize("rate", [16000, 8000])
def test_a_bound_input_chooses_a_branch(rate: int) -> None:
    program = rc.load(_chosen(), batch=2, set={"rate": rate})
    used = "w16" if rate == 16000 else "w8"
    assert [v.name for v in program.inputs] == ["x"]
    assert [v.name.rsplit("/")[-1] for v in program.parameters] == [used]
    np.testing.assert_allclose(program.evaluate({"x": X})[0], X @ W[used], rtol=1e-5)
    again = program.evaluate({"x": np.tile(X, (2, 1))})[0]  # at another batch it stays bound
    np.testing.assert_allclose(again, np.tile(X @ W[used], (2, 1)), rtol=1e-5)


def test_both_branches_are_computed_where_the_condition_is_not_known() -> None:
    """The weight of the branch that is not chosen gets the gradient 0, the other the mean's: xᵀ · 1/8."""
    with pytest.warns(
        ModelWarning, match=r"'y' \(If\).*both of its branches.*set=\{'rate': VALUE\} \(--set rate=VALUE\)"
    ):
        program = rc.load(_chosen(), batch=2)
    rc.SGD(1.0).minimize(rc.losses.mse(program))
    label = next(v.name for v in program.inputs if v.name not in ("x", "rate"))
    given = {"x": X, "rate": np.array(8000), label: X @ W["w8"] - 1}
    y, _ = rc.Executor().run(program, given, ["y", program.loss])
    np.testing.assert_allclose(y, X @ W["w8"], rtol=1e-5)
    np.testing.assert_array_equal(program.data["y/then_branch/w16"], W["w16"])
    moved = W["w8"] - np.asarray(program.data["y/else_branch/w8"])
    np.testing.assert_allclose(moved, np.tile(2 * X.sum(0)[:, None] / 8, (1, 4)), rtol=1e-3, atol=1e-5)


UNSAFE = {
    "root": [helper.make_node("Sqrt", ["p"], ["t"])],
    "root of nothing": [helper.make_node("Sub", ["p", "p"], ["n"]), helper.make_node("Sqrt", ["n"], ["t"])],
    "quotient": [helper.make_node("Sub", ["p", "p"], ["n"]), helper.make_node("Div", ["p", "n"], ["t"])],
    "logarithm of a root": [helper.make_node("Sqrt", ["p"], ["n"]), helper.make_node("Log", ["n"], ["t"])],
    "exponential": [
        helper.make_node("Exp", ["huge"], ["n"]),
        helper.make_node("Mul", ["p", "n"], ["e"]),
        helper.make_node("Exp", ["e"], ["t"]),
    ],
}


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize("inside", [False, True])
def test_a_branch_that_is_not_chosen_has_no_part_in_gradients(name: str, inside: bool) -> None:
    """y = (a · w)² where a > 0, else what has no finite value or gradient there; w's gradient is that of the square,
    and 0 for the weight of the other branch, and of a branch in it."""
    make = helper.make_node
    other = _branch("e", [make("Mul", ["a", "v"], ["p"]), *UNSAFE[name]], {"v": np.full((2, 3), 2, np.float32)}, (2, 3))
    other.output[0].name = "t"
    if inside:
        again = _branch("u", [make("Mul", ["w", "w"], ["u"])], {}, (2, 3))
        nodes = [make("If", ["c"], ["i"], then_branch=again, else_branch=other), make("Mul", ["i", "w"], ["e"])]
        other = _branch("e", nodes, {}, (2, 3))
    then = _branch("s", [make("Mul", ["a", "w"], ["q"]), make("Mul", ["q", "q"], ["s"])], {}, (2, 3))
    nodes = [
        make("Mul", ["x", "w"], ["a"]),
        make("ReduceMax", ["x"], ["top"], keepdims=0),
        make("Less", ["top", "zero"], ["c"]),
        make("If", ["c"], ["y"], then_branch=then, else_branch=other),
    ]
    w = np.array([[1, 2, 3], [-1, 0.5, 2]], np.float32)
    tensors = {"w": w, "zero": np.array(0, np.float32), "huge": np.array(1000, np.float32)}
    model = _model(nodes, [value("x", 1, [2, 3])], [value("y", 1, [2, 3])], tensors)
    with pytest.warns(ModelWarning, match="both of its branches"):
        program = rc.load(model)
    x = -np.abs(X[:2, :3]) - 0.5
    loss = rc.losses.mse(program)
    (label,) = (v.name for v in program.inputs if v.name != "x")
    rc.SGD(1.0).minimize(loss)
    before = {n: a.copy() for n, a in program.data.items()}
    y = (x * w * w) ** 2
    rc.Executor().run(program, {"x": x, label: y - 3}, [loss])
    (inner,) = (n for n in before if n.endswith("/v"))
    np.testing.assert_array_equal(program.data[inner], before[inner])
    np.testing.assert_allclose(w - np.asarray(program.data["w"]), 4 * x**2 * w**3, rtol=1e-4)


@pytest.mark.parametrize(
    ("nodes", "shape", "why"),
    [
        ([helper.make_node("RandomNormalLike", ["x"], ["e"])], ("N", 6), "else_branch draws random numbers"),
        ([helper.make_node("Neg", ["x"], ["e"])], ("N", 6), r"the types f32\[2,4\] and f32\[2,6\]"),
    ],
)  # fmt: skip
def test_branches_that_cannot_both_run_are_refused(nodes: list[Any], shape: Any, why: str) -> None:
    with pytest.raises(
        rc.ModelError, match=rf"inputs? 'rate'.*set=\{{'rate': VALUE\}} \(--set rate=VALUE\); its.*{why}"
    ):
        rc.load(_chosen(_branch("e", nodes, {}, shape)), batch=2)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"rat": 1}, r"no input 'rat' \(did you mean rate\?\); it has: x, rate"),
        ({"rate": 1.5}, "1.5 for input 'rate' does not fit its type i64"),
        ({"rate": [1, 2]}, r"'rate' is \[\] in the model, the value is \[2\]"),
        ({"rate": "fast"}, "'fast' for input 'rate' is no number"),
        ({"x": 1}, r"'x' is \['N', 6\] in the model, the value is \[\]"),
    ],
)
def test_values_that_do_not_fit_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(rc.UsageError, match=why):
        rc.load(_chosen(), batch=2, set=values)


def test_a_trip_count_names_its_input() -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Add", ["a", "a"], ["b"])],
        "body",
        [value("i", 7, []), value("c", 9, []), value("a", 1, [3])],
        [value("d", 9, []), value("b", 1, [3])],
    )
    nodes = [helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)]
    model = _model(nodes, [value("x", 1, [3]), value("n", 7, [])], [value("y", 1, [3])], {})
    with pytest.raises(rc.ModelError, match=r"trip count \('n'\).*input 'n'.*--set n=VALUE"):
        rc.load(model)
    np.testing.assert_array_equal(
        rc.load(model, set={"n": 3}).evaluate({"x": np.ones(3, np.float32)})[0], np.full(3, 8, np.float32)
    )


# -- dimensions ------------------------------------------------------------------------------------------


def _open() -> onnx.ModelProto:
    nodes = [helper.make_node("Gather", ["emb", "ids"], ["e"]), helper.make_node("MatMul", ["e", "mt"], ["s"])]
    inputs = [value("ids", 7, ["batch", "src_len"]), value("mt", 1, ["batch", 6, None])]
    return _model(nodes, inputs, [value("s", 1, None)], {"emb": RNG.standard_normal((9, 6)).astype(np.float32)})


def test_one_message_names_every_open_dimension(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """And its command, pasted, works."""
    with pytest.raises(rc.UsageError) as e:
        rc.load(_open())
    text = str(e.value)
    assert "batch (axis 0 of ids, axis 0 of mt), src_len (axis 1 of ids), mt.2" in text
    assert "batch=8, dims={'src_len': 16, 'mt.2': 16}" in text
    command_text = text[text.rindex("(") + 1 : -1]
    assert command_text == "--batch 8 --dim src_len=16 --dim mt.2=16"
    onnx.save(_open(), tmp_path / "open.onnx")
    assert command.main([str(tmp_path / "open.onnx"), *command_text.split(), "--loss", "mse"]) == 0
    assert "8" in capsys.readouterr().out
    assert command.main([str(tmp_path / "open.onnx"), "--batch", "2"]) == 2
    assert "--dim src_len=16 --dim mt.2=16" in capsys.readouterr().err
    np.savez(tmp_path / "data.npz", ids=np.zeros((4, 3), np.int64), label=np.zeros(4))
    assert train.main([str(tmp_path / "open.onnx"), "--data", str(tmp_path / "data.npz")]) == 2
    screen = capsys.readouterr()
    assert "this compiles it" in screen.out and "--dim src_len=16 --dim mt.2=16" in screen.err


def test_dimensions_by_name() -> None:
    program = rc.load(_open(), batch=2, dims={"src_len": 3, "mt.2": 4})
    assert [v.shape for v in program.inputs] == [(2, 3), (2, 6, 4)]
    assert [v.shape for v in rc.load(_open(), dims={"batch": 5, "src_len": 3, "mt.2": 4}).inputs] == [(5, 3), (5, 6, 4)]


def test_question_marks_of_paddle_are_no_name() -> None:
    """Two dimensions that are written "?" may have different sizes."""
    model = _model(
        [helper.make_node("Relu", ["x"], ["y"])], [value("x", 1, ["?", 3, "?", "?"])], [value("y", 1, None)], {}
    )
    assert rc.load(model, batch=2, dims={"x.2": 4, "x.3": 5}).inputs[0].shape == (2, 3, 4, 5)
    with pytest.raises(rc.UsageError, match=r"x\.0, x\.2, x\.3"):
        rc.load(model)


def test_estimates_take_sizes_by_name() -> None:
    sizes = {"src_len": 3, "mt.2": 4}
    found = rc.estimate(_open(), batch=2, dims=sizes, loss="mse")
    assert found.peak_bytes == rc.estimate(rc.load(_open(), batch=2, dims=sizes), loss="mse").peak_bytes
    assert rc.max_batch(_open(), 1 << 20, dims=sizes, loss="mse", slicing=False, effort=0.1).batch > 100
    with pytest.raises(rc.UsageError, match=r"--dim mt\.2=16"):
        rc.estimate(_open(), batch=2, dims={"src_len": 3})


@pytest.mark.parametrize(
    ("dims", "why"),
    [
        ({"srclen": 3}, r"called 'srclen' \(did you mean src_len\?\); open are: batch, src_len, mt.2"),
        ({"src_len": 0}, "'src_len' must be a whole number of at least 1, not 0"),
        ({"batch": 3}, "'batch' is 3, but the batch or an input's shape makes it 2"),
    ],
)  # fmt: skip
def test_dimensions_that_do_not_fit(dims: dict[str, int], why: str) -> None:
    with pytest.raises(rc.UsageError, match=why):
        rc.load(_open(), batch=2, dims=dims)


@pytest.mark.parametrize(
    ("domain", "op_type", "why"),
    [
        ("com.microsoft", "LongformerAttention", r"'n' \(com.microsoft.LongformerAttention\): the operator "
         r"LongformerAttention of the domain 'com.microsoft' is not supported: export"),
        ("com.microsoft", "FusedMatMu", r"not supported \(did you mean FusedMatMul"),
        ("", "Sigmoyd", r"not supported \(did you mean Sigmoid\?\)"),
        ("", "NoSuchThing", "this operator is not supported: export"),
    ],
)  # fmt: skip
def test_unknown_operators_are_named_and_only_misspellings_get_a_hint(domain: str, op_type: str, why: str) -> None:
    node = helper.make_node(op_type, ["x"], ["y"], name="n", domain=domain)
    model = _model([node], [value("x", 1, [3])], [value("y", 1, [3])], {})
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(rc.ModelError, match=why):
        rc.load(model)
