"""A step and the problem that its planners share: compiled plain, and with any plan."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ....errors import UsageError
from ....language.ir import Block, Role
from ....language.verify import trusted, verify
from ... import sequence
from ...approximation.approximate import Approximate
from ...base import run_passes
from ...cleanup.commit_updates import CommitUpdates
from ...cleanup.dead_code import DeadCode
from ...communication.overlap import Overlap
from ...memory.memory_plan import memory_report
from ...offloading.offload import Offload
from ...offloading.transfers import Seconds, StepTimes
from ...offloading.transfers import simulate as simulate_transfers
from ...recomputation.rebuild import Rebuild
from ...recomputation.recompute import RecomputePlan
from ...recomputation.split_norms import FuseNorms, as_parts
from ...scheduling.schedule import InBestOrder, Schedule, live_peak, quick_live_peak
from ...slicing.open_means import open_means
from ...slicing.slicing import Slice, micro_step, parse_slicing, whole_last
from ...slicing.whole import MicroBatch
from ...target import Target
from ..base import Planned
from ..core.bound import bound_of, least_budget
from ..core.derive import Derived
from ..core.moves_bound import bound_with_moves
from ..core.simulate import simulate
from ..core.watch import current
from .lowered import derive_for


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
    is asked for, normalised values are recomputed as in any plain step (passes/recomputation/rebuild.py); plans choose
    for themselves which of them, so that `block`, whose operators they number, has normalisations in two parts.
    """

    def __init__(self, block: Block, target: Target, known: tuple[Block, Block] | None = None) -> None:
        """`known`: a step that was compiled for this target before, and what it was compiled to."""
        assert target.cost is not None, "planners compare costs: the target needs a cost model"
        self.once, self.target, self.prices, self.known = block, target, target.cost.seconds, known
        self.block = run_passes(block, sequence.numbered_passes(target))
        self.seconds = as_parts(self.prices)
        self._others: dict[tuple[tuple[str, ...], tuple[str, ...]], Fitting] = {}
        self.slices: tuple[str, ...] = ()
        self.before: tuple[str, ...] = ()  # approximations that the step has
        self.after: tuple[str, ...] = ()  # those of them that come after recomputation

    def of(self, slices: tuple[str, ...], before: tuple[str, ...] = ()) -> Fitting:
        """The same step with regions in slices (see passes/slicing), and with approximations before it is planned.

        UsageError where it has no such regions, or values that can be approximated so.
        """
        if (slices, before) == (self.slices, self.before):
            return self
        if before and whole_last(slices)[1]:
            raise UsageError("approximations that come before recomputation are not combined with slices of the step")
        if (slices, before) not in self._others:
            self._others[slices, before] = self._other(slices, before)
        return self._others[slices, before]

    def _other(self, slices: tuple[str, ...], approximations: tuple[str, ...]) -> Fitting:
        if approximations:
            step = verify(Approximate(approximations).run(self.of(slices).once))
            found = Fitting(step, self.target)
            found.slices, found.before = slices, approximations
            return found
        regions, whole = whole_last(slices)
        before = Slice(regions).run(self.once)
        one = self._micro_batch(before, whole[0]) if whole else None
        sliced = verify(CommitUpdates().run(Slice(whole).run(before)) if whole else before)
        found = Fitting(sliced, self.target) if one is None else MicroBatches(sliced, one, self.target)
        found.slices, found.after = slices, whole if one is not None else ()
        return found

    def _micro_batch(self, block: Block, whole: str) -> MicroBatch | None:
        """One slice of a step; None where nothing but all of them can be planned."""
        if block is not self.once:
            return micro_step(self._opened(block), parse_slicing(whole))
        return micro_step(self._once_opened, parse_slicing(whole))

    def _opened(self, block: Block) -> Block:
        return run_passes(open_means(block), sequence.numbered_passes(self.target))

    @cached_property
    def _once_opened(self) -> Block:
        return self._opened(self.once)

    @cached_property
    def plain(self) -> Fitted:
        """The step that nothing was asked for, compiled: not verified before it turns out to be the answer."""
        block = Rebuild().run(self.once) if self.target.rebuild else self.once
        known = self.known is not None and self.known[0] == block
        with trusted():
            return self._unplanned(block, self.known[1] if known and self.known is not None else self.compiled(block))

    @cached_property
    def unrepeated(self) -> Fitted:
        """The step that repeats nothing at all, compiled."""
        return self.plain if self.plain.block is self.once else self._unplanned(self.once, self.compiled(self.once))

    def _unrepeated_within(self, budget: int) -> Fitted | None:
        """`unrepeated` where it fits: where more is alive, however it is ordered, it is given no addresses.

        Where the bound says that something must run again, nothing is compiled.
        """
        if "unrepeated" not in self.__dict__ and self.plain.block is not self.once:
            if self.bound(budget) > self.derived.problem.cost * (1 + 1e-9):
                return None
            compiled, peak = self._within(self.once, budget)
            if peak:
                return None
            self.__dict__["unrepeated"] = self._unplanned(self.once, compiled)
        return self.unrepeated if self.unrepeated.peak <= budget else None

    def unrepeated_quickly(self, budget: int) -> tuple[Fitted | None, int]:
        """`unrepeated` where a quick search finds an order of it whose live bytes are within the budget, and its peak.

        Else None, and the bytes that are alive in the best order found: then it is given no addresses.  Nothing is
        verified: it is a candidate.
        """
        if "unrepeated" not in self.__dict__:
            with trusted():
                lowered = sequence.lowered(self.once, self.target)
                peak = quick_peak(lowered, self.target, budget)
                if peak > budget:
                    return None, peak
                compiled = run_passes(lowered, sequence.memory_passes(self.target))
            self.__dict__["unrepeated"] = self._unplanned(self.once, compiled)
        return self.unrepeated, self.unrepeated.peak

    def one_slice(self, whole: str) -> OneSlice | None:
        """Estimates of the step in slices of the batch, from one of them.

        None where nothing but all slices can be planned; UsageError where there are no such slices.
        """
        one = self._micro_batch(self.once, whole)
        return None if one is None else OneSlice(one, self.target, self.seconds)

    @cached_property
    def peak_before(self) -> int:
        """Live bytes of the step that repeats nothing, in the order given, before it is lowered."""
        problem = self.derived.problem
        return simulate(problem, range(len(problem))).peak

    def _unplanned(self, block: Block, compiled: Block) -> Fitted:
        plan = RecomputePlan(slices=self.slices, before=self.before)
        return Fitted(block, compiled, peak_of(compiled), plan, None, self.block, False)

    @cached_property
    def derived(self) -> Derived:
        """The step's problem."""
        return derive_for(self.block, self.target, self.seconds)

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
        return derive_for(self.ordered, self.target, self.seconds)

    def compiled(self, block: Block, limit: int = 0) -> Block:
        """A step lowered, with frees and addresses.  `limit`: what copies of offloaded values may use of the arena."""
        return sequence.planned(block, self.target, limit=limit)

    def bases(self) -> Iterator[tuple[Derived, bool]]:
        """Problems of the step as it is and as reordered; whether it is the latter."""
        yield self.derived, False
        if self.reordered is not None:
            yield self.reordered, True

    def bound(self, budget: int, *, moves: bool = False) -> float:
        """A cost below which no plan within the budget exists, in any order; infinite where there is none.

        `moves`: of plans that may also have values in host memory; stalls are part of the cost then.
        """
        problem = self.derived.problem
        return bound_with_moves(problem, budget, self.target.rates) if moves else bound_of(problem, budget)

    @cached_property
    def least(self) -> int:
        """A peak below which no plan exists."""
        return least_budget(self.derived.problem)

    def carry_out(self, plan: RecomputePlan, scheduled: bool, within: int | None = None, limit: int = 0) -> Fitted:
        """The step with a plan that numbers its operators, or those of `ordered`.

        `within`: only what fits so many bytes is given addresses, and nothing is verified: it is a candidate.
        `limit`: see `compiled`.
        """
        base = self.ordered if scheduled else self.block
        with contextlib.nullcontext() if within is None else trusted():
            after = self.applied(plan, scheduled)
            compiled, peak = self._within(after, within) if within else (self.compiled(after, limit), 0)
        current().compiled(len(after.operators), whole=not peak)
        plan = dataclasses.replace(plan, slices=self.slices, before=self.before)
        return Fitted(after, compiled, peak or peak_of(compiled), plan, None, base, scheduled)

    def _within(self, block: Block, limit: int) -> tuple[Block, int]:
        """A step without copies, compiled (0: its peak is its own); above a limit however packed: no addresses."""
        lowered = sequence.lowered(block, self.target)
        ordered = Schedule().run(lowered) if self.target.schedule else lowered
        least = live_peak(Overlap().run(ordered)) + sum(v.nbytes for v in ordered.persistent())
        if least > limit:
            return ordered, least
        return InBestOrder(sequence.last_passes()).plan(lowered, ordered), 0

    def applied(self, plan: RecomputePlan, scheduled: bool) -> Block:
        """The step with a plan, before frees and addresses."""
        if plan.only_approximates:
            after = Approximate(plan.approximations).run(self.plain.block)
        else:
            after = self.ordered if scheduled else self.block
            for p in sequence.recomputing_passes(dataclasses.replace(plan, slices=self.after)):
                after = p.run(after)
        return after if not plan.offloads else Offload(plan.offloads, tight=True).run(after)

    def order(self, block: Block) -> Block:
        """A step lowered and in the order in which it runs, without frees."""
        block = sequence.lowered(block, self.target)
        return Schedule().run(block) if self.target.schedule else block

    def with_planned(self, fitted: Fitted, planned: Planned) -> Fitted:
        """A compiled step with the planner's own account of it."""
        return dataclasses.replace(fitted, planned=planned)

    def times(self, f: Fitted) -> StepTimes:
        """Simulated times of a compiled step with its copies."""
        return simulate_transfers(f.compiled, self.prices, self.target.rates)

    def best_of(self, found: list[Fitted], budget: int | None) -> Fitted:
        """The cheapest within the budget; where none is, the one with the lowest peak."""
        fitting = [f for f in found if budget is None or f.peak <= budget]
        return min(fitting, key=lambda f: (self.cost(f), f.peak)) if fitting else min(found, key=lambda f: f.peak)

    def cost(self, f: Fitted) -> float:
        """The cost of a step in the planners' unit."""
        return f.planned.outcome.cost if f.planned is not None else sum(map(self.seconds, f.block.operators))


class OneSlice:
    """One slice of the batch in place of all: `seconds` of all slices, and whether the step is likely to fit."""

    def __init__(self, one: MicroBatch, target: Target, seconds: Seconds) -> None:
        self.one, self.target = one, target
        members = set(one.members)
        times = [one.pieces if at in members else 1 for at in one.origins]
        self.seconds = sum(n * seconds(o) for o, n in zip(one.block.operators, times, strict=True))

    def fits(self, budget: float) -> bool:
        """Whether a quick search finds an order whose live bytes are within the budget."""
        passes = [DeadCode(), FuseNorms(), *sequence.lowering_passes(self.target)]
        with trusted():
            lowered = run_passes(_with_sums_there(self.one), passes)
        return quick_peak(lowered, self.target, int(budget)) <= budget


def _with_sums_there(one: MicroBatch) -> Block:
    """One slice, with the sums and parts of the slices before it as inputs: no order makes them later.

    Of more than two slices one has others before and after it: what updates read stays until it ends.
    """
    block = one.block
    before = [o for o in block.operators if any(v.name in one.there for v in o.writes())]
    last = [o for o in block.operators if o.role is Role.OPTIMIZE and one.pieces > 2]
    away = {id(o) for o in (*before, *last)}
    inputs = (*block.inputs, *(v for o in before for v in o.writes()))
    kept = [o for o in block.operators if id(o) not in away]
    made = {v.name for o in kept for v in o.writes()}
    sums = dict.fromkeys(v.name for o in last for v in o.reads() if v.name in made)
    return block.with_operators(kept, inputs=inputs, outputs=tuple(dict.fromkeys((*block.outputs, *sums))))


def quick_peak(block: Block, target: Target, budget: int) -> int:
    """Live and persistent bytes of a lowered step: within the budget, if an order is found quickly in which they are.

    Else those of the best order found on the way.
    """
    always = sum(v.nbytes for v in block.persistent())
    return always + (quick_live_peak(block, budget - always) if target.schedule else live_peak(block))


class MicroBatches(Fitting):
    """Plans for a step that runs slice by slice as a whole: each slice recomputes alike.

    Plans number the operators of the step before slicing (`block`).  Their problem is that step with one slice in place
    of all, whose operators cost as much as all slices together, between the sums of those before it.
    """

    def __init__(self, sliced: Block, one: MicroBatch, target: Target) -> None:
        """`sliced`: the step in slices that recomputes nothing; `one`: one slice of it."""
        super().__init__(sliced, target)
        self._one, self.block = one, verify(one.step)

    @cached_property
    def derived(self) -> Derived:
        """The problem of one slice."""
        one, members = self._one, set(self._one.members)
        times = [one.pieces if at in members else 1 for at in one.origins]
        seconds = {id(o): n * self.seconds(o) for o, n in zip(one.block.operators, times, strict=True)}
        found = derive_for(one.block, self.target, lambda o: seconds[id(o)])
        stands = [members.isdisjoint([at]) or o.op.name != self.block.operators[at].op.name
                  for o, at in zip(one.block.operators, one.origins, strict=True)]  # fmt: skip
        nodes = tuple(
            dataclasses.replace(n, repeatable=False) if stands[own[0]] else n
            for n, own in zip(found.problem.nodes, found.operators, strict=True)
        )
        operators = tuple(tuple(dict.fromkeys(one.origins[k] for k in own)) for own in found.operators)
        return Derived(self.block, dataclasses.replace(found.problem, nodes=nodes), operators)

    @property
    def ordered(self) -> Block:
        """The order given: the slices are reordered when they are compiled."""
        return self.block

    def cost(self, f: Fitted) -> float:
        """Seconds of the compiled step, joins of slices included."""
        return sum(map(self.seconds, f.block.operators))

    def of(self, slices: tuple[str, ...], before: tuple[str, ...] = ()) -> Fitting:
        """The step itself, also for a plan made without slices.  UsageError for other slices than its own."""
        if before:
            raise UsageError("approximations that come before recomputation are not combined with slices of the step")
        if slices not in ((), self.slices):
            own, other = (" ".join(s) or "none" for s in (self.slices, slices))
            raise UsageError(f"the plan is for another step: its slices are {other}, those of the step are {own}")
        return self


def peak_of(compiled: Block) -> int:
    """Arena and persistent bytes of a planned block."""
    return memory_report(compiled).peak
