"""The Backend's own doors: shapes, bound inputs, sequences, single nodes, errors."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from backend import Backend
from onnx import helper

import recompute as rc

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def model(nodes: str, opset: int = 21) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> agraph {nodes}')


RESHAPED = model("(float[N,M] x, int64[K] shape) => (float[A,B] y) { z = Relu(x) y = Reshape(z, shape) }")


def test_programs_are_made_for_shapes_and_bound_contents() -> None:
    prepared = Backend.prepare(RESHAPED)
    for shape in ((3, 2), (6, 1), (3, 2)):
        (y,) = prepared.run([X, np.array(shape)])
        assert y.shape == shape
    assert prepared.bound == ["shape"] and len(prepared.programs()) == 2
    (y,) = prepared.run({"x": X[:1], "shape": np.array([1, 3])})
    assert y.tolist() == X[:1].tolist() and len(prepared.programs()) == 3


def test_the_number_of_programs_is_bounded() -> None:
    prepared = Backend.prepare(RESHAPED)
    for n in range(1, 20):
        prepared.run([np.zeros((n, 2), np.float32), np.array([2, -1])])
    assert len(prepared.programs()) == 8


def test_runs_are_independent() -> None:
    """Running statistics that a run updates are given back as they were."""
    nodes = "(float[2,3] x) => (float[2,3] y, float[3] m, float[3] v)" \
            "<float[3] one = {1,1,1}, float[3] mean = {0,0,0}, float[3] var = {1,1,1}>" \
            "{ y, m, v = BatchNormalization<training_mode = 1>(x, one, mean, mean, var) }"  # fmt: skip
    prepared = Backend.prepare(model(nodes))
    first, second = prepared.run([X]), prepared.run([X])
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    np.testing.assert_allclose(first[1], 0.1 * X.mean(axis=0), rtol=1e-6)


def test_sequences_strings_and_nothing() -> None:
    nodes = "(seq(float[2,3]) s, int64 at) => (seq(float[2,3]) t, float[2,3] y, int64 n)" \
            "{ e = SequenceAt(s, at) y = Neg(e) t = SequenceInsert(s, y) n = SequenceLength(t) }"  # fmt: skip
    t, y, n = Backend.run_model(model(nodes), [[X, X + 1], np.array(1)])
    assert [a.tolist() for a in t] == [X.tolist(), (X + 1).tolist(), (-X - 1).tolist()]
    assert y.tolist() == (-X - 1).tolist() and n == 3
    nodes = "(string[N] a) => (string[N] b) { b = StringConcat(a, a) }"
    assert Backend.run_model(model(nodes), [np.array(["x", "yz"])])[0].tolist() == ["xx", "yzyz"]
    nodes = "(optional(float[2,3]) a) => (bool b) { b = OptionalHasElement(a) }"
    assert Backend.run_model(model(nodes), [None])[0] == np.False_
    assert Backend.run_model(model(nodes), [X])[0] == np.True_


def test_nodes() -> None:
    node = helper.make_node("Gemm", ["a", "b", ""], ["y"], transB=1)
    (y,) = Backend.run_node(node, [X, X])
    np.testing.assert_allclose(y, X @ X.T)
    (y,) = Backend.run_node(
        helper.make_node("Slice", ["x", "s", "e"], ["y"]), {"x": X, "s": np.array([1]), "e": np.array([2])}
    )
    assert y.tolist() == X[1:2].tolist()
    assert Backend.supports_device("CPU") and not Backend.supports_device("CUDA:0")


def test_errors() -> None:
    with pytest.raises(rc.UsageError, match="device 'CUDA' is not supported"):
        Backend.prepare(RESHAPED, "CUDA")
    with pytest.raises(onnx.checker.ValidationError):
        Backend.prepare(model("(float[2] x) => (float[2] y) { y = NoSuchOperator(x) }"))
    prepared = Backend.prepare(RESHAPED)
    with pytest.raises(rc.UsageError, match="3 inputs for a model that takes 2"):
        prepared.run([X, X, X])
    with pytest.raises(rc.UsageError, match="'shape' is missing"):
        prepared.run([X])
    with pytest.raises(rc.ModelError, match="element type complex64"):
        prepared.run([X.astype(np.complex64), np.array([6])])


def test_shapes_that_depend_on_data() -> None:
    """What they depend on is bound, and computed while the program is made."""
    prepared = Backend.prepare(model("(float[N] x) => (int64[A,B] y) { z = Relu(x) y = NonZero(z) }"))
    for x, wanted in (([1, -1, 2], [0, 2]), ([-1, 3, -1], [1])):
        assert prepared.run([np.array(x, np.float32)])[0].tolist() == [wanted]
    assert prepared.bound == ["x"] and len(prepared.programs()) == 2
    random = "(float[4] x) => (int64[A,B] y) { u = RandomUniformLike(x) z = Sub(x, u) y = NonZero(z) }"
    with pytest.raises(rc.ModelError, match=r"\(NonZero\): its output shape is data-dependent"):
        Backend.run_model(model(random), [np.ones(4, np.float32)])


COUNTS = (
    'TfIdfVectorizer<mode = "TF", min_gram_length = 1, max_gram_length = 1, max_skip_count = 0, ngram_counts = [0], '
    "ngram_indexes = [0, 1], pool_int64s = [2, 3]>"
)


def test_the_evaluator_has_no_gradient() -> None:
    """An operator without kernel and gradient runs in a trained model; its result is data."""
    nodes = f"(int64[2,5] x, float[2,2] w) => (float[2,2] y) {{ c = {COUNTS}(x) y = Mul(c, w) }}"
    program = rc.load(model(nodes))
    assert [o.op.name for o in program.operators] == ["Reference", "Mul"]
    x, w = np.array([[2, 2, 3, 0, 1], [3, 3, 3, 2, 0]]), np.ones((2, 2), np.float32)
    assert rc.Executor().run(program, {"x": x, "w": w}, ["y"])[0].tolist() == [[2, 1], [1, 3]]
    encoder = "ai.onnx.ml.LabelEncoder<keys_floats = [1.0], values_floats = [2.0], default_float = 0.5>"
    nodes = f"(float[4,2] x) => (float[4,2] y) <float[2,2] w = {{1,2,3,4}}> {{ h = MatMul(x, w) y = {encoder}(h) }}"
    binary = model(nodes)
    binary.opset_import.append(helper.make_opsetid("ai.onnx.ml", 2))
    program = rc.load(binary)
    with pytest.raises(rc.ModelError, match=r"ai\.onnx\.ml\.LabelEncoder has no gradient"):
        rc.SGD(0.1).minimize(rc.losses.mse(program))
