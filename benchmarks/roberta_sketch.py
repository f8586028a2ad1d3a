"""Planned memory of a step of RoBERTa-base with sketched weight gradients, beside the paper's: compiled, not run.

    OMP_NUM_THREADS=1 python benchmarks/roberta_sketch.py [--batch 128] [--device v100-32] [--budgets 5,4,3,2.5,2.25]

Bershatsky et al. 2022 (arXiv 2201.13195) report 11.30 GiB for fine-tuning RoBERTa-base at batch 128 and sequence 128
without sketches, and 9.20 GiB at a rate of .2: -18.6 %.  Here: float32, AdamW, the classifier's head, compiled for
CUDA; peaks contain weights, gradients, and AdamW's moments; times are estimated by the device's data sheet, relative to
the default step's.  Nothing tells how accurate the trained network is.

"planned": what a budget with these permissions gives, without slices of the batch.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from zoo_steps import headline, machine

import recompute as rc
from recompute.compiling.compiler import compile_step, plain_fitting
from recompute.compiling.steps import Steps
from recompute.cost import device
from recompute.errors import UsageError
from recompute.language.program import Program
from recompute.passes.approximation.base import parse_permissions
from recompute.passes.planners.fit.plan import fit_within
from recompute.planning.step import target_of

GIB = 2**30
PAPER = (11.30, 9.20)
ALLOWED = (
    "", "sketch:0.5", "sketch:0.2", "sketch:0.1", "bits:4", "store:8", "sketch:0.2,bits:4",
    "sketch:0.2,bits:4,store:8",
)  # fmt: skip
PLANNED = ("", "sketch:0.2", "sketch:0.2,bits:4", "sketch:0.2,bits:4,store:8")
#: extra time up to which the least peak is told
LIMITS = (0.0, 0.05, 0.10, 0.20, 0.33)


class Table:
    """The network, and what its default step takes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.target = target_of(rc.Target(place=rc.CUDAPlace(), cost=device(args.device)))
        self.optimizer = rc.AdamW(1e-4)
        steps = Steps("roberta-base", optimizer=self.optimizer, target=self.target, options={"seq": args.sequence})
        self.program: Program
        self.program, self.loss = steps.program(args.batch)
        self.fitting = plain_fitting(self.program, self.loss, self.optimizer, self.target)
        self.seconds = self.fitting.cost(self.fitting.plain)
        self.checkpoints = [n for n in rc.models.info("roberta-base").checkpoints if n.startswith("layer.")]

    def fixed(self, what: str, rebuild: bool, checkpoints: Sequence[str] | None) -> None:
        """Peaks of one way to recompute, with every permission."""
        target = dataclasses.replace(self.target, rebuild=rebuild)
        exact = 0
        for allowed in ALLOWED:
            given: dict[str, Any] = {"approximations": allowed} if allowed else {}
            try:
                made = compile_step(
                    self.program, self.loss, self.optimizer, checkpoints=checkpoints, target=target, **given
                )
            except UsageError as e:
                if "can be approximated" not in str(e):
                    raise
                print(f"{what:26} {allowed:26} {str(e).partition(':')[0][:60]}", flush=True)
                continue
            f = made.figures
            exact = exact or f.peak_bytes
            saved = f"{f.peak_bytes / exact - 1:+9.1%}" if allowed else f"{'':9}"
            extra = f.estimated_step_seconds / self.seconds - 1
            print(f"{what:26} {allowed or 'exact':26} {f.peak_bytes / GIB:6.2f} {saved} {extra:+8.1%}", flush=True)

    def planned(self, what: str, budgets: Sequence[float], allowed: str) -> None:
        """Peaks and times within budgets."""
        permitted = parse_permissions(allowed) if allowed else ()
        found: list[tuple[int, float]] = []
        for budget in budgets:
            try:
                f = fit_within(self.fitting, int(budget * GIB), allowed=permitted)
            except UsageError:
                continue
            found.append((f.peak, self.fitting.cost(f) / self.seconds - 1))
        cells = "  ".join(f"{peak / GIB:5.2f} {extra:+6.1%}" for peak, extra in found)
        best = [min((p for p, extra in found if extra <= limit), default=0) for limit in LIMITS]
        least = " ".join(f"{p / GIB:6.2f}" if p else "     -" for p in best)
        print(f"{what:14} {allowed or 'exact':26} {least}   {cells}", flush=True)


def main() -> None:
    """Prints the tables."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--sequence", type=int, default=128)
    p.add_argument("--device", default="v100-32", help="whose data sheet gives the times (default: v100-32)")
    p.add_argument("--budgets", default="6,5,4,3,2.5,2.25", help="budgets in GiB of the second table")
    args = p.parse_args()
    started = time.process_time()
    table = Table(args)
    print(headline(machine()))
    print(f"paper: {PAPER[0]:.2f} GiB, {PAPER[1]:.2f} GiB at sketch:0.2, {PAPER[1] / PAPER[0] - 1:+.1%}\n")
    print(f"{'recomputation':26} {'approximations':26} {'GiB':>6} {'saved':>9} {'time':>8}")
    table.fixed("none", False, None)
    table.fixed("default (rebuild)", True, None)
    table.fixed("checkpoints at layers", True, table.checkpoints)
    print("\nleast peak (GiB) of these plans at most so much slower than the default step; then peak and time of each")
    print(f"{'':14} {'':26} " + " ".join(f"{limit:+6.0%}" for limit in LIMITS))
    budgets = [float(b) for b in args.budgets.split(",")]
    for allowed in PLANNED:
        table.planned("planned", budgets, allowed)
    print(f"\n({time.process_time() - started:.0f} s of processor time)")


if __name__ == "__main__":
    main()
