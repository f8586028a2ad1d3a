"""Label smoothing and ignored labels against PyTorch (tests/data/make_settings.py), and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.training import test_losses

import recompute as rc
from recompute import Block, TensorType, UsageError, Value
from recompute.language.op import op_class
from recompute.training import losses

DATA = np.load(Path(__file__).parents[1] / "data" / "settings.npz")
CASES = list(itertools.product(("y", "some", "soft"), ("mean", "sum", "none"), ("plain", "weight"), (0.0, 0.125, 1.0)))


def scores(x: np.ndarray) -> rc.Program:
    program = rc.Program(Block("net", inputs=(Value("x", TensorType.of(x)),)))
    b = program.builder()
    b.emit(op_class("Identity")(), program["x"].value, name="scores")
    program.append(b, outputs=["scores"])
    return program


def value_and_gradient(x: np.ndarray, y: np.ndarray, **options: Any) -> list[np.ndarray]:
    return list(test_losses.value_and_gradient(losses.cross_entropy(scores(x), **options), x, y))


@pytest.mark.parametrize(("label", "reduction", "weighted", "smoothing"), CASES)
def test_same_as_pytorch(label: str, reduction: str, weighted: str, smoothing: float) -> None:
    options = {"weight": DATA["weight"]} if weighted == "weight" else {}
    options |= {"soft_label": True} if label == "soft" else {}
    got = value_and_gradient(DATA["x"], DATA[label], reduction=reduction, axis=1, label_smoothing=smoothing, **options)
    key = f"loss.{label}.{reduction}.{weighted}.{smoothing}"
    for found, expected in zip(got, (DATA[key], DATA[f"{key}.dx"]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("function", [losses.cross_entropy, losses.nll])
def test_minus_100_does_not_count_by_default(function: Any) -> None:
    x, y = DATA["x"][0].reshape(4, 6).T.copy(), np.array([1, -100, 2, 0, -100, 3])
    program = scores(x)
    function(program)
    (value,) = rc.Executor().run(program, {"x": x, "label": y}, ["loss"])
    program = scores(x[y >= 0])
    function(program)
    (kept,) = rc.Executor().run(program, {"x": x[y >= 0], "label": y[y >= 0]}, ["loss"])
    np.testing.assert_allclose(value, kept, rtol=1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("ignored", "label"), [(-100, -1), (-100, 4), (-100, -101), (None, -100), (2, -100)])
def test_other_labels_that_are_no_class_are_refused(smoothing: float, ignored: int | None, label: int) -> None:
    x = np.zeros((2, 4), np.float32)
    program = scores(x)
    losses.cross_entropy(program, ignore_index=ignored, label_smoothing=smoothing)
    with pytest.raises(rc.JobError, match=f"label {label} is outside the 4 classes"):
        rc.Executor().run(program, {"x": x, "label": np.array([0, label])}, ["loss"])


def test_the_default_has_the_bits_of_no_ignored_label() -> None:
    g = np.random.default_rng(3)
    x, y = g.standard_normal((37, 11)).astype(np.float32), g.integers(0, 11, 37)
    for a, b in zip(value_and_gradient(x, y), value_and_gradient(x, y, ignore_index=None), strict=True):
        np.testing.assert_array_equal(a, b)


def test_smoothing_sees_through_a_softmax_and_gives_rows_of_f16_in_f32() -> None:
    x = DATA["x"][:, :, 0, 0]
    program = rc.Program(Block("net", inputs=(Value("x", TensorType.of(x)),)))
    b = program.builder()
    b.emit(op_class("Softmax")(axis=1), program["x"].value, name="pred")
    program.append(b, outputs=["pred"])
    losses.cross_entropy(program, label_smoothing=0.1, reduction="none")
    (value,) = rc.Executor().run(program, {"x": x, "label": np.array([0, 3])}, ["loss"])
    log = x - np.log(np.exp(x).sum(1, keepdims=True))
    np.testing.assert_allclose(value, -0.9 * log[[0, 1], [0, 3]] - 0.1 * log.mean(1), rtol=1e-13)
    half = losses.cross_entropy(scores(np.ones((3, 4), np.float16)), label_smoothing=0.1)
    assert half.dtype == "f32"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.5}, "label_smoothing must be a number from 0 to 1, not 1.5"),
        ({"label_smoothing": -0.1}, "from 0 to 1, not -0.1"),
        ({"label_smoothing": "0.1"}, "from 0 to 1, not '0.1'"),
        ({"label_smoothing": True}, "from 0 to 1, not True"),
        ({"soft_label": True, "ignore_index": 0}, "ignore_index 0 needs class indices as labels"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        losses.cross_entropy(scores(np.zeros((2, 4))), **options)
