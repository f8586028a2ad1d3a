"""What a step of a pipeline takes, before anything runs: memory of each stage, time, pauses, exposed communication."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..boundary import as_function
from ..communication.links import Network
from ..communication.mesh import Mesh
from ..communication.verify_ranks import verify_ranks
from ..compiling.sources import Model
from ..compiling.steps import Steps
from ..cost import CostModel, Device
from ..errors import UsageError
from ..language.verify import trusted
from ..passes import ALIGNMENT, Target
from ..passes.communication.timeline import COMMUNICATE, PAUSE, Span, Timeline, timeline
from ..passes.memory.memory_plan import live_profile
from ..report.cluster_text import stages_text
from ..support.files import replacing
from ..training.parallel import PIPELINE, DataParallel, Parallel
from ..training.protocol import spec_of
from .compiled_stages import CompiledStage, compiled_stages
from .facts import facts_of
from .ranks import check_axes, network_of
from .stage import Stage
from .steady import extended, of_each, repeating

#: operators of a step of all stages, before its gradients are made, beyond which few micro-batches are compiled
MANY_OPERATORS = 20_000
#: how near to the device's memory a peak has to be for the largest stage to be compiled with all micro-batches
NEAR = 0.1
#: operators of the step of a stage that is compiled with all of its micro-batches: two minutes
MOST_OPERATORS = 250_000


@dataclass(frozen=True)
class StagesEstimate:
    """A step of all ranks of a mesh with a pipeline.

    `bubble`: the share of the ranks' time in which they wait for others; `exposed_communication_seconds`: how long the
    rank that waits longest for data that move waits.  `mfu`: the part of the peak of all devices that the model's
    operations of forward and backward pass take, nothing recomputed (None: of a machine whose peak is not known).
    `timeline` has what each rank does when, for the first `simulated_micro_batches` of a dp rank: those after which
    the schedule repeats itself, where there are many.  `exact`: whether the largest peak is that of a program with all
    micro-batches, to the byte.  `budget`: bytes of a device (0: not known); `precision`: of products.
    """

    mesh: str
    schedule: str
    micro_batches: int
    batch: int
    stages: tuple[Stage, ...]
    step_seconds: float
    bubble: float
    exposed_communication_seconds: float
    mfu: float | None
    costs: str
    timeline: Timeline
    simulated_micro_batches: int
    exact: bool = True
    budget: int = 0
    precision: str = "fp32"

    @property
    def fits(self) -> bool:
        """Whether all ranks' peaks are within the device's memory."""
        return all(s.fits for s in self.stages)

    @property
    def peak_bytes(self) -> int:
        """The largest peak of a rank."""
        return max(s.peak_bytes for s in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """The figures, without the timeline, for JSON."""
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("stages", "timeline")}
        each = len(self.timeline.classes) // len(self.stages)
        ranks = [{"count": each, **s.to_dict()} for s in self.stages]
        return {**rest, "peak_bytes": self.peak_bytes, "fits": self.fits, "ranks": ranks}

    def spans(self, place: int) -> tuple[Span, ...]:
        """The spans of the first rank of a stage, in order of time."""
        mesh = Mesh.parse(self.mesh)
        return self.timeline.of(next(r for r in range(mesh.ranks) if mesh.coordinate(r, PIPELINE) == place))

    def save_trace(self, path: str) -> None:
        """Writes a trace for Perfetto or chrome://tracing: what ranks do when, and what they hold.

        A row a rank, a counter of bytes a stage; times in microseconds.
        """
        events: list[dict[str, object]] = [
            {"name": s.kind if s.micro_batch < 0 else f"{s.kind} {s.micro_batch}", "cat": s.kind, "ph": "X", "pid": 0,
             "tid": rank, "ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6}
            for rank in range(len(self.timeline.classes)) for s in self.timeline.of(rank)
        ]  # fmt: skip
        for stage in self.stages:
            name = f"bytes of stage {stage.place}, at most {stage.peak_bytes}"
            events += [
                {"name": name, "ph": "C", "pid": 0, "ts": second * 1e6, "args": {"bytes": held}}
                for second, held in stage.memory
            ]
        with replacing(Path(path)) as new:
            new.write_text(json.dumps({"traceEvents": events}))

    def __str__(self) -> str:
        return stages_text(self)


def estimate_stages(
    model: Model,
    optimizer: DataParallel,
    *,
    checkpoints: Sequence[str] | None = None,
    network: Network | str | None = None,
    target: Target | None = None,
    progress: Callable[[str], Any] | None = None,
    **model_options: Any,
) -> StagesEstimate:
    """The estimate of a step of a pipeline: `rc.DataParallel(rc.Adam(), rc.Mesh.of(dp=2, pp=4), batch=64,
    micro_batches=32)`, as `minimize` would have it.

    A rank of each stage is compiled, to the byte (in a network with few layers of the other stages, where these are
    identical: what a rank takes does not depend on them), and the step of all ranks is simulated with the target's
    cost model and the network's links (None: communication takes no time).  The verifier of all ranks runs over them.
    Of very many micro-batches that are added up one by one (`accumulate="running"`, as the command line has it) those
    are compiled after which the schedule repeats itself; then, where its peak is near the device's memory, the largest
    stage once more with all of them (`exact`).
    `progress` is called with what is being done, a text; other arguments are those of `rc.estimate` (`loss`,
    `options`, `input_shapes`, `trainable`).  UsageError without a batch or stages, and for what cannot be divided.
    """
    parallel = spec_of(optimizer).parallel
    if parallel is None or PIPELINE not in dict(parallel.mesh.axes):
        raise UsageError(
            f"estimate_stages takes a DataParallel optimizer whose mesh has the axis '{PIPELINE}', along which ranks "
            "have stages; for other meshes use rc.estimate"
        )
    if parallel.batch is None:
        raise UsageError("estimate_stages: give DataParallel the samples of a step of all ranks, such as batch=64")
    mesh: Mesh = parallel.mesh
    between = network_of(network, mesh)
    steps = Steps(model, optimizer=optimizer, checkpoints=checkpoints, target=target, **model_options)
    program = steps.program(parallel.batch)[0]
    few = _few(parallel, len(program.block.operators))
    count, say = mesh.size(PIPELINE), as_function(progress or (lambda text: None), "progress", "a text")

    def done(compiled: int) -> None:
        say(f"compiled {compiled} of {count} stages")

    compiled = compiled_stages(steps.for_ranks(few), few, range(count), checkpoints, done)
    estimate = simulated(parallel, few, compiled, steps.target, between, facts_of(program.block).step_flops(1))
    near = estimate.budget and abs(estimate.peak_bytes / estimate.budget - 1) <= NEAR
    return (
        at_largest(estimate, steps, parallel, compiled, checkpoints, say) if near and not estimate.exact else estimate
    )


def _few(parallel: Parallel, operators: int) -> Parallel:
    """The step, of fewer micro-batches where the schedule repeats itself and there are many operators."""
    pipe, pieces = parallel.pipe, parallel.pieces(None)
    every = pieces // parallel.ranks
    if parallel.accumulate == "tree":  # sums grow with micro-batches: nothing repeats itself
        return parallel
    if pipe is None or parallel.batch is None or parallel.batch % pieces or operators * every <= MANY_OPERATORS:
        return parallel
    few = repeating(pipe, every) * parallel.ranks
    return dataclasses.replace(parallel, micro_batches=few, batch=parallel.batch // pieces * few)


def at_largest(
    estimate: StagesEstimate,
    steps: Steps,
    parallel: Parallel,
    compiled: Mapping[int, CompiledStage],
    checkpoints: Sequence[str] | None,
    say: Callable[[str], Any],
) -> StagesEstimate:
    """The estimate with the stage of the largest peak compiled with all micro-batches, where that takes a minute or
    two at most: so the peak is that of the step, to the byte.  Where another stage has the largest then, that one is
    compiled, too."""
    times, whole = estimate.micro_batches / parallel.ranks / estimate.simulated_micro_batches, set[int]()
    while (largest := max(estimate.stages, key=lambda s: s.peak_bytes)).place not in whole:
        if len(compiled[largest.place].block.operators) * times > MOST_OPERATORS:
            return estimate
        say(f"compiling all {estimate.micro_batches // parallel.ranks:,} micro-batches of stage {largest.place}")
        peak = compiled_stages(steps, parallel, [largest.place], checkpoints)[largest.place].figures.peak_bytes
        fits = not estimate.budget or peak <= estimate.budget
        stages = tuple(
            dataclasses.replace(s, peak_bytes=peak, fits=fits) if s is largest else s for s in estimate.stages
        )
        estimate = dataclasses.replace(estimate, stages=stages)
        whole.add(largest.place)
    return dataclasses.replace(estimate, exact=True)


def simulated(
    parallel: Parallel,
    few: Parallel,
    compiled: Mapping[int, CompiledStage],
    target: Target,
    network: Network | None,
    flops: float,
    budget: int | None = None,
) -> StagesEstimate:
    """The estimate from all stages, by place, of a step of so many operations of the model.

    `few`: what was compiled, `parallel` itself or the same with fewer micro-batches (steady.py).  `budget`: bytes of a
    rank (None: the device's).  VerifyError if the ranks would wait for ever; UsageError for an axis along which
    nothing is divided.
    """
    mesh = parallel.mesh
    blocks = [compiled[mesh.coordinate(r, PIPELINE)].block for r in range(mesh.ranks)]
    check_axes((step.block for step in compiled.values()), mesh)
    with trusted():  # each by itself is verified
        verify_ranks(blocks, mesh)
    assert target.cost is not None
    cost: CostModel = target.cost
    times = timeline(blocks, mesh, cost.seconds, network)
    first = {mesh.coordinate(r, PIPELINE): r for r in reversed(range(mesh.ranks))}
    stages = tuple(
        Stage(p, step.figures.peak_bytes, step.figures.persistent_bytes, times.busy(first[p]),
              times.spent(first[p], PAUSE), times.spent(first[p], COMMUNICATE), _held(step, times.of(first[p])))
        for p, step in sorted(compiled.items())
    )  # fmt: skip
    count = few.pieces(None) // few.ranks
    more = parallel.pieces(None) // parallel.ranks - count
    pipe = parallel.pipe
    each = [of_each(times.of(first[p]), pipe and pipe.at(p), count) for p in sorted(compiled)]
    fed = [sum(v.nbytes for v in compiled[p].block.inputs) / count for p in sorted(compiled)]
    idle, waits = times.bubble * times.seconds, times.exposed_seconds
    if more:
        stages, period = extended(stages, each, fed, more)
        idle += more * sum(period - sum(e) for e in each) / len(each)
        waits = max(s.communication_seconds for s in stages)
    seconds = times.seconds + (more * period if more else 0.0)
    budget = budget if budget is not None else cost.memory if isinstance(cost, Device) else 0
    stages = tuple(dataclasses.replace(s, fits=not budget or s.peak_bytes <= budget) for s in stages)
    peak = cost.rate(target.precision) * mesh.ranks * seconds if isinstance(cost, Device) else 0.0
    return StagesEstimate(
        str(mesh), parallel.schedule, parallel.pieces(None), parallel.batch or 0, stages, seconds,
        idle / seconds if seconds else 0.0, waits, flops / peak if peak else None, priced_by(cost), times, count,
        not more, budget, target.precision or "fp32",
    )  # fmt: skip


def priced_by(cost: CostModel) -> str:
    """The cost model in words."""
    if isinstance(cost, Device) and cost.reached is not None:
        return f"{cost.name}, products by their size at up to {cost.reached.products:.0%} of its peak"
    return cost.name


def _held(step: CompiledStage, spans: Sequence[Span]) -> tuple[tuple[float, int], ...]:
    """The most bytes that a rank holds in each span of its step, with the second in which it begins."""
    live = dict(live_profile(step.block, ALIGNMENT))
    stages, at = [], 0
    for s in spans:
        most = max((live.get(i, 0) for i in range(at, max(s.operators[1], at + 1))), default=0)
        stages.append((s.start, step.figures.persistent_bytes + most))
        at = max(at, s.operators[1])
    return tuple(stages)
