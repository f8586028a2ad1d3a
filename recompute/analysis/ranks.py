"""What a step of many ranks takes, before anything runs: memory of each rank, bytes on each link, time, efficiency.

Rank 0's program is compiled for real, so that its peak is exact.  Programs of other ranks differ from it in attributes
alone, such as which rows they read: others are compiled, too, and compared value by value, as many as it takes to know
the memory of all, and the verifier of all ranks runs over all.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..communication.links import ACROSS, INSIDE, Network, as_network
from ..communication.mesh import Mesh, as_mesh
from ..communication.verify_ranks import verify_ranks
from ..compiling.compiler import CompiledStep
from ..compiling.steps import Kept, Steps
from ..cost import CostModel, link_of
from ..errors import UsageError, VerifyError
from ..language.ir import Block, Free, Operator, Role, Value
from ..ops.communication.base import Communication
from ..passes import ALIGNMENT
from ..passes.communication.clock import Exchange, times
from ..passes.memory.memory_plan import collect_lifetimes
from ..report.ranks_text import ranks_text
from ..support.notebook import Shown
from ..training.parallel import DataParallel, Parallel
from ..training.protocol import AnyOptimizer, spec_of
from ..training.spec import Spec
from .alive import by_role, holdings

#: a step of a rank with other options of data parallelism
Compile = Callable[[Parallel], CompiledStep]


@dataclass(frozen=True)
class Makers:
    """Functions that compile steps of other ranks: `plain` without recomputation, `same` with that of rank 0's step."""

    plain: Compile
    same: Compile


@dataclass(frozen=True)
class RankClass:
    """Ranks whose programs take the same memory: which they are, how many, and bytes at the peak, by role."""

    ranks: str
    count: int
    peak_bytes: int
    arena_bytes: int
    persistent_bytes: int
    by_role: Mapping[str, int]


@dataclass(frozen=True)
class ChannelUse:
    """A rank's traffic on a channel in one step; with a network, the seconds in which it is busy, and their share of
    the step."""

    channel: str
    axis: str
    communications: int
    bytes: int
    seconds: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class LinkUse:
    """Bytes that a rank sends over a link in one step, and the share of the step for which they alone occupy it."""

    link: str
    bytes: int
    share: float


@dataclass(frozen=True)
class RanksEstimate(Shown):
    """A step of all ranks; times are None without a network.

    `compute_seconds`: of a rank's operators; `communication_seconds`: in which something is under way, of which
    `hidden_seconds` beside computation, and `stalled_seconds` while the device waits.  `efficiency`: the time of one
    rank alone on a batch of `batch_per_rank`, without communication, over that of a step.
    """

    mesh: str
    ranks: int
    zero: int
    micro_batches: int
    batch: int | None
    batch_per_rank: int | None
    classes: tuple[RankClass, ...]
    channels: tuple[ChannelUse, ...]
    links: tuple[LinkUse, ...]
    compute_seconds: float
    network: str | None = None
    step_seconds: float | None = None
    communication_seconds: float | None = None
    hidden_seconds: float | None = None
    stalled_seconds: float | None = None
    one_rank_seconds: float | None = None
    efficiency: float | None = None
    costs: str = ""
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The largest peak of a rank."""
        return max(c.peak_bytes for c in self.classes)

    def to_dict(self) -> dict[str, Any]:
        """The estimate as numbers, strings, lists and dictionaries, for JSON."""
        return {**dataclasses.asdict(self), "peak_bytes": self.peak_bytes}

    def __str__(self) -> str:
        return ranks_text(self)


# -- what users give --------------------------------------------------------------------------------------------------


def mesh_of(mesh: Mesh | str) -> Mesh:
    """A mesh of which one step is compiled.  UsageError for axes along which nothing is divided."""
    as_given = as_mesh(mesh)
    if dict(as_given.axes).get("pp", 1) > 1:
        raise UsageError(
            f"mesh {as_given}: stages of a pipeline ('pp') are estimated by rc.estimate_stages: leave pp out"
        )
    if not as_given.axes:
        raise UsageError("the mesh has no axis: give one, such as dp=8")
    return as_given


def network_of(network: Network | str | None, mesh: Mesh) -> Network | None:
    """The network between the ranks of a mesh.  UsageError where it lacks a link."""
    if network is None:
        return None
    parsed = as_network(network)
    parsed.check(mesh)
    return parsed


def among_ranks(
    optimizer: AnyOptimizer, mesh: Mesh | str | None, zero: int = 0, micro_batches: int | None = None
) -> AnyOptimizer:
    """The optimizer, data parallel on a mesh.  UsageError for `zero` or `micro_batches` without a mesh."""
    if mesh is not None:
        return DataParallel(optimizer, mesh_of(mesh), zero=zero, micro_batches=micro_batches)
    if zero:
        raise UsageError(f"zero={zero} divides state among ranks, but there is no mesh: give one, such as mesh='dp=8'")
    if micro_batches is not None:
        raise UsageError("micro_batches are those of all ranks, but there is no mesh: give one, such as mesh='dp=8'")
    return optimizer


def ranks_given(optimizer: AnyOptimizer, options: dict[str, Any]) -> tuple[AnyOptimizer, Network | str | None]:
    """The optimizer, data parallel as options say (`mesh`, `zero`, `micro_batches`), and the `network`; all of them are
    removed from `options`."""
    fields = {
        name: options.pop(name, default) for name, default in (("mesh", None), ("zero", 0), ("micro_batches", None))
    }
    network = options.pop("network", None)
    return among_ranks(optimizer, **fields), network


def at_parallel(optimizer: AnyOptimizer | Spec, parallel: Parallel) -> Spec:
    """A data-parallel optimizer's step with other options."""
    return spec_of(optimizer).with_(parallel=parallel)


# -- the estimate -----------------------------------------------------------------------------------------------------


def estimate_ranks(
    plain: CompiledStep, step: CompiledStep, parallel: Parallel, pieces: int, make: Makers, network: Network | None
) -> RanksEstimate:
    """The estimate of a compiled step of rank 0, given the plain one (which may be the same).

    `pieces`: micro-batches of all ranks.
    """
    mesh, ranks = parallel.mesh, parallel.mesh.ranks
    block, cost = step.program.block, step.cost
    slowest, local = _slowest(step, parallel, make.same), block.batch
    whole = None if local is None else local * parallel.ranks
    programs = programs_of(step, parallel, make.same)
    verify_ranks([programs[r % len(programs)].program.block for r in range(ranks)], mesh)
    check_axes([block], mesh)
    estimate = RanksEstimate(
        mesh=str(mesh), ranks=ranks, zero=parallel.zero, micro_batches=pieces, batch=whole, batch_per_rank=local,
        classes=classes_of(programs, ranks), channels=channels_of(block), links=(),
        compute_seconds=compute_seconds(slowest, cost), costs=cost.name,
    )  # fmt: skip
    if network is None:
        return estimate
    clock = times(slowest, cost.seconds, Exchange(network, mesh, parallel.rank), link_of(cost))
    total, busy = clock.seconds, clock.busy()
    channels = tuple(
        dataclasses.replace(c, seconds=busy.get(c.channel, 0.0), share=_share(busy.get(c.channel, 0.0), total))
        for c in estimate.channels
    )
    alone, more = _one_rank(plain, step, parallel, pieces, make.plain, whole)
    return dataclasses.replace(
        estimate, network=str(network), channels=channels, links=_links(block, network, mesh, total),
        step_seconds=total, communication_seconds=clock.moving, hidden_seconds=clock.hidden,
        stalled_seconds=clock.stalls, one_rank_seconds=alone,
        efficiency=None if alone is None else _share(alone, total), notes=(*estimate.notes, *more),
    )  # fmt: skip


def _slowest(step: CompiledStep, parallel: Parallel, same: Compile) -> Block:
    """The program of a rank with the end of the sequence, whose causal attention takes longest."""
    rank = parallel.mesh.last(0, "cp")
    return same(dataclasses.replace(parallel, rank=rank)).program.block if rank else step.program.block


def ranks_of_steps(
    steps: Steps, batch: int, kept: Kept, plain: CompiledStep, network: Network | str | None
) -> RanksEstimate | None:
    """The estimate of steps at a batch, with checkpoints or a plan; None without data parallelism."""
    parallel = steps.parallel
    if parallel is None:
        return None
    step = plain if kept is None else steps.compiled(batch, kept)

    def made(other: Parallel, kept: Kept = None) -> CompiledStep:
        return steps.for_ranks(other).compiled(batch if other.batch is None else other.batch, kept)

    make = Makers(made, lambda other: made(other, kept))
    between = network_of(network, parallel.mesh)
    return estimate_ranks(plain, step, parallel, steps.micro_batches, make, between)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def compute_seconds(block: Block, cost: CostModel) -> float:
    """Seconds of the operators of a compiled step, without communication."""
    real = (o for o in block.operators if not (isinstance(o.op, Free) or o.op.communicates or o.op.copies))
    return sum(map(cost.seconds, real))


def communications(block: Block) -> list[Operator]:
    """The operators that begin to communicate with other ranks."""
    return [o for o in block.operators if isinstance(o.op, Communication) and o.op.ranks > 1]


def channels_of(block: Block) -> tuple[ChannelUse, ...]:
    """A rank's traffic on each channel: communications and bytes sent."""
    channels: dict[str, ChannelUse] = {}
    for o in communications(block):
        op = o.op
        assert isinstance(op, Communication)
        sent = op.traffic(next((v.type for v in o.reads()), None), next(o.writes()).type).bytes
        before = channels.get(op.queue, ChannelUse(op.queue, op.axis, 0, 0))
        channels[op.queue] = dataclasses.replace(
            before, communications=before.communications + 1, bytes=before.bytes + sent
        )
    return tuple(channels.values())


def _links(block: Block, network: Network, mesh: Mesh, seconds: float) -> tuple[LinkUse, ...]:
    sent: dict[str, int] = {}
    for o in communications(block):
        assert isinstance(o.op, Communication)
        one = network.transfer(o.op, next((v.type for v in o.reads()), None), next(o.writes()).type, mesh)
        for name, n in one.bytes.items():
            sent[name] = sent.get(name, 0) + n
    rates = {INSIDE: network.inside, ACROSS: network.across}
    return tuple(LinkUse(name, n, _share(n / rates[name], seconds)) for name, n in sorted(sent.items()))


def check_axes(blocks: Iterable[Block], mesh: Mesh) -> None:
    """UsageError for an axis of a mesh along which nothing is divided: its ranks would all do the same.

    `blocks`: the programs of all ranks that differ.
    """
    used = {o.op.axis for b in blocks for o in communications(b) if isinstance(o.op, Communication)}
    what = {"cp": "the second axis of the step's inputs", "ep": "the first one of weights that stack its experts"}
    for axis, size in mesh.axes:
        if size > 1 and axis not in used:
            raise UsageError(
                f"mesh {mesh}: nothing is divided along {axis}: its {size} ranks would hold and compute the same; give "
                f"a number of ranks that divides {what.get(axis, 'its heads or channels')}, or leave {axis} out"
            )


def _one_rank(
    plain: CompiledStep, step: CompiledStep, parallel: Parallel, pieces: int, made: Compile, batch: int | None
) -> tuple[float | None, tuple[str, ...]]:
    """The time of one rank alone on a rank's share of the batch, with the same recomputation; notes."""
    if parallel.ranks == 1 or parallel.mesh.ranks > parallel.ranks:  # no rank alone may have the memory: its own part
        return compute_seconds(step.program.block, step.cost), ()
    ranks = parallel.ranks
    alone = dataclasses.replace(
        parallel, mesh=Mesh.of(**{parallel.axis: 1}), rank=0, zero=0, micro_batches=pieces // ranks,
        batch=None if batch is None else batch // ranks,
    )  # fmt: skip
    try:
        one = made(alone)
    except UsageError as e:
        return None, (f"no efficiency: the step of one rank alone cannot be compiled: {e}",)
    again = _repeated(step) - _repeated(plain)
    return compute_seconds(one.program.block, one.cost) + again, ()


def _repeated(step: CompiledStep) -> float:
    return sum(step.cost.seconds(o) for o in step.program.logical.operators if o.role is Role.RECOMPUTE)


# -- that all ranks are alike -----------------------------------------------------------------------------------------


def programs_of(step: CompiledStep, parallel: Parallel, same: Compile) -> list[CompiledStep]:
    """The compiled steps of the first ranks, of which those of all others are repetitions: rank r has the memory of
    rank r modulo their number.

    Programs of ranks differ in attributes alone, of which memory depends on one: where a rank's part of a whole value
    begins, which is a view where that is a multiple of the alignment (and the best order of operators may depend on
    it).  These places are multiples of the rank's number: so if rank p has the memory of rank 0, with p a power of two,
    everything repeats after p ranks, and the alignment is the largest such p.  VerifyError if programs have different
    operators.
    """
    if parallel.mesh.ranks > parallel.ranks:
        return _divided(step, parallel, same)
    programs = {0: step}
    period = 1
    while period < min(parallel.ranks, ALIGNMENT):
        programs[period] = same(dataclasses.replace(parallel, rank=period))
        if shape_of(programs[period].program.block) == shape_of(step.program.block):
            break
        period *= 2
    for rank in range(min(period, parallel.ranks)):
        programs[rank] = programs.get(rank) or same(dataclasses.replace(parallel, rank=rank))
    for rank, other in programs.items():
        if _operators(other.program.block) != _operators(step.program.block):
            raise VerifyError(
                f"the programs of ranks 0 and {rank} of the mesh {parallel.mesh} have different operators: this is a "
                "bug in the compiler"
            )
    return [programs[rank] for rank in range(min(period, parallel.ranks))]


#: the most ranks of a mesh with axes that divide operators that are compiled one by one
_MOST = 64


def _divided(step: CompiledStep, parallel: Parallel, same: Compile) -> list[CompiledStep]:
    """`programs_of` for a mesh whose axes divide operators.

    Ranks differ in where their parts of whole values begin, which are multiples of their coordinates: if the second
    rank along each axis has rank 0's memory, all have.  Else each is compiled, or of more than 64 ranks those beside
    rank 0, of which the one with the largest peak stands for all.
    """
    mesh = parallel.mesh
    beside = [mesh.group(0, axis)[1] for axis, size in mesh.axes if size > 1]
    programs = {0: step, **{rank: same(dataclasses.replace(parallel, rank=rank)) for rank in beside}}
    if all(shape_of(other.program.block) == shape_of(step.program.block) for other in programs.values()):
        return [step]
    if mesh.ranks > _MOST:
        return [max(programs.values(), key=lambda made: made.figures.peak_bytes)]
    return [programs.get(rank) or same(dataclasses.replace(parallel, rank=rank)) for rank in range(mesh.ranks)]


def _operators(block: Block) -> Counter[Any]:
    """How many operators there are of each kind, with the same types."""
    real = (o for o in block.operators if not isinstance(o.op, Free))
    return Counter((o.op.name, o.role, tuple(str(v.type) for v in (*o.reads(), *o.writes()))) for o in real)


def classes_of(programs: list[CompiledStep], ranks: int) -> tuple[RankClass, ...]:
    """Ranks with the same peak, the same arena and the same persistent bytes, given the steps that repeat."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(ranks):
        f = programs[rank % len(programs)].figures
        members.setdefault((f.peak_bytes, f.arena_bytes, f.persistent_bytes), []).append(rank)
    classes = []
    for (peak, arena, persistent), mine in members.items():
        held = holdings(programs[mine[0] % len(programs)].program.block)
        classes.append(RankClass(_named(mine), len(mine), peak, arena, persistent, by_role(held, peak)))
    return tuple(classes)


def _named(ranks: list[int]) -> str:
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]:,} to {ranks[-1]:,}" if len(ranks) > 1 else f"{ranks[0]:,}"
    few = [f"{r:,}" for r in ranks[:4]]
    return ", ".join([*few, "..."] if len(ranks) > 4 else few)


def shape_of(block: Block) -> tuple[Any, ...]:
    """A key that is equal for blocks of equal memory: operators, their values by number, types, allocations.

    Names may differ: those of slices say which rows they hold.  So may addresses of views, which begin at these rows.
    """
    numbers: dict[str, int] = {}
    types: list[Any] = []

    def number(v: Value | None) -> int:
        if v is None:
            return -1
        if v.name not in numbers:
            numbers[v.name] = len(numbers)
            types.append(v.type)
        return numbers[v.name]

    declared = tuple(map(number, block.declared()))
    rows = tuple(
        (o.op.name, o.kernel, *(tuple(map(number, part)) for part in (o.inputs, o.outputs, o.scratch)))
        for o in block.operators
        if not isinstance(o.op, Free)
    )
    held = tuple((numbers[x.name], x.size, x.start, x.end) for x in collect_lifetimes(block))
    return declared, rows, tuple(types), held
