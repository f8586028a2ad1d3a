"""Memory and time of a step of a transformer on many ranks, by closed formulas.

Activations: Korthikanti et al. 2022 (arXiv 2205.05198, equations 1 to 6).  A step's time adds, for each micro-batch of
a stage, products at a part of the device's peak, element-wise traffic at its bandwidth, and communication by the α-β
model; the bubble of 1F1B is (p-1)/v micro-batches (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).  Weights are
float16 or bfloat16, and no communication is beside computation.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...communication.links import Network
from ...cost import Device
from ...errors import UsageError
from .candidates import Candidate

#: the part of a device's peak that products reach, whatever their size.  Fitted to one row: 175 billion parameters with
#: sequence parallelism and selective recomputation take the published 13.75 s on 64 A100 (arXiv 2205.05198, table 5).
ACHIEVED = 0.647
#: bytes of weights, gradients and Adam's state of a parameter: 2 (weight) + 4 (gradient) + 12 (float32 weight, moments)
STATE_BYTES = (2, 4, 12)


@dataclass(frozen=True)
class Transformer:
    """A network of repeated layers: `inner` is 4 · hidden where the feed-forward network is GPT's."""

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int

    @property
    def layer_parameters(self) -> int:
        """Weights, biases and norms of one layer."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def parameters(self) -> int:
        """All of them, the output tied to the embedding."""
        return self.layers * self.layer_parameters + (self.vocab + self.seq + 2) * self.hidden

    def layer_flops(self, batch: int) -> int:
        """FLOPs of the matrix products of one layer's forward pass."""
        return 24 * batch * self.seq * self.hidden**2 + self.attention_flops(batch)

    def attention_flops(self, batch: int) -> int:
        """FLOPs of the two products of attention, which selective recomputation repeats."""
        return 4 * batch * self.seq**2 * self.hidden

    def step_flops(self, batch: int) -> int:
        """FLOPs of the model's forward and backward pass of a batch, nothing recomputed (what MFU counts)."""
        return 3 * (self.layers * self.layer_flops(batch) + 2 * batch * self.seq * self.hidden * self.vocab)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, of them the bubble's and those of communication; `mfu` is a part of the devices' peak."""

    seconds: float
    bubble: float
    exposed_communication: float
    mfu: float


def layer_activation_bytes(net: Transformer, c: Candidate) -> float:
    """Bytes that a rank keeps of one layer and one micro-batch for the backward pass."""
    sbh = net.seq * c.micro_batch * net.hidden
    t, share = c.tp, 5 * net.heads * net.seq / net.hidden
    if c.recompute == "full":
        return 2 * sbh / (t if c.sequence_parallel else 1)
    kept = 0.0 if c.recompute == "selective" else share
    return sbh * ((34 + kept) / t if c.sequence_parallel else 10 + (24 + kept) / t)


def activation_bytes(net: Transformer, c: Candidate) -> float:
    """Bytes of the first stage's activations: p micro-batches of L/p layers are alive, more where interleaved."""
    alive = net.layers * (1 + (c.pp - 1) / (c.pp * c.chunks) if c.chunks > 1 else 1)
    return alive * layer_activation_bytes(net, c)


def state_bytes(net: Transformer, c: Candidate) -> float:
    """Weights, gradients and optimizer state of the first stage's rank, with what ZeRO divides."""
    stage = (net.layers / c.pp * net.layer_parameters + (net.vocab + net.seq) * net.hidden) / c.tp
    weight, gradient, moments = STATE_BYTES
    parts = [
        size / (c.dp if c.zero >= stage_of else 1) for size, stage_of in ((weight, 3), (gradient, 2), (moments, 1))
    ]
    return stage * sum(parts)


def memory_bytes(net: Transformer, c: Candidate) -> float:
    """What a rank of the first stage holds at its peak, but for workspace."""
    return state_bytes(net, c) + activation_bytes(net, c)


def step_time(net: Transformer, c: Candidate, batch: int, device: Device, network: Network) -> StepTime:
    """The time of a step of `batch` samples.  UsageError if the batch is not a multiple of dp · micro_batch."""
    if batch % (c.dp * c.micro_batch):
        raise UsageError(
            f"a batch of {batch} cannot be cut into micro-batches of {c.micro_batch} on dp={c.dp}: give a multiple of "
            f"{c.dp * c.micro_batch}"
        )
    micro_batches, layers = batch // (c.dp * c.micro_batch), net.layers / c.pp
    compute = layers * _layer_seconds(net, c, device)
    # The head is on the last stage alone, which all others wait for.
    head = 3 * 2 * c.micro_batch * net.seq * net.hidden * net.vocab / c.tp / (ACHIEVED * device.f16)
    sent = layers * _tensor_seconds(net, c, network) + _messages_seconds(net, c, network)
    one = compute + head + sent
    bubble = 0.0 if c.schedule == "zero-bubble" else (c.pp - 1) / c.chunks * one
    sums = _gradients_seconds(net, c, network)
    weights = net.parameters / (c.pp * c.tp)
    update = 2 * sum(STATE_BYTES) * weights / (c.dp if c.zero else 1) / device.bandwidth
    seconds = micro_batches * one + bubble + sums + update
    mfu = net.step_flops(batch) / (seconds * c.ranks * device.f16)
    return StepTime(seconds, bubble, micro_batches * sent + sums, mfu)


def _layer_seconds(net: Transformer, c: Candidate, device: Device) -> float:
    """Computation of a layer and a micro-batch, forward and backward, with what is recomputed."""
    sbh, s = net.seq * c.micro_batch * net.hidden, c.tp if c.sequence_parallel else 1
    softmax = (
        9 * net.heads * net.seq**2 * c.micro_batch / c.tp
    )  # read and written once each, then dropout with its mask
    others = sbh * (22 / s + 22 / c.tp)  # two norms, two dropouts with sums; GELU, and the heads' copies
    forward = net.layer_flops(c.micro_batch) / c.tp / (ACHIEVED * device.f16) + (softmax + others) / device.bandwidth
    attention = net.attention_flops(c.micro_batch) / c.tp / (ACHIEVED * device.f16) + softmax / device.bandwidth
    return 3 * forward + {"none": 0.0, "selective": attention, "full": forward}[c.recompute]


def _tensor_seconds(net: Transformer, c: Candidate, network: Network) -> float:
    """AllReduces along tp, two a layer in each pass; with sequence parallelism as many bytes in two halves each."""
    if c.tp == 1:
        return 0.0
    rate = network.inside if not network.node or c.tp <= network.node else network.across
    moved = 2 * (c.tp - 1) / c.tp * 2 * net.seq * c.micro_batch * net.hidden
    times = 6 if c.recompute == "full" else 4
    return times * (moved / rate + network.latency * 2 * (c.tp - 1).bit_length())


def _messages_seconds(net: Transformer, c: Candidate, network: Network) -> float:
    """What a stage sends and receives of a micro-batch: a tp-th of the activations each way for each chunk."""
    if c.pp == 1:
        return 0.0
    rate = network.across or network.inside
    return 2 * c.chunks * (2 * net.seq * c.micro_batch * net.hidden / c.tp / rate + network.latency)


def _gradients_seconds(net: Transformer, c: Candidate, network: Network) -> float:
    """The sum of float32 gradients along dp, after the last micro-batch."""
    if c.dp == 1:
        return 0.0
    near = not network.node or c.ranks <= network.node
    rate = network.inside if near else network.across
    return 2 * (c.dp - 1) / c.dp * 4 * net.parameters / (c.pp * c.tp) / rate
