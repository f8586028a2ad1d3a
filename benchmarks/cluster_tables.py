"""Published times of steps on many devices beside our closed formulas.

    python benchmarks/cluster_tables.py        writes benchmarks/results/cluster_tables.txt

Korthikanti et al. 2022 (arXiv 2205.05198, table 5), on A100-80; Narayanan et al. 2021 (arXiv 2104.04473, table 1),
whose times follow from its batch and FLOP/s.  That table does not say the micro-batches nor the chunks of a stage: we
take what our model finds fastest of micro-batches 1, 2, 4 and 8, without chunks.
"""

from __future__ import annotations

from pathlib import Path

from recompute.analysis.cluster.candidates import Candidate
from recompute.analysis.cluster.formulas import ACHIEVED, StepTime, Transformer, memory_bytes, step_time
from recompute.communication.links import Network
from recompute.cost import device

SELENE = Network(node=8, inside=300e9, across=25e9)
A100 = device("a100-80")
#: name, heads, hidden, layers, pp, chunks, batch, micro-batch, seconds: full recomputation, sp + selective
KORTHIKANTI = (
    ("22B", 64, 6144, 48, 1, 1, 4, 4, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    ("530B", 128, 20480, 105, 35, 3, 280, 1, 49.05, 37.83),
    ("1T", 160, 25600, 128, 64, 1, 512, 1, 94.42, 71.49),
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


def korthikanti(row: tuple, recompute: str) -> StepTime:
    """Our time of one row."""
    _, heads, hidden, layers, pp, chunks, batch, micro = row[:8]
    schedule = "interleaved" if chunks > 1 else "1f1b"
    c = Candidate(1, 8, pp, micro, 0, schedule, chunks, recompute == "selective", recompute)
    return step_time(Transformer(layers, hidden, heads, 2048, 51200), c, batch, A100, SELENE)


def ptdp(row: tuple) -> tuple[float, float, int]:
    """The published seconds of one row (8 passes' worth of products are counted, with recomputation), ours, and the
    micro-batch."""
    _, heads, hidden, layers, tp, pp, ranks, batch, teraflops = row
    net = Transformer(layers, hidden, heads, 2048, 51200)
    flops = 4 * layers * net.layer_flops(batch) + 6 * batch * net.seq * hidden * net.vocab
    dp = ranks // tp // pp
    found = []
    for micro in (1, 2, 4, 8):
        c = Candidate(dp, tp, pp, micro, recompute="full")
        if batch % (dp * micro) == 0 and memory_bytes(net, c) < 80e9:
            found.append((step_time(net, c, batch, A100, SELENE).seconds, micro))
    seconds, micro = min(found)
    return flops / (ranks * teraflops * 1e12), seconds, micro


def main() -> None:
    """Writes the table, and prints it."""
    lines = [f"products reach {ACHIEVED:.1%} of the peak: fitted to one row, 175B sp + selective", ""]
    lines.append("Korthikanti et al. 2022    published  ours [s]    off     MFU  bubble  exposed communication [s]")
    for row in KORTHIKANTI:
        for recompute, seconds in zip(("full", "selective"), row[8:], strict=True):
            t = korthikanti(row, recompute)
            kind = "full" if recompute == "full" else "sp + selective"
            lines.append(
                f"{row[0]:>5} {kind:<20} {seconds:9.2f} {t.seconds:9.2f} {t.seconds / seconds - 1:+7.1%} {t.mfu:7.1%} "
                f"{t.bubble / t.seconds:7.1%} {t.exposed_communication:8.2f}"
            )
    lines += ["", "Narayanan et al. 2021      published  ours [s]    off  micro-batch (our choice)"]
    for line in PTDP:
        told, seconds, micro = ptdp(line)
        lines.append(
            f"{line[0]:>6}B                    {told:9.2f} {seconds:9.2f} {seconds / told - 1:+7.1%} {micro:3d}"
        )
    text = "\n".join(lines) + "\n"
    (Path(__file__).parent / "results" / "cluster_tables.txt").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
