"""The tables of the papers whose methods are here, side by side with ours: our peak at their extra time or less.

    python benchmarks/seed_tables.py [--table feng-huang] [--only resnet50] [--moves 3000] [--json FILE]

Every row of `seed_rows.py` is built at the paper's batch and planned: `auto` looks for the lowest peak of a step that
takes no more extra time, by the roofline of the paper's GPU, than was published.  The plan is compiled; what is printed
is the compiled arena, plus parameters and optimizer state where the paper counts them.  Published megabytes are taken
as 10^6 bytes, gigabytes as 10^9, but MONeT's as 1000 MiB (they divide PyTorch's counter by 2^20).

`plain` is our step that repeats nothing at all, `default` what is compiled where nobody asks for a plan (normalised
values are made twice, passes/recomputation/rebuild.py); both extra times are over `plain`.  `ratio` is the peak over
the own plain peak, theirs and ours.  `bound` is a peak below which no schedule exists at the extra time allowed
(passes/planners/core/bound.py), `gap` how far above it we are.  Largest batches, graphs that were published
(`--graphs`, see checkmate_graphs.py) and chains have tables of their own below.
Exit code 1: a row misses.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from seed_hunt import MB, Best, Step, least_peak, lowest, say, step_of, within
from seed_rows import BATCH_ROWS, CHAIN_ROWS, GRAPH_ROWS, ROWS, BatchRow, ChainRow, GraphRow, Row
from seed_verdicts import BatchResult, ChainResult, GraphResult, Result
from zoo_steps import headline, machine, row_text, write_json

from recompute.errors import UsageError
from recompute.passes.planners import plan, simulate
from recompute.passes.planners.core.adapters import read_problem
from recompute.passes.planners.core.bound import lower_bound
from recompute.passes.planners.core.problem import RematerialisationProblem
from recompute.passes.planners.core.synthetic import lstm, recurrent, residual_chain
from recompute.passes.planners.methods.auto import Auto, frontier_of

HEADER = (
    "network", "batch", "regular", "best", "time", "plain", "default", "ours", "time", "theirs", "ratio", "bound",
    "gap", "sec", "verdict",
)  # fmt: skip
WIDTHS = (13, 5, 7, 6, 5, 7, 7, 6, 6, 6, 6, 6, 5, 4, 7)
BATCH_HEADER = (
    "network", "memory", "regular", "best", "time", "plain", "default", "ours", "time", "GB", "bound", "sec", "verdict",
)  # fmt: skip
BATCH_WIDTHS = (13, 6, 7, 5, 5, 5, 7, 5, 6, 6, 6, 4, 7)
GRAPH_HEADER = ("graph", "best", "time", "plain", "ours", "time", "at best", "bound", "sec", "verdict")
GRAPH_WIDTHS = (13, 5, 5, 5, 5, 6, 7, 6, 4, 7)
CHAIN_HEADER = ("chain", "published", "gruslys", "auto", "peak", "bound", "sec", "verdict")
CHAIN_WIDTHS = (26, 9, 7, 7, 7, 7, 4, 7)
CHAINS: dict[str, Callable[[int], RematerialisationProblem]] = {
    "recurrent": recurrent,
    "lstm": lstm,
    "residual_chain": residual_chain,
}


def result(row: Row, moves: int) -> Result:
    """Plans a row."""
    start = time.process_time()
    step = step_of(row.network, row.batch, row.device, row.optimizer, row.options)
    allowed = step.forward / step.seconds if row.overhead is None else row.overhead
    most = (1 + allowed) * step.seconds
    away = 0 if row.weights else step.fixed
    wanted = away + int(min(row.best, (step.fitting.unrepeated.peak - away) * row.best / row.regular))
    best = lowest(step, most, wanted, moves)
    bound = least_peak(step.fitting.derived.problem, most, best.peak)
    missed = best.peak - away >= row.best
    return Result(
        row.table, row.name, row.batch, row.regular, row.best, row.overhead, allowed,
        step.fitting.unrepeated.peak - away, step.fitting.plain.peak - away, best.peak - away, step.fixed,
        best.overhead,
        bound - away, best.reruns, best.fullest(), time.process_time() - start,
        instead(step, away + int(row.best), moves) if missed else None, row.note,
    )  # fmt: skip


def instead(step: Step, budget: int, moves: int) -> tuple[float | None, float]:
    """What their bytes take of extra time here: ours (None: no plan found), and the bound (infinite: impossible)."""
    proven = lower_bound(step.fitting.derived.problem, budget) / step.seconds - 1
    found = None if proven == float("inf") else within(step, budget, moves)
    return None if found is None else found.overhead, proven


def batch_result(row: BatchRow, moves: int) -> BatchResult:
    """Plans at the published batch; the same plan then gives the largest batch that fits."""
    start = time.process_time()
    step = batch_step(row, row.best)
    allowed = step.forward / step.seconds if row.overhead is None else row.overhead
    most = (1 + allowed) * step.seconds
    best = lowest(step, most, row.memory, moves, orders=False)
    batch, found = largest(row, allowed, best, guess(row, step.fixed, best.peak, row.best))
    bound = least_peak(step.fitting.derived.problem, most, best.peak)
    return BatchResult(
        row.table, row.name, row.memory, row.regular, row.best, row.overhead, allowed,
        guess(row, step.fixed, step.fitting.unrepeated.peak, row.best),
        guess(row, step.fixed, step.fitting.plain.peak, row.best),
        batch, found.peak, found.overhead, bound, guess(row, step.fixed, bound, row.best),
        found.fullest(), time.process_time() - start, row.note,
    )  # fmt: skip


def batch_step(row: BatchRow, batch: int) -> Step:
    """The row's network at a batch."""
    return step_of(row.network, batch, row.device, row.optimizer, row.options)


def guess(row: BatchRow, fixed: int, peak: int, batch: int) -> int:
    """The batch that fits if a batch takes `peak` bytes, as all but `fixed` grows with it."""
    return max(1, int(batch * (row.memory - fixed) / (peak - fixed)))


def largest(row: BatchRow, allowed: float, best: Best, batch: int) -> tuple[int, Best]:
    """The largest batch up to a guess whose compiled step fits, by the plan that was found at another batch."""
    while True:
        step = batch_step(row, batch)
        found = Best(step, step.fitting.carry_out(best.fitted.plan, False), best.method)
        if found.peak > row.memory >= found.live:
            found = found.packed()
        say(f"    batch {batch}: {found.peak / MB:,.0f} MB, {found.overhead:+.1%}")
        if batch == 1 or (found.peak <= row.memory and found.overhead <= allowed):
            return batch, found
        batch = max(1, min(batch - 1, int(batch * 0.995)))


def chain_result(row: ChainRow, moves: int) -> ChainResult:
    """Plans for a made-up chain by Gruslys' method and by ours."""
    start = time.process_time()
    problem = CHAINS[row.kind](row.steps)
    plain = plan(problem, budget=None, strategy="auto").plain
    budget = int(row.share * plain.peak)
    ours = plan(problem, budget=budget, strategy="auto", moves=moves)
    theirs = plan(problem, budget=budget, strategy="gruslys")
    cost = min((p.outcome.cost for p in (ours, theirs) if p.fits), default=float("inf"))
    return ChainResult(
        row.table, row.name, row.published, row.share,
        theirs.outcome.cost / plain.cost if theirs.fits else float("inf"),
        ours.outcome.cost / plain.cost if ours.fits else float("inf"),
        cost / plain.cost, ours.outcome.peak / plain.peak, (ours.bound or 0.0) / plain.cost,
        time.process_time() - start, row.note,
    )  # fmt: skip


def graph_result(row: GraphRow, moves: int, graphs: Path | None) -> GraphResult | None:
    """Plans the graph of a file; None where there is no such file."""
    path = next(iter(sorted(graphs.glob(f"{row.network}*_train_nx.json"))), None) if graphs is not None else None
    if path is None:
        return None
    start = time.process_time()
    problem = read_problem(path)
    plain = simulate(problem, range(len(problem)))
    forward = sum(n.cost for n in problem.nodes if not n.backward) / plain.cost
    allowed = forward if row.overhead is None else row.overhead
    free = row.memory - row.fixed
    budget, frontier = free * row.batch // row.best, frontier_of(problem)
    for share in (1.0, 0.97, 0.94):
        with contextlib.suppress(UsageError):  # no schedule can need so little
            Auto(moves=4 * moves).refine(frontier, int(share * budget))
    best = min((p for p in frontier if p.cost <= (1 + allowed) * plain.cost), key=lambda p: p.peak)
    there = frontier.best(budget)
    return GraphResult(
        row.table, row.network, row.best, row.overhead, allowed, free * row.batch // plain.peak,
        free * row.batch // best.peak, best.cost / plain.cost - 1,
        float("inf") if there is None else there.cost / plain.cost - 1,
        lower_bound(problem, budget) / plain.cost - 1, time.process_time() - start,
    )  # fmt: skip


def show(r: Result) -> str:
    """A line of the tables of peaks."""
    theirs, ours = r.ratios
    cells = [
        r.network, str(r.batch), f"{r.published_regular / MB:.0f}", f"{r.published_best / MB:.0f}",
        "-" if r.published_overhead is None else f"+{r.published_overhead:.1%}".replace(".0%", "%"),
        *(f"{x / MB:.0f}" for x in (r.plain, r.default, r.peak)), f"{r.overhead:+.1%}",
        f"{theirs:.3f}", f"{ours:.3f}", f"{r.bound / MB:.0f}", f"{r.gap:.0%}", f"{r.seconds:.0f}", r.verdict,
    ]  # fmt: skip
    return row_text(cells, (*WIDTHS[:-1], len(r.verdict)))


def show_batch(r: BatchResult) -> str:
    """A line of the table of batches."""
    theirs = "-" if r.published_overhead is None else f"+{r.published_overhead:.0%}"
    cells = [
        r.network, f"{r.memory >> 30} GiB", str(r.published_regular or "-"), str(r.published_best), theirs,
        str(r.plain), str(r.default), str(r.batch), f"{r.overhead:+.1%}", f"{r.peak / 1e9:.2f}", str(r.bound_batch),
        f"{r.seconds:.0f}", r.verdict,
    ]  # fmt: skip
    return row_text(cells, (*BATCH_WIDTHS[:-1], len(r.verdict)))


def show_chain(r: ChainResult) -> str:
    """A line of the table of chains."""
    cells = [
        r.network, f"{r.published:.2f}", f"{r.gruslys:.3f}", f"{r.auto:.3f}", f"{r.peak:.2%}", f"{r.bound:.3f}",
        f"{r.seconds:.0f}", r.verdict,
    ]  # fmt: skip
    return row_text(cells, (*CHAIN_WIDTHS[:-1], len(r.verdict)))


def show_graph(r: GraphResult) -> str:
    """A line of the table of published graphs."""
    theirs = "-" if r.published_overhead is None else f"+{r.published_overhead:.0%}"
    cells = [
        r.network, str(r.published_best), theirs, str(r.plain), str(r.batch), f"{r.overhead:+.1%}",
        f"{r.at_best:+.1%}", f"{r.bound:+.1%}", f"{r.seconds:.0f}", r.verdict,
    ]  # fmt: skip
    return row_text(cells, (*GRAPH_WIDTHS[:-1], len(r.verdict)))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--table", default="", help="only this table")
    p.add_argument("--only", default="", metavar="NAME", help="only this network")
    p.add_argument("--moves", type=int, default=3000, help="of local search, for a budget (default: 3000)")
    p.add_argument("--jobs", type=int, default=2, help="rows at a time (default: 2)")
    p.add_argument("--graphs", type=Path, metavar="DIR", help="folder of published graphs (see checkmate_graphs.py)")
    p.add_argument("--json", type=Path, metavar="FILE", help="the same figures as JSON")
    return p


def kinds(graphs: Path | None) -> list[tuple[Sequence[Any], str, Callable[[Any, int], Any], Callable[[Any], str]]]:
    """Rows, the header of their tables, what works on a row, what shows its result."""

    def on_graph(row: GraphRow, moves: int) -> GraphResult | None:
        return graph_result(row, moves, graphs)

    return [
        (ROWS, row_text(HEADER, WIDTHS), result, show),
        (BATCH_ROWS, row_text(BATCH_HEADER, BATCH_WIDTHS), batch_result, show_batch),
        (GRAPH_ROWS, row_text(GRAPH_HEADER, GRAPH_WIDTHS), on_graph, show_graph),
        (CHAIN_ROWS, row_text(CHAIN_HEADER, CHAIN_WIDTHS), chain_result, show_chain),
    ]


def worked(kind: int, row: Any, moves: int, graphs: Path | None) -> Any:
    """A row's result, in whatever process."""
    start = time.perf_counter()
    found = kinds(graphs)[kind][2](row, moves)
    say(f"{row.table}: {row.name} took {time.perf_counter() - start:.0f} s")
    return found


def tables(args: argparse.Namespace) -> list[Any]:
    """Works on all rows that are asked for, `--jobs` of them at a time, and prints them in order."""
    wanted = [
        (k, row)
        for k, (rows, *_) in enumerate(kinds(args.graphs))
        for row in rows
        if args.table in ("", row.table) and args.only in ("", row.name)
    ]
    found, last = [], ""
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        for (k, row), future in [(w, pool.submit(worked, *w, args.moves, args.graphs)) for w in wanted]:
            _, header, _, line = kinds(args.graphs)[k]
            if row.table != last:
                print(f"\n{row.table}\n{header}")
                last = row.table
            if (r := future.result()) is None:
                print(f"{row.name}: needs --graphs")
                continue
            found.append(r)
            print(line(r), flush=True)
    return found


def main() -> int:
    """Prints the tables; 1 where a row misses."""
    args = parser().parse_args()
    facts = {**machine(), "jobs": args.jobs, "moves": args.moves}
    print(headline(facts))
    start = time.perf_counter()
    found = tables(args)
    print()
    for r in found:
        for remark in r.remarks:
            print(f"{r.table}, {r.network}: {remark}")
    misses = sum(r.verdict.startswith("MISS") for r in found)
    wall, cpu = time.perf_counter() - start, sum(r.seconds for r in found)
    print(f"{len(found)} rows, {misses} miss; {wall:.0f} s, {cpu:.0f} s of processor time")
    write_json(args.json, facts, [{**asdict(r), "verdict": r.verdict} for r in found])
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
