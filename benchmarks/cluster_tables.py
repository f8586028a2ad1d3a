"""Published times and memory of steps on many devices beside our closed formulas, on the same meshes.

    python benchmarks/cluster_tables.py        writes benchmarks/results/cluster_tables.txt

* Korthikanti et al. 2022 (arXiv 2205.05198, table 5; the first stage's bytes: figure 1), A100-80, 300 and 25 GB/s.
* Narayanan et al. 2021 (arXiv 2104.04473, table 1), whose times follow from its batch and FLOP/s.  That table does not
  say the micro-batches nor the chunks of a stage: we take what is fastest by our model of micro-batches 1, 2, 4 and 8,
  without chunks.
* Llama 3 (arXiv 2407.21783, table 4), H100, 450 and 50 GB/s: its FLOP/s count 6 operations a parameter and token, and
  the scores of causal attention.  One layer a chunk of the pipeline.
* torchtitan (github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, and in the same folder
  asyncTP_llama3_h100_2025-06_torchtitan.md), H100s with 96 GB of HBM2e at 2.4 TB/s and 500 W, bfloat16 with
  torch.compile: tokens a second and device, and the most that is reserved.  Selective recomputation is every second
  product's.  Memory on H200s: llama3-8b_h200_202506_trainy-whitefiber.md, there.

Left out: times in FP8, of mixtures of experts, LoRA, context parallelism and asynchronous tensor parallelism (most of
those of NeMo and Megatron-Bridge, which publish no memory), which these formulas have no terms for; times without
torch.compile, whose element-wise operators are not fused: those on A100s (its docs/performance.md of 2024) stand below,
for information.  Memory of torchtitan's 405B: its tables do not say how a pipeline's batch is cut into micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recompute.analysis.cluster.candidates import Candidate
from recompute.analysis.cluster.formulas import StepTime, Transformer, activation_bytes, memory_bytes, step_time
from recompute.communication.links import Network
from recompute.cost import Device, device
from recompute.efficiency import FITTED, reached

SELENE = Network(node=8, inside=300e9, across=25e9)
HOPPER = Network(node=8, inside=450e9, across=50e9)
#: name, heads, hidden, layers, pp, chunks, batch, micro-batch, seconds (full recomputation, sp + selective), and GiB of
#: weights with state, and of activations, without recomputation and with sp + selective
KORTHIKANTI = (
    ("22B", 64, 6144, 48, 1, 1, 4, 4, 1.42, 1.10, 45.56, 59.25, 9.56),
    ("175B", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75, 45.56, 66.84, 12.35),
    ("530B", 128, 20480, 105, 35, 3, 280, 1, 49.05, 37.83, 31.64, 114.02, 23.08),
    ("1T", 160, 25600, 128, 64, 1, 512, 1, 94.42, 71.49, 32.96, 131.25, 26.56),
)
#: billions, heads, hidden, layers, tp, pp, ranks, batch, TFLOP/s of a device
PTDP = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)
#: the part of a layer's products that torchtitan repeats: those of keys, of attention's output, one of the gated two
AGAIN = (0.25 + 1 + 3.5) / (1 + 2 * 0.25 + 1 + 3 * 3.5)
LLAMA_8B = Transformer(32, 4096, 32, 8192, 128256, 14336, True, 8, True, False, AGAIN)
LLAMA_70B = Transformer(80, 8192, 64, 8192, 128256, 28672, True, 8, True, False, AGAIN)
LLAMA2_13B = Transformer(40, 5120, 40, 4096, 32000, 13824, True, 40, True, False, 0.5)
LLAMA2_70B = Transformer(80, 8192, 64, 4096, 32000, 28672, True, 8, True, False, AGAIN)
LLAMA_405B = Transformer(126, 16384, 128, 8192, 128256, 53248, True, 8, True, False)


@dataclass(frozen=True)
class Row:
    """A published figure and ours; `unit`: seconds or GiB; `reserved`: what of ours an allocator reserves in vain."""

    source: str
    name: str
    published: float
    ours: float
    unit: str = "s"
    reserved: float = 0.0

    @property
    def off(self) -> float:
        """How much ours is larger, as a part of the published figure."""
        return self.ours / self.published - 1

    @property
    def fitted(self) -> bool:
        """Whether a constant of efficiency.py was fitted to it."""
        return self.unit == "s" and f"{self.source} {self.name}" in FITTED


def korthikanti(row: tuple, recompute: str) -> StepTime:
    """Our time of one row."""
    batch, micro = row[6:8]
    return step_time(*_korthikanti(row, recompute, micro), batch, device("a100-80"), SELENE)


def _korthikanti(row: tuple, recompute: str, micro: int) -> tuple[Transformer, Candidate]:
    _, heads, hidden, layers, pp, chunks = row[:6]
    schedule = "interleaved" if chunks > 1 else "1f1b"
    c = Candidate(1, 8, pp, micro, 0, schedule, chunks, recompute == "selective", recompute)
    return Transformer(layers, hidden, heads, 2048, 51200), c


def ptdp(row: tuple) -> tuple[float, float, int]:
    """The published seconds of one row (8 passes' worth of products are counted, with recomputation), ours, and the
    micro-batch."""
    _, heads, hidden, layers, tp, pp, ranks, batch, teraflops = row
    net = Transformer(layers, hidden, heads, 2048, 51200)
    flops = 4 * layers * net.layer_flops(batch) + 6 * batch * net.seq * hidden * net.vocab
    dp = ranks // tp // pp
    priced = []
    for micro in (1, 2, 4, 8):
        c = Candidate(dp, tp, pp, micro, recompute="full")
        if batch % (dp * micro) == 0 and memory_bytes(net, c) < 80e9:
            priced.append((step_time(net, c, batch, device("a100-80"), SELENE).seconds, micro))
    seconds, micro = min(priced)
    return flops / (ranks * teraflops * 1e12), seconds, micro


def llama3(dp: int, teraflops: float) -> Row:
    """A row of Llama 3's table 4: 2,048 sequences on tp 8, pp 16."""
    net, batch, ranks = LLAMA_405B, 2048, dp * 128
    c = Candidate(dp, 8, 16, 1, 1, "interleaved", 8, True, "none")
    flops = batch * net.seq * 6 * (net.parameters + net.layers * net.hidden * net.seq)
    ours = step_time(net, c, batch, device("h100"), HOPPER).seconds
    return Row("Llama 3", f"405B on {ranks:,}", flops / (ranks * teraflops * 1e12), ours)


def torchtitan(name: str, net: Transformer, c: Candidate, batch: int, tokens: float, on: Device) -> Row:
    """A row of torchtitan's tables, from tokens a second and device."""
    network = SELENE if on.name.startswith("A100") else HOPPER
    ours = step_time(net, c, batch, on, network).seconds
    return Row("torchtitan", name, batch * net.seq / c.ranks / tokens, ours)


def torchtitan_rows() -> Iterator[Row]:
    """On H100s with 96 GB of HBM2e and 500 W, with torch.compile."""
    low = dataclasses.replace(device("h100"), name="H100 500 W", bandwidth=2.4e12, memory=96 << 30)
    sharded: dict[str, Any] = {"zero": 3, "recompute": "selective"}
    yield torchtitan("8B FSDP 8", LLAMA_8B, Candidate(8, 1, 1, 2, **sharded), 16, 6667, low)
    yield torchtitan("8B FSDP 128", LLAMA_8B, Candidate(128, 1, 1, 2, **sharded), 256, 6514, low)
    c = Candidate(8, 8, 1, 12, sequence_parallel=True, **sharded)
    yield torchtitan("8B FSDP 8, tp 8", LLAMA_8B, c, 96, 4378, low)
    c = Candidate(32, 8, 1, 16, 3, sequence_parallel=True, recompute="full")
    yield torchtitan("70B FSDP 32, tp 8", LLAMA_70B, c, 512, 597.3, low)


def eager_rows() -> Iterator[Row]:
    """torchtitan on A100s, without torch.compile."""
    a100 = device("a100-80")
    for name, net, micro, recompute, tokens in (
        ("8B FSDP 64, A100", LLAMA_8B, 1, "selective", 2973),
        ("70B FSDP 64, A100", LLAMA_70B, 1, "full", 331),
        ("2-13B FSDP 64, A100, nothing again", LLAMA2_13B, 2, "none", 2162),
        ("2-13B FSDP 64, A100", LLAMA2_13B, 2, "selective", 1904),
        ("2-70B FSDP 64, A100", LLAMA2_70B, 1, "selective", 355),
        ("2-70B FSDP 64, A100, all again", LLAMA2_70B, 2, "full", 353),
    ):
        yield torchtitan(name, net, Candidate(64, 1, 1, micro, 3, recompute=recompute), 64 * micro, tokens, a100)


def torchtitan_bytes(net: Transformer, tokens: int, ranks: int, tp: int, full: bool, loss: str) -> tuple[float, float]:
    """What torchtitan's step holds at its peak, when the loss is differentiated, and what it reserves beside.

    `tokens` of a dp rank; weights, gradients and moments in float32, on one of all `ranks`; two gathered layers and the
    tables in bfloat16; what recomputation keeps of each layer, the head's input gathered along tp.  Bytes of a score:
    12 for the logarithms of the softmax and two gradients in float32, a third one with `loss` "parallel", and 4 with
    "compiled".  Else the scores in bfloat16, which are dropped before the backward pass (train.py, `del pred`), leave a
    gap that is too small for one in float32: the figure that it prints is the most that is reserved (metrics.py).
    """
    gathered = 2 * (2 * net.layer_parameters + 2 * net.vocab * net.hidden) / tp
    # x; or x, q, attention, down; v; up
    kept = net.hidden / tp if full else 4 * net.hidden + net.hidden * net.groups // net.heads + net.width
    kept = 2 * tokens * (net.layers * kept + (net.hidden if tp > 1 else 0))
    scores = tokens * net.vocab / tp
    held = 16 * net.parameters / ranks + gathered + kept + {"": 12, "parallel": 16, "compiled": 4}[loss] * scores
    return held, 0.0 if loss == "compiled" else 2 * scores


#: name, network, tokens of a dp rank, ranks, tp, whether layers are recomputed, loss, GiB
TORCHTITAN_BYTES = (
    ("8B FSDP 8", LLAMA_8B, 16384, 8, 1, False, "", 77.0),
    ("8B FSDP 8, FP8", LLAMA_8B, 16384, 8, 1, False, "", 76.8),
    ("8B FSDP 8, not compiled", LLAMA_8B, 16384, 8, 1, False, "", 82.4),
    ("8B FSDP 128", LLAMA_8B, 16384, 128, 1, False, "", 62.0),
    ("8B FSDP 128, FP8", LLAMA_8B, 16384, 128, 1, False, "", 61.8),
    ("8B FSDP 128, not compiled", LLAMA_8B, 16384, 128, 1, False, "", 67.0),
    ("8B FSDP 8, cp 1, FP8", LLAMA_8B, 32768, 8, 1, True, "", 83.9),
    ("8B FSDP 4, cp 2, FP8", LLAMA_8B, 32768, 8, 1, True, "", 84.2),
    ("8B FSDP 2, cp 4, FP8", LLAMA_8B, 32768, 8, 1, True, "", 84.0),
    ("8B cp 8, FP8", LLAMA_8B, 32768, 8, 1, True, "", 84.5),
    ("70B FSDP 32, tp 8, FP8", LLAMA_70B, 131072, 256, 8, True, "parallel", 71.9),
    ("the same, asynchronous tp", LLAMA_70B, 131072, 256, 8, True, "parallel", 67.6),
    ("8B FSDP 32, H200, FP8", LLAMA_8B, 16384, 32, 1, False, "compiled", 47.96),
    ("8B FSDP 64, H200, FP8", LLAMA_8B, 16384, 64, 1, False, "compiled", 46.97),
)


def times() -> Iterator[Row]:
    """All rows of seconds."""
    for row in KORTHIKANTI:
        for recompute, seconds in zip(("full", "selective"), row[8:10], strict=True):
            yield Row("Korthikanti", f"{row[0]} {recompute}", seconds, korthikanti(row, recompute).seconds)
    for line in PTDP:
        told, seconds, micro = ptdp(line)
        yield Row("PTD-P", f"{line[0]}B, micro-batches of {micro}", told, seconds)
    yield llama3(64, 430)
    yield llama3(128, 400)
    yield from torchtitan_rows()


def memory() -> Iterator[Row]:
    """All rows of GiB."""
    for row in KORTHIKANTI:
        for recompute, kept in zip(("none", "selective"), row[11:], strict=True):
            net, c = _korthikanti(row, recompute, row[7])
            # Figure 1 counts the layers alone, without tables.
            state = 18 * net.layers // c.pp * 12 * net.hidden**2 / c.tp
            ours = (state + activation_bytes(net, c)) / 2**30
            yield Row("Korthikanti", f"{row[0]} {recompute}", row[10] + kept, ours, "GiB")
    for name, *given, gibibytes in TORCHTITAN_BYTES:
        held, reserved = torchtitan_bytes(*given)
        yield Row("torchtitan", name, gibibytes, (held + reserved) / 2**30, "GiB", reserved / 2**30)


def table(rows: list[Row], what: str) -> list[str]:
    """A table as text, with the mean and the worst of what was not fitted."""
    lines = [f"{what:<44} published      ours      off"]
    for r in rows:
        note = "  (fitted)" if r.fitted else f"  of it reserved in vain: {r.reserved:.2f}" if r.reserved else ""
        lines.append(f"{r.source:<12} {r.name:<31} {r.published:9.2f} {r.ours:9.2f} {r.off:+8.1%}{note}")
    off = [abs(r.off) for r in rows if not r.fitted]
    measured = [abs(r.off) for r in rows if r.source != "Korthikanti"]
    worst = max((r for r in rows if not r.fitted), key=lambda r: abs(r.off))
    lines.append(
        f"{len(off)} rows that were not fitted: mean {sum(off) / len(off):.1%}, worst {worst.off:+.1%} "
        f"({worst.source} {worst.name})"
    )
    if rows[0].unit == "GiB":  # the paper's own figures are formulas
        lines.append(f"{len(measured)} of them measured: mean {sum(measured) / len(measured):.1%}")
    return [*lines, ""]


def main() -> None:
    """Writes the tables, and prints them."""
    kinds = (f"{name}: {r.products:.1%} of products, {r.attention:.0%} of fused attention" for name, r in
             (("A100", reached("a100")), ("H100", reached("h100"))))  # fmt: skip
    lines = ["reached of the peak, in full waves of tiles: " + "; ".join(kinds), ""]
    lines += table(list(times()), "seconds of a step") + table(list(memory()), "GiB of a rank")
    lines += table(list(eager_rows()), "not modelled: seconds without torch.compile")
    text = "\n".join(lines)
    (Path(__file__).parent / "results" / "cluster_tables.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
