"""Cost models: operations, bytes and estimated seconds of operators and blocks.

A cost model is any object with a name and `seconds(operator)`: a device (`device("h200")`, the roofline), or
`profile.Profile`, which measures times instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from .boundary import as_block
from .devices import DATASHEETS, LAUNCH, CostModel, Datasheet, Device, as_cost, device, is_view, operator_cost, this_cpu
from .errors import expect
from .language.ir import Block, Free, Operator, Role
from .language.op import Cost
from .passes.offloading.transfers import Link
from .passes.target import Target
from .places import CUDAPlace, EmulatedCUDAPlace, Place, as_place

__all__ = [
    "DATASHEETS",
    "CostModel",
    "Datasheet",
    "Device",
    "as_cost",
    "costs_of",
    "device",
    "is_view",
    "kept_bytes",
    "kept_values",
    "link_of",
    "operator_cost",
    "priced",
    "step_seconds",
    "this_cpu",
    "total_cost",
]


def costs_of(place: Place | str | None) -> Device:
    """The default cost model of a place: the data sheet of the CUDA device, found by its name and memory, else this
    CPU's roofline."""
    place = as_place(place)
    if isinstance(place, CUDAPlace) and not isinstance(place, EmulatedCUDAPlace):
        from .runtime.cuda.device.device import described

        name, memory = described(place.device)
        plain = "".join(c for c in name.lower() if c.isalnum())
        off = {k: abs(memory / (sheet.memory << 30) - 1) for k, sheet in DATASHEETS.items()}
        kinds = {k: k.removeprefix("rtx-").partition("-")[0] for k in DATASHEETS}
        if fitting := [k for k in DATASHEETS if kinds[k] in plain and off[k] < 0.3]:
            return device(min(fitting, key=lambda k: (-len(kinds[k]), off[k])))
    return this_cpu()


def priced(target: Target) -> Target:
    """The target with a cost model (default: that of its place) for its precision, and with that one's link rate if it
    has none of its own."""
    cost = expect("target", target, Target, "an rc.Target").cost or costs_of(target.place)
    if target.precision == "tf32" and isinstance(cost, Device):
        cost = cost.with_tf32()
    return dataclasses.replace(target, cost=cost, link=target.link or link_of(cost))


def link_of(cost: CostModel) -> Link:
    """Bytes per second between device and host memory by the cost model; else as in this machine's memory."""
    rate = getattr(cost, "link", 0.0) or getattr(cost, "bandwidth", 0.0) / 2 or this_cpu().bandwidth / 2
    return Link(rate, rate, LAUNCH)


def total_cost(operators: Iterable[Operator]) -> Cost:
    """The sum of the operators' costs."""
    flops = moved = 0
    for op in operators:
        c = operator_cost(op)
        flops += c.flops
        moved += c.bytes
    return Cost(flops, moved)


def step_seconds(block: Block, cost: CostModel | str) -> float:
    """Estimated time of one run of the block."""
    block, cost = as_block(block), as_cost(cost)
    measure = getattr(cost, "measure", None)  # a cost model that measures does so for all operators first
    if measure is not None:
        measure(block.operators)
    return sum(cost.seconds(op) for op in block.operators if not isinstance(op.op, Free))


def kept_values(block: Block) -> dict[str, int]:
    """Forward values that are kept for the backward pass (written by the forward pass, read after it), and their bytes.

    Values offloaded to host memory are not included.
    """
    forward = (Role.FORWARD, Role.LOSS)
    sizes: dict[str, int] = {}
    kept: dict[str, int] = {}
    for op in block.operators:
        if isinstance(op.op, Free) or op.op.copies:
            continue
        if op.role in forward:
            if not op.op.updates:
                sizes.update((v.name, v.nbytes) for v in op.writes())
        else:
            kept.update((v.name, sizes[v.name]) for v in op.reads() if v.name in sizes)
    return {name: nbytes for name, nbytes in sizes.items() if name in kept}


def kept_bytes(block: Block) -> int:
    """Bytes of forward values that are kept for the backward pass."""
    return sum(kept_values(block).values())
