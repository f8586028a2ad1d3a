"""Metrics beside scikit-learn's figures, over batches of different sizes."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute.errors import MissingExtraError
from recompute.metrics import Accuracy, Metric, Perplexity, ScikitLearn, TopK, named

ROWS, CLASSES = 103, 7


@pytest.fixture(scope="module")
def reference() -> Any:
    """scikit-learn's metrics; importing it takes a second."""
    return pytest.importorskip("sklearn.metrics")


def data(classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    g = np.random.default_rng(0)
    labels = g.integers(0, classes - 1, ROWS)  # the last class is never the label
    scores = g.standard_normal((ROWS, classes)).astype(np.float32)
    scores[np.arange(ROWS), labels] += 1
    return scores, labels


def parts(size: int) -> Iterator[slice]:
    for i in range(0, ROWS, size):
        yield slice(i, min(i + size, ROWS))


def over_batches(metric: Metric, scores: np.ndarray, labels: np.ndarray, size: int = 10) -> Any:
    metric.reset()
    for part in parts(size):
        metric.update({"scores": scores[part]}, {"x": scores[part], "label": labels[part]})
    return metric.result()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("size", [1, 10, ROWS])
def test_classification_is_as_in_scikit_learn(size: int, reference: Any) -> None:
    scores, labels = data()
    best = scores.argmax(1)
    assert over_batches(Accuracy(), scores, labels, size) == reference.accuracy_score(labels, best)
    for k in (1, 3, 5, 9):
        expected = reference.top_k_accuracy_score(labels, scores, k=k, labels=range(CLASSES)) if k < CLASSES else 1
        assert over_batches(TopK(k), scores, labels, size) == pytest.approx(expected, rel=1e-15)
    for average in ("macro", "micro"):
        expected = reference.f1_score(labels, best, average=average)
        assert over_batches(ScikitLearn("f1_score", average=average), scores, labels, size) == pytest.approx(
            expected, rel=1e-15
        )
    expected = math.exp(reference.log_loss(labels, softmax(scores), labels=range(CLASSES)))
    assert over_batches(Perplexity(), scores, labels, size) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("form", ["two scores", "one score", "one column"])
def test_binary_scores(form: str, reference: Any) -> None:
    scores, labels = data(3)
    right = scores[:, 1] - scores[:, 0]
    given = {"two scores": scores[:, :2], "one score": right, "one column": right[:, None]}[form]
    predicted = right > 0
    settings = {} if form == "two scores" else {"threshold": 0}
    expected = reference.f1_score(labels, predicted, average="binary")
    assert over_batches(ScikitLearn("f1_score", **settings), given, labels) == pytest.approx(expected, rel=1e-15)
    assert over_batches(Accuracy(**settings), given, labels) == reference.accuracy_score(labels, predicted)


@pytest.mark.parametrize("size", [1, 10, ROWS])
def test_regression_is_as_in_scikit_learn(size: int, reference: Any) -> None:
    scores, _ = data()
    targets = np.roll(scores, 1, 0)
    for metric, figure in ((named("mae"), "absolute"), (named("mse"), "squared")):
        expected = getattr(reference, f"mean_{figure}_error")(targets.astype(float), scores.astype(float))
        assert over_batches(metric, scores, targets, size) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("values", [[math.inf, 1.0], [math.nan, 1.0]])
def test_what_is_not_finite_is_no_figure(values: list[float], reference: Any) -> None:
    metric = named("mse")
    metric.update({"y": np.array(values)}, {"y": np.zeros(2)})
    assert math.isnan(metric.result())


def test_labels_that_do_not_count(reference: Any) -> None:
    scores, labels = data()
    ignored = np.arange(ROWS) % 3 == 0
    some = np.where(ignored, -100, labels)
    kept = scores[~ignored], labels[~ignored]
    best = kept[0].argmax(1)
    assert over_batches(Accuracy(), scores, some) == reference.accuracy_score(kept[1], best)
    assert over_batches(named("f1"), scores, some) == pytest.approx(reference.f1_score(kept[1], best, average="macro"))
    expected = reference.log_loss(kept[1], softmax(kept[0]), labels=range(CLASSES))
    assert over_batches(Perplexity(), scores, some) == pytest.approx(math.exp(expected))
    assert math.isnan(over_batches(Accuracy(ignore_index=3), scores, np.full(ROWS, 3)))
    values = np.where(ignored, -1, scores[:, 0])
    figure = over_batches(ScikitLearn("mean_absolute_error", classes=False, ignore_index=-1), np.zeros(ROWS), values)
    assert figure == pytest.approx(np.abs(scores[~ignored, 0].astype(float)).mean())


@pytest.mark.parametrize("axis", [None, 1, -3])
def test_classes_in_the_middle(axis: int | None) -> None:
    g = np.random.default_rng(0)
    scores, labels = g.standard_normal((ROWS, 5, 3, 4)), g.integers(0, 5, (ROWS, 3, 4))
    expected = (scores.argmax(1) == labels).mean()
    assert over_batches(Accuracy(axis=axis), scores, labels) == pytest.approx(expected, rel=1e-15)


def test_positions_of_a_sequence() -> None:
    g = np.random.default_rng(0)
    scores, labels = g.standard_normal((ROWS, 6, 5)), g.integers(0, 5, (ROWS, 6))
    assert over_batches(Accuracy(), scores, labels) == pytest.approx((scores.argmax(-1) == labels).mean(), rel=1e-15)


def test_equal_scores_and_nan() -> None:
    metric = TopK(2)
    scores = np.array([[1, 1, 1.0], [1, 1, 1], [1, 1, 1], [np.nan, 1, 2], [3, 1, np.nan]])
    metric.update({"scores": scores}, {"label": np.array([0, 1, 2, 2, 0])})
    assert metric.result() == 2 / 5  # the lower class is better, and a row with NaN is wrong


def test_perplexity_of_far_scores() -> None:
    metric = Perplexity()
    metric.update({"scores": np.array([[1000.0, -1000.0]], np.float32)}, {"label": np.array([0])})
    assert metric.result() == 1.0
    metric.update({"scores": np.array([[1000.0, -1000.0]], np.float32)}, {"label": np.array([1])})
    assert metric.result() == math.inf


def test_names_are_chosen_by_the_program() -> None:
    program = rc.load(rc.models.build("lenet", batch=4))
    rc.losses.cross_entropy(program["logits"])
    metric = Accuracy()
    assert metric.needs == ()
    assert metric.bind(program) is metric and metric.needs == ("logits",)
    metric.update({"loss": np.zeros(()), "logits": np.eye(4)}, {"x": np.zeros(1), "labels": np.arange(4)})
    assert metric.result() == 1.0
    assert Accuracy(output="pool1").bind(program).needs == ("pool1",)
    with pytest.raises(rc.UsageError, match=r"no value 'logit' \(did you mean logits\?\)"):
        Accuracy(output="logit").bind(program)


def test_names_that_are_given() -> None:
    metric = Accuracy(output="b", label="class", name="right")
    metric.update({"a": np.zeros((2, 2)), "b": np.eye(2)}, {"label": np.zeros(2), "class": np.arange(2)})
    assert (metric.name, metric.needs, metric.result()) == ("right", ("b",), 1.0)


def test_metrics_by_name() -> None:
    pytest.importorskip("sklearn.metrics")
    for name in rc.metrics.NAMES:
        assert rc.metrics.named(name).name == name
    top = rc.metrics.named("top3")
    assert isinstance(top, TopK) and top.k == 3
    with pytest.raises(rc.UsageError, match=r"no metric 'acuracy' \(did you mean accuracy"):
        rc.metrics.named("acuracy")


@pytest.mark.parametrize(
    ("metric", "scores", "batch", "message"),
    [
        (Accuracy(), {"s": np.zeros((2, 3))}, {"x": np.zeros(2)}, r"the batch has 'x', none of which is called label"),
        (Accuracy(label="y"), {"s": np.zeros((2, 3))}, {"x": np.zeros(2)}, r"the label 'y', but the batch has 'x'"),
        (Accuracy(output="s"), {"t": np.zeros(2)}, {"y": np.zeros(2)}, r"reads the output 's', but got 't'"),
        (Accuracy(), {"s": np.zeros(2), "t": np.zeros(2)}, {"y": np.zeros(2)}, r"which of 's', 't' is judged\?"),
        (Accuracy(), {"s": np.zeros((2, 3))}, {"y": np.zeros(3)}, r"labels of shape \(3,\) do not fit scores of shape"),
        (Accuracy(axis=0), {"s": np.zeros((2, 3))}, {"y": np.zeros(2)}, r"with classes along axis 0"),
        (Accuracy(), {"s": np.zeros((2, 3))}, {"y": np.array([0, 3])}, r"label 3 is not one of the 3 classes"),
        (Accuracy(), {"s": np.zeros((2, 3))}, {"y": np.array([0, 0.5])}, r"class indices as labels"),
        (Accuracy(), {"s": np.zeros(2)}, {"y": np.zeros(2)}, r"needs a threshold: threshold=0.5 for probabilities"),
    ],
)
def test_errors_say_what_is_wrong(metric: Metric, scores: Any, batch: Any, message: str) -> None:
    with pytest.raises(rc.UsageError, match=message):
        metric.update(scores, batch)


def test_settings_are_checked(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(rc.UsageError, match=r"no metric 'f1' \(did you mean"):
        ScikitLearn("f1")
    with pytest.raises(rc.UsageError, match=r"labels of shape \(3, 2\) do not fit"):
        named("mse").update({"s": np.zeros((2, 3))}, {"y": np.zeros((3, 2))})
    with pytest.raises(rc.UsageError, match="k must be a whole number of at least 1, not 0"):
        TopK(0)
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(MissingExtraError, match=r"'f1' needs the package 'scikit-learn'.*onnx-recompute\[metrics\]"):
        named("f1")
