"""Pipelines in a run: evaluation and smaller batches are cut into the stages of the training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..language.program import Program
from ..passes.base import apply_passes
from ..passes.pipelines.schedules import Pipe
from ..training.protocol import AnyOptimizer, spec_of
from ..training.stages import CutStages


@dataclass
class Staged:
    """Makes a program at another batch (`Program.again`), once it trains cut into the stages of the training step.

    While the training step is made, it is not cut: the optimizer does that.
    """

    again: Callable[[int], Program]
    pipe: Pipe
    cuts: tuple[str, ...] | None
    trains: bool = False

    def __call__(self, batch: int) -> Program:
        """The program at a batch."""
        made = self.again(batch)
        if self.trains:
            apply_passes(made, [CutStages(self.pipe, self.cuts)])
        return made


def minimized(program: Program, loss: str, optimizer: AnyOptimizer) -> None:
    """Makes a forward pass a training step; in a pipeline, one that is also evaluated stage by stage."""
    parallel = spec_of(optimizer).parallel
    if parallel is None or parallel.pipe is None:
        optimizer.minimize(program[loss])
        return
    staged = None
    if program.again is not None:
        staged = program.again = Staged(program.again, parallel.pipe, parallel.cuts)
    optimizer.minimize(program[loss])
    program.pipe = parallel.pipe
    if staged is not None:
        staged.trains = True
