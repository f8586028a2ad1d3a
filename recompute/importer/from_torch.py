"""PyTorch modules as programs: exported in the way that keeps every parameter, and written back after training.

PyTorch is the user's own, and imported only here.
"""

from __future__ import annotations

import contextlib
import glob
import inspect
import io
import logging
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx

from ..errors import ModelError, ModelWarning, UsageError
from ..language.program import Program
from .load import load
from .origin import FROM_TORCH, READ, SIGNATURE, source_operator

__all__ = ["from_torch", "write_back"]

#: PyTorch's operators for batch normalisation that trains, from which BatchNormalization nodes come
_TRAINING_NORMS = (
    "aten._native_batch_norm_legit_functional",
    "aten._native_batch_norm_legit.",
    "aten.native_batch_norm",
)
_EXPORTERS = ("auto", "dynamo", "torchscript")
#: under what a module lies that is exported together with its loss
_INNER = "model"


def from_torch(
    module: Any,
    example_inputs: Any,
    *,
    loss: Callable[..., Any] | None = None,
    targets: Sequence[Any] = (),
    trainable: Sequence[str] | None = None,
    exporter: str = "auto",
    dynamic_batch: bool = True,
    **options: Any,
) -> Program:
    """A PyTorch module as a program that trains as the module would.

    `example_inputs`: a tensor, a tuple of them, or a dict by the names of `forward`'s arguments; their shapes are the
    program's.  `loss`: a function `loss(output, *targets)` of PyTorch, whose value becomes the output "loss";
    `targets`: examples of what it takes.  `trainable`: names or globs (default: the parameters that require
    gradients).  Every submodule trains or not as its `training` says: dropout and batch normalisation of those in eval
    mode stay off.  Values that are detached, or computed under `torch.no_grad()`, pass no gradient on.

    `dynamic_batch`: the exported model takes any batch, where PyTorch can trace it so: `program.evaluate` and
    `rc.export_trained` need it for other batches than the example's (of more than one sample).

    `exporter`: "dynamo" (without optimisation, which would merge, fold and rename parameters), "torchscript", or
    "auto": the first that can.  `options`: those of `rc.load`.

    The program's parameters have the module's names; of tied ones the program has one, and aliases.  `program.source`
    is the exported model.  ModelError where the module cannot be exported, with PyTorch's reason.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"from_torch takes a torch.nn.Module, not {type(module).__name__}")
    if exporter not in _EXPORTERS:
        raise UsageError(f"exporter must be one of {', '.join(map(repr, _EXPORTERS))}, not {exporter!r}")
    args, kwargs = _arguments(example_inputs)
    call = _Call(module, args, kwargs, _input_names(module, args, kwargs, targets), None, dynamic_batch)
    if loss is not None:
        whole = _with_loss(module, loss, len(args), list(kwargs))
        call = _Call(whole, (*args, *kwargs.values(), *targets), {}, call.inputs, ["loss"], dynamic_batch)
    error: ModelError | None = None
    for proto in _exported(call, exporter):
        if loss is not None:
            _without_prefix(proto, f"{_INNER}.")
        try:
            return _loaded(proto, module, call, trainable, options)
        except ModelError as e:  # of any batch there may be shapes that are computed from data
            error = error or e
    assert error is not None
    raise error


def _loaded(
    proto: onnx.ModelProto, module: Any, call: _Call, trainable: Sequence[str] | None, options: dict[str, Any]
) -> Program:
    """The program of an exported model."""
    _mark_training(proto)
    names = _initializers(module, proto)
    if trainable is None:
        trainable = [glob.escape(names[n]) for n, p in module.named_parameters() if p.requires_grad and n in names]
    program = load(proto, batch=call.batch(), trainable=trainable, mode="file", **options)
    program.aliases.update({other: n for other, n in names.items() if other != n and n in program.data})
    return program


def write_back(program: Program, module: Any) -> int:
    """Copies trained parameters, and buffers such as running statistics, into the module; returns how many tensors.

    Tensors keep their device and element type.  UsageError where a shape differs, or nothing of the program is the
    module's.
    """
    tensors = _tensors(module)
    arrays = {}
    for name, tensor in tensors.items():
        own = str(program.aliases.get(name, name))
        if own in program.data:
            arrays[name] = np.asarray(program.data[own])
            if tuple(arrays[name].shape) != tuple(tensor.shape):
                raise UsageError(
                    f"'{name}' has shape {list(tensor.shape)} in the module, {list(arrays[name].shape)} in the "
                    "program; nothing was written"
                )
    if not arrays:
        raise UsageError("no parameter or buffer of the module is in the program: was it made by from_torch?")
    for name, array in arrays.items():
        if array.dtype.kind not in "biuf" or array.dtype.itemsize == 2:  # bfloat16 is not NumPy's own
            array = array.astype(np.float32)
        tensors[name].data.copy_(tensors[name].new_tensor(array, device="cpu"))
    _count_batches(program, tensors)
    return len(arrays)


#: steps of a program that are counted in modules already
_COUNTED: weakref.WeakKeyDictionary[Program, int] = weakref.WeakKeyDictionary()


def _count_batches(program: Program, tensors: Mapping[str, Any]) -> None:
    """Adds the steps since the last time to `num_batches_tracked` of the normalisations that follow the batches."""
    if "step" not in program.data:
        return
    steps = int(program.data["step"])
    new = steps - _COUNTED.get(program, 0)
    _COUNTED[program] = steps
    updated = {v.name for op in program.logical.operators if op.op.updates for v in op.writes()}
    for name, tensor in tensors.items():
        mean = name.removesuffix("num_batches_tracked") + "running_mean"
        if name.endswith("num_batches_tracked") and program.aliases.get(mean, mean) in updated:
            tensor.data.add_(new)


# -- exporting --------------------------------------------------------------------------------------------------------


def _tensors(module: Any) -> dict[str, Any]:
    """Parameters and buffers by name; tied ones under each of their names."""
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


def _arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)), {}


def _input_names(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Sequence[Any]
) -> list[str] | None:
    """Names of the program's inputs: those of `forward`'s arguments, then "target"; None where one is no tensor."""
    if not all(hasattr(v, "shape") for v in (*args, *kwargs.values(), *targets)):
        return None
    parameters = list(inspect.signature(module.forward).parameters.values())
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        named += ["input"] if len(args) == 1 else [f"input_{i}" for i in range(len(args))]
    if len(args) > len(named):
        return None
    last = ["target"] if len(targets) == 1 else [f"target_{i}" for i in range(len(targets))]
    found = [*named[: len(args)], *kwargs, *last]
    return found if len(set(found)) == len(found) else None


def _with_loss(module: Any, loss: Callable[..., Any], count: int, names: list[str]) -> Any:
    """The module with its loss as first output; arguments: the module's, by position and by name, then the targets."""
    import torch

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(_INNER, module)
            self.training = module.training

        def forward(self, *values: Any) -> Any:
            given, targets = values[: count + len(names)], values[count + len(names) :]
            output = getattr(self, _INNER)(*given[:count], **dict(zip(names, given[count:], strict=True)))
            return {"loss": loss(output, *targets), "output": output}

    return WithLoss()


@dataclass(frozen=True)
class _Call:
    """A module with example arguments; names of the inputs, and of the first outputs, where they are known."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[str] | None
    outputs: list[str] | None
    dynamic: bool

    def tensors(self) -> list[Any]:
        """All example tensors, in order."""
        import torch
        from torch.utils import _pytree as trees

        return [x for x in trees.tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]

    def batch(self) -> int | None:
        """The first dimension of the examples."""
        return next((int(x.shape[0]) for x in self.tensors() if x.ndim), None)


def _exported(call: _Call, exporter: str) -> Iterator[onnx.ModelProto]:
    """The module by the first exporter that can: for any batch if possible, then for the example's."""
    failed: list[str] = []
    for name, export in (("dynamo", _by_dynamo), ("torchscript", _by_torchscript)):
        if exporter not in ("auto", name):
            continue
        error: Exception | None = None
        for one in [call] * (call.dynamic and (call.batch() or 0) > 1) + [replace(call, dynamic=False)]:
            try:  # a batch of 1 is a constant to exporters
                with _quiet():
                    proto = export(one)
            except Exception as e:
                error = e
                continue
            _tell(failed)
            error = None
            yield proto
        if error is None:
            return
        failed.append(f"{name}: {type(error).__name__}: {_first_lines(str(error))}")
    raise ModelError("PyTorch cannot export this module:\n  " + "\n  ".join(failed))


def _tell(failed: list[str]) -> None:
    """Warns that only the second exporter could do it."""
    if failed:
        warnings.warn(
            f"PyTorch's dynamo exporter cannot export this module ({failed[0]}); TorchScript's did: what is "
            "detached there passes gradients on (name it in no_grad_set)",
            ModelWarning,
            stacklevel=4,
        )


def _by_dynamo(call: _Call) -> onnx.ModelProto:
    import torch

    shapes = torch.export.ShapesCollection()
    for x in call.tensors():
        if x.ndim and x.shape[0] == call.batch():
            shapes[x] = {0: torch.export.Dim.AUTO}
    open_shapes = shapes if call.dynamic else None
    program = torch.export.export(call.module, call.args, call.kwargs, dynamic_shapes=open_shapes, strict=False)
    _detach_no_grad(program.graph_module)
    outputs = _output_names(program)
    found = torch.onnx.export(
        program, dynamo=True, optimize=False, verbose=False, input_names=call.inputs, output_names=outputs
    )
    if found is None:
        raise RuntimeError("torch.onnx.export gave nothing")
    proto = found.model_proto
    _rename(proto, _captured(program, call.module))
    return proto


def _captured(program: Any, module: Any) -> dict[str, str]:
    """Constants of an exported program that are the module's own tensors, with their names there: frameworks on top of
    PyTorch (Keras) pass them around."""
    own = {t.data_ptr(): n for n, t in _tensors(module).items() if t.numel()}
    constants = {n: t for n, t in program.constants.items() if hasattr(t, "data_ptr")}
    found = {n: own[t.data_ptr()] for n, t in constants.items() if t.data_ptr() in own}
    return {**found, **{n.rpartition(".")[2]: name for n, name in found.items()}}  # files have the last part only


def _by_torchscript(call: _Call) -> onnx.ModelProto:
    import torch

    file = io.BytesIO()
    before = {n: b.clone() for n, b in call.module.named_buffers()}
    axes = None
    if call.dynamic:
        if call.inputs is None:
            raise ValueError("inputs without names have no dynamic axes")
        inputs = zip(call.inputs, call.tensors(), strict=True)
        axes = {n: {0: "batch"} for n, x in inputs if x.ndim and x.shape[0] == call.batch()}
    torch.onnx.export(
        call.module, call.args, file, kwargs=call.kwargs or None, dynamo=False, do_constant_folding=False,
        training=torch.onnx.TrainingMode.PRESERVE, opset_version=20, input_names=call.inputs, output_names=call.outputs,
        dynamic_axes=axes,
    )  # fmt: skip
    for name, buffer in call.module.named_buffers():  # the module ran once
        buffer.data.copy_(before[name])
    proto = onnx.ModelProto()
    proto.ParseFromString(file.getvalue())
    for t in proto.graph.initializer:
        if t.name in before and t.HasField("raw_data") and tuple(t.dims) == tuple(before[t.name].shape):
            start = before[t.name].detach().cpu().contiguous()
            t.raw_data = start.flatten().view(torch.uint8).numpy().tobytes()
    return proto


def _detach_no_grad(graph_module: Any) -> None:
    """Detaches what comes out of regions under `torch.no_grad()`, which exporters inline without a trace."""
    import torch

    graph = graph_module.graph
    for node in list(graph.nodes):
        if "set_grad_enabled" not in str(node.target) or not node.args or node.args[0] is not False:
            continue
        for user in list(node.users):
            if user.target is operator.getitem:
                with graph.inserting_after(user):
                    cut = graph.call_function(torch.ops.aten.detach.default, (user,))
                cut.meta = dict(user.meta)
                user.replace_all_uses_with(cut, delete_user_cb=lambda n, cut=cut: n is not cut)
    graph_module.recompile()


def _output_names(program: Any) -> list[str] | None:
    """Names of the outputs, where the module returns a dict or an object with fields: "loss", "logits"."""
    from torch.utils import _pytree as trees

    spec = program.call_spec.out_spec
    paths = [p for p, _ in trees.tree_flatten_with_path(trees.tree_unflatten(list(range(spec.num_leaves)), spec))[0]]
    kinds = [str(o.kind) for o in program.graph_signature.output_specs if "USER_OUTPUT" in str(o.kind)]
    taken = {i.arg.name for i in program.graph_signature.input_specs}
    names = ["_".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in p) for p in paths]
    named = [n if n and not n.isdigit() and n not in taken else f"output_{n}" if n else "output" for n in names]
    return named if len(kinds) == len(named) and len(set(named)) == len(named) else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' own remarks."""
    loggers = [logging.getLogger(n) for n in ("torch.onnx", "torch.export", "onnxscript", "torch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _first_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:3])[:400]


# -- the exported model -----------------------------------------------------------------------------------------------


def _without_prefix(proto: onnx.ModelProto, prefix: str) -> None:
    """Names of tensors as in the module itself."""
    for said in proto.graph.metadata_props:
        if said.key == SIGNATURE:
            said.value = said.value.replace(f"target='{prefix}", "target='")
    names = [t.name for t in proto.graph.initializer if t.name.startswith(prefix)]
    _rename(proto, {n: n.removeprefix(prefix) for n in names})


def _rename(proto: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Gives initializers other names."""
    if not names:
        return
    for t in proto.graph.initializer:
        t.name = names.get(t.name, t.name)
    for v in proto.graph.value_info:
        v.name = names.get(v.name, v.name)
    for node in proto.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = names.get(name, name)


def _mark_training(proto: onnx.ModelProto) -> None:
    """Says at each batch normalisation whether it trains, and that the model is PyTorch's (see FROM_TORCH)."""
    proto.metadata_props.add(key=FROM_TORCH, value="1")
    _name_dimensions(proto)
    for k, node in enumerate(proto.graph.node):
        read = [p for p in node.metadata_props if p.key in READ]  # the rest is long, and has paths of this machine
        del node.metadata_props[:]
        node.metadata_props.extend(read)
        if node.op_type == "BatchNormalization" and source_operator(node).startswith(_TRAINING_NORMS):
            kept = [a for a in node.attribute if a.name != "training_mode"]
            del node.attribute[:]
            node.attribute.extend([*kept, onnx.helper.make_attribute("training_mode", 1)])
            for what in ("mean", "var")[len(node.output) - 1 :]:
                node.output.append(f"batch_norm_{k}_running_{what}")


def _name_dimensions(proto: onnx.ModelProto) -> None:
    """Calls the dynamic first dimension "batch"; dimensions that turned out to be fixed are numbers."""
    first = next((d.dim_param for i in proto.graph.input for d in i.type.tensor_type.shape.dim[:1] if d.dim_param), "")
    for v in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for d in v.type.tensor_type.shape.dim:
            if d.dim_param.isdecimal():
                d.dim_value = int(d.dim_param)
            elif d.dim_param and d.dim_param == first:
                d.dim_param = "batch"


def _initializers(module: Any, proto: onnx.ModelProto) -> dict[str, str]:
    """The module's name of each parameter and buffer → the initializer's; tied ones have one initializer."""
    there = {t.name for t in proto.graph.initializer}
    own: dict[int, str] = {}
    tensors = _tensors(module)
    for name, tensor in tensors.items():
        if name in there:
            own.setdefault(id(tensor), name)
    return {name: own[id(tensor)] for name, tensor in tensors.items() if id(tensor) in own}
