"""Memory and time of a step of a transformer on many ranks, by closed formulas.

Activations: Korthikanti et al. 2022 (arXiv 2205.05198, equations 1 to 6).  A step's time adds, for each micro-batch of
a stage, matrix products at a fraction of the device's peak, element-wise traffic at its bandwidth, and communication by
the α-β model.  The bubble is (p-1)/v micro-batches for p ranks along pp with v chunks each (v = 1: 1F1B; Narayanan et
al. 2021, arXiv 2104.04473, section 2.2), and is taken as 0 for zero-bubble schedules.  Weights are float16 or bfloat16.
The fractions of data-sheet rates that products, memory and links reach are in efficiency.py.  With ZeRO 3,
communication along dp overlaps computation; all other communication is exposed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ...communication.links import Network
from ...cost import Device
from ...efficiency import Reached, reached
from ...errors import UsageError
from .candidates import Candidate

#: bytes of weights, gradients and Adam's state of a parameter: 2 (weight) + 4 (gradient) + 12 (float32 weight, moments)
STATE_BYTES = (2, 4, 12)


@dataclass(frozen=True)
class Transformer:
    """A network of repeated layers: GPT's by default; `inner`, `gated`, `groups`, `fused` and `tied` describe LLaMA's.

    `inner`: width of the feed-forward network (0: 4 · hidden); `gated`: it has a gate beside the up projection
    (SwiGLU); `groups`: heads of keys and values (0: as many as of queries); `fused`: attention is one causal operator
    that saves no scores; `tied`: the output head shares the embedding's table, and positions have a table, too;
    `again`: with fused attention, the fraction of the weight products' time that selective recomputation repeats.
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    inner: int = 0
    gated: bool = False
    groups: int = 0
    fused: bool = False
    tied: bool = True
    again: float = 0.0

    @property
    def width(self) -> int:
        """The hidden width of the feed-forward network."""
        return self.inner or 4 * self.hidden

    @property
    def projected(self) -> int:
        """Elements of queries, keys and values of a token."""
        return self.hidden + 2 * self.hidden * (self.groups or self.heads) // self.heads

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one layer: weights, biases, norms."""
        weights = self.hidden * (self.projected + self.hidden + (3 if self.gated else 2) * self.width)
        return weights + (2 if self.gated else 13) * self.hidden

    @property
    def parameters(self) -> int:
        """Number of parameters of the network, embeddings included."""
        tables = self.vocab + self.seq + 2 if self.tied else 2 * self.vocab + 1
        return self.layers * self.layer_parameters + tables * self.hidden

    def products(self, tokens: int, tp: int) -> list[tuple[int, int, int]]:
        """(m, n, k) of the weight products [m, k] · [k, n] of a layer's forward pass, on one of `tp` ranks."""
        up = (2 if self.gated else 1) * self.width
        return [(tokens, self.projected // tp, self.hidden), (tokens, self.hidden, self.hidden // tp),
                (tokens, up // tp, self.hidden), (tokens, self.hidden, self.width // tp)]  # fmt: skip

    def layer_flops(self, batch: int) -> int:
        """FLOPs of the matrix products of one layer's forward pass."""
        weights = sum(2 * m * n * k for m, n, k in self.products(batch * self.seq, 1))
        return weights + self.attention_flops(batch)

    def attention_flops(self, batch: int) -> int:
        """FLOPs of attention's two forward products, all scores counted (as for MFU), even with a causal mask."""
        return 4 * batch * self.seq**2 * self.hidden

    def step_flops(self, batch: int) -> int:
        """FLOPs of the model's forward and backward pass of a batch, nothing recomputed (what MFU counts)."""
        return 3 * (self.layers * self.layer_flops(batch) + 2 * batch * self.seq * self.hidden * self.vocab)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, of its bubble and of its exposed communication; `mfu`: a fraction of the devices' peak."""

    seconds: float
    bubble: float
    exposed_communication: float
    mfu: float


def layer_activation_bytes(net: Transformer, c: Candidate) -> float:
    """Bytes that a rank saves of one layer and one micro-batch for the backward pass.

    The layer is GPT's, whatever `net.gated`, `net.groups` and `net.fused` say; with recompute "none" it saves scores.
    """
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
    """Bytes of weights, gradients and optimizer state on a rank of the first stage, sharded as `c.zero` says.

    A table of positions is counted even where `net.tied` is False."""
    stage = (net.layers / c.pp * net.layer_parameters + (net.vocab + net.seq) * net.hidden) / c.tp
    weight, gradient, moments = STATE_BYTES
    parts = [
        size / (c.dp if c.zero >= stage_of else 1) for size, stage_of in ((weight, 3), (gradient, 2), (moments, 1))
    ]
    return stage * sum(parts)


def memory_bytes(net: Transformer, c: Candidate) -> float:
    """Peak bytes of a rank of the first stage, without workspace."""
    return state_bytes(net, c) + activation_bytes(net, c)


def step_time(net: Transformer, c: Candidate, batch: int, device: Device, network: Network) -> StepTime:
    """The time of a step of `batch` samples.  UsageError if the batch is not a multiple of dp · micro_batch."""
    if batch % (c.dp * c.micro_batch):
        raise UsageError(
            f"a batch of {batch} cannot be cut into micro-batches of {c.micro_batch} on dp={c.dp}: give a multiple of "
            f"{c.dp * c.micro_batch}"
        )
    micro_batches, layers = batch // (c.dp * c.micro_batch), net.layers / c.pp
    how, tokens = reached(device.name), net.seq * c.micro_batch
    network = dataclasses.replace(network, inside=how.links * network.inside, across=how.links * network.across)
    # The output head is on the last stage only, and all others wait for it; its logits are float32.
    head = how.product_seconds([(tokens, net.vocab // c.tp, net.hidden)], device.f16, 3)
    head += 4 * 6 * tokens * net.vocab / c.tp / (how.memory * device.bandwidth)
    sent = layers * _tensor_seconds(net, c, network) + _messages_seconds(net, c, network)
    one = layers * _layer_seconds(net, c, device, how) + head + sent
    bubble = 0.0 if c.schedule == "zero-bubble" else (c.pp - 1) / c.chunks * one
    sums = _gradients_seconds(net, c, network)
    if c.zero == 3:  # overlaps computation
        sums = max(0.0, sums - micro_batches * one)
    weights = net.parameters / (c.pp * c.tp)
    update = 2 * sum(STATE_BYTES) * weights / (c.dp if c.zero else 1) / (how.memory * device.bandwidth)
    seconds = micro_batches * one + bubble + sums + update
    mfu = net.step_flops(batch) / (seconds * c.ranks * device.f16)
    return StepTime(seconds, bubble, micro_batches * sent + sums, mfu)


def _layer_seconds(net: Transformer, c: Candidate, device: Device, how: Reached) -> float:
    """Seconds of computation of a layer and a micro-batch: forward, backward and recomputation."""
    sbh, s = net.seq * c.micro_batch * net.hidden, c.tp if c.sequence_parallel else 1
    bandwidth = how.memory * device.bandwidth
    products = net.products(net.seq * c.micro_batch, c.tp)
    weights = how.product_seconds(products, device.f16, 1)
    # Bytes of element-wise traffic for each element.  `stream`: two norms and the residual additions before them, on s
    # ranks each; `inner`: heads and the activation function, always sharded along tp.
    stream, inner = (20, 2 * (2 * net.projected + 3 * net.width) / net.hidden) if net.gated else (22, 22)
    others = sbh * (stream / s + inner / c.tp) / bandwidth
    if net.fused:
        attention = net.attention_flops(c.micro_batch) / 2 / c.tp / (how.attention * device.f16)
        backward = 2.5 * attention  # five products in place of two (Dao 2023, arXiv 2307.08691)
    else:
        # Softmax reads and writes scores once each, then dropout with its mask; two products write and read them.
        scores = net.heads * net.seq**2 * c.micro_batch / c.tp
        multiplied = max(
            net.attention_flops(c.micro_batch) / c.tp / (how.products * device.f16), 4 * scores / bandwidth
        )
        attention = 9 * scores / bandwidth + multiplied
        backward = 2 * attention
    selective = net.again * weights + others if net.fused else attention
    again = {"none": 0.0, "selective": selective, "full": weights + others + attention}[c.recompute]
    both = how.product_seconds(products, device.f16, 3) + 3 * others + attention + backward
    return both + again


def _tensor_seconds(net: Transformer, c: Candidate, network: Network) -> float:
    """Seconds of a layer's AllReduces along tp: two in the forward pass, two in the backward pass, two recomputed.

    With sequence parallelism each is a ReduceScatter and an AllGather, of the same bytes in total; gathering again for
    the backward pass is not counted.
    """
    if c.tp == 1:
        return 0.0
    rate = network.inside if not network.node or c.tp <= network.node else network.across
    moved = 2 * (c.tp - 1) / c.tp * 2 * net.seq * c.micro_batch * net.hidden
    times = 6 if c.recompute == "full" else 4
    return times * (moved / rate + network.latency * 2 * (c.tp - 1).bit_length())


def _messages_seconds(net: Transformer, c: Candidate, network: Network) -> float:
    """Seconds of a stage's messages for one micro-batch: activations and gradients of each chunk, sharded along tp."""
    if c.pp == 1:
        return 0.0
    rate = network.across or network.inside
    return 2 * c.chunks * (2 * net.seq * c.micro_batch * net.hidden / c.tp / rate + network.latency)


def _gradients_seconds(net: Transformer, c: Candidate, network: Network) -> float:
    """Seconds of the AllReduce of float32 gradients along dp, after the last micro-batch.

    With ZeRO a ReduceScatter and an AllGather move the same bytes.  If g of the n ranks along dp share a node, a rank
    moves (g-1)/g of the bytes within it, and (n-g)/(gn) across nodes.
    """
    if c.dp == 1:
        return 0.0
    g = c.dp if not network.node else min(c.dp, max(1, network.node // (c.pp * c.tp)))
    moved = 2 * 4 * net.parameters / (c.pp * c.tp)
    far = moved * (c.dp - g) / (g * c.dp) / network.across if c.dp > g else 0.0
    return far + (moved * (g - 1) / g / network.inside if g > 1 else 0.0)
