"""Gradient merge: what a program is before and after its backward pass, when one step takes several micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UsageError
from ..language.ir import Role
from ..language.program import Program
from .base import must_be_untrained
from .protocol import ParamsGrads


@dataclass(frozen=True)
class Merge:
    """Options of gradient merge: `k_steps` micro-batches a step; `avg`: their gradient is a mean, else k times that.

    `batch`: samples of a step (None: k_steps times the program's).  `times`: what gradients are multiplied with (None:
    as `avg` says).
    """

    k_steps: int
    avg: bool = True
    batch: int | None = None
    times: int | None = None

    def __post_init__(self) -> None:
        _check_count("k_steps", self.k_steps)
        if self.batch is not None:
            _check_count("batch", self.batch)
            if self.batch % self.k_steps:
                raise UsageError(
                    f"gradient merge: {self.batch} samples cannot be cut into {self.k_steps} equal micro-batches"
                )
        if not isinstance(self.avg, bool):
            raise UsageError(f"gradient merge: avg must be True or False, not {self.avg!r}")

    def for_batch(self, samples: int, most: int) -> Merge:
        """The same for steps of `samples` samples: as few micro-batches as divide them, none larger than those of the
        full step (`most` samples where the program was loaded with a micro-batch)."""
        if self.batch is not None:
            most = self.batch // self.k_steps
        k = next(k for k in range(1, samples + 1) if samples % k == 0 and samples // k <= most)
        return Merge(k, self.avg, samples)

    def begin(self, program: Program) -> None:
        """Makes the program's forward pass at the batch of all micro-batches.

        UsageError where the model fixes another batch.
        """
        must_be_untrained(program)
        own = program.block.batch
        if own is None:
            raise UsageError("the program has no input with a batch to cut into micro-batches")
        wanted = own * self.k_steps if self.batch is None else self.batch
        if wanted == own:
            return
        try:
            if program.again is None:
                raise UsageError("it was not loaded from a model, or operators were appended to it by hand")
            made = program.again(wanted)
        except UsageError as e:
            raise UsageError(
                f"a step of {self.k_steps} micro-batches takes {wanted} samples, but program "
                f"'{program.block.name}' cannot be made at another batch than {own}: {e}. Or have its {own} samples "
                f"cut into micro-batches: GradientMerge(..., batch={own}), or DataParallel(..., batch={own})"
            ) from None
        _replace(program, made)

    def summed(self, program: Program, pairs: ParamsGrads) -> ParamsGrads:
        """The gradients, times `k_steps` where they are to be sums over micro-batches."""
        times = (1 if self.avg else self.k_steps) if self.times is None else self.times
        if times == 1:
            return pairs
        b = program.builder(Role.BACKWARD, "merged")
        values = [b.Mul(g.value, b.constant(times, g.value)) for _, g in pairs]
        program.append(b)
        program.gradients = [(p.name, v.name) for (p, _), v in zip(pairs, values, strict=True)]
        return [(program[p], program[g]) for p, g in program.gradients]


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise UsageError(f"gradient merge: {name} must be a whole number of at least 1, not {value!r}")


def _replace(program: Program, made: Program) -> None:
    """Makes a program that of another batch, with its own parameters and statistics.

    Tables that the importer computed for the batch come with the other program.
    """
    outputs = tuple(n for n in program.block.outputs if n in made)
    for v in (*made.block.parameters, *made.block.buffers, *made.block.state):
        there = dict.get(program.data, v.name)
        if there is None or (tuple(there.shape), there.dtype) != (v.shape, v.type.numpy):
            program.data[v.name] = made.data[v.name]
    program.block = made.block.with_operators(made.block.operators, outputs=outputs)
    program.imported, program.aliases = made.imported, {**made.aliases, **program.aliases}
