"""Adapters in ONNX Runtime's files (`.onnx_adapter`), and the model whose optional inputs they are.

A session of ONNX Runtime takes adapters at each run (`RunOptions.add_adapter`): the tensors of such a file become the
inputs of their names.  Without one the inputs have rank 0, and the model computes what its base does.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from ..boundary import as_path
from ..errors import ModelError, UsageError, expect, need_extra
from ..exporter.compiled import save_model
from ..exporter.trained import export_trained
from ..importer.tensors import tensor_array
from ..language.program import Program
from ..support.files import make_folder, replacing
from .graph import Graph, model_of
from .lora import ADAPTERS, Adapter, adapters_of
from .merge import adapter_contents, replace_weight

__all__ = ["save_onnx_adapter"]

#: the files' names
ADAPTER, MODEL = "adapter.onnx_adapter", "model.onnx"
_TYPES = (np.float32, np.float16, np.float64)


def save_onnx_adapter(model: Program | onnx.ModelProto, folder: str | PathLike[str], *, base: bool = True) -> None:
    """Writes adapters into a folder as ONNX Runtime reads them: `adapter.onnx_adapter`, and the model, `model.onnx`.

    The model has A [r, in] and B [out, r] of each adapter (of tables A [r, rows], B [width, r]) as optional inputs of
    an open rank, so that it takes every adapter on the same weights, whatever its rank: the factor alpha / r is part of
    B in the file.  Without an adapter it computes what the base does.  What else was trained is in the model.
    `base=False`: the adapter alone.  The folder is made.

    UsageError where there are no adapters, and for DoRA, whose magnitude has no default; ModelError if a file cannot be
    written; MissingExtraError without ONNX Runtime.
    """
    expect("base", base, bool, "True or False")
    expect("model", model, (Program, onnx.ModelProto), "a Program or an ONNX model")
    path = Path(as_path(folder, "folder"))
    proto = export_trained(model) if isinstance(model, Program) else model_of(model)
    adapters = adapters_of(proto)
    if not adapters:
        raise UsageError("the model has no adapters that rc.lora or rc.load_adapter added: there is nothing to save")
    if dora := next((a for a in adapters if a.dora), None):
        raise UsageError(
            f"'{dora.module}' has a DoRA adapter, without whose magnitude the model cannot run: rc.save_adapter writes "
            "PEFT's files, rc.merge_adapters merges it"
        )
    graph = Graph(proto)
    arrays = _tensors(graph, adapters)
    if wrong := next((n for n, a in arrays.items() if a.dtype not in _TYPES), None):
        raise UsageError(
            f"'{wrong}' is {arrays[wrong].dtype}; ONNX Runtime's files of adapters have float32 or float16"
        )
    try:
        make_folder(path)
        with replacing(path / ADAPTER) as file:
            _write(arrays, file)
    except OSError as e:
        raise ModelError(f"cannot write the adapter to '{path}': {e.strerror or e}") from None
    if base:
        save_model(_with_inputs(graph, adapters), path / MODEL)


def _tensors(graph: Graph, adapters: Sequence[Adapter]) -> dict[str, np.ndarray]:
    """The adapters' tensors by name, B times the factor."""
    tensors = {}
    for a in adapters:
        for what, name in a.tensors.items():
            array = adapter_contents(graph, name)
            tensors[name] = (array * array.dtype.type(a.factor)) if what == "B" else array
    return tensors


def _write(arrays: dict[str, np.ndarray], path: Path) -> None:
    """ONNX Runtime's own writer."""
    try:
        from onnxruntime import AdapterFormat, OrtValue
    except ImportError:
        raise need_extra("onnxruntime>=1.20", "cpu", "a file of adapters for ONNX Runtime") from None
    adapter = AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters({n: OrtValue.ortvalue_from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()})
    adapter.export_adapter(str(path))


def _with_inputs(graph: Graph, adapters: Sequence[Adapter]) -> onnx.ModelProto:
    """The model with adapters of rank 0 that are inputs, and a factor of 1."""
    makers = graph.makers()
    for a in adapters:
        added = {name for site in a.sites for name in site["added"]}
        factor = next(makers[n] for n in added if n in makers and n.startswith(f"{a.module}.lora_factor"))
        kind = next(at for at in factor.attribute if at.name == "value").t
        kind.CopyFrom(onnx.numpy_helper.from_array(np.ones((), tensor_array(kind).dtype)))
        for what, name in a.tensors.items():
            weight = tensor_array(graph.tensors[name])
            across = weight.shape[1 if what == "A" else 0]
            replace_weight(graph, name, np.zeros((0, across) if what == "A" else (across, 0), weight.dtype))
            shape = ["adapter_rank", across] if what == "A" else [across, "adapter_rank"]
            info = helper.make_tensor_value_info(name, graph.tensors[name].data_type, shape)
            graph.model.graph.input.append(info)
    graph.say(ADAPTERS, None)
    graph.set_trained(None)
    return graph.finish()
