"""The mesh, and what a step does on it, for a model and so many ranks: formulas prune, compiled programs decide.

Every way to divide the step (candidates.py) is priced by closed formulas (pruning.py).  Of the fastest that may fit, a
rank of each of a few stages is compiled (`Search.stages`), for as many micro-batches as it takes until the schedule
repeats itself: their peaks say whether it fits, their operators and collectives what a micro-batch takes.  The fastest
of those that fit is compiled in all its stages, verified among all ranks, and simulated.

Products are priced by their size, at the parts of the device's peak that published steps reach (efficiency.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...boundary import as_function
from ...budgets import as_bytes
from ...communication.links import Network, as_network
from ...communication.mesh import Mesh
from ...compiling.sources import Model
from ...compiling.steps import Steps
from ...cost import Device
from ...efficiency import reached
from ...errors import BudgetError, UsageError, expect
from ...language.ir import Block, Role
from ...ops.convolution.conv import Conv
from ...ops.linear.products import Gemm, MatMul
from ...passes import Target
from ...passes.communication.clock import Exchange, times
from ...passes.communication.timeline import micro_batch_of
from ...passes.offloading.transfers import StepTimes
from ...passes.pipelines.repeats import segments
from ...places import CPUPlace, CUDAPlace
from ...training.optimizers import Adam
from ...training.parallel import DataParallel, Parallel
from ...training.protocol import AnyOptimizer
from ...training.stages import busiest
from ..compiled_stages import CompiledStage, compiled_stages
from ..facts import facts_of
from ..ranks import check_axes
from ..stages import StagesEstimate, at_largest, priced_by, simulated
from .candidates import Candidate, candidates
from .plans import MeshPlans, Row, described
from .pruning import rough_bytes, rough_seconds

#: candidates that are compiled: at most, and at least before one that fits is taken for the best
MOST, LEAST = 10, 4
#: how much too large formulas may find what nevertheless fits: 13 % on LLaMA-3 405B
MARGIN = 1.15
#: candidates that are compiled in all their stages, at most: the first one, and what is faster than it turns out to be
WHOLE = 2
#: micro-batches beyond those of a full pipeline that are compiled: from there on each adds what the one before it adds
BEYOND = 3
#: how a schedule is called in programs
_SCHEDULE = {"zero-bubble": "zb"}


def find_mesh(
    model: Model,
    ranks: int,
    *,
    batch: int,
    network: Network | str,
    optimizer: AnyOptimizer | None = None,
    budget: int | str | None = None,
    target: Target | None = None,
    progress: Callable[[str], Any] | None = None,
    **model_options: Any,
) -> MeshPlans:
    """Finds how `ranks` ranks train a model fastest at a batch of all of them.

    `network`: how fast ranks send, such as "node=8,nvlink=450GB/s,net=50GB/s"; tensor parallelism stays in a node.
    `budget`: that of a rank, `"70GiB"` or bytes (None: the device's memory).  `target`: with the cost model of a
    device, such as `rc.Target(cost="h100-80", precision="bf16")`.  `progress` is called with what is being done.
    `model_options`: `loss`, `options`, `input_shapes`, `trainable` and `loading` of `Steps`.
    UsageError for a device of unknown memory without a budget, and for batches that ranks cannot share.
    """
    return Search(model, ranks, batch, network, optimizer, budget, target, progress, model_options).run()


@dataclass(frozen=True)
class _Priced:
    """A candidate, and the seconds and bytes that formulas give it."""

    candidate: Candidate
    seconds: float
    bytes: float

    def expected(self, known: Sequence[tuple[_Priced, Row]]) -> tuple[float, float]:
        """Seconds and bytes, corrected by the compiled candidate that is most like this one.

        Bytes are corrected among those that recompute as much; before there is one, they may be `MARGIN` too large.
        """
        if not known:
            return self.seconds, self.bytes / MARGIN
        like, row = max(known, key=lambda k: self.likeness(k[0].candidate))
        alike = like.candidate.recompute == self.candidate.recompute
        share = row.peak_bytes / like.bytes if alike else 1 / MARGIN
        return self.seconds * row.step_seconds / like.seconds, self.bytes * share

    def likeness(self, other: Candidate) -> tuple[bool, ...]:
        """How much another candidate has in common with this one: first what matters most."""
        c = self.candidate
        same = ("recompute", "tp", "cp", "ep", "pp", "zero", "schedule", "micro_batch")
        return tuple(getattr(c, name) == getattr(other, name) for name in same)


class Search:
    """One call of `find_mesh`."""

    def __init__(
        self,
        model: Model,
        ranks: int,
        batch: int,
        network: Network | str,
        optimizer: AnyOptimizer | None,
        budget: int | str | None,
        target: Target | None,
        progress: Callable[[str], Any] | None,
        model_options: Mapping[str, Any],
    ) -> None:
        self.progress = as_function(progress or (lambda text: None), "progress", "a text")
        self.ranks = expect("ranks", ranks, int, "a whole number")
        self.batch = expect("batch", batch, int, "a whole number")
        self.network = as_network(network)
        self.network.check(Mesh.of(dp=ranks))
        self.target = as_published(target)
        assert isinstance(self.target.cost, Device)
        self.device = self.target.cost
        if budget is None and not self.device.memory:
            raise UsageError(f"the memory of '{self.device.name}' is not known: give a budget, the bytes of a rank")
        self.budget = self.device.memory if budget is None else as_bytes(budget)
        self.inner: AnyOptimizer = optimizer or Adam()
        first = DataParallel(self.inner, Mesh.of(dp=1), batch=1)
        self.steps = Steps(model, optimizer=first, target=self.target, **model_options)
        self.block = self.steps.program(1)[0].block
        self.facts = facts_of(self.block)
        self.ends = self._ends()
        self.notes: list[str] = []

    def _ends(self) -> tuple[str, ...]:
        """What full recomputation keeps: where the network is one value, behind each part of it with a product."""
        operators = self.block.operators
        products = (MatMul, Gemm, Conv)
        parts = segments(self.block)[:-1]
        return tuple(s.made for s in parts if any(isinstance(operators[i].op, products) for i in s.operators))

    def run(self) -> MeshPlans:
        """Prices all, compiles the best, and simulates the best of these."""
        every = list(self.candidates())
        if not every:
            raise UsageError(
                f"{self.ranks} ranks cannot share a batch of {self.batch}: give a batch that the ranks, or a divisor "
                "of them, divide"
            )
        priced = sorted((rough_seconds(self.facts, c, self.batch, self.device, self.network, self.target.precision), k)
                        for k, c in enumerate(every))  # fmt: skip
        rows = self.compiled_ones(
            [_Priced(every[k], seconds, rough_bytes(self.facts, every[k], self.batch)) for seconds, k in priced]
        )
        rows.sort(key=_order)
        best: dict[Candidate, StagesEstimate] = {}
        while rows and rows[0].fits and rows[0].candidate not in best and len(best) < WHOLE:
            compiled, rows[0] = self.whole(rows[0])
            best[rows[0].candidate] = compiled
            rows.sort(key=_order)
        if rows and rows[0].fits and rows[0].candidate not in best:  # the best of those that were simulated
            rows.sort(key=lambda r: (r.candidate not in best, *_order(r)))
        chosen = best.get(rows[0].candidate) if rows and rows[0].fits else None
        return MeshPlans(
            self.steps.name, self.ranks, self.batch, self.budget, self.facts, tuple(rows), len(every), chosen,
            priced_by(self.device), str(self.network), tuple(self.notes), self.target.precision or "fp32",
        )  # fmt: skip

    def candidates(self) -> Iterator[Candidate]:
        """All that programs can be made for."""
        node, facts = self.network.node or self.ranks, self.facts
        for c in candidates(self.ranks, self.batch, layers=facts.layers, node=node, even=False, seq=facts.seq,
                            experts=facts.experts):  # fmt: skip
            if c.recompute == "selective" or (c.tp > 1 and not c.sequence_parallel):
                continue  # attention is one operator that keeps no scores; the sequence is always divided
            if c.zero == 2 and c.dp * c.micro_batch == self.batch:
                continue  # with one micro-batch a gradient is sent as soon as it is there in stage 1, too
            if c.schedule == "zero-bubble" and c.recompute == "full":
                continue  # gradients of weights that come later keep what was recomputed for them
            yield c

    def compiled_ones(self, left: list[_Priced]) -> list[Row]:
        """The rows of the candidates that promise most, one after the other: what the formulas said of those that were
        compiled, and what these took, corrects what they say of others."""
        rows: list[Row] = []
        measured: list[tuple[_Priced, Row]] = []
        for _ in range(2 * MOST):
            promising = [(p.expected(measured), p) for p in left]
            fitting = [(seconds, k) for k, ((seconds, size), _) in enumerate(promising) if size <= self.budget]
            least = min(promising, key=lambda x: x[0][1], default=None)
            if least is None or len(rows) == MOST:
                break
            fastest = min((r.step_seconds for r in rows if r.fits), default=None)
            if fastest is not None and len(rows) >= LEAST and (not fitting or min(fitting)[0] >= fastest):
                break
            chosen = promising[min(fitting)[1]][1] if fitting else least[1]
            left.remove(chosen)
            if (row := self.compiled(chosen.candidate)) is not None:
                rows.append(row)
                measured.append((chosen, row))
            else:  # nor can others like it
                refused = chosen.candidate
                left = [p for p in left if (p.candidate.mesh, p.candidate.chunks) != (refused.mesh, refused.chunks)]
        return rows

    # -- one candidate ------------------------------------------------------------------------------------------------

    def parallel(self, c: Candidate, micro_batches: int) -> Parallel:
        """The options of its programs, for so many micro-batches of a dp rank."""
        mesh = Mesh(tuple((n, size) for n, size in c.mesh.axes if size > 1 or n == "pp"))
        return Parallel(
            mesh, zero=c.zero, micro_batches=micro_batches * c.dp, batch=micro_batches * c.dp * c.micro_batch,
            schedule=_SCHEDULE.get(c.schedule, c.schedule), chunks=c.chunks, accumulate="running",
        )  # fmt: skip

    def checkpoints(self, c: Candidate) -> tuple[str, ...] | None:
        """What is kept; None for everything."""
        return self.ends if c.recompute == "full" else None

    def repeating(self, c: Candidate) -> int:
        """Micro-batches of a dp rank after which the schedule repeats itself, or all."""
        enough = (2 * c.pp if c.chunks > 1 else c.pp + BEYOND) if c.pp > 1 else BEYOND
        enough = -(-enough // c.pp) * c.pp if c.chunks > 1 else enough
        return min(self.batch // (c.dp * c.micro_batch), enough)

    def compiled(self, c: Candidate) -> Row | None:
        """What a candidate takes, by its first and last stages; None where it cannot be."""
        self.progress(f"compiling {described(c)}")
        try:
            return self.row(c, self.stages(c))
        except (UsageError, BudgetError) as e:
            self.notes.append(f"{described(c)}: {e}")
            return None

    def stages(self, c: Candidate) -> dict[int, CompiledStage]:
        """The stages that say what a candidate takes, by place.

        Most micro-batches are alive on the first two; the head is on the last; one takes longest; and zero-bubble
        schedules keep most for later on the one before the last.
        """
        parallel = self.parallel(c, self.repeating(c))
        places = {0, c.pp - 1}
        if parallel.pipe is not None:
            program = self.steps.program(self.steps.batch(parallel.batch))[0]
            places |= {busiest(program, parallel.pipe, None)}
        places |= (
            {max(c.pp - 2, 0)} if c.schedule == "zero-bubble" else {min(1, c.pp - 1)} if len(places) < 3 else set()
        )
        stages = compiled_stages(self.steps, parallel, places, self.checkpoints(c))
        check_axes((step.block for step in stages.values()), parallel.mesh)
        return stages

    def row(self, c: Candidate, found: Mapping[int, CompiledStage]) -> Row:
        """The figures of compiled stages."""
        micro_batches, all_of = self.repeating(c), self.batch // (c.dp * c.micro_batch)
        mesh = self.parallel(c, micro_batches).mesh
        slowest, fixed, waits = 0.0, 0.0, 0.0
        for place, step in found.items():
            rank = next(r for r in range(mesh.ranks) if mesh.coordinate(r, "pp") == place)
            clock = times(step.block, self.steps.cost.seconds, Exchange(self.network, mesh, rank))
            one, stalls = self.each(step.block, clock, micro_batches)
            if one > slowest:
                slowest, waits = one, clock.stalls + (all_of - micro_batches) * stalls
            fixed = max(fixed, clock.seconds - micro_batches * one)
        pauses = (c.pp - 1) / c.chunks * (1 / 3 if c.schedule == "zero-bubble" else 1) * slowest
        seconds = all_of * slowest + pauses + fixed
        peak = max(s.figures.peak_bytes for s in found.values())
        held = max(s.figures.persistent_bytes for s in found.values())
        mfu = self.facts.step_flops(self.batch) / (seconds * self.ranks * self.rate)
        return Row(c, all_of, peak, held, seconds, pauses / seconds, waits, mfu, peak <= self.budget)

    def each(self, block: Block, clock: StepTimes, micro_batches: int) -> tuple[float, float]:
        """Seconds of a rank for each of its micro-batches, and those of them in which it waits for data: from the first
        operator of any of them to the last, but for updates."""
        operators, ends = block.operators, (*clock.starts, clock.seconds)
        at = [i for i, o in enumerate(operators) if micro_batch_of(o) >= 0] or [0, len(operators) - 1]
        first, behind = at[0], at[-1] + 1
        updates = sum(self.steps.cost.seconds(o) for o in operators[first:behind] if o.role is Role.OPTIMIZE)
        stalls = sum(t.stall for t in clock.transfers if first <= t.operator < behind)
        return (ends[behind] - ends[first] - updates) / micro_batches, stalls / micro_batches

    @property
    def rate(self) -> float:
        """The device's peak, in operations per second."""
        return self.device.rate(self.target.precision)

    # -- the best -----------------------------------------------------------------------------------------------------

    def whole(self, row: Row) -> tuple[StagesEstimate, Row]:
        """All stages of a row, verified and simulated together; the row with what they say.

        They are compiled for as many micro-batches as it takes until the schedule repeats itself; then the stage with
        the largest peak for all of them (`at_largest`).
        """
        c, name = row.candidate, described(row.candidate)
        few, every = self.parallel(c, self.repeating(c)), self.parallel(c, row.micro_batches)

        def done(count: int) -> None:
            self.progress(f"compiled {count} of {c.pp} stages of {name}")

        stages = compiled_stages(self.steps, few, range(c.pp), self.checkpoints(c), done)
        self.progress(f"verifying and simulating {self.ranks:,} ranks of {name}")
        best = simulated(every, few, stages, self.target, self.network, self.facts.step_flops(self.batch),
                         self.budget)  # fmt: skip
        if not best.exact:
            best = at_largest(best, self.steps, every, stages, self.checkpoints(c), self.progress)
        return best, dataclasses.replace(
            row, step_seconds=best.step_seconds, bubble=best.bubble, mfu=best.mfu or 0.0, peak_bytes=best.peak_bytes,
            exposed_communication_seconds=best.exposed_communication_seconds, exact=best.exact, fits=best.fits,
        )  # fmt: skip


def as_published(target: Target | None) -> Target:
    """The target with products at the part of the device's peak that published steps reach, and programs for CUDA where
    the device is a GPU, which has rates for halves.  UsageError without a device."""
    if target is None or not isinstance(expect("target", target, Target, "an rc.Target").cost, Device):
        raise UsageError("a mesh needs the rates of a device: give target=rc.Target(cost='h100-80')")
    assert isinstance(target.cost, Device)
    place = CUDAPlace() if target.place == CPUPlace() and target.cost.f16 else target.place
    return dataclasses.replace(
        target, place=place, cost=dataclasses.replace(target.cost, reached=reached(target.cost.name))
    )


def _order(row: Row) -> tuple[bool, float]:
    """What fits first, the fastest first; then what is nearest to fitting."""
    return not row.fits, row.step_seconds if row.fits else row.peak_bytes
