"""The tables of the papers whose methods are here, side by side with ours: our peak at their extra time or less.

    python benchmarks/seed_tables.py [--table feng-huang] [--only resnet50] [--json FILE]

Every row of `seed_rows.py` is built at the paper's batch, its plain step compiled, and planned: `auto` looks for the
lowest peak whose step takes no more extra time, by the roofline of the paper's GPU, than was published.  The plan is
compiled; what is printed is the compiled arena, plus parameters and optimizer state where the paper counts them.
Published megabytes are taken as 10^6 bytes, gigabytes as 10^9.  Extra time is over a plain step that repeats nothing
at all (`rebuild=False`), `plain` is the least that a step without a plan takes.

`bound`: a peak below which no schedule exists at that extra time (passes/planners/bound.py), and `gap` how far above
it we are.  `ratio` is the peak over the own plain peak, theirs and ours.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seed_rows import ROWS, Row
from zoo_steps import headline, machine, row_text, write_json

import recompute as rc
from recompute import losses, models
from recompute.compiler import plain_fitting
from recompute.cost import Device, device, step_seconds
from recompute.errors import UsageError
from recompute.ir import Role
from recompute.passes import memory_report
from recompute.passes.planners.auto import Auto, frontier_of
from recompute.passes.planners.bound import least_budget, lower_bound, turning_points
from recompute.passes.planners.derive import Derived
from recompute.passes.planners.fit import Fitted, Fitting
from recompute.passes.planners.frontier import Frontier, Point
from recompute.passes.planners.problem import RematerialisationProblem
from recompute.passes.planners.simulate import plan_of

MB = 10**6
#: local search for a budget; budgets that are tried for a row; plans that are compiled for one order of the step
MOVES, ROUNDS, COMPILED = 8000, 4, 3
WIDTHS = (14, 5, 7, 7, 6, 8, 8, 6, 6, 6, 8, 6, 5, 8)
HEADER = (
    "network", "batch", "regular", "best", "time", "plain", "ours", "time", "theirs", "ratio", "bound", "gap", "sec",
    "verdict",
)  # fmt: skip


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Step:
    """A network's training step on a device: its fitting, and the seconds of a step that repeats nothing."""

    fitting: Fitting
    on: Device
    seconds: float
    forward: float

    @property
    def fixed(self) -> int:
        """Bytes of parameters and optimizer state."""
        return self.fitting.derived.problem.fixed

    def overhead(self, fitted: Fitted) -> float:
        """Extra time of a compiled step."""
        return step_seconds(fitted.compiled, self.on) / self.seconds - 1


def step_of(name: str, batch: int, on: str, optimizer: str, **options: Any) -> Step:
    """The step of a zoo network with its natural loss."""
    program = rc.load(models.build(name, batch=batch, weights=False, **options))
    kind, _ = losses.natural_loss(program)
    loss = kind if kind in program else getattr(losses, kind)(program).name
    gpu = device(on)
    update = getattr(rc, optimizer)(learning_rate=0.1)
    bare = plain_fitting(program, loss, update, gpu, rebuild=False).block
    forward = sum(gpu.seconds(op) for op in bare.operators if op.role in (Role.FORWARD, Role.LOSS))
    return Step(plain_fitting(program, loss, update, gpu), gpu, step_seconds(bare, gpu), forward)


class Hunt:
    """The lowest peak of one problem whose cost is no more than `most` seconds."""

    def __init__(self, problem: RematerialisationProblem, most: float, moves: int = MOVES) -> None:
        self.problem, self.most = problem, most
        self.frontier: Frontier = frontier_of(problem)
        self.auto = Auto(moves=moves)

    def within(self) -> list[Point]:
        """Plans that are cheap enough, the lowest peak first."""
        return [p for p in self.frontier if p.cost <= self.most]

    def run(self, rounds: int) -> None:
        """Looks around lower and lower budgets, and nearer to the last one that could be kept where one could not."""
        low = least_budget(self.problem)
        share = 0.92
        if not self.within():
            return
        for _ in range(rounds):
            best = self.within()[0].peak
            goal = max(low, self.problem.fixed + int((best - self.problem.fixed) * share))
            if best - goal < 0.002 * (best - self.problem.fixed):
                return
            try:
                self.auto.refine(self.frontier, goal)
            except UsageError:
                low = goal
            share = share if self.within()[0].peak < best else (1 + share) / 2


def lowest(step: Step, most: float, rounds: int = ROUNDS, moves: int = MOVES) -> Fitted:
    """The lowest compiled peak of all plans whose step takes no more than `most` seconds."""
    hunts = [(derived, scheduled, Hunt(derived.problem, most, moves)) for derived, scheduled in step.fitting.bases()]
    hunts.sort(key=lambda h: h[2].within()[0].peak if h[2].within() else sys.maxsize)
    hunts[0][2].run(rounds)
    found = [step.fitting.plain]
    for derived, scheduled, hunt in hunts:
        for point in hunt.within()[:COMPILED]:
            found.append(compiled(step.fitting, derived, scheduled, point))
            say(f"    {point.method}: {found[-1].peak / MB:,.0f} MB compiled, {point.peak / MB:,.0f} predicted")
    fine = [f for f in found if step_seconds(f.compiled, step.on) <= most]
    return min(fine or found[:1], key=lambda f: f.peak)


def compiled(fitting: Fitting, derived: Derived, scheduled: bool, point: Point) -> Fitted:
    """A point of a frontier, compiled."""
    return fitting.carry_out(derived.for_block(plan_of(point.sequence)), scheduled)


def least_peak(problem: RematerialisationProblem, most: float, highest: int) -> int:
    """Bytes below which no schedule exists that costs no more than `most`: the bound, by bisection."""
    points = turning_points(problem, 4)
    low, high = least_budget(problem), highest
    if lower_bound(problem, low, points) <= most:
        return low
    while high - low > (high - problem.fixed) // 500:
        middle = (low + high) // 2
        low, high = (low, middle) if lower_bound(problem, middle, points) <= most else (middle, high)
    return low


@dataclass(frozen=True)
class Result:
    """A row's outcome, in bytes and shares; `plain`, `peak` and `bound` count what the paper counts."""

    table: str
    network: str
    batch: int
    published_regular: float
    published_best: float
    published_overhead: float | None
    allowed_overhead: float
    plain: int
    peak: int
    persistent: int
    overhead: float
    bound: int
    reruns: int
    peak_at: str
    seconds: float

    @property
    def gap(self) -> float:
        """How far the peak is above the bound."""
        return self.peak / self.bound - 1

    @property
    def ratios(self) -> tuple[float, float]:
        """Peak over plain peak: theirs, ours."""
        return self.published_best / self.published_regular, self.peak / self.plain

    @property
    def verdict(self) -> str:
        """`MISS`: not below the published best; then what is known about the ratio."""
        if self.peak >= self.published_best or self.overhead > self.allowed_overhead:
            return "MISS"
        theirs, ours = self.ratios
        if ours <= theirs:
            return "below"
        proven = self.bound / self.plain > theirs
        return "below; ratio: impossible (proven)" if proven else "below; ratio: higher"


def result(row: Row) -> Result:
    """Plans a row."""
    start = time.process_time()
    say(f"{row.table}: {row.name}, batch {row.batch}")
    step = step_of(row.network, row.batch, row.device, row.optimizer, **row.options)
    allowed = step.forward / step.seconds if row.overhead is None else row.overhead
    most = (1 + allowed) * step.seconds
    best = lowest(step, most)
    away = 0 if row.weights else step.fixed
    bound = least_peak(step.fitting.derived.problem, most, best.peak)
    return Result(
        row.table, row.name, row.batch, row.regular, row.best, row.overhead, allowed,
        step.fitting.plain.peak - away, best.peak - away, step.fixed, step.overhead(best), bound - away,
        sum(op.role is Role.RECOMPUTE for op in best.compiled.operators), fullest(best),
        time.process_time() - start,
    )  # fmt: skip


def fullest(fitted: Fitted) -> str:
    """The operator during which most is alive, and the largest that is."""
    block = fitted.compiled
    op = block.operators[memory_report(block).peak_at]
    largest = max((*op.reads(), *op.writes()), key=lambda v: v.nbytes)
    return f"{op.op.name} ({op.role.name.lower()}) with '{largest.name}' of {largest.nbytes / MB:.0f} MB"


def show(r: Result) -> str:
    """A line of the table."""
    theirs, ours = r.ratios
    cells = [
        r.network, str(r.batch), f"{r.published_regular / MB:.0f}", f"{r.published_best / MB:.0f}",
        "-" if r.published_overhead is None else f"+{r.published_overhead:.0%}",
        f"{r.plain / MB:.0f}", f"{r.peak / MB:.0f}", f"{r.overhead:+.1%}", f"{theirs:.3f}", f"{ours:.3f}",
        f"{r.bound / MB:.0f}", f"{r.gap:.0%}", f"{r.seconds:.0f}",
    ]  # fmt: skip
    return row_text([*cells, r.verdict], (*WIDTHS[:-1], len(r.verdict)))


def chosen(args: argparse.Namespace) -> list[Row]:
    """The rows that are asked for."""
    return [r for r in ROWS if args.table in ("", r.table) and args.only in ("", r.name)]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--table", default="", help="only this table")
    p.add_argument("--only", default="", metavar="NAME", help="only this network")
    p.add_argument("--json", type=Path, metavar="FILE", help="the same figures as JSON")
    return p


def main() -> int:
    """Prints the tables; 1 where a row misses."""
    args = parser().parse_args()
    facts = machine()
    print(headline(facts))
    found: list[Result] = []
    table = ""
    for row in chosen(args):
        if row.table != table:
            table = row.table
            print(f"\n{table}\n{row_text(HEADER, WIDTHS)}")
        found.append(result(row))
        print(show(found[-1]), flush=True)
    write_json(args.json, facts, [{**asdict(r), "verdict": r.verdict} for r in found])
    return any(r.verdict == "MISS" for r in found)


if __name__ == "__main__":
    sys.exit(main())
