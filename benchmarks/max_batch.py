"""The biggest batch of three transformers on a device of 80 GiB: compiled for CUDA, not run; no device is needed.

    python benchmarks/max_batch.py [gpt2-small bert-large llama-7b] [--budget 80GiB] [--device h100]

Weights and state are float32, and operators compute in bfloat16 as far as mixed precision allows.  Four rows each:
plain without `fuse_attention` and `fuse_head`, plain with them, the best without slices (recomputation), and the best
with slices of the batch.  `a sample` is the step's estimated time divided by the batch, by the device's data sheet.
"""

from __future__ import annotations

import argparse
import math
import time

import recompute as rc
from recompute import models
from recompute.analysis.biggest_batch import SLICES, largest_fitting
from recompute.budgets import as_bytes
from recompute.compiling.steps import Steps
from recompute.cost import device

#: network → sequence, optimizer
NETWORKS = {
    "gpt2-small": (1024, rc.AdamW),
    "bert-large": (512, rc.AdamW),
    "llama-7b": (4096, rc.SGD),
}


def row(what: str, batch: int, peak: int, seconds: float) -> None:
    """Prints one line of the table."""
    a_sample = f"{1000 * seconds / batch:10.2f} ms" if batch else f"{'':13}"
    print(f"  {what:44} {batch or 'none':>6} {peak / 2**30:8.2f} GiB {a_sample}", flush=True)


def plain(steps: Steps, what: str, budget: int) -> None:
    """The biggest batch of the plain step."""
    batch = largest_fitting(steps.peak, budget, 32)
    row(what, batch, steps.peak(batch or 1), steps.figures(batch or 1).estimated_step_seconds)


def state(name: str, budget: int, args: argparse.Namespace) -> None:
    """What AdamW takes where the table has another optimizer."""
    target = rc.Target(place=rc.CUDAPlace(), precision=args.precision, cost=device(args.device))
    steps = Steps(name, optimizer=rc.AdamW(1e-4), target=target, options={"seq": NETWORKS[name][0]})
    found = steps.figures(1)
    fits = "fits" if found.peak_bytes <= budget else "does not fit"
    held = f"{found.persistent_bytes / 2**30:.2f} GiB of weights and state"
    print(f"  (AdamW: {held}, batch 1 plain {found.peak_bytes / 2**30:.2f} GiB, which {fits})", flush=True)


def table(name: str, args: argparse.Namespace) -> None:
    """The rows of one network."""
    sequence, optimizer = NETWORKS[name]
    budget = as_bytes(args.budget)
    options = {"seq": sequence}
    weights = sum(map(math.prod, models.parameters(models.build(name, weights=False, **options)).values()))
    print(f"{name}: sequence {sequence:,}, {weights:,} parameters, {optimizer.__name__}, {args.precision}", flush=True)
    for fused in (False, True):
        target = rc.Target(
            place=rc.CUDAPlace(), precision=args.precision, cost=device(args.device), fuse_attention=fused,
            fuse_head=fused,
        )  # fmt: skip
        steps = Steps(name, optimizer=optimizer(1e-4), target=target, options=options)
        plain(steps, "plain, fused attention and head" if fused else "plain, as before", budget)
    started = time.process_time()
    found = rc.max_batch(name, budget, optimizer=optimizer(1e-4), target=target, options=options)
    for slicing in (False, True):
        best = max((s for s in found.strategies if slicing or not s.slices), key=lambda s: (s.batch, -s.step_seconds))
        what = f"{SLICES} slices" if slicing else "no slices"
        row(f"best with {what}: {best.strategy}", best.batch, best.peak_bytes, best.step_seconds)
    for s in found.strategies:
        row(f"  {s.strategy}", s.batch, s.peak_bytes, s.step_seconds)
    for note in found.notes:
        print(f"  ({note})")
    if optimizer is not rc.AdamW:
        state(name, budget, args)
    print(f"  (search: {time.process_time() - started:.0f} s of processor time)\n", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), help="some of " + ", ".join(NETWORKS))
    parser.add_argument("--budget", default="80GiB")
    parser.add_argument("--device", default="h100", help="the data sheet of the estimated times")
    parser.add_argument("--precision", default="bf16")
    args = parser.parse_args()
    for name in args.networks:
        table(name, args)


if __name__ == "__main__":
    main()
