"""PyTorch's side of cpu.py: a network with the zoo's weights takes training steps.  Runs in PyTorch's environment.

python cpu_torch.py SPECIFICATION           a worker (see cpu_worker.py)
python cpu_torch.py SPECIFICATION --peak    prints the peak memory of the second step (see torch_peak.py)

The specification is JSON: network, options, data (an .npz with `weights/...`, `feed/...` and the feed's order),
optimizer, threads, flags.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cpu_worker import serve
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch_networks import network
from torch_peak import memory_events, peak_in
from torch_weights import load_zoo


def prepared(spec: dict[str, Any]) -> tuple[nn.Module, Callable[[], Tensor], torch.optim.Optimizer]:
    """The network, its loss on the batch, and its optimizer."""
    flags = set(spec["flags"])
    torch.set_num_threads(spec["threads"])
    arrays = np.load(spec["data"])
    net = network(spec["network"], **spec["options"]).train()
    load_zoo(net, {n.removeprefix("weights/"): arrays[n] for n in arrays.files if n.startswith("weights/")})
    net.recompute = "checkpoint" in flags
    *inputs, label = (torch.from_numpy(arrays[f"feed/{n}"]).clone() for n in spec["feed"])
    if "channels_last" in flags:
        net = net.to(memory_format=torch.channels_last)
        inputs = [x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in inputs]
    for module in net.modules():
        if "sdpa" in flags and hasattr(module, "fast"):
            module.fast = True

    def loss_of() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in flags):
            logits = net(*inputs)
        return nn.functional.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), label.reshape(-1))

    found = torch.compile(loss_of) if "compile" in flags else loss_of
    return net, found, optimizer_of(spec, net, fused=True if "fused" in flags else None)


def optimizer_of(spec: dict[str, Any], net: nn.Module, *, fused: bool | None) -> torch.optim.Optimizer:
    """SGD with momentum, or Adam, as ours."""
    given = {"lr": spec["learning_rate"], "fused": fused}
    if spec["optimizer"] == "momentum":
        return torch.optim.SGD(net.parameters(), momentum=0.9, **given)
    return torch.optim.Adam(net.parameters(), **given)


def start(spec: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], float], Callable[[], dict[str, Any]]]:
    """For `serve`."""
    torch.manual_seed(0)
    net, loss_of, optimizer = prepared(spec)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.item()

    facts = {"version": torch.__version__, "parameters": sum(p.numel() for p in net.parameters())}
    return facts, step, dict


def peak(spec: dict[str, Any]) -> dict[str, Any]:
    """The most bytes that the second step has allocated, with parameters, gradients, optimizer state and batch."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        _, step, _ = start(spec)
        for i in (1, 2):
            with record_function(f"step {i}"):
                step()
    reported, summed = peak_in(*memory_events(p))
    return {"peak_bytes": reported, "summed_bytes": summed}


if __name__ == "__main__":
    if "--peak" in sys.argv:
        print(json.dumps(peak(json.loads(sys.argv[1]))))
    else:
        serve(start)
