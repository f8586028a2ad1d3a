"""What run_all measures: networks, batches, precisions; and how the checkout is imported where it is not installed."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEED, RATE = 0, 1e-5


@dataclass(frozen=True)
class Row:
    """A network of the zoo at a batch and a precision; `options` of the zoo, dropout off so that losses compare."""

    network: str
    batch: int
    precision: str = "fp32"
    optimizer: str = "adam"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """In the table."""
        seq = f" s{self.options['seq']}" if "seq" in self.options else ""
        return f"{self.network} b{self.batch}{seq} {self.precision}"


@dataclass(frozen=True)
class Batch:
    """A network whose biggest batch is looked for in each budget."""

    network: str
    budgets: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """In the table."""
        return f"{self.network}{' s' + str(self.options['seq']) if 'seq' in self.options else ''}"


_STILL = {"dropout": 0.0}
_LSTM = {"seq": 100, "features": 256, "hidden": 256, "layers": 2}
ROWS: tuple[Row, ...] = (
    Row("resnet50", 64, optimizer="momentum"),
    Row("bert-base", 32, options={**_STILL, "seq": 128}),
    Row("gpt2-small", 4, options={**_STILL, "seq": 1024}),
    Row("resnet50", 256, optimizer="momentum"),
    Row("bert-large", 8, options={**_STILL, "seq": 512}),
    Row("vgg16", 32, optimizer="momentum", options=_STILL),
    Row("unet", 4, optimizer="momentum"),
    Row("lstm", 128, options=_LSTM),
    Row("resnet50", 256, "bf16", optimizer="momentum"),
    Row("bert-base", 32, "bf16", options={**_STILL, "seq": 512}),
    Row("gpt2-small", 8, "bf16", options={**_STILL, "seq": 1024}),
    Row("resnet50", 256, "tf32", optimizer="momentum"),
    Row("bert-large", 8, "tf32", options={**_STILL, "seq": 512}),
)
TINY: tuple[Row, ...] = (Row("mlp", 4, optimizer="momentum"), Row("bert-tiny", 2, options={**_STILL, "seq": 16}))
BATCHES: tuple[Batch, ...] = (
    Batch("resnet50", ("16GB", "32GB", "80GB")),
    Batch("bert-large", ("32GB", "80GB"), {"seq": 512}),
)


def data_of(row: Row, folder: Path) -> Path:
    """Weights and one batch (see `zoo_steps.write_data`)."""
    from zoo_steps import write_data  # not in PyTorch's process

    return write_data(row.network, row.batch, SEED, folder, **row.options)[0]


def overlay(root: Path) -> dict[str, str]:
    """An environment in which `import recompute` takes this checkout: links to its folders, as setup.cfg maps them."""
    folder = Path(tempfile.gettempdir()) / f"recompute-overlay-{os.getpid()}" / "recompute"
    folder.mkdir(parents=True, exist_ok=True)
    for path in (*(root / "recompute").iterdir(), *(root / n for n in ("passes", "runtime", "models"))):
        link = folder / path.name
        if not link.exists():
            link.symlink_to(path)
    before = os.environ.get("PYTHONPATH", "")
    sys.path.insert(0, str(folder.parent))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in (str(folder.parent), before) if p)}
