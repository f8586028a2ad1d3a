"""Pipelines in a run: evaluation and smaller batches are cut into the stages of the training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..language.program import Program
from ..passes.pipelines.borders import Stages
from ..training.protocol import AnyOptimizer


@dataclass
class Staged:
    """Makes a program at another batch (`Program.again`), once it trains cut into the stages of the training step.

    While the training step is made, it is not cut: the optimizer does that.
    """

    again: Callable[[int], Program]
    cuts: tuple[str, ...]
    trains: bool = False

    def __call__(self, batch: int) -> Program:
        """The program at a batch."""
        made = self.again(batch)
        if self.trains:
            made.block = Stages(self.cuts).run(made.block)
        return made


def minimized(program: Program, loss: str, optimizer: AnyOptimizer) -> None:
    """Makes a forward pass a training step; in a pipeline, one that is also evaluated stage by stage."""
    parallel = getattr(optimizer, "_parallel", None)
    if parallel is None or parallel.pipe is None:
        optimizer.minimize(program[loss])
        return
    staged = None
    if program.again is not None:
        staged = program.again = Staged(program.again, parallel.cuts)
    optimizer.minimize(program[loss])
    program.pipe = parallel.pipe
    if staged is not None:
        staged.trains = True
