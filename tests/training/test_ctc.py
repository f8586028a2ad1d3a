"""The CTC loss: PyTorch's values and gradients, layouts, lengths, labels that fit nothing, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recompute as rc
from recompute import Block, TensorType, UsageError, Value
from recompute.data import check_values, fitted, limits_of, synthetic_batch
from recompute.language.op import op_class
from recompute.passes.gradient.autodiff import differentiate

DATA = np.load(Path(__file__).parents[1] / "data" / "ctc.npz")
CASES = [f"{blank}.{some}.{r}" for blank in (0, 5) for some in ("all", "some") for r in ("mean", "sum", "none")]


def program_of(x: np.ndarray, kind: str = "Identity", **attributes: object) -> rc.Program:
    """x → kind → scores."""
    program = rc.Program(Block("net", inputs=(Value("x", TensorType.of(x)),)))
    b = program.builder()
    b.emit(op_class(kind)(**attributes), program["x"].value, name="scores")
    program.append(b, outputs=["scores"])
    return program


def value_and_gradient(loss: rc.Variable, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The loss, and the gradient of its sum by x."""
    program, name = loss.program, loss.name
    if loss.shape:
        b = program.builder()
        b.emit(op_class("ReduceSum")(keepdims=0), loss.value, name="total")
        program.append(b)
        name = "total"
    block, ((_, dx),) = differentiate(program.block, name, ["x"])
    return rc.Executor().run(rc.Program(rc.verify(block), program.data), feed, [loss.name, dx.name])


def fed(key: str) -> dict[str, np.ndarray]:
    blank, some, _ = key.split(".")
    found = {"x": DATA["x"], "label": DATA[f"label.{blank}"]}
    return {**found, "steps": DATA["input_lengths"]} if some == "some" else found


def options(key: str, **more: Any) -> dict[str, Any]:
    blank, some, reduction = key.split(".")
    found = {"blank": int(blank), "reduction": reduction, "label_size": 4, "zero_infinity": True, **more}
    return {**found, "input_lengths": "steps"} if some == "some" else found


@pytest.mark.parametrize("key", CASES)
def test_same_as_pytorch(key: str) -> None:
    loss = rc.losses.ctc(program_of(DATA["x"]), batch_first=False, **options(key))
    value, gradient = value_and_gradient(loss, fed(key))
    np.testing.assert_allclose(value, DATA[key], rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(gradient, DATA[f"{key}.dx"], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["Identity", "Softmax", "LogSoftmax"])
def test_batch_first_probabilities_and_lengths_of_labels(kind: str) -> None:
    """[N, T, C], whose first axis is the model's batch; what lies after a label's end is not read."""
    key, x = "5.some.mean", np.ascontiguousarray(DATA["x"].transpose(1, 0, 2))
    program = program_of(x, kind, **({} if kind == "Identity" else {"axis": 2}))
    label = DATA["label.5"].copy()
    label[label < 0] = 5  # the blank, as PyTorch's users fill up
    loss = rc.losses.ctc(program, label_lengths="sizes", **options(key))
    feed = {"x": x, "label": label, "steps": DATA["input_lengths"], "sizes": DATA["label_lengths"]}
    value, gradient = value_and_gradient(loss, feed)
    np.testing.assert_allclose(value, DATA[key], rtol=1e-13)
    np.testing.assert_allclose(gradient.transpose(1, 0, 2), DATA[f"{key}.dx"], rtol=1e-12, atol=1e-14)


def test_a_label_that_fits_no_alignment() -> None:
    """Its loss is infinite; it has no gradient, and others keep theirs."""
    x, label = DATA["x"][:4], DATA["label.0"]
    loss = rc.losses.ctc(program_of(x), batch_first=False, label_size=4, reduction="none")
    value, gradient = value_and_gradient(loss, {"x": x, "label": label})
    assert np.isinf(value).tolist() == [True, False, False, False, True]
    assert not gradient[:, [0, 4]].any() and gradient[:, 1:4].all() and np.isfinite(gradient).all()


def test_scores_that_are_extreme() -> None:
    """A path of probability 0 beside one of 1, and scores that no exponential can hold."""
    x = np.full((6, 1, 3), -1e4, np.float32)
    x[[0, 2, 4], 0, 0] = x[[1, 3, 5], 0, 1] = 1e4
    loss = rc.losses.ctc(program_of(x), batch_first=False, label_size=3)
    for label, expected in (([1, 1, 1], 0.0), ([2, 2, 2], 6e4 / 3)):
        value, gradient = value_and_gradient(loss, {"x": x, "label": np.array([label])})
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)
        assert np.isfinite(gradient).all()
        loss = rc.losses.ctc(program_of(x), batch_first=False, label_size=3)


def test_synthetic_labels_fit_and_other_batches_have_the_loss() -> None:
    program = program_of(np.zeros((2, 8, 5), np.float32))
    loss = rc.losses.ctc(program, label_lengths="sizes", input_lengths="steps")
    batch = synthetic_batch(program)
    value = rc.Executor().run(program, batch, [loss])[0]
    assert np.isfinite(value) and batch["label"].shape == (2, 8)
    assert {v.name for v in program.inputs} == {"x", "label", "sizes", "steps"}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, "which axis of 'scores'"),
        ({"batch_first": False, "blank": 6}, "must be one of the 6 classes"),
        ({"batch_first": False, "ignore_index": 1}, "must not be a class"),
        ({"batch_first": False, "label_size": 0}, "label_size must be at least 1"),
        ({"batch_first": 1}, "batch_first must be"),
        ({"batch_first": False, "label_lengths": "x"}, "needs i64"),
    ],
)
def test_errors(given: dict[str, Any], error: str) -> None:
    program = program_of(np.zeros((4, 4, 6), np.float32))
    with pytest.raises(UsageError, match=error):
        rc.losses.ctc(program, **given)
    with pytest.raises(UsageError, match="scores"):
        rc.losses.ctc(program_of(np.zeros((4, 4), np.float32)), **given)


@pytest.mark.parametrize(
    "place", [rc.CPUPlace(), pytest.param(rc.EmulatedCUDAPlace(), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(("label", "error"), [(0, "is the blank"), (6, "outside the 6 classes"), (-1, "outside the 6")])
def test_labels_that_cannot_be(label: int, error: str, place: rc.CPUPlace | rc.EmulatedCUDAPlace) -> None:
    x = DATA["x"].astype(np.float32)
    loss = rc.losses.ctc(program_of(x), batch_first=False, label_size=2, input_lengths="steps")
    feed = {"x": x, "label": np.full((5, 2), 1), "steps": np.full(5, 2)}
    executor = rc.Executor(place)
    assert np.isfinite(executor.run(loss.program, {**feed, "label": np.full((5, 2), -100)}, [loss])[0])
    with pytest.raises(rc.RecomputeError, match=error):
        executor.run(loss.program, {**feed, "label": np.full((5, 2), label)}, [loss])
    with pytest.raises(rc.RecomputeError, match="length 99 is outside of the"):
        executor.run(loss.program, {**feed, "steps": np.full(5, 99)}, [loss])


def test_labels_of_several_lengths_are_padded() -> None:
    """Lists of a column, by the value that ends labels; a list that is too long is an error."""
    program = program_of(np.zeros((3, 8, 5), np.float32))
    rc.losses.ctc(program, label_size=3, ignore_index=-7)
    x = np.zeros((3, 8, 5), np.float32)
    found = fitted(
        rc.data.dataset({"x": x, "label": [[1, 2], [], [3, 1, 1]]}), program.block.inputs, limits_of(program.block)
    )
    assert found.take(np.arange(3))["label"].tolist() == [[1, 2, -7], [-7] * 3, [3, 1, 1]]
    for label, error in (([0, 1], "has 0"), ([1, 5], "has 5")):
        wrong = fitted(
            rc.data.dataset({"x": x, "label": [[1], label, [1]]}), program.block.inputs, limits_of(program.block)
        )
        with pytest.raises(UsageError, match=f"{error} in sample 1 .*takes 1 to 4"):
            check_values(wrong)
    long = rc.data.dataset({"x": x, "label": [[1], [1, 2, 3, 4], [1]]})
    with pytest.raises(UsageError, match=r"in sample 1 .*, more than"):
        fitted(long, program.block.inputs, limits_of(program.block)).take(np.arange(3))


def test_numbers_of_steps_are_compared_with_the_steps_before_training() -> None:
    x = np.zeros((3, 8, 5), np.float32)
    program = program_of(x)
    rc.losses.ctc(program, label_size=3, input_lengths="steps")
    limits = limits_of(program.block)
    assert limits["steps"] == (9, 0, None)
    columns = rc.data.dataset({"x": x, "label": np.ones((3, 3), np.int64), "steps": np.array([8, 0, 9])})
    with pytest.raises(UsageError, match=r"'steps' .* has 9 in sample 2 .*, but the model takes 0 to 8"):
        check_values(fitted(columns, program.block.inputs, limits))


@pytest.mark.parametrize("place", [rc.CPUPlace(), rc.EmulatedCUDAPlace()], ids=str)
@pytest.mark.parametrize("size", [-1, 3])
def test_lengths_of_labels_that_cannot_be(size: int, place: rc.CPUPlace | rc.EmulatedCUDAPlace, any_size: None) -> None:
    x = np.zeros((3, 8, 5), np.float32)
    loss = rc.losses.ctc(program_of(x), batch_first=True, label_size=2, label_lengths="sizes")
    executor, label = rc.Executor(place), np.ones((3, 2), np.int64)
    assert np.isfinite(executor.run(loss.program, {"x": x, "label": label, "sizes": np.array([0, 1, 2])}, [loss])[0])
    with pytest.raises(rc.RecomputeError, match="a length of labels is negative, or more than"):
        executor.run(loss.program, {"x": x, "label": label, "sizes": np.array([0, 1, size])}, [loss])
