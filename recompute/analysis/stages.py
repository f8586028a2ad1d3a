"""What a step of a pipeline takes, before anything runs: memory of each stage, time, pauses, exposed communication."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..communication.links import Network
from ..communication.mesh import Mesh
from ..communication.verify_ranks import verify_ranks
from ..compiling.sources import Model
from ..compiling.steps import Steps
from ..cost import CostModel
from ..errors import UsageError
from ..passes import ALIGNMENT, Target
from ..passes.communication.timeline import COMMUNICATE, PAUSE, Span, Timeline, timeline
from ..passes.memory.memory_plan import live_profile
from ..report.pipeline import pipeline_page
from ..support.files import replacing
from ..support.tables import human_bytes, human_seconds, plain_table, render
from ..training.parallel import PIPELINE, DataParallel, Parallel
from .compiled_stages import CompiledStage, compiled_stages
from .ranks import network_of


@dataclass(frozen=True)
class Stage:
    """The ranks at one coordinate of the pipeline: bytes of one of them, and the seconds in which it computes, waits
    for other ranks, and waits for data that move.  `memory`: the bytes that it holds from each of these seconds on."""

    place: int
    peak_bytes: int
    persistent_bytes: int
    compute_seconds: float
    pause_seconds: float
    communication_seconds: float
    memory: tuple[tuple[float, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The figures, without what is held when, for JSON."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "memory"}


@dataclass(frozen=True)
class StagesEstimate:
    """A step of all ranks of a mesh with a pipeline.

    `bubble`: the share of the ranks' time in which they wait for others; `exposed_communication_seconds`: how long the
    rank that waits longest for data that move waits.  `timeline` has what each rank does when.
    """

    mesh: str
    schedule: str
    micro_batches: int
    batch: int
    stages: tuple[Stage, ...]
    step_seconds: float
    bubble: float
    exposed_communication_seconds: float
    costs: str
    timeline: Timeline

    @property
    def peak_bytes(self) -> int:
        """The largest peak of a rank."""
        return max(s.peak_bytes for s in self.stages)

    def to_dict(self) -> dict[str, Any]:
        """The figures, without the timeline, for JSON."""
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("stages", "timeline")}
        return {**rest, "peak_bytes": self.peak_bytes, "stages": [s.to_dict() for s in self.stages]}

    def spans(self, place: int) -> tuple[Span, ...]:
        """What the first rank of a stage does, in order."""
        mesh = Mesh.parse(self.mesh)
        return self.timeline.of(next(r for r in range(mesh.ranks) if mesh.coordinate(r, PIPELINE) == place))

    def save_report(self, path: str, title: str = "") -> None:
        """Writes an HTML page: what each stage does when, what it holds meanwhile, and a table."""
        with replacing(Path(path)) as new:
            new.write_text(pipeline_page(self, title), encoding="utf-8")

    def save_trace(self, path: str) -> None:
        """Writes what each rank does when as a trace for Perfetto or chrome://tracing: a row a rank, microseconds."""
        events = [
            {"name": s.kind if s.micro_batch < 0 else f"{s.kind} {s.micro_batch}", "cat": s.kind, "ph": "X", "pid": 0,
             "tid": rank, "ts": s.start * 1e6, "dur": (s.end - s.start) * 1e6}
            for rank in range(len(self.timeline.classes)) for s in self.timeline.of(rank)
        ]  # fmt: skip
        with replacing(Path(path)) as new:
            new.write_text(json.dumps({"traceEvents": events}))

    def __str__(self) -> str:
        table = plain_table()
        for i, name in enumerate(("stage", "peak", "", "parameters and state", "computes", "pauses", "communicates")):
            table.add_column(name, justify="right" if i else "left")
        for s in self.stages:
            times = map(human_seconds, (s.compute_seconds, s.pause_seconds, s.communication_seconds))
            table.add_row(
                str(s.place), f"{s.peak_bytes:,}", human_bytes(s.peak_bytes), f"{s.persistent_bytes:,}", *times
            )
        return "\n".join(
            [
                f"mesh {self.mesh}, {self.schedule}, batch {self.batch:,} in {self.micro_batches:,} micro-batches",
                render(table),
                f"step {human_seconds(self.step_seconds)}, of which {self.bubble:.1%} pauses; communication that "
                f"nothing hides: {human_seconds(self.exposed_communication_seconds)} ({self.costs})",
            ]
        )


def estimate_stages(
    model: Model,
    optimizer: DataParallel,
    *,
    checkpoints: Sequence[str] | None = None,
    network: Network | str | None = None,
    target: Target | None = None,
    options: Mapping[str, Any] | None = None,
    done: Callable[[int], object] = lambda count: None,
) -> StagesEstimate:
    """The estimate of a step of a pipeline: `rc.DataParallel(rc.Adam(), rc.Mesh.of(dp=2, pp=4), batch=64,
    micro_batches=32)`, as `minimize` would have it.

    A rank of each stage is compiled, to the byte (in a network with few layers of the other stages, where these are
    identical: what a rank takes does not depend on them), and the step of all ranks is simulated with the target's
    cost model and the network's links (None: communication takes no time).  The verifier of all ranks runs over them.
    `done` is called with the number of stages that are compiled; other arguments are those of `rc.estimate`.
    UsageError without a batch or stages, and for what cannot be divided.
    """
    parallel = getattr(optimizer, "_parallel", None)
    if parallel is None or PIPELINE not in dict(parallel.mesh.axes):
        raise UsageError(
            f"estimate_stages takes a DataParallel optimizer whose mesh has the axis '{PIPELINE}', along which ranks "
            "have stages; for other meshes use rc.estimate"
        )
    if parallel.batch is None:
        raise UsageError("estimate_stages: give DataParallel the samples of a step of all ranks, such as batch=64")
    mesh: Mesh = parallel.mesh
    between = network_of(network, mesh)
    steps = Steps(model, optimizer=optimizer, checkpoints=checkpoints, target=target, options=options or {})
    compiled = compiled_stages(steps, parallel, range(mesh.size(PIPELINE)), checkpoints, done)
    return simulated(parallel, compiled, steps.cost, between)


def simulated(
    parallel: Parallel, compiled: Mapping[int, CompiledStage], cost: CostModel, network: Network | None
) -> StagesEstimate:
    """The estimate from all stages, by place.  VerifyError if the ranks would wait for ever."""
    mesh = parallel.mesh
    blocks = [compiled[mesh.coordinate(r, PIPELINE)].block for r in range(mesh.ranks)]
    verify_ranks(blocks, mesh)
    times = timeline(blocks, mesh, cost.seconds, network)
    first = {mesh.coordinate(r, PIPELINE): r for r in reversed(range(mesh.ranks))}
    stages = tuple(
        Stage(p, step.figures.peak_bytes, step.figures.persistent_bytes, times.busy(first[p]),
              times.spent(first[p], PAUSE), times.spent(first[p], COMMUNICATE), _held(step, times.of(first[p])))
        for p, step in sorted(compiled.items())
    )  # fmt: skip
    return StagesEstimate(
        str(mesh), parallel.schedule, parallel.pieces(None), parallel.batch or 0, stages, times.seconds, times.bubble,
        times.exposed_seconds, cost.name, times,
    )  # fmt: skip


def _held(step: CompiledStage, spans: Sequence[Span]) -> tuple[tuple[float, int], ...]:
    """The most bytes that a rank holds in each span of its step, with the second in which it begins."""
    live = dict(live_profile(step.block, ALIGNMENT))
    found, at = [], 0
    for s in spans:
        most = max((live.get(i, 0) for i in range(at, max(s.operators[1], at + 1))), default=0)
        found.append((s.start, step.figures.persistent_bytes + most))
        at = max(at, s.operators[1])
    return tuple(found)
