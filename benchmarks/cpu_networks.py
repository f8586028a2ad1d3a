"""The networks of cpu.py: what both sides train, what processes are told of it, and what is asked of the step time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo_steps import write_data

SEED = 0
#: small, as the batch is always the same: a loss that reaches zero would make numbers that no training has
RATE = 1e-5


@dataclass(frozen=True)
class Network:
    """A network of the zoo at a batch.

    `kept`: checkpoints (names and globs) that leave about a third of the activations.  `installed`: how long our step
    may take of PyTorch's, as it is installed.  `images`: whether PyTorch's channels_last means something.
    """

    name: str
    zoo: str
    batch: int
    kept: tuple[str, ...]
    installed: float
    optimizer: str = "momentum"
    options: dict[str, Any] = field(default_factory=dict)
    images: bool = True

    def job(self, folder: str | Path, *, with_model: bool = False, **more: Any) -> dict[str, Any]:
        """What a process that trains it is told (see cpu_worker.py), and `more`; data and weights are written into the
        folder, the ONNX file too `with_model`."""
        _, feed = write_data(self.zoo, self.batch, SEED, Path(folder), with_model=with_model, **self.options)
        return {
            "network": self.zoo, "batch": self.batch, "options": self.options, "seed": SEED, "kept": self.kept,
            "optimizer": self.optimizer, "learning_rate": RATE, "feed": feed, "data": f"{folder}/data.npz", **more,
        }  # fmt: skip


#: dropout is off on both sides: only then can the losses be compared
_OFF = {"dropout": 0.0}
NETWORKS: tuple[Network, ...] = (
    Network("resnet18", "resnet18", 8, ("layer*.out", "layer[34].?.conv?"), 0.72),
    # convolutions cost about the same in all blocks, and later ones' results are small: more of those, one block less
    Network("resnet50", "resnet50", 16, ("layer1.[02].out", "layer[234].?.out", "layer[34].?.conv[12]"), 0.72),
    Network(
        "mobilenet_v2",
        "mobilenet_v2",
        16,
        ("block*.point.conv", "block1[0-9].expand.conv", "block1[0-9].depth.conv"),
        0.5,
        options=_OFF,
    ),
    Network("vgg16", "vgg16", 4, ("block*.pool", "block[45].relu*"), 0.9, options=_OFF),
    Network(
        "bert",
        "bert-mini",
        8,
        ("embeddings.out", "layer.?.out"),
        0.65,
        "adam",
        {**_OFF, "layers": 2, "head": "mlm", "seq": 128},
        images=False,
    ),
    Network("gpt2", "gpt2-mini", 8, ("embeddings.out", "h.?.out"), 0.75, "adam", {**_OFF, "seq": 128}, images=False),
    Network(
        "lstm",
        "lstm",
        32,
        ("lstm.0.out",),  # a layer is the grain: half of the activations; both layers would keep 7 %
        0.8,
        "adam",
        {"seq": 100, "features": 256, "hidden": 256, "layers": 2},
        images=False,
    ),
)
#: smaller ones of the same kinds, for --quick
QUICK: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (2, {}),
    "resnet50": (2, {}),
    "mobilenet_v2": (2, {}),
    "vgg16": (1, {}),
    "bert": (2, {"seq": 64}),
    "gpt2": (2, {"seq": 64}),
    "lstm": (8, {"seq": 20}),
}
#: of PyTorch's best variant; of PyTorch as installed without oneDNN; of our plain step with recomputation
BEST, WITHOUT_ONEDNN, RECOMPUTED = 0.9, 0.95, 1.25
