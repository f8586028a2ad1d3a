"""Compilation of a training step, plain or with recomputation, and its figures."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..boundary import as_loss, as_program, as_texts
from ..budgets import Budget
from ..cost import CostModel, kept_bytes, link_of, operator_cost, step_seconds, this_cpu
from ..errors import NotFiniteError, UsageError, expect, nearest
from ..language.ir import Block, Free, Role, Value
from ..language.program import Program, Variable
from ..passes import RecomputePlan, Target, memory_report, offloaded, run_passes, step_passes, without_gc
from ..passes.base import dump_block, dumping, is_dumping
from ..passes.gradient.precision import check_precision
from ..passes.inserting import check_places
from ..passes.offloading.transfers import Link, StepTimes, simulate
from ..passes.planners.fit.problem import Fitting
from ..passes.sequence import cleanup_passes, lowered_without_copies, lowering_passes
from ..passes.target import target_fields, target_from
from ..planning.figures import PlanFigures
from ..planning.request import Request, request
from ..planning.saved import SavedPlan, saved_plan
from ..planning.step import fitting_of, lower, plan_step, target_of
from ..proof.prove import Proof
from ..proof.prove import prove as prove_blocks
from ..support.notebook import Shown
from ..training.pipeline import pipeline
from ..training.protocol import AnyOptimizer, Described, RecomputeWarning, spec_of
from ..training.scaling import LossScaling
from ..training.spec import Spec


@dataclass(frozen=True)
class StepFigures:
    """Memory and time of one training step, in bytes, FLOPs and seconds; `peak_bytes` is all the executor allocates.

    `host_bytes`: what `offloaded_values`, parameters and state among them, take in host memory, or on disk;
    `transfer_seconds`: time of the copies between device
    and host; `stall_seconds`: time for which the device waits for them, part of `estimated_step_seconds`.
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


@dataclass(frozen=True, repr=False)
class CompiledStep(Shown):
    """A training step ready to run: its program with planned memory, its plan, and its figures.

    `cost`: the cost model of its estimated times.  `planned`: the figures of a planner's plan.  `proof`: what `prove`
    has shown, where that was asked for.
    """

    program: Program
    plan: RecomputePlan | None
    figures: StepFigures
    cost: CostModel = field(default_factory=this_cpu)
    planned: PlanFigures | None = None
    saved: SavedPlan | None = None
    proof: Proof | None = None

    def __repr__(self) -> str:
        f = self.figures
        again = f", {f.recomputed_operators:,} recomputed" if f.recomputed_operators else ""
        return (
            f"<CompiledStep {self.program.block.name}: {f.operators:,} operators{again}, peak {f.peak_bytes:,} bytes>"
        )


def compile_step(
    program: Program,
    loss: str | Variable,
    optimizer: AnyOptimizer | Spec,
    *,
    checkpoints: Sequence[str | Variable] | str | Variable | None = None,
    budget: str | int | Budget | None = None,
    recompute: Request | None = None,
    target: Target | None = None,
    fetch: Sequence[str | Variable] | str | Variable = (),
    dump: Path | str | None = None,
    plain: CompiledStep | None = None,
    **options: Any,
) -> CompiledStep:
    """Compiles a copy of `program` into a training step: backward pass, recomputation, updates, memory plan.

    `optimizer`: any of `rc.optimizers`.  By default nothing is recomputed.  `checkpoints`: values to keep, all others
    are recomputed; `budget`: recompute as much as necessary to fit (`"8GiB"`, bytes, `"60%"` of the plain step's peak);
    `recompute`: a request, `request(budget, strategy, ...)` of `recompute.planning`, whose arguments can also be given
    directly: `strategy`, `strategy_options`, `plan`, `offload` (copy the checkpoints to host memory; with a budget,
    the values for which this is faster than recomputing, docs/offload.md), `slicing` (False: no part of the step runs
    in slices; docs/transformers.md), `approximations`, `effort`, `seconds`, `progress` (see
    `RecomputeOptimizer.set_budget`).  `target`: place, kernel providers, cost model and precision (`rc.Target`; None:
    this CPU); its fields can also be given directly.  `dump`: a folder for the program's text after each pass.
    `plain`: the compiled step without recomputation, if it exists already, to save planning time.  `prove=True`: proves
    that what will run computes what the step does before recomputation, slices and lowering (`rc.prove`).
    UsageError for unknown options, VerifyError where a proof fails.
    """
    loss, fetch = as_loss(as_program(program), loss).name, as_texts(fetch, "fetch", program)
    checkpoints = None if checkpoints is None else as_texts(checkpoints, "checkpoints", program)
    target = target_from(target, options)
    prove = options.pop("prove", False)
    wanted, offload = _request_from(budget, recompute, options)
    expect("plain", plain, (CompiledStep, type(None)), "a compiled step")
    spec, wanted = _asked(with_precision(optimizer, target.precision), wanted, checkpoints, offload=offload)
    target = target_of(target)
    with without_gc(), dumping(dump) if dump is not None else contextlib.nullcontext():
        step, saved = _made(program, loss, spec, fetch, target), None
        before = step.block if spec == _unplanned(spec) else None
        if wanted is not None:
            saved = _planned(step, program, wanted, target, plain)
        else:
            lower(step, target)
        summary, cost = figures(step.block, target.cost, step.logical, target.rates), target.cost or this_cpu()
        if prove and before is None:
            with dumping(None):
                before = _made(program, loss, _unplanned(spec), fetch, target).block
        proof = _proof(before, step.block) if prove and before is not None else None
        return CompiledStep(step, step.plan, summary, cost, step.planned, saved, proof)


def _planned(
    step: Program, program: Program, wanted: Request, target: Target, plain: CompiledStep | None
) -> SavedPlan | None:
    """Compiles a step of a program by the plan that is asked for, which it returns."""
    compiled = step.block
    with dumping(None):  # the plans that are tried
        fitted = plan_step(step, wanted, target, plain=None if plain is None else plain.program.compiled)
    if is_dumping():
        moved = lowered_without_copies(fitted.block, target)[1]
        run_passes(compiled, step_passes(target, fitted.plan, scheduled=fitted.scheduled, moved=moved))
    step.planned = dataclasses.replace(step.planned, kept=tuple(n for n in step.planned.kept if n in program))
    return saved_plan(fitted, step.planned, program.block.name, batch_of(program))


def _unplanned(spec: Spec) -> Spec:
    """The same step before recomputation, slices and approximations."""
    return spec.with_(checkpoints=(), planning=Request(), offload=False, slices=(), allowed=())


def _proof(before: Block, after: Block) -> Proof:
    """The proof that a compiled step computes what the one before it does; approximations are not proved."""
    return prove_blocks(before, after, partly=any(o.op.approximates for o in after.operators))


def _request_from(budget: Any, wanted: Request | None, options: dict[str, Any]) -> tuple[Request | None, bool]:
    """The request, and whether checkpoints are offloaded.  UsageError for unknown `options`."""
    if wanted is not None:
        expect("recompute", wanted, Request, "a request of recompute.planning")
    names = ("strategy", "plan", "offload", "slicing", "effort", "seconds", "progress", "approximations")
    fields: dict[str, Any] = {name: options.pop(name) for name in names if name in options}
    fields["options"] = options.pop("strategy_options", None)
    if options:
        allowed = (*names, "strategy_options", *target_fields())
        wrong = next(iter(options))
        raise UsageError(f"compile_step has no option '{wrong}'{nearest(wrong, allowed)}")
    offload = bool(fields.get("offload", False))
    if wanted is None:
        return request(budget, **fields), offload
    if budget is not None or any(v is not None and v is not False for k, v in fields.items() if k != "slicing"):
        raise UsageError("recompute is a complete request: leave out budget, strategy, plan and their options")
    return wanted, wanted.offload


def _asked(
    spec: Spec, wanted: Request | None, checkpoints: Sequence[str] | None, *, offload: bool
) -> tuple[Spec, Request | None]:
    """The spec of the step that a planner gets, or that has the checkpoints; and the request, which may be its own."""
    if spec.recomputes and offload:
        raise UsageError("offload does not apply to a RecomputeOptimizer: set its enable_offload instead")
    planning, whole = spec.request, spec.whole
    if planning is not None and (wanted is not None or checkpoints is not None):
        raise UsageError(
            "the RecomputeOptimizer and the arguments of compile_step both define what is recomputed: give one of them"
        )
    if checkpoints is not None or (spec.checkpoints and wanted is not None):
        if wanted is not None and wanted.plans:
            raise UsageError("checkpoints and a budget, strategy or plan both define what is kept: give one of them")
        names = spec.checkpoints if checkpoints is None else tuple(checkpoints)
        allowed = spec.allowed if wanted is None else tuple(map(str, wanted.approximations))
        return spec.with_(checkpoints=names, offload=offload or spec.offload, allowed=allowed), None
    if planning is not None:
        return spec.before_slices(), planning
    if wanted is not None:
        return spec.before_slices(), dataclasses.replace(wanted, slices=whole or wanted.slices)
    if offload:
        raise UsageError("offload needs checkpoints (the values to offload) or a budget")
    return spec, None


def with_precision(optimizer: AnyOptimizer | Spec, precision: str | None) -> Spec:
    """An optimizer's spec in a precision (None: as it is).  UsageError if it has one already."""
    spec = spec_of(optimizer)
    if precision is None:
        return spec
    check_precision(precision)
    if spec.precision is not None:
        raise UsageError("the optimizer and the arguments both set the precision: give one of them")
    if precision == "fp32":
        return spec
    return spec.with_(precision=precision, scaling=LossScaling() if precision == "fp16" else None)


def _made(
    program: Program, loss: str, spec: Spec | AnyOptimizer, fetch: Sequence[str], target: Target | None = None
) -> Program:
    """A copy of the program with its backward pass and updates."""
    loss = program[loss].name
    step = Program(
        dataclasses.replace(program.block, outputs=tuple(dict.fromkeys([loss, *fetch]))),
        {n: a.copy() if a.flags.writeable else a for n, a in program.data.items()},
        source=program.source,
    )
    step.take_origin(program)
    step.fetched = tuple(fetch)
    spec = spec_of(spec).with_(target=target)
    if target is not None:
        check_inserted(spec, step, loss, target)
    dump_block("forward", step.block)
    with warnings.catch_warnings():  # the notes of the plan repeat them
        warnings.simplefilter("ignore", RecomputeWarning)
        Described(spec).minimize(step[loss])
    dump_block("step", step.block)
    return step


def check_inserted(spec: Spec, program: Program, loss: str, target: Target) -> None:
    """UsageError for passes of a resolved target that are inserted where they cannot be."""
    if target.inserted:
        passes = [*pipeline(spec, program, loss), *cleanup_passes(target), *lowering_passes(target)]
        check_places(target.insertions, passes)


def plain_fitting(program: Program, loss: str, optimizer: AnyOptimizer | Spec, target: Target | None = None) -> Fitting:
    """The plain step of a program, as input of planners."""
    target = target_of(target)
    spec = with_precision(optimizer, target.precision)
    with without_gc():
        fitting = fitting_of(_made(program, loss, spec.before_slices(), (), target).block, target)
        return fitting.of(spec.whole) if spec.whole else fitting


def batch_of(program: Program) -> int | None:
    """The first dimension of the first input that has one."""
    return program.block.batch


def figures(
    block: Block, cost: CostModel | None = None, logical: Block | None = None, link: Link | None = None
) -> StepFigures:
    """The figures of a block with planned memory; times by `cost` (default: this CPU's roofline), copies by `link`.

    Operators are counted, and their cost estimated, in `logical`, the block before lowering (default: the block).
    """
    report = memory_report(block)
    logical = logical or block
    real = [op for op in logical.operators if not (isinstance(op.op, Free) or op.op.copies)]
    cost = cost or this_cpu()
    moved = offloaded(block)
    times = simulate(block, cost.seconds, link or link_of(cost)) if moved else StepTimes()
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
        host_bytes=report.host + report.stored,
        transfer_seconds=times.transfer_seconds,
        stall_seconds=times.stalls,
    )


def resolve_checkpoints(program: Program, patterns: Sequence[str]) -> list[str]:
    """Value names that names and globs match, in order of production.  UsageError with the nearest names for a miss."""
    declared = {v.name for v in program.block.declared()}
    names = program.block.values()
    chosen: dict[str, None] = {}
    for pattern in patterns:
        name = program.aliases.get(pattern, pattern)
        matches = [name] if name in names else [n for n in fnmatch.filter(names, pattern) if n not in declared]
        if not matches:
            raise UsageError(f"no value is called '{pattern}'{nearest(pattern, [*names, *program.aliases])}")
        chosen.update(dict.fromkeys(matches))
    order = {n: i for i, n in enumerate(names)}
    return sorted(chosen, key=order.__getitem__)


@dataclass(frozen=True)
class Candidate:
    """A value that cuts the forward graph: no other value crosses this point, except those that cross most of it.

    `flops` is the forward work since the previous candidate.
    """

    value: Value
    position: int
    flops: int


def checkpoint_candidates(block: Block) -> tuple[list[Candidate], list[Value]]:
    """Candidates in order of production, and the values that cross most of the graph (such as a mask)."""
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
    candidates: list[Candidate] = []
    since = 0
    for i, op in enumerate(body):
        since += operator_cost(op).flops
        crossing.update(v.name for v in op.writes() if last.get(v.name, -1) > i and v.name not in everywhere)
        crossing.difference_update(ends.get(i, ()))
        if len(crossing) == 1:
            (name,) = crossing
            if born[name] == i:
                candidates.append(Candidate(values[name], i, since))
                since = 0
    return candidates, [values[n] for n in sorted(everywhere, key=born.__getitem__)]


def train(
    step: CompiledStep,
    loss: str,
    batches: Iterator[dict[str, Any]],
    steps: int,
    progress: Callable[[int, float], None],
    executor: Any = None,
) -> tuple[list[float], list[float], int]:
    """Runs training steps; returns the losses, the seconds of each step, and the most bytes that the executor held.

    `executor`: one that has bound the step already (None: a new one)."""
    import time

    from ..runtime import Executor

    executor = executor or Executor()
    executor.session(step.program, [loss])
    losses, seconds = [], []
    for i in range(steps):
        feed = next(batches)
        start = time.perf_counter()
        try:
            (value,) = executor.run(step.program, feed, [loss])
        except NotFiniteError as e:
            raise NotFiniteError(f"step {i + 1} of {steps}: {e}") from None
        seconds.append(time.perf_counter() - start)
        losses.append(float(value.reshape(())))
        progress(i + 1, losses[-1])
    return losses, seconds, executor.session(step.program, [loss]).measured_peak_bytes
