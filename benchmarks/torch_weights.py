"""Weights of the zoo, by its names, in the networks of torch_networks.py.  Runs in PyTorch's environment."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn

#: (pattern, replacement) in order, by class of network: from PyTorch's name of a parameter to the zoo's
RULES: dict[str, tuple[tuple[str, str], ...]] = {
    "Bert": (
        (r"^(word|position|token_type)\.", r"embeddings.\1_embeddings."),
        (r"^norm\.", "embeddings.LayerNorm."),
        (r"^layers\.(\d+)\.(query|key|value)\.", r"encoder.layer.\1.attention.self.\2."),
        (r"^layers\.(\d+)\.dense\.", r"encoder.layer.\1.attention.output.dense."),
        (r"^layers\.(\d+)\.norm1\.", r"encoder.layer.\1.attention.output.LayerNorm."),
        (r"^layers\.(\d+)\.up\.", r"encoder.layer.\1.intermediate.dense."),
        (r"^layers\.(\d+)\.down\.", r"encoder.layer.\1.output.dense."),
        (r"^layers\.(\d+)\.norm2\.", r"encoder.layer.\1.output.LayerNorm."),
        (r"^transform\.", "cls.predictions.transform.dense."),
        (r"^transform_norm\.", "cls.predictions.transform.LayerNorm."),
        (r"^bias$", "cls.predictions.bias"),
        (r"^pooler\.", "pooler.dense."),
    ),
    "Lstm": (
        (r"^layers\.(\d+)\.weight_(ih|hh)_l0$", r"lstm.\1.weight_\2"),
        (r"^layers\.(\d+)\.bias_(ih|hh)_l0$", r"lstm.\1.bias"),
    ),
}


def load_zoo(net: nn.Module, arrays: Mapping[str, np.ndarray]) -> None:
    """Copies the zoo's parameters into the network.  ValueError where one is missing or left over."""
    name_of = _namer(net)
    linear = {f"{n}.weight" for n, m in net.named_modules() if isinstance(m, nn.Linear)}
    stored_by_row = {"pooler.weight", "classifier.weight"}  # Gemm's layout, [out, in]; MatMul's is [in, out]
    turned = linear - stored_by_row if type(net).__name__ in ("Bert", "Gpt2", "Vit") else set()
    left = set(arrays)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            source = name_of(name)
            if source not in arrays:
                raise ValueError(f"the zoo has no '{source}' (for '{name}')")
            array = _lstm(name, arrays[source]) if type(net).__name__ == "Lstm" else arrays[source]
            array = array.T if name in turned else array
            if tuple(array.shape) != tuple(parameter.shape):
                raise ValueError(f"'{source}' is {array.shape}, '{name}' {tuple(parameter.shape)}")
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(array)))
            left.discard(source)
    if left:
        raise ValueError(f"left over: {', '.join(sorted(left)[:5])}")


def _namer(net: nn.Module) -> Callable[[str], str]:
    kind = type(net).__name__
    if kind == "ResNet":
        blocks = _resnet_blocks(net)
        return lambda name: _resnet(name, blocks)
    if kind == "Vgg":
        return _vgg_names(net).__getitem__

    def rewritten(name: str) -> str:
        for pattern, replacement in RULES.get(kind, ()):
            name, found = re.subn(pattern, replacement, name)
            if found:
                break
        return name

    return rewritten


def _resnet_blocks(net: nn.Module) -> list[str]:
    """torchvision's name of each block: a stage begins where the channels grow behind the first block."""
    names, stage, index, before = [], 1, 0, 0
    for block in net.blocks:
        inner = block.convs[0].out_channels
        if before and inner != before:
            stage, index = stage + 1, 0
        names.append(f"layer{stage}.{index}")
        index, before = index + 1, inner
    return names


def _resnet(name: str, blocks: list[str]) -> str:
    name = re.sub(r"^stem\.0\.", "conv1.", name)
    name = re.sub(r"^stem\.1\.", "bn1.", name)
    name = re.sub(r"^blocks\.(\d+)\.", lambda m: f"{blocks[int(m[1])]}.", name)
    name = re.sub(r"\.convs\.(\d+)\.", lambda m: f".conv{int(m[1]) + 1}.", name)
    return re.sub(r"\.norms\.(\d+)\.", lambda m: f".bn{int(m[1]) + 1}.", name)


def _vgg_names(net: nn.Module) -> dict[str, str]:
    """torchvision numbers the layers of all blocks in one row."""
    names, at = {n: n for n, _ in net.named_parameters()}, 0
    for b, block in enumerate(net.blocks):
        for i in range(len(block)):
            for kind in ("weight", "bias"):
                names[f"blocks.{b}.{i}.{kind}"] = f"features.{at + i}.{kind}"
        at += len(block)
    return names


def _lstm(name: str, array: np.ndarray) -> np.ndarray:
    """ONNX's gates i, o, f, c in PyTorch's order i, f, c, o; ONNX keeps both biases in a row."""
    if not name.startswith("layers."):
        return array
    if "bias" in name:
        half = array.reshape(-1)
        array = half[: half.size // 2] if "bias_ih" in name else half[half.size // 2 :]
    else:
        array = array.reshape(array.shape[1:])
    i, o, f, c = np.split(array, 4)
    return np.concatenate([i, f, c, o])
