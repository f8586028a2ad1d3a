"""Makes walkthrough.json: losses of ONNX Runtime training 1.19.2.

python make_walkthrough.py   in an environment with onnxruntime-training==1.19.2 onnx==1.16.2 "numpy<2" (and torch)

The functions take the modules `artifacts` and `api`, so that the tests run the same calls with this package's.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).resolve().parent
#: name → loss, optimizer, steps in which gradients are accumulated before each update
CASES = {
    "cross entropy, AdamW": ("CrossEntropyLoss", "AdamW", 1),
    "cross entropy, AdamW, two batches a step": ("CrossEntropyLoss", "AdamW", 2),
    "cross entropy, SGD": ("CrossEntropyLoss", "SGD", 1),
    "squares, AdamW": ("MSELoss", "AdamW", 1),
    "logits, SGD": ("BCEWithLogitsLoss", "SGD", 1),
    "absolute, SGD": ("L1Loss", "SGD", 1),
}


def network(sizes: tuple[int, int, int] = (784, 500, 10)) -> onnx.ModelProto:
    """The walkthrough's network: two linear layers and a Relu, weights drawn as PyTorch does."""
    g = np.random.default_rng(1)
    tensors = []
    for layer, (a, b) in enumerate(itertools.pairwise(sizes), 1):
        for name, shape in (("weight", (b, a)), ("bias", (b,))):
            values = (g.random(shape) * 2 - 1) / np.sqrt(a)
            tensors.append(numpy_helper.from_array(values.astype(np.float32), f"fc{layer}.{name}"))
    nodes = [
        helper.make_node("Gemm", ["input", "fc1.weight", "fc1.bias"], ["hidden"], transB=1),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("Gemm", ["active", "fc2.weight", "fc2.bias"], ["output"], transB=1),
    ]
    x, y = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch_size", s])
        for n, s in (("input", sizes[0]), ("output", sizes[2]))
    )
    graph = helper.make_graph(nodes, "mnist", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


def batches(count: int, loss: str, size: int = 64) -> list[tuple[np.ndarray, np.ndarray]]:
    """Images of ten kinds with noise, and labels; the last batch is smaller."""
    g = np.random.default_rng(2)
    kinds = g.random((10, 784))
    found = []
    for i in range(count):
        label = g.integers(0, 10, size if i < count - 1 else size // 2)
        x = (kinds[label] + g.random((len(label), 784)) * 0.5).astype(np.float32)
        target = label if loss == "CrossEntropyLoss" else np.eye(10, dtype=np.float32)[label]
        found.append((x, target))
    return found


def walkthrough(artifacts: Any, api: Any, folder: Path, case: str, **options: Any) -> list[float]:
    """The published loop: losses of 10 training batches, then of one batch in evaluation mode."""
    loss, optim, every = CASES[case]
    artifacts.generate_artifacts(
        network(),
        optimizer=artifacts.OptimType[optim],
        loss=artifacts.LossType[loss],
        requires_grad=["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"],
        frozen_params=[],
        artifact_directory=str(folder),
        additional_output_names=["output"],
        **options,
    )
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    model = api.Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), model)
    model.train()
    losses = []
    for i, (data, target) in enumerate(batches(10, loss), 1):
        train_loss, _ = model(data, target)
        if i % every == 0:
            optimizer.step()
            model.lazy_reset_grad()
        losses.append(float(train_loss))
    model.eval()
    test_loss, logits = model(*batches(1, loss)[0])
    assert logits.shape == (32, 10)
    model.export_model_for_inferencing(str(folder / "inference_model.onnx"), ["output"])
    return [*losses, float(test_loss)]


def main() -> None:
    from onnxruntime.training import api, artifacts

    found = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found[case] = walkthrough(artifacts, api, Path(folder), case)
    (HERE / "walkthrough.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
