"""A training step made to need less memory: within a budget, by a strategy, or by a plan made before."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..budgets import Budget, parse_budget
from ..cost import CostModel, kept_values, priced, step_seconds
from ..errors import UsageError
from ..language.ir import Block, Role
from ..language.program import Compiled, Program
from ..passes import RecomputePlan, Rerun, Target, memory_report
from ..passes.offload import without_copies
from ..passes.planners import planner
from ..passes.planners.auto import Auto
from ..passes.planners.fit import Fitted, Fitting
from ..passes.planners.problem import read_json
from ..passes.planners.watch import Progress, Watch, watching
from ..passes.sequence import cleaned, planned
from ..passes.transfers import StepTimes
from ..runtime.lowering import resolved
from ..support.files import replacing

#: the first field of a plan's file
FORMAT = "recompute-plan-1"
#: the strategy where nobody says another
DEFAULT = "auto"
_FORWARD = (Role.FORWARD, Role.LOSS)


@dataclass(frozen=True)
class Request:
    """What was asked for: a budget, a strategy with its options, or a plan; `offload`: host memory may serve too.

    `effort`, `seconds`: how long planning goes on (see `Watch`); `progress`: what hears of it (None: a line on a
    terminal).
    """

    budget: Budget | None = None
    strategy: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    plan: RecomputePlan | SavedPlan | None = None
    offload: bool = False
    effort: float = 1.0
    seconds: float | None = None
    progress: Callable[[Progress], Any] | None = None


def request(
    budget: str | int | Budget | None = None,
    strategy: str | None = None,
    options: Mapping[str, Any] | None = None,
    plan: RecomputePlan | SavedPlan | str | os.PathLike[str] | None = None,
    *,
    offload: bool = False,
    effort: float | None = None,
    seconds: float | None = None,
    progress: Callable[[Progress], Any] | None = None,
) -> Request | None:
    """The request, None where nothing was asked for.  UsageError for what contradicts itself or does not exist.

    `budget`: see `parse_budget`; `plan`: a plan, or the path of one that was saved; `offload`: whether values may
    wait in host memory (with a budget; a plan says it itself); `effort`, `seconds`, `progress`: see `Request`.
    """
    check_limits(effort, seconds, progress)
    if (effort is not None or seconds is not None) and budget is None:
        given = "effort" if effort is not None else "seconds"
        raise UsageError(f"{given} says how long planning for a budget may take: give a budget, such as '60%'")
    if offload and plan is not None:
        raise UsageError("a plan says what waits in host memory: leave out offload, or the plan")
    if offload and budget is None and strategy is not None:
        raise UsageError(
            f"offload beside strategy '{strategy}' needs a budget: without one nobody can say what is to be moved"
        )
    if plan is not None:
        if budget is not None or strategy is not None or options:
            raise UsageError("a plan says what runs again: leave out budget and strategy, or the plan")
        if isinstance(plan, (str, os.PathLike)):
            plan = load_plan(plan)
        if not isinstance(plan, (RecomputePlan, SavedPlan)):
            raise UsageError(f"a plan is a RecomputePlan, or the path of a file with one, not {plan!r}")
        return Request(plan=plan)
    if budget is None and strategy is None:
        if options:
            raise UsageError("options are a strategy's: name the strategy")
        return None
    if strategy is not None and not isinstance(strategy, str):
        raise UsageError(f"a strategy is named by a text such as '{DEFAULT}', not {strategy!r}")
    chosen = planner(strategy or DEFAULT, **(options or {}))
    if budget is None and chosen.strategy == DEFAULT:
        raise _needs_budget(DEFAULT)
    if effort is not None and not isinstance(chosen, Auto):
        raise UsageError(f"strategy '{chosen.strategy}' has no effort: it is for 'auto' and 'optimal', which search")
    amount = None if budget is None else parse_budget(budget)
    return Request(amount, strategy, dict(options or {}), None, offload, effort or 1.0, seconds, progress)


def check_limits(effort: object, seconds: object, progress: object = None) -> None:
    """UsageError for an effort, seconds or a listener that cannot be."""
    if effort is not None and seconds is not None:
        raise UsageError("effort (counted) and seconds (by the clock) both say when planning ends: give one of them")
    for name, value in (("effort", effort), ("seconds", seconds)):
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise UsageError(f"{name} must be a number above 0, not {value!r}")
    if progress is not None and not callable(progress):
        raise UsageError(f"progress must be a function that takes a Progress, not {progress!r}")


def _needs_budget(strategy: str) -> UsageError:
    return UsageError(
        f"strategy '{strategy}' needs a budget: set_budget('8GiB'), budget='60%', or --memory-budget 8GiB"
    )


@dataclass(frozen=True)
class PlanFigures:
    """What a plan does to a step: peaks are all that the executor allocates, seconds by `costs`.

    `bound`: seconds below which no plan within the budget exists, in any order of execution (None: not known);
    `gap`: how far the plan can be from the best there is, as a share of that; `kept`: forward values that wait for
    the backward pass, as names for `--checkpoints`; `planning_seconds`: what finding it took.  `offloads`: those of
    them that wait in host memory, where `host_bytes` are allocated; `transfer_seconds`: of all copies there and back;
    `stall_seconds`: in which the device waits for them, part of `seconds`.  `interrupted`, `timed_out`: whether
    planning was ended by an interrupt or by its seconds, before it had done all that it would have.
    """

    strategy: str
    budget: int | None
    plain_peak_bytes: int
    peak_bytes: int
    plain_seconds: float
    seconds: float
    bound: float | None
    planning_seconds: float
    reruns: int
    kept: tuple[str, ...]
    kept_bytes: int
    scheduled: bool
    costs: str
    offloads: tuple[str, ...] = ()
    host_bytes: int = 0
    transfer_seconds: float = 0.0
    stall_seconds: float = 0.0
    interrupted: bool = False
    timed_out: bool = False

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget."""
        return self.budget is None or self.peak_bytes <= self.budget

    @property
    def overhead(self) -> float:
        """Extra time as a share of the plain step's."""
        return self.seconds / self.plain_seconds - 1 if self.plain_seconds else 0.0

    @property
    def gap(self) -> float | None:
        """See the class; 0 is as good as it gets."""
        if self.bound is None or not self.fits:
            return None
        return max(0.0, self.seconds / self.bound - 1) if self.bound else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        lists = {"kept": list(self.kept), "offloads": list(self.offloads)}
        return {**asdict(self), **lists, "fits": self.fits, "overhead": self.overhead, "gap": self.gap}


def figures_of(
    fitting: Fitting,
    fitted: Fitted,
    *,
    strategy: str,
    budget: int | None,
    planning_seconds: float = 0.0,
    bounded: bool = True,
) -> PlanFigures:
    """The figures of a compiled plan.  `bounded`: whether to prove a bound for the budget."""
    moved, cost = fitted.plan.offloads, cost_of(fitting)
    bound = _bound_seconds(fitting, budget) if bounded and budget is not None and not moved else None
    times = fitting.times(fitted) if moved else StepTimes()
    plain_seconds = step_seconds(fitting.plain.block, cost)  # before fusion, as planners and their bounds see it
    kept, kept_bytes = kept_for_backward(fitted.block)
    own = fitting.once.values()  # not the parts of an operator that a plan has divided
    return PlanFigures(
        strategy=strategy,
        budget=budget,
        plain_peak_bytes=fitting.plain.peak,
        peak_bytes=fitted.peak,
        plain_seconds=plain_seconds,
        seconds=step_seconds(fitted.block, cost) + times.stalls,
        bound=bound,
        planning_seconds=planning_seconds,
        reruns=sum(op.role is Role.RECOMPUTE for op in fitted.block.operators),
        kept=tuple(n for n in kept if n in own),
        kept_bytes=kept_bytes,
        scheduled=fitted.scheduled,
        costs=cost.name,
        offloads=moved,
        host_bytes=memory_report(fitted.compiled).host,
        transfer_seconds=times.transfer_seconds,
        stall_seconds=times.stalls,
    )


def interruption(f: PlanFigures) -> str:
    """What is said of a plan whose planning was interrupted, or ran out of time."""
    why = "planning was interrupted" if f.interrupted else "planning ran out of its seconds"
    gap = "" if f.gap is None else f", at most {f.gap:.2%} from the best there is"
    return f"{why}: the best plan so far is taken, {f.overhead:+.2%} time{gap}"


def _bound_seconds(fitting: Fitting, budget: int) -> float:
    """Seconds below which no plan within the budget exists."""
    once = step_seconds(fitting.once, cost_of(fitting))
    views = once - fitting.derived.problem.cost  # they run at least once, and are no nodes
    return fitting.bound(budget) + views


def kept_for_backward(block: Block) -> tuple[tuple[str, ...], int]:
    """Forward values that wait for the backward pass, in order of production, and the bytes of all of them.

    Names of small outputs (statistics) are left out: user checkpoints keep those anyway.  What waits in host memory
    has a name among them, but no bytes.
    """
    small = {
        v.name for op in block.operators for i, v in enumerate(op.outputs) if v is not None and i in op.op.small_outputs
    }
    waiting = kept_values(without_copies(block))
    return tuple(n for n in waiting if n not in small), sum(kept_values(block).values())


# -- carrying out -----------------------------------------------------------------------------------------------------


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


def cost_of(fitting: Fitting) -> CostModel:
    """What a step's operators are priced by."""
    assert fitting.target.cost is not None
    return fitting.target.cost


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
    compiled = Compiled(fitted.compiled, fitted.block, target, found.budget, functools.partial(_refit, block, wanted))
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
    again = functools.partial(_refit, block, wanted)
    return Compiled(fitted.compiled, fitted.block, target, found.budget, again)


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
                fitted = fitting.fit(budget, strategy, wanted.options, offload=wanted.offload)
                if budget is None and not fitted.plan.reruns and chosen.heeds_budget:
                    raise _needs_budget(strategy)
        seconds = watch.elapsed
    found = figures_of(fitting, fitted, strategy=strategy, budget=budget, planning_seconds=seconds, bounded=bounded)
    return fitted, replace(found, interrupted=watch.interrupted, timed_out=watch.timed_out)


def _judged(fitting: Fitting, budget: int | None, found: Fitted) -> tuple[float, float | None]:
    """Overhead and gap of a compiled plan, as its figures will have them."""
    cost = cost_of(fitting)
    seconds = step_seconds(found.block, cost) + (fitting.times(found).stalls if found.plan.offloads else 0.0)
    bound = None if budget is None or found.plan.offloads else _bound_seconds(fitting, budget)
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


# -- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedPlan:
    """A plan by names, so that it serves other batches of the model too: see docs/cli.md for its file.

    `reruns`: pairs of names, the first output of the operator that runs again and the first output of the one before
    which it does; `scheduled`: whether that was planned in the order of operators that needs less memory; `offloads`:
    values that wait in host memory.
    """

    model: str
    batch: int | None
    strategy: str
    scheduled: bool
    reruns: tuple[tuple[str, str], ...]
    checkpoints: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    offloads: tuple[str, ...] = ()

    def for_block(self, base: Block) -> RecomputePlan:
        """The plan with operators by number.  UsageError with the name that the step does not have."""
        number = {name: i for i, name in enumerate(_names(base))}
        reruns = []
        for pair in self.reruns:
            for name in pair:
                if name not in number:
                    raise UsageError(
                        f"the plan is of another step: it names '{name}', which no operator here writes (it was made "
                        f"for {self.model}; options such as --option, --loss, --optimizer and --no-rebuild must be "
                        "the same, the batch need not)"
                    )
            reruns.append(Rerun(number[pair[0]], number[pair[1]]))
        for r, pair in zip(reruns, self.reruns, strict=True):
            op = base.operators[r.operator]
            if r.operator >= r.before or op.op.updates or (op.role not in _FORWARD and not op.views()):
                raise UsageError(f"the plan is of another step: here '{pair[0]}' cannot run again before '{pair[1]}'")
        reruns.sort(key=lambda r: r.before)  # operators that run before the same one keep their order
        return RecomputePlan(tuple(reruns), self.checkpoints, offloads=self.offloads)

    def to_dict(self) -> dict[str, Any]:
        """As in the file."""
        found = {"format": FORMAT, **asdict(self)}
        found["reruns"] = [list(pair) for pair in self.reruns]
        found["checkpoints"], found["offloads"] = list(self.checkpoints), list(self.offloads)
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON."""
        with replacing(Path(path)) as temporary:
            temporary.write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def saved_plan(fitted: Fitted, figures: PlanFigures, model: str, batch: int | None) -> SavedPlan:
    """The plan of a compiled step, by names."""
    names = _names(fitted.base)
    return SavedPlan(
        model=model,
        batch=batch,
        strategy=figures.strategy,
        scheduled=fitted.scheduled,
        reruns=tuple((names[r.operator], names[r.before]) for r in fitted.plan.reruns),
        checkpoints=figures.kept,
        figures={k: v for k, v in figures.to_dict().items() if k not in ("kept", "strategy", "scheduled", "offloads")},
        offloads=fitted.plan.offloads,
    )


def _names(block: Block) -> list[str]:
    """A name for each operator: its first output's, with a number behind where another one has it already."""
    count: dict[str, int] = {}
    names = []
    for op in block.operators:
        name = next((v.name for v in op.writes()), op.op.name)
        count[name] = count.get(name, 0) + 1
        names.append(name if count[name] == 1 else f"{name}#{count[name]}")
    return names


def load_plan(path: str | os.PathLike[str]) -> SavedPlan:
    """Reads what `SavedPlan.save` wrote.  UsageError for anything else, with the field that is wrong."""
    data = read_json(path)
    if data.get("format") != FORMAT:
        raise UsageError(f"{path} is no plan of format '{FORMAT}' (its 'format' is {data.get('format')!r})")
    for name, kind in _FIELDS.items():
        if name not in data:
            raise UsageError(f"{path} lacks the field '{name}'")
        if not isinstance(data[name], kind):
            raise UsageError(f"{path}: the field '{name}' is of the wrong kind: {data[name]!r}"[:300])
    for i, pair in enumerate(data["reruns"]):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(n, str) for n in pair):
            raise UsageError(f"{path}: reruns[{i}] is no pair of names")
    moved = data.get("offloads", [])  # plans of earlier versions have none
    if not isinstance(moved, list) or not all(isinstance(n, str) for n in (*data["checkpoints"], *moved)):
        raise UsageError(f"{path}: checkpoints and offloads are names")
    known: dict[str, Any] = {name: data[name] for name in _FIELDS}
    known["reruns"] = tuple((a, b) for a, b in data["reruns"])
    known["checkpoints"], known["offloads"] = tuple(data["checkpoints"]), tuple(moved)
    return SavedPlan(**known)


_FIELDS: dict[str, Any] = {
    "model": str,
    "batch": (int, type(None)),
    "strategy": str,
    "scheduled": bool,
    "reruns": list,
    "checkpoints": list,
    "figures": dict,
}
