"""Recomputation and values in host memory planned together: extra time, and the bound of all such plans.

    python benchmarks/joint.py [--only resnet50 ...] [--shares 50 30 20] [--link 13]

A budget is what is always there (parameters, optimizer state) and a share of what the plain step has beyond it at its
compiled peak.  Steps are compiled for an H200 without kernels; times are estimates by its data sheet, over the step
that repeats nothing: `recompute` without moves, `moves` with values in host memory, waiting included; `bound`: no step
with or without moves takes less (passes/planners/core/moves_bound.py).  "none": nothing was found that fits; for the
bound, nothing can.  `--link`: GB/s each way in place of the data sheet's.  Seconds are processor seconds of planning.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time

from seed_hunt import Step, step_of
from zoo_steps import headline, machine, row_text

from recompute.cost import step_seconds
from recompute.errors import BudgetError
from recompute.passes.offloading.transfers import Link
from recompute.passes.planners.core.watch import WORK, Watch, watching
from recompute.passes.planners.fit.plan import fit_within

HEADER = ("network", "batch", "GB/s", "share", "recompute", "sec", "moves", "sec", "values", "waits", "bound")
WIDTHS = (12, 5, 5, 5, 9, 6, 8, 6, 6, 6, 8)
#: networks of different shapes, at batches that plan within minutes
NETWORKS: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("resnet18", 64, {}),
    ("resnet50", 64, {}),
    ("mobilenet_v2", 64, {}),
    ("vgg16_bn", 64, {}),
    ("unet", 8, {}),
    ("bert-mini", 32, {"seq": 128}),
    ("gpt2-mini", 16, {}),
    ("vit-small", 32, {}),
    ("bert-base", 16, {"seq": 256}),
)


def planned(step: Step, budget: int, *, offload: bool) -> tuple[str, str, str, str]:
    """(extra time, processor seconds, values in host memory, waiting) of the best step within a budget."""
    start, fitting = time.process_time(), step.fitting
    with watching(Watch(work=WORK)):
        try:
            found = fit_within(fitting, budget, offload=offload)
        except BudgetError:
            return "none", f"{time.process_time() - start:.1f}", "", ""
    stalls = fitting.times(found).stalls if found.plan.offloads else 0.0
    extra = (step_seconds(found.block, step.on) + stalls) / step.seconds - 1
    seconds = f"{time.process_time() - start:.1f}"
    return f"{extra:+.2%}", seconds, str(len(found.plan.offloads)), f"{stalls / step.seconds:.2%}"


def main() -> int:
    """Prints a row a network and share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=(), help="networks")
    parser.add_argument("--shares", nargs="*", type=int, default=(50, 30, 20), help="percent of the plain step's bytes")
    parser.add_argument("--link", type=float, help="GB/s of copies, each way")
    options = parser.parse_args()
    print(f"{headline(machine())}\n\n{row_text(HEADER, WIDTHS)}")
    for name, batch, sizes in NETWORKS:
        if options.only and name not in options.only:
            continue
        for share in options.shares:
            step = step_of(name, batch, "h200", "Adam", sizes)  # anew: nothing found for another budget helps
            fitting, fixed = step.fitting, step.fixed
            if options.link:
                target, rate = fitting.target, options.link * 1e9
                fitting.target = dataclasses.replace(target, link=Link(rate, rate, target.rates.latency))
            budget = fixed + (fitting.plain.peak - fixed) * share // 100
            alone, moves = (planned(step, budget, offload=offload) for offload in (False, True))
            bound = fitting.bound(budget, moves=True) / fitting.derived.problem.cost - 1
            least = "none" if bound == float("inf") else f"{bound:+.2%}"
            rate_text = f"{fitting.target.rates.out / 1e9:.0f}"
            cells = (name, str(batch), rate_text, f"{share}%", *alone[:2], *moves, least)
            print(row_text(cells, WIDTHS), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
