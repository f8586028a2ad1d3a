"""Training steps in bfloat16 on this machine's CPU: ours, ours in float32, and PyTorch's autocast, side by side.

    python benchmarks/cpu_half.py [--pytorch PATH] [--networks bert,vit] [--rounds N] [--text FILE]

As benchmarks/cpu.py: the same network, weights, batch and optimizer (dropout off), each variant a process with two
threads, in turns; the median of all steps counts.  PyTorch's rows are `torch.autocast("cpu")` as installed, and with
channels last, scaled_dot_product_attention, a fused optimizer and torch.compile, the fastest of which is compared.
Losses of step 1 must agree within 2 %, twice what bfloat16's 8 bits of precision lose in one rounding.  Exit code 1
where a target is missed.  Needs a processor that multiplies bfloat16, and a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from cpu import MALLOC, Output, Row
from cpu_networks import Network
from cpu_pool import Failed, Pool, Worker, available_memory
from memory_pytorch import torch_environment
from zoo_steps import MIB, headline, machine, row_text

from recompute.runtime.cpu.device import native

FOLDER = Path(__file__).resolve().parent
_OFF = {"dropout": 0.0}
NETWORKS = (
    Network("resnet50", "resnet50", 16, (), 0),
    Network("bert", "bert-base", 4, (), 0, "adam", {**_OFF, "head": "mlm", "seq": 128, "layers": 6}, images=False),
    Network("gpt2", "gpt2-small", 2, (), 0, "adam", {**_OFF, "seq": 256, "layers": 6}, images=False),
    Network("vit", "vit-base", 4, (), 0, "adam", {**_OFF, "layers": 6}, images=False),
)
#: of PyTorch's autocast, its fastest variant; of our own float32
BEST, FLOAT32 = 0.9, 0.7
AGREE = 0.02
WIDTHS = (22, 9, 9, 9, 11, 11, 11)


def workers(net: Network, spec: dict[str, Any], args: argparse.Namespace, python: str) -> dict[str, Worker]:
    """All variants, ours among PyTorch's."""
    layout = ("channels_last",) if net.images else ()
    best = ("autocast", *layout, "fused", "sdpa")
    theirs = {"autocast": (("autocast",), {}), "autocast tuned": (best, MALLOC),
              "autocast compile": ((*best, "compile"), MALLOC)}  # fmt: skip
    found = {}
    for pair in itertools.zip_longest(theirs, ("ours", "ours bf16")):
        for name in filter(None, pair):
            if name in theirs:
                flags, environment = theirs[name]
                given, script, program = {"flags": list(flags)}, "cpu_torch.py", python
            else:
                given = {"variant": "ours", "precision": "bf16" if "bf16" in name else None}
                script, program, environment = "cpu_ours.py", sys.executable, {}
            found[name] = _worker(program, script, spec | given, environment, args)
    return found


def _worker(
    python: str, script: str, spec: dict[str, Any], environment: dict[str, str], args: argparse.Namespace
) -> Worker:
    threads = {f"{n}_NUM_THREADS": str(args.threads) for n in ("OMP", "MKL", "OPENBLAS", "NUMBA")}
    return Worker([python, str(FOLDER / script), json.dumps(spec)], {**threads, **environment}, args.limit)


def measured(net: Network, args: argparse.Namespace, python: str) -> dict[str, Row]:
    """Rows of a network."""
    rows: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        found = workers(net, net.job(folder, threads=args.threads), args, python)
        pool, left = Pool(found, int(args.memory * available_memory())), list(found)
        try:
            for turn in range(args.rounds):
                for name in list(left):
                    row = rows.setdefault(name, Row(net.name, name))
                    print(f"{net.name}: round {turn + 1} of {args.rounds}: {name}", file=sys.stderr, flush=True)
                    try:
                        row.seconds += pool.times(name, args.seconds, 1)
                        row.facts = found[name].facts
                        row.peak = row.facts.get("peak_bytes")
                    except Failed as e:
                        row.error = str(e)
                        left.remove(name)
        finally:
            pool.end()
    return rows


def report(net: Network, rows: dict[str, Row], say: Output) -> bool:
    """Prints a network's table and verdicts; whether all targets are hit."""
    theirs = min((r.median for n, r in rows.items() if n.startswith("autocast") and r.seconds), default=math.nan)
    single = rows["ours"].median
    say(f"{net.name}: {net.zoo}, batch {net.batch}, {net.optimizer}, {net.options}")
    say(row_text(("", "ms", "least", "most", "/ autocast", "/ float32", "peak MiB"), WIDTHS))
    for name, row in rows.items():
        if not row.seconds:
            say(f"{name:<{WIDTHS[0]}}  {row.error}")
            continue
        ms = [x * 1e3 for x in (row.median, min(row.seconds), max(row.seconds))]
        peak = f"{row.peak / MIB:.1f}" if row.peak else ""
        ratios = (f"{row.median / theirs:.3f}", f"{row.median / single:.3f}")
        say(row_text((name, *(f"{x:.1f}" for x in ms), *ratios, peak), WIDTHS))
    losses = {n: r.facts["losses"][0] for n, r in rows.items() if r.facts.get("losses")}
    middle = statistics.median(losses.values())
    off = max(abs(x - middle) / abs(middle) for x in losses.values())
    say(f"losses at step 1: {', '.join(f'{n} {x:.5g}' for n, x in losses.items())}; apart by {off:.1e}")
    ours, good = rows["ours bf16"].median, off <= AGREE
    for what, value, limit in (("autocast's best", ours / theirs, BEST), ("our float32", ours / single, FLOAT32)):
        good &= value <= limit
        how = "hit" if value <= limit else "MISS"
        say(f"{net.name:<10} bf16 / {what:<18} {value:6.3f}  target {limit:5.3f}  {how}")
    say("")
    return good


def main() -> int:
    """Measures and reports."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--pytorch", help="an interpreter with PyTorch (default: the environment of memory_pytorch.py)")
    p.add_argument("--networks", default=",".join(n.name for n in NETWORKS))
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=float, default=1.5, help="length of a turn")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--memory", type=float, default=0.7, help="of the free memory, for processes that wait")
    p.add_argument("--limit", type=float, default=600, help="seconds until a silent process is given up")
    p.add_argument("--text", type=Path)
    args = p.parse_args()
    if not native.converts_bfloat16():
        p.error("this processor has no instructions for bfloat16: there is nothing to measure")
    names = args.networks.split(",")
    if unknown := set(names) - {n.name for n in NETWORKS}:
        p.error(f"--networks knows {', '.join(n.name for n in NETWORKS)}, not {', '.join(sorted(unknown))}")
    say, good = Output(), True
    say(headline(machine()))
    for net in NETWORKS:
        if net.name in names:
            good &= report(net, measured(net, args, args.pytorch or str(torch_environment())), say)
    if args.text:
        args.text.write_text("\n".join(say.lines) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
