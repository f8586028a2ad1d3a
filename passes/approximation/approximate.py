"""The pass that puts approximations in the place of values that wait for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...errors import UsageError
from ...language.ir import Block, Free
from ...language.program import Program
from ..base import Pass
from ..cleanup.dead_code import DeadCode
from ..recomputation.recompute import RecomputePlan
from .base import Approximation, parse_permissions
from .choices import best, named, parse_choice, step_of, write
from .edits import Edits


class Approximate(Pass):
    """Let values go that wait for the backward pass, and keep sketches, few bits or compressed forms of them.

    `choices`: for which values, and how ("fc_1=sketch:0.2:rows", see `Choice`); a planner makes them.  `everywhere`:
    approximations that are made wherever they save memory ("sketch:0.2", "bits:4", "store:8").  The forward pass, and
    so the loss of a step, stays the same to the bit; gradients change.  Comes after recomputation: what is made again
    from values that wait anyway does not wait itself.
    """

    choices: tuple[str, ...] = ()
    everywhere: tuple[str, ...] = ()

    def run(self, block: Block) -> Block:
        """The block with approximations.  UsageError for choices that do not fit it, and where nothing can be done."""
        if any(isinstance(o.op, Free) for o in block.operators):
            raise UsageError("'approximate' comes before 'liveness': it adds operators, and frees must follow")
        return _approximated(block, self._chosen(block))

    def rewrite(self, program: Program) -> Block:
        """The approximated block; the choices become part of the program's plan."""
        choices = self._chosen(program.block)
        program.plan = replace(program.plan or RecomputePlan(), approximations=choices)
        return _approximated(program.block, choices)

    def _chosen(self, block: Block) -> tuple[str, ...]:
        return (*self.choices, *permitted_choices(block, parse_permissions(self.everywhere)))


def _approximated(block: Block, choices: Sequence[str]) -> Block:
    if not choices:
        return block
    step = step_of(block)
    edits = Edits(step)
    for candidate in named(step, [parse_choice(c) for c in choices]):
        write(step, candidate, edits)
    return DeadCode().run(edits.result())


def permitted_choices(block: Block, permitted: Sequence[Approximation]) -> tuple[str, ...]:
    """For each waiting value the choice that saves most memory.  UsageError if no permission saves any."""
    if not permitted:
        return ()
    step = step_of(block)
    candidates = best(step, permitted, lambda c: c.saved)
    if not candidates:
        reasons = [why for a in permitted if (why := a.why_nothing(step))]
        why = "; ".join(reasons) or "no value of 4 KiB or more waits for readers that can do with less"
        raise UsageError(f"nothing in this step can be approximated by {','.join(map(str, permitted))}: {why}")
    return tuple(str(c.choice) for c in candidates)
