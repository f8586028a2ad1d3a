"""Pipelines in a program: it is cut before it is differentiated, and has its own stages' parameters afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from ..cost import operator_cost
from ..errors import UsageError
from ..language.ir import Operator
from ..language.program import Program
from ..language.verify import verify
from ..passes.cleanup.eager_updates import EagerUpdates
from ..passes.pipelines.borders import Stages, holders
from ..passes.pipelines.cuts import balanced_cuts, loads
from ..passes.pipelines.norms import norms_over_stages
from ..passes.pipelines.repeats import shortened
from ..passes.pipelines.schedules import Pipe
from .protocol import ParamsGrads

#: operations that take as long as moving a byte, on devices of any kind within a factor of a few
_BALANCE = 20


def _work(o: Operator) -> float:
    """What an operator takes, in operations: the same on every rank, as measured times would not be."""
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
    found = loads(program.block, cuts_of(program, pipe, cuts), _work, pipe.ranks)
    return found.index(max(found))


def begin_stages(program: Program, pipe: Pipe, cuts: Sequence[str] | None) -> None:
    """Cuts the forward pass of a program into the stages of a pipeline (`cuts_of`).  UsageError for unknown values."""
    program.block = verify(Stages(cuts_of(program, pipe, cuts)).run(program.block))


def with_own_layers(program: Program, pipe: Pipe, cuts: Sequence[str]) -> Program:
    """A forward pass of which other stages of a pipeline have one layer in place of identical ones: what this rank
    takes in it, it takes in the whole network (passes/pipelines/repeats.py)."""
    block = shortened(program.block, cuts, set(pipe.own()))
    if block is program.block:
        return program
    values = block.values()
    found = Program(block, {n: a for n, a in program.data.items() if n in values}, source=program.source)
    found.take_origin(program)
    found.again = None
    found.shardings = {n: s for n, s in program.shardings.items() if n in values}
    return found


def own_pairs(program: Program, pairs: ParamsGrads) -> ParamsGrads:
    """The pairs of the parameters that this rank has; the program forgets the others' contents."""
    values = program.block.values()
    own = {v.name for v in (*program.block.parameters, *program.block.buffers)}
    found = [(p, g) for p, g in pairs if p.name in own and g.name in values]
    program.gradients = [(p.name, g.name) for p, g in found]
    for name in [n for n in program.data if n not in values]:
        del program.data[name]
    return found


def over_stages(program: Program, pipe: Pipe) -> None:
    """Makes norms and checks of gradients those of all stages; that of a parameter of several counts on the first."""
    others = {g for p, g in program.gradients if program.first_stages.get(p, -1) not in pipe.own()}
    program.block = verify(EagerUpdates().run(norms_over_stages(program.block, pipe, others)))


def first_stages(program: Program) -> dict[str, int]:
    """The first stage that has each parameter, of those that some stage has."""
    return {name: min(stages) for name, stages in holders(program.block).items() if stages}
