"""ONNX Runtime's side of cpu.py: training steps by onnxruntime-training-cpu 1.19.2.  Runs in an environment with it.

    pip install onnxruntime-training-cpu==1.19.2 "numpy<2" onnx==1.16.2     (Python 3.11 or older)

Its optimizers are AdamW, and SGD without momentum: a little less work than the other sides have.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import onnx
from cpu_worker import serve
from onnx import TensorProto


def without_torch() -> None:
    """The training package imports PyTorch for parts that are not used here: stand-ins do."""
    names = "nn nn.functional nn.modules nn.modules.module optim optim.optimizer utils utils.data utils.dlpack"
    names += " utils.cpp_extension onnx onnx.symbolic_helper autograd distributed cuda _utils _C"
    for name in ("torch", *(f"torch.{n}" for n in names.split())):
        module = MagicMock(__version__="2.0.0", __path__=[])
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module


def training_form(model: onnx.ModelProto) -> list[str]:
    """Normalisation by the batch's statistics; language models get one row a position.  The parameters' names."""
    graph = model.graph
    statistics = set()
    states: dict[str, np.ndarray] = {}
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            node.attribute.append(onnx.helper.make_attribute("training_mode", 1))
            node.output.extend(f"{name}_running" for name in node.input[3:5])
            statistics.update(node.input[3:5])
        if node.op_type == "LayerNormalization":  # its gradient reads mean and deviation
            node.output.extend(f"{node.output[0]}_{kind}" for kind in ("mean", "deviation"))
        if node.op_type == "LSTM":  # its gradient reads all inputs and outputs
            states |= _completed(node, graph.input[0].type.tensor_type.shape.dim[0].dim_value)
    output = graph.output[0]
    if len(output.type.tensor_type.shape.dim) == 3:
        size = output.type.tensor_type.shape.dim[2].dim_value
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, size], np.int64), "rows.shape"))
        graph.node.append(onnx.helper.make_node("Reshape", [output.name, "rows.shape"], ["rows"]))
        del graph.output[:]
        graph.output.append(onnx.helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["n", size]))
    floats = [t.name for t in graph.initializer if t.data_type == TensorProto.FLOAT]
    graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in states.items())
    return [n for n in floats if n not in statistics]


def _completed(node: onnx.NodeProto, batch: int) -> dict[str, np.ndarray]:
    """Gives an LSTM of one direction the outputs that it leaves out, and initial states, which are returned: zeros."""
    hidden = next(a.i for a in node.attribute if a.name == "hidden_size")
    names = [f"{node.output[0] or node.output[1]}_{kind}" for kind in ("initial_h", "initial_c", "y", "h", "c")]
    node.input[:] = [*node.input, "", ""][:5] + names[:2]
    node.output[:] = [name or names[2 + i] for i, name in enumerate([*node.output, "", ""][:3])]
    return {n: np.zeros((1, batch, hidden), np.float32) for n in names[:2]}


def start(spec: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], float], Callable[[], dict[str, Any]]]:
    """For `serve`."""
    without_torch()
    import onnxruntime as ort
    from onnxruntime.training import artifacts
    from onnxruntime.training.api import CheckpointState, Module, Optimizer

    folder = Path(spec["folder"])
    model = onnx.load(str(folder / "model.onnx"))
    parameters = training_form(model)
    kinds = artifacts.OptimType
    artifacts.generate_artifacts(
        model,
        requires_grad=parameters,
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=kinds.SGD if spec["optimizer"] == "momentum" else kinds.AdamW,
        artifact_directory=str(folder),
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = spec["threads"]
    state = CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = Module(str(folder / "training_model.onnx"), state, session_options=options)
    optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
    optimizer.set_learning_rate(spec["learning_rate"])
    module.train()
    arrays = np.load(spec["data"])
    feed = [arrays[f"feed/{n}"] for n in spec["feed"]]
    feed[-1] = feed[-1].reshape(-1)

    def step() -> float:
        loss = module(*feed)
        optimizer.step()
        module.lazy_reset_grad()
        return float(np.asarray(loss).reshape(-1)[0])

    return {"version": ort.__version__}, step, dict


if __name__ == "__main__":
    serve(start)
