"""Boolean-mask indexing: NonZero, Compress, and what follows, beside ONNX's reference evaluator and PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.numpy_helper import from_array
from onnx.reference import ReferenceEvaluator

import recompute as rc

PYTORCH = Path(__file__).parents[1] / "data" / "pytorch_masks"
VALUES = json.loads((PYTORCH / "values.json").read_text())
W = np.random.default_rng(0).standard_normal((2, 3, 4))
MASKS = {
    "some": np.array([[1, 0, 1], [0, 0, 1]], bool),
    "all": np.ones((2, 3), bool),
    "one": np.array([[0, 0, 0], [0, 1, 0]], bool),
}
CHOOSE = "i = NonZero(m) t = Transpose<perm=[1, 0]>(i) v = GatherND(h, t)"
#: graphs from h = x + w [2, 3, 4], the mask m [2, 3], labels k [2, 3] and a table c [4, 4] to a loss y
GRAPHS = {
    name: body.replace("CHOOSE", CHOOSE)
    for name, _, body in (
        part.partition("\n") for part in (Path(__file__).parent / "mask_forms.txt").read_text().split("\n== ")[1:]
    )
}
CONSTANTS = {
    "zero": [0], "one": [1], "two": [2], "zero0": 0, "one0": 1, "two0": 2, "minus": [-1], "four": 4, "rows": [6, 4],
    "end": [3], "pairs": [-1, 2], "tiles": [1, 2],
}  # fmt: skip
FLOATS = {"half": 0.5, "third": 0.3, "hot": [0.0, 1.0], "row": [1.0, 2.0, 3.0, 0.5]}


def model(graph: str, result: str = "double[] y") -> onnx.ModelProto:
    text = f"""<ir_version: 8, opset_import: ["" : 18]>
    g (double[2,3,4] x, bool[2,3] m, int64[2,3] k) => ({result}) {{ h = Add(x, w) {graph} }}"""
    made = onnx.parser.parse_model(text)
    arrays = {n: np.array(v, np.int64) for n, v in CONSTANTS.items()} | {n: np.array(v) for n, v in FLOATS.items()}
    arrays["w"], arrays["c"] = W, np.arange(16.0).reshape(4, 4) / 16 - 0.4
    read = {n for node in made.graph.node for n in node.input}
    made.graph.initializer.extend(from_array(a, n) for n, a in arrays.items() if n in read)
    return made


def feed_of(graph: str, mask: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(graph))
    return {"x": rng.standard_normal((2, 3, 4)), "m": MASKS[mask], "k": rng.integers(0, 4, (2, 3))}


def step(graph: str, feed: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    """The loss and the gradient of w: what one step of SGD with a rate of 1 takes away."""
    program = rc.load(model(graph), trainable=["w"])
    rc.SGD(1.0).minimize(program["y"])
    (loss,) = rc.Executor().run(program, {"k": np.zeros((2, 3), np.int64), **feed}, ["y"])
    return float(loss), W - np.asarray(program.data["w"])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", GRAPHS)
def test_forms_are_as_the_reference_says(name: str, mask: str) -> None:
    """Values beside ONNX's evaluator, gradients beside differences along two directions."""
    graph = GRAPHS[name]
    feed = feed_of(graph, mask)
    made = model(graph)
    reference = ReferenceEvaluator(made)

    def loss(w: np.ndarray) -> float:
        return float(reference.run(None, {**feed, "x": feed["x"] + w - W})[0])

    got, gradient = step(graph, feed)
    np.testing.assert_allclose(got, loss(W), rtol=1e-9, atol=1e-12)
    for seed in (1, 2):
        direction = np.random.default_rng(seed).standard_normal(W.shape)
        slope = (loss(W + 1e-6 * direction) - loss(W - 1e-6 * direction)) / 2e-6
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("name", [n for n in GRAPHS if n not in ("elements of a mask", "largest", "joined")])
def test_an_empty_mask_gives_no_gradient_that_is_no_number(name: str) -> None:
    """A sum of nothing is 0, a mean NaN; what does not count passes nothing on."""
    graph = GRAPHS[name]
    feed = {**feed_of(graph, "some"), "m": np.zeros((2, 3), bool)}
    loss, gradient = step(graph, feed)
    assert np.isfinite(gradient).all()
    assert name not in ("sum", "mean") or (np.isnan(loss) if name == "mean" else loss == 0)


@pytest.mark.parametrize("function", ["Log", "Sqrt", "Exp", "Reciprocal", "Acos", "Atanh"])
@pytest.mark.parametrize("outside", [np.nan, np.inf, 0.0, -5.0, 1e4])
def test_values_outside_do_not_matter(function: str, outside: float) -> None:
    """Neither NaN nor an infinite derivative of what the mask leaves out reaches a weight."""
    inside = np.random.default_rng(3).uniform(0.2, 0.8, (2, 3, 4))
    x = np.where(MASKS["some"][..., None], inside, outside) - np.where(MASKS["some"][..., None], W, 0)
    graph = f"{CHOOSE} f = {function}(v) y = ReduceSum<keepdims=0>(f)"
    loss, gradient = step(graph, {"x": x, "m": MASKS["some"]})
    wanted = {"Log": 1 / inside, "Sqrt": 0.5 * inside**-0.5, "Exp": np.exp(inside), "Reciprocal": -(inside**-2.0),
              "Acos": -((1 - inside**2) ** -0.5), "Atanh": 1 / (1 - inside**2)}[function]  # fmt: skip
    assert np.isfinite(loss)
    np.testing.assert_allclose(gradient, np.where(MASKS["some"][..., None], wanted, 0), rtol=1e-9)


def test_a_mask_becomes_plain_operators() -> None:
    """No gather, no scatter: Where, a sum and a count."""
    program = rc.load(model(GRAPHS["mean"]))
    names = {o.op.name for o in program.operators}
    assert names == {"Add", "Reshape", "Where", "Mul", "ReduceSum", "Cast", "Div"}


DYNAMIC = {
    "a part": (f"{CHOOSE} s = Slice(v, zero, two, zero) y = ReduceSum<keepdims=0>(s)", "(Slice)", "by number"),
    "two masks": (f"{CHOOSE} b = Cast<to=9>(k) j = NonZero(b) u = Transpose<perm=[1, 0]>(j) e = GatherND(h, u)"
                  " p = Mul(v, e) y = ReduceSum<keepdims=0>(p)", "(Mul)", "'m' and 'b'"),
    "all entries": (f"{CHOOSE} f = Reshape(h, rows) p = Mul(v, f) y = ReduceSum<keepdims=0>(p)", "(Mul)",
                    "all 6 of 'f'"),
    "places": (f"{CHOOSE} a = ArgMax<axis=0, keepdims=0>(v) d = Cast<to=11>(a) y = ReduceSum<keepdims=0>(d)",
               "(ArgMax)", "gives places"),
    "sorted": (f"{CHOOSE} a, b = TopK<axis=0>(v, one) y = ReduceSum<keepdims=0>(a)", "(TopK)", "gives places"),
    "parted": (f"{CHOOSE} r = Reshape(v, shape) y = ReduceSum<keepdims=0>(r)", "(Reshape)", "parts it"),
    "by numbers": (f"{CHOOSE} r = Gather(v, zero) y = ReduceSum<keepdims=0>(r)", "(Gather)", "among all entries"),
    "batch statistics": (f"{CHOOSE} r = BatchNormalization<training_mode=1>(v, row, row, row, row)"
                         " y = ReduceSum<keepdims=0>(r)", "(BatchNormalization)", "statistics of all entries"),
    "several": (f"{CHOOSE} u = Unique(v) y = ReduceSum<keepdims=0>(u)", "(Unique)", "does not leave out"),
}  # fmt: skip


@pytest.mark.parametrize("name", DYNAMIC)
def test_what_stays_dynamic_names_the_node_the_mask_and_the_idiom(name: str) -> None:
    graph, node, why = DYNAMIC[name]
    made = model(graph)
    made.graph.initializer.append(from_array(np.array([2, -1, 4]), "shape"))
    with pytest.raises(rc.ModelError) as caught:
        rc.load(made)
    text = str(caught.value)
    assert node in text and why in text and "'m'" in text and "torch.where(mask, x, 0).sum() / mask.sum()" in text
    assert text.count("\n") == 1, "one message"


def test_an_output_cannot_be_dynamic_but_a_length_may_be_one() -> None:
    with pytest.raises(rc.ModelError, match=r"output 'v' holds the entries where 'm' is true.*static shape"):
        rc.load(model(CHOOSE, "double[n,4] v"))
    program = rc.load(model(f"{CHOOSE} n = Shape(v)", "int64[2] n"))
    (n,) = rc.Executor().run(program, {"x": W, "m": MASKS["some"], "k": np.zeros((2, 3), np.int64)}, ["n"])
    assert n.tolist() == [3, 4]


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("name", ["boxes", "pairs", "focal", "words", "sentences"])
def test_losses_of_pytorch_train(name: str, kind: str) -> None:
    """Four steps, each with another mask, of detection losses and of DeBERTa's (tests/data/pytorch_masks)."""
    values = VALUES[name]
    program = rc.load(PYTORCH / f"{name}.onnx", trainable=values["parameters"], mode="file")
    (loss,) = program.outputs
    getattr(rc, kind)(VALUES["rate"]).minimize(loss)
    executor = rc.Executor()
    types = {v.name: v.value.type.numpy for v in program.inputs}
    got = [
        float(executor.run(program, {n: np.array(s[n], t) for n, t in types.items()}, [loss])[0])
        for s in values["inputs"]
    ]
    np.testing.assert_allclose(got, values[kind], rtol=1e-6)
