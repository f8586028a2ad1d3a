"""Derivation of a planning problem from a step, and translation of plans to the program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace

from ....errors import UsageError
from ....language.ir import Block, Free, Operator, Role, Value
from ....language.types import TensorType
from ....ops.shape.reshape import Transpose
from ...memory.memory_plan import aligned
from ...memory.storage import offsets_inside
from ...recomputation.recompute import RecomputePlan, Rerun
from .problem import Node, RematerialisationProblem

_FORWARD = (Role.FORWARD, Role.LOSS)


@dataclass(frozen=True)
class Derived:
    """A block's problem, and which of the block's operators each node stands for.

    A node's operators are the one that makes the bytes and the views of them.
    """

    block: Block
    problem: RematerialisationProblem
    operators: tuple[tuple[int, ...], ...]

    def for_block(self, plan: RecomputePlan) -> RecomputePlan:
        """The same plan, numbered by the block's operators; a rerun takes along those views that are read after it."""
        reruns = [
            Rerun(k, before)
            for r in plan.reruns
            for before in (self.operators[r.before][0],)
            for k in self.operators[r.operator]
            if k < before  # a view that is yet to come reads the new value anyway
        ]
        return RecomputePlan(tuple(_read_again(self.block, reruns)), plan.checkpoints, plan.notes)


def derive(
    block: Block,
    seconds: Callable[[Operator], float],
    workspace: Callable[[Operator], tuple[TensorType, ...]] = Operator.workspace,
    folded: Set[str] = frozenset(),
) -> Derived:
    """The problem of a step without frees: costs by `seconds`, bytes as the memory plan will count them.

    `workspace`: the temporary buffers of an operator.  `folded`: values that lowering leaves out, as their readers or
    writers take them transposed: such a Transpose is a view in the problem, and what else is folded takes no bytes.

    Views belong to the storage they look into, parameters and other persistent values are `fixed`.  Only forward
    operators may run again, and of those not the ones that change state, read what the forward pass changes, or make
    what stays to the end (the compiled program keeps the first copy, so that a second one would serve nobody).
    """
    if any(isinstance(op.op, Free) for op in block.operators):
        raise UsageError("planners take a step before 'liveness': frees follow from the plan")
    return _Deriving(block, seconds, workspace, folded).run()


class _Deriving:
    def __init__(
        self,
        block: Block,
        seconds: Callable[[Operator], float],
        workspace: Callable[[Operator], tuple[TensorType, ...]],
        folded: Set[str],
    ) -> None:
        self.block, self.seconds, self.workspace, self.folded = block, seconds, workspace, folded
        self.persistent = {v.name for v in block.persistent()}
        self.number: dict[str, int] = {}  # value name → number of the value whose storage it lies in
        self.sizes: list[int] = []
        self.nbytes: list[int] = []  # before they are aligned
        self.values: list[str] = []
        self.nodes: list[Node] = []
        self.members: list[list[int]] = []
        self.maker: dict[int, int] = {}
        self.seen: set[int] = set()  # values that views look into
        self.readers = Counter(name for op in block.operators for name in {v.name for v in op.reads()})
        self.only: set[str] = set()  # values without which nobody reads what their maker writes
        self.apart = 0.0  # seconds of views that their maker need not repeat
        self.backward = False
        self.last = max((i for i, op in enumerate(block.operators) if op.role in _FORWARD), default=-1)
        self.of_forward: set[int] = set()  # values that depend on an operator of the forward pass
        self.changed = {v.name for op in block.operators if op.role in _FORWARD and op.op.updates for v in op.writes()}

    def run(self) -> Derived:
        block = self.block
        inputs = [self.new(v) for v in block.inputs]
        shared: set[int] = set()
        for i, op in enumerate(block.operators):
            if self.is_view(op) or self.is_folded(op):
                self.view(op, i)
            else:
                self.node(op, i)
            if op.joins():
                shared.update(self.number[v.name] for v in op.reads() if v.name in self.number)
        shared.update(n for n, name in enumerate(self.values) if name in self.folded and n not in self.seen)
        outputs = {self.number[n] for n in block.outputs if n in self.number}
        once = {self.maker[v] for v in outputs if v in self.maker}
        nodes = [replace(n, repeatable=False) if k in once else n for k, n in enumerate(self.nodes)]
        last = max((k for k, n in enumerate(nodes) if not n.repeatable), default=-1)
        if nodes:
            nodes[last] = replace(nodes[last], cost=nodes[last].cost + self.apart)
        problem = RematerialisationProblem(
            nodes=tuple(nodes),
            sizes=tuple(self.sizes),
            values=tuple(self.values),
            inputs=tuple(inputs),
            outputs=tuple(sorted(outputs)),
            fixed=sum(v.nbytes for v in block.persistent()),
            name=block.name,
            shared=tuple(sorted(shared)),
        )
        return Derived(block, problem, tuple(map(tuple, self.members)))

    def new(self, v: Value) -> int:
        n = self.number[v.name] = len(self.sizes)
        self.sizes.append(aligned(v.nbytes))
        self.nbytes.append(v.nbytes)
        self.values.append(v.name)
        return n

    def is_view(self, op: Operator) -> bool:
        """Whether every output looks into its first input's storage."""
        base = op.inputs[0] if op.inputs else None
        return base is not None and base.name in self.number and bool(offsets_inside(op))

    def is_folded(self, op: Operator) -> bool:
        """Whether it is a Transpose of which lowering leaves one side out."""
        if not isinstance(op.op, Transpose) or op.inputs[0] is None or op.inputs[0].name not in self.number:
            return False
        return any(v.name in self.folded for v in (op.inputs[0], *op.writes()))

    def view(self, op: Operator, at: int) -> None:
        assert op.inputs[0] is not None
        source = op.inputs[0].name
        base, maker = self.number[source], self.maker.get(self.number[source])
        self.number.update((v.name, base) for v in op.writes())
        self.seen.add(base)
        if maker is not None:
            self.members[maker].append(at)
        if maker is not None and source in self.only and self.readers[source] == 1:
            self.only.update(v.name for v in op.writes())
            self.nodes[maker] = replace(self.nodes[maker], cost=self.nodes[maker].cost + self.seconds(op))
        else:
            self.apart += self.seconds(op)

    def node(self, op: Operator, at: int) -> None:
        reads = [None if v is None else self.number.get(v.name) for v in op.inputs]
        writes = [self.new(v) for v in op.writes() if v.name not in self.persistent]
        follows = any(v in self.of_forward for v in reads)
        # a seed of ones or a step's number may stand anywhere, also before all else
        self.backward |= op.role not in _FORWARD and (follows or at > self.last)
        if follows or op.role in _FORWARD:
            self.of_forward.update(writes)
        self.maker.update((v, len(self.nodes)) for v in writes)
        self.only.update({v.name for v in op.writes()} if len(writes) == 1 else ())
        self.members.append([at])
        self.nodes.append(
            Node(
                name=next(op.writes()).name,
                cost=self.seconds(op),
                reads=tuple(dict.fromkeys([v for v in reads if v is not None])),
                writes=tuple(writes),
                scratch=sum(aligned(t.nbytes) for t in self.workspace(op)),
                backward=self.backward,  # a loss may stand behind the first gradient: it belongs to that pass then
                repeatable=not self.backward
                and op.role in _FORWARD
                and not op.op.once
                and not any(v.name in self.changed for v in op.reads()),
                overwrites=tuple(self.overwritten(op, reads)),
            )
        )

    def overwritten(self, op: Operator, reads: list[int | None]) -> Iterator[int]:
        """Values whose whole place the operator's in-place output may take."""
        at = op.op.inplace_output
        out = op.outputs[at] if op.op.inplace and at < len(op.outputs) else None
        if out is None or out.name in self.persistent:
            return
        for k in op.op.inplace:
            v, x = (reads[k], op.inputs[k]) if k < len(reads) else (None, None)
            if v is not None and x is not None and x.type == out.type and reads.count(v) == 1:
                yield from [v] if self.nbytes[v] == out.nbytes else []


def _read_again(block: Block, reruns: list[Rerun]) -> list[Rerun]:
    """Without reruns of views that nothing reads from then on until they are made the next time."""
    at: dict[int, list[int]] = {}
    for r in reruns:
        at.setdefault(r.before, []).append(r.operator)
    kept: list[Rerun] = []
    wanted: set[str] = set()
    for i in range(len(block.operators) - 1, -1, -1):
        wanted.update(v.name for v in block.operators[i].reads())
        for k in reversed(at.get(i, ())):
            op = block.operators[k]
            if op.views() and not any(v.name in wanted for v in op.writes()):
                continue
            kept.append(Rerun(k, i))
            wanted.difference_update(v.name for v in op.writes())
            wanted.update(v.name for v in op.reads())
    return kept[::-1]
