"""Modules as ONNX models, by the exporter that keeps most."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import operator
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import onnx
import torch
from torch.export import ExportedProgram
from torch.nn import Module
from torch.onnx import ONNXProgram
from torch.utils import _pytree as trees

from ..errors import ModelError, ModelWarning
from ..importer.dropout import with_dropout
from ..importer.mapped import LARGE_BYTES, with_arrays
from ..importer.state import BUFFERS
from ..support.memory import Contents
from .call import INNER, Call, elements, tensors_of, with_buffers
from .causes import dropped_arguments
from .functions import kept_gradients
from .lowering import lowered, plain_attention, traceable
from .names import rename, without_prefix

#: the name of an output that is what a buffer holds afterwards
_BUFFER = "recompute.buffer."


@dataclass
class Exported:
    """An exported model, the contents to which it refers, and what in the module may not have survived the export."""

    proto: onnx.ModelProto
    contents: list[Contents] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)

    def without_dropout(self) -> onnx.ModelProto | None:
        """The model with dropout switched off; None where it has none."""
        model = with_dropout(self.proto)
        nodes = [n for n in model.graph.node if n.op_type == "Dropout"]
        if not nodes:
            return None
        if model is self.proto:
            model = onnx.ModelProto()
            model.CopyFrom(self.proto)
        for node in model.graph.node:
            if node.op_type == "Dropout":  # without the input `training_mode` it is off
                del node.input[2:]
        return model


def exported(call: Call, exporter: str) -> Iterator[Exported]:
    """The module by the first exporter that can: for any batch if possible, then for the example's.

    ModelError with each exporter's reason where none can.
    """
    failed: list[str] = []
    for name, export in (("dynamo", _by_dynamo), ("torchscript", _by_torchscript)):
        if exporter not in ("auto", name):
            continue
        error: Exception | None = None
        dynamic = [call] * (call.dynamic and (call.batch() or 0) > 1)  # a batch of 1 is a constant to exporters
        attempts: list[tuple[Call, bool]] = [(c, False) for c in (*dynamic, replace(call, dynamic=False))]
        if name == "dynamo":
            attempts.append((attempts[-1][0], True))
        for one, plain in attempts:
            if plain and error is None:
                break
            try:
                with _quiet(), _attention(plain):
                    model = export(one)
            except Exception as e:
                error = error or e
                continue
            _tell(failed)
            error = None
            yield model
        if error is None:
            return
        failed.append(f"{name}: {type(error).__name__}: {_reason(str(error))}")
    said = "".join(failed)
    advice = ""
    if "fake tensor" in said:
        advice = "\ntorch.autograd.grad inside of forward is not exported: write that derivative with plain operators"
    elif unknown := re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", said):
        advice = f"\nONNX has no form of PyTorch's {unknown[1]}: write it with plain operators (where, gather, sums)"
    raise ModelError("PyTorch cannot export this module:\n  " + "\n  ".join(failed) + advice)


def _tell(failed: list[str]) -> None:
    """Warns that only the second exporter could do it."""
    if failed:
        warnings.warn(
            f"PyTorch's dynamo exporter cannot export this module ({failed[0]}); TorchScript's did: detached "
            "values pass gradients on there (name them in no_grad_set)",
            ModelWarning,
            stacklevel=4,
        )


def _attention(plain: bool) -> contextlib.AbstractContextManager[Any]:
    """Within: attention is written as plain operators, where the exporter does not take PyTorch's own."""
    name = "scaled_dot_product_attention"
    return mock.patch.object(torch.nn.functional, name, plain_attention) if plain else contextlib.nullcontext()


# -- dynamo -----------------------------------------------------------------------------------------------------------


def _by_dynamo(call: Call) -> Exported:
    program = _program(call)
    buffers = _changed_buffers(program, call.module)
    if buffers:  # exporters drop what is written to them: exported again, as outputs
        call = replace(call, module=with_buffers(call.module, buffers))
        program = _program(call)
    outputs = _output_names(program, bool(buffers))
    onnx_program = torch.onnx.export(
        program, dynamo=True, optimize=False, verbose=False, input_names=call.inputs, output_names=outputs
    )
    if onnx_program is None:
        raise RuntimeError("torch.onnx.export gave nothing")
    _refuse_fixed_sizes(program)
    proto, contents = _without_contents(onnx_program, call.share)
    rename(proto, _captured(program, call.module))
    if buffers:
        without_prefix(proto, f"{INNER}.")
        _keep_buffers(proto, tensors_of(call.module), buffers)
    return Exported(proto, contents, dropped_arguments(program))


def _without_contents(program: ONNXProgram, share: bool) -> tuple[onnx.ModelProto, list[Contents]]:
    """The model that refers to copies of the module's large tensors, and these; `share`: to the tensors themselves."""
    import onnx_ir

    left = []
    for value in program.model.graph.initializers.values():
        tensor = value.const_value
        if not hasattr(tensor, "raw") or not (share or tensor.nbytes >= LARGE_BYTES):
            continue
        array = elements(tensor.raw)
        if array is None or array.nbytes != tensor.nbytes:
            continue
        left.append(Contents(array if share else array.copy()))
        value.const_value = onnx_ir.ExternalTensor(
            left[-1].location, 0, tensor.nbytes, tensor.dtype, shape=tensor.shape, name=tensor.name, base_dir=""
        )
    return onnx_ir.serde.serialize_model(program.model), left


def _program(call: Call) -> Any:
    """The exported program, with what the ONNX exporter would lose written as plain operators."""
    shapes = torch.export.ShapesCollection()
    for x in call.tensors():
        if x.ndim and x.shape[0] == call.batch():
            shapes[x] = {0: torch.export.Dim.AUTO}
    open_shapes = shapes if call.dynamic else None
    with kept_gradients(), traceable(call.dynamic):
        program = torch.export.export(call.module, call.args, call.kwargs, dynamic_shapes=open_shapes, strict=False)
    _detach_no_grad(program.graph_module)
    return lowered(program)


def _refuse_fixed_sizes(program: ExportedProgram) -> None:
    """NotImplementedError if a decomposition took a size that the batch decides for a number, as range(3 * batch) does.

    A batch that is itself taken for a number is one in the exported model, too.
    """
    shapes = (getattr(n.meta.get("val"), "shape", ()) for n in program.graph.nodes if n.op == "placeholder")
    for size in [n for shape in shapes for n in shape if isinstance(n, torch.SymInt)][:1]:
        sizes = size.node.shape_env
        for e in (guard.expr for guard in sizes.guards if "Mod(" not in str(guard.expr)):  # but divisors of a size
            if e.is_Relational and e.rel_op == "==" and e.rhs.is_number and not e.free_symbols <= {*sizes.replacements}:
                raise NotImplementedError(f"a size that the batch decides became a number: {e}")


def _changed_buffers(program: ExportedProgram, module: Module) -> list[str]:
    """Buffers that `forward` changes, but for running statistics of batch normalisation and their counts."""
    norms = {
        f"{n}.{b}" if n else b
        for n, m in module.named_modules(remove_duplicate=False)
        if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)
        for b in ("running_mean", "running_var", "num_batches_tracked")
    }
    return [n for n in program.graph_signature.buffers_to_mutate.values() if n not in norms]


def _keep_buffers(proto: onnx.ModelProto, tensors: Mapping[str, Any], buffers: list[str]) -> None:
    """Says in the model's metadata what each buffer holds afterwards, in place of outputs."""
    last = list(proto.graph.output)[-len(buffers) :]
    there = {t.name for t in proto.graph.initializer}
    after = {}
    for full, output in zip(buffers, last, strict=True):
        name = full.removeprefix(f"{INNER}.")
        after[name] = output.name
        if name not in there:  # it is written before it is read
            array = tensors[f"{INNER}.{full}"].detach().cpu().numpy()
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    del proto.graph.output[-len(buffers) :]
    proto.metadata_props.add(key=BUFFERS, value=json.dumps(after))


def _captured(program: ExportedProgram, module: Module) -> dict[str, str]:
    """Constants of an exported program that are the module's own tensors, with their names there: frameworks on top of
    PyTorch (Keras) pass them around."""
    pointers = {t.data_ptr(): n for n, t in tensors_of(module).items() if t.numel()}
    constants = {n: t for n, t in program.constants.items() if hasattr(t, "data_ptr")}
    captured = {n: pointers[t.data_ptr()] for n, t in constants.items() if t.data_ptr() in pointers}
    return {**captured, **{n.rpartition(".")[2]: name for n, name in captured.items()}}  # files have the last part only


def _detach_no_grad(graph_module: Any) -> None:
    """Detaches what comes out of regions under `torch.no_grad()`, which exporters inline without a trace."""
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


def _output_names(program: ExportedProgram, buffers: bool) -> list[str] | None:
    """Names of the outputs, where the module returns a dict or an object with fields: "loss", "logits".

    `buffers`: the outputs are the module's own and a dict of buffers (`with_buffers`).
    """
    spec = program.call_spec.out_spec
    paths = [p for p, _ in trees.tree_flatten_with_path(trees.tree_unflatten(list(range(spec.num_leaves)), spec))[0]]
    texts = [[str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in p] for p in paths]
    kinds = [str(o.kind) for o in program.graph_signature.output_specs if "USER_OUTPUT" in str(o.kind)]
    taken = {i.arg.name for i in program.graph_signature.input_specs}
    if buffers:
        texts = [t[1:] if t[0] == "0" else [_BUFFER + t[1]] for t in texts]
    names = ["_".join(t) for t in texts]
    named = [n if n and not n.isdigit() and n not in taken else f"output_{n}" if n else "output" for n in names]
    return named if len(kinds) == len(named) and len(set(named)) == len(named) else None


# -- TorchScript ----------------------------------------------------------------------------------------------------


def _by_torchscript(call: Call) -> Exported:
    file = io.BytesIO()
    before = {n: b.clone() for n, b in call.module.named_buffers()}
    axes = None
    if call.dynamic:
        if call.inputs is None:
            raise ValueError("inputs without names have no dynamic axes")
        inputs = zip(call.inputs, call.tensors(), strict=True)
        axes = {n: {0: "batch"} for n, x in inputs if x.ndim and x.shape[0] == call.batch()}
    with traceable(call.dynamic):
        torch.onnx.export(
            call.module, call.args, file, kwargs=call.kwargs or None, dynamo=False, do_constant_folding=False,
            training=torch.onnx.TrainingMode.PRESERVE, opset_version=20, input_names=call.inputs,
            output_names=call.outputs, dynamic_axes=axes,
        )  # fmt: skip
    for name, buffer in call.module.named_buffers():  # the module ran once
        buffer.data.copy_(before[name])
    proto = onnx.ModelProto()
    proto.ParseFromString(file.getvalue())
    for t in proto.graph.initializer:
        if t.name in before and t.HasField("raw_data") and tuple(t.dims) == tuple(before[t.name].shape):
            start = before[t.name].detach().cpu().contiguous()
            t.raw_data = start.flatten().view(torch.uint8).numpy().tobytes()
    return Exported(*with_arrays(proto))


# -- what both say ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' own remarks."""
    switch = getattr(torch._C, "_jit_set_onnx_log_enabled", lambda on: None)
    switch(False)
    # TorchScript's exporter switches it on, and prints the whole graph where it fails
    silent = mock.patch.object(torch._C, "_jit_set_onnx_log_enabled", lambda on: None, create=True)
    loggers = [logging.getLogger(n) for n in ("torch.onnx", "torch.export", "onnxscript", "torch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(), silent:
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _reason(text: str) -> str:
    """The first lines of an exporter's error; of long reports, those of their summary at the end."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text.rpartition("## Exception summary")[2])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:3])[:400]
