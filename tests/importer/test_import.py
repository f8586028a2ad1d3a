"""Import: models at the edges of what ONNX allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.helper import make_node as node
from onnx.numpy_helper import from_array

import recompute as rc
from recompute.cli import main
from recompute.exporter.trained import export_trained

X = helper.make_tensor_value_info("x", 1, [4, 3])
Y = helper.make_tensor_value_info("y", 1, None)


def weight(name: str, *shape: int) -> onnx.TensorProto:
    return from_array(np.random.default_rng(len(name)).standard_normal(shape).astype(np.float32), name)


def model(nodes: list, inputs: list, outputs: list, weights: list, opset: int = 18) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def trained(program: rc.Program, steps: int = 2) -> list[float]:
    loss = rc.losses.mse(program)
    rc.SGD(0.1).minimize(loss)
    feed = {v.name: np.ones(v.shape, v.value.type.numpy) for v in program.inputs}
    executor = rc.Executor()
    return [float(executor.run(program, feed, [loss])[0]) for _ in range(steps)]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (node("Gemm", ["x"], ["y"]), "it has 1 input, ONNX requires 2 to 3"),
        (node("Mul", ["", "x"], ["y"]), r"its input 0 \(A\) is absent"),
        (node("Einsum", ["x"], ["y"]), "its attribute 'equation' is absent"),
        (node("Flatten", ["x"], ["y"], axis="1"), "its attribute 'axis' is STRING, ONNX requires INT"),
        (node("Constant", [], ["y"]), "a constant without a value"),
        (node("Relu", ["x"], ["y", "z"]), "it has 2 outputs, ONNX requires 1"),
        (node("Relu", ["x"], ["w"]), "duplicate definition of 'w'"),
        (node("Relu", ["x"], ["x"]), "duplicate definition of 'x'"),
        (node("Transpose", ["x"], ["y"], perm=[0, 7]), "Transpose"),
    ],
)
def test_malformed_nodes_are_named(made: onnx.NodeProto, why: str) -> None:
    with pytest.raises(rc.ModelError, match=why) as caught:
        rc.load(model([made], [X], [Y], [weight("w", 3, 2)]))
    assert f"({made.op_type})" in str(caught.value)


def test_names_are_there_once() -> None:
    matmul = [node("MatMul", ["x", "w"], ["y"])]
    with pytest.raises(rc.ModelError, match="two initializers called 'w'"):
        rc.load(model(matmul, [X], [Y], [weight("w", 3, 2), weight("w", 3, 3)]))
    with pytest.raises(rc.ModelError, match="two inputs called 'x'"):
        rc.load(model(matmul, [X, X], [Y], [weight("w", 3, 2)]))
    with pytest.raises(rc.ModelError, match="an input has no name"):
        rc.load(model(matmul, [X, helper.make_tensor_value_info("", 1, [1])], [Y], [weight("w", 3, 2)]))


def test_models_may_use_the_names_that_training_uses(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    step = helper.make_tensor_value_info("step", 1, [4, 3])
    nodes = [node("MatMul", ["step", "learning_rate"], ["label"]), node("Relu", ["label"], ["loss"])]
    nodes += [node("Dropout", ["loss"], ["y"])]
    source = model(nodes, [step], [Y], [weight("learning_rate", 3, 2)])
    program = rc.load(source)
    loss = rc.losses.mse(program, name="cost", label_name="target")
    optimizer = rc.Adam(0.1)
    optimizer.minimize(loss)
    feed = {v.name: np.ones(v.shape, np.float32) for v in program.inputs}
    rc.Executor().run(program, feed, [loss])
    assert optimizer.state_dict()["step_1"] == 1
    optimizer.set_lr(0.5)
    assert optimizer.get_lr() == 0.5
    onnx.save(source, tmp_path / "model.onnx")
    assert main([str(tmp_path / "model.onnx"), "--checkpoints", "label", "--run", "1"]) == 0
    assert "ran 1 steps" in capsys.readouterr().out


def test_an_alias_does_not_hide_a_value() -> None:
    program = rc.load(model([node("MatMul", ["x", "w"], ["y"]), node("Identity", ["y"], ["loss"])], [X], [Y],
                            [weight("w", 3, 2)]))  # fmt: skip
    assert "loss" in program and program["loss"].name == "y"
    with pytest.raises(rc.UsageError, match="already has a value 'loss'"):
        rc.losses.mse(program)


@pytest.mark.parametrize("held", ["initializer", "constant"])
def test_statistics_that_share_a_tensor_become_their_own(held: str) -> None:
    ones = from_array(np.ones(2, np.float32), "ones")
    nodes = [node("MatMul", ["x", "w"], ["m"]), node("BatchNormalization", ["m", "ones", "b", "ones", "ones"], ["y"])]
    if held == "constant":
        nodes.insert(0, node("Constant", [], ["ones"], value=ones))
    weights = [weight("w", 3, 2), weight("b", 2)] + ([ones] if held == "initializer" else [])
    program = rc.load(model(nodes, [X], [Y], weights))
    assert {v.name for v in program.parameters} == {"w", "b", "ones"}
    assert {v.name for v in program.block.buffers} == {"y.running_mean", "y.running_var"}
    trained(program)
    exported = {t.name: onnx.numpy_helper.to_array(t) for t in export_trained(program).graph.initializer}
    assert np.array_equal(exported["y.running_var"], program.data["y.running_var"])
    assert not np.array_equal(exported["y.running_var"], exported["y.running_mean"])


def copied(producer: str, elements: object) -> onnx.ModelProto:
    """w, read by one product itself and by another through two Identity nodes."""
    nodes = [node("Identity", ["w"], ["u"]), node("Identity", ["u"], ["v"]), node("MatMul", ["x", "w"], ["m"]),
             node("MatMul", ["m", "v"], ["y"])]  # fmt: skip
    held = onnx.TensorProto(name="w", dims=[3, 3], data_type=1, float_data=elements)  # not as raw bytes
    made = model(nodes, [X], [Y], [held])
    made.producer_name = producer
    return made


def test_a_weight_that_is_shared_through_identity_trains_as_one() -> None:
    """By PyTorch's rule: the gradient of a shared weight is the sum of those of its two uses."""
    program = rc.load(copied("", range(9)))
    assert [v.name for v in program.parameters] == ["w"] == [t.name for t in program.tensors]
    assert program["v"].name == program["u"].name == "w"
    loss = rc.losses.mse(program, reduction="sum")
    ((_, gradient),) = rc.SGD(0.0).backward(loss)
    w, x = np.arange(9, dtype=np.float32).reshape(3, 3), np.ones((4, 3), np.float32)
    (found,) = rc.Executor().run(program, {"x": x, "label": np.zeros((4, 3), np.float32)}, [gradient])
    dy = 2 * x @ w @ w
    np.testing.assert_allclose(found, x.T @ (dy @ w.T) + (x @ w).T @ dy, rtol=1e-6)
    assert [v.name for v in rc.load(copied("", range(9)), trainable=["v"]).parameters] == ["w"]


def test_copies_that_pytorch_merged_train_apart_and_are_exported() -> None:
    """Fresh ones, whose elements are all equal, by themselves; others where it is asked for, and a warning says so."""
    with pytest.warns(rc.ModelWarning, match=r"'w' with u, v.*untie=\['w'\]"):
        assert len(rc.load(copied("pytorch", range(9))).parameters) == 1
    assert {v.name for v in rc.load(copied("pytorch", [0.0] * 9)).parameters} == {"w", "v"}
    program = rc.load(copied("pytorch", range(9)), untie=["w"])
    (other,) = {v.name for v in program.parameters} - {"w"}
    assert other == "u"
    trained(program)
    assert not np.array_equal(program.data["w"], program.data[other])
    exported = export_trained(rc.load(copied("pytorch", [1.0] * 9)))
    assert {t.name for t in exported.graph.initializer} == {"w", "v"}


def test_what_functions_hold_is_checked() -> None:
    huge = onnx.TensorProto(data_type=1, dims=[1 << 20, 1 << 20], raw_data=b"1234")
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("my", 1)]
    holds = helper.make_function("my", "F", ["a"], ["b"], [node("Constant", [], ["b"], value=huge)], opsets)
    calls_itself = helper.make_function("my", "F", ["a"], ["b"], [node("F", ["a"], ["b"], domain="my")], opsets)
    for function, why in ((holds, "the limit is"), (calls_itself, "function 'F' calls itself")):
        source = model([node("F", ["x"], ["y"], domain="my")], [X], [Y], [])
        source.functions.append(function)
        source.opset_import.append(opsets[1])
        with pytest.raises(rc.ModelError, match=why):
            rc.load(source)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch": 2.5}, "batch must be a whole number"),
        ({"batch": 0}, "batch must be a whole number of at least 1"),
        ({"input_shapes": {"x": (-4, 3)}}, "not negative"),
        ({"input_shapes": {"x": "43"}}, "whole numbers"),
        ({"input_shapes": {"x": (4,)}}, "does not fit"),
        ({"mode": "training"}, "mode must be"),
        ({"trainable": "v", "batch": 2}, "no float initializer is called 'v'"),
    ],
)
def test_options_that_do_not_fit(options: dict, why: str) -> None:
    x = helper.make_tensor_value_info("x", 1, ["n", 3])
    with pytest.raises(rc.UsageError, match=why):
        rc.load(model([node("MatMul", ["x", "w"], ["y"])], [x], [Y], [weight("w", 3, 2)]), **options)


def constant(name: str, *value: int) -> onnx.NodeProto:
    return node("Constant", [], [name], value_ints=list(value))


@pytest.mark.parametrize(
    "nodes",
    [
        [constant("s", 1 << 20, 1 << 20), node("ConstantOfShape", ["s"], ["k"]), node("EyeLike", ["k"], ["y"])],
        [constant("d", 1, 2), constant("p", 1 << 40, 0), node("Pad", ["d", "p"], ["y"])],
        [constant("d", 1, 2), constant("p", 1 << 40), node("Tile", ["d", "p"], ["y"])],
        [constant("d", 1), constant("p", 1 << 20, 1 << 20), node("Expand", ["d", "p"], ["y"])],
        [constant("d", *range(9000)), constant("a", 1), node("Unsqueeze", ["d", "a"], ["c"]),
         node("Equal", ["d", "c"], ["y"])],
        [constant("d", *range(9000)), node("Einsum", ["d", "d"], ["y"], equation="i,j->ij")],
    ],
    ids=lambda nodes: nodes[-1].op_type,
)  # fmt: skip
def test_large_results_are_not_made_at_compile_time(nodes: list[onnx.NodeProto]) -> None:
    output = helper.make_empty_tensor_value_info("y")
    program = rc.load(model(nodes, [X], [output], []))
    assert program.outputs[0].value.size > 1 << 24
    assert all(a.size <= 9000 for a in program.data.values())


def test_what_is_newer_than_the_model_is_not_supported() -> None:
    with pytest.raises(rc.ModelError, match=r"\(AffineGrid\): this operator is not supported"):
        rc.load(model([node("AffineGrid", ["x", "x"], ["y"])], [X], [Y], []))
    split = [node("SplitToSequence", ["x"], ["s"], axis=1), constant("i", 0), node("SequenceAt", ["s", "i"], ["y"])]
    with pytest.raises(rc.ModelError, match="a sequence of 1,048,576 tensors is too long"):
        rc.load(model(split, [helper.make_tensor_value_info("x", 1, [4, 1 << 20])], [Y], []))


def test_external_data_is_what_the_file_says(tmp_path: Path) -> None:
    def written(**keys: str) -> Path:
        source = model([node("MatMul", ["x", "w"], ["y"])], [X], [Y], [])
        t = source.graph.initializer.add(name="w", data_type=1, dims=[3, 2], data_location=1)
        for key, value in keys.items():
            t.external_data.add(key=key, value=value)
        onnx.save(source, tmp_path / "model.onnx")
        return tmp_path / "model.onnx"

    (tmp_path / "w.bin").write_bytes(np.arange(6, dtype=np.float32).tobytes())
    (tmp_path / "folder").mkdir()
    for location, why in (("folder", "is no file"), ("w\0.bin", "cannot be read"), ("", "outside"), ("w", "No such")):
        with pytest.raises(rc.ModelError, match=why):
            rc.load(written(location=location))
    program = rc.load(written(location="w.bin"))
    assert np.array_equal(program.data["w"].reshape(-1), range(6))
    assert rc.load(program.source, mode="eval").data["w"].tobytes() == program.data["w"].tobytes()


def test_a_model_in_memory_reads_no_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(bytes(24))
    source = model([node("MatMul", ["x", "w"], ["y"])], [X], [Y], [])
    t = source.graph.initializer.add(name="w", data_type=1, dims=[3, 2], data_location=1)
    for key in ("location", "recompute.checked"):
        t.external_data.add(key=key, value=str(tmp_path / "secret"))
    with pytest.raises(rc.ModelError, match="load the model by its path"):
        rc.load(source)


def test_outputs_are_as_many_as_asked_for() -> None:
    with pytest.raises(rc.ModelError, match="num_outputs is 1099511627776, but it has 2 outputs"):
        rc.load(model([node("Split", ["x"], ["y", "z"], num_outputs=1 << 40)], [X], [Y], []))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_running_statistics_may_be_outputs(mode: str) -> None:
    nodes = [node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y", "mean", "var"], training_mode=1)]
    outputs = [Y, *(helper.make_tensor_value_info(n, 1, [3]) for n in ("mean", "var"))]
    program = rc.load(model(nodes, [X], outputs, [weight(n, 3) for n in ("s", "b", "m")] + [
        from_array(np.ones(3, np.float32), "v")]), mode=mode)  # fmt: skip
    before = program.data["v"].copy()
    (var,) = rc.Executor().run(program, {"x": np.ones((4, 3), np.float32)}, ["var"])
    assert np.array_equal(var, program.data["v"])
    assert np.array_equal(var, before) == (mode == "eval")


@pytest.mark.parametrize("name", [b"main_graph", b"MatMul", b"label_of_x"])
def test_names_that_are_no_text(name: bytes, tmp_path: Path) -> None:
    source = model([node("MatMul", ["label_of_x", "w"], ["y"])], [X], [Y], [weight("w", 3, 2)])
    source.graph.name = "main_graph"
    source.graph.input[0].name = "label_of_x"
    path = tmp_path / "model.onnx"
    path.write_bytes(source.SerializeToString().replace(name, b"\xa0" * len(name)))
    with pytest.raises(rc.ModelError, match="no UTF-8 text"):
        rc.load(path)
    assert main([str(path)]) == 1


@pytest.mark.parametrize(
    ("shape", "nodes", "weights", "why"),
    [
        ([1] * 65, [node("Relu", ["x"], ["y"])], [], "input 'x' has 65 dimensions"),
        ([2, 2], [node("Unsqueeze", ["x", "axes"], ["y"], name="wide")], [from_array(np.arange(63), "axes")], "'wide'"),
        (
            [1],
            [node("Unsqueeze", ["w", "axes"], ["h"], name="wide"), node("Add", ["x", "h"], ["y"])],
            [weight("w", 2, 2), from_array(np.arange(63), "axes")],
            "'wide'",
        ),
        ([1], [node("Add", ["x", "w"], ["y"])], [helper.make_tensor("w", 1, [1] * 65, [1.0])], "tensor 'w'"),
    ],
)
def test_more_dimensions_than_arrays_have(shape: list[int], nodes: list, weights: list, why: str) -> None:
    with pytest.raises(rc.ModelError, match="64") as e:
        rc.load(model(nodes, [helper.make_tensor_value_info("x", 1, shape)], [Y], weights))
    assert why in str(e.value)


def test_a_classifier_of_scikit_learn() -> None:
    """Its label comes from ArrayFeatureExtractor; cross entropy finds the softmax behind the copy of it."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 20, "ai.onnx.ml" : 1]>
        net (float[N,3] X) => (int64[N] label, float[N,4] probabilities) {
            s = MatMul (X, w)
            p = Softmax <axis=1> (s)
            probabilities = Identity (p)
            a = ArgMax <axis=1> (p)
            f = ai.onnx.ml.ArrayFeatureExtractor (classes, a)
            label = Reshape (f, shape)
        }"""
    )
    arrays = {"w": np.eye(3, 4, dtype=np.float32), "classes": np.array([7, 5, 3, 1]), "shape": np.array([-1])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in arrays.items())
    program = rc.load(model, batch=3)
    loss = rc.losses.cross_entropy(program["probabilities"], label_name="target")
    x = np.eye(3, dtype=np.float32)[[2, 0, 1]]
    found = rc.Executor().run(program, {"X": x, "target": np.array([2, 0, 1])}, ["label", loss])
    np.testing.assert_array_equal(found[0], [3, 7, 5])
    np.testing.assert_allclose(found[1], np.log(np.e + 3) - 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("node", "why"),
    [
        ("y = MaxPool <kernel_shape = [5, 5]> (x)", "the window is larger than the padded input"),
        ("y = AveragePool <kernel_shape = [5, 1]> (x)", "the window is larger than the padded input"),
        ("y = LpPool <kernel_shape = [1, 5]> (x)", "the window is larger than the padded input"),
        ('y = Einsum <equation = "abcd,ceda->ab"> (x, x)', "'c' of the equation is 4 in one operand and 2 in another"),
    ],
)
def test_sizes_that_do_not_fit_are_said_in_words(node: str, why: str) -> None:
    text = f'<ir_version: 8, opset_import: ["": 17]> g (float[2,3,4,4] x) => (float[a,b,c,d] y) {{ {node} }}'
    with pytest.raises(rc.ModelError, match=f"node 'y'.*{why}"):
        rc.load(onnx.parser.parse_model(text))
