"""Closed formulas for a step of any network on many ranks: they choose which programs are compiled.

They count what formulas.py counts for GPT, but of the facts of a program: products at a part of the device's peak,
collectives of tensor parallelism, the pauses of the schedule, the sum of gradients, and the update.
"""

from __future__ import annotations

import math

from ...communication.links import Network
from ...cost import Device
from ...efficiency import ACHIEVED
from ..facts import Facts
from .candidates import Candidate

#: bytes of a parameter: its copy in low precision and its gradient, which ZeRO 3 and 2 divide, and weight and moments
_COPY, _GRADIENT, _STATE = 2, 4, 12
#: bytes that a layer keeps of an element that its products read, of one that crosses between recomputed layers, and of
#: one that crosses between the chunks of an interleaved stage; measured on LLaMA-3 in bfloat16
_KEPT, _CROSSING, _BETWEEN = 3.2, 9.5, 8.0
#: zero-bubble schedules keep gradients of activations, too, until those of weights are made; measured on LLaMA-3 70B
_DELAYED = 1.7


def rough_bytes(facts: Facts, c: Candidate) -> float:
    """About what a rank of the first stage holds at its peak."""
    layers = math.ceil(facts.layers / c.pp)
    parameters = (layers * facts.layer_parameters + facts.fixed_parameters / min(c.pp, 2)) / c.tp
    state = parameters * (
        _COPY / (c.dp if c.zero == 3 else 1) + _GRADIENT / (c.dp if c.zero >= 2 else 1)
        + _STATE / (c.dp if c.zero else 1)
    )  # fmt: skip
    kept = layers * (_CROSSING * facts.stream if c.recompute == "full" else _KEPT * facts.layer_kept)
    if c.schedule == "zero-bubble":
        kept *= _DELAYED
    if c.chunks > 1:
        kept = (kept + _BETWEEN * c.chunks * facts.stream) * (1 + (c.pp - 1) / (c.pp * c.chunks))
    return state + kept * c.micro_batch * c.pp / c.tp


def rough_seconds(
    facts: Facts, c: Candidate, batch: int, device: Device, network: Network, precision: str | None
) -> float:
    """About the time of a step of `batch` samples of all ranks."""
    micro_batches, layers = batch // (c.dp * c.micro_batch), math.ceil(facts.layers / c.pp)
    rate = (ACHIEVED if device.reached is not None else 1.0) * device.rate(precision)
    forward = c.micro_batch * facts.layer_flops / c.tp
    compute = layers * forward * (4 if c.recompute == "full" else 3) / rate
    head = 3 * c.micro_batch * facts.fixed_flops / c.tp / rate
    traffic = layers * 12 * 2 * facts.layer_kept * c.micro_batch / c.tp / device.bandwidth
    one = compute + head + traffic + layers * _tensor_seconds(facts, c, network) + _message_seconds(facts, c, network)
    pauses = (c.pp - 1) / c.chunks * (1 / 3 if c.schedule == "zero-bubble" else 1)
    parameters = facts.parameters / (c.pp * c.tp)
    far = network.across if network.node and c.ranks > network.node else network.inside
    sums = 2 * 4 * parameters * (c.dp - 1) / c.dp / far if c.dp > 1 else 0.0
    return (micro_batches + pauses) * one + sums + 34 * parameters / (c.dp if c.zero else 1) / device.bandwidth


def _tensor_seconds(facts: Facts, c: Candidate, network: Network) -> float:
    """The collectives of a layer along tp, of both passes."""
    if c.tp == 1:
        return 0.0
    near = not network.node or c.tp <= network.node
    moved = 2 * (c.tp - 1) / c.tp * 2 * facts.stream * c.micro_batch
    return 4 * (moved / (network.inside if near else network.across) + network.latency * 2)


def _message_seconds(facts: Facts, c: Candidate, network: Network) -> float:
    """What a stage sends and receives of a micro-batch."""
    if c.pp == 1:
        return 0.0
    rate = network.across or network.inside
    return 2 * c.chunks * (4 * facts.stream * c.micro_batch / c.tp / rate + network.latency)
