"""Training steps by their library in place of the executor: a check of libraries on whole runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import UsageError
from ..exporter.library.loaded import LoadedStep
from ..exporter.library.write import packed
from ..language.program import Program
from ..places import CPUPlace, Place
from ..runtime.cpu.device import building


def need_one_step(place: Place | None, ranks: Any, buckets: Mapping[str, Any] | None) -> None:
    """UsageError for runs that take other steps than one of a library, in this process."""
    why = ""
    if place is not None and not isinstance(place, CPUPlace):
        why = f"and this run is on {place}"
    elif ranks is not None:
        why = "and this run has a mesh of several processes"
    elif buckets is not None:
        why = "and this run has buckets of several sizes"
    if why:
        raise UsageError(f"a library is a step of one size for one processor, {why}")
    if not building.makes_library():
        raise UsageError("call rc.build_for(target) before anything is compiled: the library's kernels are made for it")


class Library:
    """The library of a training step, which takes turns with an executor on the program's arrays.

    The library works on copies of weights and state, so that evaluations, checkpoints and callbacks see and change the
    program's own, as always.
    """

    def __init__(self, program: Program, sizes: Sequence[Any], own: Any) -> None:
        """`sizes`: those of the run's steps, which have to be the program's `own`."""
        other = next((at for at in sizes if at != own), None)
        if other is not None:
            raise UsageError(
                f"a library is a step of one size, here of a batch of {own.batch}, and this run has one of "
                f"{other.batch}: leave out the last samples (drop_last, --drop-last), or take a batch that divides all"
            )
        self._program, self._step = program, LoadedStep(packed(program))

    @property
    def peak_bytes(self) -> int:
        """The library's memory."""
        return self._step.peak_bytes

    def run(self, program: Program, feed: Mapping[str, np.ndarray]) -> float:
        """One step; its loss.  Errors: those of `LoadedStep.run`."""
        if program is not self._program:
            raise UsageError("a library is a step of one size, and the data have a batch of another: use drop_last")
        for name, array in self._step.values.items():
            np.copyto(array, program.data[name])
        loss = self._step.run(feed)
        for name, array in self._step.values.items():
            np.copyto(program.data[name], array)
        return loss
