"""A step within a budget that keeps some of its parameters and optimizer state on disk.

What is on disk leaves room for the rest of the step, less the buffers in which it is fetched: the step is planned for a
budget that is larger by the difference, and compiled with these values on disk, until it fits.  Optimizer state goes
first, which a step reads once; then parameters; large ones before small ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from itertools import accumulate

from ....errors import BudgetError, UsageError
from ....language.ir import Block
from ...offloading.windows import storable
from ..core.watch import current
from .problem import Fitted, Fitting
from .refusal import held_bytes, lowest_quickly

#: values below stay in memory: a copy of few bytes takes as long as one of more
_SMALLEST = 1 << 16
#: how often a set of values is compiled, and how many sets are
_TRIES, _SETS = 4, 3


def with_disk(fitting: Fitting, budget: int, fit: Callable[[int], Fitted]) -> Fitted:
    """The fastest step found, by simulated times.  BudgetError with the least found where none fits.

    `fit`: the step within a larger budget, with all in memory.
    """
    if any(op.op.communicates for op in fitting.once.operators):
        raise UsageError("a disk is for steps of one process: leave out the ranks, or the disk")
    watch, best, least = current(), None, None
    for names in _sets(fitting, budget):
        if best is not None and (watch.over or watch.interrupted or not best.plan.reruns):
            break  # where nothing is recomputed, more on disk only takes more copies
        watch.doing(f"{len(names)} parameters and states on disk")
        for found in _fitted(fitting, budget, names, fit):
            least = found if least is None or found.peak < least.peak else least
            if found.peak <= budget and (best is None or _seconds(fitting, found) < _seconds(fitting, best)):
                best = found
                watch.best(found)
    if best is None:
        text = "" if least is None else f"; the least that was found is {least.peak:,}"
        error = BudgetError(
            f"no plan fits {budget:,} bytes, though all parameters and optimizer state may be on disk{text}. Give a "
            "larger budget, or a smaller batch"
        )
        error.lowest = least
        raise error
    return best


def _seconds(fitting: Fitting, f: Fitted) -> float:
    return fitting.times(f).seconds


def _order(block: Block) -> list[str]:
    """Names of what can be on disk, in the order in which it goes there."""
    known = storable(block)
    state = {v.name for v in block.state}
    large = [v for v in known.values() if v.nbytes >= _SMALLEST]
    return [v.name for v in sorted(large, key=lambda v: (v.name not in state, -v.nbytes, v.name))]


def _sets(fitting: Fitting, budget: int) -> Iterator[tuple[str, ...]]:
    """Sets of values: the smallest with which the leanest plan may fit, that with which nothing need run again, some
    between them, and all."""
    names, known = _order(fitting.once), storable(fitting.once)
    if not names:
        return
    saved = list(accumulate(known[n].nbytes for n in names))
    buffers = 4 * max(known[n].nbytes for n in names)

    def enough(peak: int) -> int:
        return next((k + 1 for k, s in enumerate(saved) if budget + s - buffers >= peak), len(names))

    first, last = enough(lowest_quickly(fitting, budget).peak), enough(fitting.plain.peak)
    counts = {first + (last - first) * k // (_SETS - 1) for k in range(_SETS)}
    for count in sorted({*counts, len(names)}):
        yield tuple(names[:count])


def _fitted(fitting: Fitting, budget: int, names: tuple[str, ...], fit: Callable[[int], Fitted]) -> Iterator[Fitted]:
    """Steps with these values on disk, each planned for less than the one before, until one fits."""
    known = storable(fitting.once)
    far = sum(known[n].nbytes for n in names)
    goal, room = budget + far, budget - held_bytes(fitting.once) + far
    with contextlib.suppress(BudgetError):
        for _ in range(_TRIES):
            watch = current()
            watch.begin_another()
            watch.found = False  # what fits with all in memory is none yet
            inner, limit = fit(goal), room
            of = fitting.of(inner.plan.slices, inner.plan.before)
            plan = dataclasses.replace(inner.plan, offloads=(*inner.plan.offloads, *names))
            while True:  # the arena can be larger than what is alive: then less is fetched early
                found = dataclasses.replace(of.carry_out(plan, inner.scheduled, limit=limit), planned=inner.planned)
                if found.peak <= budget or not limit:
                    break
                limit = max(0, room - 2 * (found.peak - budget)) if limit == room else 0
            yield found
            if found.peak <= budget:
                return
            goal = min(goal, inner.peak) - (found.peak - budget)
