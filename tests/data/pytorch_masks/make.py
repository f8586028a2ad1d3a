"""Makes the files of this folder: losses that index by boolean masks, as PyTorch exports them, and four steps of each.

    python tests/data/pytorch_masks/make.py        # needs torch, onnxscript, torchvision (its Python code)

NAME.onnx: by the exporter that EXPORTERS says, without metadata; values.json: inputs of each step, and the losses of
SGD and Adam.  Masks change from step to step; the last one of `focal` and `boxes` keeps nothing.
"""

from __future__ import annotations

import copy
import json
import sys
import types
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn
from torch.nn import functional

import recompute as rc

sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
from torchvision import ops  # noqa: E402

FOLDER = Path(__file__).parent
RATE, STEPS = 2.0**-6, 4
EXPORTERS = {
    "boxes": "dynamo",
    "pairs": "dynamo",
    "focal": "torchscript",
    "words": "torchscript",
    "sentences": "torchscript",
}


def _boxes(*shape: int) -> Any:
    first, size = torch.rand(*shape, 2), torch.rand(*shape, 2) + 0.1
    return torch.cat([first, first + size], -1)


class Boxes(nn.Module):
    """Generalised IoU, L1, smooth L1 and centredness on the foreground; targets elsewhere are not numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, x: Any, labels: Any, boxes: Any) -> Any:
        h, front = self.fc(x), labels > 0
        count = front.sum().clamp(min=1)
        first = h[..., :2].sigmoid()
        found = torch.cat([first, first + h[..., 2:4].exp()], -1)[front]
        wanted = boxes[front]
        overlap = ops.generalized_box_iou_loss(found, wanted, reduction="sum") / count
        sides = (wanted[:, :2] / wanted[:, 2:]).sqrt().amin(-1)
        middle = functional.binary_cross_entropy_with_logits(h[..., 4][front], sides, reduction="sum") / count
        apart = functional.l1_loss(found, wanted, reduction="sum") + functional.smooth_l1_loss(
            found.log(), wanted.log(), reduction="sum", beta=0.5
        )
        return overlap + middle + apart / count


class Pairs(nn.Module):
    """The diagonal of the generalised IoU of all pairs; values are written back where the mask is true."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: Any, labels: Any, boxes: Any) -> Any:
        h, front = self.fc(x), labels > 0
        found = torch.cat([h[front][:, :2], h[front][:, :2] + h[front][:, 2:].exp()], -1)
        overlap = torch.diagonal(ops.generalized_box_iou(found, boxes[front]))
        kept = h * 1
        kept[front] = h[front].tanh()
        return (1 - overlap).mean() + kept.pow(2).mean()


class Focal(nn.Module):
    """Focal loss with class targets written through a mask, of what is not ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: Any, labels: Any) -> Any:
        h, labels = self.fc(x).flatten(0, 1), labels.flatten()
        front, valid = labels > 0, labels >= 0
        wanted = torch.zeros_like(h)
        wanted[front, labels[front] - 1] = 1.0
        return ops.sigmoid_focal_loss(h[valid], wanted[valid], reduction="sum") / front.sum().clamp(min=1)


class Words(nn.Module):
    """Only masked words go through the head."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 4)

    def forward(self, x: Any, labels: Any) -> Any:
        masked = labels > 0
        scores = self.head(self.norm(functional.gelu(self.fc(x)[masked])))
        return functional.cross_entropy(scores, labels[masked] - 1)


class Sentences(nn.Module):
    """The loss of DebertaForSequenceClassification, where some sentences have no label."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)

    def forward(self, x: Any, labels: Any) -> Any:
        scores, labels = self.fc(x[0]), labels[0] - 1
        chosen = (labels >= 0).nonzero()
        kept = torch.gather(scores, 0, chosen.expand(chosen.size(0), scores.size(1)))
        return functional.cross_entropy(kept.view(-1, 4), torch.gather(labels, 0, chosen.view(-1)).view(-1))


def inputs_of(name: str, step: int) -> dict[str, Any]:
    """One step's inputs: labels from -1 (ignored) over 0 (background) to 4."""
    labels = torch.randint(-1, 5, (2, 5))
    if step == STEPS - 1 and name in ("boxes", "focal"):
        labels = labels.clamp(max=0)
    found = {"x": torch.randn(2, 5, 3, dtype=torch.float64), "labels": labels}
    if name in ("boxes", "pairs"):
        nothing = torch.full((), float("nan"), dtype=torch.float64)
        found["boxes"] = torch.where((labels > 0).unsqueeze(-1), _boxes(2, 5).double(), nothing)
    return found


def losses(module: Any, steps: list[dict[str, Any]], kind: str) -> list[float]:
    """Of one training run."""
    module = copy.deepcopy(module)
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=RATE)
    found = []
    for inputs in steps:
        optimizer.zero_grad()
        loss = module(**inputs)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def main() -> None:
    """Writes all files."""
    values: dict[str, Any] = {"torch": torch.__version__, "rate": RATE}
    for kind in (Boxes, Pairs, Focal, Words, Sentences):
        torch.manual_seed(0)
        name = kind.__name__.lower()
        module, steps = kind().double(), [inputs_of(name, i) for i in range(STEPS)]
        model = rc.from_torch(module, steps[0], exporter=EXPORTERS[name]).source
        _bare(model)
        onnx.save(model, FOLDER / f"{name}.onnx")
        values[name] = {
            "inputs": [{k: v.tolist() for k, v in s.items()} for s in steps],
            "parameters": [n for n, _ in module.named_parameters()],
            **{how: losses(module, steps, how) for how in ("SGD", "Adam")},
        }
    (FOLDER / "values.json").write_text(json.dumps(values) + "\n")


def _bare(model: onnx.ModelProto) -> None:
    """Without metadata, traces and paths of the machine."""
    del model.graph.value_info[:], model.graph.metadata_props[:], model.functions[:]
    for node in model.graph.node:
        del node.metadata_props[:]
        node.ClearField("doc_string")


if __name__ == "__main__":
    main()
