"""The stages of a pipeline: where the forward pass is cut, and to which stage each operator of the step belongs.

The forward pass is cut before it is differentiated.  What is computed in one stage and read in another passes a
`Border`, whose gradient is a `Border` in the other direction: so each operator of the backward pass reads gradients of
its own stage alone, which says to which stage it belongs.  What follows from inputs alone (a mask), or from parameters
alone (a transposed weight), belongs to no stage: each rank that needs it computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...errors import UsageError, nearest
from ...language.builder import Builder
from ...language.ir import Block, Operator, Role, Value
from ...ops.communication.border import Border
from ..base import Pass

#: the roles of operators of the forward pass
FORWARD_ROLES = (Role.FORWARD, Role.LOSS)


class Stages(Pass):
    """Cut the forward pass into stages behind the values `cuts`: one more stage than there are cuts.

    A stage ends with the operator that makes its cut, in order of execution.  UsageError for unknown values, and for
    those in the wrong order.
    """

    cuts: tuple[str, ...] = ()

    def run(self, block: Block) -> Block:
        """The block with borders; the block itself without cuts."""
        return _Cutting(block, self.cuts).run() if self.cuts else block


class _Cutting:
    """Puts borders into the operators of a forward pass."""

    def __init__(self, block: Block, cuts: Sequence[str]) -> None:
        self.block, self.cuts = block, cuts
        self.ends = _ends(block, cuts)
        self.free = unbound(block)
        self.b = Builder.on(block, role=Role.FORWARD)
        #: the stage of each value that belongs to one, and the value in the stages that have received it
        self.home: dict[str, int] = {}
        self.there: dict[tuple[str, int], Value] = {}

    def run(self) -> Block:
        stage = 0
        read = {v.name for o in self.block.operators for v in o.reads()}
        for i, o in enumerate(self.block.operators):
            self.b.role = o.role
            bound = any(v.name not in self.free for v in (*o.reads(), *o.writes()))
            names = {v.name: self.here(v, stage) for v in o.reads() if v.name in self.home} if bound else {}
            self.b.operators.append(o.reading({n: v for n, v in names.items() if v.name != n}))
            self.home.update((v.name, stage) for v in o.writes() if v.name not in self.free)
            while stage < len(self.ends) and self.ends[stage] == i:
                stage += 1
                cut = next(v for v in o.writes() if v.name == self.cuts[stage - 1])
                if cut.name not in read or cut.name in self.free:
                    raise UsageError(
                        f"pipeline: the step cannot be cut behind '{cut.name}': nothing reads it, or it depends on no "
                        "parameter or on no input; name the output of a layer"
                    )
                self.here(cut, stage)
        return self.block.with_operators(self.b.operators, constants=(*self.block.constants, *self.b.constants))

    def here(self, v: Value, stage: int) -> Value:
        """The value in a stage."""
        home = self.home[v.name]
        if home == stage:
            return v
        if (v.name, stage) not in self.there:
            role, self.b.role = self.b.role, Role.FORWARD
            border = self.b.emit(Border(home, stage), v, name=f"{v.name}.stage_{stage}")
            self.b.role = role
            self.there[v.name, stage] = border
        return self.there[v.name, stage]


def without_borders(block: Block) -> Block:
    """A forward pass with borders as one process has it, uncut; the block itself without borders."""
    there: dict[str, Value] = {}
    operators = []
    for o in block.operators:
        read = {v.name: there[v.name] for v in o.reads() if v.name in there}
        if isinstance(o.op, Border):
            (x,), (y,) = o.reads(), o.writes()
            there[y.name] = read.get(x.name, x)
        else:
            operators.append(o.reading(read))
    return block.with_operators(operators) if there else block


def _ends(block: Block, cuts: Sequence[str]) -> list[int]:
    """The positions of the operators that make the cuts."""
    forward = [o for o in block.operators if o.role in FORWARD_ROLES]
    producers = {v.name: i for i, o in enumerate(block.operators) for v in o.writes()}
    names = [v.name for o in forward for v in o.writes()]
    ends: list[int] = []
    for name in cuts:
        if name not in producers:
            raise UsageError(f"pipeline: no operator makes the cut '{name}'{nearest(name, names)}")
        if ends and producers[name] <= ends[-1]:
            raise UsageError(
                f"pipeline: the cut '{name}' does not come after '{cuts[len(ends) - 1]}': give the cuts in the order "
                "in which they are computed, each once"
            )
        ends.append(producers[name])
    return ends


def unbound(block: Block) -> set[str]:
    """The values that belong to no stage: inputs, parameters, and what follows from inputs alone or from parameters
    alone, without drawing random numbers or changing state."""
    sources = {v.name for v in (*block.inputs, *(c.value for c in block.constants))}
    kept = {v.name for v in block.persistent()} - sources
    fixed = {c.value.name for c in block.constants}
    of_inputs, of_parameters = set(sources), kept | fixed
    for o in block.operators:
        names = {v.name for v in o.reads()}
        if o.op.updates or o.op.random or o.role not in FORWARD_ROLES:
            continue
        for free in (of_inputs, of_parameters):  # parts of parameters are gathered where they are needed
            if names <= free and (not o.op.once or (free is of_parameters and o.op.communicates)):
                free.update(v.name for v in o.writes())
    return of_inputs | of_parameters


def homes(block: Block) -> dict[int, int]:
    """The stage of each operator of a step with borders, by position; of those that belong to one."""
    free = unbound(block)
    stage, home, stages = 0, dict[str, int](), dict[int, int]()
    for i, o in enumerate(block.operators):
        at = _stage(o, home, free, stage)
        if at is None:
            continue
        if isinstance(o.op, Border) and o.role in FORWARD_ROLES:
            stage = max(stage, at)
        stages[i] = at
        home.update((v.name, at) for v in o.writes() if v.name not in home and not o.op.updates)
    return stages


def _stage(o: Operator, home: Mapping[str, int], free: set[str], stage: int) -> int | None:
    """The stage of an operator: in the forward pass that of the last border, else that of what it reads."""
    if isinstance(o.op, Border):
        return o.op.target
    output = next(o.writes()).name
    if o.role is Role.RECOMPUTE and (original := output.rpartition("@")[0]) in home:
        return home[original]
    if o.role in FORWARD_ROLES:
        return None if output in free and not o.op.updates else stage
    stages = [home[v.name] for v in o.reads() if v.name in home]
    return min(stages) if stages else None


def holders(block: Block) -> dict[str, set[int]]:
    """The stages that read each parameter of a forward pass with borders, themselves or what follows from parameters
    alone."""
    free, home = unbound(block), homes(block)
    sources: dict[str, set[str]] = {v.name: {v.name} for v in block.parameters}
    stages: dict[str, set[int]] = {v.name: set() for v in block.parameters}
    for i, o in enumerate(block.operators):
        if o.role not in FORWARD_ROLES:
            continue
        stages_here = set[str]().union(*(sources.get(v.name, set()) for v in o.reads()))
        if i in home:
            for name in stages_here:
                stages[name].add(home[i])
        elif stages_here and all(v.name in free for v in o.writes()):
            sources.update((v.name, stages_here) for v in o.writes())
    return stages
