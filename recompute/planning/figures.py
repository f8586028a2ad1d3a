"""Figures of a plan: peak memory, time, and gap to the proven bound."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from ..cost import CostModel, kept_values, step_seconds
from ..language.ir import Block, Role
from ..passes import memory_report
from ..passes.offloading.offload import without_copies
from ..passes.offloading.transfers import StepTimes
from ..passes.planners.fit.problem import Fitted, Fitting
from ..passes.recomputation.recompute import RecomputePlan


@dataclass(frozen=True)
class PlanFigures:
    """Figures of a plan.  Peaks are all bytes that the executor allocates; seconds are estimated by `costs`.

    `bound`: seconds below which no plan within the budget exists, in any order of execution (None: not known), also
    with values in host memory if this plan has such (but not on disk);
    `gap`: how far the plan's time is above the bound, as a share of the bound; `kept`: names of forward values that
    are kept for the backward pass, as `--checkpoints` takes them; `planning_seconds`: time of the search.
    `offloads`: those of the kept values that are offloaded to host memory, where `host_bytes` are allocated;
    `slices`: the parts that run in slices; `bound` is then that of all plans for the step sliced like this.
    `approximations`: values that do not wait for the backward pass, and what waits in their place (see
    passes/approximation); then there is no bound.
    `transfer_seconds`: time of all copies between device and host; `stall_seconds`: time for which the device waits
    for them, part of `seconds`.  `interrupted`, `timed_out`: whether an interrupt or the time limit ended planning
    early.
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
    slices: tuple[str, ...] = ()
    approximations: tuple[str, ...] = ()
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
        """See the class; 0 means that the plan is optimal."""
        if self.bound is None or not self.fits:
            return None
        return max(0.0, self.seconds / self.bound - 1) if self.bound else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The figures as numbers, strings and lists, for JSON."""
        lists = {name: list(getattr(self, name)) for name in ("kept", "offloads", "slices", "approximations")}
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
    sliced = fitting.of(fitted.plan.slices, fitted.plan.before)
    approximations = (*fitted.plan.before, *fitted.plan.approximations)
    bound = seconds_bound(sliced, fitted.plan, budget) if bounded and budget is not None else None
    times = fitting.times(fitted) if moved else StepTimes()
    plain_seconds = step_seconds(fitting.plain.block, cost)  # before fusion, as planners and their bounds see it
    kept, kept_bytes = kept_for_backward(fitted.block)
    report = memory_report(fitted.compiled)
    planned = (
        sliced.block if sliced.after else sliced.once
    ).values()  # not the parts of an operator that a plan has divided
    if sliced.after:  # what one slice keeps, by the names in the step before slicing
        kept = tuple(dict.fromkeys(re.sub(r"#\d+$", "", n) for n in kept))
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
        kept=tuple(n for n in kept if n in planned),
        kept_bytes=kept_bytes,
        scheduled=fitted.scheduled,
        costs=cost.name,
        offloads=moved,
        slices=fitted.plan.slices,
        approximations=approximations,
        host_bytes=report.host + report.stored,
        transfer_seconds=times.transfer_seconds,
        stall_seconds=times.stalls,
    )


def interruption(f: PlanFigures) -> str:
    """The note on a plan whose planning was interrupted or ran out of time."""
    why = "planning was interrupted" if f.interrupted else "planning reached its time limit"
    gap = "" if f.gap is None else f", at most {f.gap:.2%} above the optimum"
    return f"{why}: using the best plan so far, {f.overhead:+.2%} time{gap}"


def seconds_bound(fitting: Fitting, plan: RecomputePlan, budget: int) -> float | None:
    """A lower bound of the time of any plan within the budget that may do what this one does; None if none is known."""
    if plan.approximations or plan.before or (plan.offloads and fitting.target.disk is not None):
        return None
    if plan.offloads:
        return fitting.bound(budget, moves=True)
    once = step_seconds(fitting.once, cost_of(fitting))
    views = once - fitting.derived.problem.cost  # views run at least once, and are not nodes
    return fitting.bound(budget) + views


def kept_for_backward(block: Block) -> tuple[tuple[str, ...], int]:
    """Names of forward values that are kept for the backward pass, in order of production, and their total bytes.

    Small outputs (statistics) are not listed: user checkpoints keep those anyway.  Offloaded values are listed, but
    their bytes are not counted.
    """
    small = {
        v.name for op in block.operators for i, v in enumerate(op.outputs) if v is not None and i in op.op.small_outputs
    }
    waiting = kept_values(without_copies(block))
    return tuple(n for n in waiting if n not in small), sum(kept_values(block).values())


def cost_of(fitting: Fitting) -> CostModel:
    """The cost model of a step."""
    assert fitting.target.cost is not None
    return fitting.target.cost
