"""A step within a budget: the cheapest plan whose compiled arena fits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...errors import BudgetError, UsageError
from ...language.ir import Block, Operator
from ...language.verify import trusted, verify
from .. import sequence
from ..base import run_passes
from ..memory_plan import memory_report
from ..offload import Offload
from ..rebuild import Rebuild
from ..recompute import RecomputePlan
from ..schedule import InBestOrder, Schedule, live_peak
from ..split_norms import as_parts
from ..target import Target
from ..transfers import StepTimes
from ..transfers import simulate as simulate_transfers
from .auto import Auto, forget
from .base import Planned, plan, planner
from .bound import least_budget, lower_bound
from .derive import Derived, derive
from .fit_offload import fastest
from .fit_search import CLOSE, searched
from .watch import current

Seconds = Callable[[Operator], float]

#: plans tried for one order of a step, at most: each is compiled, and the next one asks for what the last one missed
_TRIES = 5


@dataclass(frozen=True)
class Prices:
    """A cost model that is a function."""

    seconds: Seconds
    name: str = "as given"


@dataclass(frozen=True)
class Fitted:
    """A step whose compiled peak is known.

    `block`: with reruns, before frees and addresses; `compiled`: with them.  `peak`: arena and persistent bytes.
    `plan` numbers the operators of `base`, the plain step in the order it was planned in (`scheduled`: in the order
    that needs less memory).  `planned`: the planner's own account, None where no plan was needed.
    """

    block: Block
    compiled: Block
    peak: int
    plan: RecomputePlan
    planned: Planned | None
    base: Block
    scheduled: bool


class Fitting:
    """Plans for one step that recomputes nothing (without frees), for a target: what they share is made once.

    The step is planned as it is and, where the target allows it, in the order that needs less memory.  Where no plan
    is asked for, normalised values are recomputed as in any plain step (passes/rebuild.py); plans choose for
    themselves which of them, so that `block`, whose operators they number, has normalisations in two parts.
    """

    def __init__(self, block: Block, target: Target, known: tuple[Block, Block] | None = None) -> None:
        """`known`: a step that was compiled for this target before, and what it was compiled to."""
        assert target.cost is not None, "planners compare costs: the target needs a cost model"
        self.once, self.target, self.prices, self.known = block, target, target.cost.seconds, known
        self.block = run_passes(block, sequence.numbered_passes(target))
        self.seconds = as_parts(self.prices)
        self._bounds: dict[int, float] = {}

    @cached_property
    def plain(self) -> Fitted:
        """The step that nothing was asked for, compiled."""
        block = Rebuild().run(self.once) if self.target.rebuild else self.once
        known = self.known is not None and self.known[0] == block
        return self._unplanned(block, self.known[1] if known and self.known is not None else self.compiled(block))

    @cached_property
    def unrepeated(self) -> Fitted:
        """The step that repeats nothing at all, compiled."""
        return self.plain if self.plain.block is self.once else self._unplanned(self.once, self.compiled(self.once))

    def _unrepeated_within(self, budget: int) -> Fitted | None:
        """`unrepeated` where it fits: where more is alive, however it is ordered, it is given no addresses."""
        if "unrepeated" not in self.__dict__ and self.plain.block is not self.once:
            compiled, peak = self._within(self.once, budget)
            if peak:
                return None
            self.__dict__["unrepeated"] = self._unplanned(self.once, compiled)
        return self.unrepeated if self.unrepeated.peak <= budget else None

    def _unplanned(self, block: Block, compiled: Block) -> Fitted:
        return Fitted(block, compiled, peak_of(compiled), RecomputePlan(), None, self.block, False)

    @cached_property
    def derived(self) -> Derived:
        """The step's problem."""
        return derive(self.block, self.seconds, sequence.workspace(self.target))

    @cached_property
    def ordered(self) -> Block:
        """The step in the order that needs less memory."""
        found = Schedule().run(self.once) if self.target.schedule else self.once
        return self.block if found is self.once else run_passes(found, sequence.numbered_passes(self.target))

    @cached_property
    def reordered(self) -> Derived | None:
        """The problem of `ordered`; None where that is the order given."""
        if self.ordered is self.block:
            return None
        return derive(self.ordered, self.seconds, sequence.workspace(self.target))

    def compiled(self, block: Block) -> Block:
        """A step lowered, with frees and addresses."""
        return sequence.planned(block, self.target)

    def bases(self) -> Iterator[tuple[Derived, bool]]:
        """Problems of the step as it is and as reordered; whether it is the latter."""
        yield self.derived, False
        if self.reordered is not None:
            yield self.reordered, True

    def bound(self, budget: int) -> float:
        """A cost below which no plan within the budget exists, in any order; infinite where there is none."""
        if budget not in self._bounds:
            self._bounds[budget] = lower_bound(self.derived.problem, budget)
        return self._bounds[budget]

    @cached_property
    def least(self) -> int:
        """A peak below which no plan exists."""
        return least_budget(self.derived.problem)

    def carry_out(self, plan: RecomputePlan, scheduled: bool, within: int | None = None) -> Fitted:
        """The step with a plan that numbers its operators, or those of `ordered`.

        `within`: only what fits so many bytes is given addresses, and nothing is verified: it is a candidate.
        """
        base = self.ordered if scheduled else self.block
        with contextlib.nullcontext() if within is None else trusted():
            after = self.applied(plan, scheduled)
            compiled, peak = self._within(after, within) if within else (self.compiled(after), 0)
        current().compiled(len(after.operators), whole=not peak)
        return Fitted(after, compiled, peak or peak_of(compiled), plan, None, base, scheduled)

    def _within(self, block: Block, limit: int) -> tuple[Block, int]:
        """A step without copies, compiled (0: its peak is its own); above a limit however packed: no addresses."""
        lowered = sequence.lowered(block, self.target)
        ordered = Schedule().run(lowered) if self.target.schedule else lowered
        least = live_peak(ordered) + sum(v.nbytes for v in ordered.persistent())
        if least > limit:
            return ordered, least
        return InBestOrder().plan(lowered, ordered), 0

    def applied(self, plan: RecomputePlan, scheduled: bool) -> Block:
        """The step with a plan, before frees and addresses."""
        after = self.ordered if scheduled else self.block
        for p in sequence.recomputing_passes(plan):
            after = p.run(after)
        if not plan.offloads:
            return after
        return Offload(plan.offloads, tight=True).run(after)

    def order(self, block: Block) -> Block:
        """A step lowered and in the order in which it runs, without frees."""
        block = sequence.lowered(block, self.target)
        return Schedule().run(block) if self.target.schedule else block

    def candidates(
        self,
        budget: int | None,
        strategy: str = "auto",
        options: Mapping[str, Any] | None = None,
        tries: int = _TRIES,
        reorder: bool = True,
        within: int | None = None,
    ) -> Iterator[Fitted]:
        """Compiled plans of a strategy, whether or not they fit; `tries` for each order of the step, at most.

        `reorder`: whether the step is also planned in the order that needs less memory; `within`: see `carry_out`.
        """
        if budget is not None and isinstance(planner(strategy, **(options or {})), Auto):
            yield from searched(self, budget, strategy, options or {}, tries, reorder, within)
            return
        for derived, scheduled in self.bases() if reorder else [(self.derived, False)]:
            yield from self._tries(derived, scheduled, budget, strategy, options or {}, tries, within)
            if current().over:
                return

    def with_planned(self, fitted: Fitted, planned: Planned) -> Fitted:
        """A compiled step with the planner's own account of it."""
        return dataclasses.replace(fitted, planned=planned)

    def _tries(
        self,
        derived: Derived,
        scheduled: bool,
        budget: int | None,
        strategy: str,
        options: Mapping[str, Any],
        tries: int,
        within: int | None,
    ) -> Iterator[Fitted]:
        """Plans for live bytes under a goal that moves until the arena is just within the budget."""
        goal = budget
        seen: set[RecomputePlan] = set()
        heeds = planner(strategy, **options).heeds_budget
        for _ in range(tries if heeds and budget is not None else 1):
            try:
                planned = plan(derived.problem, budget=goal, strategy=strategy, **options)
            except UsageError:
                if not seen:
                    raise
                return  # the goal has moved to where nothing can be
            if planned.plan in seen:
                return
            seen.add(planned.plan)
            found = self.with_planned(self.carry_out(derived.for_block(planned.plan), scheduled, within), planned)
            yield found
            if budget is None or goal is None or current().over:
                return
            if found.peak > budget:
                goal = min(goal, planned.outcome.peak) - max(1, found.peak - budget)
                if goal <= derived.problem.fixed:
                    return
            elif found.peak < budget * CLOSE and planned.outcome.peak > found.peak:
                goal = max(goal, planned.outcome.peak) + (budget - found.peak)
            else:
                return

    def fit(
        self,
        budget: int | None,
        strategy: str = "auto",
        options: Mapping[str, Any] | None = None,
        *,
        offload: bool = False,
    ) -> Fitted:
        """See `fit`.  `offload`: values may also wait in host memory, where the step is faster then."""
        if budget is not None and (unrepeated := self._unrepeated_within(budget)) is not None:
            return unrepeated
        found = [self.plain] if budget is not None and self.plain.peak <= budget else []
        refusal = self._collect(found, budget, strategy, options, offload=offload)
        watch = current()
        if offload and budget is not None and not watch.interrupted:
            best_with_host = fastest(self, found, budget, strategy, options or {})
            if best_with_host is None:
                refusal = refusal or self._misses(budget, strategy, min(f.peak for f in found))
                raise BudgetError(f"{refusal} (nor does it fit with values in host memory)")
            return best_with_host
        best = self.best_of(found, budget)
        if budget is not None and best.peak > budget:
            raise BudgetError(self._misses(budget, strategy, best.peak))
        verify(best.compiled)
        return best

    def _collect(
        self,
        found: list[Fitted],
        budget: int | None,
        strategy: str,
        options: Mapping[str, Any] | None,
        *,
        offload: bool,
    ) -> str:
        """Adds a strategy's plans to those `found`, or gives the reason why there is none.

        An interrupt ends it where some plan fits: then those so far are taken.
        """
        watch = current()
        try:
            if found:
                watch.best(found[0])
            for f in self.candidates(budget, strategy, options, within=budget):
                found.append(f)
                best, lowest = self.best_of(found, budget), min(found, key=lambda f: f.peak)
                if not offload:  # blocks of large steps are large
                    found[:] = [best] if best is lowest else [best, lowest]
                watch.best(best if budget is None or best.peak <= budget else None)
        except UsageError as e:
            if not found and not offload:
                raise
            return str(e)
        except KeyboardInterrupt:
            if not watch.take_interrupt(budget is None or any(f.peak <= budget for f in found)):
                raise
            for derived, _ in self.bases():
                forget(derived.problem)
        return ""

    def times(self, f: Fitted) -> StepTimes:
        """Simulated times of a compiled step with its copies."""
        return simulate_transfers(f.compiled, self.prices, self.target.link)

    def best_of(self, found: list[Fitted], budget: int | None) -> Fitted:
        """The cheapest within the budget; where none is, the one with the lowest peak."""
        fitting = [f for f in found if budget is None or f.peak <= budget]
        return min(fitting, key=lambda f: (self.cost(f), f.peak)) if fitting else min(found, key=lambda f: f.peak)

    def cost(self, f: Fitted) -> float:
        """What a step costs, as planners see it."""
        return f.planned.outcome.cost if f.planned is not None else sum(map(self.seconds, f.block.operators))

    def _misses(self, budget: int, strategy: str, least: int) -> str:
        more = f"; no plan of any strategy can need less than {self.least:,}" if self.least <= budget else ""
        return (
            f"strategy '{strategy}' finds no plan that fits {budget:,} bytes: its lowest peak is {least:,}{more}. "
            "Give a larger budget, a smaller batch, or another strategy"
        )


def fit(
    block: Block,
    budget: int | None,
    seconds: Seconds,
    *,
    strategy: str = "auto",
    options: Mapping[str, Any] | None = None,
) -> Fitted:
    """Recomputes as much as it takes for a plain step (without frees) to fit `budget` bytes, arena and persistent.

    The step is planned as it is and in the order that needs less memory; the cheaper result is taken.  As the arena
    can be a little larger than what is alive, and reordering after planning a little smaller, the planner is asked
    again with the difference.  A budget of None lets the strategy choose.  BudgetError where the strategy finds no plan
    that fits, with the least that it found; where none exists, with the proof.
    """
    return Fitting(block, Target(providers=(), cost=Prices(seconds))).fit(budget, strategy, options)


def peak_of(compiled: Block) -> int:
    """Arena and persistent bytes of a planned block."""
    return memory_report(compiled).peak
