"""Planning options: budgets, strategies, saved plans, comparisons, and planning problems from files."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..budgets import Budget, as_budget
from ..errors import BudgetError, UsageError, one_line
from ..passes.approximation.base import parse_permissions
from ..passes.planners.fit.refusal import held_bytes
from ..places import CPUPlace, as_place
from ..planning.figures import interruption
from ..planning.request import NO_PLAN, check_limits
from ..support.files import replacing
from ..support.tables import human_bytes, human_seconds
from .job import Job, request_of, steps_of
from .job import progress as progress_of
from .parsing import real
from .values import target_of

#: default budget of comparisons
_COMPARED_AT = "60%"
#: most names that are printed without -v
_NAMES = 12


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Adds the options about plans."""
    group = p.add_argument_group("how to fit --memory-budget")
    group.add_argument("--strategy", metavar="NAME", help="the planner: auto (default), chen, kusumoto, rotor, ...")
    group.add_argument(
        "--effort", type=real, metavar="N", help="how long to search for a plan: 1 (default), 2 for twice as long; "
        "counted in work, not seconds, so that the same command gives the same plan",
    )  # fmt: skip
    group.add_argument("--seconds", type=real, metavar="S", help="search for S seconds instead")
    group.add_argument(
        "--no-slicing", action="store_true", help="do not run parts of the step in slices to fit --memory-budget"
    )
    group.add_argument(
        "--allow",
        metavar="A,B,...",
        help="permit approximate gradients: sketch:0.2 (weight gradients from a fifth of the rows), bits:4 (slopes of "
        "activations in 4 bits), store:8 (kept values in 8 bits); with --memory-budget as few as it takes, else "
        "wherever they save memory",
    )
    group.add_argument("--plan", type=Path, metavar="FILE.json", help="use a saved plan")
    group.add_argument("--save-plan", type=Path, metavar="FILE.json", help="write the plan, for use with --plan")
    group.add_argument(
        "--compare",
        action="store_true",
        help="print the result of every strategy at the budget (default: 60%% of the plain step's peak), and stop",
    )
    group.add_argument(
        "--pareto",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE.svg",
        help="print the curve of memory against time, and stop; with FILE (.svg, .png, .pdf), also draw it",
    )
    group.add_argument("--save-problem", type=Path, metavar="FILE.json", help="write the planning problem, and stop")


def check_arguments(args: argparse.Namespace) -> None:
    """Checks the values of the options before any work is done."""
    if args.allow is not None:
        parse_permissions(args.allow)
    check_limits(args.effort, args.seconds)
    if args.pareto is not None and args.pareto != Path():
        from ..report.plot import check_plot

        check_plot(args.pareto)
    if args.model is None or not is_problem(args.model):
        request_of(args)


def planned_step(job: Job, program: Any, loss: str, plain: Any) -> Any:
    """The step with a planner's plan.  BudgetError with advice if no plan fits."""
    args, wanted = job.args, request_of(job.args)
    assert wanted is not None
    if wanted.plans:
        job.say(f"planning: {wanted.strategy or (args.plan and str(args.plan)) or 'auto'}")
    options: dict[str, Any] = {
        "budget": wanted.budget,
        "strategy": wanted.strategy,
        "plan": wanted.plan,
        "offload": wanted.offload,
        "effort": args.effort,
        "seconds": args.seconds,
        "slicing": wanted.slicing,
        "approximations": wanted.approximations,
    }
    try:
        step = job.compile(program, loss, plain=plain, **options)
    except BudgetError as e:
        if wanted.budget is None:
            raise
        raise BudgetError(f"{e}{_advice(job, _within(wanted.budget, plain))}") from None
    limit = None if args.budget is None else _within(args.budget, plain)
    if limit is not None and step.figures.peak_bytes > limit:
        peak = step.figures.peak_bytes
        raise UsageError(f"with {args.plan} the step takes {peak:,} bytes, but the budget is {limit:,}")
    job.report.planned = step.planned.to_dict()
    if step.planned.interrupted:
        job.report.notes.append(interruption(step.planned))
    changed = step.planned.slices or step.planned.approximations
    if step.figures.recomputed_operators or step.figures.offloaded_values or changed:
        job.report.recompute = asdict(step.figures)
        job.report.notes += list(step.plan.notes)
    return step


def _within(budget: Budget, plain: Any) -> int:
    return budget.within(plain.figures.peak_bytes, held_bytes(plain.program.block))


def _advice(job: Job, budget: int) -> str:
    """A line that names the biggest batch that fits without recomputation; "" if there is none."""
    from ..analysis.biggest_batch import largest_fitting

    with contextlib.suppress(UsageError):
        steps = steps_of(job)
        if steps.open_batch:
            biggest = largest_fitting(steps.peak, budget)
            return f"\n  the biggest batch that fits without recomputation is {biggest}" if biggest else ""
    return ""


def report_plan(job: Job, step: Any) -> None:
    """Prints the plan's figures below the table, and writes the plan if requested."""
    planned = step.planned
    if planned is None:
        return
    if not (planned.reruns or planned.offloads or planned.slices or planned.approximations):
        job.say(f"the plain step fits {human_bytes(planned.budget)}: nothing is recomputed" if planned.budget else
                "nothing is recomputed")  # fmt: skip
    else:
        how = "approximate" if planned.strategy == NO_PLAN else f"plan by {one_line(planned.strategy)}"
        text = f"{how}: {planned.overhead:+.2%} time"
        if planned.gap is not None:
            text += ", which is optimal" if planned.gap < 1e-9 else f", at most {planned.gap:.2%} above the optimum"
        slices = [s for s in planned.slices if "@" not in s]  # others are a rank's share of the micro-batches
        if slices:
            text += f", {len(slices)} part{'s' if len(slices) > 1 else ''} in slices"
        if planned.offloads:
            place = as_place(job.args.place)
            where = "on disk" if isinstance(place, CPUPlace) and place.disk else "in host memory"
            text += (
                f", {step.figures.offloaded_values} values {where} ({human_bytes(planned.host_bytes)}), "
                f"{human_seconds(planned.stall_seconds)} of waiting for transfers"
            )
        job.say(f"{text}; found in {human_seconds(planned.planning_seconds)}")
        _report_approximations(job, planned.approximations)
        if planned.timed_out:
            job.say(interruption(planned))
        if slices:
            job.say(f"in slices, for use with --slice: {' '.join(map(one_line, slices))}")
        if not planned.approximations:
            _report_kept(job, planned.kept)
    if job.args.save_plan is not None and step.saved is not None:
        step.saved.save(job.args.save_plan)
        job.written.append((job.args.save_plan, ""))


def _report_kept(job: Job, names: tuple[str, ...]) -> None:
    all_of_them = job.args.verbose or len(names) <= _NAMES
    shown = names if all_of_them else names[:_NAMES]
    more = "" if all_of_them else f", ... ({len(names)} in all; -v prints all, --json lists all)"
    job.say(f"kept for the backward pass, for use with --checkpoints: {','.join(map(one_line, shown))}{more}")


def _report_approximations(job: Job, choices: tuple[str, ...]) -> None:
    """Prints for which values something else waits, by kind."""
    kinds: dict[str, list[str]] = {}
    for choice in choices:
        value, _, kind = choice.rpartition("=")
        kinds.setdefault(kind, []).append(one_line(value))
    for kind, values in kinds.items():
        shown = values if job.args.verbose else values[:_NAMES]
        more = "" if len(shown) == len(values) else ", ... (-v prints all)"
        job.say(f"approximate, {kind.replace('+', ' and ')} in place of {len(values)}: {','.join(shown)}{more}")


def answers(job: Job, program: Any, loss: str, checkpoints: list[str] | None) -> bool:
    """Does --compare, --pareto and --save-problem; whether one of them was requested."""
    args = job.args
    if not (args.compare or args.pareto is not None or args.save_problem is not None):
        return False
    from ..compiling.compiler import plain_fitting

    with progress_of(args) as progress:
        progress("compiling the plain step")
        fitting = plain_fitting(program, loss, job.optimizer(), target_of(args))
        if args.save_problem is not None:
            fitting.derived.problem.save(args.save_problem)
            job.written.append((args.save_problem, ""))
        text = _compared(job, program, loss, fitting, checkpoints, progress) if args.compare else ""
        text += _curve(job, fitting, progress) if args.pareto is not None else ""
    if text:
        job.say(text)
    return True


def _compared(job: Job, program: Any, loss: str, fitting: Any, checkpoints: list[str] | None, progress: Any) -> str:
    from ..analysis.compare import compare, compare_text

    plain = fitting.plain.peak
    budget = (job.args.budget or as_budget(_COMPARED_AT)).within(plain, held_bytes(fitting.once))
    # the default budget may be below the least possible peak (large parameters): take the middle then
    if job.args.budget is None and (least := fitting.least) > budget:
        budget = (least + plain) // 2
    mine = None if checkpoints is None else job.compile(program, loss, checkpoints=checkpoints)
    rows = compare(fitting, budget, mine, progress)
    job.report.compare = [asdict(r) for r in rows]
    return compare_text(rows, plain, budget, job.args.cost.name)


def _curve(job: Job, fitting: Any, progress: Any) -> str:
    from ..analysis.compare import draw_curve, pareto

    curve = pareto(fitting, progress)
    job.report.pareto = curve.to_dict()
    text, path = str(curve), job.args.pareto
    if path != Path():
        figure = draw_curve(curve, f"{job.args.model}, batch {job.report.batch}")
        with replacing(path) as temporary:
            figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=150)
        job.written.append((path, ""))
    return text


# -- problems in files ------------------------------------------------------------------------------------------------


def is_problem(model: str) -> bool:
    """Whether the argument is a planning problem (a JSON file) rather than a model."""
    return Path(model).suffix.lower() == ".json" and Path(model).is_file()


def plan_problem(job: Job) -> None:
    """Plans the problem in a file, with one strategy or, for --compare, with all of them."""
    from ..passes.planners import PLANNERS, plan, simulate
    from ..passes.planners.base import import_all
    from ..passes.planners.core.adapters import read_problem
    from ..passes.planners.core.bound import lower_bound

    args = job.args
    problem = read_problem(args.model)
    plain = simulate(problem, range(len(problem)))
    budget = (args.budget or as_budget(_COMPARED_AT)).within(plain.peak, problem.fixed)
    import_all()
    quick = {name: dict(cls.quick) for name, cls in PLANNERS.items() if cls.quick is not None}
    wanted = quick if args.compare else {args.strategy or "auto": {}}
    job.say(f"{problem.name}: {len(problem)} nodes, plain peak {plain.peak:,}; budget {budget:,}")
    job.report.compare = []
    with progress_of(args) as progress:
        for strategy, options in wanted.items():
            progress(f"strategy {strategy}")
            try:
                result = plan(problem, budget=budget, strategy=strategy, **options)
            except UsageError as e:
                if not args.compare:
                    raise
                job.say(f"{strategy}: {e}")
                continue
            proven = lower_bound(problem, budget)
            job.report.compare.append(_problem_row(result, proven))
            gap = f", gap at most {max(0.0, result.outcome.cost / proven - 1):.2%}" if result.fits and proven else ""
            fits = "" if result.fits else " (does not fit)"
            job.say(
                f"{strategy}{fits}: peak {result.outcome.peak:,} ({result.outcome.peak / plain.peak:.1%}), "
                f"cost {1 + result.overhead:.4f}{gap}, {human_seconds(result.seconds)}"
            )
            if not result.fits and not args.compare:
                raise UsageError(
                    f"strategy '{strategy}' found no plan that fits {budget:,} bytes: try another strategy, or auto"
                )


def _problem_row(result: Any, proven: float) -> dict[str, Any]:
    return {
        "strategy": result.strategy,
        "peak_bytes": result.outcome.peak,
        "overhead": result.overhead,
        "gap": max(0.0, result.outcome.cost / proven - 1) if result.fits and proven else None,
        "fits": result.fits,
        "seconds": result.seconds,
        "reruns": [[r.operator, r.before] for r in result.plan.reruns],
    }
