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


def rough_bytes(facts: Facts, c: Candidate, batch: int = 0) -> float:
    """About what a rank of the first stage holds at its peak in a step of `batch` samples (0: of many)."""
    micro_batches = batch // (c.dp * c.micro_batch) if batch else 2 * c.pp
    sent = c.zero > 1 or (c.zero == 1 and micro_batches == 1)  # gradients are sent as soon as they are there
    layers = math.ceil(facts.layers / c.pp)
    parameters = layers * _layer_parameters(facts, c) + facts.fixed_parameters / min(c.pp, 2) / c.tp
    state = parameters * (
        _COPY / (c.dp if c.zero == 3 else 1) + _GRADIENT / (c.dp if sent else 1)
        + _STATE / (c.dp if c.zero else 1)
    )  # fmt: skip
    if sent:  # whole gradients, and whole weights, of two layers at a time, or of a table
        whole = max(2 * _layer_parameters(facts, c), facts.fixed_parameters / 2 / c.tp)
        state += whole * (1 - 1 / c.dp) * (_GRADIENT + (_COPY if c.zero == 3 else 0))
    products = facts.layer_kept - facts.expert_kept * (1 - 1 / c.ep)
    kept = layers * (_CROSSING * facts.stream if c.recompute == "full" else _KEPT * products)
    if c.schedule == "zero-bubble":
        kept *= _DELAYED
    if c.chunks > 1:
        kept = (kept + _BETWEEN * c.chunks * facts.stream) * (1 + (c.pp - 1) / (c.pp * c.chunks))
    return state + kept * c.micro_batch * min(c.pp, micro_batches) / (c.tp * c.cp)


def rough_seconds(
    facts: Facts, c: Candidate, batch: int, device: Device, network: Network, precision: str | None
) -> float:
    """About the time of a step of `batch` samples of all ranks."""
    micro_batches, layers = batch // (c.dp * c.micro_batch), math.ceil(facts.layers / c.pp)
    rate = (ACHIEVED if device.reached is not None else 1.0) * device.rate(precision)
    samples = c.micro_batch / (c.tp * c.cp)
    forward = samples * (facts.layer_flops - facts.expert_flops * (1 - 1 / c.ep))
    compute = layers * forward * (4 if c.recompute == "full" else 3) / rate
    head = 3 * samples * facts.fixed_flops / rate
    traffic = layers * 12 * 2 * facts.layer_kept * samples / device.bandwidth
    one = compute + head + traffic + layers * _layer_seconds(facts, c, network) + _message_seconds(facts, c, network)
    pauses = (c.pp - 1) / c.chunks * (1 / 3 if c.schedule == "zero-bubble" else 1)
    parameters = (facts.layers * _layer_parameters(facts, c) + facts.fixed_parameters / c.tp) / c.pp
    copies = c.dp * c.cp
    whole = parameters / (network.across if network.node and c.ranks > network.node else network.inside)
    sums = 2 * _GRADIENT * whole * (copies - 1) / copies
    if c.zero > 1 and c.dp > 1:  # gradients of each micro-batch, and weights for both of its passes, beside computation
        each = (_GRADIENT + (2 * _COPY if c.zero == 3 else 0)) * whole * (c.dp - 1) / c.dp
        sums += micro_batches * max(0.0, each - one)
    return (micro_batches + pauses) * one + sums + 34 * parameters / (c.dp if c.zero else 1) / device.bandwidth


def _layer_parameters(facts: Facts, c: Candidate) -> float:
    """Those of a layer that a rank computes with."""
    return (facts.layer_parameters - facts.expert_parameters * (1 - 1 / c.ep)) / c.tp


def _layer_seconds(facts: Facts, c: Candidate, network: Network) -> float:
    """The collectives of a layer, of both passes: four sums along tp; along cp keys and values, which both passes
    gather, and the sums of their gradients; two sums along ep."""
    stream, near = 2 * facts.stream * c.micro_batch, 1
    seconds = 0.0
    for size, moved in ((c.tp, 8 * stream / c.cp), (c.cp, 6 * stream / c.tp), (c.ep, 4 * stream / (c.tp * c.cp))):
        near *= size  # neighbours are along tp, then along cp
        rate = network.inside if not network.node or near <= network.node else network.across
        seconds += (moved * (size - 1) / size / rate + 8 * network.latency) if size > 1 else 0.0
    return seconds


def _message_seconds(facts: Facts, c: Candidate, network: Network) -> float:
    """What a stage sends and receives of a micro-batch."""
    if c.pp == 1:
        return 0.0
    rate = network.across or network.inside
    return 2 * c.chunks * (4 * facts.stream * c.micro_batch / (c.tp * c.cp) / rate + network.latency)
