"""How far plans can be above the optimum: certified gaps at low budgets, for the networks of the published tables.

    python benchmarks/gaps.py [--only resnet50 ...] [--shares 50 30 20] [--table feng-huang]

A budget is what is always there (parameters, optimizer state) and a share of what the plain step has beyond it at its
peak.  `auto` plans recomputation for the step's problem, whose bytes are those alive; `time` is the plan's extra
time, `bound` the extra time below which no plan exists (first runs in the step's order, any number of recomputations:
passes/planners/core/order_bound.py), `any` the same for any order (bound.py), `gap` how far the plan is above `bound`
as a share of the bound's time.  "none" where it is proven that nothing fits.  The networks: those of `seed_rows.py`,
and of MAGIS's (ASPLOS 2024) those that the zoo has.  Seconds are processor seconds.  Exit code 1: a gap is above .5 %
at 50 %, 5 % at 30 %, or 15 % at 20 %.
"""

from __future__ import annotations

import argparse
import math
import sys
import time

from seed_hunt import step_of
from seed_rows import ROWS, Row
from zoo_steps import headline, machine, row_text

from recompute.errors import BudgetError
from recompute.passes.planners import plan, simulate
from recompute.passes.planners.core.bound import bound_of
from recompute.passes.planners.core.problem import RematerialisationProblem

HEADER = ("network", "batch", "nodes", "share", "time", "bound", "any", "gap", "wanted", "sec", "verdict")
WIDTHS = (14, 5, 6, 5, 8, 8, 8, 6, 6, 6, 7)
#: the largest gap that is wanted, by the share of the budget
WANTED = {50: 0.005, 30: 0.05, 20: 0.15}
#: MAGIS's networks that the zoo has, at its batches
MAGIS = [
    Row("magis", name, batch, 0, 0, None, "rtx-3090", False, options)
    for name, batch, options in (
        ("resnet50", 64, {}),
        ("bert-base", 32, {"seq": 512}),
        ("vit-base", 64, {}),
        ("unet", 32, {"image": (256, 256)}),
    )
]


def gap(problem: RematerialisationProblem, share: int) -> tuple[str, str, str, str, bool]:
    """(extra time, its bound for plans and for any order, the gap, whether the gap is small enough) at a share of the
    plain step's bytes."""
    plain = simulate(problem, range(len(problem)))
    budget = problem.fixed + (plain.peak - problem.fixed) * share // 100
    try:
        found = plan(problem, budget=budget, strategy="auto")
    except BudgetError:
        return "none", "none", "none", "0.00%", True
    assert found.bound is not None and found.gap is not None
    free = bound_of(problem.in_two_passes, budget)
    least, anyhow = ("none" if math.isinf(x) else f"{x / plain.cost - 1:+.2%}" for x in (found.bound, free))
    if not found.fits:
        return ("none", least, anyhow, "0.00%", True) if math.isinf(found.bound) else ("?", least, anyhow, "?", False)
    return f"{found.overhead:+.2%}", least, anyhow, f"{found.gap:.2%}", found.gap <= WANTED.get(share, found.gap)


def main() -> int:
    """Prints a row a network and share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=(), help="networks")
    parser.add_argument("--table", help="feng-huang, kusumoto, monet or magis")
    parser.add_argument("--shares", nargs="*", type=int, default=list(WANTED), help="percent of the plain step's bytes")
    options = parser.parse_args()
    rows = [r for r in (*ROWS, *MAGIS) if options.table in (None, r.table)]
    wide, table = 0, ""
    print(headline(machine()))
    for row in rows:
        if options.only and row.network not in options.only:
            continue
        if row.table != table:
            table = row.table
            print(f"\n{table}\n{row_text(HEADER, WIDTHS)}")
        problem = step_of(row.network, row.batch, row.device, row.optimizer, row.options).fitting.derived.problem
        for share in options.shares:
            start = time.process_time()
            *texts, close = gap(problem, share)
            wide += not close
            seconds, wanted = time.process_time() - start, f"{WANTED[share]:.1%}" if share in WANTED else ""
            verdict = "met" if close else "MISS"
            cells = (
                row.network,
                str(row.batch),
                str(len(problem)),
                f"{share}%",
                *texts,
                wanted,
                f"{seconds:.1f}",
                verdict,
            )
            print(row_text(cells, WIDTHS), flush=True)
    return 1 if wide else 0


if __name__ == "__main__":
    sys.exit(main())
