"""Training with approximated gradients: accuracy, memory and time of what `--allow` permits, on three small tasks.

    OMP_NUM_THREADS=1 python benchmarks/approximation.py [digits tumours text] [--seeds 5] [--quick] [--json FILE]
    ... --first 3 --seeds 2 --json B.json       seeds 3 and 4 alone, on another core
    ... --seeds 0 --scores A.json B.json        trains nothing: scores from files, peaks and times anew
    ... --seeds 0 --batch 256                   peaks and times at another batch
    ... --settings @80% bits:4,store:8@40%      these beside the exact step, PERMITTED@BUDGET

Each setting trains `--seeds` times; a seed is that of the initial weights and of the order of samples.  Columns:
`score` is the mean on what is held out, with the standard deviation over the seeds; `peak` is all that the executor
allocates for a training step, weights and optimizer state included (predicted and measured, which must agree);
`kept` is what the forward pass keeps for the backward pass; `time` is the median over rounds, in which all settings
take turns, of processor time of a step beside that of the exact step.

Behind it, plans: exact ones within budgets, the same bits as no plan, and mixed ones, which may approximate.  For each
allowance of extra time, the lowest peak of both; of mixed ones, those that are as accurate as the exact ones (the mean
within a standard error of theirs, or better).  Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from approximation_tasks import Digits, Task, Text, Tumours

import recompute as rc
from recompute.cost import kept_values
from recompute.passes import memory_report

KIB = 1024
EXACT = "exact"
SINGLE = (
    "sketch:0.5", "sketch:0.2", "sketch:0.1", "sketch:0.2:gaussian", "sketch:0.2:rademacher", "sketch:0.2:dct",
    "bits:4", "bits:2", "bits:1", "store:8", "store:4", "store:2", "store:bf16",
)  # fmt: skip
MIXED = ("bits:4,store:8", "sketch:0.2,bits:4", "sketch:0.2,bits:4,store:8", "sketch:0.2,bits:4,store:4")
#: kinds of sketches whose time alone is measured
UNTRAINED = ("sketch:0.2:gaussian", "sketch:0.2:rademacher")
#: extra time that both kinds of plans may take, as a share of the exact step's; what the clock cannot tell apart
ALLOWANCES, NOISE = (0.0, 0.05, 0.1, 0.2, 0.35), 0.02
#: steps of training
TASKS: dict[type[Task], int] = {Digits: 400, Tumours: 200, Text: 1200}


Scores = dict[str, list[dict[str, float]]]


@dataclass(frozen=True)
class Setting:
    """What is permitted, and a budget as a share of the plain step's peak; `sliced`: slices of the batch are, too."""

    allowed: str = ""
    budget: str = ""
    sliced: bool = False

    def __str__(self) -> str:
        within = f" within {self.budget}" if self.budget else ""
        return f"{self.allowed or EXACT}{within}{', slices' if self.sliced else ''}"


@dataclass
class Row:
    """Figures of a setting; `scores`: those of each seed."""

    setting: Setting
    peak: int = 0
    kept: int = 0
    state: int = 0
    seconds: float = 0.0
    time: float = 0.0
    approximations: list[str] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)

    def values(self, name: str) -> np.ndarray:
        """A score of every seed."""
        return np.array([s[name] for s in self.scores])


class Trained:
    """A compiled step of a task, which can begin again."""

    def __init__(self, task: Task, setting: Setting) -> None:
        self.task, self.row = task, Row(setting)
        self.program = rc.load(task.model(0), batch=task.batch)
        self.loss = task.loss(self.program)
        optimizer = task.optimizer()
        if setting != Setting():
            optimizer = rc.RecomputeOptimizer(optimizer)
            if setting.allowed:
                optimizer.set_approximations(setting.allowed)
            if setting.budget:
                optimizer.set_budget(setting.budget, slicing=setting.sliced, progress=lambda _: None)
        optimizer.minimize(self.loss)
        self.start = {name: value.copy() for name, value in self.program.data.items()}
        self.executor = rc.Executor()
        self._measure()

    def _measure(self) -> None:
        row, session = self.row, self.executor.session(self.program, [self.loss.name])
        self.step(next(self.task.batches(0)))
        row.peak, predicted = session.measured_peak_bytes, memory_report(session.block).peak
        assert row.peak == predicted, f"{row.setting}: {predicted:,} bytes predicted, {row.peak:,} measured"
        row.kept = sum(kept_values(session.block).values())
        row.state = sum(v.nbytes for v in session.block.persistent())
        plan = self.program.plan
        row.approximations = [] if plan is None else [*plan.before, *plan.approximations]

    def step(self, batch: dict[str, np.ndarray]) -> None:
        """One step."""
        self.executor.run(self.program, batch, [self.loss])

    def clocked(self, batches: Sequence[dict[str, np.ndarray]]) -> float:
        """Processor seconds of a step, the median."""
        found = []
        for batch in batches:
            start = time.process_time()
            self.step(batch)
            found.append(time.process_time() - start)
        return float(np.median(found))

    def train(self, seed: int) -> dict[str, float]:
        """From the initial weights of a seed; the scores."""
        fresh = rc.load(self.task.model(seed), batch=self.task.batch).data
        for name, value in self.program.data.items():
            np.copyto(value, fresh.get(name, self.start[name]))
        for batch in self.task.batches(seed):
            self.step(batch)
        return self.task.scores(self.program)


def settings(quick: bool, wanted: Sequence[str] = ()) -> list[Setting]:
    """The rows of the table; then exact plans, and mixed ones within budgets."""
    if wanted:
        return [Setting(), *(Setting(*text.split("@")) for text in wanted)]
    if quick:
        return [Setting(), Setting("sketch:0.2,bits:4,store:8")]
    alone = [Setting(), *(Setting(a) for a in (*SINGLE, *MIXED))]
    exact = [Setting("", f"{n}%") for n in (90, 80, 70, 60, 55, 50)]
    mixed = [*(Setting(MIXED[2], f"{n}%") for n in (70, 60)), Setting("sketch:0.1,bits:2,store:4", "50%")]
    mixed += [Setting("sketch:0.5,bits:4,store:8")]
    sliced = [Setting(a, "50%", True) for a in ("", MIXED[2])]
    return [*alone, *exact, *mixed, *sliced]


def compiled(task: Task, wanted: Sequence[Setting], report: Callable[[str], None]) -> Iterator[Trained]:
    """Their steps; budgets that no plan fits are left out."""
    for setting in wanted:
        try:
            yield Trained(task, setting)
        except rc.BudgetError as e:
            report(f"{setting}: {e}")


def clock(task: Task, rows: Sequence[Trained], rounds: int, steps: int) -> None:
    """Times of a step: all take turns, and each round is compared with itself."""
    batches = [b for b, _ in zip(task.batches(0), range(steps), strict=False)]
    found = np.array([[t.clocked(batches) for t in rows] for _ in range(rounds)])
    for i, t in enumerate(rows):
        t.row.seconds = float(np.median(found[:, i]))
        t.row.time = float(np.median(found[:, i] / found[:, 0]))


def scores_of(task: Task, files: Sequence[Path], refuse: Callable[[str], Any]) -> Scores:
    """Name of a setting → what `--json` wrote in other runs of a task, one file after the other."""
    found: Scores = {}
    for file in files:
        figures = json.loads(file.read_text()).get(task.name)
        if figures is None:
            continue
        if figures["task"] != task.describe:
            refuse(f"{file} has another task: {figures['task']}")
        for row in figures["rows"]:
            found.setdefault(row["name"], []).extend(row["scores"])
    return found


def measured(
    task: Task,
    wanted: Sequence[Setting],
    seeds: Sequence[int],
    known: Scores,
    quick: bool,
    report: Callable[[str], None],
    save: Callable[[list[Row]], None],
) -> list[Row]:
    """All rows of a task, with the scores known.  Seeds come one after the other, so that what is interrupted is
    complete for some of them."""
    found = list(compiled(task, wanted, report))
    clock(task, found, 3 if quick else 9, 3 if quick else 20)
    rows = [t.row for t in found]
    for row in rows:
        row.scores += known.get(str(row.setting), [])
    save(rows)
    for seed in seeds:
        for t in found:
            if t.row.setting == Setting() or (
                t.row.setting.allowed and not t.row.setting.sliced and t.row.setting.allowed not in UNTRAINED
            ):
                t.row.scores.append(t.train(seed))
        report(f"{task.name}: seed {seed} done")
        save(rows)
    return rows


def equal(task: Task, row: Row, exact: Row) -> bool:
    """Whether a row's mean is within a standard error of that of the exact rows, or better; exact plans are equal."""
    if not row.setting.allowed or not row.scores:
        return not row.setting.allowed
    sign = 1 if task.higher else -1
    reference = exact.values(task.equal)
    error = reference.std(ddof=1) / np.sqrt(len(reference)) if len(reference) > 1 else 0.0
    return bool(sign * (row.values(task.equal).mean() - reference.mean()) >= -error)


def table(task: Task, rows: Sequence[Row]) -> Iterator[str]:
    """The lines of a task."""
    exact = rows[0]
    yield f"{task.name}: {task.describe}; {len(exact.scores)} seeds"
    yield (
        f"exact: {exact.seconds * 1e3:.2f} ms a step, peak {exact.peak / KIB:,.0f} KiB, of which weights and state "
        f"{exact.state / exact.peak:.0%}, kept for the backward pass {exact.kept / exact.peak:.0%}"
    )
    width = max(len(str(r.setting)) for r in rows)
    head = ("peak KiB", "peak", "kept KiB", "time", "accuracy", "loss", "equal")
    yield f"{'':{width}} {head[0]:>8} {head[1]:>6} {head[2]:>8} {head[3]:>5}  {head[4]:16} {head[5]:15} {head[6]}"
    for r in rows:
        scores = "(not trained)" if r.setting.allowed or r.setting.sliced else "(the bits of exact)"
        if r.scores:
            scores = f"{spread(100 * r.values('accuracy'), 2)} %  {spread(r.values('loss'), 4)} "
            scores += "yes" if equal(task, r, exact) else "no"
        yield (
            f"{r.setting!s:{width}} {r.peak / KIB:8,.0f} {r.peak / exact.peak:6.3f} {r.kept / KIB:8,.0f} {r.time:5.2f}"
            f"  {scores}"
        )


def spread(values: np.ndarray, digits: int) -> str:
    """Mean and standard deviation."""
    deviation = values.std(ddof=1) if len(values) > 1 else 0.0
    return f"{values.mean():.{digits}f} ± {deviation:.{digits}f}"


def frontier(task: Task, rows: Sequence[Row]) -> Iterator[str]:
    """For each allowance of extra time: the lowest peaks of exact and of equally accurate mixed plans."""
    exact = rows[0]
    yield f"lowest peaks at the same time (within {NOISE:.0%}) and the same {task.equal}, no slices of the batch:"
    for extra in ALLOWANCES:
        able = [r for r in rows if r.time <= 1 + extra + NOISE and not r.setting.sliced]
        plain = min((r for r in able if not r.setting.allowed), key=lambda r: r.peak)
        mixed = [r for r in able if r.setting.allowed and equal(task, r, exact)]
        line = f"  extra time {extra:4.0%}: {plain.setting} {plain.peak / KIB:,.0f} KiB (time {plain.time:.2f})"
        if mixed:
            best = min(mixed, key=lambda r: r.peak)
            line += f"; {best.setting} {best.peak / KIB:,.0f} KiB (time {best.time:.2f})"
            line += f"; ratio {best.peak / plain.peak:.2f}"
        else:
            line += "; no mixed plan"
        yield line


def main() -> None:
    """Prints a table for each task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="digits, tumours, text (default: all)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed")
    parser.add_argument("--scores", type=Path, nargs="+", default=[], metavar="FILE", help="more seeds, from --json")
    parser.add_argument("--settings", nargs="+", default=(), metavar="SETTING", help="these beside the exact step")
    parser.add_argument("--batch", type=int, metavar="SAMPLES", help="another batch than the task's")
    parser.add_argument("--quick", action="store_true", help="one seed, two settings, few steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures; after each seed")
    given = parser.parse_args()
    steps = dict.fromkeys(TASKS, 8) if given.quick else TASKS
    tasks: dict[str, Task] = {t.name: t(n, given.batch or t.batch) for t, n in steps.items()}
    if unknown := [t for t in given.tasks if t not in tasks]:
        parser.error(f"there is no task '{unknown[0]}': {', '.join(tasks)}")
    figures: dict[str, Any] = {}
    for name in given.tasks or tasks:

        def save(rows: list[Row], name: str = name) -> None:
            figures[name] = {
                "task": tasks[name].describe,
                "rows": [asdict(r) | {"name": str(r.setting), "equal": equal(tasks[name], r, rows[0])} for r in rows],
            }
            if given.json is not None:
                given.json.write_text(json.dumps(figures, indent=1) + "\n")

        known = scores_of(tasks[name], given.scores, parser.error)
        seeds = range(given.first, given.first + (1 if given.quick else given.seeds))
        wanted = settings(given.quick, given.settings)
        rows = measured(tasks[name], wanted, seeds, known, given.quick, lambda text: print(text, flush=True), save)
        print("\n".join(["", *table(tasks[name], rows), *frontier(tasks[name], rows), ""]), flush=True)


if __name__ == "__main__":
    main()
