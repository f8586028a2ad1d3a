"""`onnxruntime.training.artifacts`: writes the files that `Module`, `Optimizer` and `CheckpointState` read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import onnx
from onnx import TensorProto, helper

from ...budgets import as_budget
from ...errors import UsageError, nearest
from ...exporter.compiled import save_model
from ...exporter.function_builder import value_info
from ...importer.graphs import without_fields
from ...importer.model import read_model
from ...importer.tensors import tensor_array
from ...language.types import TensorType
from ...support.files import make_folder, together
from .checkpoint import CheckpointState
from .files import described

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LossType(Enum):
    """The loss that is appended to the model."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """The optimizer, with ONNX Runtime's defaults: AdamW has betas .9 and .999, epsilon 1e-6 and no weight decay."""

    AdamW = 1
    SGD = 2


class Further(TypedDict, total=False):
    """Keywords of `generate_artifacts` that few need: `checkpoints` and `memory_budget` are not ONNX Runtime's."""

    checkpoints: Sequence[str] | None
    memory_budget: str | int | None
    ort_format: bool
    custom_op_library: Any
    nominal_checkpoint: bool


def generate_artifacts(
    model: onnx.ModelProto | str | os.PathLike[str],
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | None = None,
    optimizer: OptimType | None = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    *,
    additional_output_names: Sequence[str] | None = None,
    loss_input_names: Sequence[str] | None = None,
    **further: Unpack[Further],
) -> None:
    """Writes `training_model.onnx`, `eval_model.onnx`, `checkpoint` and, with an optimizer, `optimizer_model.onnx`.

    `requires_grad`: the initializers that are trained; `frozen_params`: others that the checkpoint holds (the running
    statistics of batch normalisations always are among them); further initializers stay constants.  `loss` reads the
    model's first output, or `loss_input_names[0]`, and labels in a new input (`labels` for class indices, else
    `target`), or `loss_input_names[1]`; without it the first output is the loss.  `additional_output_names` follow the
    loss among the outputs.

    In addition to ONNX Runtime's: `checkpoints`, names or globs of values to keep, or `memory_budget` ("2GiB", "60%"),
    for which a planner chooses: the rest is recomputed in the backward pass.

    UsageError for names that the model does not have, and for what is not supported: `onnxblock` losses and optimizers,
    `ort_format`, `custom_op_library`, `nominal_checkpoint`.
    """
    _supported(loss, optimizer, further)
    source = read_model(model if isinstance(model, onnx.ModelProto) else os.fspath(model))
    trained, frozen = _names(source, requires_grad, frozen_params)
    description = {
        "kind": "model",
        "loss": loss.name if loss is not None else None,
        "loss_inputs": _texts("loss_input_names", loss_input_names),
        "outputs": _texts("additional_output_names", additional_output_names),
        "trained": trained,
        "frozen": frozen,
        **_recomputation(further),
    }
    folder = Path.cwd() if artifact_directory is None else Path(os.fsdecode(artifact_directory))
    tensors = {t.name: t for t in source.graph.initializer}
    state = CheckpointState({n: np.array(tensor_array(tensors[n])) for n in (*trained, *frozen)}, trained)
    skeleton = described(_without_weights(source, {*trained, *frozen}), description)
    with together():
        make_folder(folder)
        save_model(skeleton, folder / f"{prefix}training_model.onnx")
        save_model(skeleton, folder / f"{prefix}eval_model.onnx")
        CheckpointState.save_checkpoint(state, folder / f"{prefix}checkpoint")
        if optimizer is not None:
            save_model(_optimizer(optimizer), folder / f"{prefix}optimizer_model.onnx")


def _recomputation(further: Further) -> dict[str, Any]:
    """The checkpoints and the memory budget in `further`.  UsageError for both at once."""
    checkpoints, budget = further.get("checkpoints"), further.get("memory_budget")
    if checkpoints is not None and budget is not None:
        raise UsageError("give checkpoints or a memory_budget: both define what is recomputed")
    if budget is not None:
        as_budget(budget)
    names = None if checkpoints is None else _texts("checkpoints", checkpoints)
    return {"checkpoints": names, "memory_budget": budget}


def _supported(loss: Any, optimizer: Any, further: Further) -> None:
    """UsageError for what is not supported."""
    for name in further:
        if name not in Further.__annotations__:
            raise UsageError(f"generate_artifacts has no argument '{name}'{nearest(name, Further.__annotations__)}")
    if loss is not None and not isinstance(loss, LossType):
        raise UsageError(
            f"loss must be an artifacts.LossType, not {type(loss).__name__}: for another loss let the model compute it "
            "as its first output, and give no loss"
        )
    if optimizer is not None and not isinstance(optimizer, OptimType):
        raise UsageError(
            f"optimizer must be an artifacts.OptimType, not {type(optimizer).__name__}: recompute.optimizers has others"
        )
    for name in ("ort_format", "custom_op_library", "nominal_checkpoint"):
        if further.get(name):
            raise UsageError(f"{name} is not supported: it is for ONNX Runtime's own format")


def _texts(what: str, names: Sequence[str] | None) -> list[str]:
    texts = list(names or ())
    if isinstance(names, str) or not all(isinstance(n, str) for n in texts):
        raise UsageError(f"{what} must be a list of names, not {names!r}")
    return texts


def _names(
    model: onnx.ModelProto, requires_grad: Sequence[str] | None, frozen_params: Sequence[str] | None
) -> tuple[list[str], list[str]]:
    """The initializers that are trained, and the others of the checkpoint.  UsageError for names that do not fit."""
    trained, frozen = _texts("requires_grad", requires_grad), _texts("frozen_params", frozen_params)
    tensors = {t.name: t for t in model.graph.initializer}
    for name in (*trained, *frozen):
        if name not in tensors:
            raise UsageError(f"the model has no initializer '{name}'{nearest(name, tensors)}")
    for name in trained:
        if not TensorType.of(tensor_array(tensors[name])).is_float:
            raise UsageError(f"requires_grad: '{name}' holds no floating-point numbers")
    both = sorted(set(trained) & set(frozen))
    if both:
        raise UsageError(f"'{both[0]}' is in requires_grad and in frozen_params: give it once")
    if not trained:
        raise UsageError("requires_grad is empty: name the initializers to train")
    statistics = [i for n in model.graph.node if n.op_type == "BatchNormalization" for i in n.input[3:5]]
    more = [n for n in statistics if n in tensors and n not in trained]
    return list(dict.fromkeys(trained)), list(dict.fromkeys([*frozen, *more]))


def _without_weights(model: onnx.ModelProto, weights: set[str]) -> onnx.ModelProto:
    """The model in which the weights are inputs."""
    light = without_fields(model, "graph")
    light.graph.CopyFrom(without_fields(model.graph, "initializer"))
    declared = {i.name for i in light.graph.input}
    for t in model.graph.initializer:
        if t.name not in weights:
            light.graph.initializer.append(t)
        elif t.name not in declared:
            light.graph.input.append(value_info(t.name, TensorType.of(tensor_array(t))))
    return light


def _optimizer(kind: OptimType) -> onnx.ModelProto:
    rate = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in ("learning_rate", "used_rate")]
    node = helper.make_node("Identity", ["learning_rate"], ["used_rate"])
    graph = helper.make_graph([node], kind.name, rate[:1], rate[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return described(model, {"kind": "optimizer", "name": kind.name})
