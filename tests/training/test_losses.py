"""Losses: values and gradients against PyTorch, labels, reductions, what is taken from a model, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import recompute as rc
from recompute import Block, Role, TensorType, UsageError, Value
from recompute.data.batches import synthetic_batch
from recompute.language.op import op_class
from recompute.passes.gradient.autodiff import differentiate
from recompute.testing import check_gradient
from recompute.training import losses

DATA = np.load(Path(__file__).parents[1] / "data" / "optimizers.npz")

PYTORCH = {
    **{f"cross_entropy.{r}": {"reduction": r} for r in ("mean", "sum", "none")},
    **{f"smooth_l1.{r}": {"reduction": r, "beta": 0.5} for r in ("mean", "sum", "none")},
    "cross_entropy.axis1": {},
    "cross_entropy.last": {},
    "cross_entropy.weight": {"weight": DATA["weight"]},
    "cross_entropy.ignore": {"ignore_index": int(DATA["loss.cross_entropy.ignore.y"][0])},
    "cross_entropy.soft": {"soft_label": True},
    "nll.mean": {"weight": DATA["weight"]},
    "mse.mean": {},
    "l1.mean": {},
    "huber.mean": {"delta": 2.0},
    "bce.mean": {},
    "bce_with_logits.mean": {},
    "bce_with_logits.pos": {"pos_weight": DATA["weight"]},
    "kl_div.batchmean": {"reduction": "batchmean"},
    "kl_div.zeros": {},
    "kl_div.log": {"log_target": True, "reduction": "sum"},
}


#: losses of other scores than [3, 4]
SHAPES = {"ctc": (3, 4, 5)}


def program_of(x: np.ndarray, kind: str = "Identity", name: str = "scores", **attributes: object) -> rc.Program:
    """x → kind → its only output."""
    program = rc.Program(Block("net", inputs=(Value("x", TensorType.of(x)),)))
    b = program.builder()
    b.emit(op_class(kind)(**attributes), program["x"].value, name=name)
    program.append(b, outputs=[name])
    return program


def value_and_gradient(loss: rc.Variable, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The loss, and the gradient of its sum by x."""
    program = loss.program
    name = loss.name
    if loss.shape:
        b = program.builder(Role.LOSS)
        b.emit(op_class("ReduceSum")(keepdims=0), loss.value, name="total")
        program.append(b)
        name = "total"
    block, ((_, dx),) = differentiate(program.block, name, ["x"])
    value, gradient = rc.Executor().run(
        rc.Program(rc.verify(block), program.data), {"x": x, "label": y}, [loss.name, dx.name]
    )
    return value, gradient


@pytest.mark.parametrize("key", PYTORCH)
def test_same_as_pytorch(key: str) -> None:
    x, y = DATA[f"loss.{key}.x"], DATA[f"loss.{key}.y"]
    loss = getattr(losses, key.split(".")[0])(program_of(x), **PYTORCH[key])
    assert loss.name == "loss" and "loss" in loss.program.block.outputs
    value, gradient = value_and_gradient(loss, x, y)
    # sums of up to 24 terms in another order
    np.testing.assert_allclose(value, DATA[f"loss.{key}"], rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(gradient, DATA[f"loss.{key}.dx"], rtol=1e-12, atol=1e-14)


def test_every_loss_is_listed() -> None:
    here = (losses.__name__, losses.ctc.__module__)
    public = {n for n, f in vars(losses).items() if callable(f) and f.__module__ in here and n[0] != "_"}
    assert public - {"natural_loss"} == set(losses.NAMES)


def test_hinge() -> None:
    x, y = np.array([[0.5, -2.0], [3.0, 0.25]]), np.array([[1.0, 1.0], [1.0, -1.0]])
    value, gradient = value_and_gradient(losses.hinge(program_of(x), reduction="sum"), x, y)
    assert value == 0.5 + 3.0 + 0 + 1.25
    np.testing.assert_array_equal(gradient, [[-1, -1], [0, 1]])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_cross_entropy_along_any_axis(axis: int, reduction: str) -> None:
    g = np.random.default_rng(0)
    x = g.standard_normal((3, 4, 5))
    rest = tuple(d for i, d in enumerate(x.shape) if i != axis % 3)
    y = g.integers(0, x.shape[axis], rest)
    loss = losses.cross_entropy(program_of(x), axis=axis, reduction=reduction)
    assert loss.program["label"].shape == rest and loss.program["label"].dtype == "i64"
    value, _ = value_and_gradient(loss, x, y)
    log = np.moveaxis(x - np.log(np.exp(x).sum(axis, keepdims=True)), axis, -1)
    each = -np.take_along_axis(log, y[..., None], -1)[..., 0]
    expected = {"mean": each.mean(), "sum": each.sum(), "none": each}[reduction]
    np.testing.assert_allclose(value, expected, rtol=1e-13)


def test_cross_entropy_without_a_batch() -> None:
    x = np.array([1.0, 2.0, 3.0])
    value, gradient = value_and_gradient(losses.cross_entropy(program_of(x)), x, np.array(1))
    p = np.exp(x) / np.exp(x).sum()
    np.testing.assert_allclose(value, -np.log(p[1]), rtol=1e-14)
    np.testing.assert_allclose(gradient, p - [0, 1, 0], rtol=1e-14)


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
def test_softmax_is_not_applied_twice(kind: str) -> None:
    x, y = DATA["loss.cross_entropy.mean.x"], DATA["loss.cross_entropy.mean.y"]
    loss = losses.cross_entropy(program_of(x, kind, "pred", axis=1))
    value, gradient = value_and_gradient(loss, x, y)
    np.testing.assert_allclose(value, DATA["loss.cross_entropy.mean"], rtol=1e-14)
    np.testing.assert_allclose(gradient, DATA["loss.cross_entropy.mean.dx"], rtol=1e-13, atol=1e-15)


def test_sigmoid_is_not_applied_before_the_logarithm() -> None:
    x, y = np.array([[-800.0, 800.0, 0.0]]), np.array([[1.0, 0.0, 1.0]])
    value, gradient = value_and_gradient(losses.bce(program_of(x, "Sigmoid", "pred")), x, y)
    np.testing.assert_allclose(value, (1600 + np.log(2)) / 3, rtol=1e-15)
    np.testing.assert_allclose(gradient, [[-1 / 3, 1 / 3, -1 / 6]], rtol=1e-15)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bce_of_certainty_is_finite(dtype: type) -> None:
    x, y = np.array([0, 0, 1, 1], dtype), np.array([0, 1, 0, 1], dtype)
    value, gradient = value_and_gradient(losses.bce(program_of(x), reduction="none"), x, y)
    largest = min(100, -np.log(np.finfo(dtype).tiny))
    np.testing.assert_allclose(value, [0, largest, largest, 0], rtol=1e-6)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("name", losses.NAMES)
def test_gradients(name: str) -> None:
    g = np.random.default_rng(2)
    x = g.uniform(0.1, 0.9, SHAPES.get(name, (3, 4)))
    program = program_of(x)
    loss = getattr(losses, name)(program)
    feed = {
        "x": x,
        "label": synthetic_batch(program)["label"]
        if loss.program["label"].dtype == "i64"
        else g.uniform(0.1, 0.9, x.shape),
    }
    check_gradient(program.block.with_operators(program.operators, outputs=("loss",)), feed, wrt=["x"])


@pytest.mark.parametrize("name", losses.NAMES)
def test_half_precision_is_summed_in_float32(name: str) -> None:
    loss = getattr(losses, name)(program_of(np.ones(SHAPES.get(name, (3, 4)), np.float16)))
    assert loss.dtype == "f32"


def test_operators_have_the_loss_role() -> None:
    program = program_of(np.ones((3, 4)))
    losses.mse(program)
    assert [o.role for o in program.operators] == [Role.FORWARD] + [Role.LOSS] * 3


def test_labels() -> None:
    program = program_of(np.ones((3, 4)))
    first = losses.mse(program["scores"], name="first", label_name="target")
    assert program.inputs[-1].name == "target"
    losses.l1(program["scores"], program["target"], name="second")
    losses.l1(program["scores"], "target", name="third")
    assert [v.name for v in program.inputs] == ["x", "target"]
    assert program.block.outputs == ("scores", "first", "second", "third")
    assert first.shape == ()


def test_labels_are_brought_to_the_type() -> None:
    t = (
        Value("x", TensorType("f64", (3, 4))),
        Value("y", TensorType("i32", (3,))),
        Value("z", TensorType("f32", (3, 4))),
    )
    program = rc.Program(Block("net", inputs=t))
    assert losses.cross_entropy(program["x"], "y").shape == ()
    assert losses.mse(program["x"], "z", name="other").dtype == "f64"


def test_errors() -> None:
    program = program_of(np.ones((3, 4)))
    cases = [
        (lambda: losses.mse(program["scores"], label_name="x"), "already has a value 'x': pass it"),
        (lambda: losses.mse(program["scores"], name="scores"), "already has a value 'scores': give the loss another"),
        (lambda: losses.mse(program["scores"], "labels"), "no value 'labels'"),
        (
            lambda: losses.cross_entropy(program["scores"], "x"),
            r"label 'x' is f64\[3,4\], but this loss needs i64\[3\]",
        ),
        (lambda: losses.mse(program["scores"], reduction="avg"), "must be one of mean, sum, none"),
        (lambda: losses.cross_entropy(program["scores"], reduction="batchmean"), "must be one of mean, sum, none"),
        (lambda: losses.cross_entropy(program["scores"], axis=2), "axis 2 is out of range"),
        (lambda: losses.cross_entropy(program["scores"], weight=[1.0]), "one number for each of the 4 classes"),
        (lambda: losses.cross_entropy(program_of(np.ones((3, 1)))), "fewer than two classes"),
        (lambda: losses.cross_entropy(program_of(np.ones(()))), "is a scalar"),
        (lambda: losses.mse("scores"), "the output of a loss must be a Variable"),
        (lambda: losses.mse(program_of(np.ones(3, np.int64))), "no floating-point output"),
        (lambda: losses.mse(program_of(np.ones(3, np.int64))["x"]), "needs a floating-point output"),
        (lambda: losses.smooth_l1(program, beta=-1), "beta must be"),
        (lambda: losses.huber(program, delta=0), "delta must be"),
        (lambda: losses.mse(program, program_of(np.ones((3, 4)))["x"]), "Variable of the same program"),
    ]
    for make, message in cases:
        with pytest.raises(UsageError, match=message):
            make()


# -- the loss that fits a model --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        ((3, 4), "Softmax", "cross_entropy"), ((3, 4), "LogSoftmax", "cross_entropy"), ((3, 4), "Sigmoid", "bce"),
        ((3, 4), "Tanh", "mse"),  # as large as the input: an autoencoder
    ],
)  # fmt: skip
def test_natural_loss_by_the_last_operator(shape: tuple, kind: str, expected: str) -> None:
    found, reason = losses.natural_loss(program_of(np.ones(shape), kind, "pred"))
    assert found == expected and reason.startswith(f"{expected}, as 'pred'")


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [((3, 4, 5), (2,), "cross_entropy"), ((2, 3, 4, 5), (1,), "cross_entropy"), ((3, 4), (1,), "mse"),
     ((3, 4), (0, 1), "pred")],
)  # fmt: skip
def test_natural_loss_by_shape(shape: tuple, axes: tuple, expected: str) -> None:
    program = program_of(np.ones(shape), "ReduceSum", "pred", axes=axes, keepdims=0)
    assert losses.natural_loss(program)[0] == expected


def test_natural_loss_needs_a_float() -> None:
    with pytest.raises(UsageError, match="no floating-point output"):
        losses.natural_loss(program_of(np.ones(3, np.int64)))


@pytest.mark.parametrize(
    ("image", "output", "expected"),
    [
        ((2, 3, 8, 8), (2, 5, 8, 8), "cross_entropy"),
        ((2, 1, 9, 9), (2, 2, 5, 5), "cross_entropy"),  # convolutions without padding
        ((2, 3, 8, 8), (2, 3, 8, 8), "mse"),  # an image to an image
        ((2, 3, 8, 8), (2, 1, 8, 8), "mse"),  # a depth
        ((2, 3, 8, 8), (2, 64, 4, 4), "mse"),  # features
    ],
)
def test_natural_loss_of_pixels(image: tuple, output: tuple, expected: str) -> None:
    program = program_of(np.ones(image), "Resize", "pred", shape=output)
    assert losses.natural_loss(program)[0] == expected


@pytest.mark.parametrize(("model", "expected"), [("mlp", "cross_entropy"), ("mlp4", "loss")])
def test_natural_loss_of_the_zoo(model: str, expected: str) -> None:
    program = rc.load(rc.models.build(model), batch=4)
    assert losses.natural_loss(program)[0] == expected


@pytest.mark.parametrize(
    ("kind", "options", "binary"),
    [
        *((k, {}, False) for k in ("mse", "l1", "smooth_l1", "huber")),
        *((k, {}, True) for k in ("bce", "bce_with_logits", "kl_div")),
        ("bce_with_logits", {"pos_weight": 2.0}, True),
        ("cross_entropy", {"soft_label": True}, True),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_synthetic_labels_suit_the_loss(kind: str, options: dict, binary: bool, dtype: type) -> None:
    """0 and 1 where the loss takes probabilities, any number where it takes a distance; the same once it is a step."""
    program = program_of(np.zeros((40, 3), dtype), "Tanh")
    program.declare("parameters", "w", np.ones(3, dtype))
    b = program.builder()
    program.append(b, outputs=[b.emit(op_class("Mul")(), program["scores"].value, program["w"].value, name="out").name])
    loss = getattr(losses, kind)(program["out"], **options)
    for _ in range(2):
        drawn = synthetic_batch(program)["label"]
        assert set(np.unique(drawn)) == {0, 1} if binary else len(np.unique(drawn)) > 60
        if not program.gradients:
            rc.SGD(0.1).minimize(program[loss.name])


def test_synthetic_labels_of_a_step_in_slices_are_of_all_classes() -> None:
    program = rc.load(rc.models.build("lenet", weights=False), batch=64)
    loss = rc.losses.cross_entropy(program).name
    step = rc.compile_step(program, loss, rc.RecomputeOptimizer(rc.SGD(0.01)).set_slices("all:0:2"))
    assert synthetic_batch(step.program)["label"].max() == 9


def test_synthetic_masks_hide_nothing() -> None:
    block = rc.parse(
        "program p {\n  input %attention_mask: i64[2,3]\n  input %ids: i64[2,3]\n"
        "  %y: i64[2,3] = Mul(%attention_mask, %ids)\n  output %y\n}"
    )
    batch = synthetic_batch(rc.Program(block))
    assert batch["attention_mask"].tolist() == [[1, 1, 1]] * 2 and batch["attention_mask"].dtype == np.int64
    assert set(np.unique(batch["ids"])) <= {0, 1}


def test_synthetic_integers_of_a_one_hot_are_of_all_classes() -> None:
    """As JAX writes it: x[..., None] = [0, 1, ..., 256]."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (int32[4,64] x) => (float[4,64,2] y) {
        a = Constant <value = int64[1] {2}> () u = Unsqueeze (x, a) e = Equal (u, iota) f = Cast <to = 1> (e)
        y = MatMul (f, w) }"""
    model = onnx.parser.parse_model(text)
    held = {"iota": np.arange(257, dtype=np.int32)[None, None], "w": np.ones((257, 2), np.float32)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in held.items())
    x = synthetic_batch(rc.load(model))["x"]
    assert 200 < x.max() < 257
