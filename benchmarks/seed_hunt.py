"""The lowest compiled peak of a training step at a given extra time."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import recompute as rc
from recompute import models
from recompute.compiling.compiler import plain_fitting
from recompute.cost import Device, device, step_seconds
from recompute.errors import UsageError
from recompute.language.ir import Role
from recompute.passes import MemoryPlan, memory_report
from recompute.passes.planners.core.bound import least_budget, lower_bound, turning_points
from recompute.passes.planners.core.derive import Derived
from recompute.passes.planners.core.frontier import Point
from recompute.passes.planners.core.problem import RematerialisationProblem
from recompute.passes.planners.core.simulate import plan_of
from recompute.passes.planners.fit.problem import Fitted, Fitting
from recompute.passes.planners.methods.auto import Auto, frontier_of
from recompute.training import losses

MB = 10**6
#: budgets that are tried where the first plans are good enough, and where they are not
ROUNDS, MORE_ROUNDS = 1, 5
#: plans of one problem that are compiled, and those whose arena is then packed exactly; seconds for that
COMPILED, PACKED, PACKING = 3, 2, 15.0
#: arenas that are larger than what is alive by no more than this share are not packed again
CLOSE = 1.01


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Step:
    """A network's training step on a device.

    It takes `seconds` where it repeats nothing, `forward` of them before the backward pass.
    """

    fitting: Fitting
    on: Device
    seconds: float
    forward: float

    @property
    def fixed(self) -> int:
        """Bytes of parameters and optimizer state."""
        return self.fitting.derived.problem.fixed


def step_of(name: str, batch: int, on: str, optimizer: str, options: Mapping[str, Any]) -> Step:
    """The step of a zoo network with its natural loss."""
    program = rc.load(models.build(name, batch=batch, weights=False, **options))
    kind, _ = losses.natural_loss(program)
    loss = kind if kind in program else getattr(losses, kind)(program).name
    gpu = device(on)
    update = getattr(rc, optimizer)(learning_rate=0.1)
    fitting = plain_fitting(program, loss, update, rc.Target(providers=(), cost=gpu))
    forward = sum(gpu.seconds(op) for op in fitting.once.operators if op.role in (Role.FORWARD, Role.LOSS))
    return Step(fitting, gpu, step_seconds(fitting.once, gpu), forward)


@dataclass(frozen=True)
class Best:
    """A compiled plan."""

    step: Step
    fitted: Fitted
    method: str

    @property
    def peak(self) -> int:
        """Arena and persistent bytes."""
        return self.fitted.peak

    @property
    def overhead(self) -> float:
        """Extra time over the plain step."""
        return step_seconds(self.fitted.compiled, self.step.on) / self.step.seconds - 1

    @property
    def reruns(self) -> int:
        """Operators that run again."""
        return sum(op.role is Role.RECOMPUTE for op in self.fitted.compiled.operators)

    @property
    def loose(self) -> bool:
        """Whether the packing's heuristics leave holes."""
        report = memory_report(self.fitted.compiled)
        return report.arena > CLOSE * report.live_peak

    @property
    def live(self) -> int:
        """What the peak would be without holes."""
        report = memory_report(self.fitted.compiled)
        return report.live_peak + report.persistent

    def packed(self) -> Best:
        """The same step, its arena packed by the exact packer."""
        block = MemoryPlan(exact=PACKING).run(self.fitted.compiled)
        fitted = dataclasses.replace(self.fitted, compiled=block, peak=memory_report(block).peak)
        return dataclasses.replace(self, fitted=fitted, method=f"{self.method}, packed exactly")

    def fullest(self) -> str:
        """The operator during which most is alive, and the largest value that it touches."""
        block = self.fitted.compiled
        op = block.operators[memory_report(block).peak_at]
        largest = max((*op.reads(), *op.writes()), key=lambda v: v.nbytes)
        role = op.role.name.lower()
        return f"{op.op.name} ({role}), which touches '{largest.name}' of {largest.nbytes / MB:,.0f} MB"


@dataclass(frozen=True)
class Hunt:
    """Plans of one problem, cheap enough where they cost no more than `most` seconds."""

    fitting: Fitting
    derived: Derived
    scheduled: bool
    most: float

    @property
    def problem(self) -> RematerialisationProblem:
        """What is planned."""
        return self.derived.problem

    def cheap(self) -> list[Point]:
        """Plans that are cheap enough, the lowest peak first."""
        return [p for p in frontier_of(self.problem) if p.cost <= self.most]

    @property
    def lowest(self) -> int:
        """The lowest peak that is cheap enough."""
        return min((p.peak for p in self.cheap()), default=sys.maxsize)

    def run(self, rounds: int, moves: int) -> None:
        """Looks below the lowest peak known: far while that helps, else nearer."""
        low, share = least_budget(self.problem), 0.92
        auto = Auto(moves=moves, effort=0.3, rounds=4)
        for _ in range(rounds):
            best = self.lowest
            goal = max(low, self.problem.fixed + int((best - self.problem.fixed) * share))
            if best - goal < 0.002 * (best - self.problem.fixed):
                return
            try:
                auto.refine(frontier_of(self.problem), goal)
            except UsageError:
                low = goal
            share = share if self.lowest < best else (1 + share) / 2

    def compiled(self, step: Step, points: list[Point]) -> Iterator[Best]:
        """Points, compiled."""
        for point in points:
            fitted = self.fitting.carry_out(self.derived.for_block(plan_of(point.sequence)), self.scheduled)
            yield Best(step, fitted, point.method)


def hunts_of(step: Step, most: float, orders: bool = True) -> list[Hunt]:
    """Of a step as it is and in the order that needs less memory (`orders`), the more promising first."""
    bases = step.fitting.bases() if orders else [(step.fitting.derived, False)]
    return sorted((Hunt(step.fitting, *base, most) for base in bases), key=lambda h: h.lowest)


def lowest(step: Step, most: float, wanted: int, moves: int, orders: bool = True) -> Best:
    """The lowest compiled peak of plans whose step takes no more than `most` seconds.

    Less effort where the first plans are below `wanted` already.
    """
    hunts = hunts_of(step, most, orders)
    if hunts[0].lowest < sys.maxsize:
        hunts[0].run(ROUNDS if hunts[0].lowest < 0.97 * wanted else MORE_ROUNDS, moves)
    found = [Best(step, step.fitting.unrepeated, "plain"), Best(step, step.fitting.plain, "default")]
    for hunt in sorted(hunts, key=lambda h: h.lowest)[:2]:
        found += hunt.compiled(step, hunt.cheap()[:COMPILED])
    found = tighter([b for b in found if b.overhead <= most / step.seconds - 1 + 1e-9])
    for best in found:
        say(f"    {best.method}: {best.peak / MB:,.0f} MB compiled, {best.overhead:+.1%}")
    return min(found, key=lambda b: b.peak)


def tighter(found: list[Best]) -> list[Best]:
    """With those packed exactly whose arenas have holes, as far as that can make the lowest peak lower."""
    least = min((b.peak for b in found), default=0)
    loose = sorted((b for b in found if b.loose and b.live < least), key=lambda b: b.live)
    return found + [b.packed() for b in loose[:PACKED]]


def within(step: Step, budget: int, moves: int) -> Best | None:
    """The cheapest compiled plan within a budget."""
    found: list[Best] = []
    for hunt in sorted(hunts_of(step, float("inf")), key=lambda h: cost_at(h, budget))[:1]:
        Auto(moves=moves, effort=0.3, rounds=4).refine(frontier_of(hunt.problem), budget)
        points = [p for p in frontier_of(hunt.problem) if p.peak <= budget]
        found += hunt.compiled(step, points[::-1][:COMPILED])
    return min((b for b in tighter(found) if b.peak <= budget), key=lambda b: b.overhead, default=None)


def cost_at(hunt: Hunt, budget: int) -> float:
    """Cost of the best known plan within a budget."""
    point = frontier_of(hunt.problem).best(budget)
    return float("inf") if point is None else point.cost


def least_peak(problem: RematerialisationProblem, most: float, highest: int) -> int:
    """Bytes below which no schedule exists that costs no more than `most`: the bound, by bisection."""
    points = turning_points(problem, 12)
    low, high = least_budget(problem), highest
    if lower_bound(problem, low, points) <= most:
        return low
    while high - low > (high - problem.fixed) // 500:
        middle = (low + high) // 2
        low, high = (low, middle) if lower_bound(problem, middle, points) <= most else (middle, high)
    return low
