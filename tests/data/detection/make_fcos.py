"""Writes fcos.npz: a batch of scenes, and the losses that PyTorch gets for the zoo's fcos-tiny in six steps of SGD.

    python tests/data/detection/make_fcos.py        # needs torch, and torchvision's Python code

The network is written here once more, with PyTorch's and torchvision's functions; its weights are those of the zoo.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import numpy_helper
from torch.nn import functional

import recompute as rc

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from detecting import Locations, Scenes

sys.modules.setdefault("torchvision._meta_registrations", types.ModuleType("torchvision._meta_registrations"))
from torchvision import ops  # noqa: E402

BATCH, STEPS, RATE, GROUPS = 3, 6, 0.02, 4
LOCATIONS = Locations((64, 64), (8, 16, 32), reach=3)


class Network:
    """fcos-tiny as functions of its weights by name."""

    def __init__(self, kind: torch.dtype) -> None:
        model = rc.models.build("fcos-tiny", batch=BATCH)
        trained = rc.models.parameters(model)
        self.w = {
            t.name: torch.tensor(numpy_helper.to_array(t), dtype=kind, requires_grad=True)
            for t in model.graph.initializer
            if t.name in trained
        }

    def conv(self, x: Any, name: str, **options: Any) -> Any:
        return functional.conv2d(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"), **options)

    def norm(self, x: Any, name: str) -> Any:
        return functional.batch_norm(x, None, None, self.w[f"{name}.weight"], self.w[f"{name}.bias"], training=True)

    def block(self, x: Any, name: str, stride: int) -> Any:
        y = self.norm(self.conv(x, f"{name}.conv1", stride=stride, padding=1), f"{name}.bn1").relu()
        y = self.norm(self.conv(y, f"{name}.conv2", padding=1), f"{name}.bn2")
        if f"{name}.downsample.0.weight" in self.w:
            x = self.norm(self.conv(x, f"{name}.downsample.0", stride=stride), f"{name}.downsample.1")
        return (x + y).relu()

    def levels(self, x: Any) -> list[Any]:
        """The pyramid."""
        x = self.norm(self.conv(x, "conv1", stride=2, padding=3), "bn1").relu()
        x = functional.max_pool2d(x, 3, 2, 1)
        stages = []
        for stage in range(1, 5):
            x = self.block(x, f"layer{stage}.0", 1 if stage == 1 else 2)
            stages.append(x)
        found, above = [], None
        for i in (2, 1, 0):
            x = self.conv(stages[i + 1], f"fpn.inner_blocks.{i}.0")
            if above is not None:
                x = x + functional.interpolate(above, scale_factor=2, mode="nearest")
            above = x
            found.insert(0, self.conv(x, f"fpn.layer_blocks.{i}.0", padding=1))
        return found

    def heads(self, x: Any, name: str) -> tuple[Any, Any, Any]:
        """Scores, distances and centerness of a level, one row a location."""
        towers = []
        for head in ("classification_head", "regression_head"):
            y = self.conv(x, f"{head}.conv.0", padding=1)
            y = functional.group_norm(y, GROUPS, self.w[f"{head}.conv.1.weight"], self.w[f"{head}.conv.1.bias"])
            towers.append(y.relu())
        scores = self.conv(towers[0], "classification_head.cls_logits", padding=1)
        sides = self.conv(towers[1], "regression_head.bbox_reg", padding=1) * self.w[f"scales.{name}"]
        middle = self.conv(towers[1], "regression_head.bbox_ctrness", padding=1)
        return scores.flatten(2).mT, sides.exp().flatten(2).mT, middle.flatten(2).mT

    def loss(self, x: Any, classes: Any, distances: Any, centerness: Any) -> Any:
        """The loss, with torchvision's functions on the locations inside boxes."""
        parts = [self.heads(level, f"p{i + 3}") for i, level in enumerate(self.levels(x))]
        scores, sides, middle = (torch.cat(p, 1) for p in zip(*parts, strict=True))
        front = classes >= 0
        count = front.sum().clamp(min=1)
        wanted = torch.zeros_like(scores)
        wanted[front, classes[front]] = 1
        focal = ops.sigmoid_focal_loss(scores, wanted, reduction="sum") / count
        ltrb = distances.mT[front]
        found, true = (torch.cat([-d[:, :2], d[:, 2:]], 1) for d in (sides[front], ltrb))
        apart = ops.generalized_box_iou_loss(found, true, reduction="none", eps=0.0)
        weights = centerness[front]
        boxes = (apart * weights).sum() / weights.sum().clamp(min=1e-6)
        middle = functional.binary_cross_entropy_with_logits(middle[..., 0][front], weights, reduction="sum")
        return focal + boxes + middle / count


def losses(feed: dict[str, np.ndarray], kind: torch.dtype) -> list[float]:
    """The losses of the steps."""
    network, found = Network(kind), []
    optimizer = torch.optim.SGD(network.w.values(), lr=RATE)
    given = {k: torch.tensor(v, dtype=kind if v.dtype.kind == "f" else torch.int64) for k, v in feed.items()}
    names = ("x", "target_classes", "target_distances", "target_centerness")
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = network.loss(*(given[name] for name in names))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


if __name__ == "__main__":
    feed = Scenes(LOCATIONS, BATCH, seed=4).take(np.arange(BATCH))
    feed = {name: feed[name] for name in feed if name not in ("boxes", "classes")}
    feed["x"] = feed["x"].astype(np.float16).astype(np.float32)  # a smaller file
    figures = {"losses32": losses(feed, torch.float32), "losses64": losses(feed, torch.float64)}
    print(figures)
    stored = {**feed, "x": feed["x"].astype(np.float16), **{k: np.array(v) for k, v in figures.items()}}
    np.savez_compressed(Path(__file__).with_name("fcos.npz"), **stored)  # type: ignore[arg-type]
