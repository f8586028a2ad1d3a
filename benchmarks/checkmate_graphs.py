"""Planners on graphs that other papers published: cost over forward and backward, beside what is proven of it.

    python benchmarks/checkmate_graphs.py --graphs DIR [--strategies auto,chen,min-cut] [--only VGG16] [--judge]

DIR holds node/link JSON files, such as the `*_train_nx.json` of Checkmate's authors; they are published in
haoming-codes/moccasin on GitHub, folder data/ (GPL, so that none of them is here).  For each graph, budgets of
.9 .8 .7 .5 .3 .2 of its plain peak and a few that are known to be tight; for each strategy one row: cost / plain cost,
peak / plain peak, the strategy's own bound, the certificate that holds for any order and any number of repeats, the
gap to the certificate, seconds.  `-` marks plans that do not fit.  `--judge` adds Checkmate's MILP with 400 s.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from recompute.errors import RecomputeError
from recompute.passes.planners import PLANNERS, RematerialisationProblem, plan, planner, simulate
from recompute.passes.planners.core.adapters import read_problem
from recompute.passes.planners.core.bound import lower_bound

SHARES = (0.9, 0.8, 0.7, 0.5, 0.3, 0.2)
#: near the least that is possible, or where published optima are known
TIGHT = {"VGG16": (0.85,), "VGG19": (0.78,), "fcn_8": (0.62,)}
STRATEGIES = "auto,cut-sweep,chen,min-cut,checkmate-lp,moccasin"


def budgets(problem: RematerialisationProblem) -> list[float]:
    """Shares of the plain peak, the largest first."""
    more = next((s for name, s in TIGHT.items() if problem.name.startswith(name)), ())
    return sorted({*SHARES, *more}, reverse=True)


def options(strategy: str, time_limit: float, largest: int) -> dict[str, object]:
    """What is asked of every strategy that knows it: a time limit, and graphs of any size."""
    known = planner(strategy).__dataclass_fields__
    wanted: dict[str, object] = {"time_limit": time_limit, "largest": largest}
    return {name: value for name, value in wanted.items() if name in known}


def row(problem: RematerialisationProblem, share: float, strategy: str, proven: float, seconds: float) -> str:
    """One line of the table."""
    plain = simulate(problem, range(len(problem)))
    where = f"{problem.name[:12]:12}  {len(problem):4}  {share:5.2f}  {strategy:14}"
    try:
        found = plan(problem, budget=int(share * plain.peak), strategy=strategy, **options(strategy, seconds, 1000))
    except RecomputeError as e:
        return f"{where}  {str(e)[:90]}"
    cost, own = found.outcome.cost / plain.cost, found.bound
    return (
        f"{where}  {f'{cost:.5f}' if found.fits else '-':>8}  {found.outcome.peak / plain.peak:.4f}  "
        f"{'-' if own is None else f'{own / plain.cost:.5f}':>8}  {proven / plain.cost:8.5f}  "
        f"{f'{100 * (found.outcome.cost / proven - 1):.3f}' if found.fits else '-':>7}  {found.seconds:7.1f}"
    )


def table(path: Path, strategies: list[str], time_limit: float, judge: bool) -> None:
    """All rows of one graph."""
    problem = read_problem(path)
    plain = simulate(problem, range(len(problem)))
    for share in budgets(problem):
        proven = lower_bound(problem, int(share * plain.peak))
        if math.isinf(proven):
            print(f"{problem.name[:12]:12}  {len(problem):4}  {share:5.2f}  no schedule fits: proven", flush=True)
            continue
        for strategy in strategies:
            print(row(problem, share, strategy, proven, time_limit), flush=True)
        if judge:
            print(row(problem, share, "checkmate", proven, 400.0), flush=True)


def main(argv: list[str]) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=Path, required=True, help="folder of *_train_nx.json files")
    parser.add_argument("--strategies", default=STRATEGIES, help=f"comma-separated (default {STRATEGIES})")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for strategies that take a limit")
    parser.add_argument("--only", default="", help="graphs whose file name has this in it")
    parser.add_argument("--judge", action="store_true", help="Checkmate's MILP with 400 s, too")
    asked = parser.parse_args(argv)
    files = sorted(p for p in asked.graphs.glob("*_train_nx.json") if asked.only.lower() in p.name.lower())
    if not files:
        print(f"no *_train_nx.json with '{asked.only}' in {asked.graphs}", file=sys.stderr)
        return 2
    try:
        strategies = [s for s in asked.strategies.split(",") if planner(s) and s in PLANNERS]
    except RecomputeError as e:
        print(e, file=sys.stderr)
        return 2
    print("graph            n  budget  strategy            cost    peak  its own   anyone's    gap %  seconds")
    for path in files:
        table(path, strategies, asked.time_limit, asked.judge)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
