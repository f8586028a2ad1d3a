"""The biggest batch that fits a memory budget, without recomputation and with each strategy.

It is found by a search over compiled programs: nothing is run or allocated.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..budgets import as_bytes
from ..communication.links import Network
from ..compiling.sources import Model, with_dims
from ..compiling.steps import Loss, Steps
from ..errors import MissingExtraError, UsageError
from ..passes import Target
from ..passes.planners.core.watch import Watch
from ..passes.planners.fit.refusal import held_text
from ..passes.target import target_given
from ..planning.request import check_limits
from ..report.memory_text import max_batch_text
from ..support.notebook import Shown
from ..support.tables import human_bytes
from ..training.optimizers import Adam
from ..training.protocol import AnyOptimizer
from .ranks import RanksEstimate, network_of, ranks_given, ranks_of_steps
from .strategies import Strategy, best_k, fixed_strategies, in_slices, lowest_plan

#: the first batch of the search
_FIRST_GUESS = 8
#: approximate minimum number of batches of a curve
_CURVE = 6
#: slices of the batch that the search tries: each compiles all operators again
SLICES = 4
#: the largest batch of the search
LARGEST_BATCH = 1 << 20


@dataclass(frozen=True)
class BatchOf:
    """The biggest batch of one strategy.  `batch` is 0 where not even one sample fits.

    `peak_bytes` is at `batch` (at 1 where that is 0), `next_peak_bytes` at one more (in `slices`: one more in each);
    `step_seconds` by the cost model;
    `overhead` is the extra time over a plain step of the same batch; `curve` holds (batch, peak) pairs, each
    compiled.
    """

    strategy: str
    checkpoints: tuple[str, ...] | None
    batch: int
    peak_bytes: int
    next_peak_bytes: int
    step_seconds: float
    seconds_per_sample: float
    overhead: float
    curve: tuple[tuple[int, int], ...]
    slices: tuple[str, ...] = ()


@dataclass(frozen=True)
class MaxBatch(Shown):
    """The biggest batch that fits `budget` bytes, by strategy, in the order of the trials; times by `costs`.

    Of several ranks, `ranks` is the estimate at the biggest batch, which is that of all ranks.
    """

    model: str
    budget: int
    strategies: tuple[BatchOf, ...]
    costs: str = ""
    notes: tuple[str, ...] = ()
    ranks: RanksEstimate | None = None

    @property
    def best(self) -> BatchOf:
        """The strategy with the biggest batch; among equals the one with the shorter step."""
        return max(self.strategies, key=lambda s: (s.batch, -s.step_seconds))

    @property
    def batch(self) -> int:
        """The biggest batch that fits with any strategy."""
        return self.best.batch

    def __getitem__(self, strategy: str) -> BatchOf:
        for s in self.strategies:
            if s.strategy == strategy:
                return s
        raise UsageError(f"strategy '{strategy}' was not tried; tried were: {', '.join(self.names())}")

    def names(self) -> list[str]:
        """The strategies that were tried."""
        return [s.strategy for s in self.strategies]

    def to_dict(self) -> dict[str, Any]:
        """The result as numbers, strings, lists and dictionaries, for JSON."""
        ranks = None if self.ranks is None else self.ranks.to_dict()
        return {**dataclasses.asdict(self), "batch": self.batch, "best": self.best.strategy, "ranks": ranks}

    def __str__(self) -> str:
        return max_batch_text(self)


def max_batch(
    model: Model,
    budget: int | str,
    *,
    checkpoints: Sequence[str] | None = None,
    optimizer: AnyOptimizer | None = None,
    loss: Loss = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    options: Mapping[str, Any] | None = None,
    target: Target | None = None,
    effort: float | None = None,
    seconds: float | None = None,
    **fields: Any,
) -> MaxBatch:
    """The biggest batch whose peak, all that the executor allocates, is at most `budget` bytes (or `"16GiB"`).

    Strategies: "plain"; "checkpoints" (yours, if given); "sqrt": about √n of the n values that cut the graph, with
    equal work between them (Chen et al. 2016, arXiv 1604.06174); "best-k": the number of equally spaced cuts with the
    lowest peak; "auto": the plan with the lowest peak (docs/planning.md) whose extra time is at most one forward
    pass; "slices" and "slices+auto": the whole step in 4 slices of the batch, without and with such a plan
    (`slicing=False` leaves both out).  `target`: where the step will run (no device is needed).  `effort` and
    `seconds`: how long "auto" searches (see `RecomputeOptimizer.set_budget`); an interrupt ends the search with the
    best plan so far.  `model` and the other arguments are those of `estimate`.  With a `mesh` the budget is that of
    each rank, and batches are those of all ranks, multiples of the micro-batches.  UsageError if batch 1 does not fit,
    or if the model fixes its batch and cannot be made for others.
    """
    check_limits(effort, seconds)
    slicing = bool(fields.pop("slicing", True))
    optimizer, network = ranks_given(optimizer or Adam(), fields)
    steps = Steps(
        model, loss=loss, optimizer=optimizer, checkpoints=checkpoints, input_shapes=input_shapes, options=options,
        loading=with_dims(fields), target=target_given(target, fields, "max_batch"),
    )  # fmt: skip
    watch = Watch(effort=effort or 1.0, seconds=seconds)
    return max_batch_of(steps, as_bytes(budget), watch=watch, slicing=slicing, network=network)


def max_batch_of(
    steps: Steps,
    budget: int,
    progress: Callable[[str], None] = lambda text: None,
    watch: Watch | None = None,
    *,
    slicing: bool = True,
    network: Network | str | None = None,
) -> MaxBatch:
    """`max_batch` of steps, with a line of progress before each program is compiled."""
    if network is not None and steps.parallel is None:
        raise UsageError("network is between ranks, but there is no mesh: give one, such as mesh='dp=8'")
    if steps.parallel is not None:
        network_of(network, steps.parallel.mesh)
    if steps.target.disk is not None:
        raise UsageError("the biggest batch is that of steps in memory: leave out the disk, or compile with its budget")
    steps.open()
    peaks = _Peaks(steps, progress)
    each = steps.each
    batches: dict[Strategy, int] = {}

    def largest(s: Strategy, guess: int) -> int:
        return each * largest_fitting(lambda n: peaks(s, n * each), budget, max(1, guess // each))

    for s in fixed_strategies(steps):
        batches[s] = largest(s, max([_FIRST_GUESS * each, *batches.values()]))
    reference = max([*batches.values(), each])
    best = best_k(steps, reference, peaks)
    if best is not None:
        batches[best] = largest(best, reference)
    reference = max([*batches.values(), each])
    notes: list[str] = []
    watch = watch or Watch()
    auto = _planned(steps, reference, watch, progress, notes)
    if auto is not None:
        batches[auto] = _fitting_plan(auto, peaks, budget, reference, notes, each)
    if slicing and not steps.is_step and steps.parallel is None:
        batches |= _sliced(steps, batches, peaks, budget, watch, notes)
    if not any(batches.values()):
        _hopeless(steps, budget, {s.name: peaks(s, each) for s in batches})
    rows = tuple(_row(steps, s, b, peaks) for s, b in batches.items())
    limited = [s.name for s, b in batches.items() if b == LARGEST_BATCH * (SLICES if s.slices else each)]
    if limited:
        notes.append(f"{', '.join(limited)}: the search ends at batch {LARGEST_BATCH:,}, or as much in each slice")
    ranks = _ranks(steps, batches, network)
    return MaxBatch(steps.name, budget, rows, steps.cost.name, tuple(notes), ranks)


def _ranks(steps: Steps, batches: Mapping[Strategy, int], network: Network | str | None) -> RanksEstimate | None:
    """The estimate of all ranks at the biggest batch."""
    if steps.parallel is None:
        return None
    best = max(batches, key=lambda s: batches[s])
    return ranks_of_steps(steps, batches[best], best.kept, steps.compile(batches[best]), network)


def _planned(
    steps: Steps, batch: int, watch: Watch, progress: Callable[[str], None], notes: list[str], slices: str = ""
) -> Strategy | None:
    """`lowest_plan`, with notes on what went wrong."""
    progress(f"auto: planning batch {batch}")
    try:
        plan = lowest_plan(steps, batch, watch, slices)
        if watch.interrupted:
            notes.append("auto: planning was interrupted, using the best plan so far")
        return plan
    except MissingExtraError as e:
        notes.append(f"auto: {e}")
        return None


def _fitting_plan(s: Strategy, peaks: _Peaks, budget: int, reference: int, notes: list[str], each: int = 1) -> int:
    """The biggest batch, a multiple of `each`, of a plan that was made at `reference`."""
    peaks(s, reference)  # the plan numbers the operators of this step

    n = largest_fitting(lambda n: peaks.either(s, n * each), budget, reference // each)
    fits = max((b for b, p in peaks.known[s].items() if p <= budget), default=0)
    if n * each != fits or (fits and (n + 1) * each not in peaks.known[s]):
        beyond = max(n * each, fits + each)
        notes.append(f"{s.name}: its plan for batch {reference:,} does not apply to batch {beyond:,}")
    return fits


def _sliced(
    steps: Steps, batches: Mapping[Strategy, int], peaks: _Peaks, budget: int, watch: Watch, notes: list[str]
) -> dict[Strategy, int]:
    """The whole step in slices of the batch, without and with recomputation: batches that are multiples of `SLICES`."""
    sliced: dict[Strategy, int] = {}
    part = f"all:0:{SLICES}"
    plain = in_slices(part)
    guess = max((b for s, b in batches.items() if s.name == "plain"), default=1)
    try:
        sliced[plain] = SLICES * largest_fitting(lambda b: peaks(plain, SLICES * b), budget, guess)
    except UsageError as e:
        notes.append(f"slices: {e}")
        return {}
    best = max([*batches.values(), 1])
    if best > guess and not watch.interrupted:
        auto = _planned(steps, SLICES * best, watch, peaks.progress, notes, part)
        if auto is not None:
            try:
                sliced[auto] = _fitting_plan(auto, peaks, budget, SLICES * best, notes, SLICES)
                if sliced[auto] <= sliced[plain]:
                    del sliced[auto]
                    notes.append("slices+auto: no plan was found that lowers the peak of the step in slices")
            except UsageError as e:
                notes.append(f"slices+auto: {e}")
    for s in [s for s, b in sliced.items() if not b]:
        del sliced[s]
        notes.append(f"{s.name}: even {SLICES} slices of one sample take {human_bytes(peaks(s, SLICES))}")
    if plain in sliced:
        notes.append(_beyond(steps, plain, sliced[plain], peaks))
    return sliced


def _beyond(steps: Steps, s: Strategy, batch: int, peaks: _Peaks) -> str:
    """A line on the slices at the end of the search, and the bytes that each further slice would add."""
    each = batch // SLICES
    half = in_slices(f"all:0:{SLICES // 2}")
    more = (peaks(s, batch) - peaks(half, each * (SLICES // 2))) * 2 // SLICES
    inputs = sum(v.nbytes for v in steps.program(each)[0].block.inputs)
    what = "its inputs alone" if more <= 1.1 * inputs else f"{human_bytes(inputs)} of them inputs"
    return (
        f"slices: {SLICES} of {each:,}, where the search ends; each further slice adds about "
        f"{human_bytes(max(more, 0))}, {what}"
    )


class _Peaks:
    """Peaks by strategy and batch, compiled once each."""

    def __init__(self, steps: Steps, progress: Callable[[str], None]) -> None:
        self.steps, self.progress = steps, progress
        self.known: dict[Strategy, dict[int, int]] = {}

    def __call__(self, s: Strategy, batch: int) -> int:
        peaks = self.known.setdefault(s, {})
        if batch not in peaks:
            self.progress(f"{s.name}: compiling batch {batch}")
            peaks[batch] = self.steps.peak(batch, s.kept)
        return peaks[batch]

    def either(self, s: Strategy, batch: int) -> int:
        """The peak; where the step has other operators than the strategy's plan, that without recomputation."""
        try:
            return self(s, batch)
        except UsageError:
            return self(s.plain, batch)


def _row(steps: Steps, s: Strategy, batch: int, peaks: _Peaks) -> BatchOf:
    each = steps.each
    at, more = max(batch, each), SLICES if s.slices else each
    for part in (at // 2, at // 4):
        if len(peaks.known[s]) < _CURVE and not s.slices:
            peaks.either(s, max(each, part // each * each))
    curve = sorted(peaks.known[s].items())
    kept = s.kept if at in peaks.known[s] else s.plain.kept  # the plan does not apply to so small a batch
    seconds = steps.figures(at, kept).estimated_step_seconds
    again = steps.repeat_seconds(at, kept)
    return BatchOf(
        strategy=s.name,
        checkpoints=s.checkpoints,
        batch=batch,
        peak_bytes=peaks.either(s, at),
        next_peak_bytes=peaks.either(s, batch + more),
        step_seconds=seconds,
        seconds_per_sample=seconds / at,
        overhead=again / (seconds - again),
        curve=tuple(curve),
        slices=s.slices,
    )


def _hopeless(steps: Steps, budget: int, at_one: Mapping[str, int]) -> None:
    least = min(at_one, key=at_one.__getitem__)
    plain = steps.compile(steps.each)
    raise UsageError(
        f"{human_bytes(budget)} cannot hold even batch {steps.each} of {steps.name}: it takes at least "
        f"{human_bytes(at_one[least])} ({least}), plain {human_bytes(at_one['plain'])}. "
        f"{held_text(plain.program.block, plain.figures.peak_bytes)}"
    )


# -- the search -------------------------------------------------------------------------------------------------------


def largest_fitting(peak: Callable[[int], int], budget: int, guess: int = _FIRST_GUESS) -> int:
    """A batch that fits while the next larger one does not; 0 if batch 1 does not fit.

    Secant steps from `guess`, as memory is nearly affine in the batch.  It is not always monotone (tiles of scratch
    change in steps), so a larger one is tried before the search ends.
    """
    if peak(1) > budget:
        return 0
    fits: dict[int, int] = {1: peak(1)}
    over: dict[int, int] = {}
    trial = max(2, min(guess, LARGEST_BATCH))
    while True:
        (fits if peak(trial) <= budget else over)[trial] = peak(trial)
        low = max(fits)
        over = {b: p for b, p in over.items() if b > low}
        if low == LARGEST_BATCH:
            return low
        if low + 1 not in over:
            trial = _next_trial(fits, over, budget)
            continue
        beyond = {low + max(2, low // 8)}
        trial = next((b for b in sorted(beyond) if low < b <= LARGEST_BATCH and b not in over), 0)
        if not trial:
            return low


def _next_trial(fits: Mapping[int, int], over: Mapping[int, int], budget: int) -> int:
    """The batch at which the line through two known batches meets the budget, strictly between the known bounds."""
    low = max(fits)
    if over:
        high = min(over)
        a, b = (low, fits[low]), (high, over[high])
        if len(fits) + len(over) > 12:  # the secant converges slowly: bisect
            return (low + high) // 2
    else:
        high = min(64 * low, LARGEST_BATCH) + 1
        before = max((b for b in fits if b < low), default=None)
        if before is None:
            return low + 1
        a, b = (before, fits[before]), (low, fits[low])
    if b[1] <= a[1]:
        return min((low + high) // 2, high - 1) if over else high - 1
    x = a[0] + (budget - a[1]) * (b[0] - a[0]) // (b[1] - a[1])
    return max(low + 1, min(x, high - 1))


# -- strategies -------------------------------------------------------------------------------------------------------


def advice(steps: Steps, batch: int, budget: int, progress: Callable[[str], None] = lambda text: None) -> str:
    """Advice for a batch that does not fit: the biggest batch that fits, and the cheapest plan for this batch."""
    peaks = _Peaks(steps, progress)
    lines, each = [], steps.each
    asked = Strategy("as asked", steps.resolved(steps.asked))
    if steps.open_batch:
        fitting = each * largest_fitting(lambda n: peaks(asked, n * each), budget, guess=max(2, batch // each // 2))
        lines.append(f"the biggest batch that fits like this is {fitting}" if fitting else "no batch fits like this")
    choices = fixed_strategies(steps)
    choices += [s for s in (best_k(steps, batch, peaks),) if s is not None]
    with contextlib.suppress(MissingExtraError):
        choices += [s for s in (lowest_plan(steps, batch),) if s is not None]
    fit = [s for s in choices if peaks(s, batch) <= budget]
    if fit:
        s = min(fit, key=lambda s: steps.figures(batch, s.kept).estimated_step_seconds)
        f = steps.figures(batch, s.kept)
        extra = f.estimated_step_seconds / steps.figures(batch).estimated_step_seconds - 1
        how = _how(s, budget)
        lines.append(
            f"the cheapest plan that makes batch {batch} fit is '{s.name}': {human_bytes(f.peak_bytes)}, "
            f"estimated step time {extra:+.1%}: {how}"
        )
    else:
        least = min(choices, key=lambda s: peaks(s, batch))
        lines.append(f"no plan known makes batch {batch} fit: '{least.name}' takes {human_bytes(peaks(least, batch))}")
        if steps.open_batch and least.kept is not None:
            fitting = each * largest_fitting(lambda n: peaks(least, n * each), budget, max(2, batch // each // 2))
            if fitting:
                lines.append(f"with it batch {fitting} fits: --batch {fitting} {_how(least, budget)}")
    if steps.target.disk is not None:
        lines.append("(all of this is in memory: a step that is compiled may have parameters and state on disk)")
    return "\n  ".join(lines)


def _how(s: Strategy, budget: int) -> str:
    if s.plan is not None:
        return f"--memory-budget {budget}, without --checkpoints"
    return "without --checkpoints" if s.checkpoints is None else f"--checkpoints {','.join(s.checkpoints)}"
