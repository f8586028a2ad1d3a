"""PyTorch's side of ranks.py: processes with gloo take training steps.  Runs in PyTorch's environment.

    python torch_ranks.py SPECIFICATION

The specification is JSON: network, options, batch (a rank), ranks, threads, steps, data (an .npz as of `write_data`,
with the batch of all ranks), kind ("ddp", "fsdp" or "one": a single process without communication).  Prints JSON:
seconds of each step (the slowest rank's), the peak of the second step in bytes by the profiler, and the losses.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch_networks import network
from torch_peak import memory_events, peak_in
from torch_weights import load_zoo


def wrapped(net: nn.Module, kind: str) -> nn.Module:
    """The network as DistributedDataParallel or fully_shard (FSDP 2) has it, each block for itself."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for module in net.modules():
            if type(module).__name__ in ("Block", "BertLayer", "Gpt2Layer"):
                fully_shard(module)
        fully_shard(net)
    return net


def rows(a: Any, rank: int, ranks: int) -> Tensor:
    """A rank's part of the batch."""
    each = len(a) // ranks
    return torch.from_numpy(a[rank * each : (rank + 1) * each].copy())


def work(rank: int, spec: dict[str, Any], port: int) -> None:
    """One process."""
    torch.set_num_threads(spec["threads"])
    ranks = spec["ranks"]
    if spec["kind"] != "one":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    arrays = np.load(spec["data"])
    seconds, losses, facts = [], [], {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        plain = network(spec["network"], **spec["options"]).train()
        load_zoo(plain, {n.removeprefix("weights/"): arrays[n] for n in arrays.files if n.startswith("weights/")})
        net = wrapped(plain, spec["kind"])
        *inputs, label = (rows(arrays[f"feed/{n}"], rank, ranks) for n in arrays["order"])
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

        def step() -> float:
            optimizer.zero_grad()
            logits = net(*inputs)
            loss = nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), label.reshape(-1))
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        for i in (1, 2):
            with record_function(f"step {i}"):
                losses.append(step())
    facts["peak"] = max(peak_in(*memory_events(p)))
    for _ in range(spec["steps"]):
        if spec["kind"] != "one":
            dist.barrier()
        begin = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - begin)
    every = torch.tensor(seconds)
    mean = torch.tensor(losses)
    if spec["kind"] != "one":
        dist.all_reduce(every, dist.ReduceOp.MAX)
        dist.all_reduce(mean)
        mean /= ranks
        dist.destroy_process_group()
    if rank == 0:
        print(json.dumps({"seconds": every.tolist(), "losses": mean.tolist(), **facts}), flush=True)
    os._exit(0)  # gloo's threads abort some of the processes that end as usual


def main() -> None:
    """Starts the processes."""
    spec = json.loads(sys.argv[1])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    if spec["ranks"] == 1:
        work(0, spec, port)
    else:
        torch.multiprocessing.spawn(work, (spec, port), nprocs=spec["ranks"])


if __name__ == "__main__":
    main()
