"""How planning grows: a transformer of N layers, planned by `auto` at half of its plain peak.

    python benchmarks/planner_scaling.py [LAYERS ...]        (default: 24 48 96 192 600)

Each in a process of its own.  Prints operators of the step and nodes of its problem, seconds to plan (cuts, blocks,
local search) and to prove the bound, what the plan costs, how far from the best any plan can be it is at most, and the
memory of the process beyond what it was before planning.
"""

from __future__ import annotations

import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from zoo_steps import headline, machine, row_text

import recompute as rc
from recompute import models
from recompute.compiling.compiler import plain_fitting
from recompute.cost import device
from recompute.passes.planners import plan
from recompute.passes.planners.core.bound import lower_bound
from recompute.training import losses

HEADER = ("layers", "operators", "nodes", "peak", "plan s", "bound s", "time", "bound", "gap", "MiB")
WIDTHS = (6, 9, 7, 6, 7, 7, 8, 8, 7, 6)
SHARE = 0.5


def planned(layers: int) -> str:
    """A line for one size."""
    program = rc.load(models.build("gpt2-small", batch=32, layers=layers, weights=False))
    kind, _ = losses.natural_loss(program)
    loss = kind if kind in program else getattr(losses, kind)(program).name
    fitting = plain_fitting(program, loss, rc.Adam(), rc.Target(providers=(), cost=device("a100-80")))
    problem = fitting.derived.problem
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    plain = plan(problem, budget=None, strategy="auto").plain
    budget = int(SHARE * plain.peak)
    found = plan(problem, budget=budget, strategy="auto")
    middle = time.perf_counter()
    bound = lower_bound(problem, budget)
    end = time.perf_counter()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    cost = found.outcome.cost
    cells = [
        str(layers), str(len(fitting.block.operators)), str(len(problem)), f"{found.outcome.peak / plain.peak:.3f}",
        f"{middle - start:.1f}", f"{end - middle:.1f}", f"{cost / plain.cost - 1:+.3%}",
        f"{bound / plain.cost - 1:+.3%}",
        f"{cost / bound - 1:.3%}", str(grown),
    ]  # fmt: skip
    return row_text(cells if found.fits else [*cells[:4], "does not fit"], WIDTHS)


def main() -> int:
    """Prints the table."""
    sizes = [int(a) for a in sys.argv[1:]] or [24, 48, 96, 192, 600]
    print(headline({**machine(), "budget": f"{SHARE:.0%} of the peak"}))
    print(row_text(HEADER, WIDTHS))
    for layers in sizes:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            print(pool.submit(planned, layers).result(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
