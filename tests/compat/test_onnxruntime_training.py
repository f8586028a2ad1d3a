"""The door for users of ONNX Runtime training: its published walkthrough, with other imports."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import recompute as rc
from recompute.compat.onnxruntime_training import api, artifacts
from recompute.errors import ModelError, UsageError

FOLDER = Path(__file__).parents[1] / "data" / "onnxruntime_training"
spec = importlib.util.spec_from_file_location("make_walkthrough", FOLDER / "make_walkthrough.py")
assert spec is not None and spec.loader is not None
published = importlib.util.module_from_spec(spec)
spec.loader.exec_module(published)
REFERENCE = json.loads((FOLDER / "walkthrough.json").read_text())
NAMES = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
SMALL = (6, 5, 3)


@pytest.mark.parametrize("case", list(published.CASES))
def test_losses_beside_onnx_runtime_training(case: str, tmp_path: Path) -> None:
    """Every loss within 1e-5 of 1.19.2's; the exported model computes what the module does."""
    losses = published.walkthrough(artifacts, api, tmp_path, case)
    np.testing.assert_allclose(losses, REFERENCE[case], rtol=0, atol=1e-5)
    ort = pytest.importorskip("onnxruntime")
    x, _ = published.batches(1, "CrossEntropyLoss")[0]
    (scores,) = ort.InferenceSession(tmp_path / "inference_model.onnx").run(["output"], {"input": x})
    if case.startswith("cross"):
        label = published.batches(1, "CrossEntropyLoss")[0][1]
        wide = scores.astype(np.float64)
        loss = np.mean(np.log(np.exp(wide).sum(1)) - wide[np.arange(len(label)), label])
        assert abs(loss - losses[-1]) < 1e-5


@pytest.mark.filterwarnings("ignore:checkpoint .* saves nothing")
@pytest.mark.parametrize("options", [{"checkpoints": ["active"]}, {"memory_budget": "100%"}])
def test_recomputed_to_the_bit(options: dict, tmp_path: Path) -> None:
    case = "cross entropy, AdamW"
    plain = published.walkthrough(artifacts, api, tmp_path, case)
    assert published.walkthrough(artifacts, api, tmp_path, case, **options) == plain


def trained(folder: Path, **options: object) -> tuple[api.CheckpointState, api.Module, api.Optimizer]:
    """A small network in a folder."""
    given = {"requires_grad": NAMES[:1] + NAMES[2:], "frozen_params": ["fc1.bias"], **options}
    artifacts.generate_artifacts(
        published.network(SMALL), loss=artifacts.LossType.CrossEntropyLoss, optimizer=artifacts.OptimType.AdamW,
        artifact_directory=folder, **given
    )  # fmt: skip
    return opened(folder, folder / "checkpoint")


def opened(folder: Path, checkpoint: Path) -> tuple[api.CheckpointState, api.Module, api.Optimizer]:
    state = api.CheckpointState.load_checkpoint(checkpoint)
    module = api.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, api.Optimizer(folder / "optimizer_model.onnx", module)


X = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)
Y = np.array([0, 1, 2, 0])


def test_gradients_accumulate_until_they_are_reset(tmp_path: Path) -> None:
    """As in ONNX Runtime: lazily, and none for what is frozen."""
    state, module, optimizer = trained(tmp_path)
    assert state.parameters["fc2.bias"].grad is None
    with pytest.raises(UsageError, match="no gradients yet"):
        optimizer.step()
    module(X, Y)
    first = state.parameters["fc2.bias"].grad
    assert first is not None and state.parameters["fc1.bias"].grad is None
    module(X, Y)
    np.testing.assert_array_equal(state.parameters["fc2.bias"].grad, 2 * first)
    module.lazy_reset_grad()
    np.testing.assert_array_equal(state.parameters["fc2.bias"].grad, 2 * first)
    module(X, Y)
    np.testing.assert_array_equal(state.parameters["fc2.bias"].grad, first)


def test_a_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """To the bit, with the optimizer's state and properties."""
    state, module, optimizer = trained(tmp_path)
    optimizer.set_learning_rate(0.01)
    state.properties["epoch"], state.properties["best"], state.properties["of"] = 3, 0.5, "me"
    losses = []
    for i in range(4):
        if i == 2:
            api.CheckpointState.save_checkpoint(state, tmp_path / "later", include_optimizer_state=True)
        losses.append(module(X, Y))
        optimizer.step()
        module.lazy_reset_grad()
    assert losses[3] < losses[0]
    state, module, optimizer = opened(tmp_path, tmp_path / "later")
    assert list(state.properties) == [("best", 0.5), ("epoch", 3), ("of", "me")]
    assert optimizer.get_learning_rate() == 0.01
    for loss in losses[2:]:
        assert module(X, Y) == loss
        optimizer.step()
        module.lazy_reset_grad()


def test_parameters(tmp_path: Path) -> None:
    """Names, one vector, changed contents: also those of a weight that is not trained."""
    state, module, _ = trained(tmp_path)
    assert [(n, p.requires_grad) for n, p in state.parameters] == [
        ("fc1.bias", False), ("fc1.weight", True), ("fc2.bias", True), ("fc2.weight", True)
    ]  # fmt: skip
    assert (module.input_names(), module.output_names()) == (["input", "labels"], ["loss"])
    assert (module.get_parameters_size(), module.get_parameters_size(False)) == (48, 53)
    vector = module.get_contiguous_parameters().numpy()
    np.testing.assert_array_equal(vector[:30], state.parameters["fc1.weight"].data.ravel())
    before = module(X, Y)
    state.parameters["fc1.bias"] = np.ones(5, np.float32)
    assert module(X, Y) != before
    module.copy_buffer_to_parameters(vector, False)
    assert module(X, Y) == before
    value = module(api_value(X), api_value(Y))
    assert value.numpy() == before


def api_value(a: np.ndarray) -> object:
    from recompute.compat.onnxruntime_training.module import OrtValue

    return OrtValue(a)


def test_the_schedule_warms_up_and_falls(tmp_path: Path) -> None:
    _, module, optimizer = trained(tmp_path)
    assert optimizer.get_learning_rate() == 1e-3
    schedule = api.LinearLRScheduler(optimizer, 2, 6, 0.1)
    rates = []
    for _ in range(8):
        rates.append(optimizer.get_learning_rate())
        module(X, Y)
        optimizer.step()
        schedule.step()
    np.testing.assert_allclose(rates, [0, 0.05, 0.1, 0.075, 0.05, 0.025, 0, 0], atol=1e-12)


def test_running_statistics_and_a_loss_inside(tmp_path: Path) -> None:
    """Batch normalisation trains by the batch, updates its statistics, and is evaluated with them."""
    h, n, t = onnx.helper, onnx.numpy_helper, onnx.TensorProto
    weights = {"s": np.ones(6), "b": np.zeros(6), "mean": np.zeros(6), "var": np.ones(6)}
    nodes = [h.make_node("BatchNormalization", ["x", "s", "b", "mean", "var"], ["y"]),
             h.make_node("Mul", ["y", "y"], ["z"]), h.make_node("ReduceMean", ["z"], ["l"], keepdims=0)]  # fmt: skip
    graph = h.make_graph(nodes, "g", [h.make_tensor_value_info("x", t.FLOAT, ["N", 6])],
                         [h.make_tensor_value_info("l", t.FLOAT, [])],
                         [n.from_array(a.astype(np.float32), k) for k, a in weights.items()])  # fmt: skip
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
    artifacts.generate_artifacts(model, requires_grad=["s", "b"], artifact_directory=tmp_path)
    state = api.CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = api.Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    assert abs(module(X) - 1) < 1e-3
    mean = state.parameters["mean"].data
    np.testing.assert_allclose(mean, 0.1 * X.mean(0), rtol=1e-5)
    expected = np.mean((X - mean) ** 2 / state.parameters["var"].data)
    np.testing.assert_allclose(module.eval()(X), expected, rtol=1e-4)


def test_labels_of_the_model_and_dropout(tmp_path: Path) -> None:
    """`loss_input_names`; new values are dropped at each call, none in evaluation mode; names with brackets."""
    h, n, t = onnx.helper, onnx.numpy_helper, onnx.TensorProto
    nodes = [
        h.make_node("MatMul", ["x", "w[0]"], ["a"]),
        h.make_node("Dropout", ["a", "half", "yes"], ["y"]),
        h.make_node("Identity", ["own"], ["same"]),
    ]
    tensors = {"w[0]": np.float32(X[:3].T), "half": np.float32(0.5), "yes": np.array(True)}
    inputs = [h.make_tensor_value_info("x", t.FLOAT, ["N", 6]), h.make_tensor_value_info("own", t.INT64, ["N"])]
    outputs = [h.make_tensor_value_info("y", t.FLOAT, ["N", 3]), h.make_tensor_value_info("same", t.INT64, ["N"])]
    graph = h.make_graph(nodes, "g", inputs, outputs, [n.from_array(np.array(a), k) for k, a in tensors.items()])
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
    artifacts.generate_artifacts(
        model, ["w[0]"], loss=artifacts.LossType.CrossEntropyLoss, artifact_directory=tmp_path, prefix="p_",
        loss_input_names=["y", "own"],
    )  # fmt: skip
    state = api.CheckpointState.load_checkpoint(tmp_path / "p_checkpoint")
    module = api.Module(tmp_path / "p_training_model.onnx", state, tmp_path / "p_eval_model.onnx")
    assert module.input_names() == ["x", "own"]
    assert len({float(module(X, Y)) for _ in range(4)}) == 4
    assert len({float(module.eval()(X, Y)) for _ in range(2)}) == 1


def test_errors(tmp_path: Path) -> None:
    """One clear error each."""
    state, module, _ = trained(tmp_path)
    net, mse = published.network(SMALL), artifacts.LossType.MSELoss
    for given, why in (
        ({"requires_grad": ["fc1.wait"]}, r"no initializer 'fc1.wait' \(did you mean"),
        ({}, "requires_grad is empty"),
        ({"requires_grad": NAMES, "frozen_params": NAMES[:1]}, "'fc1.weight' is in requires_grad and in frozen_params"),
        ({"requires_grad": NAMES, "ort_format": True}, "ort_format is not supported"),
        ({"requires_grad": NAMES, "optimizer": "AdamW"}, "optimizer must be an artifacts.OptimType, not str"),
        ({"requires_grad": NAMES, "checkpoints": ["active"], "memory_budget": "50%"}, "both define what is recomputed"),
        ({"requires_grad": NAMES, "checkpoint": ["active"]}, r"no argument 'checkpoint' \(did you mean checkpoints"),
        ({"requires_grad": "fc1.weight"}, "must be a list of names"),
    ):
        with pytest.raises(UsageError, match=why):
            artifacts.generate_artifacts(net, loss=mse, artifact_directory=tmp_path, **given)
    with pytest.raises(UsageError, match=r"loss must be an artifacts\.LossType, not function"):
        artifacts.generate_artifacts(net, NAMES, loss=rc.losses.mse, artifact_directory=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"2 inputs \(input, labels\), not 1"):
        module(X)
    with pytest.raises(UsageError, match="element type float64"):
        module(X.astype(np.float64), Y)
    with pytest.raises(UsageError, match=r"'fc2.bias' is float32\[3\]"):
        state.parameters["fc2.bias"].data = np.zeros(4, np.float32)
    with pytest.raises(KeyError, match="Parameter zz not found"):
        state.parameters["zz"]
    with pytest.raises(UsageError, match="without eval_model_uri"):
        api.Module(tmp_path / "training_model.onnx", state).eval()(X, Y)
    with pytest.raises(UsageError, match="runs on the CPU"):
        api.Module(tmp_path / "training_model.onnx", state, device="cuda")
    with pytest.raises(ModelError, match="holds the optimizer, but the model is needed"):
        api.Module(tmp_path / "optimizer_model.onnx", state)
    onnx.save(net, tmp_path / "other.onnx")
    with pytest.raises(ModelError, match="was not written by"):
        api.Module(tmp_path / "other.onnx", state)
    (tmp_path / "torn").write_bytes((tmp_path / "checkpoint").read_bytes()[:100])
    for name in ("torn", "none"):
        with pytest.raises(ModelError, match="cannot read"):
            api.CheckpointState.load_checkpoint(tmp_path / name)
