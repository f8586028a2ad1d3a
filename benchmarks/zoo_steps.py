"""What the memory benchmarks share: compiled training steps of the zoo, a machine's description, tables."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

import recompute as rc
from recompute import models
from recompute.compiling.compiler import CompiledStep, compile_step
from recompute.compiling.steps import attach_loss
from recompute.data.batches import synthetic_batch

MIB = 1 << 20


def zoo_step(
    name: str, batch: int, *, recompute: bool, optimizer: Any, weights: bool = True, **options: Any
) -> tuple[CompiledStep, str]:
    """A training step of a zoo network with its natural loss, and the loss's name.

    `recompute`: with the checkpoints that the zoo proposes.  Without `weights` parameters are constants: enough for
    memory, not for training.
    """
    program = rc.load(models.build(name, batch=batch, weights=weights, **options))
    loss, _ = attach_loss(program, None)
    checkpoints = list(models.info(name, **options).checkpoints) if recompute else None
    return compile_step(program, loss, optimizer, checkpoints=checkpoints), loss


def zoo_batch(step: CompiledStep, name: str, **options: Any) -> dict[str, np.ndarray]:
    """One synthetic batch that fits the step."""
    entry = models.info(name, **options)
    specs = {s.name: s for s in (*entry.inputs, *((entry.label,) if entry.label else ()))}
    return synthetic_batch(step.program, 0, specs)


def write_data(
    name: str, batch: int, seed: int, folder: Path, *, with_model: bool = False, **options: Any
) -> tuple[Path, list[str]]:
    """A network's weights and a batch as FOLDER/data.npz for PyTorch's side, and the inputs' names in order.

    Arrays are `weights/NAME` (those that are trained) and `feed/NAME`; `with_model`: the network too, as model.onnx.
    """
    model = models.build(name, batch=batch, seed=seed, **options)
    if with_model:
        onnx.save(model, str(folder / "model.onnx"))
    entry = models.info(name, **options)
    assert entry.label is not None
    specs = [*entry.inputs, entry.label]
    draw = np.random.default_rng(seed)
    arrays = {f"feed/{s.name}": s.sample(draw, batch=batch) for s in specs}
    for t in model.graph.initializer:
        if t.data_type == onnx.TensorProto.FLOAT and not t.name.endswith((".running_mean", ".running_var")):
            arrays[f"weights/{t.name}"] = numpy_helper.to_array(t)
    path, order = folder / "data.npz", [s.name for s in specs]
    np.savez(path, order=np.array(order), **arrays)
    return path, order


def machine() -> dict[str, Any]:
    """Date, processor and versions; nothing that tells which machine it was."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        cpu = next((value.strip() for key, _, value in lines if key.strip() == "model name"), cpu)
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    return {"date": datetime.date.today().isoformat(), "cpu": cpu, "cores": os.cpu_count(), **versions}


def headline(facts: dict[str, Any]) -> str:
    """The machine in one line."""
    return ", ".join(f"{k} {v}" if k not in ("date", "cpu") else str(v) for k, v in facts.items())


def row_text(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Cells in columns: the first to the left, the others to the right."""
    first, *rest = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(c.rjust(w) for c, w in rest)]).rstrip()


def write_json(path: Path | None, facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Machine and rows; nothing where no file is asked for."""
    if path is not None:
        path.write_text(json.dumps({**facts, "rows": list(rows)}, indent=1) + "\n")
