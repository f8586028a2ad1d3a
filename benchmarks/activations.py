"""Activations of the first stage as our compiler has them, beside the formulas and steps of Korthikanti et al. 2022.

    python benchmarks/activations.py [22B 175B 530B 1T]        writes benchmarks/results/activations.txt

Their table 5 (arXiv 2205.05198): GPT-3 shapes on A100-80, tp 8, micro-batches of 4, 1, 1, 1.  Programs have as
many micro-batches as it takes until the schedule repeats itself, in bfloat16, and times are simulated with products by
their size (recompute/efficiency.py).  Activations are values that operators of the forward pass made and that are
alive at the moment when they are most, without copies of parameters in low precision.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from pathlib import Path

from cluster_tables import A100, KORTHIKANTI, SELENE, korthikanti

from recompute.analysis.cluster.candidates import Candidate
from recompute.analysis.cluster.formulas import Transformer, activation_bytes
from recompute.analysis.cluster.search import Search
from recompute.language.ir import Block, Role
from recompute.passes import Target
from recompute.passes.memory.memory_plan import collect_lifetimes
from recompute.places import CUDAPlace

GIB = 2**30
#: what is kept of a layer, all else is repeated: no product is, nor attention's
KEPT = ("embeddings.out", "h.*.attn.c_attn", "h.*.attn.merged", "h.*.attn.out", "h.*.mlp.c_fc", "h.*.out")
#: steps that are compiled: theirs (attention alone is made again), ours as it is, ours with checkpoints
PLANS = (
    ("compiled, selective (36sbh/t: no rebuild)", None, False),
    ("compiled, ours as it is (26sbh/t)", None, True),
    ("compiled, products and attention as checkpoints (24sbh/t)", KEPT, True),
)
#: of a rank with tensor and sequence parallelism, in sbh/t: what they keep of a layer, and what we do otherwise
TERMS = (
    ("34", "Korthikanti et al., sequence parallel, attention recomputed"),
    ("-2", "masks of two dropouts: drawn again"),
    ("-4", "results of two LayerNorms: made again of their inputs (rebuild)"),
    ("-8", "results of GELU: made again of its input (rebuild)"),
    ("+4", "the residual stream, twice, in float32 instead of 16 bits"),
    ("+2", "attention's result in two layouts, by heads and by rows"),
)


def activations(block: Block) -> tuple[int, Counter[str]]:
    """Bytes of activations at the moment when they are most, and those of each layer ("" for the rest)."""
    made = {v.name: o for o in block.operators for v in o.writes() if o.role in (Role.FORWARD, Role.LOSS)}
    ours = [x for x in collect_lifetimes(block) if x.name in made and not _of_parameter(x.name)]
    change: Counter[int] = Counter()
    for x in ours:
        change[x.start] += x.size
        change[x.end + 1] -= x.size
    live = most = at = 0
    for place in sorted(change):
        live += change[place]
        if live > most:
            most, at = live, place
    layers = _layers(block)
    found: Counter[str] = Counter()
    for x in ours:
        if x.start <= at <= x.end:
            found[layers.get(x.name, "")] += x.size
    return most, found


def _layers(block: Block) -> dict[str, str]:
    """The layer that made each value, by its name or by that of what it was made of; "" of none."""
    found: dict[str, str] = {}
    for o in block.operators:
        for v in o.writes():
            own = re.search(r"\bh\.(\d+)\.", v.name)
            given = [found[x.name] for x in o.reads() if found.get(x.name)]
            beside = re.match(r"(embeddings|ln_f|logits|loss)", v.name) or not given
            found.setdefault(v.name, own[1] if own else "" if beside else given[0])
    return found


def _of_parameter(name: str) -> bool:
    return re.search(r"\.(weight|bias|scale|B)(\.|$)", name) is not None or name.startswith("decoder")


def layer_bytes(hidden: int, heads: int, micro: int, seq: int = 2048, tp: int = 8) -> int:
    """What a rank keeps of a layer: 26sbh/t, sums of attention's exponentials, means and deviations of two norms."""
    return (26 * seq * micro * hidden + 4 * heads * seq * micro + 4 * 4 * seq * micro) // tp


def rows(row: tuple) -> list[str]:
    """The lines of a network."""
    name, heads, hidden, layers, pp, chunks, batch, micro, _, published = row
    net = Transformer(layers, hidden, heads, 2048, 51200)
    schedule = "interleaved" if chunks > 1 else "1f1b"
    lines = [f"{name}: tp 8, pp {pp}, chunks {chunks}, {batch // micro} micro-batches of {micro}"]
    for recompute, sequence in (("none", False), ("none", True), ("selective", True), ("full", False)):
        c = Candidate(1, 8, pp, micro, 0, schedule, chunks, sequence, recompute)
        what = f"formula, {recompute} recomputed, {'sequence parallel' if sequence else 'tensor parallel alone'}"
        lines.append(f"  {what:<58} {activation_bytes(net, c) / GIB:8.2f} GiB")
    theirs = korthikanti(row, "selective")
    lines.append(
        f"  {'their step, selective':<58} {'':12} {published:7.2f} s published, {theirs.seconds:.2f} s by formulas"
    )
    for what, kept, rebuild in PLANS:
        begun = time.time()
        target = Target(CUDAPlace(), cost=A100, precision="bf16", rebuild=rebuild)
        search = Search(f"gpt3-{name.lower()}", 8 * pp, batch, SELENE, None, None, target, None, {})
        c = Candidate(1, 8, pp, micro, 0, schedule, chunks, True, "none" if kept is None else "full")
        search.ends = kept or search.ends
        found = search.stages(c)
        r = search.row(c, found)
        most, by_layer = activations(found[0].block)
        of_layers = sum(n for layer, n in by_layer.items() if layer)
        figures = f"{r.step_seconds:7.2f} s, MFU {r.mfu:.1%}, pauses {r.bubble:.1%}; {of_layers / GIB:.2f} in layers"
        took = f"peak {found[0].figures.peak_bytes:,}; {time.time() - begun:.0f} s to compile"
        lines.append(f"  {what:<58} {most / GIB:8.2f} GiB {figures}; {took}")
        if rebuild and kept is None:
            lines += _explained(by_layer, layer_bytes(hidden, heads, micro), found[0].block)
    return lines


def _explained(by_layer: Counter[str], one: int, block: Block) -> list[str]:
    """How the bytes of layers consist of whole layers."""
    whole = {layer: divmod(n, one) for layer, n in by_layer.items() if layer}
    count = sum(n for n, _ in whole.values())
    rest = {f"layer {layer}": more for layer, (_, more) in whole.items() if more}
    return [
        f"    {one:,} bytes a layer and micro-batch (26sbh/t + 4abs/t + 16sb/t), {count} of them alive",
        f"    in layers that run or whose last is not kept: {rest}; elsewhere {by_layer['']:,}",
        f"    ({len(block.operators):,} operators)",
    ]


def main() -> None:
    """Writes the table, and prints it."""
    wanted = sys.argv[1:] or [row[0] for row in KORTHIKANTI]
    lines = [f"{size:>4} sbh/t  {what}" for size, what in TERMS]
    lines += ["  26 sbh/t  ours, and 4abs/t of attention's sums, 16sb/t of norms' statistics", ""]
    for row in KORTHIKANTI:
        if row[0] in wanted:
            found = rows(row)
            print("\n".join(found), flush=True)
            lines += [*found, ""]
    (Path(__file__).parent / "results" / "activations.txt").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
