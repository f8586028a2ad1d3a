"""What a block costs: operations, bytes, and seconds by a roofline model of the device.

Roofline (Williams, Waterman & Patterson 2009): an operator takes the longer of its arithmetic at the device's peak
rate and its traffic at the device's bandwidth.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from .ir import Block, Free, Operator, Role
from .op import Cost


@dataclass(frozen=True)
class Device:
    """Rates of a device: floating-point operations and bytes per second, and seconds to start an operator."""

    name: str
    flops: float
    bandwidth: float
    launch: float

    def seconds(self, cost: Cost) -> float:
        """Time of one operator."""
        return max(cost.flops / self.flops, cost.bytes / self.bandwidth) + self.launch


@functools.cache
def this_cpu() -> Device:
    """The rates of this processor, measured once a process: a matrix product and a copy (about 50 ms in all)."""
    n = 640
    a, b, c = (np.ones((n, n), np.float32) for _ in range(3))
    x, y = np.ones(1 << 23, np.float32), np.empty(1 << 23, np.float32)
    flops = 2 * n**3 / _fastest(lambda: np.matmul(a, b, out=c))
    bandwidth = 2 * x.nbytes / _fastest(lambda: np.copyto(y, x))
    return Device("this CPU", flops, bandwidth, 1e-6)


def _fastest(run: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def operator_cost(op: Operator) -> Cost:
    """The price of one operator; frees cost nothing."""
    if isinstance(op.op, Free):
        return Cost(0, 0)
    return op.op.cost(
        [None if v is None else v.type for v in op.inputs],
        [None if v is None else v.type for v in op.outputs],
    )


def total_cost(operators: Iterable[Operator]) -> Cost:
    """The sum of the operators' prices."""
    flops = moved = 0
    for op in operators:
        c = operator_cost(op)
        flops += c.flops
        moved += c.bytes
    return Cost(flops, moved)


def step_seconds(block: Block, device: Device) -> float:
    """Estimated time of one run of the block."""
    return sum(device.seconds(operator_cost(op)) for op in block.operators if not isinstance(op.op, Free))


def kept_bytes(block: Block) -> int:
    """Bytes of forward values that wait for the backward pass: written by the forward pass, read after it."""
    forward = (Role.FORWARD, Role.LOSS)
    made: dict[str, int] = {}
    kept: dict[str, int] = {}
    for op in block.operators:
        if isinstance(op.op, Free):
            continue
        if op.role in forward:
            if not op.op.updates:
                made.update((v.name, v.nbytes) for v in op.writes())
        else:
            kept.update((v.name, made[v.name]) for v in op.reads() if v.name in made)
    return sum(kept.values())
