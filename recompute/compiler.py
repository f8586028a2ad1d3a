"""Compiling a training step: both variants, plain and recomputed, with their figures, before anything runs."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .budgets import Budget
from .cost import CostModel, Device, costs_of, kept_bytes, link_of, operator_cost, step_seconds, this_cpu
from .errors import UsageError, nearest
from .files import make_folder, replacing, together
from .ir import Block, Free, Role, Value
from .passes import RecomputePlan, memory_report, offloaded, without_gc
from .passes.planners.fit import Fitting
from .passes.transfers import StepTimes, simulate
from .planning import PlanFigures, Request, SavedPlan, carry, fitting_of, lower, request, saved_plan
from .program import Program
from .runtime.lowering import providers as providers_of
from .runtime.places import Place
from .text import show


@dataclass(frozen=True)
class StepFigures:
    """What one training step takes.  Bytes, operations and seconds; `peak_bytes` is all the executor allocates.

    `host_bytes`: what it allocates in host memory, for `offloaded_values`; `transfer_seconds`: of the copies there and
    back; `stall_seconds`: in which the device waits for them, part of `estimated_step_seconds`.
    """

    operators: int
    recomputed_operators: int
    peak_bytes: int
    arena_bytes: int
    live_peak_bytes: int
    persistent_bytes: int
    kept_bytes: int
    flops: int
    repeated_flops: int
    repeated_forward_share: float
    estimated_step_seconds: float
    offloaded_values: int = 0
    host_bytes: int = 0
    transfer_seconds: float = 0.0
    stall_seconds: float = 0.0


@dataclass(frozen=True)
class CompiledStep:
    """A training step ready to run: its program with planned memory, the plan behind it, and its figures.

    `cost`: the model that its times were estimated by.  `planned`: a planner's plan by names and what it does.
    """

    program: Program
    plan: RecomputePlan | None
    figures: StepFigures
    cost: CostModel = field(default_factory=this_cpu)
    planned: PlanFigures | None = None
    saved: SavedPlan | None = None


def compile_step(
    program: Program,
    loss: str,
    optimizer: Any,
    *,
    checkpoints: Sequence[str] | None = None,
    budget: str | int | Budget | None = None,
    strategy: str | None = None,
    strategy_options: Mapping[str, Any] | None = None,
    plan: RecomputePlan | SavedPlan | str | os.PathLike[str] | None = None,
    offload: bool = False,
    fetch: Sequence[str] = (),
    dump: Path | str | None = None,
    schedule: bool = True,
    rebuild: bool = True,
    providers: Sequence[str] | None = None,
    place: Place | None = None,
    cost: CostModel | None = None,
    precision: str | None = None,
    effort: float | None = None,
    seconds: float | None = None,
    progress: Callable[[Any], Any] | None = None,
) -> CompiledStep:
    """Makes a training step of a copy of `program`: backward pass, recomputation, updates, memory plan.

    `optimizer`: any of `rc.optimizers`.  What is recomputed: nothing, what `checkpoints` leave, as much as it takes
    for the step to fit a `budget` (`"8GiB"`, bytes, `"60%"` of the plain step's peak) as `strategy` finds it (default:
    "auto"), or what a `plan` says.  `offload`: the checkpoints wait in host memory; with a budget, as many values as
    make the step faster than recomputing alone would (docs/offload.md).  `dump`: a folder for the text after each
    stage.  `schedule`: whether independent operators may change places to need less memory.  `rebuild`: whether
    normalised values that gradients read are made again from what is kept anyway (see passes/rebuild.py).
    `providers`: whose kernels run it, in order of preference (None: all that there are for `place`; `("numpy",)`: the
    operators' own numerics).  `place`: where it will run (None: this machine's processor); a device need not be there
    to compile for it.  `cost`: what times are estimated by (the device's data sheet, or this CPU's roofline).
    `precision`: "fp32", "tf32", "bf16" or "fp16" (see docs/precision.md; None: as the optimizer says).  `effort`,
    `seconds`, `progress`: how long planning for a budget goes on, and what hears of it
    (`RecomputeOptimizer.set_budget`).
    """
    from .amp import with_precision

    if providers is None and place is not None:
        providers = providers_of(place)
    limits: dict[str, Any] = {"effort": effort, "seconds": seconds, "progress": progress}
    wanted = request(budget, strategy, strategy_options, plan, offload=offload, **limits)
    optimizer, wanted = _asked(with_precision(optimizer, precision), wanted, checkpoints, offload=offload)
    cost = at_precision(cost or costs_of(place), precision)
    with without_gc():
        step, stages = _made(program, loss, optimizer, fetch)
        planned = saved = None
        if wanted is not None:
            fitting = fitting_of(step.block, cost, schedule=schedule, rebuild=rebuild, providers=providers)
            fitted, planned = carry(fitting, wanted, cost)
            planned = dataclasses.replace(planned, kept=tuple(n for n in planned.kept if n in program))
            step.lower_to(fitted.compiled, fitted.block)
            step.plan, step.planned = fitted.plan, planned
            saved = saved_plan(fitted, planned, program.block.name, batch_of(program))
            stages[-1] = ("step", fitted.block)
        else:
            lower(step, cost, schedule=schedule, rebuild=rebuild, providers=providers)
        stages.append(("planned", step.block))
        if dump is not None:
            _dump(Path(dump), stages)
        return CompiledStep(step, step.plan, figures(step.block, cost, step.logical), cost, planned, saved)


def _asked(
    optimizer: Any, wanted: Request | None, checkpoints: Sequence[str] | None, *, offload: bool
) -> tuple[Any, Request | None]:
    """The optimizer, which knows the checkpoints, and the request, which may be the optimizer's."""
    from .optimizers import RecomputeOptimizer

    if isinstance(optimizer, RecomputeOptimizer) and offload:
        raise UsageError("set enable_offload of the RecomputeOptimizer: what it recomputes is its own")
    if isinstance(optimizer, RecomputeOptimizer) and (own := optimizer.request) is not None:
        if wanted is not None or checkpoints is not None:
            raise UsageError("the optimizer and the arguments of compile_step both say what is recomputed")
        wanted, optimizer = own, optimizer.inner
    if checkpoints is not None:
        if wanted is not None:
            raise UsageError("checkpoints say what is kept, and so does a budget, strategy or plan: give one of them")
        optimizer = RecomputeOptimizer(optimizer).set_checkpoints(list(checkpoints)).set_offload(offload)
    elif offload and wanted is None:
        raise UsageError("offload needs checkpoints, which wait in host memory then, or a budget")
    return optimizer, wanted


def _made(program: Program, loss: str, optimizer: Any, fetch: Sequence[str]) -> tuple[Program, list[tuple[str, Block]]]:
    """A copy of the program with its backward pass and updates, and the stages on the way."""
    from .optimizers import RecomputeWarning

    loss = program[loss].name
    step = Program(
        dataclasses.replace(program.block, outputs=tuple(dict.fromkeys([loss, *fetch]))),
        {n: a.copy() if a.flags.writeable else a for n, a in program.data.items()},
        source=program.source,
    )
    step.aliases = dict(program.aliases)
    stages = [("forward", step.block)]
    with warnings.catch_warnings():  # what they say stands in the plan's notes
        warnings.simplefilter("ignore", RecomputeWarning)
        optimizer.minimize(step[loss])
    return step, [*stages, ("step", step.block)]


def plain_fitting(
    program: Program,
    loss: str,
    optimizer: Any,
    cost: CostModel,
    *,
    schedule: bool = True,
    rebuild: bool = True,
    providers: Sequence[str] | None = None,
    precision: str | None = None,
) -> Fitting:
    """The plain step of a program, for planners."""
    from .amp import with_precision

    optimizer, cost = with_precision(optimizer, precision), at_precision(cost, precision)
    with without_gc():
        block = _made(program, loss, optimizer, ())[0].block
        return fitting_of(block, cost, schedule=schedule, rebuild=rebuild, providers=providers)


def at_precision(cost: CostModel, precision: str | None) -> CostModel:
    """The cost model for a precision: a device with TF32 units multiplies float32 with them."""
    return cost.with_tf32() if precision == "tf32" and isinstance(cost, Device) else cost


def batch_of(program: Program) -> int | None:
    """The first dimension of the first input that has one."""
    return next((v.shape[0] for v in program.block.inputs if v.shape), None)


def _dump(folder: Path, stages: list[tuple[str, Block]]) -> None:
    with together():
        make_folder(folder)
        for i, (name, block) in enumerate(stages):
            with replacing(folder / f"{i:02d}-{name}.rir") as temporary:
                temporary.write_text(show(block), encoding="utf-8")


def figures(block: Block, cost: CostModel | None = None, logical: Block | None = None) -> StepFigures:
    """The figures of a block with planned memory; times by `cost` (this CPU's roofline).

    Operators are counted and priced in `logical`, the block before it was lowered (default: the block).
    """
    report = memory_report(block)
    logical = logical or block
    real = [op for op in logical.operators if not (isinstance(op.op, Free) or op.op.copies)]
    cost = cost or this_cpu()
    moved = offloaded(block)
    times = simulate(block, cost.seconds, link_of(cost)) if moved else StepTimes()
    flops = dict.fromkeys(Role, 0)
    for op in real:
        flops[op.role] += operator_cost(op).flops
    forward, again = flops[Role.FORWARD] + flops[Role.LOSS], flops[Role.RECOMPUTE]
    return StepFigures(
        operators=len(real),
        recomputed_operators=sum(op.role is Role.RECOMPUTE for op in real),
        peak_bytes=report.peak,
        arena_bytes=report.arena,
        live_peak_bytes=report.live_peak + report.persistent,
        persistent_bytes=report.persistent,
        kept_bytes=kept_bytes(logical),
        flops=sum(flops.values()),
        repeated_flops=again,
        repeated_forward_share=again / forward if forward else 0.0,
        estimated_step_seconds=step_seconds(logical, cost) + times.stalls,
        offloaded_values=len(moved),
        host_bytes=report.host,
        transfer_seconds=times.transfer_seconds,
        stall_seconds=times.stalls,
    )


def resolve_checkpoints(program: Program, patterns: Sequence[str]) -> list[str]:
    """Names and globs as value names in order of production.  UsageError with the nearest names for a miss."""
    declared = {v.name for v in program.block.declared()}
    names = program.block.values()
    chosen: dict[str, None] = {}
    for pattern in patterns:
        name = program.aliases.get(pattern, pattern)
        found = [name] if name in names else [n for n in fnmatch.filter(names, pattern) if n not in declared]
        if not found:
            raise UsageError(f"no value is called '{pattern}'{nearest(pattern, [*names, *program.aliases])}")
        chosen.update(dict.fromkeys(found))
    order = {n: i for i, n in enumerate(names)}
    return sorted(chosen, key=order.__getitem__)


@dataclass(frozen=True)
class Candidate:
    """A value that cuts the forward graph: all that crosses this point are it and values that cross nearly always.

    `flops` is the forward work since the candidate before it.
    """

    value: Value
    position: int
    flops: int


def checkpoint_candidates(block: Block) -> tuple[list[Candidate], list[Value]]:
    """Candidates in order of production, and the values that cross most of the graph (a mask, say) beside them."""
    body = [op for op in block.operators if op.role in (Role.FORWARD, Role.LOSS) and not op.op.updates]
    declared = {v.name for v in block.declared()}
    born: dict[str, int] = {}
    last: dict[str, int] = {}
    values: dict[str, Value] = {}
    for i, op in enumerate(body):
        for v in op.reads():
            if v.name not in declared:
                last[v.name] = i
        for v in op.writes():
            born[v.name], values[v.name] = i, v
    everywhere = {n for n in born if last.get(n, -1) - born[n] > len(body) // 2 and len(body) > 8}
    ends: dict[int, list[str]] = {}
    for n, i in last.items():
        ends.setdefault(i, []).append(n)
    crossing: set[str] = set()
    found: list[Candidate] = []
    since = 0
    for i, op in enumerate(body):
        since += operator_cost(op).flops
        crossing.update(v.name for v in op.writes() if last.get(v.name, -1) > i and v.name not in everywhere)
        crossing.difference_update(ends.get(i, ()))
        if len(crossing) == 1:
            (name,) = crossing
            if born[name] == i:
                found.append(Candidate(values[name], i, since))
                since = 0
    return found, [values[n] for n in sorted(everywhere, key=born.__getitem__)]


def train(
    step: CompiledStep,
    loss: str,
    batches: Iterator[dict[str, Any]],
    steps: int,
    progress: Callable[[int, float], None],
    executor: Any = None,
) -> tuple[list[float], list[float], int]:
    """Runs training steps (on an executor that has bound the step already, say); gives losses, seconds a step, and the
    bytes that the executor held at the most."""
    import time

    from .runtime import Executor

    executor = executor or Executor()
    executor.session(step.program, [loss])
    losses, seconds = [], []
    for i in range(steps):
        feed = next(batches)
        start = time.perf_counter()
        (value,) = executor.run(step.program, feed, [loss])
        seconds.append(time.perf_counter() - start)
        losses.append(float(value.reshape(())))
        progress(i + 1, losses[-1])
    return losses, seconds, executor.session(step.program, [loss]).measured_peak_bytes
