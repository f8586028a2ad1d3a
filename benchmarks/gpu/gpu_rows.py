"""What is measured on a device: networks, batches, precisions; and how the checkout is imported where it is not
installed, and jobs are run in processes of their own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

SEED, RATE = 0, 1e-5
#: seconds that a process may have the device for itself
HELD = 30


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
        dropout = " dropout" if self.options.get("dropout") else ""
        return f"{self.network} b{self.batch}{seq}{dropout} {self.precision}"


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
TINY: tuple[Row, ...] = (
    Row("mlp", 4, optimizer="momentum"),
    Row("lenet", 2),
    Row("bert-tiny", 2, options={**_STILL, "seq": 16}),
)
BATCHES: tuple[Batch, ...] = (
    Batch("resnet50", ("16GB", "32GB", "80GB")),
    Batch("bert-large", ("32GB", "80GB"), {"seq": 512}),
)

#: what the staged run times, the most valuable first, and PyTorch's variants of it
_GPT, _BERT = {**_STILL, "seq": 1024}, {**_STILL, "seq": 128}
STAGED: tuple[tuple[Row, tuple[str, ...]], ...] = (
    (Row("gpt2-small", 8, "bf16", options=_GPT), ("compile", "eager")),
    (Row("resnet50", 64, "bf16"), ("compile", "channels_last")),
    (Row("bert-base", 32, "bf16", options=_BERT), ("compile", "eager")),
    (Row("vit-base", 64, "bf16"), ("compile", "eager")),
    (Row("resnet50", 64, "tf32"), ("channels_last",)),
    (Row("lstm", 128, options=_LSTM), ("eager",)),
    (Row("mlp", 128), ()),
    (Row("bert-base", 32, "tf32", options=_BERT), ("eager",)),
    (Row("resnet50", 64), ("channels_last",)),
    (Row("bert-base", 32, options=_BERT), ("eager",)),
    (Row("gpt2-small", 8, "bf16", options={"dropout": 0.1, "seq": 1024}), ()),
    (Row("gpt2-small", 8, "tf32", options=_GPT), ()),
)


@dataclass(frozen=True)
class Small:
    """A network whose losses the CPU computes, too.  `kept`: with the zoo's checkpoints; `offload`: those wait in host
    memory."""

    network: str
    batch: int
    precision: str = "fp32"
    options: dict[str, Any] = field(default_factory=dict)
    kept: bool = False
    offload: bool = False


_SHORT = {"seq": 96}
SMALL: dict[str, Small] = {
    "mlp": Small("mlp", 16),
    "lenet": Small("lenet", 8),
    "resnet18": Small("resnet18", 4, options={"image": 64, "classes": 10}),
    "lstm": Small("lstm", 8),
    "bert-tiny": Small("bert-tiny", 4, options=_SHORT),
    "gpt2-tiny": Small("gpt2-tiny", 2),
    "bert-tiny tf32": Small("bert-tiny", 4, "tf32", _SHORT),
    "bert-tiny bf16": Small("bert-tiny", 4, "bf16", _SHORT),
    "gpt2-tiny fp16": Small("gpt2-tiny", 2, "fp16"),
    "vit-tiny bf16": Small("vit-tiny", 2, "bf16"),
    "bert-tiny offload": Small("bert-tiny", 4, options=_SHORT, offload=True),
    "bert-tiny recomputed": Small("bert-tiny", 4, options=_SHORT, kept=True),
}


def data_of(row: Row, folder: Path) -> Path:
    """Weights and one batch (see `zoo_steps.write_data`)."""
    from zoo_steps import write_data  # not in PyTorch's process

    return write_data(row.network, row.batch, SEED, folder, **row.options)[0]


def sampled(network: str, batch: int, **options: Any) -> dict[str, Any]:
    """A batch of drawn numbers: inputs and label by name."""
    import numpy as np

    from recompute import models

    entry, draw = models.info(network, **options), np.random.default_rng(SEED)
    return {s.name: s.sample(draw, batch=batch) for s in (*entry.inputs, entry.label) if s}


def wanted(title: str, beginnings: Sequence[str]) -> bool:
    """Whether a row is asked for, by the beginning of its title; all are where nothing is."""
    return not beginnings or title.startswith(tuple(beginnings))


def this_checkout() -> dict[str, str]:
    """An environment in which `import recompute` takes this checkout."""
    before = os.environ.get("PYTHONPATH", "")
    sys.path.insert(0, str(ROOT))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in (str(ROOT), before) if p)}


def rehearsed() -> bool:
    """Whether this process has the tests' fake device in the device's place (RECOMPUTE_TEST_PLACE=fake)."""
    return os.environ.get("RECOMPUTE_TEST_PLACE") == "fake"


def install_fake() -> None:
    """Puts the fake below CuPy where it is asked for."""
    if rehearsed():
        sys.path.insert(0, str(ROOT / "tests"))
        import cuda_fake

        cuda_fake.install()


@contextlib.contextmanager
def alone(lock: str | None) -> Iterator[None]:
    """One process at a time measures, of those that share a file; one that holds it for too long is ended."""
    if lock is None:
        yield
        return
    with Path(lock).open("a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        signal.alarm(HELD)
        try:
            yield
        finally:
            signal.alarm(0)


def ask(script: str, job: dict[str, Any], environment: dict[str, str], limit: float) -> dict[str, Any]:
    """The answer of a script to a job: the last line that it prints, as JSON; `error` where there is none."""
    command = [sys.executable, str(HERE / script), json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {limit:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["it ended without a word"]
        return {"error": last[-1][:400], "trace": last[-12:]}
    try:
        found: dict[str, Any] = json.loads(lines[-1])
    except ValueError:
        return {"error": f"no JSON: {lines[-1][:300]}"}
    return found
