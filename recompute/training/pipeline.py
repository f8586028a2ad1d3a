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
from ..passes.pipelines.cuts import balanced_cuts
from ..passes.pipelines.norms import norms_over_stages
from ..passes.pipelines.schedules import Pipe
from .protocol import ParamsGrads

#: operations that take as long as moving a byte, on devices of any kind within a factor of a few
_BALANCE = 20


def _work(o: Operator) -> float:
    """What an operator takes, in operations: the same on every rank, as measured times would not be."""
    cost = operator_cost(o)
    return max(cost.flops, cost.bytes * _BALANCE)


def begin_stages(program: Program, pipe: Pipe, cuts: Sequence[str] | None) -> None:
    """Cuts the forward pass of a program into the stages of a pipeline: behind the values `cuts`, or (None) such that
    stages take about the same time.  UsageError for unknown values, or another number of them than it takes."""
    if cuts is None:
        cuts = balanced_cuts(program.block, pipe.stages, _work)
    names = [program.aliases.get(n, n) for n in cuts]
    if len(names) != pipe.stages - 1:
        raise UsageError(
            f"pipeline: {len(names)} cuts make {len(names) + 1} stages, but {pipe.ranks} ranks with {pipe.chunks} "
            f"chunks each have {pipe.stages}: give {pipe.stages - 1} cuts, or none"
        )
    program.block = verify(Stages(tuple(names)).run(program.block))


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
    owned = [program.first_stages.get(p, -1) in pipe.own() for p, _ in program.gradients]
    program.block = verify(EagerUpdates().run(norms_over_stages(program.block, pipe, owned)))


def first_stages(program: Program) -> dict[str, int]:
    """The first stage that has each parameter, of those that some stage has."""
    return {name: min(stages) for name, stages in holders(program.block).items() if stages}
