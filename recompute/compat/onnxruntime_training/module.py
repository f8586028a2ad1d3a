"""`Module`: losses and accumulated gradients in training mode, losses alone in evaluation mode."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import numpy as np
import onnx

from ...budgets import as_budget
from ...errors import ModelError, UsageError
from ...exporter.compiled import save_model
from ...exporter.function_builder import fill_tensor
from ...exporter.inference import in_inference, restricted
from ...importer.graphs import without_fields
from ...importer.load import load
from ...language.program import Program, Variable
from ...language.types import TensorType, dtype_from_onnx
from ...passes import Target
from ...places import as_place
from ...planning.request import request
from ...planning.step import plan_step, target_of
from ...runtime import Executor
from ...training import losses
from ...training.optimizers import SGD, RecomputeOptimizer
from .checkpoint import CheckpointState
from .files import read_artifact

#: compiled programs that are kept, one for each combination of the inputs' shapes and mode
_KEPT = 4
_LOSSES: dict[str, Any] = {
    "MSELoss": losses.mse,
    "CrossEntropyLoss": losses.cross_entropy,
    "BCEWithLogitsLoss": losses.bce_with_logits,
    "L1Loss": losses.l1,
}


class OrtValue:
    """An array with the methods of ONNX Runtime's OrtValue that are used here."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def numpy(self) -> np.ndarray:
        """The array."""
        return self._array

    def shape(self) -> list[int]:
        """Its dimensions."""
        return list(self._array.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._array if dtype is None else self._array.astype(dtype)


class Module:
    """A model that trains: `module(*inputs)` returns the loss and further outputs.

    In training mode a call also adds to the gradients of the trained weights, until `lazy_reset_grad` and the next
    call.  Programs are compiled for the shapes of the inputs, at their first use.
    """

    def __init__(
        self,
        train_model_uri: str | os.PathLike[str],
        state: CheckpointState,
        eval_model_uri: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        session_options: Any = None,
    ) -> None:
        if device != "cpu":
            as_place(device)
            raise UsageError(f"device '{device}': this interface runs on the CPU; rc.Executor(rc.CUDAPlace()) runs a "
                             "merged training step on a GPU (docs/gpu.md)")  # fmt: skip
        self.training, self.state = True, state
        self._models = {True: read_artifact(train_model_uri, "model")}
        if eval_model_uri is not None:
            self._models[False] = read_artifact(eval_model_uri, "model")
        for model, told in self._models.values():
            _check(model, told, state)
        self._executor = Executor()
        self._programs: OrderedDict[Any, tuple[Program, list[str], list[str]]] = OrderedDict()
        self._version, self._calls, self._reset = state.version, 0, True

    def train(self, mode: bool = True) -> Module:
        """Sets training mode; returns self."""
        self.training = mode
        return self

    def eval(self) -> Module:
        """Sets evaluation mode; returns self."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Makes the next training step begin with new gradients."""
        self._reset = True

    def __call__(self, *user_inputs: Any) -> Any:
        """One step: the outputs, one array or a tuple.  Inputs are arrays, or OrtValues, which also come out then."""
        plain = any(isinstance(x, np.ndarray) for x in user_inputs) or not user_inputs
        arrays = [np.asarray(x.numpy() if hasattr(x, "numpy") else x) for x in user_inputs]
        names = self.input_names()
        if len(arrays) != len(names):
            raise UsageError(f"the model has {len(names)} inputs ({', '.join(names)}), not {len(arrays)}")
        feed = dict(zip(names, arrays, strict=True))
        program, outputs, gradients = self._program(feed)
        if self.training:
            made = self._train(program, feed, outputs, gradients)
        else:
            made = program.evaluate(feed, outputs)
        results = made if plain else [OrtValue(a) for a in made]
        return results[0] if len(results) == 1 else tuple(results)

    def _train(self, program: Program, feed: dict[str, Any], outputs: list[str], gradients: list[str]) -> list[Any]:
        for v in program.block.state:  # the counter of steps, from which random operators draw
            program.data[v.name][...] = self._calls
        results = self._executor.run(program, feed, [*outputs, *gradients])
        self._calls += 1
        fresh = zip([p for p, _ in program.gradients], results[len(outputs) :], strict=True)
        if self._reset:
            self.state.gradients = dict(fresh)
        else:
            for name, g in fresh:
                self.state.gradients[name] += g
        self._reset = False
        return results[: len(outputs)]

    # -- programs -------------------------------------------------------------------------------------------------

    def _artifact(self) -> tuple[onnx.ModelProto, dict[str, Any]]:
        """The model and description of the present mode."""
        if self.training not in self._models:
            raise UsageError("this Module was made without eval_model_uri, which evaluation and export need")
        return self._models[self.training]

    def _program(self, feed: dict[str, np.ndarray]) -> tuple[Program, list[str], list[str]]:
        """The program for the shapes of what is fed, its outputs and gradients."""
        if self._version != self.state.version:
            self._programs.clear()
            self._version = self.state.version
        key = (self.training, tuple((n, a.shape) for n, a in feed.items()))
        if key not in self._programs:
            self._programs[key] = self._made(feed)
            while len(self._programs) > _KEPT:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]

    def _made(self, feed: dict[str, np.ndarray]) -> tuple[Program, list[str], list[str]]:
        model, told = self._artifact()
        inputs = self._model_inputs()
        program = load(_filled(model, self.state.arrays), input_shapes={n: feed[n].shape for n in inputs},
                       trainable=told["trained"])  # fmt: skip
        loss, outputs = _with_loss(program, told)
        for v in (*program.block.parameters, *program.block.buffers):
            if v.name in self.state.arrays:
                program.data[v.name] = self.state.arrays[v.name]
        for v in program.block.state:
            program.data[v.name] = np.array(program.data[v.name])
        if not self.training:
            return program, outputs, []
        optimizer: Any = SGD()
        if told["checkpoints"] is not None:
            optimizer = RecomputeOptimizer(optimizer).set_checkpoints(told["checkpoints"])
        gradients = [g.name for _, g in optimizer.backward(loss)]
        block = program.block
        kept = tuple(dict.fromkeys([*block.outputs, *outputs, *gradients]))
        program.block = block.with_operators(block.operators, outputs=kept)
        if told["memory_budget"] is not None:
            wanted = request(as_budget(told["memory_budget"]))
            assert wanted is not None
            plan_step(program, wanted, target_of(Target(self._executor.place)), apart=True)
        return program, outputs, gradients

    def _model_inputs(self) -> list[str]:
        model, told = self._artifact()
        weights = {*told["trained"], *told["frozen"], *(t.name for t in model.graph.initializer)}
        return [i.name for i in model.graph.input if i.name not in weights]

    # -- names, parameters, export --------------------------------------------------------------------------------

    def input_names(self) -> list[str]:
        """The inputs in the order of a call: the model's, then the labels."""
        _, told = self._artifact()
        names = self._model_inputs()
        if told["loss"] is not None and len(told["loss_inputs"]) < 2:
            names.append(_label(told))
        return names

    def output_names(self) -> list[str]:
        """The outputs in the order of a call's result: the loss first."""
        model, told = self._artifact()
        first = [o.name for o in model.graph.output] if told["loss"] is None else [_loss_name(model)]
        return list(dict.fromkeys([*first, *told["outputs"]]))

    def _chosen(self, trainable_only: bool) -> list[str]:
        """Weights in the order of the graph's inputs."""
        wanted = self.state.trained if trainable_only else self.state.arrays
        return [i.name for i in self._models[True][0].graph.input if i.name in wanted]

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """The number of elements of the weights."""
        return sum(self.state.arrays[n].size for n in self._chosen(trainable_only))

    def get_contiguous_parameters(self, trainable_only: bool = False) -> OrtValue:
        """A copy of the weights in one vector, in the order of the graph."""
        return OrtValue(np.concatenate([self.state.arrays[n].reshape(-1) for n in self._chosen(trainable_only)]))

    def copy_buffer_to_parameters(self, buffer: Any, trainable_only: bool = True) -> None:
        """Copies a vector of that form to the weights.  UsageError for another size."""
        vector = np.asarray(buffer.numpy() if hasattr(buffer, "numpy") else buffer)
        size = self.get_parameters_size(trainable_only)
        if vector.shape != (size,):
            raise UsageError(f"the buffer has shape {list(vector.shape)}, but the weights are [{size}]")
        at = 0
        for name in self._chosen(trainable_only):
            there = self.state.arrays[name]
            self.state.put(name, vector[at : at + there.size].reshape(there.shape).astype(there.dtype))
            at += there.size

    def export_model_for_inferencing(
        self, inference_model_uri: str | os.PathLike[str], graph_output_names: list[str]
    ) -> None:
        """Writes the model with the trained weights, in inference mode, with these outputs."""
        if False not in self._models:
            raise UsageError("this Module was made without eval_model_uri, which evaluation and export need")
        model, _ = self._models[False]
        exported = without_fields(_filled(model, self.state.arrays), "metadata_props")
        in_inference(exported.graph)
        restricted(exported.graph, list(graph_output_names))
        save_model(exported, os.fspath(inference_model_uri))


def _check(model: onnx.ModelProto, told: dict[str, Any], state: CheckpointState) -> None:
    """UsageError where a model and a checkpoint do not fit each other; ModelError where a model is damaged."""
    weights = {*told["trained"], *told["frozen"]}
    if weights != set(state.arrays) or set(told["trained"]) != set(state.trained):
        odd = weights ^ set(state.arrays) or set(told["trained"]) ^ set(state.trained)
        raise UsageError(f"the checkpoint is not of this model: '{min(odd)}' is in one of them only")
    inputs = {i.name: i.type.tensor_type for i in model.graph.input}
    for name in sorted(weights):
        if name not in inputs:
            raise ModelError(f"the model is damaged: its weight '{name}' is none of its inputs")
        shape = [d.dim_value for d in inputs[name].shape.dim]
        wanted, actual = dtype_from_onnx(inputs[name].elem_type), TensorType.of(state.arrays[name])
        if [wanted, *shape] != [actual.dtype, *actual.shape]:
            raise UsageError(
                f"the checkpoint is not of this model: '{name}' is {actual} there, but {wanted or 'no tensor'}{shape} "
                "in the model"
            )
    if not model.graph.output:
        raise ModelError("the model is damaged: it has no output")


def _filled(model: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> onnx.ModelProto:
    filled = without_fields(model, "graph")
    filled.graph.CopyFrom(without_fields(model.graph, "input"))
    filled.graph.input.extend(i for i in model.graph.input if i.name not in arrays or model.ir_version < 4)
    for name, array in arrays.items():
        fill_tensor(filled.graph.initializer.add(), name, array)
    return filled


def _label(told: dict[str, Any]) -> str:
    return "labels" if told["loss"] == "CrossEntropyLoss" else "target"


def _loss_name(model: onnx.ModelProto) -> str:
    written = {o for n in model.graph.node for o in n.output}.union(i.name for i in model.graph.input)
    return "loss" if "loss" not in written else "onnx::loss"


def _with_loss(program: Program, told: dict[str, Any]) -> tuple[Variable, list[str]]:
    """Appends the loss; returns it, and the names of the outputs."""
    if told["loss"] is None:
        names = [v.name for v in program.outputs]
        return program.outputs[0], list(dict.fromkeys([*names, *told["outputs"]]))
    score, *label = told["loss_inputs"] or [program.outputs[0].name]
    options: dict[str, Any] = {"ignore_index": None} if told["loss"] == "CrossEntropyLoss" else {}
    assert program.source is not None
    name = _loss_name(program.source)
    loss = _LOSSES[told["loss"]](
        program[score], label[0] if label else None, name=name, label_name=_label(told), **options
    )
    return loss, [loss.name, *told["outputs"]]
