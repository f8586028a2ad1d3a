"""The bytes that a step of PyTorch takes at once on a CPU, by the events of its own profiler."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def held_bytes(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Bytes of parameters, buffers and inputs, each storage once."""
    storages = [t.untyped_storage() for t in (*module.parameters(), *module.buffers(), *inputs)]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def peak_bytes(step: Callable[[], Any]) -> int:
    """Most bytes that `step` has allocated at once beyond those that were there before, temporaries included.

    What the step returns, and gradients, count to the end.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        kept = step()
    events = list(watched.profiler.kineto_results.experimental_event_tree())
    sizes = []
    while events:
        event = events.pop()
        events += event.children
        if event.tag.name == "Allocation":
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = most = 0
    for _, size in sorted(sizes, key=lambda s: s[0]):
        live += size
        most = max(most, live)
    del kept
    return most
