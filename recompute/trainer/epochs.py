"""How a run cuts its data into the batches of an epoch, and what it leaves out."""

from __future__ import annotations

from typing import Any

from ..errors import UsageError
from .programs import At, Programs


def epoch_of(data: Any, programs: Programs, *, drop_last: bool) -> tuple[Any, list[str]]:
    """The `Epoch` or `BucketEpoch` of data (`Feeding`), None of a stream; and notes on what is left out.

    UsageError where there is no batch.
    """
    if data.samples is None:
        return None, []
    if data.samples < 1:
        raise UsageError(f"{data.name} has no samples")
    batch, notes = programs.batch, []
    rests = [(size, dims) for size, dims in data.sizes(batch) if size < batch]
    why = "" if drop_last else next((w for r, dims in rests if (w := programs.why_not(programs.at(r, dims)))), "")
    why = programs.ranks.agreed(why)
    epoch = data.cut(batch, rest=not drop_last and not why)
    if why:
        left = sum(size for size, _ in rests)
        notes.append(
            f"{left} of {data.samples:,} samples are left out of each epoch (others each time), as the last "
            f"batch would be smaller: {why}"
        )
    if data.samples < batch:
        notes.append(
            f"a batch of {batch} is more than the {data.samples:,} samples, but takes its memory: a batch "
            f"of {data.samples:,} gives the same steps"
        )
    if not epoch.batches:
        raise UsageError(f"{data.name} has {data.samples} samples, fewer than a batch of {batch}")
    return epoch, notes


def training_sizes(data: Any, epoch: Any, programs: Programs) -> list[At]:
    """The sizes of the training steps of a run."""
    if epoch is None:
        return [programs.own]
    sizes = [programs.at(size, dims) for size, dims in data.sizes(programs.batch) if size == epoch.batch or epoch.rest]
    return sizes if data.buckets is not None else list(dict.fromkeys([programs.own, *sizes]))
