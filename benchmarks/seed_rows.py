"""What was published, as rows: numbers from the papers' tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MB, GB, MIB, GIB = 10**6, 10**9, 1 << 20, 1 << 30


@dataclass(frozen=True)
class Row:
    """A network at a batch: bytes without recomputation → bytes of the published best, and its extra time.

    `overhead` None: none was published; one more forward pass is then allowed.  `weights`: whether the paper's bytes
    include parameters and optimizer state.  `device`: whose roofline prices the operators.
    """

    table: str
    network: str
    batch: int
    regular: float
    best: float
    overhead: float | None
    device: str
    weights: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "Momentum"
    note: str = ""

    @property
    def name(self) -> str:
        """What the table calls it."""
        return self.network


@dataclass(frozen=True)
class BatchRow:
    """A network's largest batch within `memory` bytes: without recomputation → published best, and its extra time.

    `overhead` None: one more forward pass.
    """

    table: str
    network: str
    memory: int
    regular: int
    best: int
    overhead: float | None
    device: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "Momentum"
    note: str = ""

    @property
    def name(self) -> str:
        """What the table calls it."""
        return self.network


@dataclass(frozen=True)
class ChainRow:
    """A made-up chain: at `share` of the plain activations, `published` times the plain step (backward = 2 forwards).

    `kind`: "lstm", "recurrent" or "residual_chain" of `passes/planners/core/synthetic.py`.
    """

    table: str
    kind: str
    steps: int
    share: float
    published: float
    note: str = ""

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.kind}-{self.steps} {self.share:.1%}"


@dataclass(frozen=True)
class GraphRow:
    """A graph that the authors published, in a file of `--graphs` whose name begins with `network`, at `batch`.

    `best`: their largest batch within `memory` bytes, of which `fixed` are parameters and their gradients; `overhead`
    None: one more forward pass.
    """

    table: str
    network: str
    batch: int
    memory: int
    fixed: int
    best: int
    overhead: float | None

    @property
    def name(self) -> str:
        """What the table calls it."""
        return self.network


def _feng_huang() -> list[Row]:
    """Feng & Huang 2021 (arXiv 1808.00079): RTX 2080 Ti, weights and CUDA's own memory excluded."""
    table = """
        alexnet 1024 4955 3287 34; vgg11 64 3577 2781 34; vgg13 64 5136 3565 33; vgg16 64 5136 3565 32
        vgg19 64 5189 3565 33; resnet18 256 5635 3677 30; resnet34 128 4079 1838 35; resnet50 64 5323 1973 31
        resnet101 32 3934 1024 35; resnet152 16 2767 526 37; densenet121 32 4027 898 34; densenet161 16 3751 666 36
        densenet169 32 4862 897 32; densenet201 16 3146 474 53; inception_v3 32 3074 881 29; nasnet 64 5832 1129 31
        amoebanet 64 4944 1058 36; darts 64 5627 1115 55"""
    found = []
    for line in table.replace("\n", ";").split(";"):
        if line.strip():
            name, *numbers = line.split()
            b, regular, best, more = map(int, numbers)
            options = {"image": 300} if name == "inception_v3" else {}
            found.append(Row("feng-huang", name, b, regular * MB, best * MB, more / 100, "rtx-2080ti", False, options))
    return found


def _kusumoto() -> list[Row]:
    """Kusumoto et al. 2019 (arXiv 1905.11722), table 1: K40c with 12 GB, vanilla → the lowest of their methods."""
    table: list[tuple[str, int, float, float, dict[str, Any]]] = [
        ("vgg19", 64, 7.0, 4.5, {}),
        ("resnet50", 96, 8.9, 3.4, {}),
        ("resnet152", 48, 9.2, 2.3, {}),
        ("densenet161", 32, 8.5, 1.6, {}),
        ("unet", 8, 9.1, 4.7, {"image": (572, 572), "valid": True}),
        ("googlenet", 256, 8.5, 5.2, {}),
        ("pspnet", 2, 9.4, 2.7, {}),
    ]
    return [
        Row("kusumoto", name, b, regular * GB, best * GB, None, "v100-16", True, options)
        for name, b, regular, best, options in table
    ]


_DEPTHWISE = (
    "by the roofline most of this step is memory traffic, depthwise convolutions included, so that reruns are dear; "
    "where these take longer than their traffic (not measured here) the same reruns are a smaller share of the step"
)
_NEAR = "minutes of further search have come down to +12.1 % for their bytes, beyond what this run spends"


def _monet() -> list[Row]:
    """MONeT 2021 (Shah et al., arXiv 2010.14501): V100 with 16 GB.  Plain SGD: their memory model has no momentum.

    Their unit is 1000 MiB: they divide PyTorch's counter by 2^20, and print thousands of that.
    """
    table = [
        ("vgg16", 176, 14.12, 5.51, 0.091),
        ("resnet50", 184, 15.06, 4.99, 0.12),
        ("unet", 11, 14.32, 5.01, 0.115),
        ("googlenet", 320, 14.93, 4.99, 0.158),
        ("mobilenet_v2", 272, 14.46, 5.01, 0.087),
    ]
    unit = 1000 * MIB
    notes = {"mobilenet_v2": _DEPTHWISE, "resnet50": _NEAR}
    return [
        Row("monet", name, b, regular * unit, best * unit, o, "v100-16", True, {}, "SGD", notes.get(name, ""))
        for name, b, regular, best, o in table
    ]


_PASS = "the same published batch, with one more forward pass allowed, as the paper's figure of batches has it"
_MOBILE = (
    "by the roofline a step is bound by memory traffic, depthwise convolutions included, which makes reruns dear; with "
    "the authors' measured costs (checkmate-graphs) the published batch is reached"
)
_AMP = "theirs in mixed precision (16-bit activations), ours in float32"

ROWS: list[Row] = [*_feng_huang(), *_kusumoto(), *_monet()]

#: Checkmate (Jain et al. 2020, figure 6) and Paddle's documentation of recomputation (V100 with 32 GB).  Checkmate's
#: U-Net is Keras' with a VGG-16 encoder, whose decoder ends at half the image's size: a row of GRAPH_ROWS, not `unet`
BATCH_ROWS: list[BatchRow] = [
    BatchRow("checkmate", "mobilenet_v1", 16 * GIB, 0, 1105, 0.10, "v100-16", note=_MOBILE),
    BatchRow("checkmate", "mobilenet_v1", 16 * GIB, 0, 1105, None, "v100-16", note=_PASS),
    BatchRow("paddle", "resnet50", 32 * GIB, 380, 780, 247.3 / 189.8 - 1, "v100-32"),
    BatchRow("paddle", "bert-large", 32 * GIB, 18, 180, 23.9 / 17.8 - 1, "v100-32", {"seq": 512}, "Adam", _AMP),
]

#: the same two of Checkmate's on their own graphs with their own costs; parameters: Keras' counts, twice for gradients
GRAPH_ROWS: list[GraphRow] = [
    GraphRow("checkmate-graphs", "MobileNet", 512, 16 * GB, 8 * 4_253_864, 1105, 0.10),
    GraphRow("checkmate-graphs", "vgg_unet", 32, 16 * GB, 8 * 12_330_000, 61, 0.10),
    GraphRow("checkmate-graphs", "vgg_unet", 32, 16 * GB, 8 * 12_330_000, 61, None),
]

_GRADIENTS = (
    "gradients count here: a block's backward holds 5 of the 8 values that 2.65 % are; with 9 (3 %) it is 2.05, and "
    "where gradients take no bytes 2.08 in 2.33 %"
)

#: Gruslys et al. 2016; the residual chain: the optimum over whole blocks (`synthetic.py`)
CHAIN_ROWS: list[ChainRow] = [
    *[ChainRow("gruslys", "recurrent", 1000, s, p) for s, p in ((0.05, 1.32),)],
    *[ChainRow("gruslys", "lstm", 1000, s, p) for s, p in ((0.05, 1.32), (0.02, 1.58), (0.01, 1.85))],
    *[
        ChainRow("chain", "residual_chain", 100, s, p)
        for s, p in ((0.66, 1.11), (0.33, 1.23), (0.2, 1.27), (0.1, 1.33), (0.066, 1.47), (0.053, 1.57))
    ],
    ChainRow("chain", "residual_chain", 100, 0.0265, 2.23, _GRADIENTS),
]
