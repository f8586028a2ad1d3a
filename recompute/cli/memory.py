"""`--estimate`, `--memory-budget` and `--max-batch`."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import JobError, UsageError
from ..places import CPUPlace, as_place
from ..support.tables import human_bytes
from . import costs as cli_costs
from .job import Job, steps_of
from .job import progress as progress_of
from .parsing import given_budget
from .plan import is_problem

if TYPE_CHECKING:
    from ..budgets import Budget
    from ..compiling.steps import Steps


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Adds the options about memory."""
    group = p.add_argument_group("what to find out before anything runs")
    group.add_argument(
        "--estimate",
        action="store_true",
        help="print the peak memory, the values alive at the peak, what each checkpoint saves, and memory as a "
        "function of the batch",
    )
    group.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="most memory that the step may take: 16GiB, 16GB, 500MB, 1.5G (= 1.5GiB), 60%% of the plain step's "
        "peak, '40%% of activations', or '8GiB of process', with Python and libraries; if the plain step takes more, "
        "a planner chooses what to recompute",
    )
    group.add_argument(
        "--max-batch", action="store_true", help="print the biggest batch that fits --memory-budget, by strategy"
    )
    cli_costs.add_arguments(group)


def check_arguments(args: argparse.Namespace) -> None:
    """Checks the options before any work is done; parses the budget and `--seq`."""
    if args.seq is not None:
        args.option = [*args.option, f"seq={args.seq}"]
    cli_costs.check_arguments(args)
    args.budget = None
    if args.memory_budget is not None:
        args.budget = given_budget(args.memory_budget, small=bool(args.model and is_problem(args.model)))
    if args.max_batch and args.budget is not None and args.budget.bytes is None:
        raise UsageError(f"--max-batch needs an amount for the step, e.g. --memory-budget 16GiB, not {args.budget}")
    if args.budget is not None and args.budget.of_process is not None:
        _check_process(args)


def _check_process(args: argparse.Namespace) -> None:
    """UsageError where a budget is of a process that is not known."""
    why = ""
    if args.mesh is not None:
        why = "--mesh: libraries for communication take memory that is not known before"
    elif not isinstance(as_place(args.place), CPUPlace):
        why = f"--place {args.place}: a device's memory is not the process's"
    elif args.model and is_problem(args.model):
        why = "a problem in a file, which no process runs"
    if why:
        raise UsageError(f"--memory-budget '{args.budget}' is not possible with {why}; give the step's own, e.g. 8GiB")


def check_data(args: argparse.Namespace, program: Any = None) -> None:
    """Checks the file of --data before anything is compiled: its arrays where the program is known, else its form."""
    if args.data is not None:
        from ..data.batches import check_npz

        check_npz(args.data, program)


def before_loading(job: Job, more: bool) -> bool:
    """Does what needs no weights (--estimate, --max-batch, refusals); True if the command is then done.

    `more`: there is work to do after an estimate.  UsageError for a batch that does not fit the budget.
    """
    args = job.args
    runs = args.run is not None or args.check
    job.available = available_memory() if runs and args.budget is None else None
    refuses = args.budget is not None and (args.checkpoints is not None or args.estimate) and not args.compare
    if not (args.max_batch or args.estimate or refuses):
        return False
    steps = steps_of(job)
    if args.data is not None:
        check_data(args, steps.program(steps.batch(args.batch))[0])
    with progress_of(args) as progress:
        if args.max_batch:
            from ..analysis.biggest_batch import max_batch_of
            from ..passes.planners.core.watch import Watch

            watch = Watch(effort=args.effort or 1.0, seconds=args.seconds)
            options: dict[str, Any] = {"slicing": not args.no_slicing, "network": args.network}
            result = max_batch_of(steps, args.budget.bytes, progress, watch, **options)
            job.report.max_batch = result.to_dict()
            job.report.ranks = job.report.max_batch.pop("ranks")
            job.report.optimizer = args.optimizer.lower()
            text = str(result)
        else:
            if refuses:
                _refuse(steps, steps.batch(args.batch), args.budget, progress)
            text = _estimate(job, steps, progress) if args.estimate else ""
    if text:
        job.say(text)
    return args.max_batch or (args.estimate and not more)


def before_running(job: Job, step: Any) -> None:
    """JobError if the step needs more memory than is available, before any of it is allocated."""
    peak = step.figures.peak_bytes
    if job.available is None or peak <= job.available:
        return
    from ..analysis.biggest_batch import advice

    steps = steps_of(job)
    with progress_of(job.args) as progress:
        lines = advice(steps, steps.batch(job.args.batch), job.available, progress)
    raise JobError(
        f"{_said(steps, steps.batch(job.args.batch))} takes {human_bytes(peak)}, but this machine has only "
        f"{human_bytes(job.available)} available\n  {lines}"
    )


def _estimate(job: Job, steps: Steps, progress: Callable[[str], None]) -> str:
    from ..analysis.estimates import estimate_steps

    estimate = estimate_steps(steps, job.args.batch, progress, job.args.network)
    program, loss = steps.program(estimate.batch)
    report = job.report
    report.estimate = estimate.to_dict()
    report.ranks = report.estimate.pop("ranks")
    report.batch, report.loss = estimate.batch, loss
    report.inputs = {v.name: str(v.type) for v in program.block.inputs}
    report.parameters = sum(v.size for v in program.block.parameters)
    report.checkpoints = [c.name for c in estimate.checkpoints]
    report.plain = asdict(steps.figures(estimate.batch))
    report.recompute = asdict(steps.figures(estimate.batch, steps.asked)) if steps.asked is not None else None
    return str(estimate)


def _refuse(steps: Steps, batch: int, amount: Budget, progress: Callable[[str], None]) -> None:
    """UsageError if the batch takes more than the budget."""
    from ..passes.planners.fit.refusal import held_bytes, held_text

    progress(f"compiling batch {batch}")
    peak = steps.peak(batch, steps.asked)
    budget = amount.within(steps.peak(batch), held_bytes(steps.compile(batch).program.block))
    if peak <= budget:
        return
    from ..analysis.biggest_batch import advice

    plain = steps.compile(batch)
    lines = f"{advice(steps, batch, budget, progress)}\n  {held_text(plain.program.block, plain.figures.peak_bytes)}"
    raise UsageError(
        f"{_said(steps, batch)} takes {human_bytes(peak)}, but --memory-budget is {human_bytes(budget)}\n  {lines}"
    )


def _said(steps: Steps, batch: int) -> str:
    return f"{steps.name} at batch {batch}{' with these checkpoints' if steps.asked is not None else ''}"


def available_memory() -> int | None:
    """Bytes that this process can still allocate (of the machine, or of its control group); None if unknown."""
    limits = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    if not limits:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"))
    return min(limits, default=None)
