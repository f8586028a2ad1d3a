"""PyTorch's side of run_all: the same network from the same weights; one line of JSON as the answer."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from gpu_rows import RATE, Row
from torch import nn
from torch_networks import network
from torch_weights import load_zoo

WARM, SECONDS, LEAST = 3, 1.5, 5


def seconds_of(step: Callable[[], object]) -> float:
    """Of a step on the device, which is warm; the peak of its memory begins anew."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin, steps = time.perf_counter(), 0
    while steps < LEAST or time.perf_counter() - begin < SECONDS:
        step()
        steps += 1
        if steps % LEAST == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps


def main(job: dict[str, Any]) -> dict[str, Any]:
    """Losses of the first steps, time of a step, the most memory that was allocated.  `on`: "cuda", or "cpu" to try."""
    row, variant, on = Row(**job["row"]), job["variant"], job.get("on", "cuda")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = row.precision == "tf32"
    torch.backends.cudnn.benchmark = True
    arrays = np.load(job["data"])
    net = network(row.network, **row.options).train()
    load_zoo(net, {n.removeprefix("weights/"): arrays[n] for n in arrays.files if n.startswith("weights/")})
    net.recompute = variant == "checkpoint"
    net = net.to(on, memory_format=torch.channels_last if variant == "channels_last" else torch.preserve_format)
    for module in net.modules():
        if hasattr(module, "fast"):
            module.fast = True
    *inputs, label = (torch.from_numpy(arrays[f"feed/{n}"]).to(on) for n in arrays["order"])
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

    first = float(step())
    for _ in range(WARM - 1):
        last = step()
    last = float(last)
    if on == "cpu":
        return {"loss": first, "last_loss": last}
    seconds = seconds_of(step)
    return {"ms": seconds * 1e3, "loss": first, "last_loss": last, "peak": torch.cuda.max_memory_allocated(),
            "device_bytes": torch.cuda.memory_reserved()}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
