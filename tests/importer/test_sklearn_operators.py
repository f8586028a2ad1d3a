"""Operators of ai.onnx.ml as scikit-learn's exporter writes them, beside ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import recompute as rc
from recompute.errors import ModelWarning

onnxruntime = pytest.importorskip("onnxruntime")
ML = "ai.onnx.ml"
X = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
X[1] = 0
X[2, 1] = np.nan
WHOLE = np.arange(20, dtype=np.int64).reshape(5, 4) % 4
C = [0.5, -1.0, 0.25, 2.0, 1.5, 0.75, -0.5, 1.0, 0.1, -0.2, 0.3, -0.4]


def _model(node: onnx.NodeProto, kind: int = 1, outputs: Any = (("y", 1),), more: Any = ()) -> onnx.ModelProto:
    value = helper.make_tensor_value_info
    declared = [value(n, k, None) if isinstance(k, int) else onnx.ValueInfoProto(name=n, type=k) for n, k in outputs]
    graph = helper.make_graph([node, *more], "g", [value("x", kind, ["N", 4])], declared)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ML, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _node(op_type: str, outputs: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, ["x"], outputs.split(), domain=ML, **attributes)


def _theirs(model: onnx.ModelProto, x: np.ndarray) -> list[Any]:
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )


FINITE = np.nan_to_num(X)
CASES = {
    "scaler": (_node("Scaler", offset=[1.0, 2.0, 3.0, 4.0], scale=[0.5, 0.25, 2.0, 1.0]), FINITE),
    "scaler of integers": (_node("Scaler", offset=[1.0], scale=[0.5]), WHOLE),
    "max": (_node("Normalizer", norm="MAX"), np.abs(FINITE)),
    "l1": (_node("Normalizer", norm="L1"), FINITE),
    "l2": (_node("Normalizer", norm="L2"), FINITE),
    "imputer of NaN": (_node("Imputer", imputed_value_floats=[1.0, 2.0, 3.0, 4.0], replaced_value_float=np.nan), X),
    "imputer of a number": (_node("Imputer", imputed_value_int64s=[7], replaced_value_int64=2), WHOLE),
    "binarizer": (_node("Binarizer", threshold=0.3), FINITE),
    "one hot": (_node("OneHotEncoder", cats_int64s=[0, 2, 3], zeros=1), WHOLE),
    "regressor": (_node("LinearRegressor", coefficients=C[:4], intercepts=[0.5]), FINITE),
    "regressor of three": (_node("LinearRegressor", coefficients=C, intercepts=[0.5, 1.0, 2.0], targets=3), FINITE),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_onnx_runtime(name: str) -> None:
    node, x = CASES[name]
    model = _model(node, 1 if x.dtype == np.float32 else 7, (("y", 7 if name == "imputer of a number" else 1),))
    program = rc.load(model, batch=5)
    assert all(o.op.name != "Reference" for o in program.operators)
    np.testing.assert_allclose(program.evaluate({"x": x})[0], _theirs(model, x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize("rows", [1, 3])
def test_classifiers(rows: int, transform: str) -> None:
    """Labels and scores."""
    options = {"coefficients": C[: 4 * rows], "intercepts": [0.3, -0.2, 0.1][:rows], "post_transform": transform}
    labels = [5, 9] if rows == 1 else [4, 2, 8]
    node = _node("LinearClassifier", "label y", classlabels_ints=labels, **options)
    model = _model(node, outputs=(("label", 7), ("y", 1)))
    found = rc.load(model, batch=5).evaluate({"x": FINITE})
    for ours, theirs in zip(found, _theirs(model, FINITE), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_more_coefficients_than_rows_take() -> None:
    """ONNX Runtime counts the intercepts and reads the first coefficients; files are so."""
    node = _node("LinearClassifier", "label y", classlabels_ints=[0, 1], coefficients=C, intercepts=[0.5, 0.25])
    model = _model(node, outputs=(("label", 7), ("y", 1)))
    for ours, theirs in zip(rc.load(model, batch=5).evaluate({"x": FINITE}), _theirs(model, FINITE), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_maps_and_labels_of_text_are_left_out() -> None:
    """With a word; the scores are the output, once."""
    names = ["a", "b", "c"]
    node = _node("LinearClassifier", "label y", classlabels_strings=names, coefficients=C, intercepts=[0.0] * 3)
    zipped = helper.make_node("ZipMap", ["y"], ["map"], domain=ML, classlabels_strings=names)
    entry = helper.make_map_type_proto(8, helper.make_tensor_type_proto(1, []))
    model = _model(node, outputs=(("label", 8), ("map", helper.make_sequence_type_proto(entry))), more=[zipped])
    with pytest.warns(ModelWarning, match="'label', 'map' are maps or strings.*the scores 'y' are the outputs"):
        program = rc.load(model, batch=5)
    assert [v.name for v in program.outputs] == ["y"]
    theirs = [list(row.values()) for row in _theirs(model, FINITE)[1]]
    np.testing.assert_allclose(program.evaluate({"x": FINITE})[0], theirs, rtol=1e-5)


def test_a_network_behind_a_scaler_trains() -> None:
    """The gradient of the mean of y² through (x - 1) · 0.5: with s = (x - 1) / 2, sᵀ · 2 s w / size."""
    w = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)
    node = helper.make_node("Scaler", ["x"], ["s"], domain=ML, offset=[1.0], scale=[0.5])
    model = _model(node, more=[helper.make_node("MatMul", ["s", "w"], ["y"])])
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    program = rc.load(model, batch=5)
    rc.SGD(1.0).minimize(rc.losses.mse(program))
    label = next(v.name for v in program.inputs if v.name != "x")
    rc.Executor().run(program, {"x": FINITE, label: np.zeros((5, 3), np.float32)}, [program.loss])
    s = (FINITE - 1) * 0.5
    np.testing.assert_allclose(w - np.asarray(program.data["w"]), s.T @ (2 * s @ w / 15), rtol=1e-3, atol=1e-5)


def _mlp(classes: int) -> onnx.ModelProto:
    """An MLPClassifier as skl2onnx writes it: label and probabilities; two classes are one sigmoid and 1 minus it."""
    g, make = np.random.default_rng(2), helper.make_node
    width = 1 if classes == 2 else classes
    tensors = {
        "coefficient": g.standard_normal((4, 8)), "intercepts": g.standard_normal((1, 8)),
        "coefficient1": g.standard_normal((8, width)), "intercepts1": g.standard_normal((1, width)),
        "classes": np.arange(classes, dtype=np.int32), "shape_tensor": np.array([-1]), "unity": np.ones(1),
    }  # fmt: skip
    nodes = [
        make("Cast", ["x"], ["cast_input"], to=1), make("MatMul", ["cast_input", "coefficient"], ["mul_result"]),
        make("Add", ["mul_result", "intercepts"], ["add_result"]), make("Relu", ["add_result"], ["next_activations"]),
        make("MatMul", ["next_activations", "coefficient1"], ["mul_result1"]),
        make("Add", ["mul_result1", "intercepts1"], ["z"]),
    ]  # fmt: skip
    if classes == 2:
        nodes += [make("Sigmoid", ["z"], ["p"]), make("Sub", ["unity", "p"], ["n"])]
        nodes.append(make("Concat", ["n", "p"], ["probabilities"], axis=1))
    else:
        nodes.append(make("Softmax", ["z"], ["probabilities"], axis=1))
    nodes += [
        make("ArgMax", ["probabilities"], ["best"], axis=1),
        make("ArrayFeatureExtractor", ["classes", "best"], ["found"], domain=ML),
        make("Cast", ["found"], ["cast_result"], to=7), make("Reshape", ["cast_result", "shape_tensor"], ["label"]),
    ]  # fmt: skip
    model = _model(nodes[0], outputs=(("label", 7), ("probabilities", 1)), more=nodes[1:])
    read = {i for n in nodes for i in n.input}
    held = {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in tensors.items() if n in read}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in held.items())
    return model


@pytest.mark.parametrize("classes", [2, 3])
def test_networks_of_scikit_learn_train(classes: int) -> None:
    """Labels and probabilities are ONNX Runtime's, before and after training; the loss is that of the scores."""
    model = _mlp(classes)
    program = rc.load(model, batch=5)
    for ours, theirs in zip(program.evaluate({"x": FINITE}), _theirs(model, FINITE), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    weights = ["coefficient", "coefficient1", "intercepts", "intercepts1"]
    assert sorted(v.name for v in program.parameters) == weights
    assert rc.losses.natural_loss(program)[1] == "cross_entropy, as 'probabilities' is made by Softmax"
    loss = rc.losses.cross_entropy(program, label_name="target")
    rc.SGD(0.1).minimize(loss)
    target = np.array([0, 1, 1, 0, 1])
    first = rc.Executor().run(program, {"x": FINITE, "target": target}, [loss])[0]
    p = _theirs(model, FINITE)[1].astype(np.float64)
    np.testing.assert_allclose(first, -np.log(p[np.arange(5), target]).mean(), rtol=1e-4)
    trained = rc.export_trained(program)
    for ours, theirs in zip(program.evaluate({"x": FINITE}), _theirs(trained, FINITE), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert abs(_theirs(trained, FINITE)[1] - p).max() > 1e-3


@pytest.mark.parametrize("kind", ["LinearClassifier", "LinearRegressor"])
def test_coefficients_train_and_are_written_back(kind: str) -> None:
    """One step beside its mathematics: W - xᵀ · dL/dz; the file has the same operator with the new coefficients."""
    given = np.array(C, np.float32).reshape(3, 4), np.array([0.5, 1.0, 2.0], np.float32)
    held = {"coefficients": C, "intercepts": given[1].tolist()}
    if kind == "LinearClassifier":
        node = _node(kind, "label y", classlabels_ints=[0, 1, 2], post_transform="SOFTMAX", **held)
        model = _model(node, outputs=(("label", 7), ("y", 1)))
    else:
        model = _model(_node(kind, targets=3, **held))
    program = rc.load(model, batch=5)
    assert [v.name for v in program.parameters] == ["y/coefficients", "y/intercepts"]
    assert [(t.name, t.trains) for t in program.tensors] == [("y/coefficients", True), ("y/intercepts", True)]
    z = FINITE @ given[0].T + given[1]
    if kind == "LinearClassifier":
        loss, target = rc.losses.cross_entropy(program, label_name="target"), np.array([0, 1, 2, 0, 1])
        p = np.exp(z - z.max(1, keepdims=True))
        slope = (p / p.sum(1, keepdims=True) - np.eye(3)[target]) / 5
    else:
        loss, target = rc.losses.mse(program, label_name="target"), np.zeros((5, 3), np.float32)
        slope = 2 * z / 15
    rc.SGD(0.5).minimize(loss)
    rc.Executor().run(program, {"x": FINITE, "target": target}, [loss])
    steps = {"coefficients": slope.T @ FINITE, "intercepts": slope.sum(0)}
    for (name, gradient), before in zip(steps.items(), given, strict=True):
        np.testing.assert_allclose(program.data[f"y/{name}"], before - 0.5 * gradient, rtol=1e-4, atol=1e-5)
    trained = rc.export_trained(program)
    assert [n.op_type for n in trained.graph.node] == [kind]
    for ours, theirs in zip(program.evaluate({"x": FINITE}), _theirs(trained, FINITE), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_classes_of_trees() -> None:
    """Labels and scores of a TreeEnsembleClassifier; where a class has no weights, ONNX's evaluator is wrong."""
    tree: dict[str, Any] = {
        "nodes_treeids": [0] * 3, "nodes_nodeids": [0, 1, 2], "nodes_featureids": [1, 0, 0],
        "nodes_values": [0.5, 0.0, 0.0], "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0], "class_treeids": [0] * 6,
        "class_nodeids": [1, 1, 1, 2, 2, 2], "class_weights": [0.2, 0.3, 0.5, 0.7, 0.2, 0.1],
        "classlabels_int64s": [0, 1, 2],
    }  # fmt: skip
    found = []
    for ids in ([0, 1, 2, 0, 1, 2], [0, 1, 1, 0, 1, 1]):
        node = _node("TreeEnsembleClassifier", "label scores", class_ids=ids, **tree)
        found.append(_model(node, outputs=(("label", 7), ("scores", 1))))
    program = rc.load(found[0], batch=5)
    ours = program.evaluate({"x": FINITE}, ["label", "scores"])
    np.testing.assert_array_equal(ours[0], np.where(FINITE[:, 1] > 0.5, 0, 2))
    for a, b in zip(ours, _theirs(found[0], FINITE), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(rc.ModelError, match=r"TreeEnsembleClassifier.*without a gradient.*rc\.edit\.cut"):
        rc.load(found[1], batch=5)
