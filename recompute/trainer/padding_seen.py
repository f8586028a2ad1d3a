"""Whether padding has a part in the loss, which a mask, or causal attention, keeps it from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from ..data import fitted
from ..data.fitting import Fitted
from ..data.limits import Limit
from ..data.padding import Padding
from ..language.ir import Value
from ..runtime import Executor
from ..training.modes import for_test
from .buckets import BucketFeeding
from .feeding import Feeding
from .programs import Programs

#: relative difference of losses that is not rounding
_SEEN = 1e-6


def padding_notes(programs: Programs, data: Feeding) -> list[str]:
    """A note where the loss of a sample is another one with other values in its padding.

    One padded sample (repeated to a batch) is evaluated twice, in inference mode, before anything is trained.  Labels,
    masks, and whole numbers that are no indices stay as they are.
    """
    if not isinstance(data, BucketFeeding):
        return []
    for dims, part, source in data.by_bucket():
        if not isinstance(source, Fitted):
            continue
        inputs = [v for v in data.buckets.inputs(dict(dims)) if v.name in source.fits]
        other = {v.name: p for v in inputs if (p := _other(v, source.fits[v.name].padding, source.limits, data.labels))}
        shorter = np.zeros(len(part), bool)
        for v in inputs:
            if v.name in other:
                axis_shapes = data.found.shapes(source.fits[v.name].columns[0])[part]
                shorter |= (axis_shapes < np.array(v.shape[1:], np.int64)).any(axis=1)
        if not shorter.any():
            continue
        sample = int(part[np.argmax(shorter)])
        names = {n: f.columns[0] for n, f in source.fits.items() if len(f.columns) == 1}
        changed = fitted(data.found, inputs, source.limits, names, {**_paddings(source), **other})
        assert isinstance(changed, Fitted)
        losses = _losses(programs, dict(dims), [d.take(np.full(programs.batch, sample)) for d in (source, changed)])
        if not any(math.isnan(x) for x in losses) and abs(losses[0] - losses[1]) > _SEEN * abs(losses[0]):
            return [
                f"padding has a part in the loss: that of sample {sample} is {losses[0]:.6g}, and {losses[1]:.6g} with "
                f"other values in the padding of {', '.join(other)}. Text needs a mask that the model uses, or padding "
                "behind the words of a causal model; of images this is to be expected"
            ]
        return []
    return []


def _paddings(source: Fitted) -> dict[str, Padding]:
    return {name: f.padding for name, f in source.fits.items() if f.padding is not None}


def _other(v: Value, how: Padding | None, limits: Mapping[str, Limit], labels: frozenset[str]) -> Padding | None:
    """Padding with another value; None for what is not padded, labels, and masks."""
    if how is None or how.masks or v.name in labels or "mask" in v.name.lower() or v.type.numpy.kind == "b":
        return None
    if v.type.is_float:
        return dataclasses.replace(how, value=how.value + 1)
    limit = limits.get(v.name)
    if limit is None or limit.below < 2:
        return None
    return dataclasses.replace(how, value=how.value + 1 if how.value + 1 < limit.below else how.value - 1)


def _losses(programs: Programs, dims: Mapping[str, int], feeds: list[dict[str, np.ndarray]]) -> list[float]:
    """The loss of each feed, in inference mode; what computes it is dropped."""
    program = for_test(programs.program, None, [programs.loss], dims)
    executor, inputs = Executor(programs.executor.place), {v.name for v in program.block.inputs}
    fed = [{n: a for n, a in feed.items() if n in inputs} for feed in feeds]
    return [float(executor.run(program, feed, [programs.loss])[0].reshape(())) for feed in fed]
