"""Adapters in the files of PEFT (Hugging Face): `adapter_model.safetensors` and `adapter_config.json`."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ..boundary import as_path
from ..errors import ModelError, UsageError, expect, nearest
from ..importer.tensors import tensor_array
from ..importer.trained import said_to_train
from ..language.program import Program
from ..language.types import DTYPES, dtype_from_onnx
from ..support.files import make_folder, regular, replacing, together
from ..support.json_values import repr_short, unfit
from ..support.patterns import regular_expression
from ..training.state import contents
from .graph import Graph, edits
from .lora import ADAPTERS, Adapter, adapters_of, add_adapters
from .weights import Weight, matrices, module_of, weight_of

__all__ = ["load_adapter", "save_adapter"]

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
#: fields of the configuration
_TYPES = {
    "lora_alpha": float, "lora_dropout": (float, None), "use_rslora": (bool, None),
    "alpha_pattern": ({...: float}, None),
}  # fmt: skip
#: most states of the patterns of a configuration together: they are matched with the name of every module
_MOST_STATES = 2000
#: patterns that are names, in which a point is any character
_NAME = re.compile(r"\^?(?:[\w/-]|\\?\.)+\$?")
#: the end of a tensor's name → what it is
_PARTS = {
    ".lora_A.weight": ("linear", "A"),
    ".lora_B.weight": ("linear", "B"),
    ".lora_magnitude_vector": ("linear", "magnitude"),
    ".lora_embedding_A": ("embedding", "A"),
    ".lora_embedding_B": ("embedding", "B"),
}


def save_adapter(
    model: Program | onnx.ModelProto,
    folder: str | PathLike[str],
    *,
    prefix: str = "",
    rename: Mapping[str, str] | None = None,
) -> None:
    """Writes the adapters of a Program or a ModelProto into a folder as PEFT does, with what else trains.

    `prefix`: what PEFT's names of modules begin with and the model's do not, such as `model.`.  `rename`: parts of
    names that PEFT calls otherwise, such as {"attn": "self_attn"} for ONNX Runtime GenAI's files.  The folder is made;
    both files are replaced, or neither.  UsageError where the model has no adapters; ModelError if they cannot be
    written.
    """
    from safetensors.numpy import save

    expect("model", model, (Program, onnx.ModelProto), "a Program or an ONNX model")
    folder = as_path(folder, "folder")
    expect("prefix", prefix, str, "a text")
    called = _Names(prefix, rename)
    proto = model.source if isinstance(model, Program) else model
    adapters = adapters_of(proto) if proto is not None else []
    if not adapters:
        raise UsageError("the model has no adapters that rc.lora or rc.load_adapter added: there is nothing to save")
    arrays = _trained(model, adapters)
    tensors = {f"{_PREFIX}{called(n)}": np.ascontiguousarray(a) for n, a in arrays.items()}
    own = {n for a in adapters for n in a.tensors.values()}
    text = json.dumps(_config(adapters, called, [n for n in arrays if n not in own]), indent=2) + "\n"
    path = Path(folder)
    try:
        make_folder(path)
        with together():
            with replacing(path / _WEIGHTS) as file:
                file.write_bytes(save(tensors, metadata={"format": "pt"}))
            with replacing(path / _CONFIG) as file:
                file.write_text(text)
    except OSError as e:
        raise ModelError(f"cannot write the adapter to '{path}': {e.strerror or e}") from None


def _trained(model: Program | onnx.ModelProto, adapters: list[Adapter]) -> dict[str, np.ndarray]:
    """The adapters' tensors by name; of a program everything that trains."""
    names = [n for a in adapters for n in a.tensors.values()]
    if isinstance(model, Program):
        assert model.source is not None
        values = {v.name: v for v in (*model.block.parameters, *model.block.buffers)}
        trained, graph = [v.name for v in model.block.parameters], Graph(model.source)
        arrays = {n: contents(model, values[n]) for n in dict.fromkeys([*names, *trained])}
    else:
        graph = Graph(model)
        trained = [n for n in said_to_train(model) or () if n in graph.tensors]
        arrays = {n: tensor_array(graph.tensors[n]) for n in dict.fromkeys([*names, *trained])}
    factors = set(names)
    return {n: a.T if n not in factors and _stored_turned(graph, n) else a for n, a in arrays.items()}


def _stored_turned(model: Graph, name: str) -> bool:
    """Whether a tensor is the weight of a linear layer that is stored [in, out], which PyTorch stores [out, in]."""
    shapes = matrices(model)
    try:
        w = weight_of(model.reading(), name, *shapes[name]) if name in shapes else None
    except UsageError:  # something else reads it
        return False
    return w is not None and w.kind == "linear" and not w.turned


class _Names:
    """PEFT's names of the model's modules and tensors."""

    def __init__(self, prefix: str = "", rename: Mapping[str, str] | None = None) -> None:
        self._prefix, self._parts = prefix, {} if rename is None else expect("rename", rename, Mapping, "a dictionary")
        for part in (*self._parts, *self._parts.values()):
            expect("rename", part, str, "parts of names, without points, such as {'attn': 'self_attn'}")

    def __call__(self, name: str) -> str:
        return self._prefix + ".".join(self._parts.get(p, p) for p in name.split("."))


def _config(adapters: list[Adapter], called: _Names, others: list[str]) -> dict[str, Any]:
    """PEFT's LoraConfig; ranks and factors that differ from the first adapter's are named by module."""
    first = adapters[0]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": first.r,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "use_dora": any(a.dora for a in adapters),
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": [called(a.module) for a in adapters],
        "rank_pattern": {called(a.module): a.r for a in adapters if a.r != first.r},
        "alpha_pattern": {called(a.module): a.alpha for a in adapters if a.alpha != first.alpha},
        "modules_to_save": sorted({called(n.rpartition(".")[0]) for n in others}) or None,
    }


@edits
def load_adapter(model: Graph, folder: str | PathLike[str], *, rename: Mapping[str, str] | None = None) -> None:
    """Adds the adapters of a folder that PEFT, or `save_adapter`, wrote, and freezes everything else.

    The kind of `model` and of the result as for `rc.lora`; the model has no adapters yet.  `rename`: as for
    `save_adapter`, parts of the model's names that PEFT calls otherwise.  Modules are found by their
    names, or where one name ends with the other (`model.layers.0.q_proj`, `layers.0.q_proj`).  Tensors that were saved
    whole (`modules_to_save`) replace the model's and train.  ModelError for files that are missing, damaged or of
    another method; UsageError where the model lacks a module, or its shape differs.
    """
    if model.said(ADAPTERS):
        raise UsageError("the model has adapters already: merge them first (rc.merge_adapters)")
    config, tensors = _read(as_path(folder, "folder"))
    groups: dict[str, dict[str, np.ndarray]] = {}
    kinds: dict[str, str] = {}
    whole: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        end = next((e for e in _PARTS if name.endswith(e)), None)
        if end is None:
            whole[name.replace(".modules_to_save.default.", ".")] = array
            continue
        kinds[name.removesuffix(end)], what = _PARTS[end]
        groups.setdefault(name.removesuffix(end), {})[what] = array
    shapes, readers, alpha_of = matrices(model), model.reading(), _alphas(config, folder)
    called = _Names(rename=rename)
    modules = {called(module_of(n)): n for n in sorted(shapes, key=len)}
    adapters: list[Adapter] = []
    weights: list[Weight] = []
    arrays: dict[str, np.ndarray] = {}
    for module, parts in groups.items():
        weight = modules[_match(module, modules)]
        w = weight_of(readers, weight, *shapes[weight])
        a = _adapter(module, w, parts, config, alpha_of(module))
        _check(module, a, w, parts, kinds[module])
        adapters.append(a)
        weights.append(w)
        numbers = DTYPES[dtype_from_onnx(w.onnx_type) or "f32"]
        arrays.update((n, parts[what].astype(numbers)) for what, n in a.tensors.items())
    train = [_replace(model, name, array, called) for name, array in whole.items()]
    add_adapters(model, adapters, weights, arrays, train)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The configuration and the tensors, by their names without PEFT's prefix."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        config = json.loads(regular(folder / _CONFIG).read_text())
        tensors = load_file(regular(folder / _WEIGHTS))
    except OSError as e:
        raise ModelError(f"cannot read the adapter in '{folder}': {e.strerror or e}") from None
    except (ValueError, RecursionError, SafetensorError) as e:
        raise ModelError(f"the adapter in '{folder}' is damaged: {e}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = repr_short(config.get("peft_type") if isinstance(config, dict) else None)
        raise ModelError(f"the adapter in '{folder}' is not of LoRA but of {kind}: only LoRA and DoRA are supported")
    fields = {key: kind for key, kind in _TYPES.items() if key in config}
    if why := unfit(config, fields, "its configuration"):
        raise ModelError(f"the adapter in '{folder}' is damaged: {why}")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        raise ModelError(f"the adapter in '{folder}' trains biases, which is not supported")
    return config, {n.removeprefix(_PREFIX): a for n, a in tensors.items()}


def _match(module: str, names: Iterable[str]) -> str:
    """The model's name of a module.  UsageError where none or several fit."""
    names = list(names)
    if module in names:
        return module
    near = [n for n in names if n.endswith(f".{module}") or module.endswith(f".{n}")]
    if len(near) != 1:
        several = (
            f"several modules fit '{module}': {', '.join(near)}" if near else f"the model has no module '{module}'"
        )
        raise UsageError(f"the adapter does not fit the model: {several}{'' if near else nearest(module, names)}")
    return near[0]


def _adapter(
    module: str, w: Weight, parts: Mapping[str, np.ndarray], config: Mapping[str, Any], alpha: float
) -> Adapter:
    if not {"A", "B"} <= parts.keys():
        raise ModelError(f"the adapter of '{module}' is not complete: it has only {', '.join(parts)}")
    rank, dropout = parts["A"].shape[0] if parts["A"].ndim else 0, float(config.get("lora_dropout") or 0.0)
    if rank < 1 or not 0 <= dropout < 1:
        raise ModelError(f"the adapter of '{module}' has rank {rank} and dropout {dropout:g}, which are impossible")
    factor = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    adapter = Adapter(w.name, w.module, w.kind, w.turned, rank, alpha, dropout, factor, "magnitude" in parts)
    return replace(adapter, alpha=factor * rank)


def _alphas(config: Mapping[str, Any], folder: str | PathLike[str]) -> Callable[[str], float]:
    """alpha of a module: that of the first pattern that the end of its name matches, or the one of all.

    Patterns come from a file: they are matched in linear time, not by Python's `re`.
    """
    tests: list[tuple[Callable[[str], object], float]] = []
    states = 0
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if _NAME.fullmatch(pattern):
            tests.append((functools.partial(_ends, pattern), float(value)))
            continue
        try:
            regular_expression(pattern)  # by itself, so that no bracket closes one of ours
            expression = regular_expression(rf"(.*\.)?({pattern})")
        except ModelError as e:
            raise ModelError(f"the adapter in '{folder}': alpha_pattern {repr_short(pattern)}: {e}") from None
        states += expression.programsize
        if states > _MOST_STATES:
            raise ModelError(f"the adapter in '{folder}': the patterns of alpha_pattern are too long: name the modules")
        tests.append((expression.fullmatch, float(value)))
    alpha = float(config.get("lora_alpha", 8))
    return lambda module: next((value for fits, value in tests if fits(module)), alpha)


def _ends(pattern: str, module: str) -> bool:
    """Whether a module's name is, or ends behind a point with, one of which a point stands for any character."""
    characters = re.findall(r"\\?.", pattern.removeprefix("^").removesuffix("$"))
    before, end = module[: -len(characters)], module[-len(characters) :]
    whole = not before or (before.endswith(".") and not pattern.startswith("^"))
    return (
        whole
        and len(end) == len(characters)
        and all(p in (".", c, "\\" + c) for p, c in zip(characters, end, strict=True))
    )


def _check(module: str, a: Adapter, w: Weight, parts: Mapping[str, np.ndarray], kind: str) -> None:
    """UsageError where an adapter's tensors do not have the shapes that its weight asks for."""
    first, last = w.features
    wanted = {"A": (a.r, first), "B": (last, a.r), "magnitude": (last,)}
    for what, array in parts.items():
        if kind != a.kind or tuple(array.shape) != wanted[what]:
            raise UsageError(
                f"the adapter does not fit the model: {what} of '{module}' is {list(array.shape)} for a layer of kind "
                f"{kind}; '{w.name}' is of kind {a.kind} and needs {list(wanted[what])}"
            )


def _replace(model: Graph, name: str, array: np.ndarray, called: _Names) -> str:
    """Replaces a tensor that was saved whole; its name in the model."""
    tensors = {called(n): n for n in model.tensors}
    own = tensors[_match(name, tensors)]
    tensor = model.tensors[own]
    if array.ndim == 2 and (tuple(tensor.dims) != array.shape or array.shape[0] == array.shape[1]):
        array = array.T if _stored_turned(model, own) else array
    if tuple(tensor.dims) != array.shape:
        raise UsageError(
            f"the adapter does not fit the model: '{name}' is {list(array.shape)}, not {list(tensor.dims)}"
        )
    numbers = tensor_array(tensor).dtype
    model.remove_tensors([own])
    model.add_tensor(own, array.astype(numbers))
    return own
