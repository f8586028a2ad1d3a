"""Pipelines in a program: it is cut before it is differentiated, and has its own stages' parameters afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from ..cost import operator_cost
from ..errors import UsageError
from ..language.ir import Block, Operator
from ..language.program import Program
from ..passes.base import Pass, apply_passes
from ..passes.pipelines.borders import Stages, holders
from ..passes.pipelines.cuts import balanced_cuts, loads
from ..passes.pipelines.repeats import shortened
from ..passes.pipelines.schedules import Pipe

#: operations that take as long as moving a byte, on devices of any kind within a factor of a few
_BALANCE = 20


def _work(o: Operator) -> float:
    """The work of an operator in FLOPs, the same on every rank (unlike measured times): see `_BALANCE`."""
    cost = operator_cost(o)
    return max(cost.flops, cost.bytes * _BALANCE)


def cuts_of(program: Program, pipe: Pipe, cuts: Sequence[str] | None) -> tuple[str, ...]:
    """The values behind which a forward pass is cut: `cuts`, or (None) such that stages take about the same time.

    UsageError for another number of cuts than it takes.
    """
    if cuts is None:
        cuts = balanced_cuts(program.block, pipe.stages, _work, pipe.ranks)
    cuts = [cuts] if isinstance(cuts, str) else cuts
    if len(cuts) != pipe.stages - 1:
        raise UsageError(
            f"pipeline: {len(cuts)} cuts make {len(cuts) + 1} stages, but {pipe.ranks} ranks with {pipe.chunks} "
            f"chunks each have {pipe.stages}: give {pipe.stages - 1} cuts, or none"
        )
    return tuple(program.aliases.get(n, n) for n in cuts)


def busiest(program: Program, pipe: Pipe, cuts: Sequence[str] | None) -> int:
    """The place of the rank whose stages take longest."""
    work = loads(program.block, cuts_of(program, pipe, cuts), _work, pipe.ranks)
    return work.index(max(work))


class CutStages(Pass):
    """Cut the forward pass into the stages of a pipeline, behind the values `cuts` (None: of equal time)."""

    refuses = ("gradients",)

    pipe: Pipe
    cuts: tuple[str, ...] | None = None

    def run(self, block: Block) -> Block:
        """The block with borders.  UsageError for unknown values."""
        return Stages(cuts_of(Program(block), self.pipe, self.cuts)).run(block)

    def rewrite(self, program: Program) -> Block:
        """The block with borders; the program notes its pipe, the first stage that has each parameter, and the cuts:
        its evaluation is cut there at any batch."""
        cuts = cuts_of(program, self.pipe, self.cuts)
        block = Stages(cuts).run(program.block)
        made_again = CutStages(self.pipe, cuts)
        program.edited(program.again, str(made_again), lambda made: apply_passes(made, [made_again]))
        program.pipe = self.pipe
        program.first_stages = {name: min(stages) for name, stages in holders(block).items() if stages}
        return block


class DropStages(Pass):
    """Forget the parameters of a pipeline's other stages: their gradients and contents."""

    def run(self, block: Block) -> Block:
        return block

    def rewrite(self, program: Program) -> Block:
        """The block itself; the program's pairs and arrays become those of this rank."""
        values = program.block.values()
        names = {v.name for v in (*program.block.parameters, *program.block.buffers)}
        program.gradients = [(p, g) for p, g in program.gradients if p in names and g in values]
        for name in [n for n in program.data if n not in values]:
            del program.data[name]
        return program.block


def with_own_layers(program: Program, pipe: Pipe, cuts: Sequence[str]) -> Program:
    """A forward pass of which other stages of a pipeline have one layer in place of identical ones: what this rank
    takes in it, it takes in the whole network (passes/pipelines/repeats.py)."""
    block = shortened(program.block, cuts, set(pipe.own()))
    if block is program.block:
        return program
    values = block.values()
    other = Program(block, {n: a for n, a in program.data.items() if n in values}, source=program.source)
    other.take_origin(program)
    other.again = None
    other.shardings = {n: s for n, s in program.shardings.items() if n in values}
    return other
