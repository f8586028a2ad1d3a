"""Planning of a training step: for a budget, by a strategy, or with an existing plan."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..cost import priced, step_seconds
from ..errors import UsageError, expect
from ..language.ir import Block
from ..language.program import Compiled, Program
from ..language.types import Array
from ..passes import RecomputePlan, Target
from ..passes.memory import packing, packing_exact
from ..passes.offloading.offload import staying
from ..passes.planners import planner
from ..passes.planners.core.watch import Progress, Watch, watching
from ..passes.planners.fit.plan import fit_within
from ..passes.planners.fit.problem import Fitted, Fitting
from ..passes.planners.fit.refusal import held_bytes
from ..passes.planners.fit.with_approximations import also_approximated, approximated
from ..passes.planners.fit.with_offload import hiding
from ..passes.planners.methods import flat
from ..passes.sequence import cleaned, planned
from ..runtime.lowering import resolved
from ..support.memory import give_back
from .figures import PlanFigures, cost_of, figures_of, seconds_bound
from .process import in_a_copy, must_be_alone, must_hold
from .request import DEFAULT, NO_PLAN, Request, needs_budget
from .saved import SavedPlan


def _compiled_moves(nodes: int) -> Callable[[flat.Arrays], flat.Run] | None:
    from ..runtime.cpu.planner_moves import compiled

    return compiled(nodes)


def _compiled_first_fit(order: Sequence[packing.Lifetime], known: Sequence[int]) -> list[int] | None:
    from ..runtime.cpu.packing_moves import placed

    return placed(order, known)


def _compiled_search(*arrays: Array) -> packing_exact.Search | None:
    from ..runtime.cpu.packing_search import compiled

    return compiled(*arrays)


flat.compile_with(_compiled_moves)
packing.compile_with(_compiled_first_fit)
packing_exact.compile_with(_compiled_search)


def target_of(target: Target | None) -> Target:
    """The target with its kernel providers and cost model (None: this CPU, with all installed providers)."""
    return priced(resolved(Target() if target is None else expect("target", target, Target, "an rc.Target")))


def lower(program: Program, target: Target) -> None:
    """Compiles a step for a target and plans its memory; `program.logical` is the step before lowering."""
    logical = cleaned(program.block, target, planned=program.planned is not None)
    block = planned(logical, target)
    program.lower_to(Compiled(block, logical, target))
    if notes := staying(logical, block):
        plan = program.plan or RecomputePlan()
        program.plan = replace(plan, notes=(*plan.notes, *notes))


def fitting_of(block: Block, target: Target, plain: Compiled | None = None) -> Fitting:
    """The fitting of a step that recomputes nothing, with dead code removed, as input of planners.

    `plain`: the same step if it was compiled before, so that it is not compiled twice.
    """
    logical = (plain.logical, plain.block) if plain is not None and plain.target == target else None
    fitting = Fitting(cleaned(block, target, planned=True), target, logical)
    step_seconds(fitting.once, cost_of(fitting))  # a cost model that measures does so first
    return fitting


def plan_step(
    program: Program, wanted: Request, target: Target, *, apart: bool = False, plain: Compiled | None = None
) -> Fitted:
    """Plans a training step that recomputes nothing, and applies the plan to the program.

    Afterwards the program is the step with the plan, compiled for `target`; with `apart` its block stays logical, and
    the compiled block is stored separately (see `Program.compiled`).  An executor on another place makes a new plan by
    `Compiled.refit`.  `plain`: see `fitting_of`.
    """
    block = program.block
    fitting = _fitting_for(block, target, wanted, plain)
    fitted, summary = _carried(fitting, wanted)
    compiled = _compiled(fitted, summary, target, block, wanted)
    notes = (*fitted.plan.notes, *staying(fitted.block, fitted.compiled))
    program.plan, program.planned = replace(fitted.plan, notes=notes), summary
    if apart:
        program.block, program.compiled = fitted.block, compiled
    else:
        program.lower_to(compiled)
    del fitting
    gc.collect()  # the search's frontiers and problems refer to each other
    give_back()
    if wanted.budget is not None and wanted.budget.of_process is not None:
        must_hold(wanted.budget)
    return fitted


def _fitting_for(block: Block, target: Target, wanted: Request, plain: Compiled | None = None) -> Fitting:
    """`fitting_of`, in the slices that are asked for."""
    if not wanted.slices:
        return fitting_of(block, target, plain)
    fitting = fitting_of(block, target).of(wanted.slices)
    if plain is not None and plain.target == target:
        fitting.known = plain.logical, plain.block
    return fitting


def _refit(block: Block, wanted: Request, target: Target) -> Compiled:
    """The step planned for another target by the same request; a budget as a share refers to its plain step there."""
    target = target_of(target)
    fitted, summary = _carried(_fitting_for(block, target, wanted), wanted, bounded=False)
    return _compiled(fitted, summary, target, block, wanted)


def _compiled(fitted: Fitted, found: PlanFigures, target: Target, block: Block, wanted: Request) -> Compiled:
    """A program's memory of its plan: the compiled block, and how to plan `block` for another target."""
    return Compiled(fitted.compiled, fitted.block, target, found.budget, functools.partial(_refit, block, wanted))


def _carried(fitting: Fitting, wanted: Request, *, bounded: bool = True) -> tuple[Fitted, PlanFigures]:
    """`carry`, in a copy of the process where the budget is one of a process."""
    if wanted.budget is None or wanted.budget.of_process is None:
        return carry(fitting, wanted, bounded=bounded)
    must_be_alone(wanted.budget, fitting.once, fitting.target)

    def work() -> tuple[Fitted, PlanFigures]:
        fitted, summary = carry(fitting, wanted, bounded=bounded)
        return replace(fitted, planned=None), summary  # a planner's own account may be large

    return in_a_copy(work)


def carry(fitting: Fitting, wanted: Request, *, bounded: bool = True) -> tuple[Fitted, PlanFigures]:
    """The step with a plan as requested, and the plan's figures.  UsageError with the reason if no plan fits.

    KeyboardInterrupt ends planning with the best plan so far, if one fits; a second interrupt is raised.
    """
    with listening(wanted.progress) as tell:
        options = dict(wanted.options)
        chosen = planner(wanted.strategy or DEFAULT, **options)
        work = getattr(chosen, "work", math.inf)
        watch = Watch(effort=wanted.effort or 1.0, seconds=wanted.seconds, work=work, tell=tell)
        watch.doing("compiling the plain step")
        budget = None if wanted.budget is None else wanted.budget.within(fitting.plain.peak, held_bytes(fitting.once))
        watch.judge = functools.partial(_judged, fitting, budget)
        with watching(watch):
            if not wanted.plans:
                fitted, strategy, bounded = approximated(fitting, wanted.approximations), NO_PLAN, False
            elif wanted.plan is not None:
                fitted = planned_before(fitting, wanted.plan)
                strategy = wanted.plan.strategy if isinstance(wanted.plan, SavedPlan) else "plan"
                bounded = False
            else:
                strategy = wanted.strategy or DEFAULT
                slicing = wanted.slicing and strategy == DEFAULT
                fitted = fit_within(
                    fitting, budget, strategy, options, offload=wanted.offload, slicing=slicing,
                    allowed=wanted.approximations, disk=fitting.target.disk is not None,
                )  # fmt: skip
                if budget is None and wanted.approximations:
                    fitted = also_approximated(fitting, fitted, wanted.approximations)
                elif budget is None and not fitted.plan.reruns and chosen.heeds_budget:
                    raise needs_budget(strategy)
        seconds = watch.elapsed
    summary = figures_of(fitting, fitted, strategy=strategy, budget=budget, planning_seconds=seconds, bounded=bounded)
    return fitted, replace(summary, interrupted=watch.interrupted, timed_out=watch.timed_out)


def _judged(fitting: Fitting, budget: int | None, fitted: Fitted) -> tuple[float, float | None]:
    """Overhead and gap of a compiled plan, as in its figures."""
    cost = cost_of(fitting)
    seconds = step_seconds(fitted.block, cost) + (fitting.times(fitted).stalls if fitted.plan.offloads else 0.0)
    sliced = fitting.of(fitted.plan.slices, fitted.plan.before)
    bound = None if budget is None else seconds_bound(sliced, fitted.plan, budget)
    gap = max(0.0, seconds / bound - 1) if bound else None
    return seconds / (step_seconds(fitting.plain.block, cost) or 1.0) - 1, gap


@contextlib.contextmanager
def listening(progress: Callable[[Progress], Any] | None) -> Iterator[Callable[[Progress], Any] | None]:
    """The function that is called with progress: the given one, else a status line if standard error is a terminal."""
    if progress is not None or not sys.stderr.isatty():
        yield progress
        return
    from ..support.tables import progress_status

    with progress_status(quiet=False) as update:
        yield lambda p: update(str(p))


def planned_before(fitting: Fitting, plan: RecomputePlan | SavedPlan) -> Fitted:
    """The step with an existing plan, whose copies may use what is left of the budget that it was made for.

    UsageError if the plan is for another model.
    """
    fitting = fitting.of(plan.slices, plan.before)
    if isinstance(plan, RecomputePlan):
        return fitting.carry_out(plan, False)
    try:
        numbered = plan.for_block(fitting.ordered if plan.scheduled else fitting.block)
        found = fitting.carry_out(numbered, plan.scheduled)
    except UsageError:
        if not plan.scheduled:
            raise
        found = fitting.carry_out(plan.for_block(fitting.block), False)  # at another batch another order may be better
    budget = plan.figures.get("budget")
    if not plan.offloads or not isinstance(budget, int):
        return found
    fitting_in = [f for f in hiding(fitting, found, budget) if f.peak <= max(budget, found.peak)]
    return min(fitting_in, key=lambda f: fitting.times(f).seconds)
