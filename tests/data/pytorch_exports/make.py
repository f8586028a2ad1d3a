"""Makes the files of this folder: small networks as PyTorch exports them, and the losses of four steps of SGD.

    python tests/data/pytorch_exports/make.py        # needs torch, onnxscript, transformers

NAME.onnx: what `rc.from_torch` loads (dynamo, without optimisation); NAME_default.onnx: by `torch.onnx.export(module,
args, file)`; values.json: losses, and for every parameter of the module whether it requires gradients.
"""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

import recompute as rc

FOLDER = Path(__file__).parent
RATE, STEPS = 0.05, 4


class Mixed(nn.Module):
    """A scalar, tied, frozen and detached weights, a buffer, batch normalisation in train and in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4, momentum=0.03)
        self.still = nn.BatchNorm2d(4, affine=False)
        self.fc = nn.Linear(144, 6)
        self.emb = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.emb.weight
        self.first, self.second = nn.LayerNorm(6), nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("freq", torch.arange(1.0, 7.0).cos())
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: Any, y: Any) -> Any:
        h = self.still(torch.relu(self.bn(self.conv(x)))).flatten(1)
        h = self.second(self.first(self.frozen(self.fc(h))) + self.emb(y) * self.freq) * self.scale.exp()
        scores = self.head(h)
        with torch.no_grad():
            weights = torch.softmax(scores, 1)
        return {"loss": nn.functional.cross_entropy(scores, y) + (scores - weights).pow(2).mean(), "scores": scores}


def mixed() -> tuple[Any, dict[str, Any]]:
    """The module, and inputs."""
    module = Mixed().train()
    module.still.eval()
    return module, {"x": torch.randn(5, 1, 8, 8), "y": torch.tensor([1, 3, 3, 0, 9])}


def llama() -> tuple[Any, dict[str, Any]]:
    """Two layers with rotary positions."""
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=24, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    words = torch.randint(3, 31, (2, 7))
    return hf.LlamaForCausalLM(config).train(), {"input_ids": words, "labels": words}


def bert() -> tuple[Any, dict[str, Any]]:
    """Two layers, tied embeddings, fresh normalisations that are all equal."""
    import transformers as hf

    config = hf.BertConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    words = torch.randint(3, 31, (2, 7))
    return hf.BertForMaskedLM(config).train(), {"input_ids": words, "labels": words}


def losses(module: Any, inputs: dict[str, Any]) -> list[float]:
    """Of four steps."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=RATE)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = module(**inputs)["loss"]
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def main() -> None:
    """Writes all files."""
    values: dict[str, Any] = {"torch": torch.__version__, "rate": RATE}
    for make in (mixed, llama, bert):
        torch.manual_seed(0)
        name = make.__name__
        module, inputs = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = rc.from_torch(module, inputs)
            default = torch.onnx.export(module, kwargs=inputs, dynamo=True, verbose=False).model_proto
        for suffix, model in (("", program.source), ("_default", default)):
            _shorten(model)
            onnx.save(model, FOLDER / f"{name}{suffix}.onnx")
        values[name] = {
            "losses": losses(module, inputs),
            "inputs": {k: v.numpy().tolist() for k, v in inputs.items()},
            "trains": {n: p.requires_grad for n, p in module.named_parameters(remove_duplicate=False)},
            "buffers": [n for n, b in module.named_buffers()],
        }
    (FOLDER / "values.json").write_text(json.dumps(_rounded(values), indent=1) + "\n")


def _rounded(x: Any) -> Any:
    if isinstance(x, float):
        return float(str(np.float32(x)))
    if isinstance(x, dict):
        return {k: _rounded(v) for k, v in x.items()}
    return [_rounded(v) for v in x] if isinstance(x, list) else x


def _shorten(model: onnx.ModelProto) -> None:
    """Without this machine's paths: stack traces, and what else is long and not read."""
    for node in model.graph.node:
        kept = [p for p in node.metadata_props if p.key.endswith("class_hierarchy")]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)


if __name__ == "__main__":
    main()
