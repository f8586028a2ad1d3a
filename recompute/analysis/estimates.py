"""Estimates of a step before it runs: the peak, the values alive then, savings of checkpoints, memory by batch."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..communication.links import Network
from ..compiling.compiler import CompiledStep
from ..compiling.sources import Model, with_dims
from ..compiling.steps import Loss, Steps
from ..cost import operator_cost
from ..errors import ModelError, UsageError
from ..language.ir import Block, Free, Operator, Role
from ..language.text import show_operator
from ..passes import ALIGNMENT, Target, memory_report
from ..passes.target import target_given
from ..places import CPUPlace
from ..report.memory_text import estimate_text
from ..report.notebook import bars_html
from ..support.memory import bytes_beside_steps
from ..support.tables import human_bytes, human_seconds
from ..training.optimizers import Adam
from ..training.protocol import AnyOptimizer
from .alive import Holding, by_role, holdings
from .ranks import RanksEstimate, ranks_given, ranks_of_steps

#: most batches that are compiled for memory as a function of the batch
_MOST_BATCHES = 20


@dataclass(frozen=True)
class PeakMoment:
    """The moment of the peak: the operator's index in the planned program, its role, and its text."""

    index: int
    operators: int
    role: str
    text: str


@dataclass(frozen=True)
class CheckpointWorth:
    """A checkpoint and the segment of forward operators before it.

    `kept_bytes`: the checkpoint itself; `saved_bytes`: values of the segment that a plain step keeps for the backward
    pass and this one drops; `rebuild_*`: the cost of recomputing the dropped values (seconds by the cost model).
    """

    name: str
    kept_bytes: int
    saved_bytes: int
    rebuild_operators: int
    rebuild_flops: int
    rebuild_seconds: float


@dataclass(frozen=True)
class Piece:
    """For batches `first` to `last` (inclusive): bytes = fixed + per_sample · batch.

    The error is at most `deviation` at the compiled batches.  `checked`: a batch between the ends was compiled too, or
    there is none."""

    first: int
    last: int
    fixed: float
    per_sample: float
    deviation: int
    checked: bool

    def at(self, batch: int) -> int:
        """Bytes by the formula."""
        return round(self.fixed + self.per_sample * batch)


@dataclass(frozen=True)
class BatchFunction:
    """The peak as a function of the batch: affine pieces, and the compiled peaks behind them.

    `tolerance`: largest permitted error of a piece at the compiled batches.  Between those the error may be larger:
    buffers are aligned to 64 bytes, and tiles of scratch and the packing change in steps (the tests allow 0.1 %).
    """

    pieces: tuple[Piece, ...]
    compiled: tuple[tuple[int, int], ...]
    tolerance: int

    @property
    def deviation(self) -> int:
        """The largest difference between a compiled peak and its piece, in bytes."""
        return max(p.deviation for p in self.pieces)

    @property
    def breakpoints(self) -> tuple[int, ...]:
        """First batches of the pieces after the first."""
        return tuple(p.first for p in self.pieces[1:])

    def times(self, each: int) -> BatchFunction:
        """The function of the batch, if this is a function of how many times `each` it is."""
        if each == 1:
            return self
        pieces = tuple(
            dataclasses.replace(p, first=p.first * each, last=p.last * each, per_sample=p.per_sample / each)
            for p in self.pieces
        )
        return BatchFunction(pieces, tuple((b * each, p) for b, p in self.compiled), self.tolerance)

    def peak(self, batch: int) -> int:
        """The predicted peak at a batch.  UsageError outside the range of the function."""
        for p in self.pieces:
            if p.first <= batch <= p.last:
                return p.at(batch)
        low, high = self.pieces[0].first, self.pieces[-1].last
        raise UsageError(f"memory is known for batches {low} to {high}, not for {batch}")


@dataclass(frozen=True)
class Estimate:
    """The estimate of one training step, in bytes, FLOPs and seconds.

    `peak_bytes` is all memory that the executor allocates; `by_role` and `by_layer` each add up to it.  `costs` is the
    name of the cost model.  `process_bytes`: what the operating system counts for a process like this one that trains
    it on this CPU: the peak, and what this process holds now (Python, libraries, data of yours, but no weights of
    models); None for other places, and where the system does not tell.  Of several ranks, all this is rank 0's, batches
    are those of all of them, and `ranks` says the rest.
    """

    model: str
    batch: int
    peak_bytes: int
    arena_bytes: int
    persistent_bytes: int
    live_peak_bytes: int
    plain_peak_bytes: int
    step_seconds: float
    peak_at: PeakMoment
    by_role: Mapping[str, int]
    by_layer: Mapping[str, int]
    largest: tuple[Holding, ...]
    checkpoints: tuple[CheckpointWorth, ...]
    notes: tuple[str, ...]
    by_batch: BatchFunction | None
    costs: str = ""
    ranks: RanksEstimate | None = None
    process_bytes: int | None = dataclasses.field(default=None, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """The estimate as numbers, strings, lists and dictionaries, for JSON."""
        report = dataclasses.asdict(self)
        if self.by_batch is not None:
            report["by_batch"].update(deviation=self.by_batch.deviation, breakpoints=list(self.by_batch.breakpoints))
        report["ranks"] = None if self.ranks is None else self.ranks.to_dict()
        return report

    def __str__(self) -> str:
        return estimate_text(self)

    def _repr_html_(self) -> str:
        peak = f"{human_bytes(self.peak_bytes)} ({self.peak_bytes:,} bytes)"
        rows = {"peak": peak, "estimated step": f"{human_seconds(self.step_seconds)} ({self.costs})"}
        return bars_html(f"{self.model}, batch {self.batch}", rows, self.by_role)


def estimate(
    model: Model,
    *,
    loss: Loss = None,
    optimizer: AnyOptimizer | None = None,
    checkpoints: Sequence[str] | None = None,
    batch: int | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    options: Mapping[str, Any] | None = None,
    target: Target | None = None,
    **fields: Any,
) -> Estimate:
    """Estimates memory and time of a training step of `model`, without running it or allocating its weights.

    `model`: a path, a ModelProto, a name of the zoo (with its `options`), or a Program.  `loss`, `optimizer`
    (default: Adam), `checkpoints` (None: keep everything) as for training.  `batch`: default 32, or the network's;
    `dims` (by name) and `input_shapes`: other open dimensions, as for `load`.
    `target`: the place, the cost model (`rc.cost.device("h200")`, `rc.profile.Profile()`) and the precision (default:
    this CPU); its fields can be given directly: `place`, `cost`, `precision`, ...
    `mesh`: the ranks that train together (`rc.Mesh.of(dp=8)` or "dp=8"), with the `zero` stage and `micro_batches` of
    all ranks (see `DataParallel`); `batch` is then that of all ranks.  `network`: how fast they send to each other,
    such as "node=8,nvlink=450GB/s,net=50GB/s"; without it, times of communication are unknown.
    UsageError if dimensions other than the batch are dynamic, or if the model fixes another batch.
    """
    optimizer, network = ranks_given(optimizer or Adam(), fields)
    steps = Steps(
        model, loss=loss, optimizer=optimizer, checkpoints=checkpoints, input_shapes=input_shapes, options=options,
        loading=with_dims(fields), target=target_given(target, fields, "estimate"),
    )  # fmt: skip
    return estimate_steps(steps, batch, network=network)


def estimate_steps(
    steps: Steps,
    batch: int | None,
    progress: Callable[[str], None] = lambda text: None,
    network: Network | str | None = None,
) -> Estimate:
    """The estimate of `steps` at a batch, with its checkpoints."""
    if network is not None and steps.parallel is None:
        raise UsageError("network is between ranks, but there is no mesh: give one, such as mesh='dp=8'")
    batch = steps.batch(batch)
    progress(f"compiling batch {batch}")
    plain = steps.compile(batch)
    step = plain if steps.asked is None else steps.compile(batch, steps.asked)
    by_batch, notes = None, tuple[str, ...]()
    try:
        by_batch = _by_batch(steps, batch, step, progress) if steps.open_batch else None
    except (ModelError, UsageError) as e:  # such as a Squeeze of all axes at batch 1
        notes = (f"memory by batch is not known, as the model does not allow all of them: {e}",)
    found = estimate_step(steps.name, batch, plain, step, by_batch)
    ranks = ranks_of_steps(steps, batch, steps.asked, plain, network)
    beside = bytes_beside_steps() if isinstance(steps.target.place, CPUPlace) else 0
    whole = found.peak_bytes + beside if beside else None
    return dataclasses.replace(found, ranks=ranks, notes=(*found.notes, *notes), process_bytes=whole)


def _by_batch(steps: Steps, batch: int, step: CompiledStep, progress: Callable[[str], None]) -> BatchFunction:
    """Memory by batch, at batches that can be cut into micro-batches and slices."""
    each = steps.each

    def peak(n: int) -> int:
        progress(f"compiling batch {n * each}")
        return steps.peak(n * each, steps.asked)

    alive = len(holdings(step.program.block))
    tolerance = max(ALIGNMENT * alive, step.figures.arena_bytes // 2000)
    return fit(peak, 1, max(2 * batch // each, 8), tolerance, also=[batch // each]).times(each)


def estimate_step(
    name: str, batch: int, plain: CompiledStep, step: CompiledStep, by_batch: BatchFunction | None = None
) -> Estimate:
    """The estimate of a compiled step, given the plain one (which may be the same)."""
    block = step.program.block
    at = memory_report(block).peak_at
    held = holdings(block)
    layers: dict[str, int] = {}
    for h in held:
        layers[h.layer] = layers.get(h.layer, 0) + h.bytes
    f = step.figures
    roles = by_role(held, f.peak_bytes)
    if roles["unused"]:
        layers["(unused)"] = roles["unused"]
    moment = PeakMoment(at, len(block.operators), "", "")
    if at >= 0:
        op = block.operators[at]
        moment = PeakMoment(at, len(block.operators), op.role.value, show_operator(op))
    return Estimate(
        model=name, batch=batch, peak_bytes=f.peak_bytes, arena_bytes=f.arena_bytes,
        persistent_bytes=f.persistent_bytes, live_peak_bytes=f.live_peak_bytes,
        plain_peak_bytes=plain.figures.peak_bytes, step_seconds=f.estimated_step_seconds, peak_at=moment,
        by_role=roles, by_layer=dict(sorted(layers.items(), key=lambda item: -item[1])),
        largest=tuple(sorted(held, key=lambda h: -h.bytes)[:20]),
        checkpoints=checkpoint_worth(plain, step), notes=step.plan.notes if step.plan else (), by_batch=by_batch,
        costs=step.cost.name,
    )  # fmt: skip


# -- what checkpoints are worth ---------------------------------------------------------------------------------------


def checkpoint_worth(plain: CompiledStep, step: CompiledStep) -> tuple[CheckpointWorth, ...]:
    """Each checkpoint of a recomputed step with the segment that ends at it."""
    if step.plan is None or not step.plan.checkpoints:
        return ()
    forward = [op for op in plain.program.logical.operators if op.role in (Role.FORWARD, Role.LOSS)]
    makers = {v.name: i for i, op in enumerate(forward) for v in op.writes()}
    sizes = plain.program.logical.values()
    names = [n for n in step.plan.checkpoints if n in makers]
    ends = [makers[n] for n in names]
    dropped = _kept(plain.program.logical) - _kept(step.program.logical)
    saved = [0] * (len(names) + 1)
    for name in dropped:
        if name in makers:
            saved[bisect.bisect_left(ends, makers[name])] += sizes[name].nbytes
    again: list[list[Operator]] = [[] for _ in range(len(names) + 1)]
    for op in step.program.logical.operators:
        if op.role is Role.RECOMPUTE:
            base = next(op.writes()).name.rpartition("@")[0]
            again[bisect.bisect_left(ends, makers.get(base, len(forward)))].append(op)
    worth = []
    for i, name in enumerate(names):
        flops = sum(operator_cost(op).flops for op in again[i])
        seconds = sum(map(step.cost.seconds, again[i]))
        worth.append(CheckpointWorth(name, sizes[name].nbytes, saved[i], len(again[i]), flops, seconds))
    return tuple(worth)


def _kept(block: Block) -> set[str]:
    """Forward values that are kept for the backward pass."""
    written: set[str] = set()
    kept: set[str] = set()
    for op in block.operators:
        if op.role in (Role.FORWARD, Role.LOSS) and not isinstance(op.op, Free):
            if not op.op.updates:
                written.update(v.name for v in op.writes())
        elif not isinstance(op.op, Free):
            kept.update(v.name for v in op.reads() if v.name in written)
    return kept


# -- memory by batch --------------------------------------------------------------------------------------------------


def fit(peak: Callable[[int], int], first: int, last: int, tolerance: int, also: Iterable[int] = ()) -> BatchFunction:
    """Affine pieces of `peak` on [first, last], exact to `tolerance`; at most `_MOST_BATCHES` batches are compiled.

    Runs of compiled batches that lie on one line are pieces; the next batch to compile is where two lines cross, or
    the middle of the widest interval that is not known well enough.  A step just before the end of a run is twice as
    high as what it shows in the middle: lines are within half of the tolerance where they were compiled.
    """
    near = tolerance // 2
    batches = sorted({first, last, (first + last) // 2, *(b for b in also if first <= b <= last)})
    peaks = {b: peak(b) for b in batches}
    while len(peaks) < _MOST_BATCHES:
        runs = _runs(sorted(peaks), peaks, near)
        wanted = _unknown(runs, peaks)
        if wanted is None:
            break
        peaks[wanted] = peak(wanted)
    runs = _runs(sorted(peaks), peaks, near)
    pieces: list[Piece] = []
    for i, run in enumerate(runs):
        pieces.append(_piece(run[0], run[-1], run, peaks))
        if i + 1 < len(runs) and runs[i + 1][0] - run[-1] > 1:  # an interval without compiled batches: its chord
            ends = [run[-1], runs[i + 1][0]]
            chord = _piece(ends[0], ends[1], ends, peaks)
            pieces.append(dataclasses.replace(chord, first=ends[0] + 1, last=ends[1] - 1, checked=False))
    return BatchFunction(tuple(pieces), tuple(sorted(peaks.items())), tolerance)


def _piece(first: int, last: int, run: Sequence[int], peaks: Mapping[int, int]) -> Piece:
    rise, width = peaks[last] - peaks[first], last - first
    slope = 0 if not width else rise // width if rise % width == 0 else rise / width
    fixed = peaks[first] - slope * first
    deviation = max(abs(round(fixed + slope * b) - peaks[b]) for b in run)
    return Piece(first, last, fixed, slope, deviation, len(run) > 2 or width <= 1)


def _runs(batches: Sequence[int], known: Mapping[int, int], tolerance: int) -> list[list[int]]:
    """The batches cut into the longest runs, from the left, that lie on one line."""
    runs: list[list[int]] = []
    for b in batches:
        if runs:
            longer = [*runs[-1], b]
            if _piece(longer[0], b, longer, known).deviation <= tolerance:
                runs[-1] = longer
                continue
        runs.append([b])
    return runs


def _unknown(runs: Sequence[Sequence[int]], known: Mapping[int, int]) -> int | None:
    """The batch to compile next: within the widest interval that no compiled batch confirms."""
    deviations: list[tuple[float, int]] = []
    for i, run in enumerate(runs):
        if len(run) == 2 and run[1] - run[0] > 1:
            deviations.append((run[1] / run[0], (run[0] + run[1]) // 2))
        if i + 1 < len(runs) and runs[i + 1][0] - run[-1] > 1:
            deviations.append((runs[i + 1][0] / run[-1], _crossing(run, runs[i + 1], known)))
    return max(deviations)[1] if deviations else None


def _crossing(left: Sequence[int], right: Sequence[int], peaks: Mapping[int, int]) -> int:
    """The batch at which two lines cross between their runs; the middle if they do not cross, or one is a point."""
    low, high = left[-1], right[0]
    if len(left) > 1 and len(right) > 1:
        a, b = _piece(left[0], low, left, peaks), _piece(high, right[-1], right, peaks)
        if a.per_sample != b.per_sample:
            x = int((b.fixed - a.fixed) / (a.per_sample - b.per_sample))
            if low < x < high:
                return x
    return (low + high) // 2
