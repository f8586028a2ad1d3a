"""Steps of many micro-batches from those of few: a pipeline's schedule repeats itself.

From the steady state on (Narayanan et al. 2021, arXiv 2104.04473, section 2.2) each micro-batch adds to a step what
the slowest stage takes for one, and to a rank's memory the rows that it is fed: no more of them are alive than before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ..passes.communication.timeline import BACKWARD, COMMUNICATE, PAUSE, RECOMPUTE, UPDATE, Span
from ..passes.pipelines.schedules import Pipe
from .stage import Stage

#: micro-batches beyond those of a full pipeline until addresses and orders repeat themselves, too: GPT-3's stages do so
#: from 5 or 6 on
BEYOND = 6


def repeating(pipe: Pipe, micro_batches: int) -> int:
    """Micro-batches of a rank behind which one more changes nothing but their number, or all if they are fewer."""
    if pipe.schedule == "gpipe":  # all of them are alive
        return micro_batches
    if pipe.chunks > 1:  # they come in rounds
        return min(micro_batches, -(-(pipe.ranks + BEYOND) // pipe.ranks) * pipe.ranks)
    return min(micro_batches, pipe.ranks + BEYOND)


def of_each(spans: Sequence[Span], pipe: Pipe | None, micro_batches: int) -> tuple[float, float]:
    """Seconds in which a rank computes, and in which it waits for data that move, for each micro-batch.

    Waits are counted between two backward passes of the steady state, where the schedule has one, else between the
    first pass and the last; computation is that of the micro-batches whose backward passes are there, else of all.
    Updates, and what comes before the first micro-batch or after the last, as sums over ranks do, are of the step.
    """
    first, last, count = _steady(spans, pipe, micro_batches)
    waits = sum(s.end - s.start for s in spans[first:last] if s.kind == COMMUNICATE) / count
    numbers = sorted({s.micro_batch for s in spans if s.micro_batch >= 0}) or [-1]
    if pipe is not None and count < micro_batches:
        numbers = numbers[pipe.rank : pipe.rank + count]
    wanted = [s for s in spans if s.micro_batch in numbers and s.kind not in (COMMUNICATE, PAUSE, UPDATE)]
    return sum(s.end - s.start for s in wanted) / len(numbers), waits


def _steady(spans: Sequence[Span], pipe: Pipe | None, micro_batches: int) -> tuple[int, int, int]:
    """The first of some spans, the one behind the last, and the micro-batches between them."""
    begins: dict[int, int] = {}
    for i, s in enumerate(spans):
        if s.kind in (BACKWARD, RECOMPUTE) and s.micro_batch >= 0:
            begins.setdefault(s.micro_batch, i)
    at = [begins[m] for m in sorted(begins)]
    if pipe is not None and pipe.chunks == 1 and len(at) == micro_batches >= pipe.ranks + BEYOND:
        # from there on as many passes begin as end, in schedules with weight gradients apart, too
        return at[pipe.rank], at[pipe.rank + BEYOND - 1], BEYOND - 1
    every = [i for i, s in enumerate(spans) if s.micro_batch >= 0] or [0, len(spans) - 1]
    return every[0], every[-1] + 1, micro_batches


def extended(
    stages: Sequence[Stage], each: Sequence[tuple[float, float]], fed: Sequence[float], more: int
) -> tuple[tuple[Stage, ...], float]:
    """Stages with `more` micro-batches, and the seconds of each of them.

    `each`: what a stage's rank takes for one (`of_each`); `fed`: the bytes of one that it is fed.
    """
    period = max(map(sum, each))
    longer = (
        dataclasses.replace(
            s, peak_bytes=s.peak_bytes + round(more * fed_bytes), compute_seconds=s.compute_seconds + more * computes,
            communication_seconds=s.communication_seconds + more * waits,
            pause_seconds=s.pause_seconds + more * (period - computes - waits),
        )
        for s, (computes, waits), fed_bytes in zip(stages, each, fed, strict=True)
    )  # fmt: skip
    return tuple(longer), period
