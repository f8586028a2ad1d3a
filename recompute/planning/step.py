"""A training step made to need less memory: within a budget, by a strategy, or by a plan made before."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ..cost import priced, step_seconds
from ..errors import UsageError
from ..language.ir import Block
from ..language.program import Compiled, Program
from ..passes import RecomputePlan, Target
from ..passes.planners import planner
from ..passes.planners.core.watch import Progress, Watch, watching
from ..passes.planners.fit.plan import fit_within
from ..passes.planners.fit.problem import Fitted, Fitting
from ..passes.planners.methods import flat
from ..passes.sequence import cleaned, planned
from ..runtime.lowering import resolved
from .figures import PlanFigures, cost_of, figures_of, seconds_bound
from .request import DEFAULT, Request, needs_budget
from .saved import SavedPlan


def _compiled_moves(nodes: int) -> Callable[[flat.Arrays], flat.Run] | None:
    from ..runtime.cpu.planner_moves import compiled

    return compiled(nodes)


flat.compile_with(_compiled_moves)


def target_of(target: Target | None) -> Target:
    """The target with its providers and cost model (None: this machine's processor, with all kernels that it has)."""
    return priced(resolved(target or Target()))


def lower(program: Program, target: Target) -> None:
    """Compiles a step for a target and plans its memory; `program.logical` is what it was before."""
    logical = cleaned(program.block, target, planned=program.planned is not None)
    program.lower_to(Compiled(planned(logical, target), logical, target))


def fitting_of(block: Block, target: Target, plain: Compiled | None = None) -> Fitting:
    """A step that recomputes nothing, as planners take it: without dead code.

    `plain`: such a step that was compiled before; where it is this one, that is not done again.
    """
    known = (plain.logical, plain.block) if plain is not None and plain.target == target else None
    found = Fitting(cleaned(block, target, planned=True), target, known)
    step_seconds(found.once, cost_of(found))  # a model that measures does all of it first
    return found


def plan_step(
    program: Program, wanted: Request, target: Target, *, apart: bool = False, plain: Compiled | None = None
) -> Fitted:
    """Carries out what a planner is asked for, on a training step that recomputes nothing.

    The program is the step with the plan afterwards, compiled for `target`; `apart`: compiled beside, while its block
    stays logical (see `Program.compiled`).  An executor on another place plans again by `Compiled.refit`.  `plain`: see
    `fitting_of`.
    """
    block = program.block
    fitting = fitting_of(block, target, plain)
    fitted, found = carry(fitting, wanted)
    compiled = _compiled(fitted, found, target, block, wanted)
    program.plan, program.planned = fitted.plan, found
    if apart:
        program.block, program.compiled = fitted.block, compiled
    else:
        program.lower_to(compiled)
    return fitted


def _refit(block: Block, wanted: Request, target: Target) -> Compiled:
    """The step planned for another target as it was asked for; a budget that is a share is one of its plain step."""
    target = target_of(target)
    fitted, found = carry(fitting_of(block, target), wanted, bounded=False)
    return _compiled(fitted, found, target, block, wanted)


def _compiled(fitted: Fitted, found: PlanFigures, target: Target, block: Block, wanted: Request) -> Compiled:
    """What a program remembers of its plan: what runs, and how to plan `block` for another target."""
    return Compiled(fitted.compiled, fitted.block, target, found.budget, functools.partial(_refit, block, wanted))


def carry(fitting: Fitting, wanted: Request, *, bounded: bool = True) -> tuple[Fitted, PlanFigures]:
    """The step as it was asked for.  UsageError where no plan is found that fits, and why.

    An interrupt (KeyboardInterrupt) ends planning with the best plan so far, where one fits; a second one is raised.
    """
    with listening(wanted.progress) as tell:
        chosen = planner(wanted.strategy or DEFAULT, **wanted.options)
        work = getattr(chosen, "work", math.inf)
        watch = Watch(effort=wanted.effort, seconds=wanted.seconds, work=work, tell=tell)
        watch.doing("compiling the plain step")
        budget = None if wanted.budget is None else wanted.budget.within(fitting.plain.peak)
        watch.judge = functools.partial(_judged, fitting, budget)
        with watching(watch):
            if wanted.plan is not None:
                fitted = planned_before(fitting, wanted.plan)
                strategy = wanted.plan.strategy if isinstance(wanted.plan, SavedPlan) else "plan"
                bounded = False
            else:
                strategy = wanted.strategy or DEFAULT
                fitted = fit_within(fitting, budget, strategy, wanted.options, offload=wanted.offload)
                if budget is None and not fitted.plan.reruns and chosen.heeds_budget:
                    raise needs_budget(strategy)
        seconds = watch.elapsed
    found = figures_of(fitting, fitted, strategy=strategy, budget=budget, planning_seconds=seconds, bounded=bounded)
    return fitted, replace(found, interrupted=watch.interrupted, timed_out=watch.timed_out)


def _judged(fitting: Fitting, budget: int | None, found: Fitted) -> tuple[float, float | None]:
    """Overhead and gap of a compiled plan, as its figures will have them."""
    cost = cost_of(fitting)
    seconds = step_seconds(found.block, cost) + (fitting.times(found).stalls if found.plan.offloads else 0.0)
    bound = None if budget is None or found.plan.offloads else seconds_bound(fitting, budget)
    gap = max(0.0, seconds / bound - 1) if bound else None
    return seconds / (step_seconds(fitting.plain.block, cost) or 1.0) - 1, gap


@contextlib.contextmanager
def listening(progress: Callable[[Progress], Any] | None) -> Iterator[Callable[[Progress], Any] | None]:
    """What hears of progress: the function given, else a line on standard error where that is a terminal."""
    if progress is not None or not sys.stderr.isatty():
        yield progress
        return
    from ..support.tables import progress_status

    with progress_status(quiet=False) as update:
        yield lambda p: update(str(p))


def planned_before(fitting: Fitting, plan: RecomputePlan | SavedPlan) -> Fitted:
    """The step with a plan made before.  UsageError where it is of another model."""
    if isinstance(plan, RecomputePlan):
        return fitting.carry_out(plan, False)
    try:
        return fitting.carry_out(plan.for_block(fitting.ordered if plan.scheduled else fitting.block), plan.scheduled)
    except UsageError:
        if not plan.scheduled:
            raise
    return fitting.carry_out(plan.for_block(fitting.block), False)  # at another batch, another order is the best
