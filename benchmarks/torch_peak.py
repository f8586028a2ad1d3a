"""PyTorch's side of memory_pytorch.py: prints the peak of one training step as JSON.  Runs in PyTorch's environment.

    python torch_peak.py NAME BATCH [--layers N] [--seq N] [--recompute]

All memory events of torch.profiler are read, from before the network is built, so that parameters, gradients,
optimizer state and the batch count; the peak is that of the second step, when the optimizer's state exists.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch_networks import batch, network


def memory_events(p: profile) -> tuple[list[tuple[float, int, int]], tuple[float, float]]:
    """(time, bytes, total allocated) of each event, and begin and end of the second step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        p.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())["traceEvents"]
    events = [
        (float(e["ts"]), int(e["args"]["Bytes"]), int(e["args"]["Total Allocated"]))
        for e in trace
        if e.get("name") == "[memory]" and e["args"].get("Device Type", 0) == 0
    ]
    step = next(e for e in trace if e.get("name") == "step 2")
    return sorted(events, key=lambda e: e[0]), (float(step["ts"]), float(step["ts"]) + float(step["dur"]))


def peak_in(events: list[tuple[float, int, int]], span: tuple[float, float]) -> tuple[int, int]:
    """The most bytes allocated within the span: by the profiler's own totals, and by adding up its events."""
    total, summed, reported, peak = 0, 0, 0, 0
    for at, size, allocated in events:
        summed += size
        if at <= span[1]:
            total = allocated
        if span[0] <= at <= span[1]:
            reported, peak = max(reported, total), max(peak, summed)
        elif at < span[0]:
            reported, peak = allocated, summed  # what is there when the step begins
    return reported, peak


def train(net: nn.Module, inputs: list[torch.Tensor], label: torch.Tensor) -> list[float]:
    """Two steps of SGD with momentum, as everybody writes them."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    loss_of, losses = nn.CrossEntropyLoss(), []
    for i in (1, 2):
        with record_function(f"step {i}"):
            optimizer.zero_grad()
            loss = loss_of(net(*inputs), label)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Profiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("batch", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--recompute", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        options = {} if args.layers is None else {"layers": args.layers}
        net = network(args.name, **options).train()
        net.recompute = args.recompute
        inputs, label = batch(args.name, args.batch, args.seq)
        losses = train(net, inputs, label)
    events, span = memory_events(p)
    reported, summed = peak_in(events, span)
    result = {
        "torch": torch.__version__,
        "parameters": sum(q.numel() for q in net.parameters()),
        "peak_bytes": reported,
        "summed_bytes": summed,
        "events": len(events),
        "losses": losses,
        "threads": torch.get_num_threads(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
