"""Gradient merge: one step takes several micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UsageError
from ..language.ir import Block, Role
from ..language.program import Program
from ..passes.base import Pass


@dataclass(frozen=True)
class Merge:
    """Options of gradient merge: `k_steps` micro-batches a step; `avg`: their gradient is a mean, else k times that.

    `batch`: samples of a step (None: k_steps times the program's).  `times`: what gradients are multiplied with (None:
    as `avg` says).  `uneven`: the last micro-batch may be smaller.
    """

    k_steps: int
    avg: bool = True
    batch: int | None = None
    times: int | None = None
    uneven: bool = False

    def __post_init__(self) -> None:
        _check_count("k_steps", self.k_steps)
        if self.batch is not None:
            _check_count("batch", self.batch)
            if self.batch % self.k_steps and not self.uneven:
                raise UsageError(
                    f"gradient merge: {self.batch} samples cannot be cut into {self.k_steps} equal micro-batches"
                )
        if not isinstance(self.avg, bool):
            raise UsageError(f"gradient merge: avg must be True or False, not {self.avg!r}")

    def for_batch(self, samples: int, most: int) -> Merge:
        """Gradient merge for steps of `samples` samples: as few micro-batches as divide them, none larger than those of
        the full step (`most` samples where the program was loaded with a micro-batch)."""
        if self.batch is not None:
            most = self.batch // self.k_steps
        k = next(k for k in range(1, samples + 1) if samples % k == 0 and samples // k <= most)
        return Merge(k, self.avg, samples)

    @property
    def multiple(self) -> int:
        """The factor of gradients, which are means over all micro-batches."""
        return (1 if self.avg else self.k_steps) if self.times is None else self.times


class AtWholeBatch(Pass):
    """Make the forward pass at the batch of all `k_steps` micro-batches: `batch`, or (0) that many of the program's."""

    refuses = ("gradients",)

    k_steps: int = 1
    batch: int = 0

    def run(self, block: Block) -> Block:
        """The block itself: a program is made again from its model."""
        return block

    def rewrite(self, program: Program) -> Block:
        """The forward pass, with its own parameters and statistics.  UsageError where the model fixes another batch."""
        size = program.block.batch
        if size is None:
            raise UsageError("the program has no input with a batch to cut into micro-batches")
        wanted = self.batch or size * self.k_steps
        if wanted == size:
            return program.block
        try:
            if program.again is None:
                raise UsageError("it was not loaded from a model, or operators were appended to it by hand")
            whole = program.again(wanted)
        except UsageError as e:
            raise UsageError(
                f"a step of {self.k_steps} micro-batches takes {wanted} samples, but program "
                f"'{program.block.name}' cannot be made at another batch than {size}: {e}. Or have its {size} samples "
                f"cut into micro-batches: GradientMerge(..., batch={size}), or DataParallel(..., batch={size})"
            ) from None
        return _taken(program, whole)


class ScaleGradients(Pass):
    """Multiply gradients by `times`: sums over micro-batches in place of means."""

    needs = ("gradients",)
    refuses = ("updates",)

    times: int = 1

    def run(self, block: Block) -> Block:
        """The block itself: which values are gradients is known of a program."""
        return block

    def rewrite(self, program: Program) -> Block:
        """The block with the products, which become the gradients."""
        b = program.builder(Role.BACKWARD, "merged")
        values = [(p, program[g].value) for p, g in program.gradients]
        program.gradients = [(p, b.Mul(g, b.constant(self.times, g)).name) for p, g in values]
        program.append(b)
        return program.block


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise UsageError(f"gradient merge: {name} must be a whole number of at least 1, not {value!r}")


def _taken(program: Program, other: Program) -> Block:
    """The block of a program at another batch, whose parameters and statistics the program takes.

    Tables that the importer computed for the batch come with the other program.
    """
    outputs = tuple(n for n in program.block.outputs if n in other)
    for v in (*other.block.parameters, *other.block.buffers, *other.block.state):
        there = dict.get(program.data, v.name)
        if there is None or (tuple(there.shape), there.dtype) != (v.shape, v.type.numpy):
            program.data[v.name] = other.data[v.name]
    program.imported, program.aliases = other.imported, {**other.aliases, **program.aliases}
    return other.block.with_operators(other.block.operators, outputs=outputs)
