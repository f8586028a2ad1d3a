"""PyTorch's side of what is measured on a device: the same network; one line of JSON as the answer."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from gpu_rows import RATE, Row, alone, sampled
from torch import nn
from torch_networks import network
from torch_weights import load_zoo

WARM, SECONDS, LEAST = 3, 1.0, 5


def timed(step: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of a step on the device, which is warm: between CUDA's events (the median), and by the clock; the
    peak of its memory begins anew."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    each: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    begin = time.perf_counter()
    while len(each) < LEAST or time.perf_counter() - begin < SECONDS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        each.append((start, end))
        if len(each) % LEAST == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - begin) / len(each) * 1e3
    return {"ms": statistics.median(a.elapsed_time(b) for a, b in each), "wall_ms": wall}


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Losses of the first steps, time of a step, the most memory that was allocated.

    `on`: "cuda", or "cpu" to try.  `data`: weights and batch; without it both are drawn.  `gate`: wait for this file,
    after compiling, before measuring; `lock`: see `gpu_rows.alone`, taken before the first step, or behind the gate.
    """
    with contextlib.ExitStack() as stack:
        step = training_step(job)
        if not job.get("gate"):
            stack.enter_context(alone(job.get("lock")))
        begin = time.perf_counter()
        losses = [float(step()) for _ in range(WARM)]
        found = {"loss": losses[0], "last_loss": losses[-1], "warm_seconds": round(time.perf_counter() - begin, 1)}
        if job.get("gate"):
            while not Path(job["gate"]).exists():
                time.sleep(0.2)
            stack.enter_context(alone(job.get("lock")))
        if job.get("on") == "cpu":
            return found
        return {**found, **timed(step), "peak": torch.cuda.max_memory_allocated(),
                "device_bytes": torch.cuda.memory_reserved()}  # fmt: skip


def training_step(job: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """What runs a step of the job's variant and gives its loss."""
    row, variant, on = Row(**job["row"]), job["variant"], job.get("on", "cuda")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = row.precision == "tf32"
    torch.backends.cudnn.benchmark = True
    net = network(row.network, **row.options).train()
    if job.get("data"):
        arrays = np.load(job["data"])
        load_zoo(net, {n.removeprefix("weights/"): arrays[n] for n in arrays.files if n.startswith("weights/")})
        feed = [arrays[f"feed/{n}"] for n in arrays["order"]]
    else:
        feed = list(sampled(row.network, row.batch, **row.options).values())
    net.recompute = variant == "checkpoint"
    net = net.to(on, memory_format=torch.channels_last if variant == "channels_last" else torch.preserve_format)
    for module in net.modules():
        if hasattr(module, "fast"):
            module.fast = True
    *inputs, label = (torch.from_numpy(a).to(on) for a in feed)
    if variant == "channels_last":
        inputs = [x.contiguous(memory_format=torch.channels_last) for x in inputs]
    optimizer = (torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, fused=True) if row.optimizer == "momentum"
                 else torch.optim.Adam(net.parameters(), lr=RATE, fused=True))  # fmt: skip
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(row.precision)
    scaler = torch.amp.GradScaler(on, enabled=row.precision == "fp16")

    def loss_of() -> torch.Tensor:
        with torch.autocast(on, half or torch.bfloat16, enabled=half is not None):
            logits = net(*inputs)
            if logits.ndim == label.ndim + 1 and logits.shape[0:1] + logits.shape[2:] == label.shape:
                return nn.functional.cross_entropy(logits, label)
            return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), label.reshape(-1))

    found = torch.compile(loss_of) if variant == "compile" else loss_of

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = found()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
