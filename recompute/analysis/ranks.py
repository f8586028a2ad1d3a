"""What a step of many ranks takes, before anything runs: memory of each rank, bytes on each link, time, efficiency.

Rank 0's program is compiled for real, so that its peak is exact.  Programs of other ranks differ from it in attributes
alone, such as which rows they read: the last rank's is compiled, too, and compared value by value, and the verifier of
all ranks runs over all.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..communication.links import ACROSS, INSIDE, Network
from ..communication.mesh import Mesh
from ..communication.verify_ranks import verify_ranks
from ..compiling.compiler import CompiledStep
from ..compiling.steps import Steps
from ..cost import CostModel, link_of
from ..errors import UsageError, VerifyError
from ..language.ir import Block, Free, Operator, Role, Value
from ..ops.communication.base import Communication
from ..passes.communication.clock import Exchange, times
from ..report.ranks_text import ranks_text
from ..training.optimizers import RecomputeOptimizer
from ..training.parallel import DataParallel, Parallel
from ..training.protocol import AnyOptimizer
from .alive import by_role, holdings

#: a step of a rank with other options of data parallelism
Compile = Callable[[Parallel], CompiledStep]


@dataclass(frozen=True)
class RankClass:
    """Ranks `first` to `last` (inclusive), whose programs take the same memory: bytes at the peak, by role."""

    first: int
    last: int
    peak_bytes: int
    arena_bytes: int
    persistent_bytes: int
    by_role: Mapping[str, int]


@dataclass(frozen=True)
class ChannelUse:
    """What a rank sends on a channel in one step; with a network, the seconds in which it moves something, and their
    share of the step."""

    channel: str
    axis: str
    communications: int
    bytes: int
    seconds: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class LinkUse:
    """What a rank sends over a link in one step, and the share of the step for which this alone occupies it."""

    link: str
    bytes: int
    share: float


@dataclass(frozen=True)
class RanksEstimate:
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
    """A mesh whose ranks are those of data parallelism.  UsageError for other axes."""
    found = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    if not isinstance(found, Mesh):
        raise UsageError(f"mesh must be a recompute.Mesh, or a text such as 'dp=8', not {mesh!r}")
    if "dp" not in dict(found.axes):
        raise UsageError(f"mesh {found}: it has no axis 'dp', along which ranks share the batch: give dp=N")
    for axis, size in found.axes:
        if axis != "dp" and size > 1:
            raise UsageError(
                f"mesh {found}: nothing is divided along the axis '{axis}' yet, only data parallelism ('dp') is "
                "compiled: leave it out"
            )
    return found


def network_of(network: Network | str | None, mesh: Mesh) -> Network | None:
    """The network between the ranks of a mesh.  UsageError where it lacks a link."""
    found = Network.parse(network) if isinstance(network, str) else network
    if found is not None and not isinstance(found, Network):
        raise UsageError(f"network must be a text such as 'node=8,nvlink=450GB/s,net=50GB/s', not {network!r}")
    if found is not None:
        found.check(mesh)
    return found


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


def at_parallel(optimizer: AnyOptimizer, parallel: Parallel) -> RecomputeOptimizer:
    """A data-parallel optimizer with other options."""
    assert isinstance(optimizer, RecomputeOptimizer)
    found = copy.copy(optimizer)
    found._parallel = parallel
    return found


# -- the estimate -----------------------------------------------------------------------------------------------------


def estimate_ranks(
    plain: CompiledStep, step: CompiledStep, parallel: Parallel, pieces: int, compiled: Compile, network: Network | None
) -> RanksEstimate:
    """The estimate of a compiled step of rank 0, given the plain one (which may be the same).

    `pieces`: micro-batches of all ranks; `compiled` compiles a plain step for others.
    """
    mesh, ranks = parallel.mesh, parallel.ranks
    block, cost = step.program.block, step.cost
    local = block.batch
    whole = None if local is None else local * ranks
    check_all_ranks(plain, parallel, compiled)
    found = RanksEstimate(
        mesh=str(mesh), ranks=ranks, zero=parallel.zero, micro_batches=pieces, batch=whole, batch_per_rank=local,
        classes=(_class(step, ranks),), channels=channels_of(block), links=(),
        compute_seconds=compute_seconds(block, cost), costs=cost.name,
    )  # fmt: skip
    if network is None:
        return found
    clock = times(block, cost.seconds, Exchange(network, mesh, parallel.rank), link_of(cost))
    total, busy = clock.seconds, clock.busy()
    channels = tuple(
        dataclasses.replace(c, seconds=busy.get(c.channel, 0.0), share=_share(busy.get(c.channel, 0.0), total))
        for c in found.channels
    )
    alone, more = _one_rank(plain, step, parallel, pieces, compiled, whole)
    return dataclasses.replace(
        found, network=str(network), channels=channels, links=_links(block, network, mesh, total),
        step_seconds=total, communication_seconds=clock.moving, hidden_seconds=clock.hidden,
        stalled_seconds=clock.stalls, one_rank_seconds=alone,
        efficiency=None if alone is None else _share(alone, total), notes=more,
    )  # fmt: skip


def ranks_of_steps(
    steps: Steps, batch: int, plain: CompiledStep, step: CompiledStep, network: Network | str | None
) -> RanksEstimate | None:
    """The estimate of steps at a batch; None without data parallelism."""
    parallel = steps.parallel
    if parallel is None:
        return None

    def compiled(other: Parallel) -> CompiledStep:
        return steps.for_ranks(other).compile(batch if other.batch is None else other.batch)

    between = network_of(network, parallel.mesh)
    return estimate_ranks(plain, step, parallel, steps.micro_batches, compiled, between)


def _class(step: CompiledStep, ranks: int) -> RankClass:
    """All ranks, as rank 0's program has it."""
    f = step.figures
    roles = by_role(holdings(step.program.block), f.peak_bytes)
    return RankClass(0, ranks - 1, f.peak_bytes, f.arena_bytes, f.persistent_bytes, roles)


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
    """What a rank sends on each channel."""
    found: dict[str, ChannelUse] = {}
    for o in communications(block):
        op = o.op
        assert isinstance(op, Communication)
        sent = op.traffic(next((v.type for v in o.reads()), None), next(o.writes()).type).bytes
        before = found.get(op.queue, ChannelUse(op.queue, op.axis, 0, 0))
        found[op.queue] = dataclasses.replace(
            before, communications=before.communications + 1, bytes=before.bytes + sent
        )
    return tuple(found.values())


def _links(block: Block, network: Network, mesh: Mesh, seconds: float) -> tuple[LinkUse, ...]:
    """What a rank sends over each link."""
    sent: dict[str, int] = {}
    for o in communications(block):
        assert isinstance(o.op, Communication)
        one = network.transfer(o.op, next((v.type for v in o.reads()), None), next(o.writes()).type, mesh)
        for name, n in one.bytes.items():
            sent[name] = sent.get(name, 0) + n
    rates = {INSIDE: network.inside, ACROSS: network.across}
    return tuple(LinkUse(name, n, _share(n / rates[name], seconds)) for name, n in sorted(sent.items()))


def _one_rank(
    plain: CompiledStep, step: CompiledStep, parallel: Parallel, pieces: int, compiled: Compile, batch: int | None
) -> tuple[float | None, tuple[str, ...]]:
    """The time of one rank alone on a rank's share of the batch, with the same recomputation; notes."""
    if parallel.ranks == 1:
        return compute_seconds(step.program.block, step.cost), ()
    ranks = parallel.ranks
    alone = dataclasses.replace(
        parallel, mesh=Mesh.of(**{parallel.axis: 1}), rank=0, zero=0, micro_batches=pieces // ranks,
        batch=None if batch is None else batch // ranks,
    )  # fmt: skip
    try:
        one = compiled(alone)
    except UsageError as e:
        return None, (f"no efficiency: the step of one rank alone cannot be compiled: {e}",)
    again = _repeated(step) - _repeated(plain)
    return compute_seconds(one.program.block, one.cost) + again, ()


def _repeated(step: CompiledStep) -> float:
    """Seconds of recomputed operators."""
    return sum(step.cost.seconds(o) for o in step.program.logical.operators if o.role is Role.RECOMPUTE)


# -- that all ranks are alike -----------------------------------------------------------------------------------------


def check_all_ranks(plain: CompiledStep, parallel: Parallel, compiled: Compile) -> None:
    """VerifyError unless the last rank's program takes the same memory at every moment as rank 0's, and all of them
    communicate without waiting for each other for ever."""
    first, last = plain.program.block, plain.program.block
    if parallel.ranks > 1:
        last = compiled(dataclasses.replace(parallel, rank=parallel.mesh.ranks - 1)).program.block
    if shape_of(first) != shape_of(last):
        raise VerifyError(
            f"the programs of ranks 0 and {parallel.mesh.ranks - 1} of the mesh {parallel.mesh} take different memory: "
            "this is a bug in the compiler"
        )
    verify_ranks([first] * (parallel.mesh.ranks - 1) + [last], parallel.mesh)


def shape_of(block: Block) -> tuple[Any, ...]:
    """What decides the memory of a compiled block: operators and their values by number, each value's type, address.

    Names may differ: those of slices say which rows they hold.
    """
    numbers: dict[str, int] = {}
    values: list[Any] = []

    def number(v: Value | None) -> int:
        if v is None:
            return -1
        if v.name not in numbers:
            numbers[v.name] = len(numbers)
            values.append((v.type, block.addresses.get(v.name)))
        return numbers[v.name]

    declared = tuple(map(number, block.declared()))
    rows = tuple(
        (o.op.name, o.kernel, *(tuple(map(number, part)) for part in (o.inputs, o.outputs, o.scratch)))
        for o in block.operators
    )
    return declared, rows, tuple(values)
