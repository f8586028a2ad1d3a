"""Exponential moving averages of the weights, as part of the program: `ExponentialMovingAverage(Adam(1e-3), 0.999)`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np

from ..boundary import as_program
from ..errors import UsageError
from ..language.program import Program
from ..ops.optimizer.average import AverageUpdate
from ..ops.optimizer.updates import Increment
from ..passes.offloading.offload import without_copies
from .numbers import fraction
from .protocol import AnyOptimizer, StatefulWrapper, spec_of
from .recompute_optimizer import RecomputeOptimizer
from .spec import Average, Spec

__all__ = ["EMA", "ExponentialMovingAverage", "applied", "averages_of"]


class ExponentialMovingAverage(StatefulWrapper):
    """Wraps an optimizer: every step ends with average ← decay · average + (1 - decay) · weight, for what it trains.

    The averages are state of the program, NAME.average (float32 for 16-bit floats): planned, saved and loaded, too.
    The first step sets them to its weights, as torch.optim.swa_utils.AveragedModel does; a step that loss scaling skips
    leaves them.  `thres_steps`: after t steps decay is min(decay, (1 + t) / (10 + t)), so that early averages follow
    faster (Paddle's option of this name).  `with applied(program):`, `program.evaluate(..., averaged=True)` and
    `rc.export_trained(program, averaged=True)` use them.  Running statistics are not averaged.
    """

    def __init__(self, optimizer: AnyOptimizer, decay: float = 0.999, *, thres_steps: bool = False) -> None:
        if isinstance(optimizer, RecomputeOptimizer):
            outer = type(optimizer).__name__
            raise UsageError(
                f"recomputation and gradient merge come last: write {outer}(ExponentialMovingAverage(Adam(), 0.999))"
            )
        super().__init__(optimizer)
        self.decay = fraction("decay", decay)
        if not isinstance(thres_steps, bool):
            raise UsageError(f"thres_steps must be True or False, not {thres_steps!r}")
        self.thres_steps = thres_steps

    @property
    def spec(self) -> Spec:
        """The inner optimizer's spec, with averages."""
        return spec_of(self.inner).with_(average=Average(self.decay, self.thres_steps))

    def _own_state(self, program: Program) -> list[str]:
        return list(averages_of(program).values())

    @contextlib.contextmanager
    def applied(self, program: Program | None = None) -> Iterator[None]:
        """`applied` for the program that was trained (None: the one that was minimized)."""
        source = program or self._program
        if source is None:
            raise UsageError("this ExponentialMovingAverage has no averages yet: call minimize(loss) first")
        with applied(source):
            yield


#: the short name
EMA = ExponentialMovingAverage


def averages_of(program: Program) -> dict[str, str]:
    """Parameter → the name of its average, for a program that was minimized with moving averages."""
    block = without_copies(as_program(program).logical)
    updates = (o for o in block.operators if isinstance(o.op, AverageUpdate))
    return {o.inputs[1].name: o.inputs[0].name for o in updates if o.inputs[0] is not None and o.inputs[1] is not None}


@contextlib.contextmanager
def applied(program: Program) -> Iterator[None]:
    """Inside, the program's parameters hold their averages: for evaluation and export.  Training steps are refused.

    Contents are exchanged in place, without a copy of the weights, and exchanged back in any case.
    UsageError without averages, or inside another `applied`.
    """
    averages = averages_of(program)
    if not averages:
        raise UsageError(
            f"program '{program.block.name}' has no averages: minimize with "
            "rc.ExponentialMovingAverage(optimizer, 0.999)"
        )
    if program.broken or program.averaged:
        why = program.broken or "they are applied already"
        raise UsageError(f"the averages of program '{program.block.name}' cannot be applied: {why}")
    with program.lock:
        if not _trained(program):  # both are the first weights
            averages = {}
        kept = _exchanged(program, averages)
        program.averaged = True
    try:
        yield
    finally:
        with program.lock:
            _exchanged_back(program, averages, kept)
            program.averaged = False


def _trained(program: Program) -> bool:
    counter = next(o for o in without_copies(program.logical).operators if isinstance(o.op, Increment))
    return bool(program.data[next(counter.reads()).name] > 0)


def _exchanged(program: Program, averages: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Exchanges weights and averages; returns the weights of other element types than their averages."""
    kept: dict[str, np.ndarray] = {}
    for name, average in averages.items():
        w, a = (_writable(program, n) for n in (name, average))
        if w.dtype == a.dtype:
            _exchange(w, a)
        else:
            kept[name] = np.array(w)
            w[...] = a
    return kept


def _exchanged_back(program: Program, averages: Mapping[str, str], kept: Mapping[str, np.ndarray]) -> None:
    for name, average in averages.items():
        w, a = (_writable(program, n) for n in (name, average))
        if name in kept:
            w[...] = kept[name]
        else:
            _exchange(w, a)


def _exchange(a: np.ndarray, b: np.ndarray, part: int = 1 << 18) -> None:
    """Exchanges the contents of two arrays, part by part."""
    x, y = a.reshape(-1), b.reshape(-1)
    for start in range(0, x.size, part):
        here = slice(start, start + part)
        before = x[here].copy()
        x[here] = y[here]
        y[here] = before


def _writable(program: Program, name: str) -> np.ndarray:
    """A program's array; contents from before the first step become a copy that can be written."""
    array = program.data[name]
    if not array.flags.writeable:
        array = program.data[name] = np.array(array)
    return array
