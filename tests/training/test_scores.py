"""Losses, and the choice of one, look behind what moves or converts scores; where it would be a guess, they ask."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest

import recompute as rc
from recompute.compiling.steps import attach_loss

G = np.random.default_rng(0)
#: scores whose probabilities are 0 and 1 in float32
Z = 90 * G.standard_normal((4, 6)).astype(np.float32)


def load(body: str, outputs: str = "y", inputs: str = "float[4,6] z") -> rc.Program:
    outputs = ", ".join(f"float[{'d, ' * 2}] {n}".replace(", ]", "]") for n in outputs.split())
    text = f'<ir_version: 8, opset_import: ["": 18]> g ({inputs}) => ({outputs}) {{ {body} }}'
    model = onnx.parser.parse_model(text)
    for v in model.graph.output:
        v.type.tensor_type.ClearField("shape")
    return rc.load(model)


def shape(name: str, *dims: int) -> str:
    return f"{name} = Constant <value = int64[{len(dims)}] {{{', '.join(map(str, dims))}}}> () "


def chosen(program: rc.Program) -> tuple[str, float, np.ndarray]:
    """The chosen loss, its value with labels 0, 1, 2, ... in rotation, and the label's shape."""
    name, why = attach_loss(program, None)
    label = next(v for v in program.inputs if v.name == "label").value
    classes = 3 if "cross_entropy" in why else 2
    y = (np.arange(math.prod(label.shape)) % classes).reshape(label.shape).astype(label.type.numpy)
    (value,) = rc.Executor().run(program, {"z": Z, "label": y}, [name])
    return why.split(",")[0], float(value), y


def log_softmax(z: np.ndarray, axis: int) -> np.ndarray:
    z = z.astype(np.float64) - z.max(axis, keepdims=True)
    return z - np.log(np.exp(z).sum(axis, keepdims=True))


@pytest.mark.parametrize(
    "body",
    [
        shape("s", 4, 2, 3) + "p = Sigmoid (z) y = Reshape (p, s)",
        shape("s", 1) + "p = Sigmoid (z) q = Unsqueeze (p, s) h = Cast <to = 10> (q) y = Cast <to = 1> (h)",
        "p = Sigmoid (z) q = Identity (p) y = Transpose <perm = [1, 0]> (q)",
    ],
)
def test_sigmoids_are_found(body: str) -> None:
    """By the definition of the loss, in float64, of scores whose probabilities are 0 and 1 in float32."""
    kind, value, y = chosen(load(body))
    x = Z.astype(np.float64)
    x = x.T if "perm" in body else x.reshape(y.shape)
    assert kind == "bce"
    np.testing.assert_allclose(value, (np.logaddexp(0, x) - x * y).mean(), rtol=1e-6)


WRITTEN = "m = ReduceMax <keepdims = 1> (z, a) d = Sub (z, m) e = Exp (d) s = ReduceSum <keepdims = 1> (e, a) "
#: as JAX writes it: both sums are expanded, and the largest is at least -inf
JAX = (
    "f = Constant <value = float {-inf}> () m = ReduceMax <keepdims = 0> (z, a) n = Max (f, m) "
    "o = Reshape (n, c) b = Expand (o, c) d = Sub (z, b) e = Exp (d) s = ReduceSum <keepdims = 0> (e, a) "
    "t = Reshape (s, c) u = Expand (t, c) y = Div (e, u)"
)
PLAIN = "e = Exp (z) s = ReduceSum <keepdims = 1> (e, a) "


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ("p = Softmax (z) h = Cast <to = 10> (p) y = Identity (h)", lambda x: x),
        (shape("s", 2, 2, 1, 6) + "p = Softmax (z) y = Reshape (p, s)", lambda x: x),
        ("p = Softmax (z) y = Transpose <perm = [1, 0]> (p)", lambda x: x),
        (shape("s", 2, 2, 3, 2) + shape("t", 4, 3, 2) + "r = Reshape (z, t) p = Softmax <axis = 1> (r)"
         "y = Reshape (p, s)", lambda x: x.reshape(4, 3, 2).transpose(0, 2, 1)),
        (shape("a", 1) + WRITTEN + "y = Div (e, s)", lambda x: x),
        (shape("a", -1) + PLAIN + "y = Div (e, s)", lambda x: x),
        (shape("a", 1) + shape("c", 4, 1) + JAX, lambda x: x),
        (shape("a", 1) + WRITTEN + "r = Reciprocal (s) p = Mul (e, r) y = Log (p)", lambda x: x),
    ],
)  # fmt: skip
def test_softmaxes_are_found(body: str, form: object) -> None:
    x = form(Z)  # type: ignore[operator]
    if "axis = 1" not in body:
        x = x.reshape(-1, 6)
    kind, value, y = chosen(load(body))
    assert kind == "cross_entropy"
    logs = log_softmax(x, -1).reshape(-1, x.shape[-1])
    if "axis = 1" in body:
        y = y.reshape(4, 2)
    np.testing.assert_allclose(value, -logs[np.arange(len(logs)), y.ravel()].mean(), rtol=1e-5)


@pytest.mark.parametrize("order", ["n, p", "p, n"])
def test_two_classes_of_a_sigmoid(order: str) -> None:
    """As scikit-learn's exporter writes binary classifiers: cross entropy of [0, z], where a probability may be 1."""
    body = f"o = Constant <value = float {{1}}> () p = Sigmoid (z) n = Sub (o, p) y = Concat <axis = 1> ({order})"
    program = load(body, inputs="float[4,1] z")
    name, why = attach_loss(program, None)
    assert why == "cross_entropy, as 'y' is made by Softmax"
    z, label = np.array([[100], [-100], [3], [-0.5]], np.float32), np.array([0, 1, 1, 0])
    (value,) = rc.Executor().run(program, {"z": z, "label": label}, [name])
    signs = np.where(label == (0 if order[0] == "p" else 1), -1, 1)
    np.testing.assert_allclose(value, np.logaddexp(0, signs * z[:, 0].astype(np.float64)).mean(), rtol=1e-6)


def test_classes_that_are_torn_apart_are_refused() -> None:
    program = load(shape("s", 4, 2, 3) + "p = Softmax (z) y = Reshape (p, s)")
    with pytest.raises(rc.UsageError, match=r"along no single axis.*take the loss of the scores, 'z'"):
        attach_loss(program, None)


def test_unlike_outputs_are_asked_for() -> None:
    text = shape("s", 4, 3, 2) + "p = Softmax (z) b = Reshape (z, s) y = Tanh (b)"
    program = load(text, "p y")
    with pytest.raises(rc.UsageError, match=r"2 unlike outputs: 'p' f32\[4,6\] \(cross_entropy\), 'y'.*--loss"):
        attach_loss(program, None)
    assert attach_loss(program, "mse:y")[1] == "mse of 'y', as asked"
    label = next(v for v in program.inputs if v.name == "label")
    assert label.shape == (4, 3, 2)


def test_an_open_dimension_is_no_number_of_classes() -> None:
    """Scores of every place of a sequence for every place of another, as a file declares them."""
    text = """<ir_version: 8, opset_import: ["": 17]>
        g (float[N,S,6] a, float[N,6,T] b) => (float[N,S,%s] y) { y = MatMul (a, b) }"""
    for last, kind in (("T", "mse"), ("K", "cross_entropy")):
        program = rc.load(onnx.parser.parse_model(text % last), batch=2, dims={"S": 3, "T": 4})
        assert rc.losses.natural_loss(program)[0] == kind
    assert rc.losses.natural_loss(rc.load(onnx.parser.parse_model(text % "T"), batch=2, dims={"S": 3, "T": 4})) == (
        "mse",
        "mse, as 'y' has the open dimension 'T' last",
    )


def test_states_beside_scores_are_no_choice() -> None:
    """What other outputs are made of, and equal outputs: the first, as is said."""
    assert chosen(load("h = Tanh (z) e = Neg (h) y = Sigmoid (e)", "h y"))[0] == "bce"
    program = load("p = Sigmoid (z) n = Neg (z) y = Sigmoid (n)", "p y")
    assert rc.losses.natural_loss(program) == ("bce", "bce, as 'p' is made by Sigmoid (the first of 2 alike outputs)")


@pytest.mark.parametrize(
    "body",
    [
        shape("s", 1, 12, -1) + "a = Reshape (i, s) b = Neg (a) c = Concat <axis = 1> (a, b) y = Neg (c) ",
        shape("s", 1, -1, 2) + "w = ConstantOfShape (k) m = Conv (i, w) y = Reshape (m, s)",
    ],
)
def test_rows_of_a_detector_are_asked_for(body: str) -> None:
    body = shape("k", 4, 3, 1, 1) + body.replace("y = Neg (c)", "y = Identity (c)")
    with pytest.raises(rc.UsageError, match="as a detector's are: which loss trains it cannot be told"):
        rc.losses.natural_loss(load(body, inputs="float[1,3,4,4] i"))


def test_metrics_read_what_a_program_makes() -> None:
    """One sigmoid a label is divided at 0.5; perplexity of probabilities is that of their logarithms."""
    y, label = np.array([[0.9], [0.2]], np.float32), np.array([[1], [1]])
    metric = rc.metrics.Accuracy().bind(load("y = Sigmoid (z)"))
    metric.update({"y": y}, {"label": label})
    assert metric.result() == 0.5
    perplexity = rc.metrics.Perplexity().bind(load("y = Softmax (z)"))
    perplexity.update({"y": np.array([[0.25, 0.75]], np.float32)}, {"label": np.array([0])})
    np.testing.assert_allclose(perplexity.result(), 4)
